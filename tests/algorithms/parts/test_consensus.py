"""The derived consensus step: stable modes in the linear models, and stable runs where another step diverges."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.api import NetworkFacts, Qsgd, RandK, RowTopK, Sign, TopK
from dbo.algorithms.parts.consensus import (
    DAMPING,
    DAMPING_LARGEST,
    bound_fastest,
    damped_step,
    derive_gamma,
    derive_lead_gamma,
    derive_triggered_gamma,
    lead_step,
    mean_square_step,
    triggered_step,
)
from dbo.platform.engine.automatic import derive_values, describe_derived
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.platform.runs.preparation import prepare

RING = NetworkFacts(nodes=10, places=2, spectral_gap=0.1273220037500351)
FASTEST = 4 / 3     # μ_max of the ring of ten
METHODS = {
    "c2dfb": "gamma_in", "c2dfb_nc": "gamma_in", "c2dfb_lead": "gamma_in", "c2dfb_central": "gamma_in", "lean": "gamma",
}


def decay(gamma: float, mu: float, delta: float) -> Any:
    """Eigenvalues of the linear model of one mode."""
    g = gamma * mu
    return np.linalg.eigvals(np.array([[1 - g, g], [-(1 - delta) * g, (1 - delta) * (1 + g)]]))


@pytest.mark.parametrize("delta", [0.5, 0.2, 0.05, 0.003])
def test_the_slowest_mode_is_critically_damped(delta: float) -> None:
    """Just below the derived step its eigenvalues are real; with 10 % more it swings and decays no faster."""
    gap = 0.9 if delta == 0.5 else 0.127
    gamma = damped_step(delta, gap)
    assert 0 < gamma < 1
    below, above = decay(0.999 * gamma, gap, delta), decay(1.1 * gamma, gap, delta)
    assert np.isrealobj(below) or np.abs(below.imag).max() == 0
    assert np.abs(above.imag).max() > 0
    assert np.abs(above).max() == pytest.approx(np.sqrt(1 - delta), rel=1e-9)


def test_limits() -> None:
    """Without compression or without a network the step is 1; it falls with δ."""
    assert damped_step(1.0, 0.127) == damped_step(0.5, 0.0) == 1.0
    steps = [damped_step(delta, 0.127) for delta in (0.2, 0.05, 0.01, 0.003)]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] == pytest.approx(0.05 / 4 / 0.127, rel=0.05)


# ---- random messages: second moments ---------------------------------------------------------------------------------


def grow(delta: float, sent: Any, kept: Any) -> float:
    """Return the factor per step of second moments, of a message with probability δ and none otherwise."""
    moments = delta * np.kron(sent, sent) + (1 - delta) * np.kron(kept, kept)
    return float(np.abs(np.linalg.eigvals(moments)).max())


def grow_tracked(delta: float, a: float) -> float:
    """Of (d, e) in a tracked loop, a = γμ."""
    sent, kept = (np.array([[1 - a, a], [-lost * a, lost * (1 + a)]]) for lost in (0, 1))
    return grow(delta, sent, kept)


def grow_lead(delta: float, gamma_mu: float, c: float = DAMPING) -> float:
    """Of (v, η D, h) in a loop of LEAD whose gradient is c v / η."""
    def step(is_sent: bool) -> Any:
        v, dual, h = np.eye(3)
        h = v - c * v - dual if is_sent else h
        dual = dual + gamma_mu / 2 * h
        return np.array([v - c * v - dual, dual, h])

    return grow(delta, step(True), step(False))


def grow_triggered(delta: float, gamma: float, kappa: float, c: float = DAMPING) -> float:
    """Of all (v, η D, h) of a ring of four, apart from their means; each node sends by its own chance."""
    w, steps = build_network(TOPOLOGIES["ring"]().graph(4, 0)).weights.toarray(), []
    for sent in product((False, True), repeat=4):
        v, dual, h = np.split(np.eye(12), 3)
        h = np.where(np.array(sent)[:, None], v - c * v - dual, h)
        active = w * np.logical_or.outer(sent, sent)
        error = active.sum(1)[:, None] * h - active @ h
        dual = dual + gamma / 2 * error
        chance = np.prod([delta if each else 1 - delta for each in sent])
        steps.append(np.sqrt(chance) * np.vstack([v - c * v - dual - kappa * error, dual, h]))
    apart = np.kron(np.eye(3), np.eye(4) - 0.25)
    moments, growth = apart, []
    for _ in range(1500):
        moments = apart @ sum(step @ moments @ step.T for step in steps) @ apart
        growth.append(np.log(np.trace(moments)))
        moments = moments / np.trace(moments)
    return float(np.exp(np.mean(growth[-500:])))


@pytest.mark.parametrize("delta", [0.5, 0.2, 0.05, 0.01])
def test_all_modes_are_stable_in_mean_square(delta: float) -> None:
    """Up to μ_max; at 2.1 times the step the fastest is not, nor at the step that damps the slowest mode."""
    gamma = mean_square_step(delta, FASTEST)
    assert all(grow_tracked(delta, gamma * mu) < 1 for mu in np.linspace(0.127, FASTEST, 20))
    assert grow_tracked(delta, 2.1 * gamma * FASTEST) > 1
    assert grow_tracked(delta, damped_step(delta, 0.127) * FASTEST) > 1


@pytest.mark.parametrize("delta", [0.2, 0.05, 0.01])
def test_nodes_with_positions_of_their_own_agree(delta: float) -> None:
    """Simulated gossip on the ring of ten: consensus at the step, divergence at eight times the step."""
    w = build_network(TOPOLOGIES["ring"]().graph(10, 0)).weights.toarray()

    def distance(gamma: float) -> float:
        rng = np.random.default_rng(0)
        d, public = rng.standard_normal((10, 200)), np.zeros((10, 200))
        for _ in range(int(60 / delta)):
            d = d + gamma * (w - np.eye(10)) @ public
            public = np.where(rng.random(d.shape) < delta, d, public)
        return float(np.abs(d - d.mean(0)).max())

    gamma = mean_square_step(delta, FASTEST)
    assert distance(gamma) < 0.5
    assert distance(8 * gamma) > 1e3


@pytest.mark.parametrize("delta", [0.2, 0.05, 0.01])
def test_curvature_damps_leads_modes(delta: float) -> None:
    """All are stable at the derived step, the fastest not at 2.8 times the step; without curvature none is."""
    gamma = lead_step(delta, FASTEST, DAMPING)
    assert gamma * FASTEST / 2 == pytest.approx(0.5 * DAMPING * delta / (1 - delta), rel=1e-12)
    assert all(grow_lead(delta, gamma * mu) < 1 for mu in np.linspace(0.127, FASTEST, 10))
    assert grow_lead(delta, 2.8 * gamma * FASTEST) > 1
    assert grow_lead(delta, 0.1 * gamma * FASTEST, c=0.0) > 1


@pytest.mark.parametrize("kappa", [0.0, 0.3])
@pytest.mark.parametrize("delta", [0.05, 0.02])
def test_curvature_and_damping_stabilise_edge_triggered_modes(delta: float, kappa: float) -> None:
    """A ring of four with messages of their own: stable at half of the limit, not at 1.5 times the limit."""
    gamma = triggered_step(delta, FASTEST, kappa)
    half = 0.5 * (DAMPING + kappa * FASTEST * delta)
    assert gamma == pytest.approx(min(2 * half / FASTEST, mean_square_step(delta, FASTEST)), rel=1e-12)
    assert grow_triggered(delta, gamma, kappa) < 1
    assert grow_triggered(delta, 6 * half / FASTEST, kappa) > 1


@pytest.mark.parametrize("topology", ["ring", "erdos_renyi", "two_hop", "star", "complete"])
def test_the_bound_of_the_fastest_mode(topology: str) -> None:
    """2 D/(1 + D) is at least the largest eigenvalue of I − W, and is it on a ring."""
    network = build_network(TOPOLOGIES[topology]().graph(10, 0))
    largest = 1 - np.linalg.eigvalsh(network.weights.toarray()).min()
    bound = bound_fastest(NetworkFacts(10, int(network.degree.max()), network.spectral_gap))
    assert bound >= largest - 1e-12
    assert topology != "ring" or bound == pytest.approx(largest, rel=1e-12)


def test_only_messages_without_random_numbers_take_the_larger_step() -> None:
    """A tracked loop's step is that of the slowest mode for top-k, and that of all modes for any other Q."""
    class Own:
        def contraction(self, dim: int) -> float:
            return 0.1

    def of(derive: Any, q: Any) -> float:
        cfg = type("Config", (), {"compressor": q, "damping": 0.0})()
        return float(derive(cfg, RING, 64, 640))

    for q in (TopK(ratio=0.1), RowTopK(ratio=0.1, width=10), Sign()):
        delta = q.contraction(640)
        assert of(derive_gamma, q) == of(derive_triggered_gamma, q) == damped_step(delta, RING.spectral_gap)
        assert of(derive_lead_gamma, q) == lead_step(delta, FASTEST, DAMPING_LARGEST)
    for q in (RandK(ratio=0.1), Qsgd(levels=2), Own()):
        delta = q.contraction(640)
        assert of(derive_gamma, q) == mean_square_step(delta, FASTEST) < damped_step(delta, RING.spectral_gap)
        assert of(derive_lead_gamma, q) == lead_step(delta, FASTEST, DAMPING) < of(derive_gamma, q)
        assert of(derive_triggered_gamma, q) == triggered_step(delta, FASTEST, 0.0)


