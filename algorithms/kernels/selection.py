"""Select the exact top-k of a wide residual.

The last selection of the same channel, or else a regular sample, gives a bound below the k-th largest magnitude. One
pass over the row (`pack`) packs the entries that are not below the bound; it evaluates the row's pending sums at the
same time. A sample of the packed entries brackets the threshold, which is found among the few inside (`search`). A pass
over the packed entries (`settle`) removes those below it. If a bound was misleading, it is widened: that costs time,
but the selection stays exact. `selection_kernels.py` has the passes, in three forms.
"""

from functools import cache, lru_cache
from threading import local
from typing import Any

import numpy as np

from dbo.algorithms.compression.compressors import keep_largest
from dbo.algorithms.compression.grid import Grid, quantize_entries
from dbo.algorithms.gossip import Packed, PackedRow
from dbo.algorithms.kernels.compiled import Terms, find_processor
from dbo.algorithms.kernels.fused import can_expand, evaluate_terms, map_rows
from dbo.algorithms.kernels.lazy import Rows, map_difference, unwrap
from dbo.algorithms.kernels.selection_kernels import AVX2, AVX512, CHUNK, SCALAR, Form, sample
from dbo.algorithms.protocol import Array

_SAMPLE = 4096    # entries of a sample: more cause more cache misses, fewer a wider bracket


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
    return form._replace(settle=SCALAR.settle) if form is AVX2 and processor in ("znver1", "znver2") else form


@cache
def fastest_form() -> Form:
    """Return the fastest form for this processor."""
    return choose_form(*find_processor())


def pack_largest(rows: Rows, k: int, bits: int | None, log: bool, channel: str = "") -> Packed:
    """Return the message of the k largest entries of every row, quantized unless `bits` is None.

    The last selection of the same channel says where to expect the threshold.
    """
    found, dim = select_rows(rows, k, channel), rows.shape[1]
    if bits is None:
        return Packed(tuple(found), dim, kept=k)
    quantized = map_rows(lambda i: quantize_row(found[i], dim, bits, log), len(found))
    scales = np.array([scale for _, scale, _ in quantized], dtype=rows.dtype)
    spans = np.array([span for _, _, span in quantized])
    return Packed(tuple(row for row, _, _ in quantized), dim, kept=k, grid=Grid(bits, log, scales, spans))


def quantize_row(row: PackedRow, dim: int, bits: int, log: bool) -> tuple[PackedRow, Any, int]:
    """Return the row with quantized entries, without those that become 0, and its scale and span."""
    entries, levels, scale, span = quantize_entries(row.entries, bits, log)
    words = row.words
    if not entries.all():
        unpacked = np.unpackbits(words.view(np.uint8), bitorder="little")
        unpacked[row.positions(dim)[entries == 0]] = 0
        sent = entries != 0
        words, entries = np.packbits(unpacked, bitorder="little").view(np.uint64), entries[sent]
        levels = None if levels is None else levels[sent]
    return PackedRow(words, entries, levels), scale, span


def select_rows(rows: Rows, k: int, channel: str = "") -> list[PackedRow]:
    """Pack the k largest entries of every row; a pending difference a − b is not stored."""
    last = _thresholds(channel, k, *rows.shape)

    def select(i: int, v: Array, reference: Array, terms: Terms | None = None) -> PackedRow:
        row, least = top_k(v, reference, k, expect_threshold(last[i]), terms)
        last[i] = last[i][1], least
        return row

    found = map_difference(rows, select)
    if found is not None:
        return found
    a, zeros = unwrap(rows), _zeros(rows.shape[1], rows.dtype)
    return map_rows(lambda i: select(i, a[i], zeros), len(a))


@lru_cache(maxsize=256)
def _thresholds(channel: str, k: int, rows: int, dim: int) -> list[tuple[float, float]]:
    """Return the last two thresholds of each row; 0 is none.

    Other rows may have the same key, in another block of this process: a wrong expectation costs time, nothing else.
    """
    return [(0.0, 0.0)] * rows


def expect_threshold(last: tuple[float, float]) -> float:
    """Return a bound that the next threshold will hardly fall below: a tenth below the last one and its trend."""
    before, latest = last
    return 0.9 * latest * min(1.0, max(0.5, latest / before)) if before else 0.9 * latest


@cache
def _zeros(dim: int, dtype: Any) -> Array:
    return np.zeros(dim, dtype)


@cache
def _no_terms() -> Terms:
    none = np.empty(0, dtype=np.int64)
    return none, none, np.empty(0), none, none, none, none


def top_k(
    v: Array, reference: Array, k: int, expected: float = 0.0, terms: Terms | None = None
) -> tuple[PackedRow, float]:
    """Pack the k largest |v − reference| of a row, ties by position, NaN first; return its threshold, too.

    `expected` is a bound below the threshold, 0 for none. `terms` are pending sums that write v or the reference. If
    the bound holds, they are evaluated and packed in one pass.
    """
    form, dim, number = fastest_form(), v.size, v.dtype.type
    tiny = np.nextafter(number(0), number(1))
    words = np.empty(-(-dim // 64), dtype=np.uint64)
    entries, found = _borrow(min(k + k // 2, dim) + 2 * CHUNK, v.dtype)
    low, count = number(expected), -1
    if low > 0:
        count = form.pack(terms or _no_terms(), can_expand(), v, reference, low, words, entries)
    elif terms is not None:
        evaluate_terms(terms, dim, v.dtype)
    if count < k:
        low = max(_sample_threshold(v, reference, k), tiny)
        count = form.pack(_no_terms(), can_expand(), v, reference, low, words, entries)
    if count < k and not (count >= 0 and low == tiny):      # a misleading sample
        entries, found = np.empty(dim + 2 * CHUNK, dtype=v.dtype), np.empty(dim + 2 * CHUNK, dtype=v.dtype)
        low = tiny
        count = form.pack(_no_terms(), can_expand(), v, reference, low, words, entries)
    packed = entries[:count]
    least, ties, has_nan = tiny, dim, False
    if count >= k:
        least, ties, has_nan = form.search(packed, k, low, _SAMPLE, found)
    else:                                                   # fewer than k are nonzero, and zeros are not sent
        has_nan = bool(np.isnan(packed).any())
    if has_nan:
        return _top_k_with_nan(v, reference, k), 0.0
    out = np.empty(min(k, count), dtype=v.dtype)
    form.settle(number(least), ties, words, packed, out)
    return PackedRow(words, out), float(least)


def _sample_threshold(v: Array, reference: Array, k: int) -> Any:
    """Return a bound below the k-th largest |v − reference|, from a regular sample."""
    dim = v.size
    stride = dim // _SAMPLE | 1
    stride -= 2 if stride % 5 == 0 else 0      # rows are features × classes, often with a multiple of 5 classes
    sampled = np.empty(dim // stride, dtype=v.dtype)
    sample(v, reference, stride, sampled)
    share = 1 - k / dim
    rank = int(sampled.size * share - 4 * np.sqrt(sampled.size * share * (1 - share)) - 2)      # less four deviations
    if rank <= 0:
        return v.dtype.type(0)
    sampled.partition(rank)
    return sampled[rank]


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
