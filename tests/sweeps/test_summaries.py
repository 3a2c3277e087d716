"""Tables of a sweep, against numbers computed by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from dbo.platform.runs.schema import Target
from dbo.sweeps import pairs, plan, summaries
from dbo.sweeps.grid import Grid, SweepCell

SweepFile = Callable[..., Path]
TARGET = Target("test_accuracy", 0.9)
METRIC: tuple[str, Literal["max"]] = ("test_accuracy", "max")


def record(round_: int, accuracy: float) -> dict[str, Any]:
    return {"round": round_, "seconds": round_ * 2.0, "test_accuracy": accuracy, "comm_mb": round_ * 10.0,
            "bytes_links": round_ * 10_000_000, "bytes_broadcast": round_, "paper_megabytes": 0.0, "upper_loss": 1.0}


def write_cell(cell: SweepCell, out: Path, accuracies: list[float], status: str = "finished") -> None:
    """Write a cell's folder with these evaluations."""
    folder = cell.folder(out)
    folder.mkdir(parents=True)
    lines = (json.dumps(record(n, a)) + "\n" for n, a in enumerate(accuracies))
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "state.safetensors").touch()
    (folder / "summary.json").write_text(json.dumps({"status": status, "run_key": cell.experiment.run_key}))


@pytest.fixture
def cells(sweep_file: SweepFile) -> list[SweepCell]:
    """Return the cells of two settings with three seeds each."""
    return Grid(plan.read_sweep(sweep_file(), ["axes.seed=[0,1,2]"])).cells


def test_means_intervals_and_counts(cells: list[SweepCell], tmp_path: Path) -> None:
    """Costs are means over cells that reached the target; the others are counted."""
    write_cell(cells[0], tmp_path, [0.1, 0.95, 0.96])          # reached at round 1
    write_cell(cells[1], tmp_path, [0.1, 0.5, 0.92])           # at round 2
    write_cell(cells[2], tmp_path, [0.1, 0.5, 0.8])            # not
    write_cell(cells[3], tmp_path, [0.1, 0.2], "diverged")
    write_cell(cells[4], tmp_path, [0.1, 0.3, 0.4])
    errors = {cells[5].name: "ValueError: no"}
    table = summaries.build_cell_table(cells, tmp_path, TARGET, errors)
    assert list(table["status"]) == ["finished"] * 3 + ["diverged", "finished", "failed"]
    assert list(table["reached"]) == [True, True, False, False, False, False]
    assert table["error"].iloc[5] == "ValueError: no"
    rows = summaries.build_seed_table(table, ["algorithm.inner_steps", "seed"]).to_dict("records")
    first, second = rows
    assert (first["cells"], first["finished"], first["reached"]) == (3, 3, 2)
    assert first["rounds_to_target_mean"] == pytest.approx(1.5)
    assert first["mb_to_target_mean"] == pytest.approx(15.0)
    assert first["seconds_to_target_mean"] == pytest.approx(3.0)
    assert first["test_accuracy_mean"] == pytest.approx((0.96 + 0.92 + 0.8) / 3)
    # Three values: the mean of a resample of all-smallest has probability 1/27 > 2.5 %, so the ends are the extremes.
    assert first["test_accuracy_low"] == pytest.approx(0.8)
    assert first["test_accuracy_high"] == pytest.approx(0.96)
    assert (second["cells"], second["finished"], second["diverged"], second["failed"]) == (3, 1, 1, 1)
    assert second["reached"] == 0
    assert math.isnan(second["rounds_to_target_mean"])
    assert second["test_accuracy_mean"] == pytest.approx(0.4)
    assert math.isnan(second["test_accuracy_low"])


def test_values_that_differ_in_their_last_digit_are_two_settings(sweep_file: SweepFile, tmp_path: Path) -> None:
    """Labels have four digits, but settings are grouped by all digits, also inside a component."""
    ratios = [{"name": "top_k", "ratio": ratio} for ratio in (0.20001, 0.20002)]
    axes = {"algorithm.compressor": ratios, "algorithm.eta_in": [0.30001, 0.30002], "seed": [0, 1]}
    cells = Grid(plan.read_sweep(sweep_file(axes=axes))).cells
    for cell in cells:
        write_cell(cell, tmp_path, [0.1, 0.95])
    table = summaries.build_seed_table(summaries.build_cell_table(cells, tmp_path, TARGET, {}), list(axes))
    assert list(table["cells"]) == [2, 2, 2, 2]
    assert set(table["algorithm.compressor"]) == {"top_k,ratio=0.20001", "top_k,ratio=0.20002"}


def test_a_summary_of_another_run_does_not_count(cells: list[SweepCell], tmp_path: Path) -> None:
    """A folder whose summary has another run key is no result of this cell."""
    write_cell(cells[0], tmp_path, [0.95])
    found = cells[0].read_summary(tmp_path)
    assert found is not None
    assert found.status == "finished"
    (cells[0].folder(tmp_path) / "summary.json").write_text(json.dumps({"status": "finished", "run_key": "x"}))
    assert cells[0].read_summary(tmp_path) is None
    assert summaries.build_cell_table(cells[:1], tmp_path, TARGET, {})["status"].iloc[0] == "not run"


def test_tables_are_written_as_csv_and_parquet(cells: list[SweepCell], tmp_path: Path) -> None:
    """With the same rows and columns."""
    for cell in cells:
        write_cell(cell, tmp_path, [0.1, 0.95])
    table = summaries.build_cell_table(cells, tmp_path, TARGET, {})
    axes = ["algorithm.inner_steps", "seed"]
    seeds, differences = summaries.build_seed_table(table, axes), pairs.build_pair_table(table, axes, *METRIC)
    summaries.write_tables(table, seeds, differences, tmp_path)
    for name, rows in (("cells", 6), ("summary", 2), ("pairs", len(differences))):
        csv, parquet = pd.read_csv(tmp_path / f"{name}.csv"), pd.read_parquet(tmp_path / f"{name}.parquet")
        assert len(csv) == len(parquet) == rows
        assert list(csv.columns) == list(parquet.columns)
    assert list(pd.read_parquet(tmp_path / "summary.parquet")["reached"]) == [3, 3]
    summaries.write_tables(table, seeds, pd.DataFrame(), tmp_path)
    assert not list(tmp_path.glob("pairs.*"))           # the old ones would be of other cells


def test_planted_link_is_not_written_through(cells: list[SweepCell], tmp_path: Path) -> None:
    """Tables replace links of their names."""
    write_cell(cells[0], tmp_path, [0.95])
    (tmp_path / "foreign").write_text("mine")
    names = ("cells.csv", "summary.csv", "pairs.csv", "cells.parquet", "summary.parquet", "pairs.parquet")
    for name in names:
        (tmp_path / name).symlink_to(tmp_path / "foreign")
    table = summaries.build_cell_table(cells[:1], tmp_path, TARGET, {})
    summaries.write_tables(table, summaries.build_seed_table(table, ["algorithm.inner_steps"]), table, tmp_path)
    assert (tmp_path / "foreign").read_text() == "mine"
    assert not any((tmp_path / name).is_symlink() for name in names)
