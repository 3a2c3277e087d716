"""Quadratic: a heterogeneous problem whose solutions are known in closed form.

    g_i(x, y) = ½ (y − B_i x − c_i)ᵀ H_i (y − B_i x − c_i) + μ/2 ‖y‖²        f_i(x, y) = ½ ‖y − t_i‖² + ρ/2 ‖x‖²

With H̄ = mean H_i + μI, M = mean(H_i B_i), e = mean(H_i c_i), t̄ = mean t_i:

    y*(x) = H̄⁻¹(M x + e)        ∇ψ(x) = ρx + Mᵀ H̄⁻¹ (y*(x) − t̄)        ∇²_xy g_i = −B_iᵀ H_i

so the point that an algorithm must reach solves a linear system: the minimiser of ψ, the minimiser for a penalty λ, or
the biased point of a method that inverts local Hessians. Algorithms are verified on this task.

With `noise` σ > 0 every node has samples: sample j replaces H_i, H_i B_i, H_i c_i and t_i by H_i + σ E_j and so on,
where E_j, … have mean 0 over the node's samples. The full-batch problem and its solutions stay the same; a batch
perturbs gradients, Hessian- and Jacobian-vector products, by amounts that depend on x and y.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from array_api_compat import array_namespace

from dbo.tasks.api import Array, DataSize, Direction, Problem, Setup, Shard, Task, Work, generator, param, task
from dbo.tasks.arrays import as_index, hash_arrays


@task("quadratic")
@dataclass(frozen=True, slots=True, kw_only=True)
class Quadratic(Task):
    """Heterogeneous quadratic with known solutions: what algorithms are verified on."""

    directions: ClassVar[Mapping[str, Direction]] = {
        "test_loss": "min", "solution_error": "min", "hypergradient_error": "min", "penalty_error": "min",
    }
    strongly_convex: ClassVar[bool] = True

    dim_x: int = param(20, ge=1, help="upper variables")
    dim_y: int = param(60, ge=1, help="lower variables")
    condition: float = param(10.0, ge=1, help="condition number of every H_i; its largest eigenvalue is 1")
    heterogeneity: float = param(1.0, ge=0, help="size of each node's own part; 0 makes all nodes identical")
    mu: float = param(0.1, ge=0, help="ridge on y in g")
    rho: float = param(0.1, gt=0, help="ridge on x in f")
    start: float = param(0.0, ge=0, help="size of the common random start of x and y; 0: both start at 0")
    noise: float = param(0.0, ge=0, help="σ, how far a sample's coefficients are from their mean; 0: no samples")
    samples: int = param(64, ge=2, le=100_000, help="samples per node and level, with noise")

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        per_node = self.dim_y * (self.dim_y + self.dim_x) + (self.samples * self.dim_y if self.noise else 0)
        return Work(nodes * per_node, self.dim_x + self.dim_y)

    def build(self, setup: Setup) -> "QuadraticProblem":
        """Sample common parts once and own parts per node; those of node i do not depend on the number of nodes."""
        p, q = self.dim_x, self.dim_y

        def sample(purpose: str, *shape: int) -> Array:
            """Return (nodes, *shape) normal entries of size 1/√dim_y: common part + heterogeneity × own part."""
            common = generator(setup.seed, f"quadratic.{purpose}").standard_normal(shape)
            own = [
                generator(setup.seed, f"quadratic.{purpose}.own", node).standard_normal(shape)
                for node in range(setup.nodes)
            ]
            entries: Array = (common + self.heterogeneity * np.stack(own)) / np.sqrt(q)
            return entries

        # Only the eigenvectors differ between nodes: condition and L_g are exact on each of them.
        basis = np.linalg.qr(sample("H", q, q)).Q
        eigenvalues = np.geomspace(1.0 / self.condition, 1.0, q) if q > 1 else np.ones(1)
        h = (basis * eigenvalues) @ np.swapaxes(basis, 1, 2)
        return QuadraticProblem(
            h=0.5 * (h + np.swapaxes(h, 1, 2)), b=sample("B", q, p), c=sample("c", q), t=sample("t", q),
            x0=self.start * generator(setup.seed, "quadratic.x0").standard_normal(p),
            y0=self.start * generator(setup.seed, "quadratic.y0").standard_normal(q),
            mu=self.mu, rho=self.rho, seed=setup.seed, dtype=setup.dtype,
            noise=[self._sample_noise(setup.seed, node) for node in range(setup.nodes)] if self.noise else [],
        )

    def _sample_noise(self, seed: int, node: int) -> "Noise":
        """Sample the perturbations of one node's samples; each has mean 0 over the samples."""
        n, p, q = self.samples, self.dim_x, self.dim_y

        def sample(purpose: str, *shape: int) -> Array:
            entries = generator(seed, f"quadratic.noise.{purpose}", node).standard_normal((n, *shape)) / np.sqrt(q)
            centred: Array = self.noise * (entries - entries.mean(axis=0))
            return centred

        h = sample("H", q, q)
        symmetric = (h + np.swapaxes(h, 1, 2)) / np.sqrt(2.0)
        return Noise(h=symmetric, hb=sample("HB", q, p), h_c=sample("Hc", q), t=sample("t", q))


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Perturbations of one node's samples."""

    h: Array      # (samples, dim_y, dim_y), symmetric
    hb: Array     # (samples, dim_y, dim_x)
    h_c: Array    # (samples, dim_y)
    t: Array      # (samples, dim_y)


