"""Check what mini-batches do to an algorithm, on a small quadratic with noise, in float64.

V is the mean square of mean(x) − its end with full batches, over many rounds that start at that end. An algorithm's
claim (`dbo.algorithms.claims.Noise`) is checked with these runs:

1. Samples: over an epoch, the mean of the batches' derivatives is the derivative of all samples.
2. Mean: mean(x) stays around its end with full batches; the square of its mean offset is a small part of V.
3. Steps: half of the step sizes give half of V. With variance reduction they give a quarter.
4. Noise: half of σ gives a quarter of V.
5. Nodes: one node has m times the V of m nodes.
6. Other samples, the negative control: where differences of gradients must see the same samples, new samples at every
   call of an oracle enlarge V. For variance reduction this breaks the method.

Tracked algorithms run on heterogeneous nodes. Those that stop at a distance from their limit run on identical ones,
where that distance is 0. The noise is that of samples that perturb all coefficients: it depends on x and y, so the
difference of two gradients has noise too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

import numpy as np

from dbo.algorithms.api import Algorithm, Array, Claim, Key, Noise, algorithms
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import CountingShard, select_node
from dbo.platform.network.topology import TOPOLOGIES, Network, build_network, metropolis_weights
from dbo.tasks.api import Batches, Problem, Setup, Task
from dbo.tasks.api import Shard as TaskShard
from dbo.tasks.registry import PARTITIONS, TASKS

NODES = 4
SIGMA = 0.3
BATCHES = Batches(lower=4, upper=4)
# Conditioned as in certificates.py; as many upper variables as lower ones, because V is an average over them too.
TASK: Mapping[str, Any] = {
    "dim_x": 12, "dim_y": 12, "condition": 2.0, "mu": 0.5, "rho": 1.0, "start": 0.5, "samples": 32,
}

# V is an average over correlated rounds. For the built-in algorithms its relative error is about 0.15.
STEP_RATIO = (0.33, 0.75)           # of V with half of the steps to V; 0.5 is claimed
REDUCED_RATIO = (0.0, 0.33)         # the same with variance reduction; 0.25 is claimed
NOISE_RATIO = (0.18, 0.33)           # with half of σ; 0.25 is claimed
NODES_RATIO = (2.5, 6.5)            # of V on one node to V on four
OFFSET_RATIO = (0.0, 0.5)           # of the square of the mean offset to V
SHARED_RATIO = (3.0, np.inf)        # of V with new samples at every call to V
BELOW_RATIO = (0.001, 0.5)          # of V to that of the algorithm without variance reduction, which must not diverge
UNBIASED = 1e-12                    # error of a mean over an epoch, relative to the derivative

FIRST_FRESH_STEP = 1_000_000        # steps of redrawn batches; no algorithm has as many


@dataclass(frozen=True, slots=True)
class Setting:
    """The configuration of a run, and the rounds that it takes to converge and to measure."""

    steps: Mapping[str, Any]
    rounds: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How far mean(x) is from its end with full batches."""

    variance: float                         # V
    offset: float                           # square of the mean offset, relative to V


@dataclass(frozen=True, slots=True)
class NoiseCertificate:
    """The results of the checks of one algorithm; ratios are those of V."""

    algorithm: str
    noise: Noise | None                     # None: nothing is claimed, nothing was measured
    base: Spread = Spread(np.nan, np.nan)
    step_ratio: float = np.nan
    noise_ratio: float = np.nan
    nodes_ratio: float = np.nan
    shared_ratio: float | None = None       # new samples at every call
    below_ratio: float | None = None        # to the algorithm without variance reduction
    failures: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """ok, failed or no claim."""
        return "failed" if self.failures else "no claim" if self.noise is None else "ok"


