"""Estimates of a sweep: bytes and seconds of its cells before they run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms import registry
from dbo.platform.runs.runner import run
from dbo.sweeps import plan
from dbo.sweeps.estimate import estimate_cells
from dbo.sweeps.grid import Grid, SweepCell

SweepFile = Callable[..., Path]


def test_an_estimate_counts_the_bytes(sweep_file: SweepFile, tmp_path: Path) -> None:
    """Top-k messages have a fixed length: the bytes of two rounds give those of all rounds."""
    cells = Grid(plan.read_sweep(sweep_file())).cells
    estimates = estimate_cells(cells)
    for cell in cells:
        sent = run(cell.experiment, tmp_path / cell.name).history.iloc[-1]["bytes_links"]
        assert estimates[cell.name].bytes_links == pytest.approx(sent, rel=0.02)


def cells_of_inner_steps(sweep_file: SweepFile) -> list[SweepCell]:
    return Grid(plan.read_sweep(sweep_file(axes={"algorithm.inner_steps": [1, 7, 31]}))).cells


def test_cells_that_were_not_measured_are_estimated_from_their_packets(sweep_file: SweepFile) -> None:
    """Time is up after one cell, with the fewest inner steps: the others follow from the packets that they declare."""
    cells = cells_of_inner_steps(sweep_file)
    estimates = estimate_cells(cells, time_limit=-1)
    one, seven, many = (estimates[cell.name] for cell in cells)
    assert seven.bytes_links == pytest.approx(4 * one.bytes_links)
    assert many.bytes_links == pytest.approx(16 * one.bytes_links)
    assert one.seconds < seven.seconds < many.seconds


def test_without_declared_packets_the_measured_ones_are_used(
    sweep_file: SweepFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An algorithm that declares no packets: its other cells are estimated to send what the measured one sends."""
    declared: Any = registry.algorithms()["c2dfb"]
    silent = replace(declared, packets=None), declared.round.__module__
    monkeypatch.setitem(registry.ALGORITHMS._found, "c2dfb", silent)
    cells = cells_of_inner_steps(sweep_file)
    assert cells[0].experiment.parts.algorithm.packets is None
    estimates = estimate_cells(cells, time_limit=-1)
    one, seven, many = (estimates[cell.name] for cell in cells)
    assert one.bytes_links > 0
    assert one == seven == many


def test_packets_of_another_algorithm_scale_the_estimate(
    sweep_file: SweepFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a cell of an algorithm without declared packets was measured: its packets, as sent, are the unit."""
    axes = {"algorithm": [{"name": "d_soba"}, {"name": "c2dfb", "inner_steps": 5}]}
    both = Grid(plan.read_sweep(sweep_file(axes=axes))).cells
    expected = estimate_cells(both, time_limit=-1)
    declared: Any = registry.algorithms()["d_soba"]
    silent = replace(declared, packets=None), declared.round.__module__
    monkeypatch.setitem(registry.ALGORITHMS._found, "d_soba", silent)
    both = Grid(plan.read_sweep(sweep_file(axes=axes))).cells
    estimates = estimate_cells(both, time_limit=-1)
    for cell in both:
        assert estimates[cell.name].bytes_links == expected[cell.name].bytes_links
