"""Test 5, messages: packets that arrive twice, late or in another order change no bit; a lost one is an error."""

import random
from collections.abc import Callable
from typing import Any

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Block, Packets, ProtocolError
from dbo.platform.runs.runner import prepare
from tests.faults.row import TINY, Row

BLOCKS = [[0], [1, 2], [3]]
Delivery = Callable[[Packets], Packets]      # sent packets → the packets that a receiver has when its step starts


class Network:
    """Deliver every packet before its step; some arrive twice, in another order, or after an old one."""

    def __init__(self, seed: int, chance: float) -> None:
        self.random, self.chance = random.Random(seed), chance
        self.old: list[tuple[int, bytes]] = []
        self.faults = 0

    def deliver(self, packets: Packets) -> Packets:
        arrivals = list(packets.items())
        if self.random.random() < self.chance:
            arrivals += self.random.choices(arrivals, k=2)               # twice
            self.faults += 1
        if self.random.random() < self.chance:
            self.random.shuffle(arrivals)                                # in another order
            self.faults += 1
        if self.old and self.random.random() < self.chance:              # an old one, before the new one
            arrivals.insert(0, self.random.choice(self.old))
            self.faults += 1
        self.old = (self.old + arrivals)[-50:]
        return dict(arrivals)


class LossyNetwork:
    """Lose all packets from some step on; `stale`: deliver those of the step before instead."""

    def __init__(self, seed: int, stale: bool, first: int = 2) -> None:
        self.stale, self.has_lost = stale, False
        self.at, self.steps, self.before = first + random.Random(seed).randint(0, 4), 0, Packets()

    def deliver(self, packets: Packets) -> Packets:
        self.steps += 1
        delivered = dict(packets)
        if self.steps >= self.at:
            self.has_lost = True
            delivered = {sender: self.before[sender] for sender in packets if self.stale and sender in self.before}
        if self.steps % len(BLOCKS) == 0:
            self.before = dict(packets)
        return delivered


def start(experiment: Experiment) -> list[Block]:
    """Return the blocks of an experiment."""
    setup, parts = prepare(experiment), experiment.parts
    return [Block(parts.algorithm, parts.config, setup.problem, setup.network, ids) for ids in BLOCKS]


def states(blocks: list[Block]) -> list[bytes]:
    """Return the bytes of every array of every block."""
    return [array.tobytes() for block in blocks for array in block.snapshot().values()]


def advance(blocks: list[Block], deliver: Delivery = lambda packets: packets, rounds: int = 3) -> None:
    """Run rounds in lockstep, every step with the packets that `deliver` returns."""
    for round_ in range(1, rounds + 1):
        outgoing = [block.begin(round_) for block in blocks]
        while any(sent is not None for sent in outgoing):
            packets = {node: data for sent in outgoing for node, data in (sent or {}).items()}
            outgoing = [block.step(deliver(packets)) for block in blocks]


def messages(short: bool, sabotage: bool = False) -> Row:
    """Every networked algorithm; 1 to 20 % of each fault. Sabotage: blocks accept stale packets."""
    row = Row("messages", "0 silent differences")
    names = ("c2dfb",) if short else ("c2dfb", "c2dfb_nc", "madsbo", "mdbo", "dsgda_gt", "d_soba")
    for name in names:
        experiment = Experiment(**{**TINY, "algorithm": {"name": name}})
        calm = start(experiment)
        advance(calm)
        for seed in range(6 if short else 30):
            network, hit = Network(seed, (0.01, 0.05, 0.2)[seed % 3]), start(experiment)
            advance(hit, network.deliver)
            row.count(states(calm) == states(hit), f"{name}, seed {seed}: other bits")
            lossy, starved = LossyNetwork(seed, stale=bool(seed % 2), first=60 if sabotage else 2), start(experiment)
            if sabotage:
                for block in starved:
                    block._decode = _accept_stale(block)     # type: ignore[method-assign]
            try:
                advance(starved, lossy.deliver)
                row.count(False, f"{name}, seed {seed}: a lost packet was not noticed")
            except ProtocolError:
                row.count(True)
    return row


def _accept_stale(block: Block) -> Callable[..., object]:
    """Return a decoder that falls back to the packet of the last round where that of this round is missing."""
    decode, last = block._decode, dict[tuple[int, int], object]()

    def accept(current: Any, node: int, received: Packets) -> object:
        try:
            last[node, current.step] = decode(current, node, received)
        except ProtocolError:
            if (node, current.step) not in last:
                raise
        return last[node, current.step]

    return accept
