"""`dbo list`: the overview, and the parameters of one component."""

from collections.abc import Callable
from typing import Any

from dbo.algorithms.registry import algorithms

Command = Callable[..., Any]


def test_every_component_is_listed(dbo: Command) -> None:
    """Without a name: all names. With a name: its parameters with default, range, meaning and presets."""
    done = dbo("list")
    assert (done.code, done.err) == (0, "")
    for name in (*algorithms(), "quadratic", "digits", "two_hop", "by_class", "top_k", "local"):
        assert name in done.out
    one = dbo("list", "top_k").out
    assert "ratio" in one
    assert "> 0 ≤ 1" in one
    assert "madsbo" not in one
    assert not any(name in done.out + one for name in ("typing", "Annotated", "Union"))
    assert "list of int ≥ 1" in " ".join(dbo("list", "hyper_representation").out.split())
    tuned = " ".join(dbo("list", "sldbo").out.split())
    assert "coefficient_tuning/digits eta_x 0.094" in tuned


def test_algorithms_are_listed_with_family_citation_and_requirements(dbo: Command) -> None:
    """`dbo list` shows them for every algorithm, in its own words."""
    shown = " ".join(dbo("list").out.split())
    for made in algorithms().values():
        assert f"family {made.family} · {made.citation} · needs {made.requirements}" in shown
    assert "needs all data on one machine, gradients only" in " ".join(dbo("list", "f2ba").out.split())
