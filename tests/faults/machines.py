"""A Ray cluster of several machines on one: each is a network namespace, and links between them can be cut.

    with start_machines(3) as machines:
        machines.run("-c", code)           # a driver on the first machine
        machines.cut(2)                    # the third is unreachable from now on
        machines.heal(2)

Needs the right to create network namespaces (root) and iproute2; `find_obstacle` says what is missing.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379


def find_obstacle() -> str | None:
    """Return why no network namespaces can be used here; None if they can."""
    if shutil.which("ip") is None:
        return "needs `ip` (Debian: apt-get install iproute2)"
    name = f"dbo-try-{os.getpid()}"
    made = _call("ip", "netns", "add", name)
    if made.returncode:
        return f"needs the right to create network namespaces: {made.stderr.strip()}"
    bridge = _call("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    _call("ip", "netns", "del", name)
    return f"needs the right to create a bridge: {bridge.stderr.strip()}" if bridge.returncode else None


def _call(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Machines:
    """Namespaces on one bridge, with Ray on each; number 0 is the head."""

    count: int
    mark: str = field(default_factory=lambda: f"dbo{os.getpid() % 100000}")
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="dbo-", dir="/tmp")))
    raylets: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def create(self) -> None:
        """Create the namespaces, the bridge and the links."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {
            **plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(ROOT), "DBO_TEST_MARK": self.mark,
        }
        for name in (self._switch, *map(self._space, range(self.count))):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number in range(self.count):
            space, port = self._space(number), f"p{number}"
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", port, "master", "br0")
            _ip("-n", self._switch, "link", "set", port, "up")

    @property
    def _switch(self) -> str:
        return f"{self.mark}-sw"

    def _space(self, number: int) -> str:
        return f"{self.mark}-{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def start_ray(self, number: int) -> None:
        """Run `ray start` on a machine."""
        ray = Path(sys.executable).with_name("ray")
        where = ["--address", f"{self.address(0)}:{PORT}"] if number else \
            ["--head", "--port", str(PORT), "--include-dashboard=false", "--temp-dir", str(self.folder)]
        with open(self.folder / f"ray-{number}.log", "ab") as log:
            self.raylets[number] = self.popen(
                number, str(ray), "start", "--block", "--node-ip-address", self.address(number), "--num-cpus", "1",
                *where, stdout=log, stderr=log)

    def popen(self, number: int, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start a command on a machine."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._space(number), *command], env=self.environment, cwd=self.folder,
            start_new_session=True, **options)

    def run(self, *arguments: str, timeout: float = 300) -> str:
        """Run Python on the first machine and return its output."""
        process = self.popen(0, sys.executable, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise RuntimeError(f"no end within {timeout:g} s: {err.decode()[-2000:]}") from None
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {err.decode()[-3000:]}")
        return out.decode()

    def count_alive(self) -> int:
        """Return how many machines the cluster has."""
        code = (
            "import ray; "
            f"ray.init('{self.address(0)}:{PORT}', log_to_driver=False, configure_logging=False); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        return int(self.run("-c", code, timeout=60).split()[-1])

    def wait_for(self, count: int, seconds: float = 90) -> None:
        """Wait until the cluster has so many machines."""
        deadline, found = time.monotonic() + seconds, -1
        while found != count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster has {found} machines, not {count}, after {seconds:g} s")
            try:
                found = self.count_alive()
            except RuntimeError:
                time.sleep(1)

    def cut(self, number: int) -> None:
        """Cut the link of a machine: packets vanish, connections stay open."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "down")

    def heal(self, number: int) -> None:
        """Connect a machine again."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "up")

    def processes(self, number: int) -> list[int]:
        """Return the processes on a machine."""
        return [int(pid) for pid in _call("ip", "netns", "pids", self._space(number)).stdout.split()]

    def wait_until_empty(self, number: int, seconds: float = 60) -> None:
        """Wait until all processes on a machine have ended."""
        deadline = time.monotonic() + seconds
        while self.processes(number):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {self.processes(number)} are left on machine {number}")
            time.sleep(0.5)

    def remove(self) -> None:
        """End all processes and remove the namespaces."""
        for number in range(self.count):
            for pid in self.processes(number):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
        for process in self.raylets.values():
            process.wait()
        for name in (*map(self._space, range(self.count)), self._switch):
            _call("ip", "netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def start_machines(count: int) -> Iterator[Machines]:
    """Start a cluster of so many machines; end it afterwards."""
    machines = Machines(count)
    try:
        machines.create()
        for number in range(count):
            machines.start_ray(number)
            machines.wait_for(number + 1)
        yield machines
    finally:
        machines.remove()
