"""Resume and extend runs: the results are bit-identical to a run without interruption, and nothing is lost."""

import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dbo.algorithms.registry import ALGORITHMS
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError, RunError
from dbo.platform.runs import progress, runner, schema
from dbo.platform.runs import resume as resume_module
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.preparation import Prepared
from dbo.platform.runs.provenance import collect_environment
from dbo.platform.runs.result import NoCallback
from dbo.platform.runs.run_folder import RunFolder, read_events, read_run
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS, Event

Tiny = Callable[..., Experiment]


def metrics(folder: Path) -> pd.DataFrame:
    """Return the metrics of a run by round, without clocks."""
    return read_run(folder).history.drop(columns=[*CLOCKS], errors="ignore").set_index("round")


def assert_same_state(first: Path, second: Path) -> None:
    """Compare final states byte by byte."""
    assert (first / "state.safetensors").read_bytes() == (second / "state.safetensors").read_bytes()


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the rounds that engines run."""
    rounds: list[int] = []
    advance = LocalEngine.run_round

    def recording(self: LocalEngine, round_: int) -> None:
        rounds.append(round_)
        advance(self, round_)

    monkeypatch.setattr(LocalEngine, "run_round", recording)
    return rounds


def files(folder: Path) -> dict[Path, bytes]:
    """Return all files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def interrupt(monkeypatch: pytest.MonkeyPatch, in_round: int) -> Iterator[None]:
    """Interrupt the run in this round, as Ctrl-C does."""
    advance = LocalEngine.run_round

    def interrupted(self: LocalEngine, round_: int) -> None:
        if round_ == in_round:
            raise KeyboardInterrupt
        advance(self, round_)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("eval_every", [1, 4])
def test_extended_run_equals_a_straight_run(
    tiny: Tiny, tmp_path: Path, eval_every: int, advanced: list[int]
) -> None:
    """Same bits, one evaluation more at the end of the shorter run, whose folder stays unchanged."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    run(tiny(rounds=6, eval_every=eval_every, psi_every=1), a)
    before = files(a)
    longer = run(tiny(rounds=11, eval_every=eval_every, psi_every=1), b, start_from=a)
    assert advanced == list(range(1, 12))                  # no round runs twice
    assert files(a) == before
    straight = run(tiny(rounds=11, eval_every=eval_every, psi_every=1), c)
    assert (longer.summary["rounds"], longer.summary["run_key"]) == (11, straight.summary["run_key"])
    assert Experiment.read(b / "experiment.yaml").rounds == 11
    assert set(metrics(b).index) == set(metrics(c).index) | {6}
    pd.testing.assert_frame_equal(metrics(b).loc[metrics(c).index], metrics(c), check_exact=True)
    assert_same_state(b, c)
    again = run(tiny(rounds=11, eval_every=eval_every, psi_every=1), b, start_from=a)      # repeat the command
    assert again.summary == longer.summary


@pytest.mark.parametrize("repeated", ["resume", "start_from"])
def test_extended_run_resumes_after_an_interruption(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: str
) -> None:
    """Interrupted before its first own checkpoint, it resumes from the copied one."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    run(tiny(rounds=6, checkpoint_every=6, psi_every=1), a)
    longer = tiny(rounds=11, checkpoint_every=6, psi_every=1)
    run(longer, c)
    with interrupt(monkeypatch, in_round=8):
        run(longer, b, start_from=a)
    with pytest.raises(InputError, match="an unfinished run of this experiment; --resume continues it"):
        run(longer, b)
    if repeated == "resume":
        run(longer, b, resume=True)
    else:
        run(longer, b, start_from=a)
    pd.testing.assert_frame_equal(metrics(b), metrics(c), check_exact=True)
    assert_same_state(b, c)


def test_interrupted_run_can_be_extended(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advanced: list[int]
) -> None:
    """The shorter run need not have finished its own rounds."""
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with interrupt(monkeypatch, in_round=5):
        run(tiny(rounds=6, checkpoint_every=2), a)
    run(tiny(rounds=9, checkpoint_every=2), b, start_from=a)
    assert advanced == list(range(1, 10))
    run(tiny(rounds=9, checkpoint_every=2), c)
    pd.testing.assert_frame_equal(metrics(b), metrics(c), check_exact=True)
    assert_same_state(b, c)


