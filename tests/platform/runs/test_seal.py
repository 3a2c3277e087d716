"""A run that has ended is sealed: damage to any of its files is found, named, and repaired where that can be proven."""

import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo import api
from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import runner, seal
from dbo.platform.runs.repair import repair_run
from dbo.platform.runs.result import NoCallback
from dbo.platform.runs.run_folder import RunFolder, read_manifest
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import parse_manifest, serialize_manifest
from dbo.platform.runs.seal import check_run, require_intact

Tiny = Callable[..., Experiment]
Harm = Callable[[Path], Any]


class Notices(NoCallback):
    """Callback that keeps the notices."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


def flip(path: Path, at: int = -3) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit_accuracy(folder: Path) -> None:
    """Improve the last evaluation by one digit; the file keeps its size."""
    head, mark, tail = (folder / "metrics.jsonl").read_text().rpartition('"upper_loss": ')
    (folder / "metrics.jsonl").write_text(f"{head}{mark}{'1' if tail[0] != '1' else '2'}{tail[1:]}")


def append_line(folder: Path) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 99}\n')


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Path:
    """A finished run; tests damage copies of it."""
    return run(tiny(), tmp_path_factory.mktemp("sealed") / "r").folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "r"))


HARM: dict[str, tuple[Harm, str]] = {
    "emptied metrics": (lambda f: (f / "metrics.jsonl").write_text(""), "metrics.jsonl has 0 bytes instead of"),
    "edited accuracy": (edit_accuracy, "metrics.jsonl does not match its checksum"),
    "appended line": (append_line, "metrics.jsonl has .* bytes instead of"),
    "flipped state": (lambda f: flip(f / "state.safetensors"), "state.safetensors does not match its checksum"),
    "missing state": (lambda f: (f / "state.safetensors").unlink(), "state.safetensors is missing"),
    "empty summary": (lambda f: (f / "summary.json").write_text(""), "summary.json has 0 bytes instead of"),
    "edited summary": (lambda f: flip(f / "summary.json", 200), "summary.json does not match its checksum"),
    "flipped nodes": (lambda f: flip(f / "nodes.jsonl", -30), "nodes.jsonl does not match its checksum"),
    "flipped graph": (lambda f: flip(f / "network.json", 9), "network.json does not match its checksum"),
    "flipped experiment": (lambda f: flip(f / "experiment.yaml"), "experiment.yaml does not match its checksum"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "flipped manifest": (lambda f: flip(f / "manifest.json", 60), "manifest.json cannot be read"),
}
UNPROVABLE = "emptied metrics"          # its first lines are in no checkpoint


def test_a_finished_run_is_intact(folder: Path) -> None:
    """Its manifest names every final file."""
    assert str(check_run(folder)) == f"{folder}: intact"
    manifest = read_manifest(folder)
    assert manifest is not None
    assert set(manifest.files) == {path.name for path in folder.iterdir() if path.is_file()} - {"manifest.json"}


def test_a_diverged_run_is_sealed(tiny: Tiny, tmp_path: Path) -> None:
    """It has no final state; damage is found all the same."""
    algorithm = {"name": "c2dfb", "inner_steps": 2, "eta_in": 1e200, "eta_out": 1e200, "gamma_in": 0.3}
    assert run(tiny(algorithm=algorithm), tmp_path / "r").status == "diverged"
    assert check_run(tmp_path / "r").state == "intact"
    flip(tmp_path / "r" / "summary.json", 100)
    assert check_run(tmp_path / "r").state == "damaged"


def test_a_failed_run_is_not_sealed(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be resumed, so it has no final files; a manifest that it wrote before is removed."""
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        write, calls = RunFolder.write_summary, []

        def fail_once(self: RunFolder, summary: Any) -> None:
            calls.append(summary.status)
            fail() if len(calls) == 1 else write(self, summary)

        patch.setattr(RunFolder, "write_summary", fail_once)
        with pytest.raises(OSError, match="No space left"):
            run(tiny(), tmp_path / "r")
    assert calls == ["finished", "failed"]
    assert (check_run(tmp_path / "r").state, check_run(tmp_path / "r").note) == ("not sealed", "a failed run")
    run(tiny(), tmp_path / "r", resume=True)
    assert check_run(tmp_path / "r").state == "intact"


