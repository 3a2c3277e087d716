"""Error terms of an analysis: root mean squares over the nodes, whatever the packing."""

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.runner import prepare
from dbo.platform.runs.schema import METRICS

Tiny = Callable[..., Experiment]


def start(experiment: Experiment, blocks: list[list[int]]) -> LocalEngine:
    parts, prepared = experiment.parts, prepare(experiment)
    engine = LocalEngine(parts.algorithm, parts.config, prepared.problem, prepared.network, blocks)
    for round_ in range(3):
        engine.advance(round_ + 1)
    return engine


def test_errors_are_the_terms_of_the_papers_analysis(tiny: Tiny) -> None:
    """Ω of the inner and outer loops, divided by m, as roots."""
    engine = start(tiny(), [[0, 1, 2, 3]])
    state = engine.local_blocks[0].state
    errors = engine.errors()

    assert errors["consensus_tracker_x"] == pytest.approx(rms(state.s - state.s.mean(axis=0)), rel=1e-12)
    assert errors["consensus_tracker_y"] == pytest.approx(rms(state.loop_y.s - state.loop_y.s.mean(axis=0)), rel=1e-12)
    assert errors["consensus_z"] == pytest.approx(rms(state.z - state.z.mean(axis=0)), rel=1e-12)
    assert errors["compression_y"] == pytest.approx(rms(state.y - state.loop_y.d_hat), rel=1e-12)
    assert errors["compression_tracker_z"] == pytest.approx(rms(state.loop_z.s - state.loop_z.s_hat), rel=1e-12)
    assert min(errors.values()) > 0
    assert not {"compression_x", "compression_tracker_x"} & errors.keys()       # both are sent whole


def rms(rows: np.ndarray) -> float:
    return float(np.sqrt(np.sum(rows**2) / len(rows)))


TRACKERS = {"tracker_x": "track.x", "tracker_y": "track.y"}
# Configuration → what is recorded beside the consensus errors of x and y: rows, or rows and their copy, by path.
RECORDED = {
    "c2dfb_lead": (
        {"name": "c2dfb_lead"}, {"z": "loop_z.d", "tracker_x": "s"},
        {"y": ("loop_y.d", "loop_y.ref"), "z": ("loop_z.d", "loop_z.ref")}),
    "lean": (
        {"name": "lean"}, {"z": "loop_z.v"},
        {s: (f"loop_{s}.v", f"loop_{s}.ref") for s in "xyz"}),
    "storm_pl": ({"name": "storm_pl"}, {"z": "z", **TRACKERS, "tracker_z": "track.z"}, {}),
    "sun_dsbo": ({"name": "sun_dsbo"}, {"theta": "theta", **TRACKERS, "tracker_theta": "track.theta"}, {}),
    "sparkle gt": (
        {"name": "sparkle", "rule_x": "gt", "rule_y": "gt", "rule_v": "gt"},
        {"v": "v", **TRACKERS, "tracker_v": "track.v"}, {}),
    "sparkle mixed": ({"name": "sparkle", "rule_y": "gt", "rule_v": "extra"}, {"v": "v", "tracker_y": "track.y"}, {}),
    "sparkle": ({"name": "sparkle"}, {"v": "v"}, {}),
    "c2dfb compressor_x": (
        {"name": "c2dfb", "compressor_x": {"name": "top_k", "ratio": 0.3}},
        {"z": "loop_z.d", "tracker_x": "s", "tracker_y": "loop_y.s", "tracker_z": "loop_z.s"},
        {"x": ("x", "outer.x_hat"), "tracker_x": ("s", "outer.s_hat"),
         **{s: (f"loop_{s}.d", f"loop_{s}.d_hat") for s in "yz"},
         **{f"tracker_{s}": (f"loop_{s}.s", f"loop_{s}.s_hat") for s in "yz"}}),
}


@pytest.mark.parametrize("label", RECORDED)
def test_terms_of_further_methods(tiny: Tiny, label: str) -> None:
    """These terms and no others, with these values, in columns that the schema declares."""
    chosen, consensus, compression = RECORDED[label]
    engine = start(tiny(algorithm=chosen), [[0, 1, 2, 3]])
    state = engine.local_blocks[0].state

    def read(path: str) -> np.ndarray:
        return np.asarray(attrgetter(path)(state))

    expected = {f"consensus_{name}": rms(read(path) - read(path).mean(axis=0)) for name, path in consensus.items()}
    expected |= {f"compression_{name}": rms(read(v) - read(copy)) for name, (v, copy) in compression.items()}
    assert engine.errors() == pytest.approx(expected, rel=1e-10)
    assert min(expected.values()) > 0
    assert expected.keys() <= METRICS.keys()


def test_errors_do_not_depend_on_the_packing(tiny: Tiny) -> None:
    expected = start(tiny(), [[0, 1, 2, 3]]).errors()
    for blocks in ([[3], [0], [1], [2]], [[2, 0], [1, 3]], [[1, 2, 3], [0]]):
        assert start(tiny(), blocks).errors() == pytest.approx(expected, rel=1e-10)


def test_a_method_without_terms_has_no_further_errors(tiny: Tiny) -> None:
    assert start(tiny(algorithm={"name": "d_soba"}), [[0, 1, 2, 3]]).errors() == {}


@pytest.mark.parametrize("name", [name for name, method in algorithms().items() if method.network == "gossip"])
def test_declared_terms_are_arrays_of_the_state(tiny: Tiny, name: str) -> None:
    """Names of trackers say so, and every value is a finite number from the start on."""
    experiment = tiny(algorithm={"name": name})
    parts, prepared = experiment.parts, prepare(experiment)
    engine = LocalEngine(parts.algorithm, parts.config, prepared.problem, prepared.network, [[0, 1], [2, 3]])
    errors = engine.errors()
    assert all(key.startswith(("consensus_", "compression_")) and np.isfinite(value) for key, value in errors.items())
    assert not {"consensus_x", "consensus_y"} & errors.keys()
