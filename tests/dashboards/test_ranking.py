"""Ranking of algorithms: who wins each criterion, with which interval, and which runs are compared."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.dashboards.conftest import STEPS, TINY, write_group

from dbo import components
from dbo.algorithms.registry import algorithms
from dbo.dashboards import ranking
from dbo.dashboards.charts import sensitivity
from dbo.dashboards.charts.curves import AXIS_TITLES, MAX_POINTS, build_curves
from dbo.dashboards.charts.draw import DRAWERS
from dbo.dashboards.charts.sensitivity import build_sensitivity_panels
from dbo.dashboards.groups import GroupedRuns, group_runs
from dbo.dashboards.load import load_runs
from dbo.dashboards.number_format import format_number, round_significant, thin_indices
from dbo.dashboards.palette import VIRIDIS, get_style, get_styles, sample_scale
from dbo.dashboards.ranking import build_cards, build_rows, select_criteria
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import Target
from dbo.platform.runs.statistics import MeanEstimate, estimate_mean, mean_interval

QUADRATIC = {
    "nodes": 4, "rounds": 2, "engine": {"name": "local"}, "tracking": {"uri": "off"},
    "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8},
}


def load_grouped(*folders: Path, target: Target | None = None) -> GroupedRuns:
    return group_runs(load_runs(folders, target))


def test_cost_of_the_target_is_that_of_the_first_evaluation_beyond_it(recorded: Path) -> None:
    """It is the mean over seeds of the values in metrics.jsonl, and its interval contains it."""
    runs = load_grouped(recorded / "compare")
    assert [runs.label_setting(setting) for setting in runs.settings] == ["ring · iid", "complete · by_class h=0.8"]
    group = runs.in_setting(runs.settings[0])[0]
    expected = []
    for seed in (0, 1):
        records = read_metrics(recorded / "compare" / f"c2dfb-{seed}-ring" / "metrics.jsonl")
        expected.append(next(record["comm_mb"] for record in records if record["node_accuracy_mean"] >= 0.6))
    cost = group.cost_to_target("comm_mb")
    assert cost is not None
    assert cost.mean == pytest.approx(np.mean(expected))
    assert cost.count == 2
    assert cost.low is not None
    assert cost.high is not None
    assert cost.low <= cost.mean <= cost.high


def test_winner_is_the_best_of_those_that_reached_the_target(recorded: Path) -> None:
    runs = load_grouped(recorded / "compare")
    for setting in runs.settings:
        winner = ranking.find_winner(runs, setting, ranking.ROUNDS)
        assert winner is not None
        for group in runs.in_setting(setting):
            cost = group.cost_to_target("round")
            assert cost is None or cost.mean >= winner.value.mean
    best = [row for row in ranking.build_rows(runs) if row.values[0].is_best]
    assert len(best) == 2


def test_direction_of_a_criterion_is_that_of_its_metric(recorded: Path) -> None:
    """Accuracy is maximized, losses and costs are minimized."""
    runs = load_grouped(recorded / "compare")
    setting = runs.settings[0]
    for criterion, choose in ((ranking.ACCURACY, max), (ranking.LOSS, min), (ranking.COMMUNICATION, min)):
        winner = ranking.find_winner(runs, setting, criterion)
        values = [value.mean for group in runs.in_setting(setting) if (value := criterion.measure(group))]
        assert winner is not None
        assert len(set(values)) == 2
        assert winner.value.mean == choose(values)


def test_tie_is_reported_as_a_tie(recorded: Path) -> None:
    """An algorithm that needs as many rounds as the first is tied with it; one round is `1 round`."""
    runs = load_grouped(recorded / "compare")
    first, second = runs.in_setting(runs.settings[0])[:2]
    one, two = MeanEstimate(1.0, None, None, 1), MeanEstimate(2.0, None, None, 1)
    described = [
        ranking.Winner(runs.settings[0], first, one, second, value).describe_second(runs, ranking.ROUNDS)
        for value in (one, two)
    ]
    name = runs.label_in_setting(second)
    assert described == [f"tied with {name}", f"next {name}, 2\u00a0rounds"]
    assert ranking.ROUNDS.format_with_unit(1.0) == "1\u00a0round"


def change_records(folder: Path, **values: float) -> None:
    """Write values into all evaluations of a run."""
    (folder / "manifest.json").unlink(missing_ok=True)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "sealed": False}))
    records = [{**record, **values} for record in read_metrics(folder / "metrics.jsonl")]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def run_with_psi(folder: Path, values: Mapping[str, Sequence[float]]) -> None:
    """Run each algorithm with a seed per value, and record these values of ψ."""
    for name, many in values.items():
        for seed, value in enumerate(many):
            run(Experiment(**QUADRATIC, seed=seed, algorithm={"name": name}), folder / f"{name}-{seed}")
            change_records(folder / f"{name}-{seed}", psi=value, psi_converged=1)


def test_a_difference_within_its_interval_is_a_tie(tmp_path: Path) -> None:
    """Two algorithms whose order changes with the seed tie; one that is behind with every seed does not."""
    values = {"d_soba": [0.90, 0.92, 0.91], "sldbo": [0.91, 0.90, 0.915], "mdbo": [0.80, 0.81, 0.80]}
    run_with_psi(tmp_path, values)
    runs = load_grouped(tmp_path)
    winner = ranking.find_winner(runs, runs.settings[0], ranking.PSI)
    assert winner is not None
    assert winner.group.algorithm == "mdbo"                 # lowest ψ with every seed
    assert winner.tied == ()
    by_name = {group.algorithm: group for group in runs.seed_groups}
    assert ranking.PSI.is_tie(by_name["d_soba"], by_name["sldbo"])
    assert not ranking.PSI.is_tie(by_name["d_soba"], by_name["mdbo"])


@pytest.mark.parametrize("target", [None, Target("psi", 0.95)])
def test_psi_leads_and_has_no_winner_if_one_run_missed_its_tolerance(tmp_path: Path, target: Target | None) -> None:
    """Also where ψ is the target. Nothing is bold in its column, and the run's value is marked."""
    run_with_psi(tmp_path, {"d_soba": [0.90, 0.92], "sldbo": [0.95, 0.97]})
    exact = load_grouped(tmp_path, target=target)
    assert select_criteria(exact)[0] is ranking.PSI
    assert [criterion.metric for criterion in select_criteria(exact)].count("psi") == 1
    assert (build_cards(exact)[0].title, build_cards(exact)[0].winner) == ("Lowest final ψ", "d_soba")
    assert [row.algorithm for row in build_rows(exact) if row.values[0].is_best] == ["d_soba"]
    change_records(tmp_path / "sldbo-1", psi_converged=0, psi_residual=0.75)
    runs = load_grouped(tmp_path, target=target)
    card = build_cards(runs)[0]
    assert (card.title, card.winner, card.value) == ("Final ψ", "", "no winner")
    assert card.note == "approximate: the solve of ψ of sldbo missed its tolerance"
    for number, criterion in enumerate(select_criteria(runs)):
        is_free = target is None and criterion is not ranking.PSI               # costs of a level of ψ are not
        assert any(row.values[number].is_best for row in build_rows(runs)) == (is_free and not criterion.is_cost)
    details = {row.algorithm: row.values[0].detail for row in build_rows(runs)}
    assert details["sldbo"].endswith("approximate; residual 7.5e-01")
    assert "approximate" not in details["d_soba"]
    (sentence,) = ranking.summarize(runs)
    assert sentence.startswith("Final ψ")
    assert "approximate, no winner: the solve of ψ of sldbo missed its tolerance" in sentence
    assert "lowest ψ" not in sentence


