"""Encode rows as bytes, and measure the bytes without encoding; `row_format` defines the forms.

The measured lengths are exactly those of the encoded rows, so a run in one process counts the same bytes as a run on a
cluster. Rows of a torch device are encoded there, by `torch_codecs`: only encoded bytes cross.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from dbo.algorithms.api import Array, Grid, Message, Packed, PackedRow, code_kernels, scale_code, short_loops
from dbo.platform.network.enumeration import encode_enumerated, enumerated_length
from dbo.platform.network.golomb import encode_golomb, measure_codes
from dbo.platform.network.measuring import MAX_ENTRIES, measure_compiled, measure_in_pieces
from dbo.platform.network.positions import (
    encode_packed,
    encode_positions,
    rice_parameter,
    unary_bytes,
    unary_bytes_packed,
)
from dbo.platform.network.row_format import (
    BITMAP,
    DENSE,
    DTYPES,
    GOLOMB,
    GROUPED,
    INDEX,
    LEVELS,
    LOG,
    MAX_WIDTH,
    NUMBER,
    RICE,
    WIDTH_BYTES,
    RowFormat,
    RowType,
    WireError,
    choose_form,
    grid_length,
    index_width,
    is_refined,
    pack_codes,
    packed_length,
    values_length,
)

Table = NDArray[np.int64]                     # (nodes, 3) what a channel's rows cost
ENCODED, VALUE_BYTES, VALUES = range(3)       # its columns: bytes of the body, bytes of values in it, values

_CODES = {"f4": 1, "f8": 2}
_CODES_BY_SIZE = {4: 1, 8: 2}                 # NumPy and torch dtypes have no name in common, but a size


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of a message that were encoded on a device, by row, and why a row could not be encoded."""

    rows: dict[int, tuple[RowFormat, memoryview]]
    errors: dict[int, str]


def _is_on_device(message: Message | Packed) -> TypeGuard[Message]:
    return isinstance(message, Message) and not isinstance(message.values, np.ndarray)


# Measuring


class Counted(NamedTuple):
    """What the length of a sparse row depends on."""

    values: int      # nonzero entries, or groups with one
    unary: int       # bytes of the unary parts of the Rice code of their positions
    golomb: int = 0  # bytes of the shortest Exp-Golomb code of their positions, 0 if none is considered …
    order: int = 0   # … and its order


def measure_messages(messages: Mapping[str, Message | Packed]) -> dict[str, Table]:
    """Return the table of each message. Counts of a device cross together: the host waits once."""
    on_device = {
        name: message for name, message in messages.items()
        if _is_on_device(message) and message.form not in ("dense", "levels")
    }
    if not on_device:
        return _measure_short(messages)
    from dbo.platform.network import torch_codecs  # imports torch, which is slow

    counts = torch_codecs.count_rows(on_device)
    return {name: measure_rows(message, counts.get(name)) for name, message in messages.items()}


def _measure_short(messages: Mapping[str, Message | Packed]) -> dict[str, Table]:
    """Return the table of each message of the host; short sparse rows of one kind are measured together."""
    kinds: dict[Any, dict[str, Array]] = {}
    tables: dict[str, Table] = {}
    for name, message in messages.items():
        bits = wire_bits(message.grid)
        if (
            isinstance(message, Packed) or message.form != "sparse" or message.shape[1] > MAX_ENTRIES
            or is_refined(message.shape[1], bits)
        ):
            tables[name] = measure_rows(message)
            continue
        check_width(message)
        values = message.values
        loops = short_loops(values) if message.width == 1 else None
        if loops is not None:
            tables[name] = measure_compiled(loops, values, bits)
            continue
        kinds.setdefault((values.dtype, values.shape[1], message.width, bits), {})[name] = values
    for (_, _, width, bits), alike in kinds.items():
        counts, start = measure_in_pieces(np.concatenate([*alike.values()]), bits, width), 0
        for name, values in alike.items():
            tables[name] = counts[start : start + len(values)]
            start += len(values)
    return {name: tables[name] for name in messages}


