"""Compare derivatives with central differences in float64, row by row.

Differences are of fourth order. They are taken with several step sizes, and of each row the best one counts: long steps
are exact for smooth losses, short ones do not step over the kinks of others (relu, hinge). An error in a derivative
shows with every step size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbo.algorithms.api import Array

STEPS = (1e-3, 1e-2, 1e-4, 1e-5, 1e-6, 1e-7)
TOLERANCE = 1e-6        # relative to the norm of the row's derivative
FLOOR = 1e-3            # derivatives that are smaller than this share of the value are measured against the share


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative error of a row, and the shortest step that was needed."""

    error: float
    step: float

    @property
    def is_small(self) -> bool:
        return self.error <= TOLERANCE


def compare_gradient(
    value: Callable[[Array], Array], at: Array, gradient: Array, rng: np.random.Generator
) -> Difference:
    """Compare the (rows, dim) gradients of (rows,) values along a direction of each row."""
    along = _choose_directions(gradient, rng)
    size = np.maximum(np.linalg.norm(gradient, axis=1), FLOOR * np.maximum(1.0, np.abs(value(at))))
    return _compare(value, at, along, np.sum(gradient * along, axis=1), size)


def compare_product(value: Callable[[Array], Array], at: Array, along: Array, product: Array) -> Difference:
    """Compare (rows, dim) products with the derivative of (rows, dim) values along given directions."""
    size = np.maximum(np.linalg.norm(product, axis=1), FLOOR * np.maximum(1.0, np.linalg.norm(value(at), axis=1)))
    return _compare(value, at, along, product, size)


def make_directions(like: Array, rng: np.random.Generator) -> Array:
    """Return a random unit vector for each row."""
    rows = rng.standard_normal(like.shape)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _choose_directions(gradient: Array, rng: np.random.Generator) -> Array:
    """Return unit vectors between the gradient and a random one: of many entries, a random one alone sees little."""
    norm = np.linalg.norm(gradient, axis=1, keepdims=True)
    rows = make_directions(gradient, rng) + np.divide(gradient, norm, out=np.zeros_like(gradient), where=norm > 0)
    unit: Array = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _compare(value: Callable[[Array], Array], at: Array, along: Array, claimed: Array, size: Array) -> Difference:
    best = np.full(len(at), np.inf)
    used = STEPS[0]
    for step in STEPS:
        error = np.abs(_differentiate(value, at, along, step) - claimed) if claimed.ndim == 1 else np.linalg.norm(
            _differentiate(value, at, along, step) - claimed, axis=1)
        best, used = np.fmin(best, error / size), min(used, step)
        if bool(np.all(best <= TOLERANCE)):
            break
    return Difference(float(best.max()), used)


def _differentiate(value: Callable[[Array], Array], at: Array, along: Array, step: float) -> Array:
    def shifted(by: float) -> Array:
        return value(at + by * step * along)

    difference: Array = (8 * (shifted(1) - shifted(-1)) - (shifted(2) - shifted(-2))) / (12 * step)
    return difference
