"""Find listening servers and what they allow without a credential: sockets from /proc, services from HTTP probes."""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_TIMEOUT = 2.0
_UNAUTHORIZED = (401, 403)  # any other status, or none, is no proof of authentication
_MAX_SOCKETS = 256
_MAX_THREADS = 64           # with the timeout and the number above: done in some seconds, even if no server answers
_LISTENING = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Service = Literal["Ray", "Ray core", "MLflow", ""]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server reveals about itself without a credential."""

    service: Service = ""           # "": unknown
    is_open: bool = False           # it works without a credential
    any_host: bool = False          # it answers to any Host header, so that web pages can reach it

    @property
    def label(self) -> str:
        credential = "password" if self.service == "MLflow" else "token"
        return f"{self.service} {'without' if self.is_open else 'with'} a {credential}"


@dataclass(frozen=True, slots=True)
class Server:
    """A listening port of this machine."""

    port: int
    address: str                # where it listens; "" on all interfaces
    is_public: bool             # other machines can connect to it
    process: str                # name of the process, if it is visible
    probe: Probe


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port of `10.0.0.1:6379`, `ray://head:10001`, `http://head:8265`; None for "auto" and the like."""
    host, _, port = address.rpartition("://")[2].rstrip("/").rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdigit() and int(port) < 1 << 16 else None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def accepts_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def probe_server(host: str, port: int, secure: bool = False) -> Probe:
    """Find out which service listens, and whether it works without a credential."""
    status, text = _get(host, port, "/api/version", secure)
    if not status:
        return Probe()              # no HTTP, or no answer
    if status == 200 and "ray_version" in text:
        return Probe("Ray", is_open=_get(host, port, "/api/jobs/", secure)[0] not in _UNAUTHORIZED)
    mentions_ray = "ray" in text.lower() or "token" in text.lower()
    if status == 401 and _get(host, port, "/api/jobs/", secure)[0] == 401 and mentions_ray:
        return Probe("Ray")
    status, text = _get(host, port, "/version", secure)
    if status == 200 and text.strip()[:1].isdigit() and len(text) < 40:
        search = "/api/2.0/mlflow/experiments/search?max_results=1"      # /version itself accepts any Host header
        found, _ = _get(host, port, search, secure)
        forged, _ = _get(host, port, search, secure, host_header="evil.example")
        return Probe("MLflow", is_open=found not in _UNAUTHORIZED, any_host=forged == 200)
    return Probe()


def _get(host: str, port: int, path: str, secure: bool, host_header: str | None = None) -> tuple[int, str]:
    """Return status and start of the response; status 0 if there is none."""
    connection: http.client.HTTPConnection
    if secure:
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request("GET", path, headers={"Host": host_header} if host_header else {})
        response = connection.getresponse()
        return response.status, response.read(4096).decode(errors="replace")
    except (OSError, http.client.HTTPException, ValueError):
        return 0, ""
    finally:
        connection.close()


# ---- ports of this machine -------------------------------------------------------------------------------------------


def find_servers() -> list[Server]:
    """Return the servers of Ray and MLflow on this machine, each probed at the address where it listens."""
    sockets = dict(sorted(_read_sockets().items(), key=lambda entry: (entry[0][0], str(entry[0][1])))[:_MAX_SOCKETS])
    owners = _find_owners(set(sockets.values()))
    with ThreadPoolExecutor(max_workers=_MAX_THREADS) as pool:
        probes = list(pool.map(lambda key: _probe_socket(*key), sockets))
    found: dict[tuple[int, str, str, Service], Server] = {}      # a server at 0.0.0.0 and at [::] is listed once
    for ((port, address), inode), probe in zip(sockets.items(), probes, strict=True):
        process, has_token = owners.get(inode, ("", False))
        if not probe.service and process in ("gcs_server", "raylet"):
            probe = Probe("Ray core", is_open=not has_token)
        if probe.service:
            where = "" if address.is_unspecified else str(address)
            found.setdefault((port, where, process, probe.service), Server(
                port, where, not address.is_loopback, process, probe))
    return list(found.values())


def _probe_socket(port: int, address: Address) -> Probe:
    """Probe a server at its own address; one that listens on all interfaces, at loopback."""
    if not address.is_unspecified:
        return probe_server(str(address), port)
    probe = probe_server("127.0.0.1", port)
    return probe_server("::1", port) if address.version == 6 and not probe.service else probe


def _read_sockets() -> dict[tuple[int, Address], str]:
    """Return (port, address) of every listening socket → its inode."""
    found: dict[tuple[int, Address], str] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (Path("/proc/net") / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            address, _, port = columns[1].rpartition(":")
            if columns[3] == _LISTENING:
                found[int(port, 16), _parse_address(address)] = columns[9]
    return found


def _parse_address(text: str) -> Address:
    """Parse an address of /proc/net: 32-bit words in the byte order of the machine, which we take as little-endian."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    found = ipaddress.ip_address(raw)
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found


def _find_owners(inodes: set[str]) -> dict[str, tuple[str, bool]]:
    """Return inode → (name of its process, whether that was started with a Ray token), for visible processes."""
    targets = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[str, tuple[str, bool]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for inode in _list_sockets(process, targets):
                found[inode] = _describe_process(process)
    return found


def _list_sockets(process: Path, targets: dict[str, str]) -> Iterator[str]:
    try:
        for handle in (process / "fd").iterdir():
            inode = targets.get(str(handle.readlink()))
            if inode is not None:
                yield inode
    except OSError:
        return


def _describe_process(process: Path) -> tuple[str, bool]:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        environment = (process / "environ").read_bytes()
    except OSError:
        return "", False
    name = Path(words[0].decode(errors="replace").partition(" ")[0]).name.removesuffix(":")
    return name, b"RAY_AUTH_MODE=token" in environment
