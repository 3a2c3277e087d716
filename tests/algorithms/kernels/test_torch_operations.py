"""Compression of torch tensors equals that of NumPy rows, of plain and of lazy ones."""

from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Compressor, Qsgd, RandK, Sign, TopK
from dbo.algorithms.kernels import fused
from dbo.algorithms.kernels.lazy import unwrap, wrap
from dbo.algorithms.rng import Key

torch = pytest.importorskip("torch")
torch_selection = pytest.importorskip("dbo.algorithms.kernels.torch_selection")

KEY = Key(5, np.arange(3), 2)


def make_rows(seed: int, dim: int = 700) -> Any:
    return np.random.default_rng(seed).standard_normal((3, dim))


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "lazy"])
@pytest.mark.parametrize("q", [TopK(), TopK(ratio=0.003), TopK(ratio=1.0), RandK(), Qsgd(), Qsgd(levels=3), Sign()])
def test_compressed_residual_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, q: Compressor, is_fused: bool) -> None:
    """The message selects the same entries or levels, and the reference moves by it."""
    monkeypatch.setattr(fused, "MIN_ENTRIES", 1 if is_fused else 10**9)
    v, reference = make_rows(0), make_rows(1)

    def compress(v: Any, reference: Any) -> tuple[Any, Any]:
        v, reference = wrap(v), wrap(reference)
        message = q(v - reference, KEY, "y")
        return message, unwrap(reference + message.values)

    (theirs, updated), (ours, after) = compress(torch.asarray(v), torch.asarray(reference)), compress(v, reference)
    np.testing.assert_allclose(theirs.values.numpy(), np.asarray(ours.values), rtol=1e-13, atol=0)
    np.testing.assert_allclose(updated.numpy(), after, rtol=1e-13, atol=1e-15)
    assert theirs.kept == ours.kept


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_exactly_k_entries_are_marked(k: int) -> None:
    """Among equal entries the first are taken; NaN of any sign and payload counts as one value, the largest."""
    odd_nan = np.array([-np.nan, np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\x7f", dtype=np.float64)[0]])
    rows = np.stack([np.ones(9), [0, 1, 1, 2, 1, 0, 2, 1, 1], [1, odd_nan[0], np.inf, 3, odd_nan[1], np.nan, 2, 1, 0]])
    marked = torch_selection.mark_largest(torch.asarray(np.abs(rows)), k).numpy()
    for row, found in zip(rows, marked, strict=True):
        keys = [(0, 0.0, i) if np.isnan(v) else (1, -abs(v), i) for i, v in enumerate(row)]
        assert np.flatnonzero(found).tolist() == sorted(i for _, _, i in sorted(keys)[:k])
