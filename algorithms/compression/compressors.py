"""Compressors: what a node keeps of a vector before it speaks.

Every compressor works on each row by itself, and a random one draws from generators keyed by node, so that the packing
of rows into processes cannot change a message. All are contractive, E‖Q(v) − v‖² ≤ (1 − δ)‖v‖²: `contraction(dim)`
is δ. A message's values are what its receivers decode, to the last bit; in particular a dropped entry is +0.0.

A row with NaN or inf stays visibly broken (NaN somewhere in the message): hiding it would hide a diverged run.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
from annotated_types import Ge, Gt, Le
from array_api_compat import array_namespace, device
from typing_extensions import Doc

from dbo.algorithms.gossip import Message, dense
from dbo.algorithms.protocol import Array
from dbo.algorithms.rng import Draws


@runtime_checkable
class Compressor(Protocol):
    """A row-wise operator Q on stacked rows (nodes, dim)."""

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        """Q of every row; `channel` keys the random draws, so that two channels of one packet draw apart."""

    def contraction(self, dim: int) -> float:
        """δ in E‖Q(v) − v‖² ≤ (1 − δ)‖v‖² for every v of `dim` entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Sends every entry as it is."""

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        return dense(rows)

    def contraction(self, dim: int) -> float:
        """δ = 1: nothing is lost."""
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keeps the largest entries by magnitude, unscaled."""

    ratio: Annotated[float, Gt(0), Le(1), Doc("share of the entries that is kept; at least one is")] = 0.2

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        dim = rows.shape[1]
        k = kept(self.ratio, dim)
        return Message(largest(rows, k), form="sparse", kept=k)

    def contraction(self, dim: int) -> float:
        """δ = k/d, k = max(1, ⌊ratio · d⌋): the kept k entries hold at least their share of ‖v‖²."""
        return kept(self.ratio, dim) / dim


