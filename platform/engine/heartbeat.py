"""Detect actors that are silent: their process is stopped, or their machine does not answer.

A thread inside an actor would be no witness. It needs the GIL, which a long native call may hold, and then looks dead
while the actor works. So each process is observed from outside: the driver reads the state of the processes on its own
machine, and a `Watcher`, a small actor that does nothing else, reads it on every other one. An actor that works is
never silent; `engine.step_timeout` limits that.
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbo.platform.engine.deadlines import call_within

POLL_SECONDS = 2.0             # between two looks at the processes while the driver waits
_CALL_SECONDS = 5.0            # for a call of Ray that may block


@dataclass(frozen=True, slots=True)
class Place:
    """Where the process of an actor runs."""

    machine: str               # Ray's id of the machine
    pid: int


def read_states(pids: Iterable[int]) -> dict[int, str]:
    """Return the kernel's state letter of each process; processes that it does not know are left out."""
    states = {}
    for pid in pids:
        with suppress(OSError, IndexError):
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return states


def kill_processes(pids: Iterable[int]) -> None:
    """Kill processes, stopped ones too: those ignore every milder signal."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Watcher:
    """Ray actor that reads the states of processes on one machine."""

    def read_states(self, pids: Sequence[int]) -> dict[int, str]:
        return read_states(pids)

    def kill(self, pids: Sequence[int]) -> None:
        kill_processes(set(pids) & _list_siblings())


def _list_siblings() -> set[int]:
    """Return the processes that the raylet of this machine has started; numbers of ended processes are used again."""
    parent = os.getppid()
    siblings = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                siblings.add(int(entry.name))
    return siblings


@dataclass(slots=True)
class _Machine:
    """What the driver knows about a machine."""

    watcher: Any = None                # None: the driver's own machine
    question: Any = None               # reference to the answer that is awaited
    answered: float = 0.0              # when it answered last, or when the driver began to ask


@dataclass(slots=True)
class Heartbeats:
    """The signs of life of the actors of one engine."""

    ray: Any
    timeout: float                     # engine.heartbeat_timeout
    places: dict[int, Place] = field(default_factory=dict)        # block → its process
    _machines: dict[str, _Machine] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)      # process → since when it is stopped

    def watch(self, places: Mapping[int, Place]) -> None:
        """Observe these blocks from now on, beside those that are observed already."""
        own = self.ray.get_runtime_context().get_node_id()
        self.places.update(places)
        for name in {place.machine for place in places.values()} - self._machines.keys():
            watcher = None if name == own else self._create_watcher(name)
            self._machines[name] = _Machine(watcher, answered=time.monotonic())

    def forget(self, blocks: Iterable[int]) -> None:
        """Stop observing blocks whose actors are replaced."""
        for block in blocks:
            self.places.pop(block, None)
        used = {place.machine for place in self.places.values()}
        for name in [name for name in self._machines if name not in used]:
            self._end_watcher(self._machines.pop(name))

    def close(self) -> None:
        """End the watchers."""
        self.forget(list(self.places))

    def begin(self) -> None:
        """Begin to look: nobody has asked the machines while the driver was not waiting."""
        for machine in self._machines.values():
            machine.answered = time.monotonic()
        self._stopped.clear()

    def find_silent(self) -> dict[int, str]:
        """Return the blocks without a sign of life for `timeout` seconds, each with the reason. Never blocks."""
        now = time.monotonic()
        states = {name: self._ask(name, machine, now) for name, machine in self._machines.items()}
        silent = {}
        for block, place in self.places.items():
            machine = self._machines[place.machine]
            if now - machine.answered > self.timeout:
                silent[block] = f"its machine has not answered for {self.timeout:g} s (engine.heartbeat_timeout)"
            elif self._is_stopped(place, states[place.machine], now):
                silent[block] = f"process {place.pid} is stopped"
        return silent

    def end_stopped(self, pids: Iterable[int]) -> list[int]:
        """Kill processes on this machine that are stopped for half of the timeout; return them.

        An actor that has not answered yet has no known place. Ray reports the death of its process.
        """
        now = time.monotonic()
        states = read_states(pids)
        ended = [pid for pid in states if self._is_stopped(Place("", pid), states, now)]
        kill_processes(ended)
        return ended

    def end(self, blocks: Iterable[int]) -> None:
        """Kill the processes of silent blocks where they can be reached."""
        by_machine: dict[str, list[int]] = {}
        for block in blocks:
            if block in self.places:
                by_machine.setdefault(self.places[block].machine, []).append(self.places[block].pid)
        for name, pids in by_machine.items():
            watcher = self._machines[name].watcher
            if watcher is None:
                kill_processes(pids)
            else:
                watcher.kill.remote(pids)

    def machines_of(self, blocks: Iterable[int]) -> set[str]:
        """Return the machines of these blocks, except for the driver's own."""
        names = {self.places[block].machine for block in blocks if block in self.places}
        return {name for name in names if self._machines[name].watcher is not None}

    def has_answered(self, name: str) -> bool:
        """Ask a machine again; return whether it has answered since it was found to be silent."""
        machine, now = self._machines[name], time.monotonic()
        self._ask(name, machine, now)
        return now - machine.answered < self.timeout

    def _ask(self, name: str, machine: _Machine, now: float) -> Mapping[int, str]:
        """Return the states that a machine reports, as far as its answer is there; ask again if it is."""
        pids = [place.pid for place in self.places.values() if place.machine == name]
        if machine.watcher is None:
            machine.answered = now
            return read_states(pids)
        states: Mapping[int, str] = {}
        errors = self.ray.exceptions
        if machine.question is not None:
            try:
                states = self.ray.get(machine.question, timeout=0)
                machine.answered, machine.question = now, None
            except errors.GetTimeoutError:
                return {}
            except errors.RayError:               # the watcher has died, its machine perhaps not
                machine.watcher, machine.question = self._create_watcher(name), None
        machine.question = machine.watcher.read_states.remote(pids)
        return states

    def _is_stopped(self, place: Place, states: Mapping[int, str], now: float) -> bool:
        """Decide whether a process is stopped for half of the timeout; a debugger stops it for a moment only."""
        if place.pid not in states:
            return False
        if states[place.pid] not in "Tt":
            self._stopped.pop(place.pid, None)
            return False
        return now - self._stopped.setdefault(place.pid, now) >= self.timeout / 2

    def _create_watcher(self, name: str) -> Any:
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
        return self.ray.remote(Watcher).options(
            num_cpus=0, scheduling_strategy=strategy, max_restarts=0, max_task_retries=0).remote()

    def _end_watcher(self, machine: _Machine) -> None:
        if machine.watcher is not None and self.ray.is_initialized():
            with suppress(Exception):
                call_within(_CALL_SECONDS, lambda: self.ray.kill(machine.watcher))
