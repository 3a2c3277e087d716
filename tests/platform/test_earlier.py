"""A run goes on to more rounds than its folder has: the same bits as in one go, and nothing is lost on the way."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.local import LocalEngine
from dbo.platform.records import CLOCKS, read_run
from dbo.platform.run import run

Tiny = Callable[..., Experiment]


def metrics(folder: Path) -> pd.DataFrame:
    """What was measured, by round, without clocks."""
    return read_run(folder).history.drop(columns=list(CLOCKS)).set_index("round")


def assert_same_state(first: Path, second: Path) -> None:
    """To the last byte."""
    assert (first / "state.safetensors").read_bytes() == (second / "state.safetensors").read_bytes()


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that are run, one after the other."""
    rounds: list[int] = []
    advance = LocalEngine.advance

    def noting(self: LocalEngine, round_: int) -> None:
        rounds.append(round_)
        advance(self, round_)

    monkeypatch.setattr(LocalEngine, "advance", noting)
    return rounds


@pytest.mark.parametrize("eval_every", [1, 4])
def test_a_longer_run_goes_on_from_a_shorter_one(
    tiny: Tiny, tmp_path: Path, eval_every: int, advanced: list[int]
) -> None:
    """The same bits as the straight run; the end of the shorter one stays as one evaluation more."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(tiny(rounds=6, eval_every=eval_every), a)
    longer = run(tiny(rounds=11, eval_every=eval_every), a, resume=True)
    assert advanced == list(range(1, 12))                  # none twice
    straight = run(tiny(rounds=11, eval_every=eval_every), b)
    assert (longer.summary["rounds"], longer.summary["run_key"]) == (11, straight.summary["run_key"])
    assert Experiment.read(a / "experiment.yaml").rounds == 11
    assert set(metrics(a).index) == set(metrics(b).index) | {6}
    pd.testing.assert_frame_equal(metrics(a).loc[metrics(b).index], metrics(b), check_exact=True)
    assert_same_state(a, b)


def test_death_while_a_run_is_lengthened(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first new checkpoint: what goes on knows the shorter run's as its own."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(tiny(rounds=6, checkpoint_every=6), a)
    run(tiny(rounds=11, checkpoint_every=6), b)
    with monkeypatch.context() as patch:
        advance = LocalEngine.advance

        def dying(self: LocalEngine, round_: int) -> None:
            if round_ == 8:
                raise KeyboardInterrupt
            advance(self, round_)

        patch.setattr(LocalEngine, "advance", dying)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(rounds=11, checkpoint_every=6), a, resume=True)
    assert not (a / "state.safetensors").exists()          # it would be that of an earlier round
    with pytest.raises(InputError, match=r"rounds: .* 11 rounds of this experiment, not 6; choose another folder"):
        run(tiny(rounds=6, checkpoint_every=6), a, resume=True)
    run(tiny(rounds=11, checkpoint_every=6), a, resume=True)
    pd.testing.assert_frame_equal(metrics(a), metrics(b), check_exact=True)
    assert_same_state(a, b)


def test_a_run_is_lengthened_only_if_asked_and_possible(tiny: Tiny, tmp_path: Path) -> None:
    """Not without --resume, not if something else differs, not without a checkpoint; the folder stays as it was."""
    folder = tmp_path / "a"
    run(tiny(rounds=6), folder)
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with pytest.raises(InputError, match=r"rounds: .* 6 rounds of this experiment, not 9; --resume goes on with it"):
        run(tiny(rounds=9), folder)
    with pytest.raises(InputError, match=r"rounds: .* not 4; choose another folder"):
        run(tiny(rounds=4), folder, resume=True)
    with pytest.raises(InputError, match="the run of another experiment"):
        run(tiny(rounds=9, seed=5), folder, resume=True)
    assert before == {path: path.read_bytes() for path in before}
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint to go on from"):
        run(tiny(rounds=9), folder, resume=True)
    kept = {path: data for path, data in before.items() if "checkpoints" not in path.parts}
    assert kept == {path: path.read_bytes() for path in kept}


def test_a_run_that_broke_off_can_be_lengthened_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advanced: list[int]
) -> None:
    """It need not have finished its own rounds."""
    a, b = tmp_path / "a", tmp_path / "b"
    with monkeypatch.context() as patch:
        noting = LocalEngine.advance

        def dying(self: LocalEngine, round_: int) -> None:
            if round_ == 5:
                raise KeyboardInterrupt
            noting(self, round_)

        patch.setattr(LocalEngine, "advance", dying)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(rounds=6, checkpoint_every=2), a)
    run(tiny(rounds=9, checkpoint_every=2), a, resume=True)
    assert advanced == list(range(1, 10))
    run(tiny(rounds=9, checkpoint_every=2), b)
    pd.testing.assert_frame_equal(metrics(a), metrics(b), check_exact=True)
    assert np.array_equal(read_run(a).state["x"], read_run(b).state["x"])
