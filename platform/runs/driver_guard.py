"""Record the end of a run whose process Ray ended: a driver that loses its raylet exits at once, without any Python.

A small process watches the driver, its raylet and its GCS. If the driver ends without a goodbye after one of the two
has died, or Ray's log of the driver has the reason, the process prints one line, appends an event and writes a failed
summary. A driver that was killed stays unfinished, as on every engine: its own cluster dies with it, but only when it
is exiting already. Only the standard library is imported until then.
"""

import os
import select
import socket
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_GOODBYE = b"ended"
_RAYLET, _GCS = "raylet", "GCS"
_MARKS = {_RAYLET: b"Terminate the process", _GCS: b"Failed to connect to GCS"}      # in Ray's log of the driver
_TAIL = 20_000              # bytes of that log
_EXITING = 0x4              # PF_EXITING of Linux
_FLAGS = 6                  # field of /proc/PID/stat, counted after the name of the program


@contextmanager
def guard_driver(folder: Path) -> Iterator[None]:
    """Watch this process, which has connected to Ray, while it runs into a folder."""
    watched = _find_processes() if hasattr(os, "pidfd_open") else {}
    command = [sys.executable, "-m", "dbo.platform.runs.driver_guard", str(folder.absolute()), _find_logs()]
    try:
        process = subprocess.Popen(
            [*command, *(f"{name}={pid}" for name, pid in watched.items())], stdin=subprocess.PIPE,
            start_new_session=True)          # Ctrl-C is for the driver
    except OSError:
        yield                                # too many processes: the run matters more
        return
    assert process.stdin is not None
    try:
        yield
    finally:
        with suppress(OSError):
            process.stdin.write(_GOODBYE)
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def _find_processes() -> dict[str, int]:
    """Return the process ids of the raylet on this machine and, if it is here too, of the GCS."""
    import ray

    node = ray._private.worker._global_node
    if node is None:
        return {}
    own = {name: infos[0].process.pid for name, infos in node.all_processes.items() if infos}
    found = {_RAYLET: own.get("raylet") or _find_peer(node.raylet_socket_name or ""), _GCS: own.get("gcs_server")}
    return {name: pid for name, pid in found.items() if pid}


def _find_logs() -> str:
    """Return the folder of Ray's logs."""
    import ray

    node = ray._private.worker._global_node
    return str(node.get_logs_dir_path()) if node is not None else ""


def _find_peer(path: str) -> int | None:
    """Return the process that listens on a Unix socket."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0]) or None


def main() -> None:
    """Wait for the end of the driver; record it if Ray is the cause."""
    driver = os.getppid()
    folder, logs, *pairs = sys.argv[1:]
    pids = {name: int(pid) for name, _, pid in (pair.partition("=") for pair in pairs)}
    dead = watch(0, driver, pids)
    if dead is None:
        return
    if dead := dead or _read_reason(logs, driver):
        error = f"{' and '.join(dead)} died, and Ray has ended this process; --resume continues the run"
        print(f"dbo: {error}", file=sys.stderr, flush=True)
        _record_failure(Path(folder), error)


def watch(pipe: int, driver: int, pids: Mapping[str, int]) -> list[str] | None:
    """Return what had died before the driver closed its end of the pipe; None if it has said goodbye."""
    poll, handles = select.poll(), {}
    dead: list[str] = []
    poll.register(pipe, select.POLLIN)
    for name, pid in pids.items():
        with suppress(OSError):              # it has died already: the driver reports that itself
            handles[os.pidfd_open(pid)] = name
    for handle in handles:
        poll.register(handle, select.POLLIN)
    while True:
        ready = [handle for handle, _ in poll.poll()]
        if pipe in ready:
            return None if os.read(pipe, len(_GOODBYE)) == _GOODBYE else dead
        for handle in ready:
            poll.unregister(handle)
            if not _is_exiting(driver):
                dead.append(f"the {handles[handle]}")


def _read_reason(logs: str, driver: int) -> list[str]:
    """Return what Ray's log of the driver names: on a busy machine both may be gone before this process wakes up."""
    for path in Path(logs).glob(f"python-core-driver-*_{driver}.log") if logs else ():
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            text = file.read()
        return [f"the {name}" for name, mark in _MARKS.items() if mark in text]
    return []


def _is_exiting(pid: int) -> bool:
    """Decide whether a process has begun to exit, or is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(fields[_FLAGS]) & _EXITING)


def _record_failure(folder: Path, error: str) -> None:
    from dbo.platform.errors import InputError
    from dbo.platform.runs.run_folder import RunFolder, find_summary, iterate_metrics, read_events, read_experiment
    from dbo.platform.runs.schema import Summary, section

    files = RunFolder(folder)
    with suppress(InputError, OSError):
        files.acquire()                 # the driver's lock ended with it; another run may have begun already
        try:
            if find_summary(folder) is not None:
                return
            last = deque(iterate_metrics(files.metrics), maxlen=1)
            final, experiment = last[0] if last else {}, read_experiment(folder)
            started = [event for event in read_events(files.events) if event.kind == "started"]
            files.log_event("ended", status="failed", error=error)
            files.write_summary(Summary(
                "failed", error=error, name=str(experiment.get("name", "")), run_key=files.run_key() or "",
                algorithm=str(section(experiment, "algorithm").get("name", "")),
                rounds=final.get("round", 0), final=final,
                version=started[-1].version if started else None,
            ))
        finally:
            files.release()


if __name__ == "__main__":
    main()
