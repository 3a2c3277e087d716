"""Build communication graphs by name, their mixing weights, and their spectral gap.

A topology builds a networkx graph with nodes 0 … m − 1; `build_network(graph)` validates it and adds what the engines
need. A graph that cannot carry a run (disconnected, too few nodes for its shape) is a ValueError of one line.
"""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar
from zlib import crc32

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigvalsh
from scipy.sparse import csr_array
from scipy.sparse.linalg import LinearOperator, eigsh

from dbo.components import Registry, name_method
from dbo.parameters import param

Graph: TypeAlias = "nx.Graph[int]"
C = TypeVar("C", bound=type)

_TRIES = 1000            # samples of a random graph before giving up on a connected one
_DENSE = 500             # nodes up to which all eigenvalues are computed at once
_DIGITS = 9              # of a node number in an edge list
_MAX_EDGES = 20_000      # edges; a graph with more is not recorded, for it cannot be plotted


class Topology(Protocol):
    """A family of graphs, one for every number of nodes that it allows."""

    def graph(self, nodes: int, seed: int) -> Graph:
        """Return the graph with nodes 0 … nodes − 1; only random families use the seed."""


TOPOLOGIES: Registry[type[Topology]] = Registry(
    "topology",
    dict.fromkeys(
        ("ring", "two_hop", "erdos_renyi", "complete", "star", "torus", "exponential", "edges"), __name__
    ),
    methods=("graph",),
)


def topology(name: str) -> Callable[[C], C]:
    """Register the decorated class as a topology: `graph(nodes, seed)` returns a networkx graph."""
    return TOPOLOGIES.register(name)


@topology("ring")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """A cycle: every node has two neighbours."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _circulant(nodes, [1])


@topology("two_hop")
@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHop:
    """A cycle with edges to the nodes one and two steps away: four neighbours each."""

    def graph(self, nodes: int, seed: int) -> Graph:
        _at_least("two_hop", nodes, 5)
        return _circulant(nodes, [1, 2])


@topology("erdos_renyi")
@dataclass(frozen=True, slots=True, kw_only=True)
class ErdosRenyi:
    """Every edge exists with probability p; sampled again until the graph is connected."""

    p: float = param(0.4, gt=0, le=1, help="probability of an edge")

    def graph(self, nodes: int, seed: int) -> Graph:
        first, second = np.triu_indices(nodes, 1)
        for attempt in range(_TRIES):
            generator = np.random.default_rng([seed, crc32(b"erdos_renyi"), attempt])
            kept = generator.random(len(first)) < self.p
            graph = _graph(nodes, zip(first[kept].tolist(), second[kept].tolist(), strict=True))
            if nodes <= 1 or nx.is_connected(graph):
                return graph
        raise ValueError(
            f"topology.p: no connected graph in {_TRIES} samples with p={self.p} and nodes={nodes}; "
            f"connected graphs are common above p={min(1.0, math.log(nodes) / nodes):.2g}"
        )


@topology("complete")
@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """All pairs of nodes are neighbours."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _graph(nodes, ((i, j) for i in range(nodes) for j in range(i)))


@topology("star")
@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Node 0 is the neighbour of all others, which have no other neighbour; methods with a server: an extra node."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _graph(nodes, ((0, i) for i in range(1, nodes)))


@topology("torus")
@dataclass(frozen=True, slots=True, kw_only=True)
class Torus:
    """A grid, as square as the number of nodes allows, that wraps around at its sides."""

    def graph(self, nodes: int, seed: int) -> Graph:
        _at_least("torus", nodes, 4)
        rows = max(side for side in range(1, math.isqrt(nodes) + 1) if nodes % side == 0)
        if rows == 1:
            raise ValueError(f"topology.name: torus needs a grid of at least 2 x 2 nodes, got the prime nodes={nodes}")
        columns = nodes // rows
        right = ((r * columns + c, r * columns + (c + 1) % columns) for r in range(rows) for c in range(columns))
        down = ((r * columns + c, (r + 1) % rows * columns + c) for r in range(rows) for c in range(columns))
        return _graph(nodes, [*right, *down])