@pytest.mark.parametrize("name", HARM)
def test_damage_is_named(folder: Path, name: str) -> None:
    """One line with the file, and what is wrong with it."""
    harm, message = HARM[name]
    harm(folder)
    assert re.fullmatch(f"{folder}: damaged: {message}.*", str(check_run(folder)))      # one line


@pytest.mark.parametrize("name", HARM)
def test_resume_repairs_what_can_be_proven(
    folder: Path, finished: Path, tiny: Tiny, same: Callable[[Path, Path], bool], name: str
) -> None:
    """Never "nothing to do": the run is repaired to the same bits, or refused with the damage."""
    HARM[name][0](folder)
    notices = Notices()
    if name == UNPROVABLE:
        with pytest.raises(InputError, match=r"metrics\.jsonl has 0 bytes .*; no checkpoint from before the damage"):
            run(tiny(), folder, resume=True, callback=notices)
        return
    assert run(tiny(), folder, resume=True, callback=notices).status == "finished"
    assert any(text.startswith(("damaged: ", "restored from ")) for text in notices.texts)
    assert check_run(folder).state == "intact"
    assert same(folder, finished)


@pytest.mark.parametrize("name", HARM)
def test_check_repairs_what_can_be_proven(
    folder: Path, finished: Path, same: Callable[[Path, Path], bool], name: str
) -> None:
    """Without the experiment's file: what the folder holds is enough."""
    HARM[name][0](folder)
    if name == UNPROVABLE:
        with pytest.raises(InputError, match="no checkpoint from before the damage"):
            repair_run(folder)
        return
    verdict, done = repair_run(folder)
    assert (verdict.state, bool(done)) == ("intact", True)
    assert same(folder, finished)


