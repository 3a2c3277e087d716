"""What importing the configuration costs: its leaves need no array library, and no part of it needs an engine."""

import subprocess
import sys
from functools import cache

import pytest

LEAVES = ("engines", "overrides", "paths", "redact", "tracking_uri", "validation", "yaml_io")


@cache
def imported(*modules: str) -> set[str]:
    """Return the modules that a new process has loaded after importing these."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_leaves_import_no_array_library() -> None:
    """Readers of recorded runs use them, and start in a moment."""
    assert not {"numpy", "scipy", "torch", "networkx"} & imported(*(f"dbo.platform.config.{leaf}" for leaf in LEAVES))


@pytest.mark.parametrize("package", ["dbo.platform.engine", "dbo.platform.runs", "ray", "mlflow", "torch"])
def test_an_experiment_imports_no_engine(package: str) -> None:
    """Validation needs neither a cluster nor a tracking server."""
    assert not [name for name in imported("dbo.platform.config.experiment") if f"{name}.".startswith(f"{package}.")]


def test_an_experiment_imports_the_registries() -> None:
    """Control: the check above can see imports."""
    assert {"numpy", "dbo.algorithms.registry"} <= imported("dbo.platform.config.experiment")