def test_one_seed_is_reported_as_untested(tmp_path: Path) -> None:
    """In the sentence, and in the cards of one setting and of several; with two seeds nothing of it is said."""
    run_with_psi(tmp_path / "one", {"d_soba": [0.90], "sldbo": [0.95]})
    for name in ("d_soba-0", "sldbo-0"):
        shutil.copytree(tmp_path / "one" / name, tmp_path / "two" / name)
        text = (tmp_path / "one" / name / "experiment.yaml").read_text().replace("name: ring", "name: complete")
        shutil.copytree(tmp_path / "one" / name, tmp_path / "two" / f"complete-{name}")
        (tmp_path / "two" / f"complete-{name}" / "experiment.yaml").write_text(text)
    for folder, value in (("one", "0.9"), ("two", "in 2 of 2 settings")):
        runs = load_grouped(tmp_path / folder)
        card = build_cards(runs)[0]
        assert (card.winner, card.value) == ("d_soba", value)
        assert card.note.endswith("one seed: not tested")
        assert all("one seed: not tested." in sentence for sentence in ranking.summarize(runs))
    run_with_psi(tmp_path / "seeds", {"d_soba": [0.90, 0.91], "sldbo": [0.95, 0.96]})
    runs = load_grouped(tmp_path / "seeds")
    assert build_cards(runs)[0].winner == "d_soba"
    assert "tested" not in str(build_cards(runs)) + str(ranking.summarize(runs))