def measure_rows(message: Message | Packed, counted: tuple[Counted, ...] | None = None) -> Table:
    """Return the table of a message's rows; `counted` is known for the sparse messages of a device."""
    nodes, dim = message.shape
    if isinstance(message, Packed):
        bits = wire_bits(message.grid)
        counted = tuple(message.map_rows(lambda row: count_row(row, dim, bits)))
        return measure_sparse(counted, dim, message.rows[0].entries.itemsize, bits)
    itemsize = message.values.dtype.itemsize
    if message.form == "dense":
        return measure_dense(nodes, dim, itemsize)
    if message.form == "levels":
        return _uniform(nodes, itemsize + packed_length(dim, message.bits), dim)
    check_width(message)
    if counted is None and is_refined(dim, wire_bits(message.grid)):
        counted = tuple(count_row(PackedRow.of(row), dim, wire_bits(message.grid)) for row in message.values)
    if counted is None:
        positions = _find_groups(message.values, message.width)
        counted = tuple(Counted(at.size, unary_bytes(at, dim // message.width)) for at in positions)
    return measure_sparse(counted, dim, itemsize, wire_bits(message.grid), message.width)


def count_row(row: PackedRow, dim: int, bits: int) -> Counted:
    """Return what the length of a packed row depends on."""
    if is_refined(dim, bits):
        return Counted(row.entries.size, *measure_codes(row, dim))
    return Counted(row.entries.size, unary_bytes_packed(row, dim))


def measure_dense(nodes: int, dim: int, itemsize: int) -> Table:
    """Return the table of dense rows."""
    return _uniform(nodes, dim * itemsize, dim)


@lru_cache(maxsize=1024)
def measure_sparse(counted: tuple[Counted, ...], dim: int, itemsize: int, bits: int = 0, width: int = 1) -> Table:
    """Return the table of sparse rows.

    A row that travels dense carries its zeros as values, and no positions. Scale and span of a quantized row count as
    values.
    """
    table = np.empty((len(counted), 3), dtype=np.int64)
    for row, facts in enumerate(counted):
        form, length = choose_sparse(facts, dim, itemsize, bits, width)
        values = dim if form == DENSE else facts.values * width
        head = grid_length(bits) if facts.values else 0
        table[row] = length, values_length(values, bits, itemsize) + head, values
    table.setflags(write=False)
    return table


def choose_sparse(counted: Counted, dim: int, itemsize: int, bits: int, width: int) -> tuple[int, int]:
    """Return the form of a sparse row and the bytes of its body; a row without values has none."""
    count, groups = counted.values, dim // width
    if not count:
        return RICE, 0
    rice = counted.unary + packed_length(count, rice_parameter(count, groups))
    if width == 1:
        codes: tuple[tuple[int, int], ...] = ((RICE, rice),)
        if is_refined(dim, bits):
            number = enumerated_length(count, dim)
            codes = (*([(NUMBER, number)] if number else []), *codes, (GOLOMB + counted.order, counted.golomb))
        return choose_form(count, dim, itemsize, bits, codes)
    grouped, whole = WIDTH_BYTES + rice + count * width * itemsize, dim * itemsize
    return (DENSE, whole) if whole <= grouped else (RICE + GROUPED, grouped)


def wire_bits(grid: Grid | None) -> int:
    """Return the `bits` of a record."""
    return 0 if grid is None else grid.bits + LOG * grid.log


def check_width(message: Message) -> None:
    """Raise WireError if the rows cannot be cut into groups, or groups are quantized."""
    if message.width == 1:
        return
    dim = message.shape[1]
    if not 1 <= message.width <= MAX_WIDTH or dim % message.width:
        raise WireError(f"a width of {message.width} is not allowed for rows of {dim} entries; must divide them")
    if message.grid is not None:
        raise WireError("groups cannot be quantized")


@lru_cache(maxsize=256)
def _uniform(nodes: int, length: int, values: int) -> Table:
    """Return the table of rows whose length does not depend on their values; all of it counts as values."""
    table = np.tile(np.array([length, length, values], dtype=np.int64), (nodes, 1))
    table.setflags(write=False)
    return table


def _find_groups(values: Array, width: int) -> list[NDArray[Any]]:
    """Return for each row the positions of its nonzero entries, or of the groups that have one."""
    nonzero = values != 0
    if width > 1:
        nonzero = nonzero.reshape(len(values), -1, width).any(axis=2)
    return [np.flatnonzero(row) for row in nonzero]


# Encoding


def encode_on_device(
    messages: Mapping[str, Message | Packed], rows: Iterable[int], tables: Mapping[str, Table]
) -> dict[str, Message | Packed | EncodedRows]:
    """Return the messages with those of a device encoded there, and copied to the host in one piece.

    `tables` are those of `measure_messages`: forms and lengths are known before anything is encoded.
    """
    on_device = {name: message for name, message in messages.items() if _is_on_device(message)}
    if not on_device:
        return dict(messages)
    from dbo.platform.network import torch_codecs  # imports torch, which is slow

    return {**messages, **torch_codecs.encode_rows(on_device, tuple(rows), tables)}


def encode_row(message: Message | Packed | EncodedRows, row: int) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Return the format of one row of a message and the parts of its body."""
    if isinstance(message, EncodedRows):
        if row in message.errors:
            raise WireError(message.errors[row])
        format_, encoded = message.rows[row]
        return format_, [encoded]
    if isinstance(message, Packed):
        return _encode_packed_row(message.rows[row], message.grid, message.dim, row)
    if _is_on_device(message):
        return encode_row(encode_on_device({"": message}, [row], measure_messages({"": message}))[""], row)
    values = message.values[row]
    code = _CODES.get(values.dtype.str[1:])
    if code is None:
        raise WireError(f"dtype {values.dtype} is not allowed; must be float32 or float64")
    if values.ndim != 1 or values.size >= 1 << 32:
        raise WireError(f"a row of shape {values.shape} is not allowed; must be flat and shorter than 2^32")
    values = values.astype(DTYPES[code], copy=False)
    if message.form == "dense":
        return RowFormat(code, DENSE, 0, values.size, values.size), [values.tobytes()]
    if message.form == "levels":
        body = _encode_levels(message, row, values.dtype)
        return RowFormat(code, LEVELS, message.bits, values.size, values.size), [body]
    if message.form == "sparse":
        return _encode_sparse(message, row, values, code)
    raise WireError(f"unknown form {message.form!r}")


def _encode_sparse(
    message: Message, row: int, values: NDArray[Any], code: int
) -> tuple[RowFormat, list[bytes | memoryview]]:
    check_width(message)
    dim, width, bits = values.size, message.width, wire_bits(message.grid)
    if is_refined(dim, bits):
        return _encode_packed_row(PackedRow.of(values), message.grid, dim, row)
    (at,) = _find_groups(values[None], width)
    form, _ = choose_sparse(Counted(at.size, unary_bytes(at, dim // width)), dim, values.itemsize, bits, width)
    format_ = RowFormat(code, form, bits, dim, dim if form == DENSE else at.size)
    if form == DENSE and not bits:
        # Receivers of a sparse row get +0.0 in whichever form it travels.
        return format_, [_clear_signs(values).tobytes()]
    if width > 1:
        kept = _clear_signs(values.reshape(-1, width)[at])
        return format_, [width.to_bytes(WIDTH_BYTES, "little"), encode_positions(at, dim // width), kept.tobytes()]
    positions = b""
    if form == INDEX:
        positions = at.astype(f"<u{index_width(dim)}").tobytes()
    elif form == BITMAP:
        positions = np.packbits(values != 0, bitorder="little").tobytes()
    elif form == RICE:
        positions = encode_positions(at, dim)
    head, body = _encode_values(values[at], message.grid, row)
    return format_, [head, positions, body]


def _clear_signs(values: NDArray[Any]) -> NDArray[Any]:
    """Turn −0.0 into 0.0; adding 0.0 would raise a floating-point warning for a signalling NaN."""
    return np.where(values != 0, values, values.dtype.type(0))


def _encode_values(
    entries: NDArray[Any], grid: Grid | None, row: int, known: NDArray[Any] | None = None
) -> tuple[bytes, bytes | memoryview]:
    """Return scale and span, and the values or their codes; raise WireError if a value is on no level.

    `known` are the levels of the values, from 1, if the compressor has kept them.
    """
    if grid is None or not entries.size:
        return b"", entries.tobytes()
    head = scale_code(grid.scale[row]) + (bytes([int(grid.span[row])]) if grid.log else b"")
    if known is not None:
        packed = np.zeros(packed_length(entries.size, grid.bits) // 8 + 2, dtype=np.uint64)
        code_kernels().pack_levels(known, entries, grid.bits, packed)
        codes = packed.astype("<u8", copy=False).view(np.uint8)[: packed_length(entries.size, grid.bits)]
        return head, codes.data
    levels = grid.magnitudes(row)
    if np.isnan(grid.scale[row]):
        return head, pack_codes(np.zeros(entries.size, np.uint16), grid.bits)
    magnitude = np.abs(entries)
    level = np.minimum(np.searchsorted(levels, magnitude), levels.size - 1)
    if not np.array_equal(levels[level], magnitude):
        raise WireError(f"a value is on none of the {levels.size} levels of its row")
    return head, pack_codes(level + (entries < 0) * levels.size, grid.bits)


def _encode_packed_row(
    row: PackedRow, grid: Grid | None, dim: int, index: int
) -> tuple[RowFormat, list[bytes | memoryview]]:
    """Encode a row that is packed already: bitmaps and floats are copies."""
    bits = wire_bits(grid)
    code, count = _CODES[row.entries.dtype.str[1:]], row.entries.size
    counted = count_row(row, dim, bits)
    form, _ = choose_sparse(counted, dim, row.entries.itemsize, bits, 1)
    entries = row.entries.astype(DTYPES[code], copy=False)
    if form == DENSE and not bits:
        return RowFormat(code, form, 0, dim, dim), [row.dense(dim).astype(DTYPES[code], copy=False).data.cast("B")]
    positions: list[bytes | memoryview] = []
    if form == BITMAP:
        positions = [row.words.astype("<u8", copy=False).view(np.uint8)[: packed_length(dim, 1)].data]
    elif form == INDEX:
        positions = [row.positions(dim).astype(f"<u{index_width(dim)}").tobytes()]
    elif form == RICE and count:
        positions = [*encode_packed(row, dim, counted.unary)]
    elif form == NUMBER:
        positions = [encode_enumerated(row.positions(dim), dim)]
    elif form >= GOLOMB:
        positions = encode_golomb(row.words, count, form - GOLOMB, counted.golomb)
    format_ = RowFormat(code, form, bits, dim, count)
    if grid is None:
        return format_, [*positions, entries.data.cast("B")]
    head, body = _encode_values(entries, grid, index, row.levels)
    return format_, [head, *positions, body]


def _encode_levels(message: Message, row: int, dtype: np.dtype[Any]) -> bytes:
    bits, (all_levels, units) = message.bits, check_levels(message)
    levels, unit = all_levels[row], units[row : row + 1].astype(dtype)
    if bits == 1:
        if not np.all(np.abs(levels) == 1):
            raise WireError("levels of one bit must be −1 or +1")
        codes = (levels > 0).astype(np.uint16)
    else:
        half = 1 << (bits - 1)
        if levels.size and not (-half <= levels.min() and levels.max() < half):
            raise WireError(f"levels from {levels.min()} to {levels.max()} do not fit into {bits} bits")
        codes = (levels + half).astype("<u2")
    return unit.tobytes() + pack_codes(codes, bits)


def check_levels(message: Message) -> tuple[Array, Array]:
    """Return levels and units of a message; raise WireError if it lacks them or their shapes do not fit."""
    levels, unit = message.levels, message.unit
    if levels is None or unit is None or not 1 <= message.bits <= 16:
        raise WireError(f"levels need integers, a unit and 1 to 16 bits, got bits={message.bits}")
    shapes = tuple(levels.shape), tuple(unit.shape)
    if shapes != (message.shape, message.shape[:1]):
        raise WireError(f"expected levels and unit of shapes {message.shape} and {message.shape[:1]}, got {shapes}")
    return levels, unit


def expect_row(message: Message | Packed) -> RowType:
    """Return the type of a neighbour's row, given the own message of the same step, which `encode_row` accepts."""
    if isinstance(message, Packed):
        return RowType(_CODES_BY_SIZE[message.rows[0].entries.itemsize], message.dim)
    return RowType(_CODES_BY_SIZE[message.values.dtype.itemsize], message.shape[1])