# ---- runs ------------------------------------------------------------------------------------------------------------

QS: dict[str, dict[str, Any]] = {
    "top_k": {"name": "top_k", "bits": None}, "top_k 4 bits": {"name": "top_k", "bits": 4},
    "rand_k": {"name": "rand_k"},
}


def run_digits(name: str, compressor: dict[str, Any], rounds: int, **steps: Any) -> tuple[float, float]:
    """Return the largest entry of y and the mean accuracy of the nodes' models on digits, with the preset's steps."""
    experiment = Experiment(
        task={"name": "coefficient_tuning"}, algorithm={"name": name, "compressor": compressor, **steps})
    parts, prepared = experiment.parts, prepare(experiment)
    engine = LocalEngine(
        parts.algorithm, parts.config, prepared.problem, prepared.network, [range(10)], schedules=parts.schedules)
    with np.errstate(all="ignore"):
        for round_ in range(1, rounds + 1):
            engine.advance(round_)
        x, y = engine.rows("x"), engine.rows("y")
        largest = float(np.abs(y).max())
        if not np.isfinite(largest):
            return largest, 0.0
        return largest, float(np.mean(prepared.problem.evaluate(x, y)["test_accuracy"]))


RATIOS = (0.2, 0.05, 0.01)
CASES = [
    pytest.param(name, label, ratio, marks=[] if (label, ratio) == ("rand_k", 0.2) else [pytest.mark.slow])
    for name, label, ratio in product(METHODS, QS, RATIOS)
]