def test_card_of_a_tie_names_all_and_no_winner(tmp_path: Path) -> None:
    run_with_psi(tmp_path, {"d_soba": [0.90, 0.92], "sldbo": [0.91, 0.90]})
    card = build_cards(load_grouped(tmp_path))[0]
    assert (card.winner, card.value) == ("", "tie")
    assert card.note.startswith("sldbo and d_soba (0.905); ")


def test_target_that_no_algorithm_reaches_is_reported(recorded: Path) -> None:
    runs = load_grouped(recorded / "compare", target=Target("node_accuracy_mean", 1.5))
    assert ranking.select_criteria(runs)[0] is ranking.PSI          # what the runs were to minimise leads
    assert all(card.value == "none" for card in ranking.build_cards(runs)[1:4])
    assert "no algorithm reached" in ranking.summarize(runs)[0]
    values = ranking.build_rows(runs)[0].values
    assert values[1].text == "not reached"
    assert values[1].detail.startswith("best 0.")
    assert values[2].text == "–"


def test_algorithm_that_misses_the_target_is_named(recorded: Path) -> None:
    """One inner step per round is not enough for the target that three and nine reach."""
    (sentence,) = ranking.summarize(load_grouped(recorded / "sweep"))
    assert sentence.endswith("Not reached by K=1: node_accuracy_mean ≥ 0.6.")


def test_diverged_run_wins_nothing_and_is_marked(recorded: Path) -> None:
    runs = load_grouped(recorded / "diverged")
    assert ranking.find_winner(runs, runs.settings[0], ranking.ACCURACY) is None
    assert "diverged" in ranking.build_rows(runs)[0].status
    assert build_curves(runs)[0]["failed"]


def test_variants_are_named_by_what_differs(recorded: Path) -> None:
    """Runs of a sweep are named by their parameters; seeds are not variants."""
    assert [group.variant for group in load_grouped(recorded / "sweep").seed_groups] == ["K=1", "K=3", "K=9"]
    compared = load_grouped(recorded / "compare")
    assert {group.variant for group in compared.seed_groups} == {""}
    assert {len(group.runs) for group in compared.seed_groups} == {2}


