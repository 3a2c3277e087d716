"""What an earlier run left: a longer one goes on from it to the same bits as in one go, and nothing is lost."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs.run_folder import CLOCKS, RunFolder, read_events, read_run
from dbo.platform.runs import runner
from dbo.platform.runs.runner import run

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


def files(folder: Path) -> dict[Path, bytes]:
    """All that a folder holds."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, in_round: int) -> Iterator[None]:
    """The run ends in the middle of this round, as by a key."""
    advance = LocalEngine.advance

    def interrupted(self: LocalEngine, round_: int) -> None:
        if round_ == in_round:
            raise KeyboardInterrupt
        advance(self, round_)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("eval_every", [1, 4])
def test_a_longer_run_goes_on_from_a_shorter_one(
    tiny: Tiny, tmp_path: Path, eval_every: int, advanced: list[int]
) -> None:
    """The same bits as the straight run, one evaluation more at the shorter one's end, which itself stays as it was."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    run(tiny(rounds=6, eval_every=eval_every), a)
    before = files(a)
    longer = run(tiny(rounds=11, eval_every=eval_every), b, start_from=a)
    assert advanced == list(range(1, 12))                  # none twice
    assert files(a) == before
    straight = run(tiny(rounds=11, eval_every=eval_every), c)
    assert (longer.summary["rounds"], longer.summary["run_key"]) == (11, straight.summary["run_key"])
    assert Experiment.read(b / "experiment.yaml").rounds == 11
    assert set(metrics(b).index) == set(metrics(c).index) | {6}
    pd.testing.assert_frame_equal(metrics(b).loc[metrics(c).index], metrics(c), check_exact=True)
    assert_same_state(b, c)
    again = run(tiny(rounds=11, eval_every=eval_every), b, start_from=a)      # the same command: nothing to do
    assert again.summary == longer.summary


@pytest.mark.parametrize("repeated", ["resume", "start_from"])
def test_death_on_the_way(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: str) -> None:
    """Before the first new checkpoint: what goes on knows the shorter run's as its own."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    run(tiny(rounds=6, checkpoint_every=6), a)
    longer = tiny(rounds=11, checkpoint_every=6)
    run(longer, c)
    with dying(monkeypatch, in_round=8):
        run(longer, b, start_from=a)
    with pytest.raises(InputError, match="an unfinished run of this experiment; --resume goes on with it"):
        run(longer, b)
    if repeated == "resume":
        run(longer, b, resume=True)
    else:
        run(longer, b, start_from=a)
    pd.testing.assert_frame_equal(metrics(b), metrics(c), check_exact=True)
    assert_same_state(b, c)


def test_a_run_that_broke_off_will_do(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advanced: list[int]
) -> None:
    """The shorter one need not have finished its own rounds."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with dying(monkeypatch, in_round=5):
        run(tiny(rounds=6, checkpoint_every=2), a)
    run(tiny(rounds=9, checkpoint_every=2), b, start_from=a)
    assert advanced == list(range(1, 10))
    run(tiny(rounds=9, checkpoint_every=2), c)
    pd.testing.assert_frame_equal(metrics(b), metrics(c), check_exact=True)
    assert_same_state(b, c)


def test_what_cannot_be_gone_on_from(tiny: Tiny, tmp_path: Path) -> None:
    """Each with its reason; nothing is written, and the shorter run stays as it was."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(tiny(rounds=6), a)
    before = files(a)

    def refused(told: str, start_from: str | Path = a, out: Path = b, **changes: Any) -> None:
        with pytest.raises(InputError, match=told):
            run(tiny(**{"rounds": 9, **changes}), out, start_from=start_from)

    refused("--from: .* holds no run", start_from=tmp_path / "nowhere")
    refused("--from: s3://b/r is not allowed; must be a folder", start_from="s3://b/r")
    refused("--from: .* holds the run of another experiment; only rounds may differ", seed=5)
    refused("rounds: 4 is not allowed; must be more than the 6", rounds=4)
    refused("rounds: 6 is not allowed; must be more than the 6", rounds=6)
    refused("rounds: .* holds 6 rounds of this experiment, not 9; choose another folder, with --from", out=a)
    refused("rounds: .* holds 6 rounds of this experiment, not 4; choose another folder$", out=a, rounds=4)
    assert files(a) == before
    shutil.rmtree(a / "checkpoints")
    refused("--from: .* has no checkpoint to go on from")
    assert not b.exists()


