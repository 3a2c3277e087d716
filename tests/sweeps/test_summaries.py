"""Tables of a sweep, against numbers worked out by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dbo.platform.runs.run_folder import Target
from dbo.sweeps import plan, summaries
from dbo.sweeps.grid import Cell, Cells

Sheet = Callable[..., Path]
TARGET = Target("test_accuracy", 0.9)


def record(round_: int, accuracy: float) -> dict[str, Any]:
    return {"round": round_, "seconds": round_ * 2.0, "test_accuracy": accuracy, "comm_mb": round_ * 10.0,
            "bytes_links": round_ * 10_000_000, "bytes_broadcast": round_, "paper_megabytes": 0.0, "upper_loss": 1.0}


def lay(cell: Cell, out: Path, accuracies: list[float], status: str = "finished") -> None:
    """A cell's folder with these evaluations."""
    folder = cell.folder(out)
    folder.mkdir(parents=True)
    lines = (json.dumps(record(n, a)) + "\n" for n, a in enumerate(accuracies))
    (folder / "metrics.jsonl").write_text("".join(lines))
    (folder / "summary.json").write_text(json.dumps({"status": status, "run_key": cell.experiment.run_key}))


@pytest.fixture
def cells(sheet: Sheet) -> list[Cell]:
    """Two settings with three seeds each."""
    return Cells(plan.read(sheet(), ["axes.seed=[0,1,2]"])).fixed


def test_means_intervals_and_counts(cells: list[Cell], tmp_path: Path) -> None:
    """Prices are means of those that reached the target, with their number; what did not reach it is counted."""
    lay(cells[0], tmp_path, [0.1, 0.95, 0.96])          # reached at round 1
    lay(cells[1], tmp_path, [0.1, 0.5, 0.92])           # at round 2
    lay(cells[2], tmp_path, [0.1, 0.5, 0.8])            # not
    lay(cells[3], tmp_path, [0.1, 0.2], "diverged")
    lay(cells[4], tmp_path, [0.1, 0.3, 0.4])
    errors = {cells[5].name: "ValueError: no"}
    table = summaries.cell_table(cells, tmp_path, TARGET, errors)
    assert list(table["status"]) == ["finished"] * 3 + ["diverged", "finished", "failed"]
    assert list(table["reached"]) == [True, True, False, False, False, False]
    assert table["error"].iloc[5] == "ValueError: no"
    rows = summaries.seed_table(table, ["algorithm.inner_steps", "seed"]).to_dict("records")
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


def test_values_that_differ_in_their_last_digit_are_two_settings(sheet: Sheet, tmp_path: Path) -> None:
    """What is shown in four digits is grouped by all of them, also inside a component."""
    ratios = [{"name": "top_k", "ratio": ratio} for ratio in (0.20001, 0.20002)]
    axes = {"algorithm.compressor": ratios, "algorithm.eta_in": [0.30001, 0.30002], "seed": [0, 1]}
    cells = Cells(plan.read(sheet(axes=axes))).fixed
    for cell in cells:
        lay(cell, tmp_path, [0.1, 0.95])
    table = summaries.seed_table(summaries.cell_table(cells, tmp_path, TARGET, {}), list(axes))
    assert list(table["cells"]) == [2, 2, 2, 2]
    assert set(table["algorithm.compressor"]) == {"top_k,ratio=0.20001", "top_k,ratio=0.20002"}


def test_interval_covers_the_mean() -> None:
    """Of 200 samples of twenty normal numbers some 95 % have the true mean within their interval; twice the same."""
    rng = np.random.default_rng(0)
    samples = [rng.normal(3.0, 1.0, 20).tolist() for _ in range(200)]
    hits = sum(low <= 3.0 <= high for low, high in map(summaries.interval, samples))
    assert 0.88 <= hits / 200 <= 0.99
    assert summaries.interval(samples[0]) == summaries.interval(samples[0])
    assert summaries.interval([2.0, 2.0]) == (2.0, 2.0)
    assert all(math.isnan(end) for end in summaries.interval([2.0]))


def test_a_summary_of_another_run_does_not_count(cells: list[Cell], tmp_path: Path) -> None:
    """A folder whose summary has another key is no result of this cell."""
    lay(cells[0], tmp_path, [0.95])
    assert cells[0].ended(tmp_path) == "finished"
    (cells[0].folder(tmp_path) / "summary.json").write_text(json.dumps({"status": "finished", "run_key": "x"}))
    assert cells[0].ended(tmp_path) is None
    assert summaries.cell_table(cells[:1], tmp_path, TARGET, {})["status"].iloc[0] == "not run"


def test_tables_are_written_twice(cells: list[Cell], tmp_path: Path) -> None:
    """As CSV and as parquet, with the same rows."""
    for cell in cells:
        lay(cell, tmp_path, [0.1, 0.95])
    table = summaries.cell_table(cells, tmp_path, TARGET, {})
    seeds = summaries.seed_table(table, ["algorithm.inner_steps", "seed"])
    summaries.write(table, seeds, tmp_path)
    for name, rows in (("cells", 6), ("summary", 2)):
        csv, parquet = pd.read_csv(tmp_path / f"{name}.csv"), pd.read_parquet(tmp_path / f"{name}.parquet")
        assert len(csv) == len(parquet) == rows
        assert list(csv.columns) == list(parquet.columns)
    assert list(pd.read_parquet(tmp_path / "summary.parquet")["reached"]) == [3, 3]
