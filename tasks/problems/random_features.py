"""Map inputs to a fixed representation: random relu features, projected to whitened principal components.

A linear model on whitened components is well conditioned, and has enough parameters to fit wrong labels.
"""

from dataclasses import dataclass

import numpy as np

from dbo.tasks.api import Array

_SMALLEST = 1e-6    # components with a smaller share of the largest variance are noise of the arithmetic


@dataclass(frozen=True, slots=True, eq=False)
class RandomFeatures:
    """φ(a) = [((relu(a R) − mean) V D^{-1/2}), 1], with R random and mean, V, D fitted without labels."""

    directions: Array | None    # R (inputs, features); None: φ starts from the inputs themselves
    mean: Array                 # (features,)
    projection: Array           # V D^{-1/2} (features, components)

    @staticmethod
    def fit(inputs: Array, features: int, components: int, rng: np.random.Generator) -> "RandomFeatures":
        """Draw R for `features` > 0 and fit at most `components` whitened components to (samples, inputs)."""
        width = inputs.shape[1]
        directions = rng.standard_normal((width, features)) * np.sqrt(2.0 / width) if features else None
        raw = _project(np.asarray(inputs, dtype=np.float64), directions)
        mean = raw.mean(axis=0)
        variances, vectors = np.linalg.eigh((raw - mean).T @ (raw - mean) / len(raw))
        kept = np.flatnonzero(variances > _SMALLEST * variances[-1])[-components:]
        return RandomFeatures(directions, mean, vectors[:, kept] / np.sqrt(variances[kept]))

    def __call__(self, inputs: Array) -> Array:
        """Return (samples, components + 1) features in float64; the last one is 1 everywhere."""
        whitened = (_project(np.asarray(inputs, dtype=np.float64), self.directions) - self.mean) @ self.projection
        return np.concatenate([whitened, np.ones((len(whitened), 1))], axis=1)


def _project(inputs: Array, directions: Array | None) -> Array:
    return inputs if directions is None else np.maximum(inputs @ directions, 0.0)
