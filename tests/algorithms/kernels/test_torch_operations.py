"""Every operation of `fused` on torch tensors equals the compiled kernel, and the plain expression, on NumPy rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Compressor, Qsgd, RandK, Sign, TopK
from dbo.algorithms.gossip import Packed, PackedRow, PackedSum
from dbo.algorithms.kernels import fused
from dbo.algorithms.rng import Key

torch = pytest.importorskip("torch")
torch_selection = pytest.importorskip("dbo.algorithms.kernels.torch_selection")

KEY = Key(5, np.arange(3), 2)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "step": lambda a, b, c, d, e: fused.step_in_place(a, 0.3, b, c, 0.7, d),
    "track": lambda a, b, c, d, e: fused.track_in_place(a, 0.3, b, c, d, e),
    "shift": lambda a, b, c, d, e: fused.shift_in_place(a, b, c),
    "gossip 1": lambda a, b, c, d, e: fused.gossip_in_place(a, 0.3, b, (-0.7, c)),
    "gossip 2": lambda a, b, c, d, e: fused.gossip_in_place(a, 0.3, b, (1, c), (-1, d)),
    "add 1": lambda a, b, c, d, e: fused.add_in_place(a, (2.5, b)),
    "add 2": lambda a, b, c, d, e: fused.add_in_place(a, (1, b), (-1, c)),
    "zero": lambda a, b, c, d, e: fused.zero_in_place(a),
    "neumann": lambda a, b, c, d, e: fused.neumann_in_place(a, b, 3.0, c),
    "average": lambda a, b, c, d, e: fused.average_in_place(a, 0.3, b),
    "message": lambda a, b, c, d, e: fused.add_message_in_place(a, b),
}


def make_rows(seed: int, dim: int = 700) -> Any:
    return np.random.default_rng(seed).standard_normal((3, dim))


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, name: str, is_fused: bool) -> None:
    """Torch and NumPy agree to 1e-14, and torch writes into none of its operands."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1 if is_fused else 10**9)
    arrays = [make_rows(seed) for seed in range(5)]
    tensors = [torch.asarray(array.copy()) for array in arrays]
    kept = [tensor.clone() for tensor in tensors]
    theirs, ours = OPERATIONS[name](*tensors), OPERATIONS[name](*arrays)
    pairs = zip(theirs, ours, strict=True) if isinstance(ours, tuple) else [(theirs, ours)]
    for tensor, array in pairs:
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-14, atol=1e-14)
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("q", [TopK(), TopK(ratio=0.003), TopK(ratio=1.0), RandK(), Qsgd(), Qsgd(levels=3), Sign()])
def test_compressed_residual_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, q: Compressor, is_fused: bool) -> None:
    """The message selects the same entries or levels, and the reference moves by it."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1 if is_fused else 10**9)
    v, reference = make_rows(0), make_rows(1)
    theirs, updated = fused.compress_residual(q, *(torch.asarray(a.copy()) for a in (v, reference)), KEY, "y")
    ours, after = fused.compress_residual(q, v, reference, KEY, "y")
    np.testing.assert_allclose(theirs.values.numpy(), ours.values, rtol=1e-13, atol=0)
    np.testing.assert_allclose(updated.numpy(), after, rtol=1e-13, atol=1e-15)
    assert theirs.kept == ours.kept


def test_sum_of_packed_rows_is_that_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ_j w_ij q_j of packed NumPy rows, and the same sum of dense tensors."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1)
    message, _ = fused.compress_residual(TopK(), make_rows(0), np.zeros((3, 700)), KEY, "y")
    assert isinstance(message, Packed)
    weights = np.array([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.0, 0.3, 0.7]])
    packed: list[PackedRow] = list(message.rows)
    terms = tuple(tuple((float(w), row) for w, row in zip(line, packed, strict=True)) for line in weights)
    ours = fused.add_message_in_place(make_rows(3), PackedSum(terms, 700))
    theirs = fused.add_message_in_place(
        torch.asarray(make_rows(3)), torch.asarray(weights) @ torch.asarray(message.values))
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-13)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_exactly_k_entries_are_marked(k: int) -> None:
    """Among equal entries the first are taken; NaN of any sign and payload counts as one value, the largest."""
    odd_nan = np.array([-np.nan, np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f", dtype=np.float64)[0]])
    rows = np.stack([np.ones(9), [0, 1, 1, 2, 1, 0, 2, 1, 1], [1, odd_nan[0], np.inf, 3, odd_nan[1], np.nan, 2, 1, 0]])
    marked = torch_selection.mark_largest(torch.asarray(np.abs(rows)), k).numpy()
    for row, found in zip(rows, marked, strict=True):
        keys = [(0, 0.0, i) if np.isnan(v) else (1, -abs(v), i) for i, v in enumerate(row)]
        assert np.flatnonzero(found).tolist() == sorted(i for _, _, i in sorted(keys)[:k])