def test_sensitivity_shows_the_claim_and_the_measurement(recorded: Path) -> None:
    (panel,) = build_sensitivity_panels(load_grouped(recorded / "sweep"))
    assert panel["key"] == "algorithm.inner_steps"
    assert [point["value"] for point in panel["points"]] == [1.0, 3.0, 9.0]
    assert [source for source, _ in panel["claims"]] == ["The paper", "Claim"]
    assert panel["claims"][1][1] == "A few <b>steps</b> are enough."
    last = read_metrics(recorded / "sweep" / "cells" / "k9" / "metrics.jsonl")[-1]["node_accuracy_mean"]
    final = panel["points"][2]["final"]
    assert final is not None
    assert final[0] == pytest.approx(last, rel=1e-3)
    assert f"best {last:.3f} at 9 (one seed: not tested)" in panel["measured"]
    assert build_sensitivity_panels(load_grouped(recorded / "compare")) == []


@pytest.fixture(scope="module")
def objectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of λ on both objectives of the inner loop, with two seeds."""
    root = tmp_path_factory.mktemp("objectives")
    cells = []
    for lam in (1.0, 10.0):
        for objective in ("h", "h_over_lambda"):
            for seed in (0, 1):
                cells.append(f"cells/{lam:g}-{objective}-{seed}")
                algorithm = {**STEPS["c2dfb"], "lam": lam, "y_objective": objective}
                run(Experiment(**TINY, seed=seed, algorithm=algorithm), root / cells[-1])
    axes = {"algorithm.lam": [1.0, 10.0], "algorithm.y_objective": ["h", "h_over_lambda"], "seed": [0, 1]}
    write_group(root, cells, axes=axes, target="test_accuracy=0.3")
    return root


def test_sensitivity_has_a_panel_per_combination_of_the_other_parameters(objectives: Path) -> None:
    """A mean over runs with h and with h/λ would be that of no method."""
    panels = build_sensitivity_panels(load_grouped(objectives))
    assert [panel["key"] for panel in panels] == ["algorithm.lam"] * 2
    assert [panel["family"] for panel in panels] == ["y_objective=h", "y_objective=h_over_lambda"]
    for panel, objective in zip(panels, ("h", "h_over_lambda"), strict=True):
        assert [point["runs"] for point in panel["points"]] == [2, 2]
        for point, lam in zip(panel["points"], (1, 10), strict=True):
            for name, column in (("final", "test_accuracy"), ("second", "node_accuracy_mean")):
                own = [read_metrics(objectives / f"cells/{lam}-{objective}-{seed}" / "metrics.jsonl")[-1][column]
                       for seed in (0, 1)]
                values = point["final"] if name == "final" else point["second"]
                assert values is not None
                assert values == pytest.approx([np.mean(own), min(own), max(own)], rel=1e-3)
        assert panel["series"] == ["mean model", "mean over nodes"]
        final = panel["points"][0]["final"]
        assert final is not None
        assert f"accuracy (mean model) {format_number(final[0])} at 1, " in panel["measured"]
        assert "accuracy (mean over nodes) " in panel["measured"]
    assert panels[0]["measured"] != panels[1]["measured"]


def test_combinations_without_a_panel_are_counted(objectives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity, "_MAX_FAMILIES", 1)
    (panel,) = build_sensitivity_panels(load_grouped(objectives))
    assert panel["measured"].endswith(". 1 more combination of parameters not shown.")


def test_sensitivity_figure_names_the_other_parameters_and_both_metrics(objectives: Path) -> None:
    """Panels of one parameter have the same axes."""
    ((_, figure),) = DRAWERS["sensitivity"](load_grouped(objectives))
    upper = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in upper] == ["y_objective=h", "y_objective=h_over_lambda"]
    for axis in upper:
        legend = axis.get_legend()
        assert legend is not None
        assert sorted(text.get_text() for text in legend.get_texts()) == ["mean model", "mean over nodes"]
        assert len(axis.containers) == 2                                # each with its error bars
    assert upper[0].get_ylim() == upper[1].get_ylim()


def test_sensitivity_names_no_best_value_without_a_difference(objectives: Path, tmp_path: Path) -> None:
    """Values whose paired difference is within its interval tie; one seed is not tested; ψ may be approximate."""
    shutil.copytree(objectives, tmp_path / "s")
    for seed, (one, ten) in enumerate(((0.5, 0.51), (0.6, 0.58))):
        change_records(tmp_path / f"s/cells/1-h-{seed}", test_accuracy=one, node_accuracy_mean=0.5)
        change_records(tmp_path / f"s/cells/10-h-{seed}", test_accuracy=ten, node_accuracy_mean=0.7, comm_mb=99.0)
    measured = build_sensitivity_panels(load_grouped(tmp_path / "s"))[0]["measured"]
    assert "accuracy (mean model) 0.55 at 1, 0.545 at 10; 1 and 10 tie for the best, 0.55 at 1" in measured
    assert "accuracy (mean over nodes) 0.5 at 1, 0.7 at 10; best 0.7 at 10" in measured
    assert "test_accuracy=0.3 costs least at 1: " in measured
    assert "tested" not in measured
    single = [tmp_path / f"s/cells/{lam}-h-0" for lam in (1, 10)]
    measured = build_sensitivity_panels(load_grouped(*single, target=Target("test_accuracy", 0.3)))[0]["measured"]
    assert "best 0.51 at 10 (one seed: not tested); " in measured
    assert "test_accuracy=0.3 costs least at 1: " in measured
    assert measured.count("(one seed: not tested)") == 3
    for lam in (1, 10):
        for seed in (0, 1):
            change_records(tmp_path / f"s/cells/{lam}-h-{seed}", psi=0.1 * lam, psi_converged=lam == 1)
    measured = build_sensitivity_panels(load_grouped(tmp_path / "s", target=Target("psi", 1.0)))[0]["measured"]
    assert measured.startswith("ψ 0.1 at 1, 1 at 10; approximate, no best: ψ missed its tolerance; costs of psi")
    assert "least" not in measured


def test_bootstrap_interval_covers_the_mean_of_known_samples() -> None:
    """95 % intervals of thirty normal values contain the true mean in about 95 % of repetitions."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        estimate = estimate_mean(rng.normal(3.0, 1.0, 30).tolist())
        assert estimate is not None
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= 3.0 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99
    low, high = mean_interval(np.stack([np.full(5, 1.0), np.full(5, 2.0)]))
    assert (low >= 1).all()
    assert (high <= 2).all()
    assert estimate_mean([None]) is None


