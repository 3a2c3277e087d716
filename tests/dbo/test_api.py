"""The public API: what `import dbo` offers, and that it is the same as the commands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dbo
from dbo import version
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import write_group
from dbo.platform.runs.schema import Group

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"nodes": 4, "rounds": 3, "engine": "local", "tracking": {"uri": "off"}}


def test_every_public_name_exists() -> None:
    """`dbo.__all__` names nothing that cannot be imported."""
    assert [name for name in dbo.__all__ if getattr(dbo, name, None) is None] == []
    assert set(dbo.__all__) <= set(dir(dbo))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The message lists what there is."""
    with pytest.raises(AttributeError, match=r"has no attribute 'mixx'; it has .*mix"):
        dbo.mixx    # noqa: B018


@pytest.mark.parametrize("module", ["numpy", "pandas", "ray", "torch", "mlflow", "pydantic", "sklearn", "scipy"])
def test_importing_dbo_imports_nothing_heavy(module: str) -> None:
    """The façade is lazy: `import dbo` loads no library."""
    code = f"import dbo, sys; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("inside", [True, False], ids=["repo root", "elsewhere"])
def test_import_works_from_anywhere(inside: bool, tmp_path: Path) -> None:
    """With the repo root as working directory and without: the same packages, and the standard library's platform."""
    code = (
        "import dbo, platform; platform.system(); import dbo.platform.cli.main, dbo.algorithms.registry;"
        "import dbo.tasks.registry;"
        "from dbo.platform.experiment import Experiment; from dbo.platform.run import run; print(dbo.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT if inside else tmp_path, capture_output=True, text=True, timeout=120,
        check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(ROOT)


def test_compatibility_imports_are_the_same_objects() -> None:
    """Older import paths keep working."""
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.experiment import Experiment as OldExperiment
    from dbo.platform.run import run as old_run
    from dbo.platform.runs.runner import run

    assert OldExperiment is Experiment is dbo.Experiment
    assert old_run is run


def test_run_takes_names_of_components(tmp_path: Path) -> None:
    """A section may be given by its name, as `dbo run` takes it with .name."""
    result = dbo.run(algorithm="mdbo", topology="complete", **SMALL, out=tmp_path / "a")
    assert result.status == "finished"
    assert (result.experiment.algorithm["name"], result.experiment.topology["name"]) == ("mdbo", "complete")
    assert result.state["x"].shape[0] == 4
    assert len(result.history) == 4


def test_run_takes_an_experiment_a_file_and_a_mapping(tmp_path: Path) -> None:
    """All three describe the same run, and keywords override each."""
    experiment = dbo.Experiment(**{**SMALL, "engine": {"name": "local"}})
    file = tmp_path / "e.yaml"
    file.write_text(experiment.to_yaml())
    keys = {dbo.run(base, out=tmp_path / str(i)).experiment.run_key
            for i, base in enumerate((experiment, file, dict(SMALL)))}
    assert keys == {experiment.run_key}
    assert dbo.run(file, rounds=1, algorithm={"lam": 20.0}, out=tmp_path / "b").experiment.algorithm["lam"] == 20.0
    assert dbo.run(file, rounds=1, algorithm="mdbo", out=tmp_path / "c").experiment.algorithm["name"] == "mdbo"


def test_wrong_input_is_one_line(tmp_path: Path) -> None:
    """The errors are those of the command line."""
    with pytest.raises(InputError, match=r"topology.name: unknown value 'rong', did you mean 'ring'"):
        dbo.run(topology="rong", **SMALL, out=tmp_path / "a")
    with pytest.raises(InputError, match="holds no run"):
        dbo.load(tmp_path)


def test_load_a_run(tmp_path: Path) -> None:
    """A row per evaluation, and one for the run."""
    dbo.run(**SMALL, out=tmp_path / "a")
    loaded = dbo.load(tmp_path / "a")
    assert (loaded.kind, len(loaded.summary), len(loaded.history)) == ("run", 1, 4)
    assert list(loaded.history.columns[:3]) == ["run", "algorithm", "seed"]
    assert loaded.summary.iloc[0]["status"] == "finished"
    assert loaded.summary.iloc[0]["test_accuracy"] == loaded.history.iloc[-1]["test_accuracy"]


def test_load_a_run_that_has_not_ended(tmp_path: Path) -> None:
    """What is there is read."""
    dbo.run(**SMALL, out=tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    assert dbo.load(tmp_path / "a").summary.iloc[0]["status"] == "unfinished"


def test_load_a_foreign_comparison(tmp_path: Path) -> None:
    """An experiment without the keys of ours, an axis whose values are lists, and a table that is none."""
    dbo.compare(["c2dfb", "mdbo"], **SMALL, target="test_accuracy=0.2", out=tmp_path / "c")
    group = json.loads((tmp_path / "c" / "group.json").read_text())
    first = tmp_path / "c" / group["members"][0]
    (first / "manifest.json").unlink()
    (first / "experiment.yaml").write_text("self: [1, 2, 3]\n")
    (tmp_path / "c" / "group.json").write_text(json.dumps({**group, "axes": {"self": [1]}}))
    loaded = dbo.load(tmp_path / "c")
    assert loaded.summary["algorithm"].isna().tolist() == [True, False]
    assert loaded.history["self"].iloc[0] == [1, 2, 3]
    (tmp_path / "c" / "compare.csv").write_bytes(b'\xff"')
    with pytest.raises(InputError, match=r"compare\.csv: cannot be read: "):
        dbo.load(tmp_path / "c")


def test_compare_and_load_a_comparison(tmp_path: Path) -> None:
    """All runs in one frame, and the table of costs."""
    loaded = dbo.compare(["c2dfb", "mdbo"], **SMALL, target="test_accuracy=0.2", out=tmp_path / "c")
    assert loaded.kind == "compare"
    assert set(loaded.history["algorithm"]) == {"c2dfb", "mdbo"}
    assert loaded.table is not None
    assert list(loaded.table["algorithm"]) == ["c2dfb", "mdbo"]
    again = dbo.load(tmp_path / "c")
    assert again.history.equals(loaded.history)


@pytest.mark.ray
def test_sweep_and_load_a_sweep(tmp_path: Path, ray: Any) -> None:
    """The axis is a column; with several seeds there are paired differences."""
    loaded = dbo.sweep(
        "sensitivity-k", **{**SMALL, "rounds": 1}, axes={"algorithm.inner_steps": [1, 2], "seed": [0, 1]},
        out=tmp_path / "s")
    assert loaded.kind == "sweep"
    assert sorted(loaded.summary["algorithm.inner_steps"]) == [1, 1, 2, 2]
    assert loaded.table is not None
    assert loaded.pairs is not None
    assert set(loaded.pairs["axis"]) == {"algorithm.inner_steps"}
    assert set(loaded.pairs[["one", "other", "seeds"]].itertuples(index=False, name=None)) == {(2, 1, 2)}


def test_tables_of_an_older_sweep_have_todays_names(tmp_path: Path) -> None:
    """`hypergradient_norm` is `direction_norm`, as in the history of its cells; a sweep without pairs has none."""
    dbo.run(**{**SMALL, "rounds": 1}, out=tmp_path / "cells" / "a")
    write_group(tmp_path, Group("sweep", "s", "k", "dbo sweep", "2025", "finished", "direction_norm=0.5", ("cells/a",),
                                {"algorithm.inner_steps": [15], "seed": [0]}))
    (tmp_path / "summary.csv").write_text(
        "algorithm.inner_steps,target,hypergradient_norm_mean,hypergradient_norm_low,hypergradient_norm_high\n"
        "15,hypergradient_norm=0.5,0.3,0.2,0.4\n")
    loaded = dbo.load(tmp_path)
    assert loaded.table is not None
    assert list(loaded.table)[2:] == ["direction_norm_mean", "direction_norm_low", "direction_norm_high"]
    assert list(loaded.table["target"]) == ["direction_norm=0.5"]
    assert loaded.pairs is None


def test_another_task_gets_its_own_preset(tmp_path: Path) -> None:
    """Values that came from a preset are not given values: they go with the task that they were tuned for."""
    digits = dbo.Experiment(**{**SMALL, "algorithm": {"lam": 20.0}})
    other = dbo.run(digits, task="quadratic", rounds=1, out=tmp_path / "a").experiment
    expected = dbo.Experiment(**{**SMALL, "task": "quadratic", "algorithm": {"lam": 20.0}, "rounds": 1})
    assert other.algorithm == expected.algorithm
    assert other.algorithm["eta_in"] != digits.algorithm["eta_in"]


@pytest.mark.parametrize(("call", "message"), [
    (lambda out: dbo.run(5, out=out), "experiment: 5 is not allowed"),    # type: ignore[arg-type]
    (lambda out: dbo.sweep("sensitivity-k", axes=[1, 2], out=out), "axes: .* is not allowed"),
    (lambda out: dbo.compare(["mdbo"], rounds=object(), out=out), "is not allowed; must be a number"),
])
def test_wrong_arguments_are_input_errors(call: Any, message: str, tmp_path: Path) -> None:
    """As on the command line, one line."""
    with pytest.raises(InputError, match=message):
        call(tmp_path / "a")


def test_numpy_numbers_and_paths_are_values(tmp_path: Path) -> None:
    """What a notebook has at hand."""
    loaded = dbo.compare(["mdbo"], **{**SMALL, "rounds": np.int64(2)}, data_dir=tmp_path, out=tmp_path / "c")
    assert loaded.summary.iloc[0]["round"] == 2


def test_version_is_found_without_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a checkout that is not installed, such as the working directory of a Ray job; never an exception."""
    def fail(name: str) -> str:
        raise version.PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", fail)
    assert f'version = "{version.find_version.__wrapped__()}"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(version, "_PROJECT", tmp_path / "pyproject.toml")
    assert version.find_version.__wrapped__() == "unknown"
