"""Assign samples to nodes: iid, by class, or Dirichlet.

A partition sees labels and returns sample numbers. Train and validation samples are assigned separately by equal
generators (`assign_samples`): a node with a large share of a class has that share on both levels.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from dbo.components import name_method
from dbo.tasks.api import Array, Partition, Split, generator, param, partition


@partition("iid")
@dataclass(frozen=True, slots=True, kw_only=True)
class Iid:
    """Shuffled and cut into equal parts: every node sees the same distribution."""

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), nodes)]


@partition("by_class")
@dataclass(frozen=True, slots=True, kw_only=True)
class ByClass:
    """A share h of class c goes to its home node c mod m, the rest evenly to the other nodes."""

    h: float = param(0.8, ge=0, le=1, help="share of a class that its home node gets; 1/nodes is nearly iid")

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        _check_classes(labels, "by_class")
        node_of = np.zeros(len(labels), dtype=np.int64)
        sizes = np.zeros(nodes, dtype=np.int64)
        for c in np.unique(labels) if nodes > 1 else ():
            samples = rng.permutation(np.flatnonzero(labels == c))
            home = int(c) % nodes
            at_home = round(self.h * len(samples))
            others = np.delete(np.arange(nodes), home)
            # The remainder goes to the smallest nodes: sizes stay close and few nodes stay empty.
            others = others[np.argsort(sizes[others], kind="stable")]
            node_of[samples[:at_home]] = home
            node_of[samples[at_home:]] = others[np.arange(len(samples) - at_home) % len(others)]
            sizes += np.bincount(node_of[samples], minlength=nodes)
        parts = _group_by_node(node_of, nodes)
        empty = [node for node, part in enumerate(parts) if len(part) == 0]
        if empty:
            raise ValueError(
                f"partition.h: by_class with h={self.h:g} leaves node {empty[0]} without samples "
                f"({len(np.unique(labels))} classes, {len(labels)} samples, nodes={nodes}); "
                f"choose h nearer to 1/nodes, fewer nodes or more samples"
            )
        return parts


@partition("dirichlet")
@dataclass(frozen=True, slots=True, kw_only=True)
class Dirichlet:
    """Each class is spread over the nodes by shares sampled from a symmetric Dirichlet distribution."""

    alpha: float = param(0.5, gt=0, help="concentration: small gives each node few classes, large is nearly iid")

    def assign(self, labels: Array, nodes: int, rng: np.random.Generator) -> list[Array]:
        _check_enough(labels, nodes)
        _check_classes(labels, "dirichlet")
        # Shares first, shuffles second: equal generators then give train and validation the same shares.
        shares = rng.dirichlet(np.full(nodes, self.alpha), size=int(labels.max()) + 1)
        node_of = np.empty(len(labels), dtype=np.int64)
        for c in np.unique(labels):
            samples = rng.permutation(np.flatnonzero(labels == c))
            ends = np.round(np.cumsum(shares[c]) * len(samples)).astype(np.int64)
            node_of[samples] = np.searchsorted(ends[:-1], np.arange(len(samples)), side="right")
        sizes = np.bincount(node_of, minlength=nodes)
        for node in np.flatnonzero(sizes == 0):
            largest = int(np.argmax(sizes))
            node_of[np.flatnonzero(node_of == largest)[-1]] = node
            sizes[largest] -= 1
            sizes[node] = 1
        return _group_by_node(node_of, nodes)


def assign_samples(samples: Split, nodes: int, seed: int, partition: Partition) -> tuple[list[Array], list[Array]]:
    """Return the sample numbers per node for train and for val, by the same rule and equal generators."""
    train, val = (
        _check_assignment(
            partition, partition.assign(_protect(part.labels), nodes, generator(seed, "partition")), len(part), nodes)
        for part in (samples.train, samples.val)
    )
    return train, val


def _protect(labels: Array) -> Array:
    """Return labels that cannot be written into: the task uses the same ones."""
    view = labels.view()
    view.flags.writeable = False
    return view


def _check_assignment(partition: Partition, assigned: Any, samples: int, nodes: int) -> list[Array]:
    """Return the sample numbers of each node; raise ValueError unless they hold every sample once."""
    about = f"partition: {name_method(partition, 'assign')}"
    if not isinstance(assigned, list | tuple) or len(assigned) != nodes:
        found = f"{len(assigned)} entries" if isinstance(assigned, list | tuple) else f"a {type(assigned).__name__}"
        raise ValueError(f"{about} returned {found}; must be a list of {nodes} arrays of sample numbers, one per node")
    parts = [np.asarray(part) for part in assigned]
    if any(part.ndim != 1 or (part.size and part.dtype.kind not in "iu") for part in parts):
        raise ValueError(f"{about} returned entries that are not arrays of integers; must be sample numbers")
    if empty := [node for node, part in enumerate(parts) if not part.size]:
        raise ValueError(f"{about} gives node {empty[0]} no samples; must give every node at least one")
    numbers = np.concatenate(parts)
    if numbers.min() < 0 or numbers.max() >= samples:
        wrong = int(numbers.min() if numbers.min() < 0 else numbers.max())
        raise ValueError(f"{about} returned sample {wrong}; must be 0 to {samples - 1}")
    counts = np.bincount(numbers, minlength=samples)
    if (counts != 1).any():
        sample = int(np.argmax(counts != 1))
        how = "to no node" if counts[sample] == 0 else f"{counts[sample]} times"
        raise ValueError(f"{about} assigns sample {sample} {how}; must assign every sample to one node")
    return parts


def _group_by_node(node_of: Array, nodes: int) -> list[Array]:
    order = np.argsort(node_of, kind="stable")
    return np.split(order, np.cumsum(np.bincount(node_of, minlength=nodes))[:-1])


def _check_classes(labels: Array, name: str) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iub" or int(labels.min()) < 0:
        raise ValueError(
            f"partition.name: {name} needs class numbers 0, 1, … as labels, got {labels.dtype} {labels.shape}; use iid"
        )


def _check_enough(labels: Array, nodes: int) -> None:
    if len(labels) < nodes:
        raise ValueError(
            f"nodes: {nodes} nodes cannot share {len(labels)} samples; use at most {len(labels)} nodes or more data"
        )