@topology("exponential")
@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """A cycle with edges to the nodes 1, 2, 4, 8, … steps away."""

    def graph(self, nodes: int, seed: int) -> Graph:
        return _circulant(nodes, [2**k for k in range((nodes - 1).bit_length())])


@topology("edges")
@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The graph of a text file, a line `i j` per edge; empty lines and text after a # are ignored."""

    file: str = param(help="path of the file; nodes are numbered from 0")

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("file: '' is not allowed; must be the path of a file")

    def graph(self, nodes: int, seed: int) -> Graph:
        try:
            text = Path(os.path.expanduser(self.file)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise ValueError(f"topology.file: cannot read {self.file}: {reason}") from None
        where = f"topology.file: {self.file}"
        edges = parse_edges(text, where)
        for number, ends in edges.items():
            if max(ends) >= nodes:
                reason = f"unknown node; with nodes={nodes} they are numbered 0 to {nodes - 1}"
                raise ValueError(f"{where}, line {number}: {reason}")
        return _graph(nodes, edges.values())


def parse_edges(text: str, where: str) -> dict[int, tuple[int, int]]:
    """Return line number → edge of an edge list.

    `where` names the source in a ValueError. The error never quotes the text: the file may be another than intended.
    """
    edges = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) <= _DIGITS for word in words):
            raise ValueError(f"{where}, line {number}: expected two node numbers 'i j'")
        if int(words[0]) == int(words[1]):
            raise ValueError(f"{where}, line {number}: a node is its own neighbour")
        edges[number] = (int(words[0]), int(words[1]))
    return edges


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A connected graph and the weights with which its nodes average."""

    nodes: int
    neighbours: tuple[tuple[int, ...], ...]     # sorted, without the node itself
    weights: "csr_array[Any]"                   # m x m float64, symmetric, doubly stochastic, sorted indices
    degree: NDArray[np.int64]                   # neighbours per node
    spectral_gap: float                         # ρ = 1 − max(|λ₂|, |λ_m|): 1 averages in one step, 0 never
    server: int | None = None                   # the node without data that all others are connected to

    def describe(self) -> dict[str, Any]:
        """Return the facts to record; `edges` is None where there are too many."""
        links, edges = int(self.degree.sum()) // 2, None
        if links <= _MAX_EDGES:
            edges = [[i, j] for i, near in enumerate(self.neighbours) for j in near if i < j]
        facts = {"nodes": self.nodes, "links": links, "spectral_gap": self.spectral_gap, "edges": edges}
        return facts if self.server is None else facts | {"server": self.server}


def build_network(graph: Graph) -> Network:
    """Return the network of a graph with Metropolis weights; raise ValueError if the graph cannot carry a run."""
    validate_graph(graph)
    nodes = graph.number_of_nodes()
    neighbours = tuple(tuple(sorted(graph.neighbors(i))) for i in range(nodes))
    weights = metropolis_weights(neighbours)
    gap = spectral_gap(weights)
    if not gap > 0:
        raise ValueError(f"topology: the graph does not mix, its second eigenvalue is {1 - gap:.12g} in magnitude")
    return Network(nodes, neighbours, weights, np.array([len(n) for n in neighbours], dtype=np.int64), gap)


def single_node() -> Network:
    """Return a network of one node, for algorithms that run on a single machine."""
    return build_network(_graph(1, []))


def server_network(clients: int) -> Network:
    """Return a server, the last node, that is connected to every client: one exchange averages all of them."""
    hub = build_network(_graph(clients + 1, ((i, clients) for i in range(clients))))
    return replace(hub, spectral_gap=1.0, server=clients)


def metropolis_weights(neighbours: tuple[tuple[int, ...], ...]) -> "csr_array[Any]":
    """Return w_ij = 1 / (1 + max(deg_i, deg_j)) for an edge and w_ii = 1 − Σ_j w_ij, which is positive: |λ_m| < 1."""
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
    """Return 1 − max(|λ₂|, |λ_m|) of a symmetric stochastic matrix: the rate at which averaging reaches consensus."""
    nodes = weights.shape[0]
    if nodes == 1:
        return 1.0
    if nodes <= _DENSE:
        magnitudes = np.sort(np.abs(eigvalsh(weights.toarray())))
        return max(0.0, min(1.0, float(1 - magnitudes[-2])))

    def without_mean(v: NDArray[np.float64]) -> NDArray[np.float64]:
        rest: NDArray[np.float64] = weights @ v - v.mean()
        return rest

    # Without the mean, λ₁ = 1 is gone and the largest eigenvalue in magnitude is max(|λ₂|, |λ_m|). The start is fixed:
    # the same graph must give the same bits.
    operator = LinearOperator((nodes, nodes), matvec=without_mean, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(nodes)
    largest = eigsh(operator, k=1, which="LM", v0=start, ncv=min(nodes, 128), tol=1e-9, return_eigenvectors=False)
    return max(0.0, min(1.0, float(1 - abs(largest[0]))))


def build_graph(topology: Topology, nodes: int, seed: int) -> Graph:
    """Return the graph of a topology; raise ValueError if it cannot carry a run, with the line of a user's method."""
    graph: Any = topology.graph(nodes, seed)
    about = f"topology: {name_method(topology, 'graph')}"
    if not isinstance(graph, nx.Graph):
        raise ValueError(f"{about} returned a {type(graph).__name__}; must be a networkx graph")
    try:
        validate_graph(graph)              # before the data, which may take long
    except ValueError as error:
        if TOPOLOGIES.is_built_in(TOPOLOGIES.find_name(type(topology)) or ""):
            raise
        raise ValueError(f"{about}: {str(error).removeprefix('topology: ')}") from None
    if graph.number_of_nodes() != nodes:
        raise ValueError(f"{about} returned a graph of {graph.number_of_nodes()} nodes; must have {nodes}")
    return graph


