"""Look for a direction in which a combination of f and g curves downwards, for methods that need it strongly convex.

The function is r(y) = a mean f_i(x, y) + b mean g_i(x, y) at a common point. A few steps of locally optimal conjugate
gradients minimise the Rayleigh quotient vᵀ∇²r v / vᵀv, with products from g's Hessian and central differences of ∇_y f,
in float64. A negative quotient proves that r is not convex there. A positive one proves nothing: it is the smallest
curvature that was found.
"""

from collections.abc import Callable

import numpy as np

from dbo.algorithms.api import Algorithm
from dbo.platform.config.validation import DataclassInstance
from dbo.platform.engine.common_point import CommonPoint, Floats
from dbo.tasks.api import Problem

STEPS = 30                  # products with ∇²r at most; the search ends at the first negative quotient
_DIFFERENCE = 1e-4          # length of the two steps in a central difference
_ROUNDING = 1e-7            # of a quotient, relative to the largest one that was seen


def describe_convexity(algorithm: Algorithm, config: DataclassInstance, problem: Problem) -> str | None:
    """Return a warning if the method needs a combination of f and g to be convex and it is not, at the start."""
    if algorithm.convex is None:
        return None
    f_weight, g_weight = algorithm.convex(config)
    curvature = find_smallest_curvature(problem, f_weight, g_weight)
    if curvature > 0:
        return None
    sign = "−" if f_weight < 0 else "+"
    what = f"{'' if g_weight == 1 else f'{g_weight:g} '}g {sign} {abs(f_weight):g} f"
    return (
        f"warning: {algorithm.name} needs {what} to be strongly convex in y; at the start its curvature is "
        f"{curvature:.1e} in one direction, so it may diverge or end elsewhere"
    )


def find_smallest_curvature(problem: Problem, f_weight: float, g_weight: float, steps: int = STEPS) -> float:
    """Return the smallest vᵀ∇²r v / vᵀv that was found at the start; 0.0 if it is zero within rounding."""
    point = CommonPoint(problem, range(problem.nodes))
    start = problem.shard([0])
    x, y = start.x0[0].astype(np.float64), start.y0[0].astype(np.float64)

    def multiply(v: Floats) -> Floats:
        ahead, behind = (point.sum_oracle("f_y", x, y + step * v) for step in (_DIFFERENCE, -_DIFFERENCE))
        product: Floats = f_weight * (ahead - behind) / (2 * _DIFFERENCE) + g_weight * point.sum_oracle("g_yy", x, y, v)
        return product / problem.nodes

    # ∇_y f has a part in features that only the upper level's samples have, where g is least curved.
    first = point.sum_oracle("f_y", x, y)
    return _minimise_quotient(multiply, first if first.any() else np.ones_like(y), steps)


def _minimise_quotient(multiply: Callable[[Floats], Floats], first: Floats, steps: int) -> float:
    """Return the smallest Rayleigh quotient that `steps` steps of LOBPCG with one vector find."""
    v = first / np.linalg.norm(first)
    av = multiply(v)
    quotient = float(v @ av)
    largest = abs(quotient)
    p, ap = np.zeros((0, v.size)), np.zeros((0, v.size))
    for _ in range(steps - 1):
        if quotient < -_ROUNDING * largest:
            break
        residual = av - quotient * v
        size = float(np.linalg.norm(residual))
        if not size > _ROUNDING * largest:
            break
        residual /= size
        product = multiply(residual)
        largest = max(largest, abs(float(residual @ product)))
        basis, image = np.vstack([v, residual, *p]), np.vstack([av, product, *ap])
        quotient, weights = _solve_small(basis @ basis.T, basis @ image.T)
        v, av = weights @ basis, weights @ image
        p, ap = (weights[1:] @ basis[1:])[None], (weights[1:] @ image[1:])[None]
        norm, length = float(np.linalg.norm(v)), float(np.linalg.norm(p)) or 1.0
        v, av, p, ap = v / norm, av / norm, p / length, ap / length
    return quotient if abs(quotient) > _ROUNDING * largest else 0.0


def _solve_small(gram: Floats, image: Floats) -> tuple[float, Floats]:
    """Return the smallest eigenvalue of image w = value · gram w, and w; nearly dependent directions are left out."""
    sizes, vectors = np.linalg.eigh(gram)
    kept = vectors[:, sizes > 1e-10 * sizes[-1]] / np.sqrt(sizes[sizes > 1e-10 * sizes[-1]])
    values, small = np.linalg.eigh(kept.T @ (0.5 * (image + image.T)) @ kept)
    return float(values[0]), kept @ small[:, 0]