def test_the_state_is_restored_without_running_anything(
    folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint that has the sealed checksum; a damaged checkpoint does not."""
    monkeypatch.setattr("dbo.platform.runs.repair.run", lambda *_, **__: pytest.fail("a run was started"))
    (folder / "state.safetensors").unlink()
    assert repair_run(folder)[1] == ["restored state.safetensors from the last checkpoint"]
    assert (folder / "state.safetensors").read_bytes() == (finished / "state.safetensors").read_bytes()


@pytest.mark.parametrize("key", ["plugins", "data_dir"])
def test_repair_runs_no_code_that_a_folder_names(
    folder: Path, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign experiment could name a plugin, or data with a pickle: the command that trusts it is printed."""
    monkeypatch.setattr("dbo.platform.runs.repair.run", lambda *_, **__: pytest.fail("a run was started"))
    value = f"[{tmp_path / 'evil.py'}]" if key == "plugins" else str(tmp_path)
    text = "\n".join(line for line in (folder / "experiment.yaml").read_text().splitlines() if not line.startswith(key))
    (folder / "experiment.yaml").write_text(f"{text}\n{key}: {value}\n")
    (folder / "manifest.json").unlink()
    verdict, _ = repair_run(folder)
    assert verdict.state == "damaged"
    assert verdict.note.startswith(f"the experiment names {key}; if you trust them: dbo run ")


def test_events_may_grow_after_the_seal(folder: Path) -> None:
    """Only their beginning is sealed; a change there is found, and not hidden by a new seal."""
    with open(folder / "events.jsonl", "a") as file:
        file.write('{"timestamp": 1.0, "kind": "started"}\n')
    assert check_run(folder).state == "intact"
    flip(folder / "events.jsonl", 14)
    verdict, done = repair_run(folder)
    assert (verdict.state, done, verdict.note) == ("damaged", [], "cannot be repaired; the results are intact")


@pytest.mark.parametrize("name", ["emptied metrics", "edited accuracy", "flipped state", "empty summary"])
def test_load_refuses_a_damaged_run(folder: Path, name: str) -> None:
    """`dbo.load` names the file instead of returning other numbers."""
    assert len(api.load(folder).history) == 7
    HARM[name][0](folder)
    with pytest.raises(InputError, match=rf"{folder}/(metrics|state|summary)\..*; dbo check --repair"):
        api.load(folder)


def test_a_folder_of_an_older_version_is_readable(folder: Path, tiny: Tiny) -> None:
    """Without a manifest: not sealed, and everything reads it."""
    (folder / "manifest.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["sealed"]
    (folder / "summary.json").write_text(json.dumps(summary))
    verdict = check_run(folder)
    assert (verdict.state, verdict.note) == ("not sealed", "written by an older version")
    require_intact([folder])
    assert len(api.load(folder).history) == 7
    assert not run(tiny(), folder, resume=True).is_new
    (folder / "state.safetensors").unlink()
    assert str(check_run(folder)) == f"{folder}: damaged: state.safetensors is missing"


def test_an_unfinished_run_is_not_sealed(folder: Path) -> None:
    """A run that was killed has no manifest; one that was killed before its summary is resumed."""
    (folder / "summary.json").unlink()
    require_intact([folder])                # readers show it as interrupted
    (folder / "manifest.json").unlink()
    assert check_run(folder).note == "the run has not ended"


def test_sizes_are_compared_before_anything_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another size is not read. Control: one of the same size is."""
    opened: list[str] = []
    measure = seal.measure_file

    def recording(path: Path, size: int | None = None) -> Any:
        opened.append(path.name)
        return measure(path, size)

    monkeypatch.setattr(seal, "measure_file", recording)
    (folder / "metrics.jsonl").write_text("")
    assert check_run(folder).state == "damaged"
    assert "metrics.jsonl" not in opened
    assert "nodes.jsonl" in opened


def test_verifying_needs_constant_memory(folder: Path) -> None:
    """A file of 64 MB is read in pieces of one."""
    os.truncate(folder / "state.safetensors", 64 << 20)
    tracemalloc.start()
    try:
        assert seal.measure_file(folder / "state.safetensors") is not None
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_in_place_of_a_file_is_damage(folder: Path) -> None:
    """Reading it would wait for ever."""
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    assert str(check_run(folder)) == f"{folder}: damaged: metrics.jsonl is missing"


def test_a_manifest_names_files_of_its_own_folder_only(folder: Path) -> None:
    """Names with a slash are dropped: a foreign manifest must not make us read other files."""
    manifest = read_manifest(folder)
    assert manifest is not None
    manifest.files["../../etc/passwd"] = manifest.files["metrics.jsonl"]
    assert "../../etc/passwd" not in parse_manifest(serialize_manifest(manifest)).files


def test_a_repair_connects_to_no_cluster_of_the_folder(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are replayed with the recorded engine, but not at its address: that would execute code from there."""
    started: list[Any] = []
    start = runner.start_engine

    def start_engine(settings: Any, spec: Any) -> Any:
        started.append(settings)
        return start(LocalSettings(), spec)

    folder = tmp_path / "r"
    with monkeypatch.context() as patch:
        patch.setattr(runner, "start_engine", start_engine)
        there = {"name": "ray", "nodes_per_actor": 6, "address": "203.0.113.7:6379"}
        run(tiny(engine=there), folder)
        assert started[-1].address == "203.0.113.7:6379"
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
        assert repair_run(folder)[0].state == "intact"
    assert len(started) == 2
    assert (started[-1].address, started[-1].nodes_per_actor) == (None, 6)


def test_a_file_that_changes_during_the_run_is_found(tiny: Tiny, tmp_path: Path) -> None:
    """The seal has the digest of what was written, not of what is on the disk at the end."""
    class Editor(NoCallback):
        def on_evaluation(self, record: dict[str, Any]) -> None:
            if record["round"] == 5:
                flip(tmp_path / "r" / "experiment.yaml")

    run(tiny(), tmp_path / "r", callback=Editor())
    assert str(check_run(tmp_path / "r")).endswith("damaged: experiment.yaml does not match its checksum")


def test_commands_to_copy_are_quoted(tmp_path: Path) -> None:
    """The name of a foreign folder may hold a command of the shell."""
    text = seal.describe_damage(tmp_path / "$(touch x)", [seal.Damage("metrics.jsonl", "is missing")])
    assert text.endswith(f"; dbo check --repair '{tmp_path}/$(touch x)'")
