"""Compare the kernels for wide rows with torch: top-k with its encoding, and decoding; measure the wire format.

Rows have 2.03 million float32 entries, the size of a 20 Newsgroups model. They are used in rotation, so that no row is
in a cache. The unit is one in-place pass over such a row. The entropy bound is the minimum for k values and
the choice of k positions among d, b k + log₂ C(d, k) bits with b bits per value. All sizes are of message bodies,
without the headers of packets.

    python benchmarks/kernels.py [--quick]
"""

import argparse
import math
import time
import zlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import measure
import numpy as np
from threadpoolctl import threadpool_limits

from dbo.algorithms.compression.compressors import TopK, count_kept
from dbo.algorithms.gossip import Message, Packed, PackedRow
from dbo.algorithms.kernels import compiled, fused, selection
from dbo.algorithms.kernels.lazy import RowSum, wrap
from dbo.algorithms.rng import Key
from dbo.platform.engine.device import Cpu
from dbo.platform.network import packet as wire
from dbo.platform.network.enumeration import decode_enumerated, encode_enumerated
from dbo.platform.network.golomb import decode_golomb, encode_golomb, measure_golomb
from dbo.platform.network.positions import decode_words, encode_packed, unary_bytes_packed

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

    def select_with(form: Any) -> measure.Timed:
        def select(i: int) -> None:
            with patch.object(selection, "fastest_form", lambda: form):
                selection.top_k(rows[i], reference, k)

        return in_rotation(select, ROWS)

    variants: dict[str, measure.Timed] = {
        "one in-place pass": in_rotation(one_pass, ROWS),
        **{f"select + encode, {name}": select_with(form) for name, form in forms.items()},
        "torch.topk + gather": in_rotation(torch_top_k, ROWS),
        "decode + add": in_rotation(add, ROWS),
        "torch index_add": in_rotation(index_add, ROWS),
    }
    with threadpool_limits(1):
        times = measure.run_in_turn(variants, repeats=3 if quick else 40, warm_up=2)
    measure.show(times)
    for name in forms:
        ours = times[f"select + encode, {name}"]
        measure.judge(f"torch.topk + gather : select + encode, {name}", times["torch.topk + gather"], ours, least=8)
        measure.judge(f"select + encode, {name} : in-place pass", ours, times["one in-place pass"], most=8)
    measure.judge("decode + add : in-place pass", times["decode + add"], times["one in-place pass"], most=3)
    show_sizes(rows[0], dim)
    show_coders(dim, times["one in-place pass"], 3 if quick else 40)
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


def cluster(dim: int, seed: int) -> Any:
    """Return a row whose entries have a random scale per 20 of them, as features of a model with 20 classes have."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.standard_normal(-(-dim // 20)))
    return (np.repeat(scales, 20)[:dim] * random.standard_normal(dim)).astype(np.float32)


def code_positions(row: PackedRow, dim: int) -> dict[str, float]:
    """Return the bytes of the positions of a row's marks, by coder."""
    count, gaps = row.entries.size, np.diff(row.positions(dim), prepend=-1) - 1
    found = np.bincount(gaps)
    share = found[found > 0] / count
    low = max(0, int(math.log2(dim / count)))
    return {
        "log2 C(d, k)": entropy_bound(count, dim, 0),
        "entropy of gaps": float(-count * np.sum(share * np.log2(share))) / 8,
        "Rice": sum(map(len, encode_packed(row, dim, unary_bytes_packed(row, dim)))),
        "Exp-Golomb": measure_golomb(row)[0],
        "Elias-Fano": math.ceil((count * (low + 1) + (dim >> low)) / 8),
        "bitmap": math.ceil(dim / 8),
        "indices": 4 * count,
    }


