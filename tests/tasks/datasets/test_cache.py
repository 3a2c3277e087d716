"""The cache of prepared arrays: found by their sources, verified when read, rebuilt when damaged."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.tasks.api import Array
from dbo.tasks.datasets.cache import find_cache_folder, load_or_build

ARRAYS = {"a.data": np.arange(5000, dtype=np.float32), "a.labels": np.arange(7)}


class Builder:
    """Count the calls."""

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


def test_built_arrays_are_found(cache: Path, source: Path) -> None:
    """A second call returns the same arrays without building them; the folder has one file and no temporary ones."""
    build = Builder()
    for _ in range(2):
        check(load_or_build("some", "1", lambda: [source], build))
    assert build.calls == 1
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("change", ["name", "version", "content", "another file"])
def test_other_sources_are_another_entry(cache: Path, source: Path, change: str) -> None:
    """Name, version of the preparation and content of the sources each decide; the folder of the sources does not."""
    build = Builder()
    load_or_build("some", "1", lambda: [source], build)
    copy = source.parent / "elsewhere" / "source"
    copy.parent.mkdir()
    copy.write_bytes(source.read_bytes())
    load_or_build("some", "1", lambda: [copy], build)
    assert build.calls == 1
    sources = [source]
    if change == "content":
        source.write_bytes(b"two")
    if change == "another file":
        sources.append(copy.rename(copy.with_name("more")))
    load_or_build("other" if change == "name" else "some", "2" if change == "version" else "1", lambda: sources, build)
    assert build.calls == 2


def test_downloaded_sources_are_part_of_the_key(cache: Path, source: Path) -> None:
    """Arrays built from a download are found at the next start, when the files exist from the beginning."""
    build, content = Builder(), source.read_bytes()
    source.unlink()

    def download() -> dict[str, Array]:
        source.write_bytes(content)
        return build()

    for _ in range(2):
        check(load_or_build("some", "1", lambda: [source] if source.exists() else [], download))
    assert build.calls == 1


def flip_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [flip_bit, lambda data: data[:1000], lambda data: b"", lambda data: b"x" * len(data)],
    ids=["flipped bit", "truncated", "empty", "garbage"],
)
def test_damaged_entry_is_rebuilt(
    cache: Path, source: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """Damage is detected and reported in one line; the arrays are rebuilt and cached again."""
    build = Builder()
    load_or_build("some", "1", lambda: [source], build)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    check(load_or_build("some", "1", lambda: [source], build))
    assert build.calls == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert load_or_build("some", "1", lambda: [source], build).keys() == ARRAYS.keys()
    assert build.calls == 2


def test_entry_with_other_arrays_is_refused(cache: Path, source: Path) -> None:
    """The checksum covers the arrays: a valid archive with other contents is not used."""
    build = Builder()
    load_or_build("some", "1", lambda: [source], build)
    (file,) = cache.iterdir()
    with np.load(file, allow_pickle=False) as stored:
        np.savez(file, allow_pickle=False, **{**stored, "a.labels": np.arange(7) + 1})
    check(load_or_build("some", "1", lambda: [source], build))
    assert build.calls == 2


def test_pickles_are_never_read(cache: Path, source: Path) -> None:
    """An entry with a pickled object is damage: it is not unpickled."""
    build = Builder()
    load_or_build("some", "1", lambda: [source], build)
    (file,) = cache.iterdir()
    touched = source.with_name("touched")

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (touched,)

    np.savez(file, allow_pickle=True, **{"a.data": np.array([Trap()], dtype=object)})
    check(load_or_build("some", "1", lambda: [source], build))
    assert build.calls == 2
    assert not touched.exists()


def test_unwritable_cache_is_not_an_error(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that cannot be written is reported, and the arrays are returned."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check(load_or_build("some", "1", lambda: [source], Builder()))
    assert "not cached" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "folder"), [("/somewhere", "/somewhere/dbo"), ("relative", None), ("", None)])
def test_cache_folder_follows_the_xdg_standard(monkeypatch: pytest.MonkeyPatch, value: str, folder: str | None) -> None:
    """$XDG_CACHE_HOME if it is absolute, ~/.cache otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert find_cache_folder() == (Path(folder) if folder else Path.home() / ".cache" / "dbo")
