"""Rows, messages and packets that the tests of the wire format share."""

import struct
from typing import Any
from zlib import crc32

import numpy as np

from dbo.algorithms.api import Compressor, Key, Message
from dbo.platform.network.packet import Header, decode, encode, expect_rows

HEADER = Header(sender=3, epoch=1, round=70000, step=15)
BODY = 49      # where the body of a packet with the single channel "y" starts


def random_rows(nodes: int, dim: int, dtype: Any, seed: int = 0) -> Any:
    """Return rows with zeros among the entries; the first row is zero."""
    rows = np.random.default_rng(seed).standard_normal((nodes, dim)).astype(dtype)
    rows[:, ::7] = 0
    rows[0] = 0
    return rows


def cluster_rows(nodes: int, dim: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """Return rows with a random scale per 20 entries: the large ones are beside each other."""
    random = np.random.default_rng(seed)
    scales = np.repeat(np.exp(random.standard_normal((nodes, -(-dim // 20)))), 20, axis=1)[:, :dim]
    return (scales * random.standard_normal((nodes, dim))).astype(dtype)


def compress(q: Compressor, rows: Any) -> Message:
    return q(rows, Key(0, np.arange(len(rows)), 0), "y")


def encode_one(message: Any, row: int = 0) -> bytes:
    """Return a packet with one message: its record starts at byte 36, its name "y" at 48, its body at 49."""
    return encode(HEADER, {"y": message}, row)


def decode_one(data: bytes, message: Any, packed: Any = (), expand: bool = True) -> Any:
    """Return the row of the channel "y" as a receiver decodes it, who has sent a message like this one."""
    return decode(data, packed, expected=expect_rows({"y": message}), expand=expand).channels["y"]


def seal(data: bytes) -> bytes:
    """Return the packet with a right length and checksum, so that only its content is wrong."""
    data = data[:24] + struct.pack("<Q", len(data) - 36) + data[32:]
    return data[:32] + struct.pack("<I", crc32(data[36:], crc32(data[:32]))) + data[36:]


def set_byte(data: bytes, at: int, value: int) -> bytes:
    return seal(data[:at] + bytes([value]) + data[at + 1 :])
