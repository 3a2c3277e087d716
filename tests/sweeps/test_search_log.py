"""The log of a search: a line that was cut off ends nothing, a damaged one is named."""

import os
from pathlib import Path

import pytest
from tests.sweeps.conftest import QUICK

from dbo.platform.errors import InputError
from dbo.sweeps.grid import Grid
from dbo.sweeps.plan import Sweep
from dbo.sweeps.search_log import SearchLog


@pytest.fixture
def grid() -> Grid:
    axes = {"algorithm.eta_out": {"low": 0.01, "high": 0.2}}
    return Grid(Sweep(**{**QUICK, "mode": "tpe", "trials": 4, "axes": axes}), measure=False)


def add(log: SearchLog, grid: Grid, value: float) -> None:
    log.add(grid.make_cell({"algorithm.eta_out": value}), {"algorithm.eta_out": value})


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_partial_last_line_is_dropped(tmp_path: Path, grid: Grid, cut: int) -> None:
    """The search continues, and can be resumed again: the next line does not join the partial one."""
    path = tmp_path / "search.jsonl"
    log = SearchLog(path, grid)
    add(log, grid, 0.1)
    add(log, grid, 0.12)
    path.write_bytes(path.read_bytes()[:-cut])
    again = SearchLog(path, grid)
    assert [cell.values for cell in again.cells] == [{"algorithm.eta_out": 0.1}]
    add(again, grid, 0.15)
    last = SearchLog(path, grid)
    assert [cell.values["algorithm.eta_out"] for cell in last.cells] == [0.1, 0.15]


def test_reading_does_not_change_the_file(tmp_path: Path, grid: Grid) -> None:
    """Another process may be writing the last line."""
    (tmp_path / "search.jsonl").write_text('{"values": {"algo')
    assert SearchLog(tmp_path / "search.jsonl", grid).cells == []
    assert (tmp_path / "search.jsonl").read_text() == '{"values": {"algo'


def test_line_is_on_the_disk_before_its_cell_starts(
    tmp_path: Path, grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It survives a power cut."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    add(SearchLog(tmp_path / "search.jsonl", grid), grid, 0.1)
    assert synced == [(tmp_path / "search.jsonl").stat().st_size]


@pytest.mark.parametrize("bad", ["nonsense", "{}", "[]", '{"values": 3, "config": {}}'])
def test_damaged_line_is_an_input_error(tmp_path: Path, grid: Grid, bad: str) -> None:
    """One line with its number."""
    (tmp_path / "search.jsonl").write_text(f"{bad}\n")
    with pytest.raises(InputError, match=r"search\.jsonl: line 1 is damaged"):
        SearchLog(tmp_path / "search.jsonl", grid)
