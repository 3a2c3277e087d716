"""Encode and decode rows on a torch device, in the bytes of `codecs`: only encoded bytes cross between device and host.

`fetch` is the one place where a round copies anything to the host. It is called twice per step at most: for the numbers
and code lengths of values in sparse rows, which decide about forms, and for the bodies of all rows. Received bodies are
copied to the device in one piece and expanded there.

All operations are deterministic on a GPU, and none but `fetch` waits for the device. Bytes are little-endian, as every
GPU stores them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dbo.algorithms.api import Grid, Message, level_tables, level_values, read_scale
from dbo.platform.network.codecs import (
    ENCODED,
    VALUES,
    Counted,
    EncodedRows,
    Table,
    check_levels,
    check_width,
    choose_sparse,
    wire_bits,
)
from dbo.platform.network.decoding import EncodedRow, decode_code, positions_length, read_width
from dbo.platform.network.enumeration import encode_enumerated
from dbo.platform.network.golomb import golomb_length, golomb_parts
from dbo.platform.network.positions import code_length, parameter_limits, rice_parameter
from dbo.platform.network.row_format import (
    BITMAP,
    DENSE,
    DTYPES,
    GOLOMB,
    INDEX,
    LEVELS,
    LOG,
    NUMBER,
    ORDERS,
    RICE,
    WIDTH_BYTES,
    RowFormat,
    WireError,
    grid_length,
    index_width,
    is_refined,
    packed_length,
    values_length,
)

_CODES = {torch.float32: 1, torch.float64: 2}
_FLOATS = {code: dtype for dtype, code in _CODES.items()}
_ALIGNED = 8      # bytes: parts of a buffer start where numbers of any type may
_STATUS = 1       # bytes after the levels of a row: whether they were out of range
_CHOICE = 1       # bytes after these of a row with the form that the device chose
_POSITION = 4     # bytes of a position where the host enumerates them
_FORMS = 64       # above every form
_PARTS = 4        # of a body


def fetch(tensor: Any) -> NDArray[Any]:
    """Copy a tensor to the host."""
    return np.asarray(tensor.cpu().numpy())


# Encoding


def count_rows(messages: Mapping[str, Message]) -> dict[str, tuple[Counted, ...]]:
    """Return the numbers of values of the rows of each channel, and the bytes of their unary parts."""
    counts = fetch(torch.cat([_count(_mark_groups(message), _is_refined(message)) for message in messages.values()]))
    lines = counts.tolist()
    found, start = {}, 0
    for name, message in messages.items():
        end = start + len(message.values)
        found[name] = tuple(Counted(values, packed_length(unary, 1), code) for values, unary, code in lines[start:end])
        start = end
    return found


def _is_refined(message: Message) -> bool:
    return is_refined(message.shape[1], wire_bits(message.grid))


def _mark_groups(message: Message) -> Any:
    """Return a mask of the nonzero entries of each row, or of the groups that have one."""
    check_width(message)
    marked: Any = message.values != 0
    return marked if message.width == 1 else marked.view(len(marked), -1, message.width).any(dim=2)


def _count(marked: Any, refined: bool) -> Any:
    """Return (rows, 3) numbers of marks, the bits of their unary parts, and the bytes of the best Exp-Golomb code."""
    dim = marked.shape[1]
    counts = marked.sum(dim=1)
    shift = torch.zeros_like(counts)
    for limit in parameter_limits(dim):      # numbers, not a tensor: that would be an upload
        shift += counts < limit
    at = torch.arange(1, dim + 1, device=marked.device)
    last = torch.where(marked, at, 0).cummax(dim=1).values
    gaps = at - 1 - torch.nn.functional.pad(last[:, :-1], (1, 0))
    unary = torch.where(marked, (gaps >> shift[:, None]) + 1, 0).sum(dim=1)
    lengths = [
        golomb_length(counts, torch.where(marked, _count_digits(gaps, order), 0).sum(dim=1), order)
        for order in range(ORDERS if refined else 0)
    ]
    best = torch.stack(lengths).amin(dim=0) if lengths else torch.zeros_like(counts)
    return torch.stack([counts, unary, best], dim=1)


def _count_digits(gaps: Any, order: Any) -> Any:
    """Return n of the Exp-Golomb code of each gap, which is below 2^52."""
    return torch.frexp(((gaps >> order) + 1).to(torch.float64)).exponent.to(torch.int64) - 1


def encode_rows(
    messages: Mapping[str, Message], rows: Sequence[int], tables: Mapping[str, Table]
) -> dict[str, EncodedRows]:
    """Encode these rows of the messages; their bodies are copied to the host in one piece."""
    formats: list[tuple[str, int, RowFormat]] = []
    bodies: list[Any] = []
    for name, message in messages.items():
        for row in rows:
            try:
                format_ = _choose_format(message, tables[name][row])
                parts = _encode(message, row, format_, int(tables[name][row, ENCODED]))
            except WireError as error:
                raise WireError(f"channel {name!r}: {error}") from None
            formats.append((name, row, format_))
            bodies.append(torch.cat(parts))
    view = fetch(torch.cat(bodies)).data if bodies else memoryview(b"")
    encoded = {name: EncodedRows({}, {}) for name in messages}
    start = 0
    for (name, row, format_), body in zip(formats, bodies, strict=True):
        end = start + len(body)
        if _is_chosen_there(format_):
            end -= _CHOICE
            format_ = format_._replace(form=view[end])
        if format_.form == LEVELS or format_.bits:
            if view[end - _STATUS]:
                kind = "levels do not fit into" if format_.form == LEVELS else "a value is on no level of"
                encoded[name].errors[row] = f"{kind} {format_.value_bits} bits"
            rest = view[start : end - _STATUS]
            encoded[name].rows[row] = format_, _enumerate(rest, format_) if format_.kind == NUMBER else rest
        else:
            encoded[name].rows[row] = format_, view[start:end]
        start += len(body)
    return encoded


def _is_chosen_there(format_: RowFormat) -> bool:
    """Decide whether the device chooses between the codes of positions: the host knows the length, not the form."""
    return format_.kind in (RICE, GOLOMB) and format_.values > 0 and is_refined(format_.dim, format_.bits)


def _enumerate(body: memoryview, format_: RowFormat) -> memoryview:
    """Return the body with the number of its few positions in place of themselves."""
    start = format_.grid_length
    end = start + _POSITION * format_.values
    number = encode_enumerated(np.frombuffer(body[start:end], "<u4"), format_.dim)
    return memoryview(b"".join([body[:start], number, body[end:]]))


def _choose_format(message: Message, measured: Any) -> RowFormat:
    code, dim, width = _CODES.get(message.values.dtype), message.shape[1], message.width    # type: ignore[call-overload]
    if code is None:
        raise WireError(f"dtype {message.values.dtype} is not allowed; must be float32 or float64")
    if dim >= 1 << 32:
        raise WireError(f"a row of {dim} entries is not allowed; must be shorter than 2^32")
    if message.form not in ("dense", "sparse", "levels"):
        raise WireError(f"unknown form {message.form!r}")
    if message.form == "levels":
        return RowFormat(code, LEVELS, message.bits, dim, dim)
    if message.form == "dense":
        return RowFormat(code, DENSE, 0, dim, dim)
    bits, itemsize = wire_bits(message.grid), DTYPES[code].itemsize
    values, length = int(measured[VALUES]), int(measured[ENCODED])
    head = grid_length(bits)
    if values == dim and length == head + values_length(dim, bits, itemsize):
        return RowFormat(code, DENSE, bits, dim, dim)
    # The measured length tells how long the code of positions is if that is the form, and is that of another otherwise.
    count = values // width
    lowest = packed_length(count, rice_parameter(count, dim // width))
    positions = length - head - WIDTH_BYTES * (width > 1) - values_length(values, bits, itemsize)
    form, _ = choose_sparse(Counted(count, max(positions - lowest, 0), positions), dim, itemsize, bits, width)
    return RowFormat(code, form, bits, dim, count)


def _encode(message: Message, row: int, format_: RowFormat, length: int) -> list[Any]:
    """Return the parts of a body, as bytes on the device."""
    values: Any = message.values[row]
    if format_.form == LEVELS:
        return _encode_levels(message, row)
    if message.form == "dense":
        return [_as_bytes(values)]
    if format_.form == DENSE and not format_.bits:
        # Receivers of a sparse row get +0.0 in whichever form it travels.
        return [_as_bytes(torch.where(values != 0, values, 0.0))]
    marked = _mark_groups(message)[row]
    count, dim = format_.values, len(marked)
    # Entry number n is where the count of marks reaches n.
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=values.device)
    at = torch.searchsorted(marked.cumsum(dim=0, dtype=torch.int32), numbers)
    kept = values.view(-1, message.width)[at].reshape(-1)
    if message.width > 1:
        kept = torch.where(kept != 0, kept, 0.0)
    head, body = _encode_values(kept, message.grid, row) if format_.bits else ([], [_as_bytes(kept)])
    if message.width > 1:
        head = [torch.tensor([*message.width.to_bytes(WIDTH_BYTES, "little")], dtype=torch.uint8, device=values.device)]
    where: list[Any] = []
    if format_.form == BITMAP:
        where = [pack_bits(marked)]
    elif format_.form == INDEX:
        where = [_lowest_bytes(at, index_width(dim))]
    elif format_.form == NUMBER:
        where = [_lowest_bytes(at, _POSITION)]
    elif _is_chosen_there(format_):
        others = sum(len(part) for part in (*head, *body)) - _STATUS
        code, form = _encode_shortest(at, dim, length - others)
        return [*head, code, *body, form]
    elif count and format_.kind == RICE:
        shift = rice_parameter(count, dim)
        others = sum(len(part) for part in (*head, *body)) - _STATUS * bool(format_.bits) + packed_length(count, shift)
        where = _encode_positions(at, shift, length - others)
    return [*head, *where, *body]


def _encode_positions(at: Any, shift: int, unary_length: int) -> list[Any]:
    """Return the unary parts and the lowest bits of a Rice code, given the bytes of the former."""
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    ends = torch.cumsum((gaps >> shift) + 1, dim=0) - 1
    unary = torch.zeros(8 * unary_length, dtype=torch.uint8, device=at.device).scatter_(0, ends, 1)
    return [pack_bits(unary), *([pack_codes(gaps & ((1 << shift) - 1), shift)] if shift else [])]


def _encode_shortest(at: Any, dim: int, length: int) -> tuple[Any, Any]:
    """Return the shortest code of positions, which has so many bytes, and its form: Rice or an Exp-Golomb code.

    The device chooses as the host does; only the length is known here.
    """
    count, rice = len(at), rice_parameter(len(at), dim)
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    lengths = [((gaps >> rice).sum() + count + 7) // 8 + packed_length(count, rice)]
    lengths += [golomb_length(count, _count_digits(gaps, order).sum(), order) for order in range(ORDERS)]
    forms = torch.tensor([RICE, *range(GOLOMB, GOLOMB + ORDERS)], device=at.device)
    form = (torch.stack(lengths) * _FORMS + forms).amin() % _FORMS
    is_rice = form == RICE
    shift = torch.where(is_rice, rice, form - GOLOMB)
    digits = torch.where(is_rice, gaps >> shift, _count_digits(gaps, shift))
    width = torch.where(is_rice, shift, digits + shift)
    rest = gaps - (torch.where(is_rice, digits, (1 << digits.clamp(max=32)) - 1) << shift)
    ends = torch.cumsum(digits + 1, dim=0) - 1
    start = 8 * ((ends[-1] + 8) // 8) + torch.cumsum(width, dim=0) - width
    bits = torch.zeros(8 * length + 1, dtype=torch.uint8, device=at.device)      # the last one takes what is no bit
    bits.scatter_(0, ends, 1)
    for bit in range(dim.bit_length()):
        bits.scatter_(0, torch.where((bit < width) & (rest >> bit & 1 == 1), start + bit, 8 * length), 1)
    return pack_bits(bits[:-1]), form.to(torch.uint8)[None]


def _encode_values(kept: Any, grid: Grid | None, row: int) -> tuple[list[Any], list[Any]]:
    """Return scale and span, and the codes with the status: whether a value is on no level."""
    assert grid is not None
    scale: Any = grid.scale[row : row + 1]
    span: Any = grid.span[row : row + 1]
    levels = level_tables(scale, span, grid.bits, grid.log)[0].to(kept.dtype)
    level = torch.searchsorted(levels, kept.abs()).clamp(max=len(levels) - 1)
    level = torch.where(kept.isnan(), 0, level)
    wrong = ((levels[level] != kept.abs()) & ~kept.isnan()).any()[None].to(torch.uint8)
    head = [_as_bytes(scale)[-2:], *([span.to(torch.uint8)] if grid.log else [])]
    return head, [pack_codes((level + len(levels) * (kept < 0)).to(torch.int32), grid.bits), wrong]


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
        name: torch.stack([_expand(row.format, *(next(views) for _ in range(_PARTS))) for row in rows])
        for name, rows in channels.items()
    }


def _split(row: EncodedRow) -> tuple[memoryview, ...]:
    """Return the parts of a body: the levels of its grid, positions in two parts, values or their codes.

    The second part of positions is empty, except for the lowest bits of a Rice code. The unit of a row of levels is in
    place of its positions. Values of a grid are looked up: the host computes its levels, as the sender did.
    """
    format_, body = row
    dtype, form, count = DTYPES[format_.dtype], format_.form, format_.values
    levels, second = memoryview(b""), 0
    if form == LEVELS:
        return levels, body[: dtype.itemsize], body[:0], body[dtype.itemsize :]
    if not count:
        return levels, body[:0], body[:0], body[:0]
    if format_.bits:
        log = bool(format_.bits & LOG)
        scale = read_scale(body[:2], dtype)
        table = level_values(float(scale), body[2] if log else 0, format_.value_bits, log).astype(dtype)
        levels = np.concatenate([table, -table]).data.cast("B")
        body = body[format_.grid_length :]
    if form == NUMBER:
        positions = decode_code(body, format_).astype("<u4").data.cast("B")
        return levels, positions, body[:0], body[positions_length(format_, body) :]
    if format_.kind == GOLOMB:
        first, second = golomb_parts(body, count, format_.order)
    elif format_.kind == RICE:
        width = read_width(format_, body)
        body = body[WIDTH_BYTES * (width > 1) :]
        first, second = code_length(body, count, format_.dim // width)
    else:
        first = {DENSE: 0, INDEX: count * index_width(format_.dim), BITMAP: packed_length(format_.dim, 1)}[form]
    return levels, body[:first], body[first : first + second], body[first + second :]


def _expand(format_: RowFormat, levels: Any, first: Any, second: Any, values: Any) -> Any:
    """Return the row with this body."""
    dtype, dim, form, count = _FLOATS[format_.dtype], format_.dim, format_.form, format_.values
    if form == LEVELS:
        codes = unpack_codes(values, format_.bits, dim)
        signed = 2 * codes - 1 if format_.bits == 1 else codes - (1 << (format_.bits - 1))
        return signed.to(dtype) * first.view(dtype)
    row = torch.zeros(dim, dtype=dtype, device=values.device)
    if not count:
        return row
    codes = unpack_codes(values, format_.value_bits, count) if format_.bits else None
    values = values.view(dtype) if codes is None else levels.view(dtype)[codes]
    if form == DENSE:
        return values
    if form in (INDEX, NUMBER):
        return row.scatter_(0, _read_unsigned(first, index_width(dim) if form == INDEX else _POSITION), values)
    if form == BITMAP:
        marked = unpack_bits(first)[:dim].to(torch.bool)
        number = (marked.cumsum(dim=0) - 1).clamp(min=0)
        return torch.where(marked, values[number], row)
    if format_.kind == GOLOMB:
        return row.scatter_(0, _decode_golomb(first, second, count, format_.order, dim), values)
    width = len(values) // count
    at = _decode_positions(first, second, count, rice_parameter(count, dim // width))
    grouped = row.view(-1, width)
    return grouped.scatter_(0, at[:, None].expand(-1, width), values.view(-1, width)).view(-1)


def _decode_positions(unary: Any, lowest: Any, count: int, shift: int) -> Any:
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=unary.device)
    ends = torch.searchsorted(unpack_bits(unary).cumsum(dim=0, dtype=torch.int32), numbers)
    gaps = (torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1) << shift
    if shift:
        gaps = gaps | unpack_codes(lowest, shift, count)
    return torch.cumsum(gaps + 1, dim=0) - 1


def _decode_golomb(unary: Any, lowest: Any, count: int, order: int, dim: int) -> Any:
    numbers = torch.arange(1, count + 1, dtype=torch.int32, device=unary.device)
    ends = torch.searchsorted(unpack_bits(unary).cumsum(dim=0, dtype=torch.int32), numbers)
    digits = torch.diff(ends, prepend=ends.new_full((1,), -1)) - 1
    gaps, width = ((1 << digits) - 1) << order, digits + order
    start, stream = torch.cumsum(width, dim=0) - width, unpack_bits(lowest)
    for bit in range(dim.bit_length() if len(stream) else 0):
        place = (start + bit).clamp(max=len(stream) - 1)
        gaps += torch.where(bit < width, stream[place].to(torch.int64) << bit, 0)
    return torch.cumsum(gaps + 1, dim=0) - 1


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