def verify_noise(algorithm: Algorithm) -> NoiseCertificate:
    """Check what an algorithm claims about mini-batches; an algorithm without such a claim is not run."""
    claim = algorithm.claim
    if claim is None or claim.noise is None:
        return NoiseCertificate(algorithm.name, None)
    noise, setting, heterogeneity = claim.noise, scale_steps(claim, 1.0), 0.0 if claim.floor else 1.0
    problem, weaker = build_problem(SIGMA, heterogeneity), build_problem(SIGMA / 2, heterogeneity)
    identical = build_problem(SIGMA, 0.0)
    with np.errstate(all="ignore"):         # divergence shows in the ratios
        base = measure_spread(algorithm, setting, problem)
        v = base.variance
        together = measure_spread(algorithm, setting, identical).variance if heterogeneity else v
        certificate = NoiseCertificate(
            algorithm.name, noise, base,
            step_ratio=measure_spread(algorithm, scale_steps(claim, 0.5), problem).variance / v,
            noise_ratio=measure_spread(algorithm, setting, weaker).variance / v,
            nodes_ratio=measure_spread(algorithm, setting, identical, alone=True).variance / together,
        )
        if noise.shared:
            other = measure_spread(algorithm, setting, problem, fresh=True)
            ratio = other.variance / v
            certificate = replace(certificate, shared_ratio=ratio if np.isfinite(ratio) else np.inf)
        if noise.below:
            other = measure_spread(algorithms()[noise.below], setting, problem)
            certificate = replace(certificate, below_ratio=v / other.variance)
    return replace(certificate, failures=(*check_samples(), *_check_noise(certificate, noise)))


# ---- judging ---------------------------------------------------------------------------------------------------------