def test_extension_is_refused_with_a_reason(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing is written, and the shorter run stays unchanged."""
    a, b = tmp_path / "a", tmp_path / "b"
    run(tiny(rounds=6), a)
    before = files(a)

    def refused(message: str, start_from: str | Path = a, out: Path = b, **changes: Any) -> None:
        with pytest.raises(InputError, match=message):
            run(tiny(**{"rounds": 9, **changes}), out, start_from=start_from)

    refused("--from: .* holds no run", start_from=tmp_path / "nowhere")
    refused("--from: s3://b/r is not allowed; must be a folder", start_from="s3://b/r")
    refused(
        "--from: .* holds the run of another experiment .seed is 0 there, 5 here.; only rounds and until may differ",
        seed=5)
    refused("rounds: 4 is not allowed; must be more than the 6", rounds=4)
    refused("rounds: 6 is not allowed; must be more than the 6", rounds=6)
    refused("rounds: .* holds 6 rounds of this experiment, not 9; choose another folder, with --from", out=a)
    refused("rounds: .* holds 6 rounds of this experiment, not 4; choose another folder$", out=a, rounds=4)
    assert files(a) == before
    shutil.rmtree(a / "checkpoints")
    refused("--from: .* has no checkpoint to resume from")
    assert not b.exists()


def test_locked_run_cannot_be_extended(tiny: Tiny, tmp_path: Path) -> None:
    """A running run replaces its checkpoints."""
    a = tmp_path / "a"
    run(tiny(rounds=6), a)
    locked = RunFolder(a)
    locked.acquire()
    try:
        with pytest.raises(InputError, match=r"--from: .* is in use by another run"):
            run(tiny(rounds=9), tmp_path / "b", start_from=a)
    finally:
        locked.release()


def test_run_on_other_data_is_not_extended(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint stores the digest of its data."""
    run(tiny(rounds=6), tmp_path / "a")
    monkeypatch.setattr(Prepared, "data_digest", "another digest")
    with pytest.raises(InputError, match=r"data_dir: .* holds a run on other data"):
        run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_folder_of_a_run_that_failed_at_the_start_is_reused(tiny: Tiny, tmp_path: Path) -> None:
    """A plugin that raised is fixed and run again into the same folder, though the run key differs."""
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
    """An unfinished run on one edges file is not resumed on another file of the same name."""
    ring, star = tmp_path / "a" / "edges.txt", tmp_path / "b" / "edges.txt"
    for file, edges in ((ring, "0 1\n1 2\n2 3\n3 0\n"), (star, "0 1\n0 2\n0 3\n")):
        file.parent.mkdir()
        file.write_text(edges)
    with interrupt(monkeypatch, in_round=1):
        run(tiny(topology={"name": "edges", "file": str(ring)}), tmp_path / "r")
    with pytest.raises(InputError, match="the run of another experiment"):
        run(tiny(topology={"name": "edges", "file": str(star)}), tmp_path / "r", resume=True)
    renamed = ring.rename(tmp_path / "edges.txt")
    assert run(tiny(topology={"name": "edges", "file": str(renamed)}), tmp_path / "r", resume=True).status == "finished"


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
    ("damage", "message"),
    [
        (damage_a_line, r"a/metrics\.jsonl: line 2 is damaged"),
        (change_a_number, r"--from: .*a has no checkpoint to resume from: round 6: metrics\.jsonl or nodes\.jsonl"),
        (lambda folder: (folder / "nodes.jsonl").unlink(), "--from: .*a has no checkpoint to resume from: round 6"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "--from: .*a has no checkpoint to resume from: round 6"),
        (flip_a_checkpoint, "--from: .*a has no checkpoint to resume from: .*does not match its checksum"),
    ],
)
def test_damaged_run_is_not_extended(
    tiny: Tiny, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    """The error names the damage; nothing is written, and no run starts silently from round 0."""
    run(tiny(rounds=6), tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(InputError, match=message):
        run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_engine_that_refuses_to_start_leaves_no_folder(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster that cannot be reached: the shorter run has not been copied yet."""
    run(tiny(rounds=6), tmp_path / "a")
    longer = tiny(rounds=9)

    def refuse(settings: Any, spec: Any) -> Any:
        raise InputError("engine.address: cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "start_engine", refuse)
        with pytest.raises(InputError, match="cannot be reached"):
            run(longer, tmp_path / "b", start_from=tmp_path / "a")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("cut", ["copy_records", "rollback"])
def test_interrupted_copy_is_repeated(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, advanced: list[int]
) -> None:
    """The same command copies what is missing, and no round runs twice."""
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
    events = [event for event in read_events(b / "events.jsonl") if event.kind == "continued"]
    assert (events[-1].source, events[-1].after_round) == (str(a), 6)


def test_copied_records_are_on_the_disk_before_their_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a checkpoint without its evaluations, or without the event of its source, would be useless."""
    run(tiny(rounds=6), tmp_path / "a")
    synced: dict[int, int] = {}                 # inode: size at its last flush
    at_save: list[dict[str, bool]] = []
    flush, save = os.fsync, Checkpoints.save

    def note(handle: int) -> None:
        flush(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def look(self: Checkpoints, *arguments: Any) -> Any:
        files = [tmp_path / "b" / name for name in ("metrics.jsonl", "nodes.jsonl", "events.jsonl")]
        at_save.append({path.name: synced.get(path.stat().st_ino) == path.stat().st_size for path in files})
        return save(self, *arguments)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Checkpoints, "save", look)
    run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a")
    assert at_save[0] == {"metrics.jsonl": True, "nodes.jsonl": True, "events.jsonl": True}


def test_source_that_changes_during_the_copy_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records disappear while the engine starts: the run fails instead of losing them, and can be repeated."""
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


def test_extension_replaces_a_run_that_failed_at_the_start(
    tiny: Tiny, tmp_path: Path, advanced: list[int]
) -> None:
    """--from works in a folder that holds nothing but the record of a failed start."""
    run(tiny(rounds=6), tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "experiment.yaml").write_text("{}")
    (tmp_path / "b" / "summary.json").write_text('{"status": "failed", "run_key": "another"}')
    (tmp_path / "b" / "events.jsonl").write_text('{"timestamp": 1.0, "kind": "ended", "status": "failed"}\n')
    assert run(tiny(rounds=9), tmp_path / "b", start_from=tmp_path / "a").status == "finished"
    assert advanced == list(range(1, 10))
    kinds = [event.kind for event in read_events(tmp_path / "b" / "events.jsonl")]
    assert kinds == ["continued", "started", "ended"]              # without the failure


def test_experiment_file_of_a_user_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    """An experiment.yaml that no run wrote is not replaced by its resolved form."""
    (tmp_path / "experiment.yaml").write_text("rounds: 6   # mine\n")
    with pytest.raises(InputError, match="choose another folder"):
        run(tiny(), tmp_path)
    assert "# mine" in (tmp_path / "experiment.yaml").read_text()


@pytest.mark.parametrize("event", ["", '{"timestamp": 1, "ki'])
def test_folder_without_any_event_is_reused(tiny: Tiny, tmp_path: Path, event: str) -> None:
    """The process died between the first files and the first event, or the disk was full then."""
    run(tiny(seed=1), tmp_path / "other")
    (tmp_path / "r").mkdir()
    for file in ("network.json", "experiment.yaml"):
        shutil.copyfile(tmp_path / "other" / file, tmp_path / "r" / file)
    if event:
        (tmp_path / "r" / "events.jsonl").write_text(event)
    assert run(tiny(), tmp_path / "r").status == "finished"


def test_another_plugin_of_the_same_name_is_another_experiment(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run keys identify an unfinished run, not file names: it is not cleared for another one."""
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"
    for folder, factor in (("one", ""), ("two", "2 * ")):
        (tmp_path / folder).mkdir()
        text = example.read_text(encoding="utf-8").replace("st.x - cfg.step", f"st.x - {factor}cfg.step")
        (tmp_path / folder / "mine.py").write_text(text)

    def made(folder: str) -> Experiment:
        monkeypatch.delitem(ALGORITHMS._found, "gossip_penalty", raising=False)          # another process
        monkeypatch.setattr("dbo.platform.config.plugins._loaded", {})
        return tiny(plugins=[str(tmp_path / folder / "mine.py")], algorithm={"name": "gossip_penalty"})

    with interrupt(monkeypatch, in_round=1):
        run(made("one"), tmp_path / "r")
    before = files(tmp_path / "r")
    for resume in (False, True):
        with pytest.raises(InputError, match="the run of another experiment"):
            run(made("two"), tmp_path / "r", resume=resume)
    assert files(tmp_path / "r") == before


def test_advice_names_only_available_options(dbo: Any, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """`dbo compare` has no --from; a run at a URL is named by its URL and cannot be extended."""
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


# ---- changed environment and code ------------------------------------------------------------------------------------


class Notices(NoCallback):
    """Collect the notices of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


def change_environment(monkeypatch: pytest.MonkeyPatch) -> str:
    """Pretend that NumPy has been upgraded; return the difference that is reported."""
    old = collect_environment()
    for module in (resume_module, progress, runner):
        monkeypatch.setattr(module, "collect_environment", lambda: {**old, "numpy": "99.0"})
    return f"numpy {old['numpy']} → 99.0"


def write_plugin(folder: Path, factor: str = "") -> Path:
    """Write the example algorithm of the documentation, with another step size if a factor is given."""
    example = Path(__file__).resolve().parents[3] / "docs" / "examples" / "gossip_penalty.py"
    text = example.read_text(encoding="utf-8").replace("st.x - cfg.step", f"st.x - {factor}cfg.step")
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def events(folder: Path, kind: str) -> list[Event]:
    return [event for event in read_events(folder / "events.jsonl") if event.kind == kind]


def test_started_event_records_the_environment(tiny: Tiny, tmp_path: Path) -> None:
    """Versions, BLAS, processor; the run key does not depend on them."""
    run(tiny(), tmp_path / "r")
    (started,) = events(tmp_path / "r", "started")
    assert started.environment == collect_environment()
    assert "environment" not in (tmp_path / "r" / "experiment.yaml").read_text()


@pytest.mark.parametrize("how", ["resume", "start_from"])
def test_changed_environment_is_refused(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One line names what differs, and nothing is written; with `allow_changed_code` it is recorded instead."""
    a, b = tmp_path / "a", tmp_path / "a" if how == "resume" else tmp_path / "b"
    rounds = 6 if how == "resume" else 9
    with interrupt(monkeypatch, in_round=5):
        run(tiny(rounds=6), a)
    options: dict[str, Any] = {"resume": True} if how == "resume" else {"start_from": a}
    difference, before = change_environment(monkeypatch), files(tmp_path)
    with pytest.raises(InputError) as error:
        run(tiny(rounds=rounds), b, **options)
    assert str(error.value).startswith(f"environment: {difference}; ")
    assert files(tmp_path) == before
    notices = Notices()
    assert run(tiny(rounds=rounds), b, **options, allow_changed_code=True, callback=notices).status == "finished"
    (changed,) = events(b, "environment_changed")
    assert (changed.differences, changed.after_round) == (difference, 4)
    assert f"the environment has changed: {difference}" in notices.texts
    assert events(b, "started")[-1].environment["numpy"] == "99.0"
    run(tiny(rounds=rounds), tmp_path / "straight")
    assert_same_state(b, tmp_path / "straight")


def test_changed_environment_does_not_concern_a_finished_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is returned as it is: nothing is computed."""
    run(tiny(), tmp_path / "r")
    change_environment(monkeypatch)
    notices = Notices()
    assert run(tiny(), tmp_path / "r", resume=True, callback=notices).status == "finished"
    assert notices.texts == ["c2dfb: already finished, nothing to do"]


def test_checkpoint_without_an_environment_is_accepted_with_a_notice(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of older versions have none."""
    save = Checkpoints.save

    def save_as_before(self: Checkpoints, round_: int, blocks: Any, stored: dict[str, Any]) -> None:
        save(self, round_, blocks, {key: value for key, value in stored.items() if key != "environment"})

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_as_before)
        with interrupt(patch, in_round=5):
            run(tiny(), tmp_path / "r")
    notices = Notices()
    assert run(tiny(), tmp_path / "r", resume=True, callback=notices).status == "finished"
    assert any("does not record its environment" in text for text in notices.texts)
    assert events(tmp_path / "r", "environment_changed") == []


@pytest.mark.parametrize("how", ["resume", "start_from"])
def test_changed_code_is_resumed_only_if_allowed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The same experiment with an edited plugin: refused, or resumed from the old checkpoint and recorded."""
    plugin = write_plugin(tmp_path)

    def build(rounds: int = 6) -> Experiment:
        return tiny(rounds=rounds, plugins=[str(plugin)], algorithm={"name": "gossip_penalty"})

    a, b = tmp_path / "a", tmp_path / "a" if how == "resume" else tmp_path / "b"
    old = build(6 if how == "resume" else 4)
    if how == "resume":
        with interrupt(monkeypatch, in_round=5):
            run(old, a)
    else:
        run(old, a)
    write_plugin(tmp_path, "2 * ")
    new, before = build(), files(a)
    options: dict[str, Any] = {"resume": True} if how == "resume" else {"start_from": a}
    with pytest.raises(InputError, match="run with other code"):
        run(new, b, **options)
    assert files(a) == before
    notices = Notices()
    assert run(new, b, **options, allow_changed_code=True, callback=notices).status == "finished"
    (changed,) = events(b, "code_changed")
    assert (changed.previous_run_key, changed.run_key, changed.after_round) == (old.run_key, new.run_key, 4)
    assert any("the code has changed" in text for text in notices.texts)
    assert RunFolder(b).run_key() == new.run_key
    assert list(read_run(b).history["round"]) == list(range(7))
    assert read_run(b).summary["changes"] == ["code_changed"]
    with pytest.raises(InputError, match="holds a run whose code changed on the way"):
        run(new, b, resume=True)                # it is neither a run of the old code nor one of the new
    with pytest.raises(InputError, match=r"--from: .* holds a run whose code changed on the way"):
        run(build(9), tmp_path / "c", start_from=b)
    assert run(new, b, resume=True, allow_changed_code=True).status == "finished"


def test_diverged_run_is_not_repeated(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would diverge again; another environment, which it cannot be resumed in, does not matter."""
    experiment = tiny(algorithm={"name": "c2dfb", "eta_in": 1e30, "eta_out": 1e30}, rounds=50)
    assert run(experiment, tmp_path / "r").status == "diverged"
    before = files(tmp_path / "r")
    monkeypatch.setattr(resume_module, "collect_environment", lambda: {"numpy": "another"})
    again = run(experiment, tmp_path / "r", resume=True)
    assert again.status == "diverged"
    assert "not finite" in again.summary["error"]
    assert files(tmp_path / "r") == before


def test_changed_code_is_resumed_twice(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted again before its first new checkpoint, the run still has only one of the old code."""
    plugin = write_plugin(tmp_path)

    def build() -> Experiment:
        return tiny(plugins=[str(plugin)], algorithm={"name": "gossip_penalty"})

    with interrupt(monkeypatch, in_round=4):
        run(build(), tmp_path / "r")
    write_plugin(tmp_path, "2 * ")
    with interrupt(monkeypatch, in_round=4):
        run(build(), tmp_path / "r", resume=True, allow_changed_code=True)
    with pytest.raises(InputError, match="or to other code"):
        run(build(), tmp_path / "r", resume=True)
    assert run(build(), tmp_path / "r", resume=True, allow_changed_code=True).status == "finished"


def test_other_experiment_is_refused_although_changed_code_is_allowed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed, other rounds, or another graph in the same file are no changes of code."""
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 3\n3 0\n")
    topology = {"name": "edges", "file": str(edges)}
    with interrupt(monkeypatch, in_round=5):
        run(tiny(topology=topology), tmp_path / "r")
    before = files(tmp_path / "r")

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=message):
            run(tiny(**{"topology": topology, **changes}), tmp_path / "r", resume=True, allow_changed_code=True)

    refused("the run of another experiment", seed=5)
    refused("holds 6 rounds of this experiment, not 9", rounds=9)
    edges.write_text("0 1\n0 2\n0 3\n")
    refused("topology: .* holds a run on another graph")
    assert files(tmp_path / "r") == before


def test_changed_code_is_allowed_on_the_command_line(
    dbo: Any, tiny_overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 and one line without --allow-changed-code, which the line names."""
    command = ("run", *tiny_overrides, "--out", str(tmp_path / "r"), "--quiet", "--resume")
    with monkeypatch.context() as patch, interrupt(patch, in_round=5):
        run(Experiment.read(None, tiny_overrides), tmp_path / "r")
    difference = change_environment(monkeypatch)
    done = dbo(*command)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"environment: {difference}" in done.err
    assert "--allow-changed-code" in done.err
    assert dbo(*command, "--allow-changed-code").code == 0
    assert events(tmp_path / "r", "environment_changed")[0].differences == difference


# ---- long histories --------------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the lines of evaluations that are parsed."""
    lines: list[str] = []
    parse = schema.parse_record

    def recording(line: str) -> dict[str, Any]:
        lines.append(line)
        return parse(line)

    monkeypatch.setattr(schema, "parse_record", recording)
    return lines


def test_finished_run_is_returned_without_its_history(tiny: Tiny, tmp_path: Path, parsed: list[str]) -> None:
    """The evaluations are read when they are used, from the same folder wherever the process is by then."""
    straight = run(tiny(), tmp_path / "r")
    parsed.clear()
    again = run(tiny(), tmp_path / "r", resume=True)
    assert (again.status, again.is_new, again.summary["final"]["round"]) == ("finished", False, 6)
    assert parsed == []
    pd.testing.assert_frame_equal(again.history, straight.history, check_exact=True)
    assert len(parsed) == 7
    assert again.history is again.history


@pytest.mark.parametrize("version", ["position", "older"])
def test_resume_parses_no_line_with_a_position(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[str], version: str
) -> None:
    """A checkpoint without sizes is resumed as before; both give the bits and the summary of a straight run."""
    straight = run(tiny(checkpoint_every=2), tmp_path / "straight")
    with interrupt(monkeypatch, in_round=6):
        run(tiny(checkpoint_every=2), tmp_path / "r")
    with open(tmp_path / "r" / "metrics.jsonl", "a") as file:
        file.write('{"round": 6, "upp')
    if version == "older":
        checkpoints = Checkpoints(tmp_path / "r" / "checkpoints", tiny(checkpoint_every=2).trajectory_key)
        newest = checkpoints.load_latest()
        assert newest is not None
        stored = {key: value for key, value in newest.run.items() if key not in ("sizes", "evaluated")}
        checkpoints.save(newest.round, ([block] for block in newest.blocks), stored)
    monkeypatch.setattr(runner, "_MAX_LOADED", 0)
    parsed.clear()
    resumed = run(tiny(checkpoint_every=2), tmp_path / "r", resume=True)
    assert bool(parsed) == (version == "older")
    assert_same_state(tmp_path / "straight", tmp_path / "r")
    pd.testing.assert_frame_equal(metrics(tmp_path / "r"), metrics(tmp_path / "straight"), check_exact=True)

    def drop_clocks(record: dict[str, Any] | None) -> dict[str, Any]:
        return {key: value for key, value in (record or {}).items() if key not in CLOCKS}

    assert drop_clocks(resumed.summary["final"]) == drop_clocks(straight.summary["final"])
    assert {key: drop_clocks(cost) for key, cost in resumed.summary["targets"].items()} == \
        {key: drop_clocks(cost) for key, cost in straight.summary["targets"].items()}


def test_rollback_needs_constant_memory(tmp_path: Path) -> None:
    """Files are hashed in chunks: 30 MB of evaluations are never in memory as a whole."""
    folder = RunFolder(tmp_path / "r")
    folder.acquire()
    for round_ in range(30):
        folder.append({"round": round_, "text": "x" * 1_000_000})
    position = folder.position()
    tracemalloc.start()
    assert folder.has_position(position)
    folder.rollback(29, position)
    folder.append({"round": 30})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    folder.release()
    assert peak < 5_000_000


def test_history_of_a_short_run_survives_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    """A caller may run in a temporary folder and use the result later."""
    result = run(tiny(), tmp_path / "r")
    shutil.rmtree(tmp_path / "r")
    assert list(result.history["round"]) == list(range(7))


def test_changed_lines_are_not_resumed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is skipped with a notice, and the run starts from round 0."""
    with interrupt(monkeypatch, in_round=6):
        run(tiny(checkpoint_every=2), tmp_path / "r")
    change_a_number(tmp_path / "r")
    notices = Notices()
    run(tiny(checkpoint_every=2), tmp_path / "r", resume=True, callback=notices)
    assert any("metrics.jsonl or nodes.jsonl has changed" in text for text in notices.texts)
    assert read_events(tmp_path / "r" / "events.jsonl")[0].after_round == 0


def test_first_error_is_reported_when_the_disk_is_full(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summary cannot be written either: its error must not replace the one that ended the run."""
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device (writing the checkpoint)", "checkpoint")

    def fail_too(*_: Any) -> None:
        raise OSError(28, "No space left on device (writing the summary)", "summary")

    monkeypatch.setattr(Checkpoints, "save", fail)
    monkeypatch.setattr(RunFolder, "write_summary", fail_too)
    with pytest.raises(OSError, match="writing the checkpoint"):
        run(tiny(), tmp_path / "r")


def test_edited_evaluation_of_a_finished_run_is_noticed(tiny: Tiny, tmp_path: Path) -> None:
    """The last checkpoint has the digest of all evaluations: a better number does not pass as a result."""
    run(tiny(), tmp_path / "r")
    metrics = tmp_path / "r" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"upper_loss": ', '"upper_loss": 0', 1))
    with pytest.raises(InputError, match=r"has changed since it was saved|is damaged"):
        run(tiny(), tmp_path / "r", resume=True)


def list_checkpoints(folder: Path) -> list[int]:
    return sorted(int(place.name.removeprefix("round-")) for place in (folder / "checkpoints").glob("round-*"))


def test_checkpoints_that_were_skipped_do_not_displace_good_ones(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest three are damaged. After the next save, the new one and the one before are there, both intact."""
    with interrupt(monkeypatch, in_round=6):
        run(tiny(checkpoint_every=1, keep_checkpoints=4), tmp_path)
    assert list_checkpoints(tmp_path) == [2, 3, 4, 5]
    for round_ in (3, 4, 5):
        (tmp_path / "checkpoints" / f"round-{round_:08d}" / "block-000.safetensors").write_bytes(b"")
    with interrupt(monkeypatch, in_round=4):
        run(tiny(checkpoint_every=1), tmp_path, resume=True)
    assert list_checkpoints(tmp_path) == [2, 3]
    found = Checkpoints(tmp_path / "checkpoints", "", allow_other=True)
    assert [one.round for one in found.load_each()] == [3, 2]


def test_a_skipped_checkpoint_is_not_loaded_by_a_recovery(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is intact, but its evaluations are gone: a recovery that found it could not roll back to it."""
    with interrupt(monkeypatch, in_round=6):
        run(tiny(checkpoint_every=1), tmp_path)
    assert list_checkpoints(tmp_path) == [4, 5]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]))         # of rounds 0 to 4
    with interrupt(monkeypatch, in_round=5):
        run(tiny(checkpoint_every=1), tmp_path, resume=True)
    assert list_checkpoints(tmp_path) == [4]
