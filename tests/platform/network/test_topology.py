"""Topologies: the graphs, their weights, and every wrong input."""

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo.platform.network import topology
from dbo.platform.network.topology import (
    TOPOLOGIES,
    Complete,
    Edges,
    ErdosRenyi,
    Exponential,
    Ring,
    Star,
    Torus,
    TwoHop,
    build_network,
    metropolis_weights,
    spectral_gap,
)

SIZED: list[topology.Topology] = [Ring(), ErdosRenyi(p=0.4), Complete(), Star(), Exponential()]


def edges_file(folder: Path, text: str) -> Edges:
    path = folder / "edges.txt"
    path.write_text(text)
    return Edges(file=str(path))


def test_ring_weights_are_a_third() -> None:
    """Metropolis weights of a ring: 1/3 for each neighbour and the node itself; eigenvalues (1 + 2 cos(2πk/m))/3."""
    net = build_network(Ring().graph(10, 0))
    assert net.neighbours[0] == (1, 9)
    assert net.neighbours[4] == (3, 5)
    np.testing.assert_allclose(net.weights.data, 1 / 3, rtol=1e-15)
    expected = 1 - (1 + 2 * np.cos(2 * np.pi / 10)) / 3
    assert net.spectral_gap == pytest.approx(expected, rel=1e-12)
    eigenvalues = np.sort(np.linalg.eigvalsh(net.weights.toarray()))
    np.testing.assert_allclose(eigenvalues, np.sort((1 + 2 * np.cos(2 * np.pi * np.arange(10) / 10)) / 3), atol=1e-14)


def test_two_hop_weights_are_a_fifth() -> None:
    """Ring plus distance-2 edges: degree 4, all weights 1/5."""
    net = build_network(TwoHop().graph(10, 0))
    assert net.neighbours[0] == (1, 2, 8, 9)
    assert set(net.degree.tolist()) == {4}
    np.testing.assert_allclose(net.weights.data, 1 / 5, rtol=1e-15)


def test_complete_graph_averages_at_once() -> None:
    """W = 11ᵀ/m, gap 1."""
    net = build_network(Complete().graph(7, 0))
    np.testing.assert_allclose(net.weights.toarray(), 1 / 7, rtol=1e-14)
    assert net.spectral_gap == pytest.approx(1)


def test_star_weights() -> None:
    """Every edge of a star touches the hub: w = 1/m; gap 1/m."""
    net = build_network(Star().graph(6, 0))
    assert net.neighbours == ((1, 2, 3, 4, 5), (0,), (0,), (0,), (0,), (0,))
    np.testing.assert_allclose(net.weights.toarray()[0], 1 / 6, rtol=1e-14)
    assert net.spectral_gap == pytest.approx(1 / 6)


def test_torus_is_as_square_as_possible() -> None:
    """12 nodes make a grid of 3 x 4 with joined sides: degree 4, the same graph as networkx's."""
    graph = Torus().graph(12, 0)
    assert set(dict(graph.degree).values()) == {4}
    assert nx.is_isomorphic(graph, nx.grid_2d_graph(3, 4, periodic=True))
    assert set(build_network(Torus().graph(10, 0)).degree.tolist()) == {3}    # 2 x 5: a side of two has one edge


def test_exponential_neighbours() -> None:
    """Neighbours lie 1, 2, 4, … steps away in both directions."""
    assert build_network(Exponential().graph(16, 0)).neighbours[0] == (1, 2, 4, 8, 12, 14, 15)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SIZED), st.integers(1, 40), st.integers(0, 10))
def test_every_network_is_sound(shape: topology.Topology, nodes: int, seed: int) -> None:
    """Connected, symmetric, doubly stochastic, self weights positive, λ₂ and λ_m inside (−1, 1)."""
    net = build_network(shape.graph(nodes, seed))
    weights = net.weights.toarray()
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-14)
    assert np.all(np.diag(weights) > 0)
    assert np.all(weights >= 0)
    assert net.weights.dtype == np.float64
    assert net.weights.has_sorted_indices
    assert 0 < net.spectral_gap <= 1
    for i, around in enumerate(net.neighbours):
        assert list(around) == sorted(set(around) - {i})
        assert set(np.flatnonzero(weights[i])) == {*around, i}
        assert net.degree[i] == len(around)


def test_relabelling_permutes_weights() -> None:
    """Metropolis weights belong to the graph, not to its numbering."""
    graph = ErdosRenyi(p=0.4).graph(10, 3)
    order = np.random.default_rng(0).permutation(10)
    renamed = build_network(nx.relabel_nodes(graph, {i: int(order[i]) for i in range(10)}))
    plain = build_network(graph)
    np.testing.assert_allclose(renamed.weights.toarray()[np.ix_(order, order)], plain.weights.toarray(), atol=1e-15)
    assert renamed.spectral_gap == pytest.approx(plain.spectral_gap)


def test_erdos_renyi_is_keyed_by_seed() -> None:
    """Same seed, same graph; other seeds, other graphs; about p of the edges, always connected."""
    first = ErdosRenyi(p=0.4).graph(20, 1)
    assert nx.utils.graphs_equal(first, ErdosRenyi(p=0.4).graph(20, 1))
    assert not nx.utils.graphs_equal(first, ErdosRenyi(p=0.4).graph(20, 2))
    graphs = [ErdosRenyi(p=0.4).graph(20, seed) for seed in range(30)]
    assert all(nx.is_connected(graph) for graph in graphs)
    assert np.mean([graph.number_of_edges() for graph in graphs]) == pytest.approx(0.4 * 190, rel=0.05)


def test_erdos_renyi_resamples_until_connected() -> None:
    """A p at which most samples are disconnected still gives a connected graph."""
    assert all(nx.is_connected(ErdosRenyi(p=0.15).graph(10, seed)) for seed in range(5))