def test_a_run_in_use_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    """Its checkpoints come and go."""
    a = tmp_path / "a"
    run(tiny(rounds=6), a)
    held = RunFolder(a)
    held.acquire()
    try:
        with pytest.raises(InputError, match=r"--from: .* is in use by another run"):
            run(tiny(rounds=9), tmp_path / "b", start_from=a)
    finally:
        held.release()


def test_other_data_are_not_gone_on_with(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint knows the data that it was made on."""
    run(tiny(rounds=6), tmp_path / "a")
    monkeypatch.setattr("dbo.platform.runs.runner._data", lambda prepared: "another digest")
    with pytest.raises(InputError, match=r"data_dir: .* holds a run on other data"):
        run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_a_failure_before_the_first_evaluation_keeps_nobody_out(tiny: Tiny, tmp_path: Path) -> None:
    """A plugin is mended and started again into the same folder, without a word about another experiment."""
    plugin = tmp_path / "mine.py"
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"
    good = example.read_text(encoding="utf-8")
    plugin.write_text(good.replace("-> State:\n    return State(x=shard.x0", "-> State:\n    return Stat(x=shard.x0"))

    def made() -> Experiment:
        return tiny(rounds=2, plugins=[str(plugin)], algorithm={"name": "gossip_penalty"})

    with pytest.raises(NameError):
        run(made(), tmp_path / "r")
    assert (tmp_path / "r" / "summary.json").exists()
    plugin.write_text(good)
    assert run(made(), tmp_path / "r").status == "finished"


def test_another_graph_of_the_same_name_is_another_experiment(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run on one edges file is not taken for one on another file that is called the same."""
    ring, star = tmp_path / "a" / "edges.txt", tmp_path / "b" / "edges.txt"
    for file, edges in ((ring, "0 1\n1 2\n2 3\n3 0\n"), (star, "0 1\n0 2\n0 3\n")):
        file.parent.mkdir()
        file.write_text(edges)
    with dying(monkeypatch, in_round=1):
        run(tiny(topology={"name": "edges", "file": str(ring)}), tmp_path / "r")
    with pytest.raises(InputError, match="the run of another experiment"):
        run(tiny(topology={"name": "edges", "file": str(star)}), tmp_path / "r", resume=True)
    moved = ring.rename(tmp_path / "edges.txt")
    assert run(tiny(topology={"name": "edges", "file": str(moved)}), tmp_path / "r", resume=True).status == "finished"


def damage_a_line(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[0], "{not json\n", *lines[2:]]))


