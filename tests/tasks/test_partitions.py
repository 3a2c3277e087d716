"""Partitions: every sample once, no empty node, and the property of each rule."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo.tasks.datasets.digits import Digits
from dbo.tasks.partitions import ByClass, Dirichlet, Iid, assign_samples
from dbo.tasks.registry import PARTITIONS

labels_of = st.lists(st.integers(0, 7), min_size=1, max_size=120).map(np.array)
partitions = st.one_of(
    st.just(Iid()),
    st.builds(ByClass, h=st.floats(0, 1)),
    st.builds(Dirichlet, alpha=st.floats(1e-6, 1e3)),
)


def assign(partition: Any, labels: np.ndarray[Any, Any], nodes: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    parts: list[np.ndarray[Any, Any]] = partition.assign(labels, nodes, np.random.default_rng(seed))
    return parts


def leaves_a_node_empty(h: float, labels: np.ndarray[Any, Any], nodes: int) -> bool:
    """Return whether some node has no home class and gets no remainder, which goes to the smallest nodes."""
    sizes = np.zeros(nodes, dtype=int)
    for c in np.unique(labels):
        count = int(np.sum(labels == c))
        home, at_home = int(c) % nodes, count if nodes == 1 else round(h * count)
        sizes[home] += at_home
        queue = sorted((node for node in range(nodes) if node != home), key=lambda node: (sizes[node], node))
        for k in range(count - at_home):
            sizes[queue[k % len(queue)]] += 1
    return bool(sizes.min() == 0)


@given(partition=partitions, labels=labels_of, nodes=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_sample_once_and_no_node_empty(
    partition: Any, labels: np.ndarray[Any, Any], nodes: int, seed: int
) -> None:
    """Every sample goes to one node, the same one for the same seed; impossible cases raise a one-line error."""
    if len(labels) < nodes:
        with pytest.raises(ValueError, match=r"^nodes: [^\n]*$"):
            assign(partition, labels, nodes, seed)
        return
    if isinstance(partition, ByClass) and leaves_a_node_empty(partition.h, labels, nodes):
        with pytest.raises(ValueError, match=r"^partition.h: [^\n]*$"):
            assign(partition, labels, nodes, seed)
        return
    parts = assign(partition, labels, nodes, seed)
    assert len(parts) == nodes
    assert all(len(part) > 0 and part.dtype == np.int64 for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for again, part in zip(assign(partition, labels, nodes, seed), parts, strict=True):
        np.testing.assert_array_equal(again, part)


@given(labels=labels_of, nodes=st.integers(1, 12))
def test_iid_sizes_differ_by_at_most_one(labels: np.ndarray[Any, Any], nodes: int) -> None:
    """The nodes get equal parts."""
    if len(labels) >= nodes:
        sizes = [len(part) for part in assign(Iid(), labels, nodes)]
        assert max(sizes) - min(sizes) <= 1


@given(h=st.floats(0.05, 0.95), nodes=st.integers(2, 12), classes=st.integers(1, 20), each=st.integers(300, 400))
def test_by_class_gives_home_its_share_and_the_rest_evenly(h: float, nodes: int, classes: int, each: int) -> None:
    """Of class c, node c mod m gets h to the nearest sample; any two other nodes differ by at most one."""
    labels = np.repeat(np.arange(classes), each)
    parts = assign(ByClass(h=h), labels, nodes)
    for c in range(classes):
        counts = np.array([np.sum(labels[part] == c) for part in parts])
        assert counts[c % nodes] == round(h * each)
        others = np.delete(counts, c % nodes)
        assert others.max() - others.min() <= 1


def test_by_class_serves_nodes_without_a_home_class() -> None:
    """More nodes than classes: nodes without a home class still get their share of the rest."""
    labels = np.repeat([0, 1, 2], 100)
    sizes = [len(part) for part in assign(ByClass(h=0.8), labels, 8)]
    assert min(sizes[3:]) >= 3 * 20 // 7
    assert min(sizes[:3]) >= 80


def test_by_class_assigns_the_remainder_to_the_smallest_nodes() -> None:
    """Ten classes with a remainder of five samples each fill twenty nodes; a fixed order would not."""
    labels = np.repeat(np.arange(10), 10)
    assert min(len(part) for part in assign(ByClass(h=0.5), labels, 20)) >= 1


@pytest.mark.parametrize(("partition", "labels", "nodes", "message"), [
    (Iid(), np.zeros(3, dtype=int), 4, r"nodes: 4 nodes cannot share 3 samples; use at most 3 nodes"),
    (Dirichlet(), np.zeros(3, dtype=int), 4, r"nodes: 4 nodes cannot share 3 samples"),
    (ByClass(h=1.0), np.repeat([0, 1, 2], 50), 5, r"partition.h: by_class with h=1 leaves node 3 .*choose h"),
])
def test_impossible_partition_is_refused(
    partition: Any, labels: np.ndarray[Any, Any], nodes: int, message: str
) -> None:
    """Too few samples, or a home class for some nodes only: one line that names the field and what would work."""
    with pytest.raises(ValueError, match=message):
        assign(partition, labels, nodes)


def test_by_class_on_a_single_node() -> None:
    """m = 1: the node has all samples, whatever h is."""
    assert len(assign(ByClass(h=0.0), np.arange(5), 1)[0]) == 5


def test_dirichlet_concentration() -> None:
    """Small alpha puts most of a class on one node; large alpha spreads it evenly."""
    labels = np.repeat(np.arange(10), 100)

    def largest_share(alpha: float) -> float:
        parts = assign(Dirichlet(alpha=alpha), labels, 5)
        return float(np.mean([max(np.sum(labels[p] == c) for p in parts) / 100 for c in range(10)]))

    assert largest_share(0.01) > 0.9
    assert largest_share(1000.0) < 0.25


@pytest.mark.parametrize("name", ["by_class", "dirichlet"])
def test_train_and_val_have_the_same_homes(name: str) -> None:
    """A node's class shares on the lower level are those on the upper level, up to rounding."""
    samples = Digits().load(0, None)
    train, val = assign_samples(samples, 10, 0, PARTITIONS[name]())
    for part, indices in ((samples.train, train), (samples.val, val)):
        assert sum(map(len, indices)) == len(part)

    def shares(labels: np.ndarray[Any, Any], indices: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        counts = np.stack([np.bincount(labels[index], minlength=10) for index in indices])
        return np.asarray(counts / counts.sum(axis=0))

    np.testing.assert_allclose(shares(samples.train.labels, train), shares(samples.val.labels, val), atol=0.03)
