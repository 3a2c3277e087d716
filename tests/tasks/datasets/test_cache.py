"""The cache of prepared arrays: found by what they were made from, checked when read, made anew when damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.tasks.api import Array
from dbo.tasks.datasets.cache import cache_home, cached

ARRAYS = {"a.data": np.arange(5000, dtype=np.float32), "a.labels": np.arange(7)}


class Maker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Array]:
        self.calls += 1
        return dict(ARRAYS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").write_bytes(b"one")
    return tmp_path / "source"


def check(arrays: dict[str, Array]) -> None:
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


def test_what_was_made_is_found(cache: Path, source: Path) -> None:
    """A second call gives the same arrays without making them; the folder holds that one file and no leftovers."""
    make = Maker()
    for _ in range(2):
        check(cached("some", "1", lambda: [source], make))
    assert make.calls == 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", ["name", "version", "content", "another file"])
def test_another_origin_is_another_entry(cache: Path, source: Path, change: str) -> None:
    """Name, version of the preparation and content of the sources each decide; where the sources lie does not."""
    make = Maker()
    cached("some", "1", lambda: [source], make)
    moved = source.parent / "elsewhere" / "source"
    moved.parent.mkdir()
    moved.write_bytes(source.read_bytes())
    cached("some", "1", lambda: [moved], make)
    assert make.calls == 1
    sources = [source]
    if change == "content":
        source.write_bytes(b"two")
    if change == "another file":
        sources.append(moved.rename(moved.with_name("more")))
    cached("other" if change == "name" else "some", "2" if change == "version" else "1", lambda: sources, make)
    assert make.calls == 2


def test_sources_that_making_brings_are_part_of_the_key(cache: Path, source: Path) -> None:
    """A download is found at the next start, where its files are there from the beginning."""
    make, content = Maker(), source.read_bytes()
    source.unlink()

    def download() -> dict[str, Array]:
        source.write_bytes(content)
        return make()

    for _ in range(2):
        check(cached("some", "1", lambda: [source] if source.exists() else [], download))
    assert make.calls == 1


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [flipped, lambda data: data[:1000], lambda data: b"", lambda data: b"x" * len(data)],
    ids=["flipped bit", "cut off", "empty", "garbage"],
)
def test_a_damaged_entry_is_made_anew(
    cache: Path, source: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage is noticed and told in one line; what follows is as if nothing had been there."""
    make = Maker()
    cached("some", "1", lambda: [source], make)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    check(cached("some", "1", lambda: [source], make))
    assert make.calls == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cached("some", "1", lambda: [source], make).keys() == ARRAYS.keys()
    assert make.calls == 2


def test_an_entry_of_other_arrays_is_refused(cache: Path, source: Path) -> None:
    """The checksum is of the arrays themselves: a sound archive with exchanged contents is not taken."""
    make = Maker()
    cached("some", "1", lambda: [source], make)
    (file,) = cache.iterdir()
    with np.load(file, allow_pickle=False) as stored:
        np.savez(file, allow_pickle=False, **{**stored, "a.labels": np.arange(7) + 1})
    check(cached("some", "1", lambda: [source], make))
    assert make.calls == 2


def test_pickles_are_never_read(cache: Path, source: Path) -> None:
    """An entry with a pickled object is damage: it is not unpickled."""
    make = Maker()
    cached("some", "1", lambda: [source], make)
    (file,) = cache.iterdir()
    touched = source.with_name("touched")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (touched,)

    np.savez(file, allow_pickle=True, **{"a.data": np.array([Trap()], dtype=object)})
    check(cached("some", "1", lambda: [source], make))
    assert make.calls == 2
    assert not touched.exists()


def test_without_a_place_to_write_all_works_but_slower(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that cannot be written is told, and nothing fails."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check(cached("some", "1", lambda: [source], Maker()))
    assert "not cached" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "home"), [("/somewhere", "/somewhere/dbo"), ("relative", None), ("", None)])
def test_where_caches_lie(monkeypatch: pytest.MonkeyPatch, value: str, home: str | None) -> None:
    """$XDG_CACHE_HOME if it is absolute, ~/.cache otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_home() == (Path(home) if home else Path.home() / ".cache" / "dbo")
