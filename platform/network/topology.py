"""Who talks to whom: graphs by name, their mixing weights, and how fast they mix.

A topology makes a networkx graph with nodes 0 … m − 1; `network(graph)` checks it and gives everything that the engines
need of it. Whatever cannot carry a run (a disconnected graph, too few nodes for a shape) is a ValueError of one line.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias
from zlib import crc32

import networkx as nx
import numpy as np
from annotated_types import Gt, Le, MinLen
from numpy.typing import NDArray
from scipy.linalg import eigvalsh
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh
from typing_extensions import Doc

from dbo.platform.config.paths import opened

Graph: TypeAlias = "nx.Graph[int]"

_TRIES = 1000            # draws of a random graph before giving up on a connected one
_DENSE = 500             # nodes up to which all eigenvalues are computed at once


class Topology(Protocol):
    """A family of graphs, one for every number of nodes that it allows."""

    def graph(self, nodes: int, seed: int) -> Graph:
        """The graph with nodes 0 … nodes − 1; only random families look at the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A circle: every node has two neighbours."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _circulant(nodes, [1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHop:
    """A circle with edges to the next and the next but one: four neighbours each."""

    def graph(self, nodes: int, seed: int) -> Graph:
        _at_least("two_hop", nodes, 5)
        return _circulant(nodes, [1, 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErdosRenyi:
    """Every edge is there with probability p; drawn again until the graph is connected."""

    p: Annotated[float, Gt(0), Le(1), Doc("probability of an edge")] = 0.4

    def graph(self, nodes: int, seed: int) -> Graph:
        first, second = np.triu_indices(nodes, 1)
        for attempt in range(_TRIES):
            generator = np.random.default_rng([seed, crc32(b"erdos_renyi"), attempt])
            there = generator.random(len(first)) < self.p
            graph = _graph(nodes, zip(first[there].tolist(), second[there].tolist(), strict=True))
            if nodes <= 1 or nx.is_connected(graph):
                return graph
        raise ValueError(
            f"topology.p: no connected graph in {_TRIES} draws with p={self.p} and nodes={nodes}; "
            f"connected graphs are common above p={min(1.0, math.log(nodes) / nodes):.2g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """Everyone talks to everyone."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _graph(nodes, ((i, j) for i in range(nodes) for j in range(i)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Node 0 talks to everyone, the others only to node 0."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _graph(nodes, ((0, i) for i in range(1, nodes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """A grid, as square as the number of nodes allows, whose sides are joined."""

    def graph(self, nodes: int, seed: int) -> Graph:
        _at_least("torus", nodes, 4)
        rows = max(side for side in range(1, math.isqrt(nodes) + 1) if nodes % side == 0)
        if rows == 1:
            raise ValueError(f"topology.name: torus needs a grid of at least 2 x 2 nodes, got the prime nodes={nodes}")
        columns = nodes // rows
        right = ((r * columns + c, r * columns + (c + 1) % columns) for r in range(rows) for c in range(columns))
        down = ((r * columns + c, (r + 1) % rows * columns + c) for r in range(rows) for c in range(columns))
        return _graph(nodes, [*right, *down])


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """A circle with edges to the nodes 1, 2, 4, 8, … steps away."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _circulant(nodes, [2**k for k in range((nodes - 1).bit_length())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The graph of a text file, a line `i j` per edge; empty lines and what follows a # do not count."""

    file: Annotated[str, MinLen(1), Doc("path of the file; nodes are numbered from 0")]

    def graph(self, nodes: int, seed: int) -> Graph:
        try:
            text = opened(self.file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ValueError(f"topology.file: cannot read {self.file}: {reason}") from None
        graph = _graph(nodes, [])
        for number, line in enumerate(text.splitlines(), start=1):
            content = line.partition("#")[0].strip()
            if content:
                graph.add_edge(*_edge(content, nodes, f"topology.file: {self.file}, line {number}"))
        return graph


TOPOLOGIES: dict[str, type[Topology]] = {
    "ring": Ring,
    "two_hop": TwoHop,
    "erdos_renyi": ErdosRenyi,
    "complete": Complete,
    "star": Star,
    "torus": Torus,
    "exponential": Exponential,
    "edges": Edges,
}


_DRAWN = 20_000      # edges; a graph with more cannot be drawn


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A graph that can carry a run, and the weights with which its nodes average."""

    nodes: int
    neighbours: tuple[tuple[int, ...], ...]     # sorted, without the node itself
    weights: "csr_array[Any]"                   # m x m float64, symmetric, doubly stochastic, sorted indices
    degree: NDArray[np.int64]                   # neighbours per node
    spectral_gap: float                         # ρ = 1 − max(|λ₂|, |λ_m|), 1 mixes at once, 0 never

    def describe(self) -> dict[str, Any]:
        """Facts for the record; the edges are left out (None) where there are too many to be drawn."""
        links = int(self.degree.sum()) // 2
        edges = [[i, j] for i, near in enumerate(self.neighbours) for j in near if i < j] if links <= _DRAWN else None
        return {"nodes": self.nodes, "links": links, "spectral_gap": self.spectral_gap, "edges": edges}


def network(graph: Graph) -> Network:
    """The network of a graph with Metropolis weights; a ValueError says why a graph cannot carry a run."""
    validate(graph)
    nodes = graph.number_of_nodes()
    neighbours = tuple(tuple(sorted(graph.neighbors(i))) for i in range(nodes))
    weights = metropolis(neighbours)
    gap = spectral_gap(weights)
    if not gap > 0:
        raise ValueError(f"topology: the graph does not mix, its second eigenvalue is {1 - gap:.12g} in magnitude")
    return Network(nodes, neighbours, weights, np.array([len(n) for n in neighbours], dtype=np.int64), gap)


def single_node() -> Network:
    """A network of one, for algorithms that run on a single machine."""
    return network(_graph(1, []))


def metropolis(neighbours: tuple[tuple[int, ...], ...]) -> "csr_array[Any]":
    """w_ij = 1 / (1 + max(deg_i, deg_j)) for an edge and w_ii = 1 − Σ_j w_ij, which is positive: |λ_m| < 1."""
    nodes = len(neighbours)
    degree = np.array([len(n) for n in neighbours], dtype=np.int64)
    rows = np.repeat(np.arange(nodes), degree)
    columns = np.array([j for n in neighbours for j in n], dtype=np.int64)
    values = 1.0 / (1 + np.maximum(degree[rows], degree[columns]))
    own = 1.0 - np.bincount(rows, weights=values, minlength=nodes)
    diagonal = np.arange(nodes)
    weights = csr_array(
        (np.concatenate([values, own]), (np.concatenate([rows, diagonal]), np.concatenate([columns, diagonal]))),
        shape=(nodes, nodes),
    )
    weights.sort_indices()
    return weights


def spectral_gap(weights: "csr_array[Any]") -> float:
    """1 − max(|λ₂|, |λ_m|) of a symmetric stochastic matrix: the rate at which averaging forgets differences."""
    nodes = weights.shape[0]
    if nodes == 1:
        return 1.0
    if nodes <= _DENSE:
        magnitudes = np.sort(np.abs(eigvalsh(weights.toarray())))
        return max(0.0, min(1.0, float(1 - magnitudes[-2])))

    def without_mean(v: NDArray[np.float64]) -> NDArray[np.float64]:
        rest: NDArray[np.float64] = weights @ v - v.mean()
        return rest

    # Taking the average out removes λ₁ = 1, so that the largest eigenvalue in magnitude is the one asked for. The start
    # is fixed: the same graph must give the same bits.
    operator = LinearOperator((nodes, nodes), matvec=without_mean, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(nodes)
    largest = eigsh(operator, k=1, which="LM", v0=start, ncv=min(nodes, 128), tol=1e-9, return_eigenvectors=False)
    return max(0.0, min(1.0, float(1 - abs(largest[0]))))


def validate(graph: Graph) -> None:
    """A ValueError says why a graph cannot carry a run; quick, other than weights and gap."""
    nodes = graph.number_of_nodes()
    if nodes < 1:
        raise ValueError("topology: the graph has no nodes, at least 1 is needed")
    if graph.is_directed() or graph.is_multigraph():
        raise ValueError("topology: the graph must be undirected, with at most one edge between two nodes")
    if set(graph.nodes) != set(range(nodes)):
        strangers = sorted(map(str, set(graph.nodes) - set(range(nodes))))
        raise ValueError(f"topology: the nodes must be numbered 0 to {nodes - 1}, got {', '.join(strangers[:5])}")
    loops = sorted(i for i, j in graph.edges if i == j)
    if loops:
        raise ValueError(f"topology: node {loops[0]} is its own neighbour")
    parts = sorted((sorted(part) for part in nx.connected_components(graph)), key=len)
    if len(parts) > 1:
        some = ", ".join(map(str, parts[0][:5])) + (", …" if len(parts[0]) > 5 else "")
        raise ValueError(
            f"topology: the graph has {len(parts)} components, it must be connected; the smallest holds node(s) {some}"
        )


def _graph(nodes: int, edges: Iterable[tuple[int, int]]) -> Graph:
    if nodes < 1:
        raise ValueError(f"nodes: at least 1 is needed, got nodes={nodes}")
    graph: Graph = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    return graph


def _circulant(nodes: int, distances: Iterable[int]) -> Graph:
    """Edges to the nodes at these distances along a circle; on a small circle some of them are the same edge."""
    steps = [step for step in distances if step < nodes]
    return _graph(nodes, ((i, (i + step) % nodes) for i in range(nodes) for step in steps))


def _at_least(name: str, nodes: int, least: int) -> None:
    if nodes < least:
        raise ValueError(f"topology.name: {name} needs at least {least} nodes, got nodes={nodes}")


def _edge(content: str, nodes: int, where: str) -> tuple[int, int]:
    words = content.split()
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"{where}: expected two node numbers 'i j', got {content[:60]!r}")
    i, j = int(words[0]), int(words[1])
    for node in (i, j):
        if node >= nodes:
            raise ValueError(f"{where}: unknown node {node}, with nodes={nodes} they are numbered 0 to {nodes - 1}")
    if i == j:
        raise ValueError(f"{where}: node {i} is its own neighbour")
    return i, j