def test_small_networks() -> None:
    """One node: W = [[1]], gap 1. Two on a ring: one edge, weights 1/2."""
    for shape in SIZED:
        one = build_network(shape.graph(1, 0))
        assert (one.nodes, one.neighbours, one.spectral_gap) == (1, ((),), 1.0)
        np.testing.assert_array_equal(one.weights.toarray(), [[1.0]])
    two = build_network(Ring().graph(2, 0))
    assert two.neighbours == ((1,), (0,))
    np.testing.assert_array_equal(two.weights.toarray(), np.full((2, 2), 0.5))


@pytest.mark.parametrize("shape", [Ring(), ErdosRenyi(p=0.2), Star(), Torus(), Exponential()], ids=repr)
def test_large_networks_agree_with_dense_eigenvalues(shape: topology.Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterative gap equals the dense one, twice in a row to the last bit."""
    weights = metropolis_weights(build_network(shape.graph(120, 0)).neighbours)
    exact = spectral_gap(weights)
    monkeypatch.setattr(topology, "_DENSE", 10)
    assert spectral_gap(weights) == pytest.approx(exact, rel=1e-6)
    assert spectral_gap(weights) == spectral_gap(weights)


@pytest.mark.parametrize(
    ("shape", "nodes", "reason"),
    [
        (TwoHop(), 4, "topology.name: two_hop needs at least 5 nodes, got nodes=4"),
        (Torus(), 3, "topology.name: torus needs at least 4 nodes, got nodes=3"),
        (Torus(), 7, "topology.name: torus needs a grid of at least 2 x 2 nodes, got the prime nodes=7"),
        (Ring(), 0, "nodes: at least 1 is needed, got nodes=0"),
        (ErdosRenyi(p=0.001), 10, "topology.p: no connected graph in 1000 samples with p=0.001 and nodes=10"),
    ],
)
def test_impossible_shapes_are_refused(shape: topology.Topology, nodes: int, reason: str) -> None:
    """A number of nodes that a shape does not allow is one line with the field, the value and what is needed."""
    with pytest.raises(ValueError, match=r"^topology|^nodes") as error:
        shape.graph(nodes, 0)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


def test_edges_are_read(tmp_path: Path) -> None:
    """Lines `i j`; comments, empty lines and repeated edges are ignored."""
    graph = edges_file(tmp_path, "# a path\n0 1\n\n1 2   # middle\n2\t3\n1 0\n").graph(4, 0)
    assert build_network(graph).neighbours == ((1,), (0, 2), (1, 3), (2,))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0 1\n1 two\n", "line 2: expected two node numbers 'i j'"),
        ("0 1\n\n1 2 3\n", "line 3: expected two node numbers"),
        ("0 -1\n", "line 1: expected two node numbers"),
        ("0 1.0\n", "line 1: expected two node numbers"),
        ("0 1\n2 2\n", "line 2: a node is its own neighbour"),
        ("0 1\n1 3\n", "line 2: unknown node; with nodes=3 they are numbered 0 to 2"),
        (f"0 {'1' * 5000}\n", "line 1: expected two node numbers"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, text: str, reason: str) -> None:
    """A line that is no edge of this network is refused by its number."""
    with pytest.raises(ValueError, match=r"topology\.file") as error:
        edges_file(tmp_path, text).graph(3, 0)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["root:x:0:0:hunter2", "hunter2 hunter2", "7272 7272", "0 7272", "7272", "0 1 7272"])
def test_errors_do_not_quote_the_file(tmp_path: Path, line: str) -> None:
    """`topology.file` may name another file than intended: the error has its name and the line number, not its text."""
    shape = edges_file(tmp_path, f"0 1\n{line}\n")
    with pytest.raises(ValueError, match=r"edges\.txt, line 2: ") as error:
        shape.graph(3, 0)
    reason = str(error.value).rpartition("line 2: ")[2]
    assert not any(word in reason for word in ("root", "hunter2", "7272"))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """A missing file, a folder and a binary file are refused by name."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("missing", "No such file"), (".", "Is a directory"), ("binary", "not a text file")):
        with pytest.raises(ValueError, match=reason) as error:
            Edges(file=str(tmp_path / name)).graph(3, 0)
        assert str(error.value).startswith("topology.file: cannot read ")


def test_disconnected_edges_are_refused(tmp_path: Path) -> None:
    """A graph with two components cannot reach consensus."""
    graph = edges_file(tmp_path, "0 1\n2 3\n3 4\n").graph(5, 0)
    with pytest.raises(ValueError, match=r"^topology: the graph has 2 components, .* node\(s\) 0, 1$"):
        build_network(graph)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (nx.Graph(), "no nodes"),
        (nx.DiGraph([(0, 1)]), "undirected"),
        (nx.MultiGraph([(0, 1), (0, 1)]), "undirected"),
        (nx.Graph([(0, 1), (1, 1)]), "node 1 is its own neighbour"),
        (nx.Graph([(1, 2), (2, 3)]), "numbered 0 to 2, got 3"),
        (nx.Graph([("a", "b")]), "numbered 0 to 1, got a, b"),
    ],
)
def test_invalid_graphs_are_refused(graph: "nx.Graph[int]", reason: str) -> None:
    """A network is only built from a graph that can carry a run; the error has the reason."""
    with pytest.raises(ValueError, match=f"^topology: .*{reason}"):
        build_network(graph)


def test_the_table_names_every_topology() -> None:
    """Names as experiment files spell them."""
    assert list(TOPOLOGIES) == ["ring", "two_hop", "erdos_renyi", "complete", "star", "torus", "exponential", "edges"]
    assert all((made.__doc__ or "").partition("\n")[0].endswith(".") for made in TOPOLOGIES.values())
