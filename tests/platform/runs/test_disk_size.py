"""Estimates of the disk space of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.runs import disk_size
from dbo.platform.runs.disk_size import describe_large_run, estimate_disk, format_bytes
from dbo.platform.runs.preparation import prepare
from dbo.platform.runs.runner import run

Tiny = Callable[..., Any]


def measure(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("algorithm", ["c2dfb", "mdbo", "soba", "fednest"])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_estimate_is_near_the_size_of_the_folder(tiny: Tiny, tmp_path: Path, algorithm: str, keep: int) -> None:
    """Within a fifth, apart from 20 kB of small files; on a graph, on one machine and in a star."""
    experiment = tiny(
        algorithm={"name": algorithm, "eta_in": 0.01} if algorithm == "c2dfb" else {"name": algorithm},
        task={"name": "quadratic", "dim_x": 300, "dim_y": 400}, rounds=2,
        checkpoint_every=1, keep_checkpoints=keep, psi_every=None,
    )
    estimate = estimate_disk(experiment, prepare(experiment))
    result = run(experiment, tmp_path / "r")
    assert result.status == "finished"
    found = measure(tmp_path / "r")
    assert abs(estimate.finished - found) < 0.2 * found + 20_000


def test_a_small_run_has_no_notice(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And builds no state for that. A large one states how much it takes, and whether the space is missing."""
    experiment = tiny()
    prepared = prepare(experiment)
    assert describe_large_run(experiment, prepared, tmp_path) is None
    monkeypatch.setattr(disk_size, "LARGE", 1000)
    found = describe_large_run(experiment, prepared, tmp_path / "not" / "there")
    assert found is not None
    assert found.startswith("disk: about 0.0 MB while it runs")
    assert "are free" not in found
    monkeypatch.setattr(disk_size.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10})())
    assert "only 0.0 MB are free" in str(describe_large_run(experiment, prepared, tmp_path))


def test_20_newsgroups_is_large(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million entries and ten nodes are announced, whatever the method."""
    sizes = type("Problem", (), {"nodes": 10, "dim_x": 101_631, "dim_y": 2_032_620})()
    calls: list[Any] = []
    monkeypatch.setattr(disk_size, "estimate_disk", lambda *given: calls.append(given) or disk_size.DiskSize(1, 1, 1))
    describe_large_run(tiny(rounds=3), type("Prepared", (), {"problem": sizes})(), tmp_path)
    assert calls


def test_sizes_are_readable() -> None:
    assert format_bytes(1_234_000) == "1.2 MB"
    assert format_bytes(1_322_095_084) == "1.3 GB"
