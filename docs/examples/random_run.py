"""random_run: describe here what a message keeps.

    dbo list plugins=random_run.py random_run
    dbo run plugins=random_run.py algorithm.compressor=random_run algorithm.gamma_in=auto task=quadratic engine=local
"""

import numpy as np

import dbo


@dbo.compressor("random_run")
class Compressor:
    """Keeps a random run of neighbouring entries, unscaled; the row counts as a circle."""

    ratio: float = dbo.param(0.2, gt=0, le=1, help="share of the entries that is kept; at least one is")

    def count(self, dim):
        return max(1, int(self.ratio * dim))

    def __call__(self, rows, key, channel):
        """Return Q of every row of `rows`, (nodes, dim): an array, or a tensor on a GPU."""
        dim, kept = rows.shape[1], self.count(rows.shape[1])
        values = rows + 0.0                                                  # a copy
        for row, generator in zip(values, key.generators(f"random_run {channel}"), strict=True):
            dropped = (generator.integers(dim) + np.arange(kept, dim)) % dim
            row[dropped] = 0.0
        return dbo.Message(values, form="sparse", kept=kept)                 # zeros are not sent

    def contraction(self, dim):
        """Return δ in E‖Q(v) − v‖² ≤ (1 − δ) ‖v‖²: every entry is kept with probability k/d."""
        return self.count(dim) / dim
