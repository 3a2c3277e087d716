"""Compute cross-entropy in closed form: value, residual and curvature for given scores.

Scores are (samples, classes), where the samples of all nodes follow each other. Each sample has a weight: 1/n for the
n samples of a node, so that a node's sum is its mean, and 0 for padding, which then contributes nothing.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace, device

from dbo.tasks.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class CrossEntropy:
    """The loss for given labels; derivatives are taken with respect to the scores.

    Inside, classes come first: max and sum over ten classes then run along the samples, several times faster. One copy
    transposes the scores on entry; results are transposed views.
    """

    weight: Array    # (samples,)
    target: Array    # (classes, samples): the weight at the label, 0 elsewhere

    @staticmethod
    def from_labels(labels: Array, weight: Array, classes: int, dtype: str) -> "CrossEntropy":
        """Build the loss from labels (samples,) and weights (samples,); padding has weight 0 and any label."""
        target = np.zeros((classes, len(labels)), dtype=dtype)
        target[labels, np.arange(len(labels))] = weight
        return CrossEntropy(weight=weight.astype(dtype), target=target)

    def with_labels(self, labels: Array, weight: float) -> "CrossEntropy":
        """Return the loss for other labels (samples,), all of one weight."""
        if isinstance(self.target, np.ndarray):
            target = np.zeros((len(self.target), len(labels)), dtype=self.target.dtype)
            target[labels, np.arange(len(labels))] = weight
            return CrossEntropy(weight=np.full(len(labels), weight, dtype=target.dtype), target=target)
        xp = array_namespace(self.target)
        on_device = xp.asarray(labels, device=device(self.target))
        classes = xp.arange(self.target.shape[0], device=device(self.target))
        target = xp.astype(on_device[None, :] == classes[:, None], self.target.dtype) * weight
        return CrossEntropy(weight=xp.full_like(target[0], weight), target=target)

    def loss(self, scores: Array) -> Array:
        """Return the (samples,) weighted losses."""
        xp = array_namespace(scores)
        s = _transpose(scores)
        top = xp.max(s, axis=0)
        losses: Array = xp.log(xp.sum(xp.exp(s - top), axis=0))
        losses += top
        losses *= self.weight
        losses -= xp.sum(self.target * s, axis=0)
        return losses

    def residual(self, scores: Array) -> Array:
        """Return the (samples, classes) first derivative: weight · (softmax − label)."""
        r = _exponentials(scores)
        r *= self.weight / _sum_classes(r)
        r -= self.target
        return r.T

    def curvature(self, scores: Array, v: Array) -> Array:
        """Return the (samples, classes) second derivative times v: weight · p ∘ (v − ⟨p, v⟩)."""
        xp = array_namespace(scores)
        p = _exponentials(scores)
        p /= _sum_classes(p)
        v = _transpose(v)
        centred = v - xp.sum(p * v, axis=0)
        p *= self.weight
        p *= centred
        return p.T


def _exponentials(scores: Array) -> Array:
    """Return (classes, samples) proportional to softmax; subtracting each sample's largest score avoids overflow."""
    s = _transpose(scores)
    if isinstance(s, np.ndarray):      # without the calls of a namespace, which take as long as those of a batch
        e: Array = np.subtract(s, np.maximum.reduce(s, axis=0))
        return np.exp(e, out=e)
    xp = array_namespace(scores)
    e = xp.exp(s - xp.max(s, axis=0))
    return e


def _sum_classes(e: Array) -> Array:
    """Return the (samples,) sums of (classes, samples)."""
    total: Array = np.add.reduce(e, axis=0) if isinstance(e, np.ndarray) else array_namespace(e).sum(e, axis=0)
    return total


def _transpose(scores: Array) -> Array:
    """Return (samples, classes) as contiguous (classes, samples)."""
    return scores.T.reshape(-1).reshape(scores.shape[1], scores.shape[0])
