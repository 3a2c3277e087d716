"""rings: describe the data here: what a sample is, where it comes from, how it is split.

    dbo list plugins=rings.py rings
    dbo run plugins=rings.py task=coefficient_tuning task.dataset=rings engine=local rounds=20
"""

import numpy as np

import dbo


@dbo.dataset("rings")
class DataSet:
    """Two rings of points with noise, one per class."""

    samples: int = dbo.param(600, ge=30, help="samples in all")
    noise: float = dbo.param(0.2, ge=0, help="standard deviation of the radius")

    def load(self, seed, data_dir):
        """Return train (lower level), val (upper level) and test; `data_dir` is the experiment's, or None."""
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(self.samples) % 2)
        radius = 1 + labels + self.noise * rng.standard_normal(self.samples)
        angle = 2 * np.pi * rng.random(self.samples)
        features = np.stack([np.cos(angle), np.sin(angle), radius**2 / 4, np.ones_like(radius)], axis=1)
        train, val, test = (dbo.Part(features[part::3], labels[part::3]) for part in range(3))
        return dbo.Split(train, val, test, classes=2)