def test_thinned_curves_keep_ends_and_target() -> None:
    positions = thin_indices(100_000, MAX_POINTS, keep=[12_345])
    assert len(positions) <= MAX_POINTS
    assert positions[0] == 0
    assert positions[-1] == 99_999
    assert 12_345 in positions


def test_numbers_are_formatted_for_people() -> None:
    assert round_significant([1.23456789, 1e6, float("nan"), None]) == [1.235, 1000000, None, None]
    values = (0.0, 12345.6, 3.14159, 1e-7, None)
    assert [format_number(value) for value in values] == ["0", "12\u202f346", "3.14", "1.00e-7", "–"]


def test_algorithm_has_one_style() -> None:
    """Built-in algorithms differ in colour or dash; a plugin's has a stable style."""
    names = list(algorithms())
    assert len({(get_style(name).light, get_style(name).dash) for name in names}) == len(names)
    assert get_style("mine") == get_style("mine")
    assert len(set(sample_scale(12))) == 12


def test_variants_have_colours_that_no_other_series_of_the_figure_has() -> None:
    """Built-in algorithms keep their styles; beyond eight series colours repeat, with another dash."""
    built_in = ["madsbo", "mdbo", "sparkle", "c2dfb_lead", "lean"]
    styles = get_styles([*built_in, "c2dfb_20", "c2dfb_05", "c2dfb_05_4bit"])
    assert len({style.light for style in styles.values()}) == 8
    assert all(styles[name] == get_style(name) for name in built_in)
    many = get_styles([*built_in, *(f"variant_{number}" for number in range(16))])
    assert len({(style.light, style.dash) for style in many.values()}) == 21


