"""The recovery policy, and the training loop driven with a dummy engine."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.engines import LocalSettings, RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.state_tree import Flat
from dbo.platform.errors import BlocksLost, InputError, RunError
from dbo.platform.network.ledger import Ledger
from dbo.platform.runs import training
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.progress import RunProgress
from dbo.platform.runs.recovery import Fail, Recover, decide
from dbo.platform.runs.result import NoCallback
from dbo.platform.runs.run_folder import RunFolder, read_events, read_metrics
from dbo.platform.runs.schema import Recovery
from dbo.platform.runs.training import TrainingLoop

Tiny = Callable[..., Experiment]
LOST = BlocksLost([1], "ActorDiedError")
RECOVERY = Recovery(3, [1], "ActorDiedError")


# ---- the policy ------------------------------------------------------------------------------------------------------


def test_lost_blocks_are_recovered_as_often_as_allowed() -> None:
    """The decision names the blocks; the last allowed recovery is still made, the next one fails the run."""
    settings = RaySettings(max_recoveries=2)
    assert decide(LOST, [], settings) == Recover((1,), "ActorDiedError")
    assert decide(LOST, [RECOVERY], settings) == Recover((1,), "ActorDiedError")
    decision = decide(LOST, [RECOVERY] * 2, settings)
    assert isinstance(decision, Fail)
    assert decision.reason.endswith("engine.max_recoveries = 2 is used up")


def test_local_engine_never_recovers() -> None:
    """Its blocks die only with this process."""
    assert isinstance(decide(LOST, [], LocalSettings()), Fail)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RunError("the cluster is full"), "the cluster is full"),
        (InputError("rounds: wrong"), "rounds: wrong"),
        (ZeroDivisionError("on purpose"), "ZeroDivisionError: on purpose"),
        (OSError("cannot write s3://me:password@b/r"), "OSError: cannot write s3://***@b/r"),
    ],
)
def test_other_errors_fail_the_run(error: Exception, reason: str) -> None:
    """Unexpected ones with their type, all of them without credentials."""
    assert decide(error, [], RaySettings()) == Fail(reason)


# ---- the loop --------------------------------------------------------------------------------------------------------


class DummyEngine:
    """Two blocks whose state is the number of rounds; loses a block in the rounds of `losses`, in this order."""

    def __init__(self, losses: list[int]) -> None:
        self.blocks = [[0], [1]]
        self.losses_left, self.round, self.replaced = list(losses), 0, 0
        self.rounds: list[int] = []

    def advance(self, first: int, last: int | None = None) -> None:
        for round_ in range(first, (last or first) + 1):
            if self.losses_left and self.losses_left[0] == round_:
                self.losses_left.pop(0)
                raise BlocksLost([1], "dummy")
            assert round_ == self.round + 1
            self.round = round_
            self.rounds.append(round_)

    def rows(self, name: str) -> Any:
        return np.full((2, 1), float(self.round)) if name in ("x", "y") else None

    def losses(self, x: Any, y: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def first_nonfinite(self) -> str | None:
        return None

    def counters(self) -> Mapping[str, int]:
        return {}

    def compute_seconds(self) -> list[float]:
        return [0.0, 0.0]

    def errors(self) -> dict[str, float]:
        return {}

    def mean_oracle(self, oracle: Any, x: Any, y: Any, v: Any = None) -> Any:
        raise NotImplementedError

    def ledger(self) -> Ledger:
        return Ledger([0, 1], [1, 1])

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        for _ in self.blocks:
            yield iter([{"round": np.array([self.round])}])

    def restore(self, blocks: list[Flat] | None) -> None:
        if self.losses_left and self.losses_left[0] == 0:       # during the recovery itself
            self.losses_left.pop(0)
            raise BlocksLost([0], "again")
        self.round = int(blocks[0]["round"][0]) if blocks else 0

    def replace_lost(self) -> None:
        self.replaced += 1

    def export_metrics(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def build_loop(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingLoop]]:
    """Return a loop of six rounds with checkpoints every two, on an engine that loses blocks."""
    def evaluate(engine: DummyEngine, *_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"upper_loss": 1.0 / (1 + engine.round)}, {"apart_x": [0.0, 0.0]}

    monkeypatch.setattr(training, "evaluate", evaluate)
    folder = RunFolder(tmp_path / "r")
    folder.acquire()

    def build(losses: list[int], max_recoveries: int = 5) -> TrainingLoop:
        experiment = tiny(engine={"name": "ray", "max_recoveries": max_recoveries}, psi_every=None)
        checkpoints = Checkpoints(folder.checkpoints, experiment.trajectory_key)
        problem: Any = None
        engine: Any = DummyEngine(losses)
        return TrainingLoop(experiment, problem, engine, folder, checkpoints, RunProgress(None), NoCallback())

    yield build
    folder.release()


@pytest.mark.parametrize(
    ("losses", "rounds"),
    [
        ([], [1, 2, 3, 4, 5, 6]),
        ([1], [1, 2, 3, 4, 5, 6]),
        ([4], [1, 2, 3, 3, 4, 5, 6]),
        ([6, 6], [1, 2, 3, 4, 5, 5, 5, 6]),
        ([4, 0], [1, 2, 3, 3, 4, 5, 6]),
    ],
    ids=["none", "before the first checkpoint", "after one", "twice in a round", "during the recovery"],
)
def test_loop_replays_from_the_newest_checkpoint(
    build_loop: Callable[..., TrainingLoop], losses: list[int], rounds: list[int]
) -> None:
    """Every round is evaluated once in the end, and every loss is recorded."""
    loop = build_loop(losses)
    outcome = loop.train(loop.restore(None))
    engine: Any = loop.engine
    assert (outcome.status, outcome.error, engine.rounds) == ("finished", None, rounds)
    assert outcome.state["x"].tolist() == [[6.0], [6.0]]
    assert [record["round"] for record in read_metrics(loop.folder.metrics)] == list(range(7))
    assert loop.progress.evaluated.last == read_metrics(loop.folder.metrics)[-1]
    assert loop.progress.evaluated.first_loss == 1.0
    kinds = [event.kind for event in read_events(loop.folder.events)]
    assert kinds.count("lost") == len(losses) == engine.replaced == len(loop.progress.recoveries)
    if losses:
        assert kinds[-1] == "recovered"
        assert loop.progress.recoveries[-1].resumed_after is not None


def test_loop_fails_when_recoveries_are_used_up(build_loop: Callable[..., TrainingLoop]) -> None:
    """One line with the setting; what was recorded is kept."""
    loop = build_loop([3, 3], max_recoveries=1)
    with pytest.raises(RunError, match=r"engine\.max_recoveries = 1 is used up"):
        loop.train(loop.restore(None))
    assert [record["round"] for record in read_metrics(loop.folder.metrics)] == [0, 1, 2]


def test_loop_continues_after_a_loss_at_the_end(
    build_loop: Callable[..., TrainingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that dies before the final state is read: the rounds since the checkpoint are replayed."""
    loop, losses = build_loop([]), [True]
    rows = DummyEngine.rows

    def lose_once(engine: DummyEngine, name: str) -> Any:
        if losses:
            losses.pop()
            raise BlocksLost([0], "late")
        return rows(engine, name)

    monkeypatch.setattr(DummyEngine, "rows", lose_once)
    assert loop.train(loop.restore(None)).status == "finished"
    assert len(loop.progress.recoveries) == 1


