"""Sockets between blocks of one machine: nothing waits for ever, and packets of other steps are not mistaken."""

import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dbo.platform.engine.peer_sockets import NeighbourLost, PeerSockets, remove_stale_folders

LISTEN_AND_DIE = """
import os, signal
from dbo.platform.engine.peer_sockets import PeerSockets
print(PeerSockets(0, 0, 1.0).listen(1), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def connect(count: int, timeout: float = 5.0, epochs: tuple[int, ...] = ()) -> list[PeerSockets]:
    """Return blocks that are all connected with each other, in the driver's three steps."""
    blocks = [PeerSockets(n, epochs[n] if epochs else 0, timeout) for n in range(count)]
    paths = {block.number: block.listen(count - 1) for block in blocks}
    for block in blocks:
        block.connect({n: path for n, path in paths.items() if n < block.number})
    for block in blocks:
        block.accept(n for n in range(count) if n > block.number)
    return blocks


@pytest.fixture
def pair() -> Iterator[tuple[PeerSockets, PeerSockets]]:
    first, second = connect(2)
    yield first, second
    first.close()
    second.close()


def test_packets_larger_than_the_buffers_cross() -> None:
    """All blocks send before anybody receives: no deadlock, whatever the size."""
    blocks = connect(3)
    with ThreadPoolExecutor(3) as pool:
        for step in range(3):
            data = {b.number: bytes([b.number + step]) * 5_000_000 for b in blocks}

            def exchange(block: PeerSockets, step: int = step, data: dict[int, bytes] = data) -> list[bytes] | None:
                others = [n for n in data if n != block.number]
                return block.exchange(1, step, dict.fromkeys(others, data[block.number]))

            for block, received in zip(blocks, pool.map(exchange, blocks), strict=True):
                assert received == [data[n] for n in data if n != block.number]
    for block in blocks:
        block.close()


def test_neighbour_that_closes_is_reported(pair: tuple[PeerSockets, PeerSockets]) -> None:
    """A process that dies closes its sockets: whoever waits for it raises at once."""
    pair[1].close()
    with pytest.raises(NeighbourLost, match="block 1 has closed its connection"):
        pair[0].exchange(1, 0, {1: b"x"})


def test_silent_neighbour_is_reported() -> None:
    """A neighbour that sends nothing counts as lost after the timeout."""
    first, _ = connect(2, timeout=0.2)
    with pytest.raises(NeighbourLost, match=r"no packets from block 1 within 0.2 s \(engine.step_timeout\)"):
        first.exchange(1, 0, {1: b"x"})


def test_end_of_a_round_stops_a_neighbour_that_waits_for_more(pair: tuple[PeerSockets, PeerSockets]) -> None:
    """It returns None instead of waiting: the blocks disagree about the number of packets."""
    pair[1].end_round(4, 2, is_stalled=False)
    assert pair[0].exchange(4, 2, {1: b"x"}) is None


def test_end_of_the_round_before_is_no_obstacle(pair: tuple[PeerSockets, PeerSockets]) -> None:
    """It was sent at the end of the last call, and nobody has waited for it."""
    first, second = pair
    for block in pair:
        block.end_round(4, 2, is_stalled=False)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.exchange, 5, 0, {0: b"two"})
        assert first.exchange(5, 0, {1: b"one"}) == [b"two"]
        assert other.result() == [b"one"]


def test_stalled_neighbour_stops_blocks_that_are_ahead(pair: tuple[PeerSockets, PeerSockets]) -> None:
    """A block that cannot continue in a round before stops its neighbours too."""
    pair[1].end_round(4, 2, is_stalled=True)
    assert pair[0].exchange(5, 0, {1: b"x"}) is None


def test_packets_of_another_step_are_not_accepted(pair: tuple[PeerSockets, PeerSockets]) -> None:
    """A neighbour in another step is a disagreement, not a message."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(pair[1].exchange, 5, 1, {0: b"two"})
        assert pair[0].exchange(5, 0, {1: b"one"}) is None
        assert other.result() is None


def test_block_of_another_epoch_is_refused() -> None:
    """A late connection of rounds that were rolled back does not reach the block."""
    with pytest.raises(ConnectionError, match="block 1 of epoch 3 is not expected here"):
        connect(2, epochs=(4, 3))


def test_other_users_cannot_connect() -> None:
    """The folder of the socket is open to this user only, and is removed once all have connected."""
    block = PeerSockets(0, 0, 1.0)
    folder = Path(block.listen(1)).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    block.accept([])
    assert not folder.exists()
    block.close()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files; short, because the path of a socket is limited to about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def test_next_start_removes_the_folder_of_a_killed_block(temporary: Path) -> None:
    """A process that is killed while it listens leaves a folder; the next block that listens removes it."""
    left = subprocess.run([sys.executable, "-c", LISTEN_AND_DIE], capture_output=True, text=True, check=False).stdout
    assert Path(left.strip()).is_socket()
    assert list(temporary.iterdir()) == [Path(left.strip()).parent]
    block = PeerSockets(1, 0, 1.0)
    assert not Path(left.strip()).parent.exists()
    block.close()
    assert list(temporary.iterdir()) == []


def test_folders_in_use_and_foreign_files_stay(temporary: Path) -> None:
    """A block that listens keeps its folder; files, links and folders of another kind are not touched."""
    block = PeerSockets(0, 0, 1.0)
    path = Path(block.listen(1))
    (temporary / "precious").mkdir()
    (temporary / "precious" / "file").write_text("text")
    (temporary / "dbo-sockets-link").symlink_to(temporary / "precious")
    (temporary / "dbo-sockets-file").write_text("text")
    (temporary / "dbo-sockets-full").mkdir()
    (temporary / "dbo-sockets-full" / "file").write_text("text")
    (temporary / "dbo-sockets-new").mkdir()
    (temporary / "dbo-sockets-old").mkdir()
    os.utime(temporary / "dbo-sockets-old", (1, 1))
    remove_stale_folders()
    assert path.is_socket()
    names = sorted(entry.name for entry in temporary.iterdir() if entry != path.parent)
    assert names == ["dbo-sockets-file", "dbo-sockets-full", "dbo-sockets-link", "dbo-sockets-new", "precious"]
    assert (temporary / "precious" / "file").read_text() == (temporary / "dbo-sockets-full" / "file").read_text()
    block.close()


def test_a_block_that_looks_for_stale_folders_does_not_disturb_another(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks begin to listen at once: one may look at the new folder of another before this one has locked it."""
    make = tempfile.mkdtemp

    def make_and_look(prefix: str) -> str:
        folder = make(prefix=prefix)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        threading.Timer(0.1, os.close, [handle]).start()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_look)
    block = PeerSockets(0, 0, 1.0)
    assert Path(block.listen(1)).is_socket()
    block.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("hello", [b"", b"1234567"])
def test_connection_without_a_number_is_refused(hello: bytes) -> None:
    """A process of the same user that is no block ends the attempt; the driver then uses the object store."""
    block = PeerSockets(0, 0, 1.0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(block.listen(1))
        other.sendall(hello)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="no block"):
            block.accept([1])
    block.close()
