"""skewed: describe here which node gets which samples.

    dbo list plugins=skewed.py skewed
    dbo run plugins=skewed.py partition=skewed partition.skew=2 engine=local
"""

import numpy as np

import dbo


@dbo.partition("skewed")
class Partition:
    """Random samples in unequal numbers: node i gets a share in proportion to (i + 1) ** skew."""

    skew: float = dbo.param(1.0, ge=0, le=10, help="0: equal shares")

    def assign(self, labels, nodes, rng):
        """Return the sample numbers of each node: every sample to one node, at least one to every node."""
        if len(labels) < nodes:
            raise ValueError(f"nodes: {nodes} nodes cannot share {len(labels)} samples")
        share = np.arange(1.0, nodes + 1) ** self.skew
        sizes = 1 + np.floor((len(labels) - nodes) * share / share.sum()).astype(int)
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])      # the last node gets the rest
