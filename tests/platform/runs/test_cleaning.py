"""Checkpoints that a run keeps when it ends, and what `dbo clean` removes later."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.cleaning import clean_run, plan_cleanup
from dbo.platform.runs.repair import repair_run
from dbo.platform.runs.run_folder import RunFolder
from dbo.platform.runs.runner import run
from dbo.platform.runs.seal import check_run

Tiny = Callable[..., Any]
DEFAULT = 1         # of keep_checkpoints; the tiny experiment keeps two


def rounds(folder: Path) -> list[int]:
    """Return the rounds of the checkpoints in a run folder; a file:// URL keeps the empty folders of removed ones."""
    found = (folder / "checkpoints").glob("round-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("round-")) for path in found)


def interrupt(monkeypatch: pytest.MonkeyPatch, experiment: Any, out: Path | str, at: int) -> None:
    """Run until the beginning of a round, and die there."""
    original = LocalEngine.run_round

    def advance(engine: LocalEngine, number: int) -> None:
        if number == at:
            raise KeyboardInterrupt
        original(engine, number)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "run_round", advance)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, out)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# ---- at the end of a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "expected"), [(0, []), (1, [6]), (2, [5, 6]), (4, [3, 4, 5, 6])])
def test_a_finished_run_keeps_so_many_checkpoints(tiny: Tiny, tmp_path: Path, keep: int, expected: list[int]) -> None:
    """The newest ones; without any the folder is gone too, and the seal is intact."""
    run(tiny(checkpoint_every=1, keep_checkpoints=keep), tmp_path / "r")
    assert rounds(tmp_path / "r") == expected
    assert (tmp_path / "r" / "checkpoints").exists() == (keep > 0)
    assert check_run(tmp_path / "r").state == "intact"


def test_one_checkpoint_is_the_default(tiny: Tiny) -> None:
    """It is enough for --from."""
    assert type(tiny()).model_fields["keep_checkpoints"].default == DEFAULT


@pytest.mark.parametrize("keep", [0, 1, 5])
def test_an_interrupted_run_has_two_checkpoints(
    tiny: Tiny, tmp_path: Path, same: Any, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """Or more if it is to keep more. It resumes to the same bits, and only then are checkpoints removed."""
    experiment = tiny(checkpoint_every=1, keep_checkpoints=keep)
    interrupt(monkeypatch, experiment, tmp_path / "r", at=5)
    assert rounds(tmp_path / "r") == list(range(5 - max(2, min(keep, 4)), 5))
    run(experiment, tmp_path / "r", resume=True)
    run(experiment, tmp_path / "straight")
    assert same(tmp_path / "r", tmp_path / "straight")
    assert rounds(tmp_path / "r") == rounds(tmp_path / "straight")


def test_a_diverged_run_keeps_its_last_state(tiny: Tiny, tmp_path: Path) -> None:
    """It has no state.safetensors: the checkpoint is all that is left of it, also with keep_checkpoints: 0."""
    algorithm = {"name": "f2ba", "eta_out": 1e4, "eta_in": 1e3}
    experiment = tiny(algorithm=algorithm, checkpoint_every=1, rounds=500, keep_checkpoints=0)
    assert run(experiment, tmp_path / "r").status == "diverged"
    assert len(rounds(tmp_path / "r")) == 1
    assert plan_cleanup(tmp_path / "r").places == ()


def test_the_number_is_no_part_of_the_run_key(tiny: Tiny, tmp_path: Path) -> None:
    """Runs that keep more or fewer have the same results: a folder is not refused because of it."""
    assert tiny(keep_checkpoints=0).run_key == tiny(keep_checkpoints=5).run_key
    run(tiny(keep_checkpoints=0), tmp_path / "r")
    assert not run(tiny(keep_checkpoints=5), tmp_path / "r", resume=True).is_new


def test_a_pruned_run_is_extended(tiny: Tiny, tmp_path: Path, same: Any) -> None:
    """From its one checkpoint, to the bits of a longer run. Without any the error names the reason."""
    run(tiny(keep_checkpoints=1, psi_every=None), tmp_path / "short")
    run(tiny(keep_checkpoints=1, psi_every=None, rounds=9), tmp_path / "long", start_from=tmp_path / "short")
    run(tiny(rounds=9, psi_every=None), tmp_path / "straight")
    assert same(tmp_path / "long", tmp_path / "straight")
    run(tiny(keep_checkpoints=0), tmp_path / "none")
    with pytest.raises(InputError, match=r"^--from: .*none has no checkpoint to resume from: dbo clean or keep_check"):
        run(tiny(rounds=9), tmp_path / "more", start_from=tmp_path / "none")


def test_a_pruned_run_is_repaired(tiny: Tiny, tmp_path: Path) -> None:
    """Its state comes from the checkpoint. Damaged evaluations do not: no checkpoint is older than they are."""
    folder = tmp_path / "r"
    run(tiny(keep_checkpoints=1), folder)
    before = (folder / "state.safetensors").read_bytes()
    flip(folder / "state.safetensors")
    assert repair_run(folder)[0].state == "intact"
    assert (folder / "state.safetensors").read_bytes() == before
    flip(folder / "metrics.jsonl")
    with pytest.raises(InputError, match="no checkpoint from before the damage is left"):
        repair_run(folder)


def test_a_run_at_a_url_is_pruned_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    """Interrupted: two checkpoints at the URL. Resumed and finished: as many as it keeps, and the same bits."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "bucket" / "run"
    experiment = tiny(checkpoint_every=1, keep_checkpoints=0)
    interrupt(monkeypatch, experiment, f"file://{there}", at=5)
    assert rounds(there) == [3, 4]
    run(experiment, f"file://{there}", resume=True)
    assert not list(there.glob("checkpoints/*/*"))
    run(experiment, tmp_path / "straight")
    assert same(there, tmp_path / "straight")
    assert not run(experiment, f"file://{there}", resume=True).is_new


def test_the_result_reaches_a_url_before_the_checkpoint_leaves_it(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that dies in between has lost nothing."""
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "bucket" / "run"

    def die(self: Checkpoints, keep: int) -> None:
        if keep == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "prune", die)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(keep_checkpoints=0), f"file://{there}")
    assert (there / "summary.json").exists()
    assert rounds(there)