def check_samples() -> Iterator[str]:
    """Yield the derivatives whose mean over an epoch's batches is not that of all samples."""
    shard = build_problem(SIGMA, 1.0).shard(range(NODES))
    draw = np.random.default_rng(0).standard_normal
    x, (y, v) = draw((NODES, shard.dim_x)), draw((2, NODES, shard.dim_y))
    oracles: dict[str, Callable[[TaskShard], Array]] = {
        "f_x": lambda s: s.f_x(x, y), "f_y": lambda s: s.f_y(x, y), "g_x": lambda s: s.g_x(x, y),
        "g_y": lambda s: s.g_y(x, y), "g_yy": lambda s: s.g_yy(x, y, v), "g_xy": lambda s: s.g_xy(x, y, v),
    }
    epoch = replace(BATCHES, order="epoch")
    batches = [shard.draw_batch(epoch, round_, 0) for round_ in range(TASK["samples"] // 4)]
    for name, oracle in oracles.items():
        full = oracle(shard)
        error = float(np.abs(np.mean([oracle(batch) for batch in batches], axis=0) - full).max() / np.abs(full).max())
        if not error <= UNBIASED:
            yield f"the mean of {name} over an epoch is off by {error:.1e}"


def _check_noise(certificate: NoiseCertificate, noise: Noise) -> Iterator[str]:
    checks = [
        ("half of the steps leaves", certificate.step_ratio, REDUCED_RATIO if noise.reduced else STEP_RATIO),
        ("half of the noise leaves", certificate.noise_ratio, NOISE_RATIO),
        (f"one node instead of {NODES} has", certificate.nodes_ratio, NODES_RATIO),
        ("the mean offset is", certificate.base.offset, OFFSET_RATIO),
    ]
    if certificate.shared_ratio is not None:
        checks.append(("new samples at every call give", certificate.shared_ratio, SHARED_RATIO))
    if certificate.below_ratio is not None:
        checks.append((f"compared with {noise.below} it has", certificate.below_ratio, BELOW_RATIO))
    for what, ratio, (low, high) in checks:
        if not low <= ratio <= high:
            yield f"{what} {ratio:.2g} of the variance; must be {low:g} to {high:g}"


# ---- measuring -------------------------------------------------------------------------------------------------------


def build_problem(sigma: float, heterogeneity: float) -> Problem:
    """Return the quadratic; σ changes the noise of its samples alone."""
    setup = Setup(nodes=NODES, seed=0, dtype="float64", partition=PARTITIONS["iid"]())
    task: Callable[..., Task] = TASKS["quadratic"]
    return task(**TASK, noise=sigma, heterogeneity=heterogeneity).build(setup)


def scale_steps(claim: Claim, scale: float) -> Setting:
    """Return the setting of the check, with its step sizes multiplied by `scale`; smaller ones take more rounds."""
    assert claim.noise is not None
    steps = {**claim.steps, **claim.noise.steps}
    return Setting(
        steps | {name: scale * steps[name] for name in claim.noise.scale}, round(claim.noise.rounds / scale))


def measure_spread(
    algorithm: Algorithm, setting: Setting, problem: Problem, fresh: bool = False, alone: bool = False
) -> Spread:
    """Run with full batches to the end, then with mini-batches.

    `fresh`: every call of an oracle sees new samples. `alone`: every node runs without neighbours, and V is the mean
    over the nodes instead of that of mean(x).
    """
    if alone and algorithm.network == "star":       # a server for every node
        each = [measure_spread(algorithm, setting, select_node(problem, node)) for node in range(NODES)]
        return Spread(float(np.mean([spread.variance for spread in each])), float(np.mean([s.offset for s in each])))
    if alone:
        network = _separate_nodes()
    else:
        ring = build_network(TOPOLOGIES["ring"]().graph(NODES, 0))
        problem, network = arrange(algorithm, problem, ring)
    known = {field.name for field in fields(algorithm.config)}
    config = algorithm.config(**{name: value for name, value in setting.steps.items() if name in known})
    rounds, start = setting.rounds, setting.rounds // 4      # the noise has entered after `start` rounds
    quiet, noisy = (
        LocalEngine(algorithm, config, problem, network, [range(network.nodes)], batches=batches)
        for batches in (None, BATCHES)
    )
    for round_ in range(1, rounds + 1):
        quiet.advance(round_)
    noisy.restore([{name: rows for part in block for name, rows in part.items()} for block in quiet.snapshot()])
    block = noisy.local_blocks[0]
    if fresh:
        block.shard = _FreshShard(block.shard.shard, BATCHES, block.shard.calls)

    def read() -> Array:
        rows = block.rows("x")
        if algorithm.network == "star":
            return rows[-1:].copy()             # the server's
        return rows.copy() if alone else rows.mean(0, keepdims=True)

    end, offsets = read(), []
    for round_ in range(rounds + 1, 2 * rounds + start + 1):
        noisy.advance(round_)
        offsets.append(read() - end)
    offset = np.array(offsets[start:])                       # (rounds, rows, dim_x)
    variance = float(np.mean(np.sum(offset**2, axis=2)))
    return Spread(variance, float(np.mean(np.sum(offset.mean(0) ** 2, axis=1))) / variance)


def _separate_nodes() -> Network:
    """Return the nodes without edges: each of them mixes with itself alone."""
    neighbours: tuple[tuple[int, ...], ...] = ((),) * NODES
    return Network(NODES, neighbours, metropolis_weights(neighbours), np.zeros(NODES, dtype=np.int64), 0.0)


class _FreshShard(CountingShard):
    """Draw new samples at every call of an oracle: what a difference of two gradients must not see."""

    def __init__(self, shard: TaskShard, batches: Batches, calls: Any) -> None:
        super().__init__(shard, batches, calls)
        self._steps = count(FIRST_FRESH_STEP)

    def sample(self, key: Key) -> CountingShard:
        def draw() -> TaskShard:
            return self.shard.draw_batch(BATCHES, key.round, next(self._steps))

        s = self.shard
        return CountingShard(_Redrawn(s.ids, s.seed, s.x0, s.y0, draw), calls=self.calls, network=self.network)


@dataclass(frozen=True, eq=False)
class _Redrawn(TaskShard):
    """A shard whose every call sees another batch."""

    draw: Callable[[], TaskShard]

    def f(self, x: Array, y: Array) -> Array:
        return self.draw().f(x, y)

    def g(self, x: Array, y: Array) -> Array:
        return self.draw().g(x, y)

    def f_x(self, x: Array, y: Array) -> Array:
        return self.draw().f_x(x, y)

    def f_y(self, x: Array, y: Array) -> Array:
        return self.draw().f_y(x, y)

    def g_x(self, x: Array, y: Array) -> Array:
        return self.draw().g_x(x, y)

    def g_y(self, x: Array, y: Array) -> Array:
        return self.draw().g_y(x, y)

    def g_yy(self, x: Array, y: Array, v: Array) -> Array:
        return self.draw().g_yy(x, y, v)

    def g_xy(self, x: Array, y: Array, v: Array) -> Array:
        return self.draw().g_xy(x, y, v)
