"""Exchange packets with the neighbouring blocks of the same machine through Unix sockets.

A call of Ray takes about a millisecond of processor time, much more than a step of a small problem. So blocks on one
machine run many rounds in one call, and send their packets to each other directly. Every epoch has sockets of its own:
packets of rounds that were rolled back cannot arrive. A process that dies closes its sockets, and whoever waits for its
packets raises `NeighbourLost`, closes its own, and so on: nobody waits for ever.

The driver connects the sockets in three steps, each of which ends in all blocks before the next one begins: every block
listens, connects to its neighbours of smaller numbers, and accepts those of larger numbers. So no step waits.

A socket has a name in the file system only until all neighbours have connected. Its folder is locked meanwhile, so the
next block that listens recognises and removes what a killed process has left.
"""

import fcntl
import os
import select
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

_FRAME = struct.Struct("<QIIB")       # bytes that follow, round, step, kind
_PACKETS, _END, _STALL = range(3)     # kinds: packets of a step, the end of a round, a block that cannot continue
_HELLO = struct.Struct("<II")         # number of the block, epoch
_CHUNK = 1 << 18
_PREFIX = "dbo-sockets-"
_LOCK_ATTEMPTS, _LOCK_PAUSE = 50, 0.01      # seconds between two attempts to lock a folder
_EMPTY_SECONDS = 60.0                 # until a folder that is empty is no longer one that is being made


class NeighbourLost(Exception):
    """A neighbouring block has closed its socket, or sends nothing."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a neighbour has sent at once."""

    kind: int
    round: int
    step: int
    packets: bytes


@dataclass(slots=True)
class _Peer:
    """The connection to one neighbouring block."""

    socket: socket.socket
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytearray = field(default_factory=bytearray)

    def send(self) -> None:
        """Send as much as the socket takes."""
        with suppress(BlockingIOError):
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self) -> None:
        """Receive what is there; raise ConnectionError at its end."""
        with suppress(BlockingIOError):
            while True:
                data = self.socket.recv(_CHUNK)
                if not data:
                    raise ConnectionError("closed")
                self.received += data
                if len(data) < _CHUNK:
                    return

    def take_frame(self) -> "_Frame | None":
        """Remove the first frame from what was received; None if it is not complete."""
        if len(self.received) < _FRAME.size:
            return None
        length, round_, step, kind = _FRAME.unpack_from(self.received)
        end = _FRAME.size + length
        if len(self.received) < end:
            return None
        frame = _Frame(kind, round_, step, bytes(memoryview(self.received)[_FRAME.size : end]))
        del self.received[:end]
        return frame


