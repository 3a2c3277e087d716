"""Compare the kernels for wide rows with torch: top-k with its encoding, and decoding.

Rows have 2.03 million float32 entries, the size of a 20 Newsgroups model. They are used in rotation, so that no row is
in a cache. The unit is one in-place pass over such a row. The entropy bound is the minimum for k values and
the choice of k positions among d, 32 k + log₂ C(d, k) bits.

    python benchmarks/kernels.py [--quick]
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import measure
import numpy as np
from threadpoolctl import threadpool_limits

from dbo.algorithms.compression.compressors import count_kept
from dbo.algorithms.gossip import Packed, PackedRow
from dbo.algorithms.kernels import fused, selection
from dbo.algorithms.kernels.lazy import RowSum
from dbo.platform.engine.device import Cpu
from dbo.platform.network import packet as wire

RATIO = 0.2
ROWS = 10


def in_rotation(work: Callable[[int], None], rows: int) -> measure.Timed:
    """Return a function that times one call of `work`, each time with the next row."""
    at = 0

    def timed() -> float:
        nonlocal at
        at = (at + 1) % rows
        start = time.perf_counter()
        work(at)
        return time.perf_counter() - start

    return timed


def entropy_bound(k: int, dim: int) -> float:
    """Return the minimum number of bytes for k float32 values at any k of dim positions."""
    choices = (math.lgamma(dim + 1) - math.lgamma(k + 1) - math.lgamma(dim - k + 1)) / math.log(2)
    return (32 * k + choices) / 8


def main() -> None:
    options = argparse.ArgumentParser(description="Compare the kernels for wide rows with torch and with memory speed.")
    options.add_argument("--quick", action="store_true", help="small and few repeats: does it run?")
    quick = options.parse_args().quick
    import torch

    dim = 200_000 if quick else 2_032_620
    k = count_kept(RATIO, dim)
    torch.set_num_threads(1)
    form = "vector" if selection.fastest_form() is selection.VECTOR else "scalar"
    print(f"top-k {RATIO:.0%} of {dim:,} float32, one thread, {form} form", flush=True)
    Cpu()                     # the engines' memory settings
    fused.compile_kernels("float32")
    random = np.random.default_rng(0)
    rows = [random.standard_normal(dim).astype(np.float32) for _ in range(ROWS)]
    reference = np.zeros_like(rows[0])
    tensors = [torch.from_numpy(row) for row in rows]
    packed: list[PackedRow] = [selection.top_k(row, reference, k) for row in rows]
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
    encoded = packet_length(packed[0], dim, k)
    measure.judge_number("encoded bytes : entropy bound", encoded / entropy_bound(k, dim), most=1.05)


def packet_length(row: PackedRow, dim: int, k: int) -> int:
    """Return the bytes of a packet with this row, header included."""
    message: Any = {"y": Packed((row,), dim, kept=k)}
    return len(wire.encode(wire.Header(sender=0, epoch=0, round=0, step=0), message, 0))


if __name__ == "__main__":
    main()
