"""What listens, and what a stranger could ask of it: sockets from /proc, servers told by what they answer."""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 2.0
_SHUT = (401, 403)          # anything else, silence included, is no sign of a closed door
_MOST_SOCKETS = 256
_AT_ONCE = 64               # with the timeout and the number above: an answer in some seconds, whoever is silent
_LISTENING = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server is, as far as it tells a stranger; "" if it does not."""

    kind: str = ""
    any_host: bool = False      # answers a browser that was led here under another name


@dataclass(frozen=True, slots=True)
class Server:
    """A listening port of this machine."""

    port: int
    address: str                # where it listens; "" on all interfaces
    public: bool                # others than this machine can connect to it
    process: str                # the command, where it may be seen
    kind: str
    any_host: bool


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of `10.0.0.1:6379`, `ray://head:10001`, `http://head:8265`; None for "auto" and the like."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() and int(port) < 1 << 16 else None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def ask(host: str, port: int, secure: bool = False) -> Answer:
    """Which server this is, and whether it lets a stranger in."""
    status, text = _get(host, port, "/api/version", secure)
    if not status:
        return Answer()             # speaks no HTTP, or not to us
    if status == 200 and "ray_version" in text:
        listed, _ = _get(host, port, "/api/jobs/", secure)
        return Answer("Ray with a token" if listed in _SHUT else "ray, open")
    if status == 401 and _get(host, port, "/api/jobs/", secure)[0] == 401 and _looks_like_ray(text):
        return Answer("Ray with a token")
    status, text = _get(host, port, "/version", secure)
    if status == 200 and text.strip()[:1].isdigit() and len(text) < 40:
        search = "/api/2.0/mlflow/experiments/search?max_results=1"      # /version itself heeds any Host
        searched, _ = _get(host, port, search, secure)
        evil, _ = _get(host, port, search, secure, host_header="evil.example")
        return Answer("MLflow with a password" if searched in _SHUT else "mlflow, open", any_host=evil == 200)
    return Answer()


def _looks_like_ray(text: str) -> bool:
    return "ray" in text.lower() or "token" in text.lower()


def _get(host: str, port: int, path: str, secure: bool, host_header: str | None = None) -> tuple[int, str]:
    """Status and the beginning of the answer; 0 if there is none."""
    made: http.client.HTTPConnection
    if secure:
        made = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=ssl.create_default_context())
    else:
        made = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        made.request("GET", path, headers={"Host": host_header} if host_header else {})
        answer = made.getresponse()
        return answer.status, answer.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):
        return 0, ""
    finally:
        made.close()


# ---- this machine's ports --------------------------------------------------------------------------------------------


def servers() -> list[Server]:
    """Ray's and MLflow's servers on this machine, asked where they listen; others are left alone after one question."""
    sockets = dict(sorted(_listening().items(), key=lambda entry: (entry[0][0], str(entry[0][1])))[:_MOST_SOCKETS])
    owners = _owners(set(sockets.values()))
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        answers = list(pool.map(lambda socket_: _ask_at(*socket_), sockets))
    found: dict[tuple[int, str, str, str], Server] = {}      # one that listens at 0.0.0.0 and at [::] is one server
    for ((port, address), inode), answer in zip(sockets.items(), answers, strict=True):
        process, token = owners.get(inode, ("", False))
        kind = answer.kind
        if not kind and process in ("gcs_server", "raylet"):
            kind = "Ray's own protocol with a token" if token else "ray core, open"
        if kind:
            where = "" if address.is_unspecified else str(address)
            found.setdefault((port, where, process, kind), Server(
                port, where, not address.is_loopback, process, kind, answer.any_host))
    return list(found.values())


def _ask_at(port: int, address: Address) -> Answer:
    """Where a server listens at all interfaces, this machine's own address will do."""
    if not address.is_unspecified:
        return ask(str(address), port)
    answer = ask("127.0.0.1", port)
    return ask("::1", port) if address.version == 6 and not answer.kind else answer


def _listening() -> dict[tuple[int, Address], str]:
    """Port and address → inode of the socket."""
    found: dict[tuple[int, Address], str] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (Path("/proc/net") / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            address, _, port = words[1].rpartition(":")
            if words[3] == _LISTENING:
                found[int(port, 16), _address(address)] = words[9]
    return found


def _address(text: str) -> Address:
    """The kernel prints 32-bit words in the machine's byte order, which is little-endian wherever this runs."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    found = ipaddress.ip_address(raw)
    mapped = getattr(found, "ipv4_mapped", None)
    return mapped or found


def _owners(inodes: set[str]) -> dict[str, tuple[str, bool]]:
    """Inode → (name of the process, whether it was started with a Ray token); of those that may be looked at."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, tuple[str, bool]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for inode in _sockets(process, wanted):
                found[inode] = _name(process)
    return found


def _sockets(process: Path, wanted: dict[str, str]) -> Iterator[str]:
    try:
        for handle in (process / "fd").iterdir():
            inode = wanted.get(str(handle.readlink()))
            if inode is not None:
                yield inode
    except OSError:
        return


def _name(process: Path) -> tuple[str, bool]:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        environment = (process / "environ").read_bytes()
    except OSError:
        return "", False
    name = Path(words[0].decode(errors="replace").partition(" ")[0]).name.removesuffix(":")
    return name, b"RAY_AUTH_MODE=token" in environment