class PeerSockets:
    """The connections of one block in one epoch."""

    def __init__(self, number: int, epoch: int, timeout: float) -> None:
        self.number, self.epoch, self._timeout = number, epoch, timeout
        self._peers: dict[int, _Peer] = {}
        remove_stale_folders()
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)        # open to this user only
        self._lock = _lock_folder(self._folder)
        self._listener = socket.socket(socket.AF_UNIX)
        self._poll = select.poll()

    def listen(self, peers: int) -> str:
        """Listen for so many neighbours; return the path of the socket."""
        path = os.path.join(self._folder, str(self.number))
        self._listener.bind(path)
        self._listener.listen(max(1, peers))
        return path

    def connect(self, paths: Mapping[int, str]) -> None:
        """Connect to neighbours that listen, and introduce this block."""
        for number, path in paths.items():
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            connection.sendall(_HELLO.pack(self.number, self.epoch))
            self._add(number, connection)

    def accept(self, numbers: Iterable[int]) -> None:
        """Accept neighbours that have connected."""
        expected = set(numbers)
        self._listener.settimeout(self._timeout)
        while expected:
            connection, _ = self._listener.accept()
            connection.settimeout(self._timeout)
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) < _HELLO.size:
                raise ConnectionError("a process has connected that is no block")
            number, epoch = _HELLO.unpack(hello)
            if number not in expected or epoch != self.epoch:
                raise ConnectionError(f"block {number} of epoch {epoch} is not expected here")
            expected.remove(number)
            self._add(number, connection)
        self._stop_listening()

    def _add(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._peers[number] = _Peer(connection)
        self._poll.register(connection, select.POLLIN)

    def exchange(self, round_: int, step: int, packets: Mapping[int, bytes]) -> list[bytes] | None:
        """Send packets to every neighbour and return theirs of the same step, in the order of `packets`.

        None if a neighbour has ended the round, or is in another step: the blocks disagree about the number of steps.
        """
        for number, data in packets.items():
            self._queue(number, _Frame(_PACKETS, round_, step, data))
        waiting, received = set(packets), dict[int, bytes]()
        deadline = time.monotonic() + self._timeout
        while True:
            for number in list(waiting):
                frame = self._take_frame(number, round_)
                if frame is None:
                    continue
                if (frame.kind, frame.round, frame.step) != (_PACKETS, round_, step):
                    return None
                received[number] = frame.packets
                waiting.remove(number)
            if not waiting and not any(peer.unsent for peer in self._peers.values()):
                return [received[number] for number in packets]
            self._wait(waiting, deadline)

    def end_round(self, round_: int, step: int, is_stalled: bool) -> None:
        """Tell the neighbours that this block sends no further packets in the round. Nobody waits for it."""
        for number in self._peers:
            self._queue(number, _Frame(_STALL if is_stalled else _END, round_, step, b""))

    def _queue(self, number: int, frame: _Frame) -> None:
        peer, head = self._peers[number], _FRAME.pack(len(frame.packets), frame.round, frame.step, frame.kind)
        peer.unsent = memoryview(b"".join((peer.unsent, head, frame.packets)))
        try:
            peer.send()
        except OSError as error:
            raise _report_closed(number, error) from None

    def _take_frame(self, number: int, round_: int) -> _Frame | None:
        """Return the next frame of a neighbour, except for ends of rounds that have ended here too."""
        while True:
            frame = self._peers[number].take_frame()
            if frame is None or frame.kind != _END or frame.round >= round_:
                return frame

    def _wait(self, waiting: set[int], deadline: float) -> None:
        """Wait until a socket is ready, then send and receive."""
        left = deadline - time.monotonic()
        if left <= 0:
            number = min(waiting) if waiting else next(n for n, peer in self._peers.items() if peer.unsent)
            raise NeighbourLost(f"no packets from block {number} within {self._timeout:g} s (engine.step_timeout)")
        busy = [peer for peer in self._peers.values() if peer.unsent]
        for peer in busy:
            self._poll.modify(peer.socket, select.POLLIN | select.POLLOUT)
        ready = {file for file, _ in self._poll.poll(left * 1e3)}
        for peer in busy:
            self._poll.modify(peer.socket, select.POLLIN)
        for number, peer in self._peers.items():
            if peer.socket.fileno() in ready:
                try:
                    peer.send()
                    peer.receive()
                except OSError as error:
                    raise _report_closed(number, error) from None

    def close(self) -> None:
        """Close all connections; neighbours that wait for packets notice it."""
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._stop_listening()

    def _stop_listening(self) -> None:
        self._listener.close()
        if self._lock >= 0:
            _remove_folder(self._folder)
            os.close(self._lock)
            self._lock = -1


def _lock_folder(folder: str) -> int:
    """Open and lock a new folder. Another block may look at the same moment whether it is stale: try again then."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if attempt == _LOCK_ATTEMPTS - 1:
                os.close(handle)
                raise
            time.sleep(_LOCK_PAUSE)
    raise AssertionError("not reached")


def remove_stale_folders() -> None:
    """Remove the folders of sockets whose process has died before all neighbours had connected."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_stale(entry.path)


def _remove_if_stale(folder: str) -> None:
    """Remove a folder of this user that nobody has locked. Whoever makes one locks it before it holds a socket."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.listdir(handle) or time.time() - found.st_mtime > _EMPTY_SECONDS:
            _remove_folder(folder)
    finally:
        os.close(handle)


def _remove_folder(folder: str) -> None:
    """Remove a folder that holds sockets; anything else in it stays, and so does the folder."""
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                os.unlink(entry.path)
        os.rmdir(folder)


def _report_closed(number: int, error: OSError) -> NeighbourLost:
    return NeighbourLost(f"block {number} has closed its connection ({error.strerror or error})")