@dataclass(frozen=True, eq=False)
class QuadraticProblem(Problem):
    """The problem's matrices in float64, its closed forms, and shards in the experiment's dtype."""

    h: Array    # (nodes, dim_y, dim_y)
    b: Array    # (nodes, dim_y, dim_x)
    c: Array    # (nodes, dim_y)
    t: Array    # (nodes, dim_y)
    x0: Array   # (dim_x,)
    y0: Array   # (dim_y,)
    mu: float
    rho: float
    seed: int
    dtype: str
    noise: list[Noise] = field(default_factory=list)      # one per node; [] without noise

    @property
    def nodes(self) -> int:
        return len(self.h)

    def sample_sizes(self) -> tuple[list[int], list[int]]:
        sizes = [len(noise.t) for noise in self.noise] or [0] * self.nodes
        return sizes, sizes

    @property
    def dim_x(self) -> int:
        return int(self.b.shape[2])

    @property
    def dim_y(self) -> int:
        return int(self.b.shape[1])

    def shard(self, ids: Sequence[int]) -> "QuadraticShard":
        rows = np.asarray(ids, dtype=np.int64)
        h, b, c, t = self.h[rows], self.b[rows], self.c[rows], self.t[rows]
        hb = h @ b
        b_t = np.swapaxes(b, 1, 2)
        h_c = _matvec(h, c)

        def cast(a: Array) -> Array:
            return np.ascontiguousarray(a, dtype=self.dtype)

        return QuadraticShard(
            ids=rows, seed=self.seed,
            x0=cast(np.tile(self.x0, (len(rows), 1))), y0=cast(np.tile(self.y0, (len(rows), 1))),
            h=cast(h), b=cast(b), c=cast(c), t=cast(t),
            h_mu=cast(self.hessians[rows]), hb=cast(hb), hb_t=cast(np.swapaxes(hb, 1, 2)), h_c=cast(h_c),
            bhb=cast(b_t @ hb), bh_c=cast(_matvec(b_t, h_c)), mu=self.mu, rho=self.rho,
            noise=Noise(*(
                cast(np.stack([getattr(self.noise[i], f.name) for i in rows])) for f in fields(Noise)
            )) if self.noise else None,
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        """Return the upper objective (1/m) Σ f_i(x, y) of each row as `test_loss`; there is no test data."""
        x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        spread = np.mean(np.sum((self.t - self._t) ** 2, axis=1))
        if self.noise:
            spread += np.mean([np.mean(np.sum(noise.t**2, axis=1)) for noise in self.noise])
        return {"test_loss": 0.5 * (np.sum((y - self._t) ** 2, axis=1) + spread + self.rho * np.sum(x * x, axis=1))}

    def task_metrics(self, x_mean: Array, y_mean: Array) -> dict[str, float]:
        """Return the relative distance to the minimiser of ψ, and ‖∇ψ(x̄)‖ relative to its value at x = 0."""
        return {
            "solution_error": _relative(x_mean - self.solution(), self.solution()),
            "hypergradient_error": _relative(self.hypergradient(x_mean), self.hypergradient(np.zeros(self.dim_x))),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "task": "quadratic", "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            "data_sha256": hash_arrays((
                self.h, self.b, self.c, self.t,
                *(getattr(noise, f.name) for noise in self.noise for f in fields(Noise)),
            )),
        }

    # ---- closed forms, float64 -------------------------------------------------------------------------------------

    @cached_property
    def hessians(self) -> Array:
        """(nodes, dim_y, dim_y) ∇²_yy g_i = H_i + μI."""
        return self.h + self.mu * np.eye(self.dim_y)

    @cached_property
    def jacobians(self) -> Array:
        """(nodes, dim_x, dim_y) ∇²_xy g_i = −B_iᵀ H_i."""
        return -np.swapaxes(self.h @ self.b, 1, 2)

    @cached_property
    def _h(self) -> Array:
        return _mean(self.hessians)                   # H̄

    @cached_property
    def _m(self) -> Array:
        return _mean(self.h @ self.b)                 # M

    @cached_property
    def _e(self) -> Array:
        return _mean(_matvec(self.h, self.c))         # e

    @cached_property
    def _t(self) -> Array:
        return _mean(self.t)                          # t̄

    @cached_property
    def _response(self) -> tuple[Array, Array]:
        """S and y_0 of y*(x) = S x + y_0."""
        return np.linalg.solve(self._h, self._m), np.linalg.solve(self._h, self._e)

    def y_star(self, x: Array) -> Array:
        """Return the global solution of the lower level at x, (dim_y,)."""
        slope, offset = self._response
        return slope @ x + offset

    def psi(self, x: Array) -> float:
        """Return the upper value ψ(x) = (1/m) Σ f_i(x, y*(x))."""
        return float(self.evaluate(x[None], self.y_star(x)[None])["test_loss"][0])

    def hypergradient(self, x: Array) -> Array:
        """Return ∇ψ(x), (dim_x,)."""
        gradient: Array = self.rho * x + self._response[0].T @ (self.y_star(x) - self._t)
        return gradient

    def solution(self) -> Array:
        """Return the minimiser x* of ψ, (dim_x,)."""
        return self._solution

    @cached_property
    def _solution(self) -> Array:
        slope, offset = self._response
        return np.linalg.solve(self.rho * np.eye(self.dim_x) + slope.T @ slope, slope.T @ (self._t - offset))

    def penalty_solution(self, lam: float) -> Array:
        """Return the x where ψ_λ is stationary, (dim_x,)."""
        return self.penalty_minimisers(lam)[0]

    def penalty_minimisers(self, lam: float) -> tuple[Array, Array, Array]:
        """Return (x, y, z) where ψ_λ(x) = min_y (f + λg) − λ min_z g is stationary: ρx = λMᵀ(y − z)."""
        slope, offset = self._response
        penalised = np.eye(self.dim_y) + lam * self._h
        y_slope = np.linalg.solve(penalised, lam * self._m)
        y_offset = np.linalg.solve(penalised, self._t + lam * self._e)
        m_t = lam * self._m.T
        x = np.linalg.solve(self.rho * np.eye(self.dim_x) - m_t @ (y_slope - slope), m_t @ (y_offset - offset))
        return x, y_slope @ x + y_offset, slope @ x + offset

    # Hypergradients that algorithms use instead of ∇ψ, each at y = y*(x). P_J is the Neumann series of an inverse.

    def penalty_hypergradient(self, x: Array, lam: float) -> Array:
        """Return ∇ψ_λ(x) = ρx − λMᵀ(y − z), y the minimiser of f + λg and z that of g."""
        y = np.linalg.solve(np.eye(self.dim_y) + lam * self._h, self._t + lam * (self._m @ x + self._e))
        gradient: Array = self.rho * x - lam * self._m.T @ (y - self.y_star(x))
        return gradient

    def central_hypergradient(self, x: Array, lam: float) -> Array:
        """Return ∇ψ_±λ(x) = ρx − (λ/2)Mᵀ(y₊ − y₋), with y₊ and y₋ the minimisers of g + f/λ and g − f/λ.

        These solve (H̄ ± I/λ) y = Mx + e ± t̄/λ.
        """
        eye, lower = np.eye(self.dim_y), self._m @ x + self._e
        plus = np.linalg.solve(self._h + eye / lam, lower + self._t / lam)
        minus = np.linalg.solve(self._h - eye / lam, lower - self._t / lam)
        gradient: Array = self.rho * x - lam / 2 * self._m.T @ (plus - minus)
        return gradient

    def local_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array:
        """Return mean_i [∇_x f_i − ∇²_xy g_i P_J(∇²_yy g_i) ∇_y f_i]: every node inverts its own Hessian."""
        inverted = _matvec(neumann(self.hessians, terms, lipschitz), self.y_star(x) - self.t)
        gradient: Array = self.rho * x - _mean(_matvec(self.jacobians, inverted))
        return gradient

    def averaged_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array:
        """Return mean(∇_x f_i) − mean(∇²_xy g_i P_J(∇²_yy g_i)) mean(∇_y f_i): local inverses, averaged gradients."""
        product = _mean(self.jacobians @ neumann(self.hessians, terms, lipschitz))
        gradient: Array = self.rho * x - product @ (self.y_star(x) - self._t)
        return gradient

    def truncated_inverse_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array:
        """Return ∇ψ with P_J(H̄) for H̄⁻¹: all data on one machine, the inverse truncated."""
        gradient: Array = self.rho * x + self._m.T @ neumann(self._h, terms, lipschitz) @ (self.y_star(x) - self._t)
        return gradient

    def personalised_hypergradient(self, x: Array, terms: int, lipschitz: float) -> Array:
        """Return mean_i [∇_x f_i − ∇²_xy g_i P_J(∇²_yy g_i) ∇_y f_i] at y_i*(x), the minimiser of g_i."""
        lower = self.h @ (self.b @ x + self.c)[:, :, None]
        own = np.linalg.solve(self.hessians, lower)[:, :, 0]
        inverted = _matvec(neumann(self.hessians, terms, lipschitz), own - self.t)
        gradient: Array = self.rho * x - _mean(_matvec(self.jacobians, inverted))
        return gradient

    def moreau_hypergradient(self, x: Array, c: float, gamma: float) -> Array:
        """Return ρx − cMᵀ(y − θ), y stationary for f/c + g − v_γ, θ the proximal point of v_γ(x, y).

        The two conditions are H̄θ + (θ − y)/γ = Mx + e and y/c + H̄y − (y − θ)/γ = Mx + e + t̄/c.
        """
        eye, lower = np.eye(self.dim_y), self._m @ x + self._e
        system = np.block([
            [self._h + eye / gamma, -eye / gamma],
            [eye / gamma, self._h + (1 / c - 1 / gamma) * eye],
        ])
        theta, y = np.split(np.linalg.solve(system, np.concatenate([lower, lower + self._t / c])), 2)
        gradient: Array = self.rho * x - c * self._m.T @ (y - theta)
        return gradient

    def find_zero(self, hypergradient: Callable[[Array], Array]) -> Array:
        """Return the x where a hypergradient is zero; all of the above are affine in x."""
        offset = hypergradient(np.zeros(self.dim_x))
        slope = np.stack([hypergradient(e) - offset for e in np.eye(self.dim_x)], axis=1)
        return np.linalg.solve(slope, -offset)


