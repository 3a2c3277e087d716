"""Checkpoints: loading returns exactly what was saved, or an older undamaged one, or a clear error."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.state_tree import chunk_names
from dbo.platform.errors import InputError
from dbo.platform.runs import checkpoints as module
from dbo.platform.runs.checkpoints import Checkpoint, Checkpoints
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOCKS

Tiny = Callable[..., Experiment]


def checkpoint(round_: int, blocks: int = 2) -> Checkpoint:
    """Return a small checkpoint whose numbers depend on the round."""
    rng = np.random.default_rng(round_)
    made = [
        {"state.x": rng.standard_normal((2, 3)), "t": np.full((2, 1), round_), "f": rng.random(4, dtype=np.float32)}
        for _ in range(blocks)
    ]
    return Checkpoint(round_, made, {"training": rng.random(), "blocks": [[0], [1]]})


def assert_same(found: Checkpoint | None, expected: Checkpoint) -> None:
    assert found is not None
    assert (found.round, found.run, len(found.blocks)) == (expected.round, expected.run, len(expected.blocks))
    for mine, theirs in zip(found.blocks, expected.blocks, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            np.testing.assert_array_equal(mine[name], theirs[name])


def save(made: Checkpoints, one: Checkpoint) -> None:
    """Save every block in one part."""
    made.save(one.round, ([block] for block in one.blocks), one.run)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Save checkpoints of rounds 10 and 20."""
    made = Checkpoints(tmp_path / "checkpoints", "key")
    save(made, checkpoint(10))
    save(made, checkpoint(20))
    return made


def test_round_trip_is_bit_identical(saved: Checkpoints) -> None:
    """Arrays with their dtypes and shapes, and the run's own data."""
    assert_same(saved.load_latest(), checkpoint(20))
    assert saved.refused == []


def test_blocks_keep_their_order(tmp_path: Path) -> None:
    """Even with more blocks than the digits of the file names can sort."""
    made = Checkpoints(tmp_path / "c", "key")
    blocks = [{"id": np.array([number])} for number in range(1003)]
    save(made, Checkpoint(1, blocks, {}))
    found = made.load_latest()
    assert found is not None
    assert [int(block["id"][0]) for block in found.blocks] == list(range(1003))


def test_block_in_parts_is_loaded_as_a_whole(tmp_path: Path) -> None:
    """Parts are separate files of one array or of bounded size; without one of them the checkpoint is damaged."""
    whole = checkpoint(20)
    made = Checkpoints(tmp_path / "c", "key")
    save(made, checkpoint(10))
    made.save(20, ([{name: block[name]} for name in block] for block in whole.blocks), whole.run)
    assert_same(made.load_latest(), whole)
    (made.folder / "round-00000020" / "block-000.1.safetensors").unlink()
    assert_same(made.load_latest(), checkpoint(10))
    sizes = {"a": 3 << 25, "b": 1 << 24, "c": 1 << 24, "d": 1 << 26, "e": 8}
    assert list(chunk_names(sizes)) == [["a"], ["b", "c"], ["d"], ["e"]]


def test_only_the_last_two_are_kept(saved: Checkpoints) -> None:
    """A long run does not fill the disk."""
    for round_ in (30, 40):
        save(saved, checkpoint(round_))
    assert sorted(os.listdir(saved.folder)) == ["round-00000030", "round-00000040"]


def test_rounds_of_nine_digits_are_newer(tmp_path: Path) -> None:
    """Names are sorted as numbers: the newest is kept and loaded."""
    made = Checkpoints(tmp_path / "c", "key")
    rounds = (99_999_998, 99_999_999, 100_000_000)
    for round_ in rounds:
        save(made, checkpoint(round_))
    assert_same(made.load_latest(), checkpoint(rounds[-1]))
    assert sorted(os.listdir(made.folder)) == ["round-100000000", "round-99999999"]


@pytest.mark.parametrize("name", [".round-00000030.new", "round-00000030", ".round-00000030.0123456789abcdef.new"])
def test_planted_link_is_replaced(saved: Checkpoints, tmp_path: Path, name: str) -> None:
    """What it points to stays as it is."""
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text("mine")
    (saved.folder / name).symlink_to(tmp_path / "foreign")
    save(saved, checkpoint(30))
    assert_same(saved.load_latest(), checkpoint(30))
    assert not (saved.folder / "round-00000030").is_symlink()
    assert os.listdir(tmp_path / "foreign") == ["manifest.json"]
    assert (tmp_path / "foreign" / "manifest.json").read_text() == "mine"


