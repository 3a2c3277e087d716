"""Wide rows: packed messages, the same bits in every packing, and the results of the plain expressions."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import keep_largest
from dbo.algorithms.gossip import Message, Packed, PackedRow
from dbo.algorithms.kernels import fused
from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.block import ProtocolError
from dbo.platform.engine.local import LocalEngine
from dbo.platform.network.packet import CorruptError, Header, decode, encode, expect_rows, measure
from dbo.platform.runs.runner import prepare
from dbo.tasks.problems import coefficient_tuning

HEADER = Header(sender=3, epoch=1, round=4, step=2)


def packed(rows: Any, kept: int = 1) -> Packed:
    return Packed(tuple(PackedRow.of(row) for row in rows), rows.shape[1], kept=kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 63, 64, 65, 1000, 70_000])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.2, 0.9, 1.0])
def test_packed_message_has_the_bytes_of_the_plain_one(dim: int, ratio: float, dtype: Any) -> None:
    """In every form; decoded as a row or left packed, the values are bit-identical."""
    rows = np.random.default_rng(0).standard_normal((2, dim)).astype(dtype)
    rows = keep_largest(rows, int(ratio * dim)) if ratio * dim >= 1 else 0 * rows
    plain, packed_rows = {"y": Message(rows, form="sparse", kept=1)}, {"y": packed(rows)}
    assert np.array_equal(measure(plain).total, measure(packed_rows).total)
    for i, row in enumerate(rows):
        data = encode(HEADER, packed_rows, i)
        assert data == encode(HEADER, plain, i)
        kept = decode(data, packed={"y"}, expected=expect_rows(plain)).channels["y"]
        assert isinstance(kept, PackedRow)
        assert kept.dense(dim).tobytes() == (row + 0.0).tobytes()
        row_decoded = decode(data, expected=expect_rows(plain)).channels["y"]
        assert isinstance(row_decoded, np.ndarray)
        assert row_decoded.tobytes() == (row + 0.0).tobytes()


def test_corrupt_packed_row_is_refused() -> None:
    """A mark too many, a mark beyond the last entry, or a zero among the entries."""
    rows = np.zeros((1, 100), dtype=np.float32)
    rows[0, ::5] = 1
    good = packed(rows).rows[0]
    for words, entries in (
        (good.words | np.uint64(2), good.entries),
        (np.array([good.words[0], (good.words[1] & ~np.uint64(1 << 31)) | np.uint64(1 << 37)]), good.entries),
        (good.words, np.where(np.arange(20) == 7, 0, good.entries).astype(np.float32)),
    ):
        data = encode(HEADER, {"y": Packed((PackedRow(words, entries),), 100, kept=20)}, 0)
        with pytest.raises(CorruptError):
            decode(data, packed={"y"})


def text(algorithm: dict[str, Any]) -> Experiment:
    topology = "star" if algorithms()[algorithm["name"]].network == "star" else "ring"
    return Experiment(
        nodes=4, dtype="float64", topology={"name": topology}, partition={"name": "by_class", "h": 0.8},
        task={
            "name": "coefficient_tuning", "dataset": "synthetic_text", "features": 60, "classes": 5, "documents": 200,
        },
        algorithm=algorithm,
    )


def after(experiment: Experiment, *blocks: list[int], rounds: int = 3, threads: int = 1) -> dict[str, Any]:
    parts, setup = experiment.parts, prepare(experiment)
    problem, network = arrange(parts.algorithm, setup.problem, setup.network)
    server = [[4]] if problem.nodes == 5 and blocks else []
    engine = LocalEngine(
        parts.algorithm, parts.config, problem, network, [*blocks, *server] or [range(problem.nodes)], threads=threads
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
    {"name": "mdbo", "neumann_terms": 4, "neumann": "sampled"},
    {"name": "f2ba", "inner_steps": 3, "eta_in": 0.1, "eta_out": 0.1},
]
NAMED = {algorithm["name"] for algorithm in ALGORITHMS}
ALGORITHMS += [{"name": name} for name in algorithms() if name not in NAMED]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a.values()))[:60])
def test_fused_kernels_equal_plain_expressions(monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]) -> None:
    """The same trajectory and the same bytes; bit-identical in every packing and with every thread count."""
    experiment = text(algorithm)
    narrow = after(experiment)
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    whole = after(experiment)
    assert np.abs(whole["y"]).max() > 0
    for name, expected in narrow.items():
        np.testing.assert_allclose(whole[name], expected, rtol=1e-8, atol=1e-12, err_msg=name)
    packings = [[[0, 1], [2, 3]], [[3], [1], [0], [2]]] if len(whole["y"]) > 1 else []
    for other in (*(after(experiment, *blocks) for blocks in packings), after(experiment, threads=3)):
        for name, expected in whole.items():
            np.testing.assert_array_equal(other[name], expected, err_msg=name)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: "-".join(map(str, a.values()))[:60])
def test_a_round_changes_no_array_of_the_state_before(
    monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    """Arrays of a state may be kept; the next states do not share memory that is written into."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    experiment = text(algorithm)
    parts, setup = experiment.parts, prepare(experiment)
    problem, network = arrange(parts.algorithm, setup.problem, setup.network)
    engine = LocalEngine(parts.algorithm, parts.config, problem, network, [range(problem.nodes)])
    states = [engine.local_blocks[0].snapshot()]
    copies = [{name: array.copy() for name, array in states[0].items()}]
    for round_ in (1, 2):
        engine.advance(round_)
        states.append(engine.local_blocks[0].snapshot())
        copies.append({name: array.copy() for name, array in states[-1].items()})
    for flat, copy in zip(states, copies, strict=True):
        for name, array in flat.items():
            if name.startswith("state."):
                assert array.tobytes() == copy[name].tobytes(), name


def test_an_abandoned_round_of_large_rows_needs_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round owns its state, so that arrays are freed as they are replaced; a block says so instead of failing."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    experiment = text(ALGORITHMS[0])
    parts, setup = experiment.parts, prepare(experiment)
    block = LocalEngine(parts.algorithm, parts.config, setup.problem, setup.network, [range(4)]).local_blocks[0]
    snapshot = block.snapshot()
    block.begin(1)
    block.abandon()
    with pytest.raises(ProtocolError, match="nothing was restored"):
        block.begin(1)
    block.restore(snapshot)
    block.begin(1)


def test_state_of_fused_kernels_continues_from_a_read_only_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's object store returns read-only arrays."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    experiment = text(ALGORITHMS[0])
    parts, setup = experiment.parts, prepare(experiment)
    straight, resumed = (
        LocalEngine(parts.algorithm, parts.config, setup.problem, setup.network, [range(4)]) for _ in range(2)
    )
    straight.advance(1)
    kept = [{name: array.copy() for part in block for name, array in part.items()} for block in straight.snapshot()]
    for flat in kept:
        for array in flat.values():
            array.setflags(write=False)
    straight.advance(2)
    resumed.restore(kept)
    resumed.advance(2)
    np.testing.assert_array_equal(np.asarray(resumed.rows("y")), np.asarray(straight.rows("y")))