@dataclass(frozen=True, slots=True, kw_only=True)
class RandK:
    """Keeps entries drawn at random, unscaled."""

    ratio: Annotated[float, Gt(0), Le(1), Doc("share of the entries that is kept; at least one is")] = 0.2

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        dim = rows.shape[1]
        k = kept(self.ratio, dim)
        dropped = np.ones(rows.shape, dtype=bool)
        for row, generator in zip(dropped, draws.generators(f"rand_k {channel}"), strict=True):
            row[generator.choice(dim, size=k, replace=False, shuffle=False)] = False
        return Message(_without(rows, _beside(rows, dropped)), form="sparse", kept=k)

    def contraction(self, dim: int) -> float:
        """δ = k/d, k = max(1, ⌊ratio · d⌋), in expectation: every entry is kept with probability k/d.

        Scaling by d/k would make it unbiased with variance ω = d/k − 1; the contractive Q/(1 + ω) is this one again.
        """
        return kept(self.ratio, dim) / dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Qsgd:
    """Rounds entries at random to multiples of a fraction of the row's norm, scaled down to be contractive."""

    levels: Annotated[int, Ge(1), Le(2**15 - 1), Doc("steps between zero and the row's norm")] = 127

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        xp = array_namespace(rows)
        dim = rows.shape[1]
        finite, clean, largest = _finite(rows)
        scaled = clean / xp.where(largest > 0, largest, 1)[:, None]    # no square overflows, and 1 ≤ norm
        norm = xp.sqrt(xp.sum(scaled * scaled, axis=1))
        share = abs(scaled) / xp.where(norm > 0, norm, 1)[:, None] * self.levels
        floor = xp.floor(share)
        dtype = np.dtype(str(rows.dtype).rpartition(".")[2])
        uniform = np.stack([g.random(dim, dtype=dtype) for g in draws.generators(f"qsgd {channel}")])
        up = _beside(rows, uniform) < share - floor
        steps = floor + xp.astype(up, rows.dtype)
        levels = xp.astype(xp.where(clean < 0, -steps, steps), xp.int32)
        unit = largest * (norm / (self.levels * (1 + self.variance(dim))))
        return _quantised(levels, xp.where(finite, unit, xp.nan), bits=self.levels.bit_length() + 1)

    def variance(self, dim: int) -> float:
        """ω = min(d/s², √d/s) of the unbiased rounding with s levels: E‖Q(v) − v‖² ≤ ω‖v‖²."""
        return min(dim / self.levels**2, math.sqrt(dim) / self.levels)

    def contraction(self, dim: int) -> float:
        """δ = 1/(1 + ω), ω = min(d/s², √d/s): an unbiased Q divided by 1 + ω is contractive, in expectation."""
        return 1 / (1 + self.variance(dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Sends the sign of each entry and the row's mean magnitude."""

    def __call__(self, rows: Array, draws: Draws, channel: str) -> Message:
        xp = array_namespace(rows)
        finite, clean, largest = _finite(rows)
        scaled = abs(clean) / xp.where(largest > 0, largest, 1)[:, None]
        unit = largest * (xp.sum(scaled, axis=1) / rows.shape[1])
        one = xp.ones_like(clean, dtype=xp.int32)
        return _quantised(xp.where(clean < 0, -one, one), xp.where(finite, unit, xp.nan), bits=1)

    def contraction(self, dim: int) -> float:
        """δ = 1/d: with the unit ‖v‖₁/d and sign(0) = +1, ‖Q(v) − v‖² = ‖v‖² − ‖v‖₁²/d, and ‖v‖₁ ≥ ‖v‖₂."""
        return 1 / dim


COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "top_k": TopK,
    "rand_k": RandK,
    "qsgd": Qsgd,
    "sign": Sign,
}


def kept(ratio: float, dim: int) -> int:
    """k = max(1, ⌊ratio · dim⌋), the product as floating point has it."""
    return max(1, math.floor(ratio * dim))


def largest(rows: Array, k: int) -> Array:
    """Each row's k largest entries by magnitude, NaN first, of equal ones the earlier; 0.0 in the place of the rest."""
    dim = rows.shape[1]
    if k == dim:
        return rows + 0.0      # turns −0.0, which is not sent, into 0.0
    return _without(rows, _smallest(abs(rows), dim - k))


def _smallest(magnitude: Array, count: int) -> Array:
    """A mask of each row's `count` smallest entries; of equal ones the later go first, and NaN is the largest.

    Where the threshold is zero the mask may hold fewer: a zero is not sent whether it is kept or not.
    """
    xp = array_namespace(magnitude)
    rows, dim = magnitude.shape
    if isinstance(magnitude, np.ndarray):
        threshold = np.partition(magnitude, count, axis=1)[:, count : count + 1]
    else:
        threshold = xp.topk(magnitude, dim - count, dim=1).values[:, -1:]
    # Of "below" and "not above" only the first leaves NaN out, so that every row's count is at most the one wanted and
    # the sum over all rows is right only if each row is.
    below = magnitude < threshold
    if int(xp.count_nonzero(below)) != rows * count:
        for i in (i for i, value in enumerate(threshold[:, 0].tolist()) if value != 0):
            _break_ties(magnitude[i], threshold[i, 0], below[i], count)
    return below


def _break_ties(magnitude: Array, threshold: Any, below: Array, count: int) -> None:
    """Completes one row's mask, which must hold `count` entries, by the last of those that equal the threshold."""
    xp = array_namespace(magnitude)
    tied = magnitude == threshold
    if xp.isnan(threshold):
        tied = xp.isnan(magnitude)
        below[:] = ~tied
    surplus = count - int(xp.count_nonzero(below))
    if surplus:
        below[xp.nonzero(tied)[0][-surplus:]] = True


def _without(rows: Array, dropped: Array) -> Array:
    """The rows with +0.0 where an entry is dropped, and where it was −0.0: a zero is not sent, so its sign is lost."""
    values: Array = array_namespace(rows).where(dropped, 0.0, rows) + 0.0
    return values


def _finite(rows: Array) -> tuple[Array, Array, Array]:
    """Which rows are finite, the rows with the others zeroed, and the largest magnitude of each."""
    xp = array_namespace(rows)
    largest = xp.max(abs(rows), axis=1)
    finite = xp.isfinite(largest)
    clean = rows if bool(xp.all(finite)) else xp.where(finite[:, None], rows, 0.0)
    return finite, clean, xp.where(finite, largest, 0.0)


def _quantised(levels: Array, unit: Array, bits: int) -> Message:
    """Integers times one unit per row; the product is formed as the receiver forms it."""
    xp = array_namespace(levels)
    values = xp.astype(levels, unit.dtype) * unit[:, None]
    return Message(values, form="levels", kept=levels.shape[1], levels=levels, unit=unit, bits=bits)


def _beside(rows: Array, host: Array) -> Any:
    """An array made on the host, moved to where the rows are."""
    return array_namespace(rows).asarray(host, device=device(rows))
