"""The graph of a run, its nodes coloured by their distance to the mean, its links by what they carried."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dbo.dashboards.load import Run

DRAWN = 400         # nodes that can be told from each other in a picture
_SPRINGS = 60       # beyond so many nodes the exact layout takes too long


def places(network: dict[str, Any]) -> NDArray[np.float64]:
    """(nodes, 2) coordinates in [-1, 1]; the same for the same graph."""
    nodes, edges = network["nodes"], network["edges"] or []
    if all((j - i) % nodes in (1, 2, nodes - 1, nodes - 2) for i, j in edges):       # a ring, also with two hops
        angles = 2 * np.pi * np.arange(nodes) / nodes
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(edges)
    layout = nx.kamada_kawai_layout(graph) if nodes <= _SPRINGS else nx.spring_layout(graph, seed=0)
    return np.array([layout[node] for node in range(nodes)], dtype=np.float64)


def link_bytes(edges: list[list[int]], sent: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each link carried, both ways: a node's broadcast goes over all its links."""
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return np.asarray(sent[pairs[:, 0]] + sent[pairs[:, 1]], dtype=np.float64)


def draw(axes: Any, run: Run, size: float = 1.0) -> Any:
    """The graph at the run's last evaluation on matplotlib axes; the nodes, for a colour bar."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LogNorm

    assert run.network is not None
    assert run.nodes is not None
    xy, apart = places(run.network), run.nodes.apart_x[-1]
    edges, sent = run.network["edges"], run.nodes.bytes[-1]
    carried = link_bytes(edges, sent)
    widths = 0.6 + 1.8 * carried / carried.max() if carried.size and carried.max() > 0 else np.full(len(edges), 0.6)
    axes.add_collection(LineCollection([xy[edge] for edge in edges], linewidths=size * widths, colors="#9AA0A6"))
    least = apart[apart > 0].min() if (apart > 0).any() else 1e-12
    norm = LogNorm(least, max(apart.max(), least * 10))
    dots = axes.scatter(
        *xy.T, c=np.maximum(apart, least), norm=norm, cmap="cividis", s=size * max(8, min(90, 1500 / len(xy))),
        edgecolors="black", linewidths=0.5, zorder=3,
    )
    axes.set_aspect("equal")
    axes.margins(0.12)
    axes.axis("off")
    return dots


def picture(run: Run, path: Path) -> None:
    """topology.png of a run."""
    from matplotlib.figure import Figure

    assert run.network is not None
    figure = Figure(figsize=(4.2, 3.4))
    axes = figure.subplots()
    figure.subplots_adjust(0.02, 0.02, 0.9, 0.92)
    dots = draw(axes, run, 1.6)
    figure.colorbar(dots, ax=axes, shrink=0.75, label="distance of x to the mean")
    gap = run.network["spectral_gap"]
    axes.set_title(
        f"{run.algorithm}, round {int(run.columns['round'][-1])}" + (f", spectral gap {gap:.3g}" if gap else ""),
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
