"""wheel: describe the graph here.

    dbo list plugins=wheel.py wheel
    dbo run plugins=wheel.py topology=wheel topology.every=2 task=quadratic rounds=100 engine=local
"""

import networkx as nx

import dbo


@dbo.topology("wheel")
class Topology:
    """A ring with a hub: node 0 is a neighbour of every `every`-th node."""

    every: int = dbo.param(1, ge=1, help="1: node 0 is a neighbour of all nodes")

    def graph(self, nodes, seed):
        """Return a connected graph with the nodes 0 … nodes − 1; a random one draws from `seed`."""
        if nodes < 3:
            raise ValueError(f"nodes: {nodes} is not allowed; wheel needs at least 3")
        graph = nx.cycle_graph(nodes)
        graph.add_edges_from((0, node) for node in range(self.every, nodes, self.every))
        return graph
