"""Step sizes come from the experiment, else from its preset file, else from the shipped presets, else are defaults."""

from pathlib import Path
from typing import Any

import pytest

from dbo.platform.config import bundle, presets
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import run

OWN = "c2dfb:\n  quadratic:\n    values: {eta_in: 0.25, gamma_in: 0.75}\n    horizon: {rounds: 3}\n"


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.yaml").write_text(OWN)
    return str(tmp_path / "own.yaml")


def make(own: str | None = None, **algorithm: Any) -> Experiment:
    return Experiment(
        task={"name": "quadratic"}, algorithm={"name": "c2dfb", **algorithm}, engine={"name": "local"}, presets=own)


def test_own_file_fills_in_what_is_left_out(own: str) -> None:
    """A given value wins over the file, the file over the shipped preset, which has the rest."""
    shipped, found = make().algorithm, make(own, gamma_in=0.5).algorithm
    assert (found["eta_in"], found["gamma_in"]) == (0.25, 0.5)
    assert found["eta_out"] == shipped["eta_out"]
    assert shipped["eta_in"] != 0.25


def test_key_of_the_run_is_that_of_the_values(own: str) -> None:
    """The same values, given by hand, are the same run; other values are another one."""
    assert make(own).run_key == make(eta_in=0.25, gamma_in=0.75).run_key != make().run_key


def test_recorded_experiment_does_not_need_the_file(own: str) -> None:
    """Its values are written out, so it means the same without the file."""
    record = make(own).to_record()
    assert record["presets"] == own
    Path(own).unlink()
    assert Experiment(**record).algorithm == record["algorithm"]
    with pytest.raises(InputError, match=r"presets: .*own\.yaml"):
        make(own)


def test_path_is_relative_to_the_experiment_file(own: str, tmp_path: Path) -> None:
    """As all paths of an experiment file are."""
    (tmp_path / "experiment.yaml").write_text("task: quadratic\nalgorithm: c2dfb\npresets: own.yaml\n")
    assert Experiment.read(tmp_path / "experiment.yaml").algorithm["eta_in"] == 0.25


@pytest.mark.parametrize("text", ["c2dfb: 3\n", "c2dfb: {quadratic: {eta_in: 1}}\n", "c2dfb: {quadratic: 1}\n"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    """One line that names the key and the file."""
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(InputError, match=r"^presets: .*own\.yaml"):
        make(str(tmp_path / "own.yaml"))


def test_wrong_value_names_the_preset(tmp_path: Path) -> None:
    """The error names the parameter."""
    (tmp_path / "own.yaml").write_text("c2dfb: {quadratic: {values: {eta_in: -1.0}}}\n")
    with pytest.raises(InputError, match=r"algorithm\.eta_in: -1\.0"):
        make(str(tmp_path / "own.yaml"))


def test_file_is_copied_for_another_machine(own: str, tmp_path: Path) -> None:
    """A preset file is; another file that the key names by mistake is not."""
    (tmp_path / "job").mkdir()
    assert bundle.copy_experiment_files({"presets": own}, tmp_path / "job") == {"presets": "own.yaml"}
    assert (tmp_path / "job" / "own.yaml").read_text() == OWN
    (tmp_path / "secret").write_text("token: abc")
    with pytest.raises(InputError, match="not a preset file"):
        bundle.copy_experiment_files({"presets": str(tmp_path / "secret")}, tmp_path / "job")
    assert not (tmp_path / "job" / "secret").exists()


class Notices:
    """Collect the notices of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_start(self, experiment: Any, done: int) -> None: ...
    def on_evaluation(self, record: Any) -> None: ...
    def on_end(self, result: Any) -> None: ...

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


def read_notices(experiment: Experiment, folder: Path) -> list[str]:
    notices = Notices()
    run(experiment.model_copy(update={"rounds": 1}), folder, callback=notices)
    return [text for text in notices.texts if "step sizes" in text]


def test_run_names_where_its_step_sizes_come_from(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of one's own, or untuned defaults with the command that tunes them; shipped and given ones are silent."""
    (notice,) = read_notices(make(own), tmp_path / "own")
    assert notice.endswith("eta_in = 0.25, gamma_in = 0.75")
    assert read_notices(make(), tmp_path / "shipped") == []
    monkeypatch.setattr(presets, "find_preset", lambda algorithm, task, dataset: {})
    (notice,) = read_notices(make(), tmp_path / "none")
    assert notice == (
        "no step sizes are tuned for c2dfb on quadratic; the defaults may diverge: "
        "dbo tune task=quadratic --algorithms c2dfb"
    )
    assert read_notices(
        make(eta_in=0.1, eta_out=0.1, gamma_in=0.5, gamma_out=0.5), tmp_path / "given") == []
