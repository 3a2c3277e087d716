"""Compute ψ(x) = (1/m) Σ f_i(x, y*(x)) and ∇ψ(x) by an accurate solve of the lower level, apart from the algorithm.

y*(x) minimises g = (1/m) Σ g_i by Newton's method with conjugate gradients, from a given y. Then

    H v = ∇_y f,        ∇ψ(x) = ∇_x f − ∇²_xy g v,        H = ∇²_yy g,

all at (x, y*), all means over the nodes. Nothing but gradients and products is needed: blocks compute their own rows'
sums in float64, the driver runs the solver. The residual is the larger of ‖∇_y g‖ and ‖H v − ∇_y f‖, over ‖∇_y f‖.
Products with H are limited, so a problem that is too ill-conditioned ends with a residual above the tolerance.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from scipy.sparse.linalg import LinearOperator, cg

from dbo.algorithms.api import Array
from dbo.platform.engine.common_point import Floats, Oracle

TOLERANCE = 1e-8
MAX_NEWTON = 30             # steps
MAX_PRODUCTS = 3000         # with H, in both solves together …
MIN_PRODUCTS = 200          # … and for wide y at least so many
MAX_ENTRIES = 2e9           # entries of all nodes' products: 10 nodes with two million each get the minimum


class MeanOracles(Protocol):
    """Means over the nodes of the oracles at one common point; engines have it."""

    def mean_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats: ...


@dataclass(frozen=True, slots=True)
class PsiPoint:
    """ψ at x, its gradient, and how accurate they are."""

    value: float
    gradient: Floats            # (dim_x,)
    y: Floats                   # (dim_y,) y*(x)
    residual: float
    tolerance: float
    products: int               # with H

    @property
    def converged(self) -> bool:
        return self.residual <= self.tolerance


def limit_products(nodes: int, dim_y: int) -> int:
    """Return how many products with H a solve may take: fewer if each is expensive."""
    return int(np.clip(MAX_ENTRIES / (nodes * dim_y), MIN_PRODUCTS, MAX_PRODUCTS))


@np.errstate(over="ignore", invalid="ignore", divide="ignore")      # of a run that is about to diverge
def solve_psi(
    oracles: MeanOracles, x: Array, start: Array, max_products: int = MAX_PRODUCTS, tolerance: float = TOLERANCE
) -> PsiPoint:
    """Compute ψ and ∇ψ at x; `start` is where the solve of the lower level begins."""
    solve = _Solve(oracles, x.astype(np.float64), max_products, tolerance)
    y = solve.minimise_lower(start.astype(np.float64))
    f_y = solve.mean("f_y", y)
    scale = float(np.linalg.norm(f_y))
    v, remainder = solve.invert_hessian(y, f_y)
    lower = float(np.linalg.norm(solve.mean("g_y", y))) / (scale or 1.0)
    gradient = solve.mean("f_x", y) - solve.mean("g_xy", y, v)
    return PsiPoint(float(solve.mean("f", y)), gradient, y, max(lower, remainder), tolerance, solve.products)


@dataclass(slots=True)
class _Solve:
    oracles: MeanOracles
    x: Floats
    max_products: int
    tolerance: float
    products: int = field(default=0, init=False)

    def mean(self, oracle: Oracle, y: Floats, v: Floats | None = None) -> Floats:
        return self.oracles.mean_oracle(oracle, self.x, y, v)

    def minimise_lower(self, y: Floats) -> Floats:
        """Return the minimiser of the lower level; half of the products are kept for the second solve."""
        budget = self.max_products // 2
        value, gradient = float(self.mean("g", y)), self.mean("g_y", y)
        for _ in range(MAX_NEWTON):
            norm, scale = float(np.linalg.norm(gradient)), float(np.linalg.norm(self.mean("f_y", y))) or 1.0
            wanted = 0.5 * self.tolerance * scale        # so that its rounding is no part of the residual's verdict
            if not norm > wanted or self.products >= budget:
                break
            # Forcing terms of superlinear convergence, not below what the tolerance needs.
            accuracy = max(min(0.1, float(np.sqrt(norm / scale))), 0.5 * wanted / norm)
            step = self._solve_hessian(y, gradient, accuracy, budget)
            np.negative(step, out=step)
            slope, length = float(gradient @ step), 1.0
            for _ in range(30):
                new = y + length * step
                new_value, new_gradient = float(self.mean("g", new)), self.mean("g_y", new)
                if new_value <= value + 1e-4 * length * slope or float(np.linalg.norm(new_gradient)) < 0.9 * norm:
                    break
                length /= 2
            else:
                break                               # rounding: no step improves it
            y, value, gradient = new, new_value, new_gradient
        return y

    def invert_hessian(self, y: Floats, right: Floats) -> tuple[Floats, float]:
        """Return v with H v = right, and the relative residual."""
        scale = float(np.linalg.norm(right))
        if not scale > 0:
            return np.zeros_like(right), 0.0
        v = self._solve_hessian(y, right, 0.5 * self.tolerance, self.max_products)
        return v, float(np.linalg.norm(self.mean("g_yy", y, v) - right)) / scale

    def _solve_hessian(self, y: Floats, right: Floats, accuracy: float, budget: int) -> Floats:
        def multiply(v: Floats) -> Floats:
            self.products += 1
            return self.mean("g_yy", y, v.reshape(-1))

        hessian = LinearOperator((y.size, y.size), matvec=multiply, dtype=np.float64)
        solution: Floats
        solution, _ = cg(hessian, right, rtol=accuracy, atol=0.0, maxiter=max(1, budget - self.products))
        return solution
