"""Cross-entropy in closed form: value, residual and curvature for given scores.

Scores are (samples, classes), where the samples of all nodes follow each other. Each sample has a weight: 1/n for the
n samples of a node, so that a node's sum is its mean, and 0 for padding, which then adds nothing anywhere.
"""

from dataclasses import dataclass

import numpy as np
from array_api_compat import array_namespace

from dbo.tasks.api import Array


@dataclass(frozen=True, slots=True, eq=False)
class CrossEntropy:
    """The labels' side of the loss; derivatives are taken with respect to the scores.

    Inside, classes come first: max and sum over ten classes then run along the samples, several times faster. Scores
    are turned by one copy on the way in, answers by a view on the way out.
    """

    weight: Array    # (samples,)
    target: Array    # (classes, samples): the weight at the label, 0 elsewhere

    def loss(self, scores: Array) -> Array:
        """(samples,) weighted losses."""
        xp = array_namespace(scores)
        s = _turned(scores)
        top = xp.max(s, axis=0)
        losses: Array = xp.log(xp.sum(xp.exp(s - top), axis=0))
        losses += top
        losses *= self.weight
        losses -= xp.sum(self.target * s, axis=0)
        return losses

    def residual(self, scores: Array) -> Array:
        """(samples, classes) first derivative: weight · (softmax − label)."""
        xp = array_namespace(scores)
        r = _exponentials(scores)
        r *= self.weight / xp.sum(r, axis=0)
        r -= self.target
        return r.T

    def curvature(self, scores: Array, v: Array) -> Array:
        """(samples, classes) second derivative times v: weight · p ∘ (v − ⟨p, v⟩)."""
        xp = array_namespace(scores)
        p = _exponentials(scores)
        p /= xp.sum(p, axis=0)
        v = _turned(v)
        centred = v - xp.sum(p * v, axis=0)
        p *= self.weight
        p *= centred
        return p.T


def _exponentials(scores: Array) -> Array:
    """(classes, samples) proportional to softmax; each sample's largest score is taken out, so nothing overflows."""
    xp = array_namespace(scores)
    s = _turned(scores)
    e: Array = xp.exp(s - xp.max(s, axis=0))
    return e


def _turned(scores: Array) -> Array:
    """(samples, classes) -> (classes, samples), contiguous."""
    return scores.T.reshape(-1).reshape(scores.shape[1], scores.shape[0])


def cross_entropy(labels: Array, weight: Array, classes: int, dtype: str) -> CrossEntropy:
    """Labels (samples,) and weights (samples,), where a padded sample has weight 0 and any label."""
    target = np.zeros((classes, len(labels)), dtype=dtype)
    target[labels, np.arange(len(labels))] = weight
    return CrossEntropy(weight=weight.astype(dtype), target=target)


def accuracy_and_loss(scores: Array, labels: Array) -> tuple[float, float]:
    """Share of right answers and mean cross-entropy of one model, in float64."""
    scores = np.asarray(scores, dtype=np.float64)
    top = np.max(scores, axis=1)
    log_sum = np.log(np.sum(np.exp(scores - top[:, None]), axis=1)) + top
    right = scores[np.arange(len(labels)), labels]
    return float(np.mean(np.argmax(scores, axis=1) == labels)), float(np.mean(log_sum - right))
