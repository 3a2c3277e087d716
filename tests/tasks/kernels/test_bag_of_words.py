"""Compiled loops over documents agree with sparse products, for every number of classes."""

from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.tasks.kernels import bag_of_words

WORDS = 70


def make_documents(count: int, seed: int) -> Any:
    """Return documents of which one is empty, over words of which some occur nowhere."""
    a = sparse.random(count, WORDS, density=0.05, format="lil", random_state=seed, dtype=np.float64)
    a[3, :] = 0
    a[0, WORDS - 1] = 1.5      # the last word occurs
    return sparse.csr_array(a)


def by_word(a: Any) -> tuple[Any, Any, Any]:
    words = sparse.csr_array(a.T)
    return words.indptr, words.indices, words.data


@pytest.mark.parametrize("classes", [1, 3, 4, 7, 19, 20, 21, 27, 40, 45])
def test_every_class_is_summed(classes: int) -> None:
    random, a, b = np.random.default_rng(classes), make_documents(20, 1), make_documents(12, 2)
    w, ridge = random.standard_normal((WORDS, classes)), random.random(WORDS)
    r, r2 = random.standard_normal((20, classes)), random.standard_normal((12, classes))
    of_documents, of_words = np.full((20, classes), np.nan), np.full((WORDS, classes), np.nan)
    bag_of_words.scores(a.indptr, a.indices, a.data, w, of_documents)
    np.testing.assert_allclose(of_documents, a @ w, rtol=1e-12)
    bag_of_words.gradient(*by_word(a), r, of_words)
    np.testing.assert_allclose(of_words, a.T @ r, rtol=1e-12)
    bag_of_words.ridge_gradient(*by_word(a), r, ridge, w, of_words)
    np.testing.assert_allclose(of_words, ridge[:, None] * w + a.T @ r, rtol=1e-12, atol=1e-14)
    bag_of_words.weighted_gradient(*by_word(a), r, ridge, w, *by_word(b), r2, of_words)
    np.testing.assert_allclose(of_words, ridge[:, None] * w + a.T @ r + b.T @ r2, rtol=1e-12, atol=1e-14)


def test_the_rows_of_a_document_are_added_in_order() -> None:
    """Control of the order of float32 sums, which decides the bits of a run."""
    a, random = make_documents(20, 1).astype(np.float32), np.random.default_rng(0)
    w = random.standard_normal((WORDS, 20)).astype(np.float32)
    found = np.empty((20, 20), dtype=np.float32)
    bag_of_words.scores(a.indptr, a.indices, a.data, w, found)
    for i in range(20):
        total = np.zeros(20, dtype=np.float32)
        for k in range(a.indptr[i], a.indptr[i + 1]):
            total = total + a.data[k] * w[a.indices[k]]
        np.testing.assert_array_equal(found[i], total)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("classes", [20, 24, 27, 40])
def test_large_gradients_have_the_same_bits(classes: int, offset: int, dtype: Any) -> None:
    """They are written past the cache where rows are aligned, and nothing is written behind them."""
    words = bag_of_words._LARGE // (classes * np.dtype(dtype).itemsize) + 3
    random = np.random.default_rng(classes)
    a, b = (make_documents(count, count).astype(dtype) for count in (20, 12))
    w, ridge = random.standard_normal((words, classes)).astype(dtype), random.random(words).astype(dtype)
    r, r2 = (random.standard_normal((count, classes)).astype(dtype) for count in (20, 12))
    memory = np.full(words * classes + 64, np.nan, dtype=dtype)
    start = -memory.ctypes.data % 64 // memory.itemsize + offset
    large, small = memory[start : start + words * classes].reshape(words, classes), np.empty((WORDS, classes), dtype)
    assert bag_of_words._is_large(large) == (offset == 0 and classes * np.dtype(dtype).itemsize % 16 == 0)
    assert not bag_of_words._is_large(small)

    def over(documents: Any, size: int) -> tuple[Any, Any, Any]:
        """Return documents by word, with words behind them that occur nowhere."""
        indptr, indices, data = by_word(documents)
        return np.append(indptr, np.full(size - WORDS, indptr[-1], indptr.dtype)), indices, data

    for out in (large, small):
        size = len(out)
        bag_of_words.ridge_gradient(*over(a, size), r, ridge[:size], w[:size], out)
    assert large[:WORDS].tobytes() == small.tobytes()
    for out in (large, small):
        size = len(out)
        bag_of_words.weighted_gradient(*over(a, size), r, ridge[:size], w[:size], *over(b, size), r2, out)
    assert large[:WORDS].tobytes() == small.tobytes()
    np.testing.assert_array_equal(large[WORDS:], (ridge[:, None] * w)[WORDS:])
    assert np.isnan(memory[:start]).all()
    assert np.isnan(memory[start + large.size :]).all()
