"""The derived consensus step: critically damped in the linear model, and stable where a fixed one is not."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.parts.consensus import consensus_step
from dbo.platform.engine.automatic import derive_values, describe_derived
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.experiment import Experiment
from dbo.platform.runs.preparation import prepare


def decay(gamma: float, mu: float, delta: float) -> Any:
    """Eigenvalues of the linear model of one mode."""
    g = gamma * mu
    return np.linalg.eigvals(np.array([[1 - g, g], [-(1 - delta) * g, (1 - delta) * (1 + g)]]))


@pytest.mark.parametrize("delta", [0.5, 0.2, 0.05, 0.003])
def test_the_slowest_mode_is_critically_damped(delta: float) -> None:
    """Just below the derived step its eigenvalues are real; with 10 % more it swings and decays no faster."""
    gap = 0.9 if delta == 0.5 else 0.127
    gamma = consensus_step(delta, gap)
    assert 0 < gamma < 1
    below, above = decay(0.999 * gamma, gap, delta), decay(1.1 * gamma, gap, delta)
    assert np.isrealobj(below) or np.abs(below.imag).max() == 0
    assert np.abs(above.imag).max() > 0
    assert np.abs(above).max() == pytest.approx(np.sqrt(1 - delta), rel=1e-9)


def test_limits() -> None:
    """Without compression or without a network the step is 1; it falls with δ."""
    assert consensus_step(1.0, 0.127) == consensus_step(0.5, 0.0) == 1.0
    steps = [consensus_step(delta, 0.127) for delta in (0.2, 0.05, 0.01, 0.003)]
    assert steps == sorted(steps, reverse=True)
    assert steps[1] == pytest.approx(0.05 / 4 / 0.127, rel=0.05)


def run_digits(ratio: float, rounds: int, **steps: Any) -> float:
    """Return the largest entry of y after some rounds of C²DFB with the preset and top-k on digits."""
    experiment = Experiment(
        task={"name": "coefficient_tuning"},
        algorithm={"name": "c2dfb", "compressor": {"name": "top_k", "ratio": ratio}, **steps},
    )
    parts, prepared = experiment.parts, prepare(experiment)
    engine = LocalEngine(
        parts.algorithm, parts.config, prepared.problem, prepared.network, [range(10)], schedules=parts.schedules)
    with np.errstate(all="ignore"):
        for round_ in range(1, rounds + 1):
            engine.advance(round_)
        return float(np.abs(engine.rows("y")).max())


@pytest.mark.parametrize("ratio", [0.2, 0.05, 0.01, 0.003])
def test_no_ratio_diverges(ratio: float) -> None:
    """With `gamma_in: auto` no ratio of a sweep does."""
    assert run_digits(ratio, 20, gamma_in="auto") < 10


def test_the_presets_step_diverges_at_a_small_ratio() -> None:
    """Control: γ_in of the preset, tuned for 20 %, does with one entry of 640."""
    assert not run_digits(0.003, 12) < 1e3


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("c2dfb", "gamma_in"), ("c2dfb_nc", "gamma_in"), ("c2dfb_lead", "gamma_in"), ("c2dfb_central", "gamma_in"),
     ("lean", "gamma")],
)
def test_every_compressed_method_accepts_it(name: str, parameter: str) -> None:
    """The experiment keeps `auto`; the number that all blocks use comes from δ of the method's rows and W."""
    experiment = Experiment(
        task={"name": "quadratic"}, algorithm={"name": name, parameter: "auto", "compressor": {"ratio": 0.05}})
    assert experiment.algorithm[parameter] == "auto"
    assert Experiment(**experiment.to_dict()).run_key == experiment.run_key
    prepared, parts = prepare(experiment), experiment.parts
    delta = parts.config.compressor.contraction(prepared.problem.dim_y)      # type: ignore[attr-defined]
    expected = consensus_step(delta, prepared.network.spectral_gap)
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
