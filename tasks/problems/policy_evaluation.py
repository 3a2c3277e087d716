"""Policy evaluation: every node has its own Markov decision process, and all agree on one linear value function.

    g_i(x, y) = S/2 mean_j (y_{s_j} − r_j − γ φ_{s'_j}ᵀ x)²        f_i(x, y) = 1/2 mean_s (φ_sᵀ x − y_s)²

x are the weights of a value function V(s) = φ_sᵀ x over S states, y has an entry for each state. Sample j of node i is
a transition s_j → s'_j with reward r_j under the node's own policy; every state starts equally many of them. So y*(x)
is the mean over the nodes of the sampled Bellman operators at V, and ψ(x) the mean squared Bellman residual of V. The
samples of the upper level are the states. This is our reading of the task in the literature on decentralized bilevel
optimization (SPARKLE, arXiv 2411.14166): the transitions of the nodes differ too, not only the rewards.

All functions are quadratic. With weights c_s of the states and the means F = mean e_s φ_{s'}ᵀ, R = mean r e_s, …, over
transitions, scaled by S (all of them of a batch, if there is one):

    ∇_y g = c ∘ y − R − γ F x        ∇_x g = γ (γ K x + q − Fᵀ y)        ∇²_yy g = diag(c)        ∇²_xy g v = −γ Fᵀ v
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from array_api_compat import array_namespace, device

from dbo.tasks.api import Array, DataSize, Direction, Problem, Setup, Shard, Task, Work, generator, param, task
from dbo.tasks.arrays import as_index, hash_arrays


@task("policy_evaluation")
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEvaluation(Task):
    """Linear value function (upper level) with a small mean Bellman residual (lower level) over the nodes' MDPs."""

    strongly_convex: ClassVar[bool] = True
    directions: ClassVar[Mapping[str, Direction]] = {
        "test_loss": "min", "value_error": "min", "solution_error": "min",
    }

    states: int = param(100, ge=2, le=10_000, help="S, states of every node's MDP")
    dim_x: int = param(10, ge=1, le=1_000, help="entries of φ_s, the weights in x; the first entry is 1")
    discount: float = param(0.9, ge=0, lt=1, help="γ, discount of later rewards")
    successors: int = param(5, ge=1, help="states that can follow a state, on each node")
    heterogeneity: float = param(1.0, ge=0, le=1, help="share of each node's own part; 0: all nodes are identical")
    transitions: int = param(20, ge=1, le=10_000, help="sampled transitions from every state, per node")

    def __post_init__(self) -> None:
        if self.dim_x > self.states:
            raise ValueError(f"dim_x: {self.dim_x} is not allowed; must be ≤ states = {self.states}")

    def estimate_work(self, nodes: int, data: DataSize | None) -> Work | None:
        per_node = self.states * (self.dim_x + self.successors * self.transitions)
        return Work(nodes * per_node, self.dim_x + self.states)

    def build(self, setup: Setup) -> "PolicyEvaluationProblem":
        """Generate MDPs and transitions; those of node i do not depend on the number of nodes."""
        common = self._generate(generator(setup.seed, "policy_evaluation.common"))
        phi = generator(setup.seed, "policy_evaluation.features").standard_normal((self.states, self.dim_x))
        phi /= np.sqrt(self.dim_x)
        phi[:, 0] = 1.0      # a mean reward: without it a linear function can hardly fit values far from 0
        nodes = range(setup.nodes)
        own = [self._generate(generator(setup.seed, "policy_evaluation.own", node)) for node in nodes]
        h = self.heterogeneity
        chances = np.stack([(1 - h) * common[0] + h * mdp[0] for mdp in own])
        rewards = np.stack([(1 - h) * common[1] + h * mdp[1] for mdp in own])
        start = np.repeat(np.arange(self.states), self.transitions)
        end = np.stack([
            _sample_rows(chances[node], self.transitions, generator(setup.seed, "policy_evaluation.samples", node))
            for node in nodes
        ])
        return PolicyEvaluationProblem(
            phi=phi, chances=chances, rewards=rewards, start=start, end=end,
            discount=self.discount, seed=setup.seed, dtype=setup.dtype,
        )

    def _generate(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Return (S, S) chances of the successors, which are random states, and (S, S) rewards in 0 … 1."""
        chances = np.zeros((self.states, self.states))
        for s in range(self.states):
            after = rng.choice(self.states, size=min(self.successors, self.states), replace=False)
            chances[s, after] = rng.dirichlet(np.ones(len(after)))
        return chances, rng.random((self.states, self.states))


def _sample_rows(chances: Array, count: int, rng: np.random.Generator) -> Array:
    """Return the successors of every state, `count` for each, one state after another."""
    cumulative = np.cumsum(chances, axis=1)
    draws = rng.random((len(chances), count)) * cumulative[:, -1:]
    after = [np.searchsorted(row, draw, side="right") for row, draw in zip(cumulative, draws, strict=True)]
    states: Array = np.minimum(np.concatenate(after), len(chances) - 1)
    return states


@dataclass(frozen=True, eq=False)
class PolicyEvaluationProblem(Problem):
    """The MDPs and sampled transitions of all nodes in float64, and shards in the experiment's dtype."""

    phi: Array          # (S, dim_x)
    chances: Array      # (nodes, S, S)
    rewards: Array      # (nodes, S, S)
    start: Array        # (transitions,) states, the same for every node
    end: Array          # (nodes, transitions) states
    discount: float
    seed: int
    dtype: str

    @property
    def nodes(self) -> int:
        return len(self.chances)

    @property
    def dim_x(self) -> int:
        return int(self.phi.shape[1])

    @property
    def dim_y(self) -> int:
        return len(self.phi)

    def sample_sizes(self) -> tuple[list[int], list[int]]:
        return [len(self.start)] * self.nodes, [self.dim_y] * self.nodes

    def shard(self, ids: Sequence[int]) -> "PolicyEvaluationShard":
        rows = np.asarray(ids, dtype=np.int64)
        start, end = np.tile(self.start, (len(rows), 1)), self.end[rows]
        earned = self.rewards[rows[:, None], start, end].astype(self.dtype)
        phi = self.phi.astype(self.dtype)
        return PolicyEvaluationShard(
            ids=rows, seed=self.seed, x0=np.zeros((len(rows), self.dim_x), dtype=self.dtype),
            y0=np.zeros((len(rows), self.dim_y), dtype=self.dtype), phi=phi, start=start, end=end, earned=earned,
            discount=self.discount, lower=Means.over(phi, start, end, earned),
            upper=np.full((len(rows), self.dim_y), 1.0 / self.dim_y, dtype=self.dtype),
            sizes_=(len(self.start), self.dim_y),
        )

    def evaluate(self, x: Array, y: Array) -> dict[str, Array]:
        """Return half the mean squared Bellman residual of V with the true chances as `test_loss`."""
        values = np.asarray(x, dtype=np.float64) @ self.phi.T
        chances, rewards = self._mean_mdp
        residual = values - rewards - self.discount * values @ chances.T
        return {"test_loss": 0.5 * np.mean(residual**2, axis=1)}

    def task_metrics(self, x_mean: Array, y_mean: Array) -> dict[str, float]:
        """Return the relative errors of V against the true value function, and of x against the minimiser of ψ."""
        chances, rewards = self._mean_mdp
        true = np.linalg.solve(np.eye(self.dim_y) - self.discount * chances, rewards)
        x_star = self.solution()
        return {
            "value_error": float(np.linalg.norm(self.phi @ x_mean - true) / np.linalg.norm(true)),
            "solution_error": float(np.linalg.norm(x_mean - x_star) / np.linalg.norm(x_star)),
        }

    def solution(self) -> Array:
        """Return the minimiser of ψ on the sampled transitions, (dim_x,)."""
        return self._solution

    @cached_property
    def _solution(self) -> Array:
        count = len(self.start) // self.dim_y
        after = self.phi[self.end].reshape(self.nodes, self.dim_y, count, -1).mean(axis=(0, 2))
        earned = self.rewards[np.arange(self.nodes)[:, None], self.start, self.end]
        target = earned.reshape(self.nodes, self.dim_y, count).mean(axis=(0, 2))
        found: Array = np.linalg.lstsq(self.phi - self.discount * after, target)[0]
        return found

    @cached_property
    def _mean_mdp(self) -> tuple[Array, Array]:
        """(S, S) chances and (S,) expected rewards, means over the nodes."""
        return self.chances.mean(axis=0), np.mean(np.sum(self.chances * self.rewards, axis=2), axis=0)

    def describe(self) -> dict[str, Any]:
        return {
            "task": "policy_evaluation", "nodes": self.nodes, "dim_x": self.dim_x, "dim_y": self.dim_y,
            "data_sha256": hash_arrays((self.phi, self.chances, self.rewards, self.end)),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Sums over transitions, scaled by S / (their number): the coefficients of g."""

    weight: Array    # c (nodes, S)
    after: Array     # F (nodes, S, dim_x)
    reward: Array    # R (nodes, S)
    squares: Array   # K (nodes, dim_x, dim_x)
    cross: Array     # q (nodes, dim_x)
    energy: Array    # (nodes,) of r²

    @staticmethod
    def over(phi: Array, start: Array, end: Array, earned: Array) -> "Means":
        """Return the means over (nodes, count) transitions."""
        xp = array_namespace(phi)
        at = xp.asarray(start, device=device(phi))
        states = xp.arange(phi.shape[0], device=device(phi))
        chosen = xp.astype(at[:, None, :] == states[None, :, None], phi.dtype)     # (nodes, S, count)
        after = phi[xp.asarray(end, device=device(phi))]
        scale = phi.shape[0] / start.shape[1]
        transposed = after.swapaxes(1, 2)
        return Means(
            weight=scale * xp.sum(chosen, axis=2), after=scale * (chosen @ after),
            reward=scale * (chosen @ earned[:, :, None])[:, :, 0], squares=scale * (transposed @ after),
            cross=scale * (transposed @ earned[:, :, None])[:, :, 0], energy=scale * xp.sum(earned * earned, axis=1),
        )


@dataclass(frozen=True, eq=False)
class PolicyEvaluationShard(Shard):
    """Closed-form oracles as batched products."""

    phi: Array               # (S, dim_x)
    start: Array             # (nodes, transitions) states
    end: Array
    earned: Array            # (nodes, transitions) rewards
    discount: float
    lower: Means
    upper: Array             # (nodes, S) weights of the states in f; they sum to 1
    sizes_: tuple[int, int]

    @property
    def sizes(self) -> tuple[Array, Array]:
        lower, upper = (np.full(self.nodes, size, dtype=np.int64) for size in self.sizes_)
        return lower, upper

    def subset(self, lower: Array | None, upper: Array | None) -> "PolicyEvaluationShard":
        shard = self
        rows = np.arange(self.nodes)[:, None]
        if lower is not None:
            earned = self.earned[rows, as_index(lower, self.earned)]
            means = Means.over(self.phi, self.start[rows, lower], self.end[rows, lower], earned)
            shard = replace(shard, lower=means, sizes_=(lower.shape[1], shard.sizes_[1]))
        if upper is not None:
            xp = array_namespace(self.upper)
            weights = xp.zeros_like(self.upper)
            weights[rows, as_index(upper, weights)] = 1.0 / upper.shape[1]
            shard = replace(shard, upper=weights, sizes_=(shard.sizes_[0], upper.shape[1]))
        return shard

    def f(self, x: Array, y: Array) -> Array:
        residual = self._residual(x, y)
        value: Array = 0.5 * array_namespace(x).sum(self.upper * residual * residual, axis=1)
        return value

    def g(self, x: Array, y: Array) -> Array:
        xp, m, gamma = array_namespace(x), self.lower, self.discount
        in_y = xp.sum(m.weight * y * y, axis=1) - 2.0 * xp.sum(y * (m.reward + gamma * _product(m.after, x)), axis=1)
        in_x = xp.sum(x * (gamma**2 * _product(m.squares, x) + 2.0 * gamma * m.cross), axis=1)
        value: Array = 0.5 * (in_y + in_x + m.energy)
        return value

    def f_x(self, x: Array, y: Array) -> Array:
        return (self.upper * self._residual(x, y)) @ self.phi

    def f_y(self, x: Array, y: Array) -> Array:
        return -self.upper * self._residual(x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        m, gamma = self.lower, self.discount
        return gamma * (gamma * _product(m.squares, x) + m.cross - _product(m.after.swapaxes(1, 2), y))

    def g_y(self, x: Array, y: Array) -> Array:
        m = self.lower
        return m.weight * y - m.reward - self.discount * _product(m.after, x)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self.lower.weight * v

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return -self.discount * _product(self.lower.after.swapaxes(1, 2), v)

    def _residual(self, x: Array, y: Array) -> Array:
        return x @ self.phi.T - y


def _product(matrices: Array, rows: Array) -> Array:
    """Return matrix i times row i."""
    product: Array = (matrices @ rows[:, :, None])[:, :, 0]
    return product
