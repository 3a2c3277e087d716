"""Products with some rows of a matrix, which are read where they are: the first layer of a perceptron on mini-batches.

BLAS needs the rows of a batch below each other, so they are copied first. It then copies them again, with the weights,
into an order of its own, which pays for products much larger than those of a batch. Here the sums of a few rows stay in
registers while the weights, which fit into the L2 cache, pass by. The rows that come next are requested meanwhile.

A sum has its terms in the order of the entries, whatever rows are computed with it: no bit depends on the other rows.
This file holds loops and nothing else. They need the 32 registers of AVX-512.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from dbo.tasks.arrays import Array
from dbo.tasks.kernels.compiling import broadcast, compiled, find_item, has_avx512, intrinsic, ir, llvm, prefetch

_REGISTER = 64                             # bytes
_ROWS = {6: 4, 4: 6, 2: 8, 1: 8}           # registers of a row's sums → rows whose sums are computed together
_AHEAD = 128                               # bytes: how far the rows of a transposed product are requested


def suits(widths: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Decide whether the loops can compute products with so many columns, and the processor has the registers."""
    return dtype.char in "fd" and not any(width * dtype.itemsize % _REGISTER for width in widths) and has_avx512()


class _Tile:
    """Write the code for a few rows and columns of a product, whose sums stay in registers."""

    def __init__(self, context: Any, builder: Any, dtype: Any, registers: int) -> None:
        self.context, self.builder, self.registers, self.rows = context, builder, registers, _ROWS[registers]
        self.itemsize = dtype.bitwidth // 8
        self.vector = ir.VectorType(context.get_value_type(dtype), _REGISTER // self.itemsize)
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fma.v{self.vector.count}f{dtype.bitwidth}"
        self.multiply_add = llvm.get_or_insert_function(builder.module, kind, name)

    def number(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def find(self, kind: Any, array: Any, *at: Any) -> Any:
        return find_item(self.context, self.builder, kind, array, *at)

    def length(self, kind: Any, array: Any, axis: int) -> Any:
        return self.builder.extract_value(self.context.make_array(kind)(self.context, self.builder, array).shape, axis)

    def load(self, address: Any) -> list[Any]:
        """Load the registers from an address on."""
        return [self.builder.load(place, align=self.itemsize) for place in self.find_registers(address)]

    def store(self, values: list[Any], address: Any) -> None:
        for value, place in zip(values, self.find_registers(address), strict=True):
            self.builder.store(value, place, align=self.itemsize)

    def find_registers(self, address: Any) -> list[Any]:
        """Return the addresses of the registers from an address on."""
        at = (self.number(part * self.vector.count) for part in range(self.registers))
        return [self.builder.bitcast(self.builder.gep(address, [each]), self.vector.as_pointer()) for each in at]

    def start(self, count: int, values: list[Any]) -> list[list[Any]]:
        """Start the sums of so many rows at these values."""
        totals = [[llvm.alloca_once(self.builder, self.vector) for _ in values] for _ in range(count)]
        for row in totals:
            for total, value in zip(row, values, strict=True):
                self.builder.store(value, total)
        return totals

    def add(self, totals: list[Any], factor: Any, others: list[Any]) -> None:
        """Add a number times these registers to the sums of a row."""
        factors = broadcast(self.builder, factor, self.vector)
        for total, other in zip(totals, others, strict=True):
            value = self.builder.call(self.multiply_add, [factors, other, self.builder.load(total)])
            self.builder.store(value, total)

    def read(self, totals: list[Any]) -> list[Any]:
        return [self.builder.load(total) for total in totals]

    def cut(self, rows: Any, write: Callable[[Any, int], None]) -> None:
        """Write the code for all rows: several at a time, and the rest one by one."""
        step = self.number(self.rows)
        whole = self.builder.mul(self.builder.sdiv(rows, step), step)
        with llvm.for_range_slice(self.builder, self.number(0), whole, step) as (at, _):
            write(at, self.rows)
        with llvm.for_range(self.builder, rows, start=whole) as loop:
            write(loop.index, 1)


@intrinsic
def _multiply_columns(
    typing: Any, registers: Any, rows: Any, at: Any, w: Any, bias: Any, c: Any, least: Any, out: Any, to: Any
) -> Any:
    """Write max(rows[at[i]] · w + bias, least) to out[to[i]], for all i and the columns of `registers` from c on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, numbers, weights, start, c, lowest, target, places = arguments
        tile = _Tile(context, builder, rows.dtype, registers.literal_value)
        count = tile.length(at, numbers, 0)
        last = builder.sub(count, tile.number(1))

        def find_row(i: Any) -> Any:
            return tile.find(rows, source, builder.load(tile.find(at, numbers, i)), tile.number(0))

        def find_later(i: Any) -> Any:
            return find_row(builder.select(builder.icmp_signed("<", i, last), i, last))

        def write(first: Any, few: int) -> None:
            given = [find_row(builder.add(first, tile.number(r))) for r in range(few)]
            later = [find_later(builder.add(first, tile.number(r + few))) for r in range(few)]
            totals = tile.start(few, tile.load(tile.find(bias, start, c)))
            with llvm.for_range(builder, tile.length(rows, source, 1)) as loop:
                others = tile.load(tile.find(w, weights, loop.index, c))
                for row, following, total in zip(given, later, totals, strict=True):
                    prefetch(builder, builder.gep(following, [loop.index]))
                    tile.add(total, builder.load(builder.gep(row, [loop.index])), others)
            bound = broadcast(builder, lowest, tile.vector)
            for r, total in enumerate(totals):
                # A comparison with NaN is false: NaN stays.
                results = [
                    builder.select(builder.fcmp_ordered("<", value, bound), bound, value) for value in tile.read(total)]
                number = builder.load(tile.find(to, places, builder.add(first, tile.number(r))))
                tile.store(results, tile.find(out, target, number, c))

        tile.cut(count, write)
        return context.get_dummy_value()

    return types.void(registers, rows, at, w, bias, types.int64, rows.dtype, out, to), generate


@intrinsic
def _multiply_transposed_columns(
    typing: Any, registers: Any, rows: Any, at: Any, d: Any, c: Any, out: Any
) -> Any:
    """Write Σ_i rows[at[i], j] d[i] to out[j], for all j and the columns of `registers` from c on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, numbers, factors, c, target = arguments
        tile = _Tile(context, builder, rows.dtype, registers.literal_value)
        zeros = [ir.Constant(tile.vector, None)] * tile.registers
        ahead = tile.number(_AHEAD // tile.itemsize)

        def write(first: Any, few: int) -> None:
            totals = tile.start(few, zeros)
            with llvm.for_range(builder, tile.length(at, numbers, 0)) as loop:
                row = tile.find(rows, source, builder.load(tile.find(at, numbers, loop.index)), first)
                prefetch(builder, builder.gep(row, [ahead]), level=2)      # d fills most of L1
                others = tile.load(tile.find(d, factors, loop.index, c))
                for r, total in enumerate(totals):
                    tile.add(total, builder.load(builder.gep(row, [tile.number(r)])), others)
            for r, total in enumerate(totals):
                tile.store(tile.read(total), tile.find(out, target, builder.add(first, tile.number(r)), c))

        tile.cut(tile.length(rows, source, 1), write)
        return context.get_dummy_value()

    return types.void(registers, rows, at, d, types.int64, out), generate


@compiled
def _multiply_node(rows: Array, at: Array, w: Array, bias: Array, least: float, out: Array, to: Array) -> None:
    """Write max(rows[at] · w + bias, least) to out[to]."""
    c, width, lanes = 0, out.shape[1], _REGISTER // rows.itemsize
    while c + 6 * lanes <= width:
        _multiply_columns(6, rows, at, w, bias, c, least, out, to)
        c += 6 * lanes
    while c + 4 * lanes <= width:
        _multiply_columns(4, rows, at, w, bias, c, least, out, to)
        c += 4 * lanes
    while c + 2 * lanes <= width:
        _multiply_columns(2, rows, at, w, bias, c, least, out, to)
        c += 2 * lanes
    while c + lanes <= width:
        _multiply_columns(1, rows, at, w, bias, c, least, out, to)
        c += lanes


@compiled
def multiply(
    rows: Array, at: Array, x: Array, first: int, least: float, out: Array, to: Array, start: int, stop: int
) -> None:
    """Write a layer of a perceptron, max(rows[at[i]] · W_i + b_i, least), to out[to[i]], for nodes start ≤ i < stop.

    W_i and b_i are in x[i] from `first` on, one behind the other; at[i] and to[i] are numbers of rows.
    """
    inputs, width = rows.shape[1], out.shape[1]
    for i in range(start, stop):
        end = first + inputs * width
        w, bias = x[i, first:end].reshape(inputs, width), x[i, end : end + width]
        _multiply_node(rows, at[i], w, bias, least, out, to[i])


@compiled
def multiply_back(d: Array, at: Array, x: Array, first: int, out: Array, start: int, stop: int) -> None:
    """Write d[at[i]] W_iᵀ to out[at[i]], for nodes start ≤ i < stop; W_i is in x[i] from `first` on."""
    width, inputs = d.shape[1], out.shape[1]
    turned, none = np.empty((width, inputs), d.dtype), np.zeros(inputs, d.dtype)
    for i in range(start, stop):
        w = x[i, first : first + inputs * width].reshape(inputs, width)
        for c in range(width):
            for j in range(inputs):
                turned[c, j] = w[j, c]
        _multiply_node(d, at[i], turned, none, d.dtype.type(-np.inf), out, at[i])


@compiled
def multiply_transposed(rows: Array, at: Array, d: Array, out: Array, first: int, start: int, stop: int) -> None:
    """Write the gradient of a layer to out[i] from `first` on, for start ≤ i < stop: rows[at[i]]ᵀ d_i, then Σ d_i.

    d has the rows of all nodes below each other, and `out` the layout of x.
    """
    inputs, width, lanes, size = rows.shape[1], d.shape[1], _REGISTER // rows.itemsize, at.shape[1]
    for i in range(start, stop):
        c, own, end = 0, d[i * size : (i + 1) * size], first + inputs * width
        product, total = out[i, first:end].reshape(inputs, width), out[i, end : end + width]
        while c + 6 * lanes <= width:
            _multiply_transposed_columns(6, rows, at[i], own, c, product)
            c += 6 * lanes
        while c + 4 * lanes <= width:
            _multiply_transposed_columns(4, rows, at[i], own, c, product)
            c += 4 * lanes
        while c + 2 * lanes <= width:
            _multiply_transposed_columns(2, rows, at[i], own, c, product)
            c += 2 * lanes
        while c + lanes <= width:
            _multiply_transposed_columns(1, rows, at[i], own, c, product)
            c += lanes
        total[:] = 0
        for k in range(size):
            for j in range(width):
                total[j] += own[k, j]


@compiled
def drop_inactive(d: Array, activations: Array, out: Array) -> None:
    """Write d where activations are positive, 0 elsewhere: the derivative of relu; all contiguous, of one size."""
    given, known, result = d.reshape(-1), activations.reshape(-1), out.reshape(-1)
    one, zero = given.dtype.type(1), given.dtype.type(0)
    for i in range(result.size):
        result[i] = given[i] * (one if known[i] > zero else zero)      # NaN stays


def compile_products(dtype: str) -> None:
    """Compile the loops for floats of one type, or load them from the cache."""
    rows, at, x = np.ones((1, 1), dtype), np.zeros((1, 1), np.int64), np.ones((1, 2), dtype)
    multiply(rows, at, x, 0, rows.dtype.type(0), rows.copy(), at, 0, 1)
    multiply_transposed(rows, at, rows, x, 0, 0, 1)
    multiply_back(rows, at, x, 0, rows.copy(), 0, 1)
    drop_inactive(rows, rows, rows.copy())