# ---- dbo clean -------------------------------------------------------------------------------------------------------


def test_a_finished_run_needs_no_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """All are removed, with what a killed process has left; the seal stays intact, and --resume returns the run."""
    folder = tmp_path / "r"
    run(tiny(), folder)
    (folder / "checkpoints" / ".round-00000006.0123456789abcdef.new").mkdir()
    plan = plan_cleanup(folder)
    assert [place.name for place in plan.places[:2]] == ["round-00000006", "round-00000004"]
    assert plan.bytes > 1000
    assert len(plan.places) == 3
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert clean_run(folder).bytes == plan.bytes
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert check_run(folder).state == "intact"
    assert not run(tiny(), folder, resume=True).is_new


def test_keep_leaves_the_newest(tiny: Tiny, tmp_path: Path) -> None:
    """So that --from still works."""
    run(tiny(), tmp_path / "r")
    clean_run(tmp_path / "r", keep=1)
    assert rounds(tmp_path / "r") == [6]


def test_an_unfinished_run_keeps_its_newest_intact_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Any
) -> None:
    """If the newest is damaged the one before stays. Resume gives the same bits."""
    for name in ("intact", "damaged"):
        folder = tmp_path / name
        interrupt(monkeypatch, tiny(), folder, at=6)
        if name == "damaged":
            flip(folder / "checkpoints" / "round-00000004" / "block-000.safetensors")
        assert "not finished" in plan_cleanup(folder).note
        clean_run(folder)
    assert rounds(tmp_path / "intact") == [4]
    assert rounds(tmp_path / "damaged") == [2, 4]
    run(tiny(), tmp_path / "straight")
    for name in ("intact", "damaged"):
        run(tiny(), tmp_path / name, resume=True)
        assert same(tmp_path / name, tmp_path / "straight")


def test_an_unfinished_run_keeps_a_checkpoint_whose_evaluations_are_recorded(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is intact, but lines before it are gone: only the one before it can be resumed from."""
    folder = tmp_path / "r"
    interrupt(monkeypatch, tiny(), folder, at=6)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))           # of rounds 0, 1 and 2
    assert clean_run(folder).places == ()
    assert rounds(folder) == [2, 4]
    run(tiny(), folder, resume=True)
    assert check_run(folder).state == "intact"


def test_a_finished_run_without_a_seal_keeps_a_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing proves that its final state is intact; here it is not."""
    folder = tmp_path / "r"
    run(tiny(), folder)
    (folder / "manifest.json").unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "sealed": False}))
    (folder / "state.safetensors").write_bytes(b"")
    assert plan_cleanup(folder).note == "not sealed: the last checkpoint stays"
    clean_run(folder)
    assert rounds(folder) == [6]


def test_a_run_in_use_is_not_touched(tiny: Tiny, tmp_path: Path) -> None:
    """Neither by the plan nor by the removal, which takes the lock."""
    run(tiny(), tmp_path / "r")
    owner = RunFolder(tmp_path / "r")
    owner.acquire()
    try:
        for found in (plan_cleanup(tmp_path / "r"), clean_run(tmp_path / "r")):
            assert (found.places, found.note) == ((), "in use by another run")
    finally:
        owner.release()
    assert rounds(tmp_path / "r") == [4, 6]


def test_a_damaged_run_keeps_what_repairs_it(tiny: Tiny, tmp_path: Path) -> None:
    """Its checkpoints give the state back."""
    run(tiny(), tmp_path / "r")
    flip(tmp_path / "r" / "state.safetensors")
    assert plan_cleanup(tmp_path / "r").note.startswith("damaged: state.safetensors")
    assert clean_run(tmp_path / "r").places == ()
    assert repair_run(tmp_path / "r")[0].state == "intact"


@pytest.mark.parametrize("link", ["checkpoints", "round-00000006"])
def test_links_are_not_followed(tiny: Tiny, tmp_path: Path, link: str) -> None:
    """Checkpoints behind a link belong to somebody else; a link in place of one is removed, not its target."""
    folder, other = tmp_path / "r", tmp_path / "other"
    run(tiny(), folder)
    place = folder / "checkpoints" if link == "checkpoints" else folder / "checkpoints" / link
    place.rename(other)
    place.symlink_to(other)
    before = sorted(path.name for path in other.rglob("*"))
    assert plan_cleanup(folder).bytes < sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    if link == "checkpoints":
        assert plan_cleanup(folder).note == "checkpoints is a symbolic link"
    else:
        clean_run(folder)
        assert rounds(folder) == []
    assert sorted(path.name for path in other.rglob("*")) == before
