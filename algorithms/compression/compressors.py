"""Compress rows into messages.

Every compressor handles each row independently, and random ones use generators keyed by node, so that the packing of
rows into processes cannot change a message. All are contractive, E‖Q(v) − v‖² ≤ (1 − δ)‖v‖²: `contraction(dim)` is δ.
A message's values are what its receivers decode, to the last bit; in particular a dropped entry is +0.0.

The message of a row with NaN or inf is not finite either: otherwise a diverged run would go unnoticed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np
from array_api_compat import array_namespace, device

from dbo.algorithms.compression.grid import quantize_rows, quantized_share
from dbo.algorithms.gossip import Form, Message, NotRowsError, Packed, dense
from dbo.algorithms.kernels.interface import selection_of
from dbo.algorithms.kernels.lazy import Rows, unwrap
from dbo.algorithms.protocol import Array
from dbo.algorithms.rng import Key
from dbo.components import Registry, name_method
from dbo.parameters import param

C = TypeVar("C", bound=type)
_FORMS = get_args(Form)


@runtime_checkable
class Compressor(Protocol):
    """A row-wise operator Q on stacked rows (nodes, dim)."""

    def __call__(self, rows: Array, key: Key, channel: str) -> Message | Packed:
        """Return Q of every row; `channel` keys the random numbers, so that channels of one packet are independent."""

    def contraction(self, dim: int) -> float:
        """Return δ in E‖Q(v) − v‖² ≤ (1 − δ)‖v‖² for every v of `dim` entries."""


COMPRESSORS: Registry[type[Compressor]] = Registry(
    "compressor",
    dict.fromkeys(("identity", "top_k", "rand_k", "row_top_k", "top_share", "lazy", "qsgd", "sign"), __name__),
    methods=("__call__", "contraction"),
)


def compressor(name: str, *, lazy: bool = False) -> Callable[[C], C]:
    """Register the decorated class as a compressor: `__call__(rows, key, channel)` and `contraction(dim)`.

    Its rows are arrays. With `lazy` they may be pending sums of wide rows, which it then evaluates itself.
    """
    register = COMPRESSORS.register(name)

    def decorate(cls: C) -> C:
        if not lazy and "__call__" in vars(cls):
            cls.__call__ = _evaluate_first(vars(cls)["__call__"])      # type: ignore[method-assign]
        return register(cls)

    return decorate


def _evaluate_first(call: Callable[..., Message]) -> Callable[..., Message]:
    """Wrap a compressor's `__call__`: pending sums of wide rows are evaluated before it sees them.

    What it returns is checked, because it may be a user's.
    """

    @wraps(call)
    def compress(self: Any, rows: Array, key: Key, channel: str) -> Message:
        rows = unwrap(rows)
        message: Any = call(self, rows, key, channel)
        if isinstance(message, Message) and message.shape == tuple(rows.shape) and message.form in _FORMS:
            return message
        found = f"dbo.Message of shape {message.shape} and form {message.form!r}" if isinstance(
            message, Message) else type(message).__name__
        raise NotRowsError(
            f"compressor: {name_method(self, '__call__')} returned a {found}; must be a dbo.Message of shape "
            f"{tuple(rows.shape)} and form {' or '.join(map(repr, _FORMS))}"
        )

    return compress


@compressor("identity")
@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Sends every entry as it is."""

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        return dense(rows)

    def contraction(self, dim: int) -> float:
        """δ = 1: nothing is lost."""
        return 1.0


Levels = Literal["log", "uniform"]

_BITS = "bits of a sent value, sign included, on levels of the row's largest magnitude; null: floats"
_LEVELS = "levels of quantized values: logarithmic (relative error) or uniform (absolute error)"