@pytest.mark.parametrize("where", ["state", "metric"])
def test_number_that_is_not_finite_ends_training(
    build_loop: Callable[..., TrainingLoop], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As diverged, with the round and the name; the checkpoint before it is kept."""
    loop = build_loop([])
    if where == "state":
        monkeypatch.setattr(DummyEngine, "first_nonfinite", lambda self: "x" if self.round == 3 else None)
    else:
        monkeypatch.setattr(
            training, "evaluate", lambda engine, *_: ({"upper_loss": np.inf if engine.round == 3 else 1.0}, {}))
    outcome = loop.train(loop.restore(None))
    assert (outcome.status, outcome.state) == ("diverged", {})
    assert outcome.error == f"round 3: {'x' if where == 'state' else 'upper_loss'} is not finite"
    checkpoint = loop.checkpoints.load_latest()
    assert checkpoint is not None
    assert checkpoint.round == 2


def test_checkpoint_stores_progress_and_environment(build_loop: Callable[..., TrainingLoop]) -> None:
    """Clocks, packing, recoveries, digests and the environment, as plain JSON."""
    loop = build_loop([3])
    loop.train(loop.restore(None))
    checkpoint = loop.checkpoints.load_latest()
    assert checkpoint is not None
    stored = checkpoint.run
    assert json.loads(json.dumps(stored)) == stored
    assert set(stored) == {
        "training", "evaluating", "started", "recoveries", "blocks", "records", "sizes", "evaluated", "data",
        "computing",
        "environment"}
    assert stored["blocks"] == [[0], [1]]
    assert stored["records"] == loop.folder.digest_up_to(6)
    progress = RunProgress(None)
    progress.restore(stored, [])
    assert progress.evaluated == loop.progress.evaluated
    assert progress.recoveries == loop.progress.recoveries
