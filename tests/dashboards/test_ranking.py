"""Who wins, and how sure that is."""

from pathlib import Path

import numpy as np
import pytest

from dbo.algorithms import registry
from dbo.algorithms.registry import algorithms
from dbo.dashboards import ranking
from dbo.dashboards.charts.curves import POINTS, curves
from dbo.dashboards.charts.sensitivity import sensitivity
from dbo.dashboards.estimates import band, estimate, rounded, show, thin
from dbo.dashboards.groups import order
from dbo.dashboards.load import gather
from dbo.dashboards.palette import look, shades
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import Target, read_metrics
from dbo.platform.runs.runner import run

QUADRATIC = {
    "nodes": 4, "rounds": 2, "engine": {"name": "local"}, "tracking": {"uri": "off"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
}


def test_price_of_the_target_is_that_of_the_first_evaluation_beyond_it(made: Path) -> None:
    """Mean over seeds of what metrics.jsonl says, with an interval that holds it."""
    ordered = order(gather([made / "compare"]))
    assert [ordered.label(s) for s in ordered.settings] == ["ring · iid", "complete · by_class h=0.8"]
    cell = ordered.within(ordered.settings[0])[0]
    expected = []
    for seed in (0, 1):
        lines = read_metrics(made / "compare" / f"c2dfb-{seed}-ring" / "metrics.jsonl")
        expected.append(next(line["comm_mb"] for line in lines if line["node_accuracy_mean"] >= 0.6))
    price = cell.price("comm_mb")
    assert price is not None
    assert price.mean == pytest.approx(np.mean(expected))
    assert price.count == 2
    assert price.low is not None
    assert price.high is not None
    assert price.low <= price.mean <= price.high


def test_winner_is_the_best_of_those_that_reached_the_target(made: Path) -> None:
    ordered = order(gather([made / "compare"]))
    for setting in ordered.settings:
        found = ranking.win(ordered, setting, ranking.ROUNDS)
        assert found is not None
        for cell in ordered.within(setting):
            price = cell.price("round")
            assert price is None or price.mean >= found.value.mean
    bold = [row for row in ranking.rows(ordered) if row["values"][0]["best"]]
    assert len(bold) == 2


def test_a_tie_is_told_as_one(made: Path) -> None:
    """Who needs as many rounds as the first is level with it; one round is not one rounds."""
    ordered = order(gather([made / "compare"]))
    first, other = ordered.within(ordered.settings[0])[:2]
    one, two = estimate([1.0]), estimate([2.0])
    assert one is not None
    assert two is not None
    told = [ranking.Win(ordered.settings[0], first, one, other, value).after(ordered, ranking.ROUNDS)
            for value in (one, two)]
    assert told == [f"level with {ordered.name(other)}", f"next {ordered.name(other)}, 2\u00a0rounds"]
    assert ranking.ROUNDS.text(1.0) == "1\u00a0round"


def test_target_that_nobody_reaches_is_told(made: Path) -> None:
    ordered = order(gather([made / "compare"], Target("node_accuracy_mean", 1.5)))
    assert all(card["value"] == "nobody" for card in ranking.cards(ordered)[:3])
    assert "nobody reached" in ranking.words(ordered)[0]
    assert ranking.rows(ordered)[0]["values"][0]["text"] == "not reached"
    assert ranking.rows(ordered)[0]["values"][0]["range"].startswith("best 0.")
    assert ranking.rows(ordered)[0]["values"][1]["text"] == "–"


def test_diverged_run_wins_nothing_and_says_so(made: Path) -> None:
    ordered = order(gather([made / "diverged"]))
    assert ranking.win(ordered, ordered.settings[0], ranking.ACCURACY) is None
    assert "diverged" in ranking.rows(ordered)[0]["state"]
    assert curves(ordered)[0]["bad"]


def test_variants_are_what_differs(made: Path) -> None:
    """Runs of a sweep are named by their parameters; seeds are not variants."""
    assert [cell.variant for cell in order(gather([made / "sweep"])).cells] == ["K=1", "K=3", "K=9"]
    compared = order(gather([made / "compare"]))
    assert {cell.variant for cell in compared.cells} == {""}
    assert {len(cell.runs) for cell in compared.cells} == {2}


def test_sensitivity_sets_the_claim_beside_what_was_measured(made: Path) -> None:
    (panel,) = sensitivity(order(gather([made / "sweep"])))
    assert panel["key"] == "algorithm.inner_steps"
    assert [point["value"] for point in panel["points"]] == [1.0, 3.0, 9.0]
    assert [who for who, _ in panel["said"]] == ["The paper", "Claim"]
    assert panel["said"][1][1] == "A few <b>steps</b> are enough."
    last = read_metrics(made / "sweep" / "cells" / "k9" / "metrics.jsonl")[-1]["node_accuracy_mean"]
    assert panel["points"][2]["final"][0] == pytest.approx(last, rel=1e-3)
    assert sensitivity(order(gather([made / "compare"]))) == []


def test_bootstrap_interval_covers_the_mean_of_known_draws() -> None:
    """95 % intervals of thirty normal values hold the true mean in about 95 % of repetitions."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        found = estimate(rng.normal(3.0, 1.0, 30).tolist())
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 3.0 <= found.high
    assert 0.88 <= held / 200 <= 0.99
    low, high = band(np.stack([np.full(5, 1.0), np.full(5, 2.0)]))
    assert (low >= 1).all()
    assert (high <= 2).all()
    assert estimate([None]) is None


def test_thinned_curves_keep_ends_and_crossings() -> None:
    positions = thin(100_000, POINTS, keep=[12_345])
    assert len(positions) <= POINTS
    assert positions[0] == 0
    assert positions[-1] == 99_999
    assert 12_345 in positions


def test_numbers_as_people_read_them() -> None:
    assert rounded([1.23456789, 1e6, float("nan")]) == [1.235, 1000000, None]
    assert [show(v) for v in (0.0, 12345.6, 3.14159, 1e-7, None)] == ["0", "12\u202f346", "3.14", "1.00e-7", "–"]


def test_an_algorithm_has_one_look() -> None:
    """Built-in ones differ from each other in colour or dash; strangers have a stable one."""
    names = [
        "c2dfb", "c2dfb_nc", "madsbo", "mdbo", "madsbo_gt", "vrdbo", "dsgda_gt", "sldbo", "d_soba", "gossip_dsbo",
        "f2ba", "bome",
    ]
    assert len({(look(name).light, look(name).dash) for name in names}) == len(names)
    assert look("mine") == look("mine")
    assert len(set(shades(12))) == 12


def test_graphs_of_the_same_file_name_are_two_settings(tmp_path: Path) -> None:
    """Edges files are known by their edges, not by their names; the same graph elsewhere is the same setting."""
    ring, star = "0 1\n1 2\n2 3\n3 0\n", "0 1\n0 2\n0 3\n"
    for folder, edges in (("ring", ring), ("star", star), ("moved", ring)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "edges.txt").write_text(edges)
        topology = {"name": "edges", "file": str(tmp_path / folder / "edges.txt")}
        run(Experiment(**QUADRATIC, topology=topology), tmp_path / "runs" / folder)
    ordered = order(gather([tmp_path / "runs"]))
    assert (len(ordered.settings), len(ordered.runs), ordered.repeated) == (2, 2, 1)
    assert all("edges.txt" in ordered.label(setting) for setting in ordered.settings)


def test_two_versions_of_the_code_are_two_runs(tmp_path: Path) -> None:
    """A student edits a plugin and runs it again: the experiment reads the same, its key does not."""
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gossip_penalty.py"
    plugin = tmp_path / "mine.py"
    keys = {**QUADRATIC, "plugins": [str(plugin)], "algorithm": {"name": "gossip_penalty"}}
    for folder, factor in (("a", ""), ("again", ""), ("edited", "2 * "), ("edited-again", "2 * ")):
        text = example.read_text(encoding="utf-8").replace("st.x - cfg.step", f"st.x - {factor}cfg.step")
        plugin.write_text(text)
        run(Experiment(**keys), tmp_path / "runs" / folder)
    registry.forget(algorithms()["gossip_penalty"].round.__module__)
    ordered = order(gather([tmp_path / "runs"]))
    assert [cell.variant for cell in ordered.cells] == ["", f"in {tmp_path / 'runs' / 'edited'}"]
    assert ordered.repeated == 2


def test_a_name_makes_no_version(tmp_path: Path) -> None:
    """Runs that differ in what they are called, or in how often they were saved, are repetitions as before."""
    for number, changes in enumerate(({}, {"name": "other"}, {"checkpoint_every": 1})):
        run(Experiment(**{**QUADRATIC, **changes}), tmp_path / str(number))
    ordered = order(gather([tmp_path]))
    assert (len(ordered.cells), ordered.repeated) == (1, 2)
