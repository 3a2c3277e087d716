"""Select the exact top-k of a wide residual.

A regular sample brackets the k-th largest magnitude. One pass over the row (`gather`) packs the entries that are not
below the bracket. The threshold is found among the few entries inside the bracket. A pass over the packed entries
(`settle`) removes those below the threshold. If the sample was misleading, the bracket is widened: that costs time, but
the selection stays exact. `selection_kernels.py` has the passes, in three forms.
"""

from functools import cache
from threading import local
from typing import Any

import numpy as np

from dbo.algorithms.compression.compressors import keep_largest
from dbo.algorithms.compression.grid import Grid, quantize_entries
from dbo.algorithms.gossip import Packed, PackedRow
from dbo.algorithms.kernels.compiled import find_processor
from dbo.algorithms.kernels.fused import map_rows
from dbo.algorithms.kernels.lazy import Rows, map_difference, unwrap
from dbo.algorithms.kernels.selection_kernels import AVX2, AVX512, BUCKETS, SCALAR, Form, narrow, sample
from dbo.algorithms.protocol import Array

_SAMPLE = 8192    # entries of the sample: more cause more cache misses, fewer a wider bracket


# Fastest first: a form, and what it needs in the words of LLVM.
FORMS: dict[str, tuple[Form, frozenset[str]]] = {
    "avx512": (AVX512, frozenset({"+avx512f", "+avx512vl", "+bmi2"})),
    "avx2": (AVX2, frozenset({"+avx2", "+bmi2"})),
    "scalar": (SCALAR, frozenset()),
}


def usable_forms(features: frozenset[str]) -> dict[str, Form]:
    """Return the forms that a processor with these features can run, the fastest first."""
    return {name: form for name, (form, needs) in FORMS.items() if needs <= features}


def choose_form(processor: str, features: frozenset[str]) -> Form:
    """Return the fastest form for a processor."""
    form = next(iter(usable_forms(features).values()))
    # AVX2 deposits marks with an instruction that is slow microcode on the first two generations of Zen.
    return Form(form.gather, SCALAR.settle) if form is AVX2 and processor in ("znver1", "znver2") else form


@cache
def fastest_form() -> Form:
    """Return the fastest form for this processor."""
    return choose_form(*find_processor())


def pack_largest(rows: Rows, k: int, bits: int | None, log: bool) -> Packed:
    """Return the message of the k largest entries of every row, quantized unless `bits` is None."""
    found, dim = select_rows(rows, k), rows.shape[1]
    if bits is None:
        return Packed(tuple(found), dim, kept=k)
    quantized = map_rows(lambda i: quantize_row(found[i], dim, bits, log), len(found))
    scales = np.array([scale for _, scale, _ in quantized], dtype=rows.dtype)
    spans = np.array([span for _, _, span in quantized])
    return Packed(tuple(row for row, _, _ in quantized), dim, kept=k, grid=Grid(bits, log, scales, spans))


def quantize_row(row: PackedRow, dim: int, bits: int, log: bool) -> tuple[PackedRow, Any, int]:
    """Return the row with quantized entries, without those that become 0, and its scale and span."""
    entries, scale, span = quantize_entries(row.entries, bits, log)
    words = row.words
    if not entries.all():
        unpacked = np.unpackbits(words.view(np.uint8), bitorder="little")
        unpacked[row.positions(dim)[entries == 0]] = 0
        words, entries = np.packbits(unpacked, bitorder="little").view(np.uint64), entries[entries != 0]
    return PackedRow(words, entries), scale, span


def select_rows(rows: Rows, k: int) -> list[PackedRow]:
    """Pack the k largest entries of every row; a pending difference a − b is not stored."""
    found = map_difference(rows, lambda v, reference: top_k(v, reference, k))
    if found is not None:
        return found
    a, zeros = unwrap(rows), _zeros(rows.shape[1], rows.dtype)
    return map_rows(lambda i: top_k(a[i], zeros, k), len(a))


@cache
def _zeros(dim: int, dtype: Any) -> Array:
    return np.zeros(dim, dtype)


def top_k(v: Array, reference: Array, k: int) -> PackedRow:
    """Pack the k largest |v − reference| of a row, ties by position, NaN first."""
    form = fastest_form()
    dim, number = v.size, v.dtype.type
    tiny = np.nextafter(number(0), number(1))
    stride = dim // _SAMPLE | 1
    stride -= 2 if stride % 5 == 0 else 0      # rows are features × classes, often with a multiple of 5 classes
    sampled = np.empty(dim // stride, dtype=v.dtype)
    sample(v, reference, stride, sampled)
    at, off = sampled.size * (1 - k / dim), 4 * np.sqrt(sampled.size * k / dim * (1 - k / dim)) + 2
    ends = [i for i in (int(at - off), int(at + off)) if 0 <= i < sampled.size]
    if ends:
        sampled.partition(ends)
    low = max(sampled[int(at - off)], tiny) if at > off else tiny
    high = sampled[int(at + off)] if at + off < sampled.size else number(np.inf)
    words = np.empty(-(-dim // 64), dtype=np.uint64)
    entries, found = _borrow(min(k + int(2 * off / sampled.size * dim), dim) + 4096, v.dtype)
    count, inside, has_nan = form.gather(v, reference, low, high, words, entries, found)
    if count < 0 or not (count - inside < k and (k <= count or low == tiny)):      # misleading sample
        entries, found = np.empty(dim + 4096, dtype=v.dtype), np.empty(dim + 4096, dtype=v.dtype)
        count, inside, has_nan = form.gather(v, reference, tiny, number(np.inf), words, entries, found)
    if has_nan:
        return _top_k_with_nan(v, reference, k)
    least, ties = tiny, dim
    if count >= k:                              # else fewer than k are nonzero, and zeros are not sent
        least, above = find_rank(found[:inside], count - k)
        ties = k - (count - inside) - above
    count = form.settle(least, ties, words, entries)
    return PackedRow(words, entries[:count].copy())      # the message takes no more memory than its entries


_memory = local()


def _borrow(size: int, dtype: Any) -> tuple[Array, Array]:
    """Return two arrays that belong to this thread and are overwritten by the next selection."""
    pair: tuple[Array, Array] | None = getattr(_memory, "pair", None)
    if pair is None or pair[0].dtype != dtype or not size <= pair[0].size <= 2 * size:
        pair = np.empty(size, dtype=dtype), np.empty(size, dtype=dtype)
        _memory.pair = pair
    return pair[0][:size], pair[1][:size]


def _top_k_with_nan(v: Array, reference: Array, k: int) -> PackedRow:
    """Do the same for a row with NaN, without kernels: it ends the run, so it need not be fast."""
    return PackedRow.of(keep_largest((v - reference)[None], k)[0])


def find_rank(values: Array, rank: int) -> tuple[Any, int]:
    """Return the value with this rank in ascending order, and how many are larger; `values` is reordered."""
    lowest, highest = float(values.min()), float(values.max())
    width = highest - lowest if highest < np.inf else np.inf
    if values.size < 4 * BUCKETS or not 1e-290 < width < np.inf:
        values.partition(rank)
        return values[rank], int(np.count_nonzero(values > values[rank]))
    below, inside = narrow(values, lowest, (BUCKETS - 1) / width, rank)
    candidates = values[:inside]
    candidates.partition(rank - below)
    least = candidates[rank - below]
    return least, values.size - below - inside + int(np.count_nonzero(candidates > least))
