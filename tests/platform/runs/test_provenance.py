"""Where a run comes from, and the environment that its bits depend on."""

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

from dbo.platform.runs import provenance


def test_environment_names_what_decides_the_bits() -> None:
    """Python, the numeric libraries, BLAS, processor and machine; no value is empty."""
    found = provenance.collect_environment()
    assert {"python", "numpy", "scipy", "blas", "processor", "machine"} <= set(found)
    assert found["numpy"] == importlib.metadata.version("numpy")
    assert all(found.values())
    assert provenance.collect_environment() == found


def test_environment_imports_no_library_but_numpy() -> None:
    """Versions come from the packages' metadata: torch takes seconds to import."""
    code = "import sys; from dbo.platform.runs.provenance import collect_environment; collect_environment(); " \
           "print([name for name in ('torch', 'numba', 'scipy') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is optional."""
    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(provenance, "version", version)
    assert "torch" not in provenance.collect_environment()
    assert provenance.collect_environment()["numba"] == "1.0"


@pytest.mark.parametrize(
    ("recorded", "current", "expected"),
    [
        ({"numpy": "2.4.6"}, {"numpy": "2.4.6"}, ""),
        ({"numpy": "2.4.6", "python": "3"}, {"numpy": "2.5.0", "python": "3"}, "numpy 2.4.6 → 2.5.0"),
        ({"numpy": "1"}, {"numpy": "2", "torch": "2.9"}, "numpy 1 → 2; torch none → 2.9"),
        ({"numba": "0.6"}, {}, "numba 0.6 → none"),
    ],
)
def test_differences_are_named(recorded: dict[str, str], current: dict[str, str], expected: str) -> None:
    """Each with its old and new value."""
    assert provenance.describe_differences(recorded, current) == expected


def test_submission_is_read_from_ray_s_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run outside of a job has none."""
    monkeypatch.delenv(provenance._JOB, raising=False)
    assert "submission" not in provenance.collect_provenance()
    monkeypatch.setenv(provenance._JOB, '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    found: dict[str, Any] = provenance.collect_provenance()
    assert found["submission"] == "raysubmit_1"
