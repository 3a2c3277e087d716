"""Compare every algorithm with a second implementation of its pseudo-code, with a dense W and without the engine.

The references follow the pseudo-code: stacked rows, `w @ rows` for Σ_j w_ij (·)_j, local oracles. The comparison
detects errors that closed forms on a quadratic cannot: all numbers of a configuration differ, and all derivatives of
the problem, second ones included, depend on the point at which they are taken.
"""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import RandK, TopK
from dbo.algorithms.references.common import series
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.local import LocalEngine
from dbo.platform.verify import trajectories
from dbo.platform.verify.log_cosh import DIM_X, DIM_Y, NODES, LogCosh

# ---- the problem ---------------------------------------------------------------------------------------------------


def test_derivatives_are_right_and_depend_on_the_point() -> None:
    """Central differences of f, g and ∇_y g; and products at two points differ, which on a quadratic they do not."""
    s = LogCosh().shard(range(NODES))
    draw = np.random.default_rng(2).standard_normal
    (x, other_x), (y, other_y, v) = draw((2, NODES, DIM_X)), draw((3, NODES, DIM_Y))
    delta = 1e-5
    for value, in_x, in_y in ((s.f, s.f_x, s.f_y), (s.g, s.g_x, s.g_y)):
        along = (value(x, y + delta * v) - value(x, y - delta * v)) / (2 * delta)
        np.testing.assert_allclose(along, (in_y(x, y) * v).sum(1), rtol=1e-6)
        along = (value(x + delta * other_x, y) - value(x - delta * other_x, y)) / (2 * delta)
        np.testing.assert_allclose(along, (in_x(x, y) * other_x).sum(1), rtol=1e-6)
    ahead, behind = y + delta * v, y - delta * v
    np.testing.assert_allclose((s.g_y(x, ahead) - s.g_y(x, behind)) / (2 * delta), s.g_yy(x, y, v), atol=1e-8)
    np.testing.assert_allclose((s.g_x(x, ahead) - s.g_x(x, behind)) / (2 * delta), s.g_xy(x, y, v), atol=1e-8)
    for product in (s.g_yy, s.g_xy):
        here = product(x, y, v)
        assert np.abs(product(other_x, y, v) - here).max() > 0.01
        assert np.abs(product(x, other_y, v) - here).max() > 0.01


# ---- the comparison ------------------------------------------------------------------------------------------------

