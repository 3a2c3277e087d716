"""Draw the graph of a run: nodes coloured by their distance to the mean, links sized by the bytes they carried."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.dashboards.figure_file import save_figure
from dbo.dashboards.load import RunData
from dbo.platform.runs.schema import RecordedNetwork

MAX_NODES = 400                # more nodes cannot be distinguished in a picture
_MAX_EXACT_NODES = 60          # beyond these the exact layout takes too long


def compute_layout(network: RecordedNetwork) -> NDArray[np.float64]:
    """Return (nodes, 2) coordinates in [-1, 1]; the same for the same graph."""
    nodes, edges = network.nodes, network.edges or []
    if all((j - i) % nodes in (1, 2, nodes - 1, nodes - 2) for i, j in edges):       # a ring, also with two hops
        angles = 2 * np.pi * np.arange(nodes) / nodes
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from((i, j) for i, j in edges)
    layout = nx.kamada_kawai_layout(graph) if nodes <= _MAX_EXACT_NODES else nx.spring_layout(graph, seed=0)
    return np.array([layout[node] for node in range(nodes)], dtype=np.float64)


def has_graph(run: RunData) -> bool:
    """Decide whether a run recorded its graph and nodes, and the graph is small enough to be drawn."""
    return bool(
        run.network and run.network.edges and run.network.nodes <= MAX_NODES
        and run.nodes and run.nodes.distance_x.shape[1] == run.network.nodes
    )


def draw_graph(axes: Any, run: RunData, size: float = 1.0) -> Any:
    """Draw the graph at the run's last evaluation on matplotlib axes; return the nodes, for a colour bar."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm

    assert run.network is not None
    assert run.nodes is not None
    positions, distance = compute_layout(run.network), run.nodes.distance_x[-1]
    edges, sent = run.network.edges or [], run.nodes.bytes[-1]
    carried = _sum_link_bytes(edges, sent)
    widths = 0.6 + 1.8 * carried / carried.max() if carried.size and carried.max() > 0 else np.full(len(edges), 0.6)
    axes.add_collection(LineCollection([positions[edge] for edge in edges], linewidths=size * widths, colors="#9AA0A6"))
    smallest = distance[distance > 0].min() if (distance > 0).any() else 1e-12
    norm = LogNorm(smallest, max(distance.max(), smallest * 10))
    dots = axes.scatter(
        *positions.T, c=np.maximum(distance, smallest), norm=norm, cmap="cividis",
        s=size * max(8, min(90, 1500 / len(positions))), edgecolors="black", linewidths=0.5, zorder=3,
    )
    axes.set_aspect("equal")
    axes.margins(0.12)
    axes.axis("off")
    return dots


def _sum_link_bytes(edges: list[list[int]], sent: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the bytes that each link carried in both directions: a node's broadcast goes over all its links."""
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return np.asarray(sent[pairs[:, 0]] + sent[pairs[:, 1]], dtype=np.float64)


def save_graph(run: RunData, path: Path) -> None:
    """Write the picture of a run's graph, topology.png."""
    from matplotlib.figure import Figure

    assert run.network is not None
    figure = Figure(figsize=(4.2, 3.4))
    axes = figure.subplots()
    figure.subplots_adjust(0.02, 0.02, 0.9, 0.92)
    dots = draw_graph(axes, run, 1.6)
    figure.colorbar(dots, ax=axes, shrink=0.75, label="distance of x to the mean")
    gap = run.network.spectral_gap
    axes.set_title(
        f"{run.algorithm}, round {int(run.columns['round'][-1])}" + (f", spectral gap {gap:.3g}" if gap else ""),
        fontsize=9,
    )
    save_figure(figure, path, dpi=150)
