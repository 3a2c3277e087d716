"""Wide rows through the house: packed on the wire, the same bits in every packing, and what the plain way gives."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import largest
from dbo.algorithms.gossip import Message, Packed, PackedRow
from dbo.algorithms.kernels import fused
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.network.wire import Corrupt, Header, decode, encode, sizes
from dbo.platform.runs.runner import prepare
from dbo.tasks.problems import coefficient_tuning

HEADER = Header(sender=3, epoch=1, round=4, step=2)


def packed(rows: Any, kept: int = 1) -> Packed:
    return Packed(tuple(PackedRow.of(row) for row in rows), rows.shape[1], kept=kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 63, 64, 65, 1000, 70_000])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.2, 0.9, 1.0])
def test_a_packed_message_has_the_bytes_of_the_plain_one(dim: int, ratio: float, dtype: Any) -> None:
    """Whichever form is the shortest; decoded as a row or left packed, the values are the same to the last bit."""
    rows = np.random.default_rng(0).standard_normal((2, dim)).astype(dtype)
    rows = largest(rows, int(ratio * dim)) if ratio * dim >= 1 else 0 * rows
    plain, ours = {"y": Message(rows, form="sparse", kept=1)}, {"y": packed(rows)}
    assert np.array_equal(sizes(plain).total, sizes(ours).total)
    for i, row in enumerate(rows):
        data = encode(HEADER, ours, i)
        assert data == encode(HEADER, plain, i)
        kept = decode(data, packed={"y"}).channels["y"]
        assert isinstance(kept, PackedRow)
        assert kept.dense(dim).tobytes() == (row + 0.0).tobytes()
        there = decode(data).channels["y"]
        assert isinstance(there, np.ndarray)
        assert there.tobytes() == (row + 0.0).tobytes()


def test_a_packed_row_is_checked_before_it_is_believed() -> None:
    """A mark too many, a mark beyond the last entry, and a zero among the entries."""
    rows = np.zeros((1, 100), dtype=np.float32)
    rows[0, ::5] = 1
    good = packed(rows).rows[0]
    for words, entries in (
        (good.words | np.uint64(2), good.entries),
        (np.array([good.words[0], (good.words[1] & ~np.uint64(1 << 31)) | np.uint64(1 << 37)]), good.entries),
        (good.words, np.where(np.arange(20) == 7, 0, good.entries).astype(np.float32)),
    ):
        data = encode(HEADER, {"y": Packed((PackedRow(words, entries),), 100, kept=20)}, 0)
        with pytest.raises(Corrupt):
            decode(data, packed={"y"})


def text(algorithm: dict[str, Any]) -> Experiment:
    return Experiment(
        nodes=4, dtype="float64", topology={"name": "ring"}, partition={"name": "by_class", "h": 0.8},
        task={
            "name": "coefficient_tuning", "dataset": "synthetic_text", "features": 60, "classes": 5, "documents": 200,
        },
        algorithm=algorithm,
    )


def after(experiment: Experiment, *blocks: list[int], rounds: int = 3, threads: int = 1) -> dict[str, Any]:
    parts, made = experiment.parts, prepare(experiment)
    engine = LocalEngine(
        parts.algorithm, parts.config, made.problem, made.network, blocks or [range(4)], threads=threads
    )
    for round_ in range(1, rounds + 1):
        engine.advance(round_)
    ledger = engine.ledger()
    return {name: np.asarray(engine.rows(name)).copy() for name in ("x", "y", "direction")} | {
        "bytes": ledger.bytes_by_node(), **engine.counters(),
    }


ALGORITHMS: list[dict[str, Any]] = [
    {"name": "c2dfb", "inner_steps": 3, "compressor": {"name": "top_k", "ratio": 0.2}},
    {"name": "c2dfb", "inner_steps": 3, "y_objective": "h", "eta_in": 0.1},
    {"name": "c2dfb", "inner_steps": 3, "tracker": "cached", "reset_every": 2},
    {"name": "c2dfb", "inner_steps": 3, "compressor": {"name": "identity"}},
    {"name": "c2dfb", "inner_steps": 3, "compressor": {"name": "qsgd"}},
    {"name": "c2dfb_nc", "inner_steps": 3, "compressor": {"name": "top_k", "ratio": 0.2}},
    {"name": "c2dfb_nc", "inner_steps": 3, "compressor": {"name": "rand_k", "ratio": 0.5}, "mixing": "own"},
    {"name": "madsbo", "inner_steps": 3, "higp_steps": 3, "eta_x": 1.0, "eta_y": 1.0, "eta_z": 1.0},
    {"name": "madsbo_gt", "inner_steps": 3, "higp_steps": 3, "eta_x": 1.0, "eta_y": 1.0, "eta_z": 1.0},
    {"name": "mdbo", "neumann_terms": 4},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a.values()))[:60])
def test_wide_rows_give_what_narrow_ones_give(monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]) -> None:
    """The same trajectory and the same bytes; and to the last bit in every packing and with every thread count."""
    experiment = text(algorithm)
    narrow = after(experiment)
    monkeypatch.setattr(fused, "WIDE", 1)
    monkeypatch.setattr(coefficient_tuning, "WIDE", 1)
    whole = after(experiment)
    assert np.abs(whole["y"]).max() > 0
    for name, expected in narrow.items():
        np.testing.assert_allclose(whole[name], expected, rtol=1e-8, atol=1e-12, err_msg=name)
    for other in (
        after(experiment, [0, 1], [2, 3]), after(experiment, [3], [1], [0], [2]), after(experiment, threads=3)
    ):
        for name, expected in whole.items():
            np.testing.assert_array_equal(other[name], expected, err_msg=name)


def test_a_wide_state_goes_on_after_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the snapshot is read-only: steps in place then have memory of their own."""
    monkeypatch.setattr(fused, "WIDE", 1)
    monkeypatch.setattr(coefficient_tuning, "WIDE", 1)
    experiment = text(ALGORITHMS[0])
    parts, made = experiment.parts, prepare(experiment)

    def started() -> LocalEngine:
        return LocalEngine(parts.algorithm, parts.config, made.problem, made.network, [range(4)])

    straight, resumed = started(), started()
    straight.advance(1)
    kept = [{name: array.copy() for part in block for name, array in part.items()} for block in straight.snapshot()]
    for flat in kept:
        for array in flat.values():
            array.setflags(write=False)      # as Ray's object store hands them over
    straight.advance(2)
    resumed.restore(kept)
    resumed.advance(2)
    np.testing.assert_array_equal(np.asarray(resumed.rows("y")), np.asarray(straight.rows("y")))
