"""Coefficient tuning in compiled loops: the same results as the stacked products."""

from typing import Any

import numpy as np
import pytest

from dbo.platform.engine.shard_wrappers import pool_shard
from dbo.tasks.api import Setup
from dbo.tasks.datasets.synthetic_text import SyntheticText
from dbo.tasks.kernels import bag_of_words, threads
from dbo.tasks.partitions import ByClass
from dbo.tasks.problems import coefficient_tuning, sparse_tuning
from dbo.tasks.problems.coefficient_tuning import CoefficientTuning, CoefficientTuningShard
from dbo.tasks.problems.sparse_tuning import SparseTuningShard

DATA = SyntheticText(documents=300, features=90, classes=7, words=15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("count", [1, 2])
def test_oracles_are_those_of_stacked_products(monkeypatch: pytest.MonkeyPatch, dtype: str, count: int) -> None:
    """Values, gradients and second derivatives of every node, on one thread and on two."""
    problem = CoefficientTuning(reg_form="mean").build(
        Setup(nodes=4, seed=0, dtype=dtype, partition=ByClass(), data=DATA)
    )
    plain = problem.shard([2, 0, 3])
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    fused = problem.shard([2, 0, 3])
    assert isinstance(plain, CoefficientTuningShard)
    assert isinstance(fused, SparseTuningShard)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, problem.dim_x)).astype(dtype)
    y, v = (rng.standard_normal((3, problem.dim_y)).astype(dtype) * 3 for _ in range(2))
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-15}
    threads.set_threads(count)
    try:
        for name in ("f", "g", "f_x", "f_y", "g_x", "g_y"):
            found, expected = getattr(fused, name)(x, y), getattr(plain, name)(x, y)
            assert found.dtype == expected.dtype == dtype
            np.testing.assert_allclose(found, expected, **close, err_msg=name)
        for name in ("g_yy", "g_xy"):
            np.testing.assert_allclose(getattr(fused, name)(x, y, v), getattr(plain, name)(x, y, v), **close)
        both = 0.1 * plain.f_y(x, y) + 2.0 * plain.g_y(x, y)
        np.testing.assert_allclose(fused.h_y(x, y, 0.1, 2.0), both, **close)
    finally:
        threads.set_threads(1)


@pytest.mark.parametrize("pooled", [False, True])
def test_torch_tensors_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch, pooled: bool) -> None:
    """On a torch device the oracles are products of sparse matrices, also inside of another shard."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    problem = CoefficientTuning().build(Setup(nodes=3, seed=0, dtype="float64", partition=ByClass(), data=DATA))
    compiled: Any = problem.shard([2, 0])
    assert isinstance(compiled, SparseTuningShard)
    compiled = pool_shard(compiled) if pooled else compiled
    on_torch: Any = compiled.to(lambda array: torch.asarray(array.copy()))
    rng = np.random.default_rng(0)
    x, y, v = (rng.standard_normal((compiled.nodes, dim)) for dim in (problem.dim_x, problem.dim_y, problem.dim_y))
    arrays = {"f": (x, y), "g": (x, y), "f_x": (x, y), "f_y": (x, y), "g_x": (x, y), "g_y": (x, y),
              "g_yy": (x, y, v), "g_xy": (x, y, v)}
    for name, point in arrays.items():
        found = getattr(on_torch, name)(*map(torch.asarray, point))
        np.testing.assert_allclose(found.numpy(), getattr(compiled, name)(*point), rtol=1e-10, atol=1e-13)


def test_large_scores_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document's largest score is subtracted before exponentials are taken."""
    monkeypatch.setattr(coefficient_tuning, "FUSED_MIN_ENTRIES", 1)
    problem = CoefficientTuning().build(Setup(nodes=2, seed=0, dtype="float32", partition=ByClass(), data=DATA))
    shard = problem.shard([0, 1])
    y = np.full((2, problem.dim_y), 1e6, dtype="float32")
    y[:, ::7] = 3e6
    for found in (shard.f(shard.x0, y), shard.g_y(shard.x0, y), shard.g_yy(shard.x0, y, y)):
        assert np.isfinite(found).all()


def test_compiled_kernels_are_found_on_disk() -> None:
    """The notice about compiling appears once, not at every start."""
    sparse_tuning.compile_kernels("float32")
    assert sparse_tuning.is_cached(bag_of_words.ridge_gradient)