@compressor("top_k", lazy=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Keeps the largest entries by magnitude, unscaled."""

    ratio: float = param(0.2, gt=0, le=1, help="share of the entries that is kept; at least one is")
    bits: int | None = param(None, ge=2, le=16, help=_BITS)
    levels: Levels = param("log", help=_LEVELS)

    def __call__(self, rows: Array, key: Key, channel: str) -> Message | Packed:
        k = count_kept(self.ratio, rows.shape[1])
        if isinstance(rows, Rows) and rows.is_compiled and self.ratio < 1:
            from dbo.algorithms.kernels import selection  # imports numba, which is slow

            return selection.pack_largest(rows, k, self.bits, self.levels == "log", channel)
        return send_kept(keep_largest(unwrap(rows), k), k, self.bits, self.levels)

    def contraction(self, dim: int) -> float:
        """δ = q k/d, k = max(1, ⌊ratio · d⌋): the kept k entries hold at least their share of ‖v‖².

        q = 1 for floats; quantized entries keep a share q of their ‖·‖², `quantized_share`.
        """
        k = count_kept(self.ratio, dim)
        return share_left(self.bits, self.levels, k) * k / dim


@compressor("rand_k")
@dataclass(frozen=True, slots=True, kw_only=True)
class RandK:
    """Keeps randomly sampled entries, unscaled."""

    ratio: float = param(0.2, gt=0, le=1, help="share of the entries that is kept; at least one is")
    bits: int | None = param(None, ge=2, le=16, help=_BITS)
    levels: Levels = param("log", help=_LEVELS)

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        dim = rows.shape[1]
        k = count_kept(self.ratio, dim)
        dropped = np.ones(rows.shape, dtype=bool)
        for row, generator in zip(dropped, key.generators(f"rand_k {channel}"), strict=True):
            row[generator.choice(dim, size=k, replace=False, shuffle=False)] = False
        return send_kept(_drop(rows, _on_device_of(rows, dropped)), k, self.bits, self.levels)

    def contraction(self, dim: int) -> float:
        """δ = q k/d, k = max(1, ⌊ratio · d⌋), in expectation: every entry is kept with probability k/d.

        Scaling by d/k would make it unbiased with variance ω = d/k − 1; the contractive Q/(1 + ω) is this one again.
        q = 1 for floats; quantized entries keep a share q of their ‖·‖², `quantized_share`.
        """
        k = count_kept(self.ratio, dim)
        return share_left(self.bits, self.levels, k) * k / dim


@compressor("row_top_k")
@dataclass(frozen=True, slots=True, kw_only=True)
class RowTopK:
    """Keeps the groups of consecutive entries with the largest norms: rows of a matrix, e.g. features of a model."""

    ratio: float = param(0.2, gt=0, le=1, help="share of the groups that is kept; at least one is")
    width: int = param(1, ge=1, le=2**16 - 1, help="entries of a group, e.g. classes; must divide the row's entries")

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        xp = array_namespace(rows)
        nodes, dim = rows.shape
        self._check(dim)
        groups = xp.reshape(rows, (nodes, -1, self.width))
        largest = xp.max(abs(groups), axis=2, keepdims=True)
        finite = xp.isfinite(largest)
        # No square overflows or underflows; the norm of a group with NaN or inf is NaN, which is kept first.
        scaled = xp.where(finite, groups, 0.0) / xp.where(finite & (largest > 0), largest, 1.0)
        norms = xp.where(finite, largest, xp.nan)[:, :, 0] * xp.sqrt(xp.sum(scaled * scaled, axis=2))
        k = count_kept(self.ratio, dim // self.width)
        dropped = xp.broadcast_to((keep_largest(norms, k) == 0)[:, :, None], groups.shape)
        values = xp.reshape(_drop(groups, dropped), (nodes, dim))
        return Message(values, form="sparse", kept=k * self.width, width=self.width)

    def contraction(self, dim: int) -> float:
        """δ = k/n, k = max(1, ⌊ratio · n⌋) of n = d/width groups: the kept ones hold at least their share of ‖v‖²."""
        self._check(dim)
        return count_kept(self.ratio, dim // self.width) / (dim // self.width)

    def _check(self, dim: int) -> None:
        if dim % self.width:
            raise ValueError(f"width: {self.width} is not allowed; must divide the {dim} entries of a row")


@compressor("top_share")
@dataclass(frozen=True, slots=True, kw_only=True)
class TopShare:
    """Keeps as few of the largest entries as hold a given share of the row's squared norm."""

    share: float = param(0.9, gt=0, le=1, help="share of ‖v‖² that the kept entries hold")
    ratio: float = param(0.2, gt=0, le=1, help="share of the entries that is kept at most; at least one is")
    bits: int | None = param(None, ge=2, le=16, help=_BITS)
    levels: Levels = param("log", help=_LEVELS)

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        xp = array_namespace(rows)
        k = count_kept(self.ratio, rows.shape[1])
        largest = keep_largest(rows, k)
        finite, clean, top = _zero_nonfinite(largest)
        squares = (clean / xp.where(top > 0, top, 1)[:, None]) ** 2
        _, whole, _ = _zero_nonfinite(rows)
        total = xp.sum((whole / xp.where(top > 0, top, 1)[:, None]) ** 2, axis=1)
        # The sum of the squares that are larger: an entry is kept unless those in front of it suffice.
        order = xp.argsort(-squares, axis=1, stable=True)
        ranked = xp.take_along_axis(squares, order, axis=1)
        ahead = xp.cumulative_sum(ranked, axis=1) - ranked
        needed = xp.astype(ahead < self.share * total[:, None], xp.int64)
        counts = xp.sum(needed, axis=1)
        rank = xp.argsort(order, axis=1, stable=True)
        dropped = (rank >= counts[:, None]) & finite[:, None]
        return send_kept(_drop(largest, dropped), k, self.bits, self.levels)

    def contraction(self, dim: int) -> float:
        """δ = q min(share, k/d), k = max(1, ⌊ratio · d⌋): the share, or what top-k guarantees where it ends first."""
        k = count_kept(self.ratio, dim)
        return share_left(self.bits, self.levels, k) * min(self.share, k / dim)


@compressor("lazy")
@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """Keeps the largest entries by magnitude; sends nothing, in one byte, while the row is small."""

    threshold: float = param(1e-3, ge=0, help="root mean square of a row's entries up to which it is not sent")
    decay: float = param(0.99, gt=0, le=1, help="the threshold of a round is threshold · decay^round")
    ratio: float = param(0.2, gt=0, le=1, help="share of the entries that is kept; at least one is")
    bits: int | None = param(None, ge=2, le=16, help=_BITS)
    levels: Levels = param("log", help=_LEVELS)

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        xp = array_namespace(rows)
        k = count_kept(self.ratio, rows.shape[1])
        finite, clean, largest = _zero_nonfinite(rows)
        scaled = clean / xp.where(largest > 0, largest, 1)[:, None]      # no square overflows or underflows
        size = largest * xp.sqrt(xp.mean(scaled * scaled, axis=1))
        silent = finite & (size <= self.threshold * self.decay**key.round)
        small = xp.broadcast_to(silent[:, None], rows.shape)
        return send_kept(keep_largest(_drop(rows, small), k), k, self.bits, self.levels)

    def contraction(self, dim: int) -> float:
        """δ of top-k, apart from an error of at most d τ² in a round with the threshold τ, which decays to 0."""
        return TopK(ratio=self.ratio, bits=self.bits, levels=self.levels).contraction(dim)


def send_kept(rows: Array, k: int, bits: int | None, levels: Levels) -> Message:
    """Return the message of rows whose dropped entries are 0, quantized unless `bits` is None."""
    if bits is None:
        return Message(rows, form="sparse", kept=k)
    values, grid = quantize_rows(rows, bits, levels == "log")
    return Message(values, form="sparse", kept=k, grid=grid)


def share_left(bits: int | None, levels: Levels, k: int) -> float:
    """Return the share of ‖·‖² that k sent entries keep."""
    return 1.0 if bits is None else quantized_share(bits, levels == "log", k)


@compressor("qsgd")
@dataclass(frozen=True, slots=True, kw_only=True)
class Qsgd:
    """Rounds entries at random to multiples of a fraction of the row's norm, scaled down to be contractive."""

    levels: int = param(127, ge=1, le=2**15 - 1, help="steps between zero and the row's norm")

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        xp = array_namespace(rows)
        dim = rows.shape[1]
        finite, clean, largest = _zero_nonfinite(rows)
        scaled = clean / xp.where(largest > 0, largest, 1)[:, None]    # no square overflows, and 1 ≤ norm
        norm = xp.sqrt(xp.sum(scaled * scaled, axis=1))
        share = abs(scaled) / xp.where(norm > 0, norm, 1)[:, None] * self.levels
        floor = xp.floor(share)
        dtype = np.dtype(str(rows.dtype).rpartition(".")[2])
        uniform = np.stack([g.random(dim, dtype=dtype) for g in key.generators(f"qsgd {channel}")])
        up = _on_device_of(rows, uniform) < share - floor
        steps = floor + xp.astype(up, rows.dtype)
        levels = xp.astype(xp.where(clean < 0, -steps, steps), xp.int32)
        unit = largest * (norm / (self.levels * (1 + self.variance(dim))))
        return _quantize(levels, xp.where(finite, unit, xp.nan), bits=self.levels.bit_length() + 1)

    def variance(self, dim: int) -> float:
        """ω = min(d/s², √d/s) of the unbiased rounding with s levels: E‖Q(v) − v‖² ≤ ω‖v‖²."""
        return min(dim / self.levels**2, math.sqrt(dim) / self.levels)

    def contraction(self, dim: int) -> float:
        """δ = 1/(1 + ω), ω = min(d/s², √d/s): an unbiased Q divided by 1 + ω is contractive, in expectation."""
        return 1 / (1 + self.variance(dim))


@compressor("sign")
@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Sends the sign of each entry and the row's mean magnitude."""

    def __call__(self, rows: Array, key: Key, channel: str) -> Message:
        xp = array_namespace(rows)
        finite, clean, largest = _zero_nonfinite(rows)
        scaled = abs(clean) / xp.where(largest > 0, largest, 1)[:, None]
        unit = largest * (xp.sum(scaled, axis=1) / rows.shape[1])
        one = xp.ones_like(clean, dtype=xp.int32)
        return _quantize(xp.where(clean < 0, -one, one), xp.where(finite, unit, xp.nan), bits=1)

    def contraction(self, dim: int) -> float:
        """δ = 1/d: with the unit ‖v‖₁/d and sign(0) = +1, ‖Q(v) − v‖² = ‖v‖² − ‖v‖₁²/d, and ‖v‖₁ ≥ ‖v‖₂."""
        return 1 / dim


def without_width(q: Compressor) -> Compressor:
    """Return the compressor for rows that are not matrices: groups of one entry, if it has groups."""
    if "width" not in {field.name for field in fields(q)}:      # type: ignore[arg-type]
        return q
    return replace(q, width=1)      # type: ignore[type-var]


def is_deterministic(q: Compressor) -> bool:
    """Decide whether Q is known to draw no random numbers; a plugin's is not, unless it derives from one of these."""
    return isinstance(q, (Identity, TopK, RowTopK, TopShare, Lazy, Sign))


def count_kept(ratio: float, dim: int) -> int:
    """Return k = max(1, ⌊ratio · dim⌋), with the product in floating point."""
    return max(1, math.floor(ratio * dim))


def keep_largest(rows: Array, k: int) -> Array:
    """Keep each row's k largest entries by magnitude, NaN first, the first of equal ones; set the others to 0.0."""
    dim = rows.shape[1]
    if k == dim:
        return rows + 0.0      # turns −0.0, which is not sent, into 0.0
    selected: Array = selection_of(rows).keep_largest(rows, k)
    return selected


def _drop(rows: Array, dropped: Array) -> Array:
    """Set dropped entries to +0.0, and −0.0 as well: a zero is not sent, so its sign is lost."""
    where = np.where if isinstance(rows, np.ndarray) else array_namespace(rows).where
    values: Array = where(dropped, 0.0, rows) + 0.0
    return values


def _zero_nonfinite(rows: Array) -> tuple[Array, Array, Array]:
    """Return which rows are finite, the rows with the others set to zero, and the largest magnitude of each."""
    xp = array_namespace(rows)
    largest = xp.max(abs(rows), axis=1)
    finite = xp.isfinite(largest)
    # The shortcut saves a copy. On a device the question itself would cost more: the host had to wait for the answer.
    is_clean = isinstance(rows, np.ndarray) and bool(np.all(finite))
    clean = rows if is_clean else xp.where(finite[:, None], rows, 0.0)
    return finite, clean, xp.where(finite, largest, 0.0)


def _quantize(levels: Array, unit: Array, bits: int) -> Message:
    """Return a message of integers times one unit per row, with the product computed as the receiver computes it."""
    xp = array_namespace(levels)
    values = xp.astype(levels, unit.dtype) * unit[:, None]
    return Message(values, form="levels", kept=levels.shape[1], levels=levels, unit=unit, bits=bits)


def _on_device_of(rows: Array, host: Array) -> Any:
    """Copy an array from the host to the device of the rows."""
    return array_namespace(rows).asarray(host, device=device(rows))
