"""In a round only encoded bytes cross from the device to the host, for every algorithm, task and compressor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.faults.messages import advance
from tests.platform.engine.device_blocks import TASKS, start

from dbo.algorithms.api import algorithms
from dbo.platform.engine.block import Block
from dbo.platform.engine.device import Torch
from dbo.tasks.problems import backbone, coefficient_tuning
from dbo.tasks.problems.quadratic import QuadraticShard

torch = pytest.importorskip("torch")
transfers = pytest.importorskip("tests.platform.engine.transfers")

COMPRESSORS: dict[str, dict[str, Any]] = {
    "identity": {"name": "identity"}, "top_k": {"name": "top_k"}, "rand_k": {"name": "rand_k"},
    "qsgd": {"name": "qsgd"}, "odd qsgd": {"name": "qsgd", "levels": 5}, "sign": {"name": "sign"},
}
every_algorithm = pytest.mark.parametrize("name", list(algorithms()))
every_task = pytest.mark.parametrize("task", TASKS)
every_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)
compressing = pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _select_shard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the wide text the shard of models with many entries, and layers their compiled products."""
    if "wide text" in request.node.name:
        monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    if "layers in batches" in request.node.name:
        monkeypatch.setattr(backbone, "_FEWEST", 1)


@every_task
@every_algorithm
def test_rounds_read_nothing(name: str, task: str) -> None:
    """Every algorithm on every task: rounds run without a read outside of the encoder."""
    blocks = start(name, task, Torch("cpu"))
    with transfers.no_host_reads():
        advance(blocks, rounds=2)


@every_compressor
@compressing
def test_compression_reads_nothing(name: str, compressor: str) -> None:
    """Every compressor, random ones too: selection and packing stay on the device."""
    blocks = start(name, "digits", Torch("cpu"), compressor=COMPRESSORS[compressor])
    with transfers.no_host_reads():
        advance(blocks, rounds=2)


@every_task
@every_algorithm
def test_rounds_need_no_content(name: str, task: str) -> None:
    """The same on tensors that have shapes but no content: there is nothing to read."""
    blocks = start(name, task, Torch("meta"))
    with transfers.no_content():
        advance(blocks, rounds=2)


@every_compressor
@compressing
def test_compression_needs_no_content(name: str, compressor: str) -> None:
    """The same for every compressor."""
    blocks = start(name, "digits", Torch("meta"), compressor=COMPRESSORS[compressor])
    with transfers.no_content():
        advance(blocks, rounds=2)


LEAKS: dict[str, Callable[[Any], Any]] = {
    "item": lambda rows: rows.sum().item(),
    "cpu": lambda rows: rows.cpu(),
    "to": lambda rows: rows.to("cpu"),
    "numpy": lambda rows: rows.detach().numpy(),
    "asarray": np.asarray,
    "tolist": lambda rows: rows[0].tolist(),
    "float": lambda rows: float(rows[0, 0]),
    "bool": lambda rows: 1 if (rows > 0).all() else 0,
    "max": lambda rows: max(rows[0]),
    "mask": lambda rows: rows[rows > 0],
    "nonzero": lambda rows: torch.nonzero(rows),
    "format": lambda rows: f"{rows[0, 0]:.3f}",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(monkeypatch: pytest.MonkeyPatch, leak: str) -> None:
    """Control: an oracle that reads its result fails both kinds of test."""
    original = QuadraticShard.g_y

    def leaking(shard: QuadraticShard, x: Any, y: Any) -> Any:
        gradient = original(shard, x, y)
        LEAKS[leak](gradient)
        return gradient

    blocks = {device: start("c2dfb", "quadratic", Torch(device)) for device in ("cpu", "meta")}
    monkeypatch.setattr(QuadraticShard, "g_y", leaking)
    with transfers.no_host_reads(), pytest.raises(transfers.HostRead):
        advance(blocks["cpu"], rounds=1)
    with transfers.no_content(), pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        advance(blocks["meta"], rounds=1)


@every_compressor
def test_fetched_bytes_are_those_of_the_ledger(compressor: str) -> None:
    """A round fetches the bodies of its packets, 24 bytes per sparse row, and 1 byte per row of levels: no more.

    It uploads the bodies that it receives, aligned to 8 bytes.
    """
    blocks = start("c2dfb", "digits", Torch("cpu"), compressor=COMPRESSORS[compressor], inner_steps=3)
    with transfers.no_host_reads() as crossed:
        advance(blocks, rounds=1)
    bodies = sum(block.ledger.totals()["values_indices_broadcast"] for block in blocks)
    compressed_rows = 4 * 3 * 4                 # nodes, inner steps, channels
    beside = {"identity": 0, "top_k": 24, "rand_k": 24}.get(compressor, 1) * compressed_rows
    assert sum(crossed.fetched) == bodies + beside
    rows = compressed_rows + 4 * 2              # and x and s, uncompressed
    if compressor in ("top_k", "identity", "sign"):      # the other two upload random numbers as well
        assert bodies <= sum(crossed.uploaded) - mixing_weights(blocks) <= bodies + 21 * rows


def mixing_weights(blocks: list[Block]) -> int:
    """Return the bytes of W, which is uploaded in the first step."""
    shapes = [plan.weights.shape for block in blocks for plan in block._plans.values()]
    return sum(8 * rows * columns for rows, columns in shapes)
