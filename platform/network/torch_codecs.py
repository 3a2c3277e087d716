"""Encode and decode rows on a torch device, in the bytes of `codecs`: only encoded bytes cross between device and host.

`fetch` is the one place where a round copies anything to the host. It is called twice per step at most: for the numbers
of values in sparse rows, which the heads of the records contain, and for the bodies of all rows. Received bodies are
copied to the device in one piece and expanded there.

All operations are deterministic on a GPU, and none but `fetch` waits for the device. Bytes are little-endian, as every
GPU stores them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dbo.algorithms.api import Message
from dbo.platform.network.codecs import VALUES, EncodedRow, EncodedRows, Table, check_levels
from dbo.platform.network.row_format import (
    BITMAP,
    DENSE,
    DTYPES,
    INDEX,
    LEVELS,
    RowFormat,
    WireError,
    index_width,
    packed_length,
    shortest_form,
)

_CODES = {torch.float32: 1, torch.float64: 2}
_FLOATS = {code: dtype for dtype, code in _CODES.items()}
_ALIGNED = 8      # bytes: parts of a buffer start where numbers of any type may
_STATUS = 1       # bytes after the levels of a row: whether they were out of range


def fetch(tensor: Any) -> NDArray[Any]:
    """Copy a tensor to the host."""
    return np.asarray(tensor.cpu().numpy())


# Encoding


def count_nonzeros(rows: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the number of nonzero entries of each row of each channel."""
    counts = fetch(torch.stack([torch.count_nonzero(values, dim=1) for values in rows.values()]))
    return {name: tuple(row) for name, row in zip(rows, counts.tolist(), strict=True)}


def encode_rows(
    messages: Mapping[str, Message], rows: Sequence[int], tables: Mapping[str, Table]
) -> dict[str, EncodedRows]:
    """Encode these rows of the messages; their bodies are copied to the host in one piece."""
    formats: list[tuple[str, int, RowFormat]] = []
    bodies: list[Any] = []
    for name, message in messages.items():
        for row in rows:
            try:
                format_ = _choose_format(message, int(tables[name][row, VALUES]))
                parts = _encode(message, row, format_)
            except WireError as error:
                raise WireError(f"channel {name!r}: {error}") from None
            formats.append((name, row, format_))
            bodies.append(torch.cat(parts))
    view = fetch(torch.cat(bodies)).data if bodies else memoryview(b"")
    encoded = {name: EncodedRows({}, {}) for name in messages}
    start = 0
    for (name, row, format_), body in zip(formats, bodies, strict=True):
        end = start + len(body)
        if format_.form == LEVELS:
            if view[end - _STATUS]:
                encoded[name].errors[row] = f"levels do not fit into {format_.bits} bits"
            encoded[name].rows[row] = format_, view[start : end - _STATUS]
        else:
            encoded[name].rows[row] = format_, view[start:end]
        start = end
    return encoded


def _choose_format(message: Message, values: int) -> RowFormat:
    code, dim = _CODES.get(message.values.dtype), message.shape[1]       # type: ignore[call-overload]
    if code is None:
        raise WireError(f"dtype {message.values.dtype} is not allowed; must be float32 or float64")
    if dim >= 1 << 32:
        raise WireError(f"a row of {dim} entries is not allowed; must be shorter than 2^32")
    if message.form not in ("dense", "sparse", "levels"):
        raise WireError(f"unknown form {message.form!r}")
    if message.form == "levels":
        return RowFormat(code, LEVELS, message.bits, dim, dim)
    form = DENSE if message.form == "dense" else shortest_form(values, dim, DTYPES[code].itemsize)
    return RowFormat(code, form, 0, dim, values)


def _encode(message: Message, row: int, format_: RowFormat) -> list[Any]:
    """Return the parts of a body, as bytes on the device."""
    values: Any = message.values[row]
    if format_.form == LEVELS:
        return _encode_levels(message, row)
    if message.form == "dense":
        return [_as_bytes(values)]
    marked = values != 0
    if format_.form == DENSE:
        # Receivers of a sparse row get +0.0 in whichever form it travels.
        return [_as_bytes(torch.where(marked, values, 0.0))]
    # Entry number n is where the count of marks reaches n.
    numbers = torch.arange(1, format_.values + 1, dtype=torch.int32, device=values.device)
    at = torch.searchsorted(marked.cumsum(dim=0, dtype=torch.int32), numbers)
    where = pack_bits(marked) if format_.form == BITMAP else _lowest_bytes(at, index_width(format_.dim))
    return [where, _as_bytes(values[at])]


