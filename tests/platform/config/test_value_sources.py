"""Every value of an experiment has an source: you, a preset, or a default."""

from dbo.platform.config.experiment import Experiment
from dbo.platform.config.presets import find_preset
from dbo.platform.config.value_sources import explain_divergence, trace_values

PRESET = find_preset("c2dfb", "coefficient_tuning", "digits")


def test_values_are_traced() -> None:
    """Given values are yours, also those inside of a section that is given as a whole."""
    found = trace_values(Experiment(
        batch_size=16, topology="star", algorithm={"name": "c2dfb", "lam": 7.0, "compressor": "rand_k"}))
    sources = {key: traced.source for key, traced in found.items()}
    assert {key for key, source in sources.items() if source == "you"} == {
        "batch_size.lower", "batch_size.upper", "topology.name", "algorithm.name", "algorithm.lam",
        "algorithm.compressor.name",
    }
    assert sources["algorithm.eta_in"] == "preset"
    assert found["algorithm.eta_in"].value == PRESET["eta_in"]
    assert sources["algorithm.inner_steps"] == sources["nodes"] == "default"


def test_a_schedule_is_one_value() -> None:
    """It is yours as a whole."""
    steps = {"schedule": "cosine", "value": 1.0, "end": 0.1, "rounds": 5}
    found = trace_values(Experiment(algorithm={"name": "c2dfb", "eta_out": steps}))
    assert found["algorithm.eta_out"].source == "you"
    assert found["algorithm.eta_out"].value == steps


def test_a_divergence_names_user_set_values_first() -> None:
    """Values of the algorithm, then other ones, then the preset's; keys that cannot matter are left out."""
    text = explain_divergence(Experiment(
        name="mine", seed=3, rounds=7, topology="star", algorithm={"name": "c2dfb", "eta_in": 9.0}))
    assert text == (
        f"you set eta_in = 9 (the preset has {PRESET['eta_in']:g}), topology.name = star; preset values tuned for the "
        f"default settings: eta_out = {PRESET['eta_out']:g}, gamma_in = {PRESET['gamma_in']:g}, "
        f"gamma_out = {PRESET['gamma_out']:g}; try smaller steps"
    )


def test_untuned_defaults_are_named() -> None:
    """Without a preset for the task, the default step sizes are named, and the command that finds better ones."""
    text = explain_divergence(Experiment(task={"name": "policy_evaluation"}))
    assert text.startswith("defaults that are not tuned for this task: eta_in = 1, eta_out = 1")
    assert "dbo tune" in text