def test_full_disk_names_the_checkpoint(saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its round; nothing is left of it, and the previous one is kept."""
    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="writing the checkpoint of round 30") as caught:
            save(saved, checkpoint(30))
    assert caught.value.filename == str(saved.folder / "round-00000030")
    assert sorted(os.listdir(saved.folder)) == ["round-00000010", "round-00000020"]
    assert_same(saved.load_latest(), checkpoint(20))


def test_saving_a_round_again_replaces_it(saved: Checkpoints) -> None:
    """A replay saves the same round again."""
    save(saved, checkpoint(20, blocks=3))
    assert_same(saved.load_latest(), checkpoint(20, blocks=3))
    assert sorted(os.listdir(saved.folder)) == ["round-00000010", "round-00000020"]


def test_folder_without_checkpoints(tmp_path: Path) -> None:
    """No folder, or an empty one, holds no checkpoint."""
    assert Checkpoints(tmp_path / "none", "key").load_latest() is None
    (tmp_path / "empty").mkdir()
    assert Checkpoints(tmp_path / "empty", "key").load_latest() is None


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _flip(path: Path, where: float = 0.6) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated block": lambda p: _truncate(p / "block-001.safetensors"),
    "empty block": lambda p: (p / "block-000.safetensors").write_bytes(b""),
    "missing block": lambda p: (p / "block-000.safetensors").unlink(),
    "flipped bit in a block": lambda p: _flip(p / "block-000.safetensors"),
    "swapped blocks": lambda p: shutil.copy(p / "block-000.safetensors", p / "block-001.safetensors"),
    "truncated manifest": lambda p: _truncate(p / "manifest.json"),
    "empty manifest": lambda p: (p / "manifest.json").write_bytes(b""),
    "missing manifest": lambda p: (p / "manifest.json").unlink(),
    "manifest that is a list": lambda p: (p / "manifest.json").write_text("[1, 2]"),
    "manifest that is a number": lambda p: (p / "manifest.json").write_text("3"),
    "binary manifest": lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest without files": lambda p: (p / "manifest.json").write_text('{"format": 2, "trajectory": "key"}'),
    "manifest without a trajectory": lambda p: _resign(p, "trajectory"),
    "trajectory that is a number": lambda p: _resign(p, trajectory=3),
    "manifest without a round": lambda p: _resign(p, "round"),
    "round that is a text": lambda p: _resign(p, round="20"),
    "round below zero": lambda p: _resign(p, round=-1),
    "run that is a list": lambda p: _resign(p, run=[["training", 1]]),
    "files that are a list": lambda p: _resign(p, files=["block-000.safetensors"]),
    "digest that is a number": lambda p: _resign(p, files={"block-000.safetensors": 3}),
    "older format": lambda p: _rewrite(p, format=0),
    "newer format": lambda p: _rewrite(p, format=99),
    "another round in the manifest": lambda p: _rewrite(p, round=21),
    "another clock in the manifest": lambda p: _rewrite(p, run={"training": 0.0}),
    "a file instead of a folder": lambda p: (shutil.rmtree(p), p.write_text("x")),
    "folder without files": lambda p: (shutil.rmtree(p), p.mkdir()),
}


def _rewrite(place: Path, **changes: Any) -> None:
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps(manifest | changes))


def _resign(place: Path, *without: str, **changes: Any) -> None:
    """Change the manifest and give it a matching checksum."""
    manifest = json.loads((place / "manifest.json").read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if key not in ("sha256", *without)}
    (place / "manifest.json").write_text(json.dumps(manifest | {"sha256": module._digest(manifest)}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_skipped_for_the_previous_one(saved: Checkpoints, damage: str) -> None:
    """Any damage to the newest checkpoint is detected and reported, and the previous one is used."""
    DAMAGE[damage](saved.folder / "round-00000020")
    assert_same(saved.load_latest(), checkpoint(10))
    (reason,) = saved.refused
    assert reason.startswith("round-00000020: ")


def test_every_flipped_bit_is_detected(saved: Checkpoints) -> None:
    """A bit that flips anywhere, manifest included, never changes numbers: the checkpoint is refused."""
    place = saved.folder / "round-00000020"
    rng = np.random.default_rng(0)
    for file in sorted(place.iterdir()):
        good = file.read_bytes()
        for at in rng.choice(len(good), size=min(150, len(good)), replace=False):
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bad)
            found = saved.load_latest()
            assert found is not None
            if found.round == 20:    # white space between the manifest's values carries no meaning
                assert_same(found, checkpoint(20))
            else:
                assert_same(found, checkpoint(10))
        file.write_bytes(good)


def test_no_undamaged_checkpoint_is_none(saved: Checkpoints) -> None:
    """Nothing is loaded, and every refusal has its reason."""
    for place in saved.folder.iterdir():
        _flip(place / "block-000.safetensors")
    assert saved.load_latest() is None
    assert len(saved.refused) == 2


def test_another_run_s_checkpoint_is_refused(saved: Checkpoints, tmp_path: Path) -> None:
    """A checkpoint copied from another run is an error, not a silent restart; unless other code is allowed."""
    other = Checkpoints(tmp_path / "other", "another key")
    save(other, checkpoint(30))
    shutil.copytree(other.folder / "round-00000030", saved.folder / "round-00000030")
    with pytest.raises(InputError, match="belongs to another experiment"):
        saved.load_latest()
    found = Checkpoints(saved.folder, "key", allow_other=True).load_latest()
    assert found is not None
    assert (found.round, found.trajectory) == (30, "another key")


def test_no_pickle_is_ever_loaded(saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle instead of a block is refused, even with a matching checksum: loading never runs code."""
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    place = saved.folder / "round-00000020"
    data = pickle.dumps(Evil())
    (place / "block-000.safetensors").write_bytes(data)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"]["block-000.safetensors"] = module.hashlib.sha256(data).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest | {"sha256": module._digest(manifest)}))
    assert_same(saved.load_latest(), checkpoint(10))
    assert "block-000" in saved.refused[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("step", range(4))
def test_interrupted_save_keeps_the_previous_one(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """If the process dies at any file, or before the rename, the previous checkpoint is still undamaged."""
    write, left = module.write_durably, [step]

    def dying(*arguments: Any) -> str:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return write(*arguments)

    def never(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step < 3:
            patch.setattr(module, "write_durably", dying)
        else:
            patch.setattr(module.os, "rename", never)
        with pytest.raises(KeyboardInterrupt):
            save(saved, checkpoint(30))
    assert_same(saved.load_latest(), checkpoint(20))
    assert saved.refused == []
    save(saved, checkpoint(30))
    assert_same(saved.load_latest(), checkpoint(30))
    assert sorted(os.listdir(saved.folder)) == ["round-00000020", "round-00000030"]


# ---- in a run --------------------------------------------------------------------------------------------------------


def unfinished(folder: Path, experiment: Experiment) -> list[Path]:
    """Run to the end, remove the summary, and return the checkpoints, oldest first."""
    run(experiment, folder)
    (folder / "summary.json").unlink()
    return sorted((folder / "checkpoints").iterdir())


def metrics(folder: Path) -> list[list[Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[value for key, value in record.items() if key not in CLOCKS] for record in found]


@pytest.mark.parametrize("lost", [1, 2])
def test_run_resumes_from_the_newest_undamaged_checkpoint(tiny: Tiny, tmp_path: Path, lost: int) -> None:
    """From the previous one if the newest is damaged, from the start if both are: the result is the same."""
    run(tiny(), tmp_path / "straight")
    for place in unfinished(tmp_path / "r", tiny())[-lost:]:
        _flip(place / "block-000.safetensors")
    run(tiny(), tmp_path / "r", resume=True)
    assert metrics(tmp_path / "straight") == metrics(tmp_path / "r")
    states = [(tmp_path / name / "state.safetensors").read_bytes() for name in ("straight", "r")]
    assert states[0] == states[1]


def test_run_refuses_a_checkpoint_of_another_run(tiny: Tiny, tmp_path: Path) -> None:
    """Checkpoints swapped between two runs are detected, and the folder stays unchanged."""
    place = unfinished(tmp_path / "r", tiny())[-1]
    shutil.rmtree(place)
    shutil.copytree(unfinished(tmp_path / "other", tiny(seed=1))[-1], place)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="belongs to another experiment"):
        run(tiny(), tmp_path / "r", resume=True)
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "r" / "summary.json").exists()