@dataclass(frozen=True, eq=False)
class QuadraticShard(Shard):
    """Oracles as batched products; factors that do not depend on x and y are multiplied once."""

    h: Array
    b: Array
    c: Array
    t: Array
    h_mu: Array     # H + μI
    hb: Array       # H B
    hb_t: Array     # (H B)ᵀ
    h_c: Array      # H c
    bhb: Array      # Bᵀ H B
    bh_c: Array     # Bᵀ H c
    mu: float
    rho: float
    noise: Noise | None = None      # (nodes, samples, …)
    lower: Noise | None = None      # of a batch: the perturbations' means over it, (nodes, …)
    size: int = 0                   # samples of that batch
    upper: Array | None = None      # of a batch: its targets, (nodes, batch, dim_y)

    @property
    def sizes(self) -> tuple[Array, Array]:
        count = 0 if self.noise is None else self.noise.t.shape[1]
        lower = self.size or count
        upper = count if self.upper is None else self.upper.shape[1]
        return np.full(self.nodes, lower, dtype=np.int64), np.full(self.nodes, upper, dtype=np.int64)

    def subset(self, lower: Array | None, upper: Array | None) -> "QuadraticShard":
        """Return the shard whose coefficients are the means over a batch of samples."""
        if self.noise is None:
            return super().subset(lower, upper)      # type: ignore[return-value]  # raises
        changed: dict[str, Any] = {}
        rows = np.arange(self.nodes)[:, None]
        if lower is not None:
            xp, noise = array_namespace(self.h), self.noise
            index = as_index(lower, self.h)
            h, hb, h_c = (xp.mean(a[rows, index], axis=1) for a in (noise.h, noise.hb, noise.h_c))
            hb_ = self.hb + hb
            changed |= {
                "h_mu": self.h_mu + h, "hb": hb_, "hb_t": xp.permute_dims(hb_, (0, 2, 1)), "h_c": self.h_c + h_c,
                "lower": Noise(h, hb, h_c, h_c), "size": lower.shape[1],
            }
        if upper is not None:
            xp = array_namespace(self.t)
            targets = self.t[:, None, :] + self.noise.t[rows, as_index(upper, self.t)]
            changed |= {"t": xp.mean(targets, axis=1), "upper": targets}
        return replace(self, **changed)

    def f(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        value: Array = 0.5 * xp.sum((y - self.t) ** 2, axis=1) + 0.5 * self.rho * xp.sum(x * x, axis=1)
        targets = self.upper
        if targets is None and self.noise is not None:
            targets = self.t[:, None, :] + self.noise.t
        if targets is not None:      # the mean of squares is the square of the mean plus the variance
            centred = targets - self.t[:, None, :]
            value = value + 0.5 * xp.mean(xp.sum(centred * centred, axis=2), axis=1)
        return value

    def g(self, x: Array, y: Array) -> Array:
        xp = array_namespace(x)
        r = y - _matvec(self.b, x) - self.c
        value: Array = 0.5 * xp.sum(r * _matvec(self.h, r), axis=1) + 0.5 * self.mu * xp.sum(y * y, axis=1)
        if self.lower is not None:
            own = 0.5 * _matvec(self.lower.h, y) - _matvec(self.lower.hb, x) - self.lower.h_c
            value = value + xp.sum(y * own, axis=1)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        return self.rho * x

    def f_y(self, x: Array, y: Array) -> Array:
        return y - self.t

    def g_x(self, x: Array, y: Array) -> Array:
        return _matvec(self.bhb, x) + self.bh_c - _matvec(self.hb_t, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return _matvec(self.h_mu, y) - _matvec(self.hb, x) - self.h_c

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return _matvec(self.h_mu, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return -_matvec(self.hb_t, v)


def neumann(hessians: Array, terms: int, lipschitz: float) -> Array:
    """Return P_J(H) = (1/L) Σ_{j<J} (I − H/L)^j of one matrix, or of each in a stack."""
    eye = np.eye(hessians.shape[-1])
    total, power = 0 * hessians, eye + 0 * hessians
    for _ in range(terms):
        total, power = total + power, power @ (eye - hessians / lipschitz)
    return total / lipschitz


def _matvec(matrices: Array, rows: Array) -> Array:
    """Return matrix i times row i."""
    product: Array = (matrices @ rows[:, :, None])[:, :, 0]
    return product


def _mean(stack: Array) -> Array:
    mean: Array = np.mean(stack, axis=0)
    return mean


def _relative(error: Array, to: Array) -> float:
    return float(np.linalg.norm(error) / max(float(np.linalg.norm(to)), float(np.finfo(np.float64).tiny)))
