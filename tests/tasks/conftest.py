"""Share fixtures of the tests of data sets: an empty cache, a blocked network, the shared data."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.api import Part

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of the real data, which may not exist."""
    return SHARED


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Use an empty cache for a whole module: real data are read once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dbo" / "data"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Block the network, and return the list of attempts to use it."""
    refused: list[str] = []

    def refuse(*address: object, **_: object) -> None:
        refused.append(str(address))
        raise OSError("no network")

    for name in ("socket.connect", "socket.connect_ex", "getaddrinfo", "create_connection"):
        owner = socket.socket if name.startswith("socket.") else socket
        monkeypatch.setattr(owner, name.rpartition(".")[2], refuse)
    monkeypatch.setattr("time.sleep", lambda seconds: None)    # between retries
    return refused


def rows_of(*parts: Part) -> Counter[tuple[int, bytes, bytes]]:
    """Count every sample with its label: equal counts mean that no sample is lost or duplicated."""
    found: Counter[tuple[int, bytes, bytes]] = Counter()
    for part in parts:
        a = part.features
        if isinstance(a, sparse.csr_array):
            ends = zip(a.indptr[:-1], a.indptr[1:], strict=True)
            rows = ((a.indices[i:j].tobytes(), a.data[i:j].tobytes()) for i, j in ends)
        else:
            rows = ((b"", np.ascontiguousarray(row).tobytes()) for row in a)
        found.update((int(label), *row) for label, row in zip(part.labels, rows, strict=True))
    return found


@pytest.fixture(scope="session")
def count_rows() -> Callable[..., Counter[tuple[int, bytes, bytes]]]:
    return rows_of
