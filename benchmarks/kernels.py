"""Compare the kernels for wide rows with torch: top-k with its encoding, and decoding; measure the wire format.

Rows have 2.03 million float32 entries, the size of a 20 Newsgroups model. They are used in rotation, so that no row is
in a cache. The unit is one in-place pass over such a row. The entropy bound is the minimum for k values and
the choice of k positions among d, b k + log₂ C(d, k) bits with b bits per value.

    python benchmarks/kernels.py [--quick]
"""

import argparse
import math
import time
import zlib
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
from threadpoolctl import threadpool_limits

from dbo.algorithms.compression.compressors import TopK, count_kept
from dbo.algorithms.gossip import Packed, PackedRow
from dbo.algorithms.kernels import compiled, fused, selection
from dbo.algorithms.kernels.lazy import RowSum, wrap
from dbo.algorithms.rng import Key
from dbo.platform.engine.device import Cpu
from dbo.platform.network import packet as wire

RATIO = 0.2
ROWS = 10


def in_rotation(work: Callable[[int], None], rows: int) -> measure.Timed:
    """Return a function that times one call of `work`, each time with the next row.

    It takes processor time: on a busy machine a long call is interrupted more often than a short one.
    """
    at = 0

    def timed() -> float:
        nonlocal at
        at = (at + 1) % rows
        start = time.process_time()
        work(at)
        return time.process_time() - start

    return timed


def entropy_bound(k: int, dim: int, bits: int = 32) -> float:
    """Return the minimum number of bytes for k values of so many bits at any k of dim positions."""
    choices = (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)
    return (bits * k + choices) / 8


def main() -> None:
    options = argparse.ArgumentParser(description="Compare the kernels for wide rows with torch and with memory speed.")
    options.add_argument("--quick", action="store_true", help="small and few repeats: does it run?")
    quick = options.parse_args().quick
    import torch

    dim = 200_000 if quick else 2_032_620
    k = count_kept(RATIO, dim)
    torch.set_num_threads(1)
    processor, features = compiled.find_processor()
    forms = selection.usable_forms(features)
    print(
        f"top-k {RATIO:.0%} of {dim:,} float32, one thread, {processor}: forms {', '.join(forms)}, the first is used",
        flush=True,
    )
    Cpu()                     # the engines' memory settings
    fused.compile_kernels("float32")
    random = np.random.default_rng(0)
    rows = [random.standard_normal(dim).astype(np.float32) for _ in range(ROWS)]
    reference = np.zeros_like(rows[0])
    tensors = [torch.from_numpy(row) for row in rows]
    packed: list[PackedRow] = [selection.top_k(row, reference, k)[0] for row in rows]
    for row, found in zip(rows[:2], packed, strict=False):
        positions = torch.topk(torch.from_numpy(np.abs(row)), k).indices.sort().values.numpy()
        assert np.array_equal(positions, found.positions(dim)), "both must select the same entries"
    total = np.zeros((1, dim), dtype=np.float32)

    def one_pass(i: int) -> None:
        np.multiply(rows[i], np.float32(-1), out=rows[i])

    def torch_top_k(i: int) -> None:
        indices = torch.topk(tensors[i].abs(), k, sorted=False).indices
        tensors[i][indices]

    def add(i: int) -> None:
        fused.evaluate([(total, [(1.0, total), (1.0, RowSum((((0.5, packed[i]),),), dim, total.dtype))])])

    target = torch.zeros(dim)
    indices = [torch.from_numpy(found.positions(dim)) for found in packed]

    def index_add(i: int) -> None:
        target.index_add_(0, indices[i], tensors[i][indices[i]], alpha=0.5)

    def select(i: int) -> None:
        selection.top_k(rows[i], reference, k)

    variants: dict[str, measure.Timed] = {
        "one in-place pass": in_rotation(one_pass, ROWS),
        "select + encode": in_rotation(select, ROWS),
        "torch.topk + gather": in_rotation(torch_top_k, ROWS),
        "decode + add": in_rotation(add, ROWS),
        "torch index_add": in_rotation(index_add, ROWS),
    }
    with threadpool_limits(1):
        times = measure.run_in_turn(variants, repeats=3 if quick else 40, warm_up=2)
    measure.show(times)
    ours = times["select + encode"]
    measure.judge("torch.topk + gather : select + encode", times["torch.topk + gather"], ours, least=8)
    measure.judge("select + encode : in-place pass", ours, times["one in-place pass"], most=8)
    measure.judge("decode + add : in-place pass", times["decode + add"], times["one in-place pass"], most=3)
    show_sizes(rows[0], dim)
    show_wire(rows, times["one in-place pass"], 3 if quick else 40)


HEADER = wire.Header(sender=0, epoch=0, round=0, step=0)


def show_sizes(row: Any, dim: int) -> None:
    """Compare bodies with the entropy bound."""
    for bits in (None, 16, 8, 4, 2):
        for ratio in (0.2, 0.05, 0.01, 0.001):
            message = TopK(ratio=ratio, bits=bits)(wrap(row[None]), Key(0, np.arange(1), 0), "y")
            assert isinstance(message, Packed)
            sizes = wire.measure({"y": message})
            assert len(wire.encode(HEADER, {"y": message}, 0)) == sizes.total[0]
            share = sizes.bodies["y"][0] / entropy_bound(message.rows[0].entries.size, dim, bits or 32)
            measure.judge_number(f"encoded bytes : entropy bound, {ratio:g}, {bits or 32} bits", share, most=1.03)


def show_wire(rows: list[Any], one_pass: measure.Times, repeats: int) -> None:
    """Compare encoding and decoding of 3 % as a Rice code with the same as a bitmap, in in-place passes."""
    dim = rows[0].size
    packed = [selection.top_k(row, np.zeros_like(row), count_kept(0.03, dim))[0] for row in rows]
    messages: list[Any] = [{"y": Packed((row,), dim, kept=row.entries.size)} for row in packed]
    expected = wire.expect_rows(messages[0])

    def rice(i: int) -> None:
        wire.decode(wire.encode(HEADER, messages[i], 0), {"y"}, expected=expected)

    def bitmap(i: int) -> None:
        row = packed[i]
        data = b"".join([row.words.view(np.uint8).tobytes(), row.entries.tobytes()])
        checksum = zlib.crc32(data)
        words = np.frombuffer(data, np.uint64, row.words.size)
        entries = np.frombuffer(data, np.float32, -1, row.words.nbytes)
        assert int(np.bitwise_count(words).sum()) == row.entries.size
        assert zlib.crc32(data) == checksum
        assert (entries != 0).all()
        PackedRow(words.copy(), entries.copy())

    with threadpool_limits(1):
        times = measure.run_in_turn(
            {"3 %: rice": in_rotation(rice, ROWS), "3 %: bitmap": in_rotation(bitmap, ROWS)}, repeats=repeats, warm_up=2
        )
    measure.show(times)
    extra = (times["3 %: rice"].middle - times["3 %: bitmap"].middle) / one_pass.middle
    measure.judge_number("encode + decode beyond a bitmap : in-place pass", extra, most=3)


if __name__ == "__main__":
    main()