def change_a_number(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"packets": ', '"packets": 1', 1))


def flip_a_checkpoint(folder: Path) -> None:
    for block in folder.glob("checkpoints/*/*.safetensors"):
        data = block.read_bytes()
        block.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_a_line, r"a/metrics\.jsonl: line 2 is damaged"),
        (change_a_number, r"--from: .*a has no checkpoint to go on from: round 6: metrics\.jsonl or nodes\.jsonl"),
        (lambda folder: (folder / "nodes.jsonl").unlink(), "--from: .*a has no checkpoint to go on from: round 6"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "--from: .*a has no checkpoint to go on from: round 6"),
        (flip_a_checkpoint, "--from: .*a has no checkpoint to go on from: .*does not match its checksum"),
    ],
)
def test_a_damaged_run_is_not_gone_on_from(
    tiny: Tiny, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    """The line names what is wrong there; nothing is written, and nothing is silently started from round 0."""
    run(tiny(rounds=6), tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(InputError, match=told):
        run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_what_is_refused_at_the_start_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that cannot be reached, say: the shorter run has not been taken over yet."""
    run(tiny(rounds=6), tmp_path / "a")
    longer = tiny(rounds=9)

    def refusing(work: Any) -> Any:
        raise InputError("engine.address: nobody answers")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "start_engine", lambda settings, work: refusing(work))
        with pytest.raises(InputError, match="nobody answers"):
            run(longer, tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("cut", ["copy_records", "rewind"])
def test_death_while_taking_over(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, advanced: list[int]
) -> None:
    """The same command again takes over what is still missing, and no round is run twice."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(tiny(rounds=6), a)

    def die(self: RunFolder, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, cut, die)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(rounds=9), b, start_from=a)
    with pytest.raises(InputError, match="the run of another experiment"):
        run(tiny(rounds=9, seed=3), b)
    assert run(tiny(rounds=9), b, start_from=a).status == "finished"
    assert advanced == list(range(1, 10))
    told = [event for event in read_events(b / "events.jsonl") if event["kind"] == "continued"]
    assert (told[-1]["source"], told[-1]["after_round"]) == (str(a), 6)


def test_a_source_that_changes_meanwhile_is_not_taken_over(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records go while processes are started: the run fails instead of losing them, and can be started again."""
    run(tiny(rounds=6), tmp_path / "a")
    kept = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    copy = RunFolder.copy_records

    def late(self: RunFolder, other: RunFolder) -> None:
        other.metrics.unlink()
        copy(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "copy_records", late)
        with pytest.raises(RunError, match=r"--from: .*a has changed: metrics\.jsonl"):
            run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_bytes(kept)
    assert list(run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a").history["round"]) == list(range(10))


def test_a_start_that_failed_is_no_run_to_keep(tiny: Tiny, tmp_path: Path, advanced: list[int]) -> None:
    """--from is heard where the folder holds no more than word of a failure at the start."""
    run(tiny(rounds=6), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "experiment.yaml").write_text("{}")
    (tmp_path / "b" / "summary.json").write_text('{"status": "failed", "run_key": "another"}')
    (tmp_path / "b" / "events.jsonl").write_text('{"timestamp": 1.0, "kind": "ended", "status": "failed"}\n')
    assert run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a").status == "finished"
    assert advanced == list(range(1, 10))
    told = [event["kind"] for event in read_events(tmp_path / "b" / "events.jsonl")]
    assert told == ["continued", "started", "ended"]              # nothing is left of the failure


def test_somebody_s_own_file_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    """An experiment.yaml that no run has written is not replaced by its resolved form."""
    (tmp_path / "experiment.yaml").write_text("rounds: 6   # mine\n")
    with pytest.raises(InputError, match="choose another folder"):
        run(tiny(), tmp_path)
    assert "# mine" in (tmp_path / "experiment.yaml").read_text()


def test_a_start_that_told_nothing_keeps_nobody_out(tiny: Tiny, tmp_path: Path) -> None:
    """Death between the folder's first files and the first event."""
    run(tiny(seed=1), tmp_path / "other")
    (tmp_path / "r").mkdir()
    for file in ("network.json", "experiment.yaml"):
        shutil.copyfile(tmp_path / "other" / file, tmp_path / "r" / file)
    assert run(tiny(), tmp_path / "r").status == "finished"


def test_another_plugin_of_the_same_name_is_another_experiment(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished run is known by its key, not by what its files are called: it is not cleared for another."""
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"
    for folder, factor in (("one", ""), ("two", "2 * ")):
        (tmp_path / folder).mkdir()
        text = example.read_text(encoding="utf-8").replace("st.x - cfg.step", f"st.x - {factor}cfg.step")
        (tmp_path / folder / "mine.py").write_text(text)

    def made(folder: str) -> Experiment:
        monkeypatch.setattr("dbo.algorithms.registry._registry", {})          # another process
        monkeypatch.setattr("dbo.platform.config.plugins._loaded", {})
        monkeypatch.setattr("dbo.algorithms.registry._BUILT_IN", ())
        return tiny(plugins=[str(tmp_path / folder / "mine.py")], algorithm={"name": "gossip_penalty"})

    with dying(monkeypatch, in_round=1):
        run(made("one"), tmp_path / "r")
    before = files(tmp_path / "r")
    for resume in (False, True):
        with pytest.raises(InputError, match="the run of another experiment"):
            run(made("two"), tmp_path / "r", resume=resume)
    assert files(tmp_path / "r") == before


def test_only_what_can_be_done_is_advised(dbo: Any, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """`dbo compare` knows no --from; a run at a URL is told by its URL, and cannot be gone on from there."""
    keys = [key for key in tiny_overrides if not key.startswith(("algorithm", "rounds"))]
    compare = ("compare", *keys, "--algorithms", "sldbo", "--out", tmp_path / "c")
    assert dbo(*compare, "rounds=2").code == 0
    done = dbo(*compare, "rounds=4")
    assert done.code == 2
    assert "holds 2 rounds of this experiment, not 4; choose another folder\n" in done.err
    url = f"file://{tmp_path}/u"
    with_url = ("run", *keys, "algorithm={name: sldbo}", "--out", url, "--quiet")
    assert dbo(*with_url, "rounds=2").code == 0
    done = dbo(*with_url, "rounds=4")
    assert done.code == 2
    assert f"rounds: {url} holds 2 rounds of this experiment, not 4; choose another folder\n" in done.err
