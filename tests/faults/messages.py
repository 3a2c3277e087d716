"""Test 5, messages: packets that come twice, late or in another order change no bit; a lost one is an error."""

import random
from collections.abc import Callable
from typing import Any

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Host, ProtocolError
from dbo.platform.runs.runner import prepare
from tests.faults.row import TINY, Row

Packets = dict[int, bytes]
BLOCKS = [[0], [1, 2], [3]]


class Network:
    """Carries packets between hosts. Every packet is in somebody's hands until its step; old ones may come again."""

    def __init__(self, seed: int, chance: float) -> None:
        self.random, self.chance = random.Random(seed), chance
        self.old: list[tuple[int, bytes]] = []
        self.mischief = 0

    def posted(self, packets: dict[int, bytes]) -> dict[int, bytes]:
        """What a receiver has by the time of its step."""
        arrivals = list(packets.items())
        if self.random.random() < self.chance:
            arrivals += self.random.choices(arrivals, k=2)               # twice
            self.mischief += 1
        if self.random.random() < self.chance:
            self.random.shuffle(arrivals)                                # in another order
            self.mischief += 1
        if self.old and self.random.random() < self.chance:              # an old one, before the new one
            arrivals.insert(0, self.random.choice(self.old))
            self.mischief += 1
        self.old = (self.old + arrivals)[-50:]
        return dict(arrivals)



class Thief:
    """Takes a packet away, and may leave an older one in its place."""

    def __init__(self, seed: int, stale: bool, first: int = 2) -> None:
        self.random, self.stale, self.stolen = random.Random(seed), stale, False
        self.at, self.steps, self.before = first + self.random.randint(0, 4), 0, Packets()

    def posted(self, packets: Packets) -> Packets:
        self.steps += 1
        given = dict(packets)
        if self.steps >= self.at:
            self.stolen = True
            for victim in packets:       # of everybody: whoever listens misses somebody
                del given[victim]
                if self.stale and victim in self.before:
                    given[victim] = self.before[victim]
        if self.steps % len(BLOCKS) == 0:
            self.before = dict(packets)
        return given


def hosts(experiment: Experiment) -> list[Host]:
    made, parts = prepare(experiment), experiment.parts
    return [Host(parts.algorithm, parts.config, made.problem, made.network, ids) for ids in BLOCKS]


def states(made: list[Host]) -> list[bytes]:
    return [array.tobytes() for host in made for array in host.snapshot().values()]


def driven(made: list[Host], carry: Callable[[Packets], Packets], rounds: int = 3) -> None:
    """Rounds in lockstep, every step with the packets that `carry` lets through."""
    for round_ in range(1, rounds + 1):
        said = [host.begin(round_) for host in made]
        while any(packets is not None for packets in said):
            posted = {node: data for packets in said for node, data in (packets or {}).items()}
            said = [host.step(carry(posted)) for host in made]


def messages(short: bool, sabotage: bool = False) -> Row:
    """Every networked algorithm; one to twenty per cent of each mischief. Sabotage: stale packets are let in."""
    row = Row("messages", "0 silent differences")
    names = ("c2dfb",) if short else ("c2dfb", "c2dfb_nc", "madsbo", "mdbo", "dsgda_gt", "d_soba")
    for name in names:
        experiment = Experiment(**{**TINY, "algorithm": {"name": name}})
        calm = hosts(experiment)
        driven(calm, lambda packets: packets)
        for seed in range(6 if short else 30):
            network, hit = Network(seed, (0.01, 0.05, 0.2)[seed % 3]), hosts(experiment)
            driven(hit, network.posted)
            row.count(states(calm) == states(hit), f"{name}, seed {seed}: other bits")
            thief, robbed = Thief(seed, stale=bool(seed % 2), first=60 if sabotage else 2), hosts(experiment)
            if sabotage:
                for host in robbed:
                    host._open = _believing(host)     # type: ignore[method-assign]
            try:
                driven(robbed, thief.posted)
                row.count(False, f"{name}, seed {seed}: a lost packet was not missed")
            except ProtocolError:
                row.count(True)
    return row


def _believing(host: Host) -> Callable[..., object]:
    """A host that makes do with the last round's packet where this round's is missing."""
    opened, last = host._open, dict[tuple[int, int], object]()

    def believed(under: Any, node: int, heard: Packets) -> object:
        try:
            last[node, under.step] = opened(under, node, heard)
        except ProtocolError:
            if (node, under.step) not in last:
                raise
        return last[node, under.step]

    return believed
