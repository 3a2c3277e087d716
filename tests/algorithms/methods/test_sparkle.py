"""SPARKLE: the consensus rules, what each of them remembers, and the methods that it becomes."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.methods import sparkle
from dbo.algorithms.registry import algorithms
from dbo.platform.config.schedules import Piecewise, Schedules
from dbo.platform.verify.certificates import verify

RULES = list(product(("ed", "extra", "gt"), repeat=3))
SHORT = {"eta_x": 0.08, "eta_y": 0.1, "eta_v": 0.1, "theta": 1.0}       # steps with which all rules are stable


def with_rules(rules: tuple[str, ...], **changes: Any) -> Any:
    """SPARKLE with a claim for these rules of x, y and v."""
    made = algorithms()["sparkle"]
    assert made.claim is not None
    chosen = dict(zip(("rule_x", "rule_y", "rule_v"), rules, strict=True))
    return replace(made, claim=replace(made.claim, steps={**SHORT, **chosen, **changes}, rounds=450))


@pytest.mark.parametrize(
    "rules", [("extra",) * 3, ("gt",) * 3, ("ed", "gt", "extra"), ("extra", "ed", "gt")], ids="-".join
)
def test_every_rule_reaches_the_minimiser(rules: tuple[str, ...]) -> None:
    """On each level: invariants, hypergradient and end are those of the claim, which the default rules keep too."""
    assert verify(with_rules(rules)).failures == ()


@pytest.mark.parametrize("rules", [("ed",) * 3, ("extra",) * 3], ids="-".join)
def test_exact_diffusion_and_extra_allow_longer_steps(rules: tuple[str, ...]) -> None:
    """They end at the minimiser with steps with which gradient tracking diverges."""
    steps = {"eta_x": 0.2, "eta_y": 0.4, "eta_v": 0.4, "theta": 0.3}
    assert verify(with_rules(rules, **steps)).end.from_limit < 1e-9
    assert not verify(with_rules(("gt",) * 3, **steps)).end.from_limit < 1.0


def test_gradient_tracking_is_sldbo(lab: Any) -> None:
    """With the rule gt everywhere, no moving average and a ball that v does not leave, SLDBO has the same iterates."""
    steps = {"eta_x": 0.05, "eta_y": 0.12, "eta_v": 0.12}
    rules = {"rule_x": "gt", "rule_y": "gt", "rule_v": "gt", "theta": 1.0}
    one = lab.engine("sparkle", lab.config("sparkle", **steps, **rules), rounds=30)
    other = lab.engine("sldbo", lab.config("sldbo", **steps, radius=1e6), rounds=30)
    for name in ("x", "y", "direction"):
        np.testing.assert_allclose(one.rows(name), other.rows(name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rules", RULES, ids="-".join)
def test_means_keep_their_steps_under_a_schedule(lab: Any, rules: tuple[str, ...]) -> None:
    """mean(s) moves by −a mean(d) with the step size a of this round, also in the round in which a changes."""
    config = lab.config("sparkle", **SHORT, **dict(zip(("rule_x", "rule_y", "rule_v"), rules, strict=True)))
    steps = {s: getattr(config, f"eta_{s}") for s in "xyv"}
    schedules = Schedules({f"eta_{s}": Piecewise(value=a, after=(2,), values=(0.3 * a,)) for s, a in steps.items()})
    engine = lab.engine("sparkle", config, schedules=schedules)
    block = engine.local_blocks[0]
    for round_ in range(1, 6):
        before = block.state
        engine.advance(round_)
        for s, a in steps.items():
            change = (getattr(block.state, s) - getattr(before, s)).mean(0)
            along = (a if round_ <= 2 else 0.3 * a) * getattr(before.along, s).mean(0)
            np.testing.assert_allclose(change, -along, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        # the correction is forgotten: plain diffusion, plain gossip descent
        ("ed", lambda level, mixed: (0.5 * (level.local + mixed - (level.s - level.memory)), level.local)),
        ("extra", lambda level, mixed: (0.5 * (level.s + mixed) - level.step * level.along, level.memory)),
        ("gt", lambda level, mixed: (mixed - level.step * level.d, level.memory)),
    ],
)
def test_a_rule_without_its_correction_fails(monkeypatch: pytest.MonkeyPatch, rule: str, wrong: Any) -> None:
    """The negative control: nodes stop at a distance from the minimiser, and the certificate says so."""
    monkeypatch.setattr(sparkle.Level, "move", wrong)
    assert any("end is" in failure for failure in verify(with_rules((rule,) * 3)).failures)


def test_a_full_w_in_exact_diffusion_is_found(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """W instead of W̃ in both places of EXTRA and ED: other iterates than those of the pseudo-code."""
    expected = lab.engine("sparkle", rounds=5).rows("x")
    monkeypatch.setattr(sparkle.Level, "move", lambda level, mixed: (mixed, level.local))
    assert np.abs(lab.engine("sparkle", rounds=5).rows("x") - expected).max() > 1e-4
