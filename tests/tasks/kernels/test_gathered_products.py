"""Products with rows that are read where they are: those of NumPy, and no bit depends on the other rows."""

from typing import Any

import numpy as np
import pytest

from dbo.tasks.kernels import gathered_products
from dbo.tasks.kernels.compiling import has_avx512

Array = Any
pytestmark = pytest.mark.skipif(not has_avx512(), reason="needs AVX-512")
NODES, INPUTS, SAMPLES = 3, 37, 50
LANES = {"float32": 16, "float64": 8}
CASES = pytest.mark.parametrize(
    ("dtype", "registers", "size"),
    [
        ("float32", 1, 5), ("float32", 6, 12), ("float32", 13, 9),
        ("float64", 2, 7), ("float64", 7, 1), ("float64", 4, 64),
    ],
)


def make_layer(dtype: str, registers: int, size: int) -> tuple[Array, Array, Array, Array]:
    """Return rows, numbers of some of them, and each node's weights and biases, behind 3 numbers of something else."""
    rng, width = np.random.default_rng(registers), registers * LANES[dtype]
    x = rng.standard_normal((NODES, 3 + (INPUTS + 1) * width)).astype(dtype)
    weights = x[:, 3 : 3 + INPUTS * width].reshape(NODES, INPUTS, width)
    rows = rng.standard_normal((SAMPLES, INPUTS)).astype(dtype)
    return rows, rng.integers(0, SAMPLES, (NODES, size)), x, weights


def multiply(rows: Array, at: Array, x: Array, least: float, width: int) -> Array:
    out = np.full((at.size, width), np.nan, rows.dtype)
    to = np.arange(at.size)[::-1].reshape(at.shape)      # results in another order than the rows
    gathered_products.multiply(rows, at, x, 3, rows.dtype.type(least), out, to.copy(), 0, len(at))
    return out[::-1].reshape(*at.shape, width)


@CASES
@pytest.mark.parametrize("least", [0.0, -np.inf])
def test_a_layer_is_that_of_numpy(dtype: str, registers: int, size: int, least: float) -> None:
    rows, at, x, weights = make_layer(dtype, registers, size)
    width = weights.shape[2]
    expected = np.maximum(rows[at].astype(float) @ weights + x[:, None, -width:], least)
    close = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(multiply(rows, at, x, least, width), expected, rtol=close, atol=close)


@CASES
def test_a_transposed_product_is_that_of_numpy(dtype: str, registers: int, size: int) -> None:
    rows, at, x, weights = make_layer(dtype, registers, size)
    width, out = weights.shape[2], x.copy()
    d = np.random.default_rng(1).standard_normal((NODES * size, width)).astype(dtype)
    gathered_products.multiply_transposed(rows, at, d, out, 3, 1, NODES)
    expected = rows[at].astype(float).swapaxes(1, 2) @ d.reshape(NODES, size, width)
    close = 1e-4 if dtype == "float32" else 1e-12
    written = out[:, 3 : 3 + INPUTS * width].reshape(NODES, INPUTS, width)
    np.testing.assert_allclose(written[1:], expected[1:], rtol=close, atol=close)
    np.testing.assert_array_equal(out[0], x[0])                        # a node outside of the range
    np.testing.assert_array_equal(out[:, :3], x[:, :3])
    np.testing.assert_allclose(out[1:, -width:], d.reshape(NODES, size, width).sum(axis=1)[1:], rtol=close, atol=close)


@CASES
def test_a_product_with_transposed_weights_is_that_of_numpy(dtype: str, registers: int, size: int) -> None:
    """The inputs of a layer fill registers too, if another layer is before it."""
    rng, width, inputs = np.random.default_rng(2), 5, registers * LANES[dtype]
    x = rng.standard_normal((NODES, 3 + inputs * width)).astype(dtype)
    d, at = rng.standard_normal((NODES * size, width)).astype(dtype), np.arange(NODES * size).reshape(NODES, size)
    out = np.full((NODES * size, inputs), np.nan, dtype)
    gathered_products.multiply_back(d, at, x, 3, out, 0, NODES)
    expected = d.reshape(NODES, size, width).astype(float) @ x[:, 3:].reshape(NODES, inputs, width).swapaxes(1, 2)
    close = 1e-4 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(out.reshape(NODES, size, inputs), expected, rtol=close, atol=close)


@CASES
def test_no_bit_depends_on_the_other_rows(dtype: str, registers: int, size: int) -> None:
    rows, at, x, weights = make_layer(dtype, registers, size)
    width = weights.shape[2]
    whole = multiply(rows, at, x, 0.0, width)
    for i in range(size):
        np.testing.assert_array_equal(multiply(rows, at[:, i : i + 1].copy(), x, 0.0, width), whole[:, i : i + 1])


def test_nan_stays() -> None:
    """A diverged run must not look finite behind a relu."""
    rows, at, x, weights = make_layer("float32", 1, 4)
    rows[at[1, 2], 5] = np.nan
    out = multiply(rows, at, x, 0.0, weights.shape[2])
    assert np.isnan(out[1, 2]).all()
    assert np.isfinite(out[0][at[0] != at[1, 2]]).all()


def test_columns_must_fill_registers() -> None:
    assert gathered_products.suits((96, 64), np.dtype("float32"))
    assert not gathered_products.suits((96, 60), np.dtype("float32"))
    assert not gathered_products.suits((96, 64), np.dtype("float16"))


def test_inactive_entries_have_no_derivative() -> None:
    rng = np.random.default_rng(0)
    d, activations = rng.standard_normal((30, 16)), np.maximum(rng.standard_normal((30, 16)), 0)
    d[3, 4] = np.nan
    out = np.full_like(d, 7.0)
    gathered_products.drop_inactive(d, activations, out)
    np.testing.assert_array_equal(out, d * (activations > 0))
    assert np.isnan(out[3, 4])