PENALTY = {"lam": 7.0, "inner_steps": 4, "eta_in": 0.31, "eta_out": 0.07}
COMPRESSED = PENALTY | {"gamma_in": 0.4, "gamma_out": 0.6, "compressor": TopK(ratio=0.3)}
HIGP = {"inner_steps": 3, "higp_steps": 4, "eta_x": 0.11, "eta_y": 0.23, "eta_z": 0.17, "theta": 0.37, "gam": 0.7}
MOMENTUM = {
    "eta": 0.3, "beta_x": 0.4, "beta_y": 0.6, "alpha_x": 0.7, "alpha_y": 1.3, "neumann_terms": 6, "lipschitz": 2.6
}
# Stable on the problem above; all numbers of one configuration differ.
STEPS: dict[str, dict[str, Any]] = {
    "c2dfb": COMPRESSED,
    "c2dfb_nc": COMPRESSED,
    "c2dfb_lead": COMPRESSED | {"alpha": 0.8},
    "c2dfb_central": COMPRESSED,
    "lean": PENALTY | {
        "gamma": 0.4, "damping": 0.17, "momentum": 0.23, "compressor": TopK(ratio=0.3), "ratio_z": 0.426,
        "ratio_x": 0.662,
    },
    "madsbo": HIGP,
    "madsbo_gt": HIGP,
    "mdbo": MOMENTUM,
    "vrdbo": MOMENTUM,
    "dsgda_gt": {"lam": 7.0, "eta_x": 0.05, "eta_y": 0.12, "eta_z": 0.17},
    "sldbo": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "radius": 0.2},     # v comes to the ball's edge
    "d_soba": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "theta": 0.4, "delta": 0.1},
    "gossip_dsbo": {"eta_x": 0.05, "eta_y": 0.12, "theta": 0.3, "neumann_terms": 6, "lipschitz": 2.6},
    "sparkle": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "theta": 0.4},
    "storm_pl": {"lam": 7.0, "eta": 0.4, "beta_x": 0.15, "beta_y": 0.3, "beta_z": 0.5, "alpha": 2.0},
    "sun_dsbo": {"c": 7.0, "prox": 1.7, "eta_x": 0.05, "eta_y": 0.12, "eta_theta": 0.17},
    "slam": {"inner_steps": 3, "eta_x": 0.11, "eta_y": 0.23, "gamma": 0.33, "neumann_terms": 6, "lipschitz": 2.6},
    "f2ba": PENALTY,
    # Three rounds with μ = 0, then μ > 0.
    "bome": {"inner_steps": 4, "eta_in": 0.31, "eta_x": 0.07, "eta_y": 0.5, "rate": 0.3, "floor": 0.01},
    "f2sa": {
        "inner_steps": 4, "lam_start": 3.0, "lam_rounds": 2.0, "lam_power": 0.4,
        "eta_z": 0.23, "eta_y": 0.31, "eta_x": 0.07,
    },
    "stocbio": {"inner_steps": 3, "neumann_terms": 6, "eta_y": 0.31, "eta_v": 0.37, "eta_x": 0.07},
    "soba": {"eta_x": 0.07, "eta_y": 0.12, "eta_v": 0.17},
    # Four of six clients; v comes to the ball's edge.
    "fednest": {"inner_steps": 2, "local_steps": 3, "neumann_terms": 4, "lipschitz": 2.6, "eta_x": 0.05, "eta_y": 0.12,
                "participation": 0.6},
    "simfbo": {"local_steps": 3, "local_x": 0.04, "local_y": 0.09, "local_v": 0.07, "eta_x": 0.05, "eta_y": 0.12,
               "eta_v": 0.17, "radius": 0.2, "participation": 0.6},
    "fedbioacc": {"local_steps": 3, "eta_x": 0.04, "eta_y": 0.09, "eta_v": 0.11, "theta": 0.3, "radius": 0.2,
                  "participation": 0.6},
    "aggitd": {"inner_steps": 4, "eta_x": 0.05, "eta_y": 0.12, "eta_z": 0.31, "participation": 0.6},
    "ef_soba": {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.17, "radius": 0.2, "participation": 0.6,
                "compressor": TopK(ratio=0.3)},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in algorithms()} | {
    "c2dfb cached": ("c2dfb", {"tracker": "cached"}),
    "c2dfb reset": ("c2dfb", {"reset_every": 2}),
    "c2dfb rand_k": ("c2dfb", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_nc rand_k": ("c2dfb_nc", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_lead rand_k": ("c2dfb_lead", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_central rand_k": ("c2dfb_central", {"compressor": RandK(ratio=0.3)}),
    "c2dfb_central reset": ("c2dfb_central", {"reset_every": 2}),
    "lean rand_k": ("lean", {"compressor": RandK(ratio=0.3)}),
    "lean untriggered": ("lean", {"edge_triggered": False}),
    "lean z alone": ("lean", {"explain_z": False}),
    "lean x whole": ("lean", {"compress_x": False}),
    "c2dfb own steps": ("c2dfb", {"eta_y": 0.27, "eta_z": 0.37}),
    "c2dfb x compressed": ("c2dfb", {"compressor_x": TopK(ratio=0.5)}),
    "c2dfb x compressed, reset": ("c2dfb", {"compressor_x": TopK(ratio=0.5), "reset_every": 2}),
    "c2dfb h": ("c2dfb", {"y_objective": "h", "eta_in": 0.03}),
    "c2dfb_nc cached": ("c2dfb_nc", {"tracker": "cached"}),
    "c2dfb_nc own": ("c2dfb_nc", {"mixing": "own"}),
    "mdbo sampled": ("mdbo", {"neumann": "sampled"}),
    "vrdbo sampled": ("vrdbo", {"neumann": "sampled"}),
    "d_soba first_order": ("d_soba", {"derivatives": "first_order"}),
    "sparkle extra": ("sparkle", {"rule_x": "extra", "rule_y": "extra", "rule_v": "extra"}),
    "sparkle gt": ("sparkle", {"rule_x": "gt", "rule_y": "gt", "rule_v": "gt"}),
    "sparkle gt ed extra": ("sparkle", {"rule_x": "gt", "rule_v": "extra"}),
    "sparkle extra gt ed": ("sparkle", {"rule_x": "extra", "rule_y": "gt"}),
    "f2ba z from y": ("f2ba", {"z_start": "y"}),
    "bome gradient": ("bome", {"phi": "gradient"}),
    "aggitd sampled": ("aggitd", {"series": "sampled"}),
}
STAR = [name for name, made in algorithms().items() if made.network == "star"]
VARIANTS |= {f"{name} all": (name, {"participation": 0.99}) for name in STAR}

# Numbers without influence on the iterates: with full batches ∇_y g needs no correction, nor does the whole series.
IDLE = {
    "lean x whole": {"ratio_x"}, "vrdbo": {"alpha_x", "alpha_y"}, "vrdbo sampled": {"alpha_y"}, "d_soba": {"delta"},
    "storm_pl": {"alpha"}, "c2dfb own steps": {"eta_in"},
    # Four clients of six are also four with 1 % more.
    **{label: {"participation"} for label, (name, _) in VARIANTS.items() if name in STAR},
}


def configure(label: str) -> tuple[str, Any]:
    """The algorithm's name, and its configuration."""
    name, changes = VARIANTS[label]
    if algorithms()[name].reference is None or name not in STEPS:
        missing = "name a reference in its decorator (algorithms/references), and give it steps here that all differ"
        pytest.fail(f"{name}: {missing}", pytrace=False)
    return name, algorithms()[name].config(**STEPS[name] | changes)


def reference(name: str, config: Any, weights: Any = None) -> list[Any]:
    """Return the rows of the second implementation, at the start and after each round."""
    return trajectories.run_reference(algorithms()[name], config, weights)


def error(label: str, config: Any, expected: list[Any]) -> float:
    """The largest difference between the algorithm and these rows in any round, relative to the rows' largest entry."""
    assert all(rows.keys() >= {"x", "y", "direction"} for rows in expected)
    return trajectories.compare(algorithms()[VARIANTS[label][0]], config, expected).error


@pytest.mark.parametrize("label", VARIANTS)
def test_iterates_are_those_of_the_pseudo_code(label: str) -> None:
    """On a random graph all nodes' x, y, direction and more agree with the reference in every round, to 1e-10."""
    name, config = configure(label)
    expected = reference(name, config)
    assert error(label, config, expected) < 1e-10
    assert all(np.abs(expected[-1][part] - expected[0][part]).max() > 1e-2 for part in ("x", "y"))
    assert max(np.abs(row).max() for row in expected[-1].values()) < 100


def numbers(config: Any) -> dict[str, float]:
    return {field.name: value for field in fields(config) if isinstance(value := getattr(config, field.name), float)}


@pytest.mark.parametrize("label", VARIANTS)
def test_another_number_is_detected(label: str) -> None:
    """Control: all numbers of a configuration differ, and one that is 1 % off changes the iterates."""
    name, config = configure(label)
    given = numbers(config)
    assert len({*given.values(), 1.0}) == len(given) + 1
    for changed in given.keys() - IDLE.get(label, set()):
        other = replace(config, **{changed: 1.01 * given[changed]})
        assert error(label, config, reference(name, other)) > 1e-6, changed


@pytest.mark.parametrize("label", [label for label, (_, changes) in VARIANTS.items() if changes])
def test_another_variant_is_detected(label: str) -> None:
    """Control: what a variant changes affects the iterates."""
    name, config = configure(label)
    _, default = configure(name)
    assert error(label, config, reference(name, default)) > 1e-6


@pytest.mark.parametrize("label", [label for label in VARIANTS if algorithms()[VARIANTS[label][0]].network == "gossip"])
def test_another_network_is_detected(label: str) -> None:
    """Control: a reference with a little less mixing is another one."""
    name, config = configure(label)
    lazy = 0.99 * trajectories.GRAPH.weights.toarray() + 0.01 * np.eye(NODES)
    assert error(label, config, reference(name, config, lazy)) > 1e-6


def test_errors_of_estimates_decay() -> None:
    """VRDBO: errors of U and V shrink by 1 − α₁ η² and 1 − α₂ η² in a round, and that is all that happens to them."""
    _, config = configure("vrdbo")
    engine = LocalEngine(algorithms()["vrdbo"], config, LogCosh(), trajectories.GRAPH, [range(NODES)])
    block, draw = engine.local_blocks[0], np.random.default_rng(3).standard_normal
    off_u, off_v = draw((NODES, DIM_X)), draw((NODES, DIM_Y))
    block.state = replace(block.state, u=block.state.u + off_u, v=block.state.v + off_v)
    engine.advance(1)
    s, x, y = LogCosh().shard(range(NODES)), block.state.x, block.state.y
    exact_u, exact_v = s.f_x(x, y) - s.g_xy(x, y, series(s, x, y, s.f_y(x, y), config)), s.g_y(x, y)
    weight_u, weight_v = config.alpha_x * config.eta**2, config.alpha_y * config.eta**2
    np.testing.assert_allclose(block.state.u - exact_u, (1 - weight_u) * off_u, rtol=0, atol=1e-13)
    np.testing.assert_allclose(block.state.v - exact_v, (1 - weight_v) * off_v, rtol=0, atol=1e-13)
