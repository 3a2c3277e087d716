"""Pack the bytes and packets of many nodes into a line of nodes.jsonl, and read them back.

`dbo replay` needs those of every node at every evaluation. Above `MAX_PLAIN` nodes a line holds them as text: Base64 of
zlib of the counts' byte planes, little-endian, 64 bits. The high bytes of all counts are nearly the same, so the bytes
that a node has sent take 2 to 3 bytes instead of 12. Packets are fewer, and on a graph the same for all nodes.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

MAX_PLAIN = 1_000               # nodes whose counts are a list of numbers
_MAX_NODES = 1_000_000          # that a text is unpacked to: a foreign file must not fill the memory
_KEYS = "bytes", "packets"


def pack_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line with the counts of many nodes packed."""
    many = {key: line[key] for key in _KEYS if isinstance(line.get(key), list) and len(line[key]) > MAX_PLAIN}
    return {**line, **{key: _pack(counts) for key, counts in many.items()}}


def _pack(counts: Sequence[int]) -> str:
    planes = np.array(counts, dtype="<u8").view(np.uint8).reshape(-1, 8).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


def read_sent(line: Mapping[str, Any], key: Literal["bytes", "packets"] = "bytes") -> NDArray[np.float64] | None:
    """Return what each node has sent, packed or not; None if the line does not have it. ValueError: damage."""
    sent = line.get(key)
    if sent is None:
        return None
    try:
        row = _unpack(sent) if isinstance(sent, str) else np.asarray(sent, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, zlib.error):          # that of base64 is a ValueError
        row = np.array(np.nan)
    if row.ndim != 1 or not np.isfinite(row).all():
        raise ValueError(f"{key} must be a number per node")
    return row


def _unpack(text: str) -> NDArray[np.float64]:
    stream = zlib.decompressobj()
    planes = stream.decompress(base64.b64decode(text, validate=True), 8 * _MAX_NODES)
    if not stream.eof or len(planes) % 8:
        raise ValueError("not the planes of 64 bits")
    counts = np.frombuffer(planes, dtype=np.uint8).reshape(8, -1).T
    return np.ascontiguousarray(counts).view("<u8")[:, 0].astype(np.float64)
