"""`dbo compare`: the table, targets, and resuming."""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from tests.faults.malformed_input import read_tree

from dbo.platform.cli import compare
from dbo.platform.engine import evaluation

Command = Callable[..., Any]
Check = Callable[..., None]
SMALL = ("nodes=4", "task={name: quadratic, dim_x: 4, dim_y: 8}", "engine=local", "tracking.uri=off")


@pytest.mark.parametrize("target", ["upper_loss=1e9", "solution_error=1e-9", "upper_loss=-1"])
def test_the_table_has_a_row_per_algorithm(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, target: str
) -> None:
    """Also when no algorithm reaches the target; the same table is in compare.csv."""
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    options = ["--algorithms", "d_soba, f2ba", "--target", target]
    done = dbo("compare", *keys, "rounds=2", *options, "--out", "c")
    assert done.code == 0, done.err
    assert "d_soba" in done.out
    assert ("not reached" in done.out) == (target != "upper_loss=1e9")
    rows = (tmp_path / "c" / "compare.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["algorithm", "d_soba", "f2ba"]
    assert {"compare.csv", "d_soba", "f2ba", "group.json"} <= set(os.listdir(tmp_path / "c"))


def test_algorithms_come_from_the_file(dbo: Command, tmp_path: Path) -> None:
    """`algorithms:` holds names and parameters; an override applies to those that have the parameter."""
    (tmp_path / "c.yaml").write_text(
        "rounds: 1\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\ntarget: upper_loss=0.1\n"
        "algorithms: {f2ba: {lam: 3.0}, d_soba: }\n"
    )
    assert dbo("compare", "c.yaml", "algorithm.inner_steps=2", "tracking.uri=off", "--out", "c", "--quiet").code == 0
    text = (tmp_path / "c" / "f2ba" / "experiment.yaml").read_text()
    assert "inner_steps: 2" in text
    assert "lam: 3.0" in text
    assert "inner_steps" not in (tmp_path / "c" / "d_soba" / "experiment.yaml").read_text()


def test_the_target_is_a_metric_of_the_task(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Distances where the solution is known, accuracies where there are data; single-machine references are marked."""
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    done = dbo("compare", *keys, "rounds=2", "--algorithms", "d_soba,f2ba", "--out", "c")
    assert done.code == 0, done.err
    assert "solution_error=0.1" in done.out
    assert "f2ba*" in done.out
    assert "d_soba*" not in done.out
    assert "accuracy" not in done.out
    last = json.loads((tmp_path / "c" / "f2ba" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['solution_error']:.2g}" in done.out
    refused = dbo("compare", *keys, "--algorithms", "d_soba", "--target", "test_accuracy=0.7", "--out", "d")
    assert_refused(refused, "--target", "quadratic has no test_accuracy", "solution_error=0.1")
    learning = ("engine.name=local", "tracking.uri=off", "--algorithms", "d_soba", "--target", "solution_error=0.7")
    assert_refused(dbo("compare", *learning, "--out", "d"), "coefficient_tuning has no solution_error")
    free = dbo("compare", *keys, "--algorithms", "d_soba,sldbo", "--target", "penalty_error=0.1", "--out", "d")
    assert_refused(free, "d_soba, sldbo have no λ")
    empty = dbo("compare", *keys, "--algorithms", "d_soba", "--target", "", "--out", "d")
    assert_refused(empty, "--target", "metric=level")
    assert not (tmp_path / "d").exists()


def test_the_progress_names_run_and_seed(dbo: Command) -> None:
    """Which of how many runs it is; the seed if there are several."""
    options = ("rounds=1", "--algorithms", "d_soba,f2ba", "--target", "upper_loss=1e9")
    seeds = dbo("compare", *SMALL, *options, "--seeds", "3,4", "--out", "two")
    assert seeds.code == 0, seeds.err
    for name in ("1/4 d_soba seed 3: ", "2/4 f2ba seed 3: ", "3/4 d_soba seed 4: ", "4/4 f2ba seed 4: "):
        assert f"\n{name}1 rounds" in seeds.out
    assert "\n2/2 f2ba: 1 rounds" in dbo("compare", *SMALL, *options, "--out", "one").out


def test_an_override_wins_over_values_per_algorithm(dbo: Command, assert_refused: Check, tmp_path: Path) -> None:
    """rounds=… applies to all; an algorithm that `checkpoint_every` does not name gets the default."""
    (tmp_path / "c.yaml").write_text(
        "rounds: {f2ba: 5}\ncheckpoint_every: {f2ba: 3}\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\n"
        "algorithms: {f2ba: {}}\n"
    )
    options = ("--algorithms", "f2ba,d_soba", "tracking.uri=off", "--out", "c", "--quiet")
    assert_refused(dbo("compare", "c.yaml", *options), "rounds", "d_soba")
    (tmp_path / "typo.yaml").write_text("eval_every: {f2ab: 5}\nalgorithms: {f2ba: {}}\n")
    assert_refused(dbo("compare", "typo.yaml", "--out", "d"), "eval_every", "'f2ab'", "f2ba")
    done = dbo("compare", "c.yaml", "rounds=2", *options)
    assert done.code == 0, done.err
    for name, every in (("f2ba", 3), ("d_soba", 10)):
        text = (tmp_path / "c" / name / "experiment.yaml").read_text()
        assert "rounds: 2\n" in text
        assert f"checkpoint_every: {every}\n" in text


def test_a_dry_run_shows_the_plan_and_writes_nothing(dbo: Command, assert_refused: Check, tmp_path: Path) -> None:
    """Runs with their budgets and status, sizes, an estimate; a wrong folder or target is refused as without it."""
    (tmp_path / "c.yaml").write_text(
        "rounds: {d_soba: 40, f2ba: 1200}\nuntil: {target: solution_error=1e-9, bytes: 5000000}\nseeds: [3, 4]\n"
        "algorithms: {d_soba: {}, f2ba: {}}\n")
    options = ("--target", "solution_error=0.1,upper_loss=1e9", "--out", "c")
    before = sorted(map(str, tmp_path.rglob("*")))
    done = dbo("compare", "c.yaml", *SMALL, *options, "--dry-run")
    assert done.code == 0, done.err
    for text in ("d_soba-seed3", "f2ba-seed4", " 1,200 ", "bytes 5,000,000", "to run",
                 "x has 4 entries, y 8; 4 nodes", "target   solution_error=0.1, upper_loss=1e+09", "4 runs; about "):
        assert text in done.out, text
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    assert dbo("compare", "c.yaml", *SMALL, "rounds=2", *options, "--seeds", "3", "--quiet").code == 0
    before = sorted(map(str, tmp_path.rglob("*")))
    assert "2 runs, 2 already done" in dbo(
        "compare", "c.yaml", *SMALL, "rounds=2", *options, "--seeds", "3", "--dry-run").out
    assert_refused(dbo("compare", *SMALL, "--out", "c/d_soba", "--dry-run"), "--out", "holds a run")
    refused = dbo("compare", *SMALL, "--algorithms", "d_soba", "--target", "test_accuracy=0.7", "--dry-run")
    assert_refused(refused, "--target", "quadratic has no test_accuracy")
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_runs_and_comparisons_do_not_share_a_folder(
    dbo: Command, assert_refused: Check, tmp_path: Path
) -> None:
    """The folder of one is refused as the folder of the other, before anything is written."""
    options = ("rounds=1", "--algorithms", "d_soba,f2ba", "--target", "upper_loss=1e9", "--quiet")
    assert dbo("run", *SMALL, "rounds=1", "--out", "one", "--quiet").code == 0
    assert dbo("compare", *SMALL, *options, "--out", "several").code == 0
    before = sorted(map(str, tmp_path.rglob("*")))
    assert_refused(dbo("compare", *SMALL, *options, "--out", "one"), "--out", "one holds a run")
    assert_refused(dbo("run", *SMALL, "rounds=1", "--out", "several"), "--out", "several holds a comparison")
    assert sorted(map(str, tmp_path.rglob("*"))) == before


def test_all_folders_are_checked_before_the_first_run(
    dbo: Command, assert_refused: Check, tiny_overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """If the second algorithm's folder is in use, the first algorithm is not started."""
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    assert dbo("run", *keys, "algorithm.name=f2ba", "seed=1", "--out", "c/f2ba", "--quiet").code == 0
    before = read_tree(tmp_path)
    done = dbo("compare", *keys, "--algorithms", "d_soba,f2ba", "--out", "c", "--quiet")
    assert_refused(done, "--out", "c/f2ba", "another experiment")
    assert read_tree(tmp_path) == before


def test_an_interrupted_comparison_is_resumed(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """An unfinished algorithm is resumed, a finished one kept."""
    keys = [override for override in tiny_overrides if not override.startswith("algorithm")]
    command = ["compare", *keys, "--algorithms", "d_soba,f2ba", "--target", "upper_loss=1e9", "--out", "c", "--quiet"]
    first = dbo(*command)
    (tmp_path / "c" / "f2ba" / "summary.json").unlink()
    again = dbo(*command)
    assert (first.code, again.code) == (0, 0)
    assert first.out.startswith("upper_loss=1e+09: d_soba 1 rounds, ")       # --quiet ends with one line
    assert first.out.endswith("; folder: c\n")
    assert first.out.count("\n") == 1
    assert json.loads((tmp_path / "c" / "f2ba" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("seeds", ["0", "0,1"])
@pytest.mark.parametrize("target", ["upper_loss=1e9", "psi=1e9"])
def test_a_missed_tolerance_of_psi_is_shown_everywhere(
    dbo: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seeds: str, target: str
) -> None:
    """Notice, table, verdicts, files and page say so, and name no winner by ψ; with enough products nothing does."""
    options = ("compare", *SMALL, "rounds=2", "--algorithms", "d_soba,sldbo", "--seeds", seeds, "--target", target)
    for folder in ("exact", "short"):
        is_short = folder == "short"
        if is_short:
            monkeypatch.setattr(evaluation, "limit_products", lambda nodes, dim_y: 2)
        done = dbo(*options, "--out", folder)
        assert done.code == 0, done.err
        runs, page = pd.read_csv(tmp_path / folder / "compare.csv"), (tmp_path / folder / "report.html").read_text()
        body = page.partition('<header id="results">')[2].partition("</header>")[0]
        assert ("psi and psi_gradient_norm are approximate: the residual" in done.out + done.err) == is_short
        assert ("≈" in done.out) == is_short
        assert set(runs["psi_converged"]) == {int(not is_short)}
        assert (runs["psi_residual"] > 1e-8).all() == is_short
        assert (f"approximate; residual {runs['psi_residual'].max():.1e}" in body) == is_short
        assert ("no winner" in body) == is_short
        assert (re.search("Final ψ.* (is|are) approximate, no winner", body) is not None) == is_short
        if seeds == "0,1":
            assert ("lowest ψ: approximate, no winner; ψ missed its tolerance: d_soba, sldbo" in done.out) == is_short
            pairs = pd.read_csv(tmp_path / folder / "pairs.csv").set_index("measure")["winner"]
            assert (pairs["psi"] == "approximate") == is_short
            assert (pairs["rounds_to_target"] == "approximate") == (is_short and target == "psi=1e9")


def test_no_number_of_the_table_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns, with a long name and large numbers: names fold, numbers stay whole."""
    screen = io.StringIO()
    monkeypatch.setattr(compare, "console", Console(file=screen, width=80))
    row = {
        "algorithm": "algorithm_of_somebody", "single_machine": False, "status": "diverged", "rounds_to_target": None,
        "mb_to_target": 123.45, "seconds_to_target": 234.56, "test_accuracy": 0.9123, "node_accuracy_mean": 0.8234,
        "node_accuracy_min": 0.7345, "comm_mb": 98765.4,
    }
    compare.show_comparison(pd.DataFrame([row]), "node_accuracy_mean=0.9")
    output = screen.getvalue()
    assert "…" not in output
    for figure in ("not reached", "123.45", "234.56", "0.9123", "0.8234", "0.7345", "98765"):
        assert figure in output
