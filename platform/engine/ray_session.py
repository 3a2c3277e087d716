"""Connect to the Ray cluster of a command: the one that is named, or an own one on loopback that ends with it.

Ray's own way to end waits for the GCS and the raylet, for ever if one of them is stopped. So the connection ends before
that, with a deadline. After the deadline the processes of an own cluster are killed, and this one exits with the code
that the command has chosen.
"""

import atexit
import os
import secrets
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dbo.platform.engine.deadlines import call_within
from dbo.platform.engine.heartbeat import kill_processes, read_states
from dbo.platform.errors import InputError, RunError

_SHUTDOWN_SECONDS = 10.0
_ANSWER_SECONDS = 10.0         # for the GCS of a cluster that is named; Ray itself waits for it for ever
_HTTP2_HEAD = 9                # bytes of a frame's head: length, type, flags, stream
_HTTP2_SETTINGS = b"\4"        # type of the first frame that each side sends
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _HTTP2_SETTINGS + bytes(5)

_connected: str | None = None      # None: this process was connected by other code
_own_processes: dict[int, str] = {}        # of the cluster that this process has started, with their names
_exit_code: int | None = None              # of the command; None: unknown, as in a script that imports dbo
_is_stuck = False                          # whether Ray did not shut down in time


def connect(address: str | None) -> Any:
    """Return the `ray` module, connected. All runs of a process share one connection; it ends with the process."""
    address = address or os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:
        _prepare_environment(own=not address)
    import ray

    global _connected
    if ray.is_initialized():
        if address and _connected not in (None, address):
            raise InputError(f"engine.address: {address} is not allowed; this process is connected to {_connected}")
        return ray
    _connected = address or "a cluster of its own"
    atexit.unregister(_disconnect)
    atexit.register(_disconnect)           # later than Ray's own hook: it runs earlier
    if not address:
        others = _list_children()
        try:
            ray.init(
                address="local", include_dashboard=False, log_to_driver=False, configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise RunError(f"Ray cannot be started here: {reason}; engine.name=local needs no Ray") from error
        _own_processes.clear()
        _own_processes.update({pid: name for pid, name in _list_children().items() if pid not in others})
        return ray
    _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"engine.address: no Ray cluster answers at {address}: {_first_line(error)}") from None
    return ray


def set_exit_code(code: Any) -> None:
    """Record the exit code of the command, as `sys.exit` takes it."""
    global _exit_code
    _exit_code = code if isinstance(code, int) else int(code is not None)


def find_lost_process(names: Sequence[str] = ("gcs_server", "raylet"), or_stopped: bool = True) -> str | None:
    """Return which of these processes of the own cluster has died; None if none, or if the cluster is not our own."""
    states = read_states(_own_processes)
    for pid, name in _own_processes.items():
        if name in names:
            if states.get(pid, "Z") in "ZX":
                return f"Ray's {name} on this machine has died; --resume continues the run"
            if or_stopped and states[pid] in "Tt":
                return f"Ray's {name} on this machine is stopped (process {pid}); --resume continues the run"
    return None


def list_stopped_workers() -> list[int]:
    """Return the stopped workers of the own cluster. Its agents do not count: a raylet ends with them."""
    raylets = [pid for pid, name in _own_processes.items() if name == "raylet"]
    states = read_states(_list_children(raylets)) if raylets else {}
    return [pid for pid, state in states.items() if state in "Tt" and is_worker(pid)]


def is_worker(pid: int) -> bool:
    """Decide whether a child of the raylet runs tasks and actors, or is about to."""
    with suppress(OSError):
        return is_worker_command(Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0"))
    return False


def is_worker_command(command: bytes) -> bool:
    """Decide the same from its command line, which Ray replaces by a title."""
    return b"default_worker.py" in command or (command.startswith(b"ray::") and not command.endswith(b"Agent"))


def leave_lost_cluster() -> None:
    """Disconnect if a process of the own cluster has died: Ray ends this process with exit code 1 a minute later."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and find_lost_process(or_stopped=False):
        with suppress(TimeoutError):
            call_within(_SHUTDOWN_SECONDS, ray.shutdown)
        _kill_own_cluster()


def _kill_own_cluster() -> None:
    kill_processes([*_list_children(_own_processes), *_own_processes])


def _disconnect() -> None:
    """End the connection, at the end of the process and within a deadline."""
    global _is_stuck
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        return
    try:
        if find_lost_process():                # Ray would wait for it, or end this process with exit code 1
            raise TimeoutError
        call_within(_SHUTDOWN_SECONDS, ray.shutdown)
    except Exception:
        _is_stuck = True
        atexit.unregister(ray.shutdown)
        _kill_own_cluster()


@atexit.register
def _end_process() -> None:
    """End at once if Ray is stuck. Registered before most other hooks, so it runs after them."""
    if _is_stuck:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        failed = hasattr(sys, "last_value")    # an exception that nobody caught
        os._exit(int(failed) if _exit_code is None else _exit_code)


def _list_children(parents: Iterable[int] | None = None) -> dict[int, str]:
    """Return the children of processes, by default of this one, with their names."""
    parents = {os.getpid()} if parents is None else set(parents)
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if int(rest.split()[1]) in parents:
                found[int(entry.name)] = name
    return found


def _probe(address: str) -> None:
    """Raise `InputError` if nothing listens at the address: Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    if not port.isdigit() or not host:
        return                 # "auto" and the like
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS) as connection:
            if "://" not in address and os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                _greet(connection)
    except TimeoutError:
        reason = f"no answer within {_ANSWER_SECONDS:g} s"
        raise InputError(f"engine.address: no Ray cluster answers at {address}: {reason}") from None
    except OSError as error:
        raise InputError(f"engine.address: no Ray cluster answers at {address}: {error.strerror or error}") from None


def _greet(connection: socket.socket) -> None:
    """Begin HTTP/2, as a client of the GCS does: a stopped process has a port too, but does not answer."""
    connection.sendall(_HTTP2_PREFACE)
    answer = b""
    while len(answer) < 4 and (data := connection.recv(_HTTP2_HEAD)):
        answer += data
    if answer[3:4] != _HTTP2_SETTINGS:
        raise ConnectionError("what listens there is no head of Ray")


def prepare_client() -> None:
    """Make Ray's client use the token of this machine; by default it does not look for one."""
    if "ray" not in sys.modules:
        _prepare_environment(own=False)


def _prepare_environment(own: bool) -> None:
    """Set the variables that Ray reads once, when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")      # the driver reports the first error, once
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if own:
        # An own token, passed to the workers through the environment: no other user of the machine can submit work to
        # this cluster, and no token stays behind in the home folder.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"      # on every system this means: loopback only
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # By default a freed object stays in memory for up to a second: many of them, where each takes megabytes.
        os.environ.setdefault("RAY_free_objects_batch_size", "1")
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token() else "disabled")


def has_token() -> bool:
    """Decide whether there is a Ray token where Ray looks for it."""
    configured = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return configured or (Path.home() / ".ray" / "auth_token").exists()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
