"""Who holds which samples: iid, by class, or Dirichlet.

A partition sees labels and deals sample numbers. Train and validation samples are dealt separately by equal
generators (`deal`), so a node that is home to a class, or drew much of it, has it on both levels.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from dbo.tasks.api import Array, Partition, Samples, generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Iid:
    """Shuffled and cut into equal parts: every node sees the same distribution."""

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), nodes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByClass:
    """A share h of class c goes to its home node c mod m, the rest evenly to the other nodes."""

    h: Annotated[float, Ge(0), Le(1), Doc("share of a class that its home node gets; 1/nodes is nearly iid")] = 0.8

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        owner = np.zeros(len(labels), dtype=np.int64)
        held = np.zeros(nodes, dtype=np.int64)
        for c in np.unique(labels) if nodes > 1 else ():
            samples = rng.permutation(np.flatnonzero(labels == c))
            home = int(c) % nodes
            at_home = round(self.h * len(samples))
            others = np.delete(np.arange(nodes), home)
            # What does not divide evenly goes to those who hold least: this keeps sizes close and few nodes empty.
            others = others[np.argsort(held[others], kind="stable")]
            owner[samples[:at_home]] = home
            owner[samples[at_home:]] = others[np.arange(len(samples) - at_home) % len(others)]
            held += np.bincount(owner[samples], minlength=nodes)
        parts = _by_owner(owner, nodes)
        empty = [node for node, part in enumerate(parts) if len(part) == 0]
        if empty:
            raise ValueError(
                f"partition.h: by_class with h={self.h:g} leaves node {empty[0]} without samples "
                f"({len(np.unique(labels))} classes, {len(labels)} samples, nodes={nodes}); "
                f"choose h nearer to 1/nodes, fewer nodes or more samples"
            )
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Dirichlet:
    """Each class is spread over the nodes by shares drawn from a symmetric Dirichlet distribution."""

    alpha: Annotated[float, Gt(0), Doc("concentration: small gives each node few classes, large is nearly iid")] = 0.5

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        # Shares first, shuffles second: equal generators then give train and validation the same shares.
        shares = rng.dirichlet(np.full(nodes, self.alpha), size=int(labels.max()) + 1)
        owner = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            samples = rng.permutation(np.flatnonzero(labels == c))
            ends = np.round(np.cumsum(shares[c]) * len(samples)).astype(np.int64)
            owner[samples] = np.searchsorted(ends[:-1], np.arange(len(samples)), side="right")
        sizes = np.bincount(owner, minlength=nodes)
        for node in np.flatnonzero(sizes == 0):
            richest = int(np.argmax(sizes))
            owner[np.flatnonzero(owner == richest)[-1]] = node
            sizes[richest] -= 1
            sizes[node] = 1
        return _by_owner(owner, nodes)


PARTITIONS: dict[str, type[Partition]] = {"iid": Iid, "by_class": ByClass, "dirichlet": Dirichlet}


def deal(samples: Samples, nodes: int, seed: int, partition: Partition) -> tuple[list[Array], list[Array]]:
    """Sample numbers per node for train and for val, by the same rule and equal generators."""
    train, val = (
        partition.assign(part.labels, nodes, generator(seed, "partition")) for part in (samples.train, samples.val)
    )
    return train, val


def _by_owner(owner: Array, nodes: int) -> list[Array]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=nodes))[:-1])


def _check_enough(labels: Array, nodes: int) -> None:
    if len(labels) < nodes:
        raise ValueError(
            f"nodes: {nodes} nodes cannot share {len(labels)} samples; use at most {len(labels)} nodes or more data"
        )