@pytest.mark.parametrize(("name", "label", "ratio"), CASES)
def test_every_method_learns_at_every_ratio(name: str, label: str, ratio: float) -> None:
    """With `gamma_in: auto` no compressor of a sweep diverges within 25 rounds; guessing has an accuracy of 0.1."""
    largest, accuracy = run_digits(name, {**QS[label], "ratio": ratio}, 25, **{METHODS[name]: "auto"})
    assert largest < 300
    assert accuracy > 0.45


@pytest.mark.parametrize("name", METHODS)
def test_the_slowest_modes_step_diverges_with_random_positions(name: str) -> None:
    """Control: the step that critically damps the slowest mode, which top-k takes."""
    steps = {METHODS[name]: damped_step(0.2, RING.spectral_gap)}
    assert not run_digits(name, {"name": "rand_k", "ratio": 0.2}, 25, **steps)[0] < 1e3


def test_top_k_takes_the_smallest_ratio() -> None:
    """One entry of 640."""
    assert run_digits("c2dfb", {"name": "top_k", "ratio": 0.003}, 20, gamma_in="auto")[0] < 10


def test_the_presets_step_diverges_at_a_small_ratio() -> None:
    """Control: γ_in of the preset, tuned for 20 %, does with one entry of 640."""
    assert not run_digits("c2dfb", {"name": "top_k", "ratio": 0.003}, 12)[0] < 1e3


@pytest.mark.parametrize(("name", "parameter"), METHODS.items())
def test_every_compressed_method_accepts_it(name: str, parameter: str) -> None:
    """The experiment keeps `auto`; the number that all blocks use comes from δ of the method's rows and W."""
    experiment = Experiment(
        task={"name": "quadratic"}, algorithm={"name": name, parameter: "auto", "compressor": {"ratio": 0.05}})
    assert experiment.algorithm[parameter] == "auto"
    assert Experiment(**experiment.to_dict()).run_key == experiment.run_key
    prepared, parts = prepare(experiment), experiment.parts
    delta = parts.config.compressor.contraction(prepared.problem.dim_y)      # type: ignore[attr-defined]
    expected = damped_step(delta, prepared.network.spectral_gap)
    if name == "c2dfb_lead":
        expected = lead_step(delta, FASTEST, DAMPING_LARGEST)
    derived = derive_values(experiment, prepared.problem, prepared.network)
    assert derived == {parameter: pytest.approx(expected, rel=1e-12)}
    assert describe_derived(derived) == f"derived from the network: {parameter} = {expected:.3g}"
    engine = LocalEngine(
        parts.algorithm, parts.config, prepared.problem, prepared.network, [range(5), range(5, 10)],
        schedules=parts.schedules)
    for block in engine.local_blocks:
        assert getattr(block._schedules.apply(block.config, 3), parameter) == derived[parameter]


def test_other_parameters_refuse_auto() -> None:
    """`auto` is a value of the parameters that declare it, and of no other."""
    with pytest.raises(InputError, match=r"algorithm\.eta_in: 'auto' is not allowed; must be a number"):
        Experiment(task={"name": "quadratic"}, algorithm={"name": "c2dfb", "eta_in": "auto"})
    with pytest.raises(InputError, match=r"algorithm\.gamma_in: 'off' is not allowed; must be a number"):
        Experiment(task={"name": "quadratic"}, algorithm={"name": "c2dfb", "gamma_in": "off"})