def _encode_levels(message: Message, row: int) -> list[Any]:
    bits, (all_levels, units) = message.bits, check_levels(message)
    levels: Any = all_levels[row]
    unit: Any = units[row : row + 1]
    if bits == 1:
        codes, wrong = levels > 0, levels.abs() != 1
    else:
        codes = levels.to(torch.int32) + (1 << (bits - 1))
        wrong = (codes < 0) | (codes >= 1 << bits)
    return [_as_bytes(unit.to(message.values.dtype)), pack_codes(codes, bits), wrong.any()[None].to(torch.uint8)]


def pack_bits(bits: Any) -> Any:
    """Pack zeros and ones, eight to a byte and the first lowest."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def pack_codes(codes: Any, bits: int) -> Any:
    """Pack the lowest `bits` bits of each code, one after the other, the lowest first."""
    if bits == 1:
        return pack_bits(codes)
    if bits % 8 == 0:
        return _lowest_bytes(codes, bits // 8)
    planes = torch.stack([(codes >> bit & 1).to(torch.uint8) for bit in range(bits)], dim=1)
    return pack_bits(planes.view(-1))


def _as_bytes(values: Any) -> Any:
    return values.contiguous().view(torch.uint8)


def _lowest_bytes(integers: Any, width: int) -> Any:
    """Return the lowest `width` bytes of each integer."""
    return _as_bytes(integers).view(-1, integers.element_size())[:, :width].reshape(-1)


# Decoding


def decode_rows(channels: Mapping[str, Sequence[EncodedRow]], device: str) -> dict[str, Any]:
    """Return (rows, dim) of each channel, on the device; all bodies are copied there in one piece."""
    parts = [part for rows in channels.values() for row in rows for part in _split(row)]
    ends = np.cumsum([-(-len(part) // _ALIGNED) * _ALIGNED for part in parts], dtype=np.int64).tolist()
    buffer = np.zeros(ends[-1] if ends else 0, dtype=np.uint8)
    starts = [0, *ends[:-1]]
    for start, part in zip(starts, parts, strict=True):
        buffer[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
    uploaded = torch.as_tensor(buffer, device=device)
    views = iter([uploaded[start : start + len(part)] for start, part in zip(starts, parts, strict=True)])
    return {
        name: torch.stack([_expand(row.format, next(views), next(views)) for row in rows])
        for name, rows in channels.items()
    }


def _split(row: EncodedRow) -> tuple[memoryview, memoryview]:
    """Return the two parts of a body: positions, marks or the unit, then values or levels."""
    format_, body = row
    dtype, form = DTYPES[format_.dtype], format_.form
    first = {
        DENSE: 0, INDEX: format_.values * index_width(format_.dim), BITMAP: packed_length(format_.dim, 1),
        LEVELS: dtype.itemsize,
    }[form]
    return body[:first], body[first:]


def _expand(format_: RowFormat, first: Any, second: Any) -> Any:
    """Return the row with this body."""
    dtype, dim = _FLOATS[format_.dtype], format_.dim
    if format_.form == LEVELS:
        codes = unpack_codes(second, format_.bits, dim)
        levels = 2 * codes - 1 if format_.bits == 1 else codes - (1 << (format_.bits - 1))
        return levels.to(dtype) * first.view(dtype)
    row = torch.zeros(dim, dtype=dtype, device=second.device)
    if not format_.values:
        return row
    values = second.view(dtype)
    if format_.form == DENSE:
        return values
    if format_.form == INDEX:
        return row.scatter_(0, _read_unsigned(first, index_width(dim)), values)
    marked = unpack_bits(first)[:dim].to(torch.bool)
    number = (marked.cumsum(dim=0) - 1).clamp(min=0)
    return torch.where(marked, values[number], row)


def unpack_bits(packed: Any) -> Any:
    """Reverse `pack_bits`; the last byte gives eight bits too."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).view(-1)


def unpack_codes(packed: Any, bits: int, dim: int) -> Any:
    """Reverse `pack_codes`."""
    if bits % 8 == 0:
        return _read_unsigned(packed, bits // 8).to(torch.int32)
    planes = unpack_bits(packed)[: dim * bits].view(dim, bits).to(torch.int32)
    return (planes << torch.arange(bits, dtype=torch.int32, device=packed.device)).sum(dim=1, dtype=torch.int32)


def _read_unsigned(packed: Any, width: int) -> Any:
    """Return the little-endian integers of `width` bytes each."""
    columns = packed.view(-1, width).to(torch.int64)
    return (columns << 8 * torch.arange(width, device=packed.device)).sum(dim=1)