def show_coders(dim: int, one_pass: measure.Times, repeats: int) -> None:
    """Compare coders of positions: bits per value, and encoding with decoding in in-place passes where implemented.

    The entropy of the gaps is what an ideal arithmetic coder of single gaps takes, with a model that costs nothing.
    """
    print("  positions, bits per value", flush=True)
    kinds: dict[str, list[PackedRow]] = {}
    for kind, make in (
        ("random", lambda seed: np.random.default_rng(seed).standard_normal(dim).astype(np.float32)),
        ("clustered", lambda seed: cluster(dim, seed)),
    ):
        for ratio in (0.2, 0.05, 0.03, 0.01, 0.001):
            made = [make(seed) for seed in range(ROWS if ratio == 0.03 else 1)]
            packed = [selection.top_k(row, np.zeros_like(row), count_kept(ratio, dim))[0] for row in made]
            sizes = code_positions(packed[0], dim)
            bits = ", ".join(f"{name} {8 * size / packed[0].entries.size:.2f}" for name, size in sizes.items())
            print(f"  {kind}, {ratio:g}: {bits}", flush=True)
            if ratio == 0.03:
                kinds[kind] = packed

    def rice(row: PackedRow) -> None:
        code = b"".join(encode_packed(row, dim, unary_bytes_packed(row, dim)))
        decode_words(memoryview(code), row.entries.size, dim)

    def golomb(row: PackedRow) -> None:
        count, (length, order) = row.entries.size, measure_golomb(row)
        decode_golomb(memoryview(b"".join(encode_golomb(row.words, count, order, length))), count, dim, order)

    def bitmap(row: PackedRow) -> None:
        words = np.frombuffer(row.words.tobytes(), np.uint64)
        assert int(np.bitwise_count(words).sum()) == row.entries.size
        words.copy()

    def indices(row: PackedRow) -> None:
        at = np.frombuffer(row.positions(dim).astype("<u4").tobytes(), "<u4")
        assert np.all(at[1:] > at[:-1])
        marked = np.zeros(dim, np.bool_)
        marked[at] = True
        np.packbits(marked, bitorder="little")

    def each(coder: Callable[[PackedRow], None], packed: list[PackedRow]) -> measure.Timed:
        return in_rotation(lambda i: coder(packed[i]), ROWS)

    coders = {"Rice": rice, "Exp-Golomb": golomb, "bitmap": bitmap, "indices": indices}
    variants = {
        f"positions of 3 %, {kind}: {name}": each(coder, packed)
        for kind, packed in kinds.items() for name, coder in coders.items()
    }
    few = np.sort(np.random.default_rng(0).choice(100_000, 100, replace=False))

    def enumerate_few(_: int) -> None:
        decode_enumerated(memoryview(encode_enumerated(few, 100_000)), 100, 100_000)

    variants["100 of 100,000 positions: number of the set"] = in_rotation(enumerate_few, 1)
    with threadpool_limits(1):
        times = measure.run_in_turn(variants, repeats, warm_up=2)
    for name, found in times.items():
        print(f"  {name:<48}{found} = {found.middle / one_pass.middle:.2f} in-place passes", flush=True)


def show_wire(rows: list[Any], one_pass: measure.Times, repeats: int) -> None:
    """Compare encoding and decoding of 3 % with the same as a bitmap of float32 values, in in-place passes."""
    dim, nodes = rows[0].size, np.arange(1)
    packed = [selection.top_k(row, np.zeros_like(row), count_kept(0.03, dim))[0] for row in rows]
    clustered = [cluster(dim, seed) for seed in range(ROWS)]

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

    def code(made: list[Any], bits: int | None) -> measure.Timed:
        messages: list[dict[str, Message | Packed]] = [
            {"y": TopK(ratio=0.03, bits=bits)(wrap(row[None]), Key(0, nodes, 0), "y")} for row in made]
        expected = wire.expect_rows(messages[0])

        def work(i: int) -> None:
            wire.decode(wire.encode(HEADER, messages[i], 0), {"y"}, expected=expected)

        return in_rotation(work, ROWS)

    variants = {
        f"3 %, {kind}: {bits or 32} bits": code(made, bits)
        for kind, made in (("random", rows), ("clustered", clustered)) for bits in (None, 4, 8, 16)
    }
    with threadpool_limits(1):
        times = measure.run_in_turn({"3 %: bitmap": in_rotation(bitmap, ROWS)} | variants, repeats, warm_up=2)
    measure.show(times)
    for name in variants:
        extra = (times[name].middle - times["3 %: bitmap"].middle) / one_pass.middle
        measure.judge_number(f"encode + decode beyond a bitmap, {name} : in-place pass", extra, most=3)


if __name__ == "__main__":
    main()