def validate_graph(graph: Graph) -> None:
    """Raise ValueError if a graph cannot carry a run; takes no time compared to the weights and the gap."""
    nodes = graph.number_of_nodes()
    if nodes < 1:
        raise ValueError("topology: the graph has no nodes, at least 1 is needed")
    if graph.is_directed() or graph.is_multigraph():
        raise ValueError("topology: the graph must be undirected, with at most one edge between two nodes")
    if set(graph.nodes) != set(range(nodes)):
        unknown = sorted(map(str, set(graph.nodes) - set(range(nodes))))
        raise ValueError(f"topology: the nodes must be numbered 0 to {nodes - 1}, got {', '.join(unknown[:5])}")
    loops = sorted(i for i, j in graph.edges if i == j)
    if loops:
        raise ValueError(f"topology: node {loops[0]} is its own neighbour")
    parts = sorted((sorted(part) for part in nx.connected_components(graph)), key=len)
    if len(parts) > 1:
        some = ", ".join(map(str, parts[0][:5])) + (", …" if len(parts[0]) > 5 else "")
        raise ValueError(
            f"topology: the graph has {len(parts)} components, it must be connected; the smallest has node(s) {some}"
        )


def _graph(nodes: int, edges: Iterable[tuple[int, int]]) -> Graph:
    if nodes < 1:
        raise ValueError(f"nodes: at least 1 is needed, got nodes={nodes}")
    graph: Graph = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    return graph


def _circulant(nodes: int, distances: Iterable[int]) -> Graph:
    """Return a cycle with edges between nodes at these distances; on a small cycle some of them coincide."""
    steps = [step for step in distances if step < nodes]
    return _graph(nodes, ((i, (i + step) % nodes) for i in range(nodes) for step in steps))


def _at_least(name: str, nodes: int, least: int) -> None:
    if nodes < least:
        raise ValueError(f"topology.name: {name} needs at least {least} nodes, got nodes={nodes}")