def test_graphs_in_files_of_the_same_name_are_two_settings(tmp_path: Path) -> None:
    """Edges files are identified by their edges, not by their names; the same graph elsewhere is the same setting."""
    ring, star = "0 1\n1 2\n2 3\n3 0\n", "0 1\n0 2\n0 3\n"
    for folder, edges in (("ring", ring), ("star", star), ("copy", ring)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "edges.txt").write_text(edges)
        topology = {"name": "edges", "file": str(tmp_path / folder / "edges.txt")}
        run(Experiment(**QUADRATIC, topology=topology), tmp_path / "runs" / folder)
    runs = load_grouped(tmp_path / "runs")
    assert (len(runs.settings), len(runs.runs), runs.duplicates) == (2, 2, 1)
    assert all("edges.txt" in runs.label_setting(setting) for setting in runs.settings)


def test_two_versions_of_the_code_are_two_variants(tmp_path: Path) -> None:
    """After an edit of a plugin the experiment is the same, but its run key is not."""
    example = Path(__file__).resolve().parents[2] / "docs" / "examples" / "gossip_penalty.py"
    plugin = tmp_path / "mine.py"
    keys = {**QUADRATIC, "plugins": [str(plugin)], "algorithm": {"name": "gossip_penalty"}}
    for folder, factor in (("a", ""), ("again", ""), ("edited", "2 * "), ("edited-again", "2 * ")):
        text = example.read_text(encoding="utf-8").replace("st.x - cfg.step", f"st.x - {factor}cfg.step")
        plugin.write_text(text)
        run(Experiment(**keys), tmp_path / "runs" / folder)
    components.forget(algorithms()["gossip_penalty"].round.__module__)
    runs = load_grouped(tmp_path / "runs")
    assert [group.variant for group in runs.seed_groups] == ["", f"in {tmp_path / 'runs' / 'edited'}"]
    assert runs.duplicates == 2


def test_name_and_checkpoints_make_no_variant(tmp_path: Path) -> None:
    """Runs that differ only in their name or in how often they were saved are duplicates."""
    for number, changes in enumerate(({}, {"name": "other"}, {"checkpoint_every": 1})):
        run(Experiment(**{**QUADRATIC, **changes}), tmp_path / str(number))
    runs = load_grouped(tmp_path)
    assert (len(runs.seed_groups), runs.duplicates) == (1, 2)


def test_a_sweep_of_one_algorithm_is_coloured_by_what_it_varies(recorded: Path) -> None:
    """Curves, table and cards have a sequential colour per value, in its order; the legend names the parameter."""
    runs = load_grouped(recorded / "sweep")
    assert list(runs.series) == ["K = 1", "K = 3", "K = 9"]
    assert [curve["series"] for curve in build_curves(runs)] == list(runs.series)
    colours = [style.light for style in runs.series.values()]
    assert colours[0] == VIRIDIS[0]
    assert len(set(colours)) == 3
    assert [row.style.light for row in build_rows(runs)] == colours
    assert list(load_grouped(recorded / "compare").series) == ["c2dfb", "mdbo"]


def test_the_final_value_is_that_of_the_target_s_metric(recorded: Path) -> None:
    """Table and cards name it."""
    for metric, direction in (("test_accuracy", "Highest"), ("lower_loss", "Lowest")):
        runs = load_grouped(recorded / "sweep", target=Target(metric, 0.5))
        final = select_criteria(runs)[-1]
        assert final.metric == metric
        card = build_cards(runs)[-1]
        assert card.title == f"{direction} final {AXIS_TITLES[metric]}"
        last = runs.seed_groups[0].runs[0].last_value(metric)
        assert last is not None
        assert final.format_number(last) == build_rows(runs)[0].values[-1].text
