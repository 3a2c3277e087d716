"""Small real runs for the tests of the dashboards, recorded once per session."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.runner import run

TINY: dict[str, Any] = {"nodes": 4, "rounds": 8, "engine": {"name": "local"}}
# Steps of their own: a new search of the presets must not change what these runs show.
STEPS: dict[str, dict[str, Any]] = {
    "c2dfb": {"name": "c2dfb", "eta_in": 0.2, "eta_out": 0.488, "gamma_in": 0.552, "gamma_out": 0.136},
    "mdbo": {
        "name": "mdbo", "eta": 0.6, "beta_x": 1.3, "beta_y": 4.5, "alpha_x": 0.3, "alpha_y": 0.3, "lipschitz": 53.0,
    },
}
QUADRATIC: dict[str, Any] = {
    **TINY, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3},
}


def write_group(folder: Path, members: list[str], **changes: Any) -> None:
    (folder / "group.json").write_text(json.dumps({
        "kind": "sweep", "name": folder.name, "key": "0" * 64, "command": f"dbo sweep {folder.name}",
        "started": "2026-01-01T00:00:00+00:00", "status": "finished", "target": "node_accuracy_mean=0.6",
        "members": members, "axes": {}, "tracking": {"uri": None, "experiment": "dbo"}, **changes,
    }))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """compare/: two algorithms, two seeds, two settings; sweep/: c2dfb with three K; quadratic/, diverged/: one run."""
    root = tmp_path_factory.mktemp("recorded")
    members = []
    for algorithm in ("c2dfb", "mdbo"):
        for seed in (0, 1):
            for topology, partition in (("ring", {"name": "iid"}), ("complete", {"name": "by_class", "h": 0.8})):
                members.append(f"{algorithm}-{seed}-{topology}")
                run(Experiment(**TINY, seed=seed, name="small", algorithm=STEPS[algorithm],
                               topology={"name": topology}, partition=partition), root / "compare" / members[-1])
    write_group(root / "compare", members, kind="compare", command="dbo compare --algorithms c2dfb,mdbo")
    cells = [f"cells/k{k}" for k in (1, 3, 9)]
    for cell, k in zip(cells, (1, 3, 9), strict=True):
        run(Experiment(**TINY, algorithm={**STEPS["c2dfb"], "inner_steps": k}), root / "sweep" / cell)
    write_group(
        root / "sweep", cells, axes={"algorithm.inner_steps": [1, 3, 9]}, claim="A few <b>steps</b> are enough."
    )
    run(Experiment(**QUADRATIC), root / "quadratic")
    diverging = {**STEPS["c2dfb"], "eta_in": 1e4}
    run(Experiment(**{**TINY, "name": "<script>window.hacked=1</script>", "algorithm": diverging}), root / "diverged")
    return root


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies one of these folders, to be damaged."""

    def copy_folder(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(recorded / name, target)
        return target

    return copy_folder
