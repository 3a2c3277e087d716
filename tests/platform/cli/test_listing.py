"""`dbo list`: the overview, and the parameters of one component."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbo.algorithms.registry import algorithms
from dbo.platform.config import yaml_io
from dbo.platform.config.presets import find_preset

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
    file = Path(__file__).parents[3] / "algorithms" / "presets" / "sldbo.yaml"
    values = yaml_io.read(file)["coefficient_tuning/digits"]["values"]
    assert f"coefficient_tuning/digits eta_x {values['eta_x']}" in tuned


def test_algorithms_are_listed_with_family_citation_and_requirements(dbo: Command) -> None:
    """`dbo list algorithms` shows them for every algorithm, in its own words."""
    shown = " ".join(dbo("list", "algorithms").out.split())
    for made in algorithms().values():
        assert f"family {made.family} · {made.citation} · needs {made.requirements}" in shown
    assert "needs all data on one machine, gradients only" in " ".join(dbo("list", "f2ba").out.split())


def test_the_overview_fits_a_screen(dbo: Command) -> None:
    """Algorithms with their family and tasks have one line each, other kinds their names: at most 45 lines of 80."""
    lines = dbo("list").out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    for made in algorithms().values():
        (line,) = [line for line in lines if line.split()[:1] == [made.name]]
        assert made.family in line


def test_a_name_is_listed_with_values_and_their_source(dbo: Command) -> None:
    """`dbo list NAME key=value` shows what an experiment with these settings uses, and who chose it."""
    shown = {words[0]: words[1:3] for line in dbo("list", "c2dfb", "algorithm.lam=77").out.splitlines()
             if (words := line.split())}
    assert shown["lam"] == ["77", "you"]
    tuned, quadratic = (find_preset("c2dfb", *place)["eta_in"] for place in (
        ("coefficient_tuning", "digits"), ("quadratic", None)))
    assert shown["eta_in"] == [f"{tuned:g}", "preset"]
    assert shown["inner_steps"] == ["15", "default"]
    assert f"eta_in {quadratic:g} preset" in " ".join(dbo("list", "c2dfb", "task=quadratic").out.split())
    assert "qsgd(levels=127) you" in " ".join(dbo("list", "c2dfb", "algorithm.compressor=qsgd").out.split())
    assert "required" in dbo("list", "csv").out


def test_wrong_settings_of_a_listing_are_refused(dbo: Command, assert_refused: Callable[..., None]) -> None:
    """Before anything is printed, with the names that are allowed."""
    assert_refused(dbo("list", "c2dfb", "task=nope"), "task", "nope", "coefficient_tuning")
    assert_refused(dbo("list", "c2dfc"), "c2dfc", "did you mean 'c2dfb'")
    assert_refused(dbo("list", "rounds=3"), "rounds", "plugins")
