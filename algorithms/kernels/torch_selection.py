"""Select the top-k of rows that are torch tensors, and quantize them; nothing is read back to the host.

`topk` gives the threshold alone: which of several equal entries it returns is not defined. The choice among these is a
running sum of integers, so the result is the same on every device and in every run.
"""

from typing import Any

import torch

from dbo.algorithms.compression.grid import digit_factors, eighths

# Magnitudes compare like the integers with their bits, and NaN is the largest of them.
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def keep_largest(rows: Any, k: int) -> Any:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    kept = torch.where(mark_largest(rows.abs(), k), rows, 0.0)
    return kept + 0.0      # turns −0.0, which is not sent, into 0.0


def mark_largest(magnitude: Any, k: int) -> Any:
    """Return a mask of exactly k entries of each row."""
    keys = torch.where(magnitude.isnan(), torch.nan, magnitude).view(_BITS[magnitude.dtype])    # one NaN for all
    threshold = torch.topk(keys, k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above, tied = keys > threshold, keys == threshold
    missing = k - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1, dtype=torch.int32) <= missing))


def round_scale(largest: Any, kept_bits: int) -> Any:
    """Round magnitudes up to floats whose bits after the first ones are 0; NaN where one is not finite."""
    finite = largest.isfinite()
    rest = (1 << (8 * largest.element_size() - kept_bits)) - 1
    bits = torch.where(finite, largest, 0.0).view(_BITS[largest.dtype])
    return torch.where(finite, ((bits + rest) & ~rest).view(largest.dtype), torch.nan)


def _inverse_powers(span: Any, bits: int) -> Any:
    """Return (rows, L + 1) powers r^n, r = 2^(−span / 8L), with the bits of the host's."""
    exponents = span[:, None] * torch.arange((1 << (bits - 1)) + 1, device=span.device)
    powers = torch.ones(exponents.shape, dtype=torch.float64, device=span.device)
    for digit, factor in enumerate(digit_factors(bits)):
        powers = torch.where((exponents >> digit & 1).to(torch.bool), powers * factor, powers)
    return powers


def level_tables(scale: Any, span: Any, bits: int, log: bool) -> Any:
    """Return the magnitudes that the levels of each row stand for, ascending, in float64."""
    count, scales = 1 << (bits - 1), scale.to(torch.float64)[:, None]
    if not log:
        return scales * (torch.arange(1, count + 1, dtype=torch.float64, device=scale.device) / count)
    powers = _inverse_powers(span, bits)
    return scales * (2 * powers[:, 1:].flip(1) / (1 + powers[:, 1:2]))


def quantize_rows(rows: Any, bits: int, log: bool) -> tuple[Any, Any, Any]:
    """Return the nonzero entries of each row at their levels, with scales and spans."""
    magnitude, count = rows.abs(), 1 << (bits - 1)
    scale = round_scale(magnitude.amax(dim=1), 16)
    scales = scale.to(torch.float64)[:, None]
    span = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    if log:
        smallest = torch.where(magnitude > 0, magnitude, torch.inf).amin(dim=1, keepdim=True).to(torch.float64)
        steps = torch.as_tensor(eighths()[:-1], device=rows.device)
        span = (scales * steps > smallest).sum(dim=1)
        edges = scales * _inverse_powers(span, bits)[:, 1:].flip(1)
    else:
        middle = (2 * torch.arange(count, dtype=torch.float64, device=rows.device) + 1) / (2 * count)
        edges = scales * middle
    level = torch.searchsorted(edges.to(rows.dtype), magnitude.contiguous(), right=True)
    tables = torch.nn.functional.pad(level_tables(scale, span, bits, log).to(rows.dtype), (1, 0))
    values = torch.copysign(tables.gather(1, level), rows) + 0.0
    bad = scale.isnan()[:, None]
    return torch.where(rows == 0, 0.0, torch.where(bad, torch.nan, values)), scale, torch.where(bad[:, 0], 0, span)
