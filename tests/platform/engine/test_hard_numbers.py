"""Extreme numbers: equal to a dense reference or a closed form, or refused; never silently wrong."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from dbo.algorithms.compression.compressors import COMPRESSORS, TopK
from dbo.algorithms.rng import Key
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.network import packet as wire
from dbo.platform.runs.runner import Prepared, prepare, run
from dbo.tasks.api import Part, Split
from dbo.tasks.problems.coefficient_tuning import CoefficientTuningProblem

Tiny = Callable[..., Experiment]
HEADER = wire.Header(sender=0, epoch=0, round=1, step=0)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_denormals_and_zero_rows_travel(name: str, dtype: Any) -> None:
    """Subnormals, rows of zeros and of one value: decoded as they were sent, and contractive."""
    tiny_, big = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max / 1e4
    rows = np.zeros((5, 9), dtype=dtype)
    rows[1], rows[2, 4], rows[3] = tiny_, tiny_, 1.0
    rows[4] = big * np.linspace(-1, 1, 9).astype(dtype)
    q = COMPRESSORS[name]()
    with np.errstate(all="ignore"):
        message = q(rows, Key(0, np.arange(5), 0), "y")
    for row in range(5):
        data = wire.encode(HEADER, {"y": message}, row)
        decoded = wire.decode(data, expected=wire.expect_rows({"y": message})).channels["y"]
        assert decoded.tobytes() == message.values[row].tobytes()
        assert np.isfinite(decoded).all()
    assert not message.values[0].any()
    error = np.sum((message.values[3].astype(float) - 1.0) ** 2)
    assert error <= 9.0 + 1e-6      # ‖Q(v) − v‖² ≤ ‖v‖²


@pytest.mark.parametrize("dim", [1, 2, 5, 100])
def test_tiny_ratio_keeps_one_entry(dim: int) -> None:
    """k = max(1, ⌊ratio · d⌋): the largest entry is sent, whatever the ratio."""
    rows = np.random.default_rng(0).standard_normal((3, dim))
    message = TopK(ratio=1e-12)(rows, Key(0, np.arange(3), 0), "y")
    assert np.count_nonzero(message.values, axis=1).tolist() == [1, 1, 1]
    at = np.argmax(abs(rows), axis=1)
    np.testing.assert_array_equal(message.values[np.arange(3), at], rows[np.arange(3), at])


def test_run_with_one_entry_per_message_converges(tiny: Tiny, tmp_path: Path) -> None:
    """k = 1 in every message: slow, but the distance to the penalty solution shrinks."""
    section = {"name": "c2dfb", "inner_steps": 10, "eta_in": 0.1, "eta_out": 0.05, "gamma_in": 0.05,
               "compressor": {"name": "top_k", "ratio": 1e-9}}
    done = run(tiny(rounds=150, eval_every=150, algorithm=section), tmp_path / "r")
    assert done.status == "finished"
    errors = list(done.history["penalty_error"])
    assert errors[-1] < 0.5 * errors[0]


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ["c2dfb", "madsbo", "mdbo", "d_soba", "dsgda_gt"])
def test_the_smallest_networks_are_the_pooled_problem(tiny: Tiny, tmp_path: Path, nodes: int, name: str) -> None:
    """m = 1 sends nothing, m = 2 does; both end with finite numbers and counted bytes."""
    done = run(tiny(nodes=nodes, rounds=4, algorithm={"name": name}), tmp_path / "r")
    assert done.status in ("finished", "diverged")
    if done.status == "finished":
        assert np.isfinite(done.state["x"]).all()
        assert (done.history["bytes_links"].iloc[-1] == 0) == (nodes == 1)


def test_one_node_reaches_the_closed_form(tiny: Tiny, tmp_path: Path) -> None:
    """m = 1: the solution of the penalty problem, to four digits."""
    section = {"name": "c2dfb", "inner_steps": 30, "eta_in": 0.8, "eta_out": 0.5, "gamma_in": 0.5,
               "compressor": {"name": "identity"}}
    done = run(tiny(nodes=1, rounds=400, eval_every=400, algorithm=section), tmp_path / "r")
    assert done.history["penalty_error"].iloc[-1] < 1e-4


@pytest.mark.parametrize(("path", "value"), [
    ("inner_steps", 0), ("inner_steps", -1), ("lam", 0.0), ("lam", -1.0), ("lam", math.inf), ("lam", math.nan),
    ("eta_in", 0.0), ("eta_out", math.nan), ("gamma_in", 0.0), ("gamma_in", 1.5), ("gamma_out", -0.1),
])
def test_invalid_values_are_refused(tiny: Tiny, path: str, value: float) -> None:
    """K = 0, λ ≤ 0, NaN, consensus steps outside of (0, 1]: an input error that names the field."""
    with pytest.raises(InputError, match=rf"algorithm\.{path}"):
        tiny(algorithm={"name": "c2dfb", path: value})


@pytest.mark.parametrize("ratio", [0, -0.1, 1.0000001, math.nan])
def test_invalid_ratios_are_refused(tiny: Tiny, ratio: float) -> None:
    with pytest.raises(InputError, match=r"algorithm\.compressor\.ratio"):
        tiny(algorithm={"name": "c2dfb", "compressor": {"name": "top_k", "ratio": ratio}})


# ---- λ and steps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [1e-300, 1e-6, 1e6, 1e12, 1e30, 1e300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_penalty_finishes_or_diverges(tiny: Tiny, tmp_path: Path, lam: float, dtype: str) -> None:
    """λ over six hundred decades: finite numbers, or `diverged` with the round; never NaN in a record."""
    section = {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.3, "eta_out": 0.1, "gamma_in": 0.3, "lam": lam}
    done = run(tiny(algorithm=section, dtype=dtype), tmp_path / "r")
    assert done.status in ("finished", "diverged")
    for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines():
        assert all(math.isfinite(v) for v in json.loads(line).values() if isinstance(v, float))
    if done.status == "diverged":
        assert "not finite" in done.summary["error"]


def test_large_penalty_gives_the_bilevel_solution(tiny: Tiny) -> None:
    """λ → ∞: the penalty solution is the bilevel solution to O(1/λ); λ(y − z) does not cancel in float64."""
    problem: Any = prepare(tiny()).problem
    for lam, bound in ((1e2, 0.1), (1e4, 1e-3), (1e6, 1e-5), (1e8, 1e-5)):
        error = problem.penalty_solution(lam) - problem.solution()
        assert np.linalg.norm(error) <= bound * np.linalg.norm(problem.solution())


@pytest.mark.parametrize("eta", [1e10, 1e100, 1e300])
def test_huge_step_is_detected_within_a_round(tiny: Tiny, tmp_path: Path, eta: float) -> None:
    """An overflow is reported in its round, and the records contain finite numbers only."""
    section = {"name": "c2dfb", "inner_steps": 30, "eta_in": eta, "eta_out": eta, "gamma_in": 0.3}
    done = run(tiny(algorithm=section, rounds=40), tmp_path / "r")
    assert done.status == "diverged"
    reported = int(done.summary["error"].split("round ")[1].split(":")[0])
    assert reported <= done.summary["rounds"] + 1


# ---- data ------------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """f, g and their gradients of one node in plain NumPy and float64, one sample at a time."""

    features: Any
    labels: Any
    classes: int

    def loss(self, w: Any) -> float:
        total = 0.0
        for a, c in zip(self.features, self.labels, strict=True):
            s = a @ w
            total += math.log(sum(math.exp(v - max(s)) for v in s)) + max(s) - s[c]
        return total / len(self.labels)

    def gradient(self, w: Any) -> Any:
        total = np.zeros_like(w)
        for a, c in zip(self.features, self.labels, strict=True):
            s = a @ w
            p = np.exp(s - s.max())
            p /= p.sum()
            p[c] -= 1
            total += np.outer(a, p)
        return total / len(self.labels)


RNG = np.random.default_rng(7)


def data(kind: str) -> Any:
    """(24, 5) features, degenerate in one respect."""
    a = RNG.standard_normal((24, 5))
    if kind == "zero rows":
        a[::3] = 0
    elif kind == "zero columns":
        a[:, 1] = 0
    elif kind == "duplicate features":
        a[:, 1], a[:, 3] = a[:, 0], a[:, 0]
    elif kind == "duplicate samples":
        a[1:] = a[0]
    elif kind == "unnormalised":
        a *= np.array([1e4, 1.0, 1e-4, 255.0, 1e3])
    elif kind == "denormal":
        a *= 1e-310
    elif kind == "constant":
        a[:] = 3.0
    return a


KINDS = ("zero rows", "zero columns", "duplicate features", "duplicate samples", "unnormalised", "denormal", "constant")


def problem(features: Any, owned: list[Any], labels: Any, dtype: str = "float64") -> CoefficientTuningProblem:
    part = Part(features, labels)
    return CoefficientTuningProblem(Split(part, part, part, 3), owned, owned, seed=0, dtype=dtype, scale=0.1)


def assert_equals_reference(made: CoefficientTuningProblem, dense_: Any, scale: float = 1.0) -> None:
    """Values and gradients of every node, stacked, against the plain reference."""
    nodes, p = made.nodes, made.dim_x
    shard = made.shard(range(nodes))
    x, y = 0.3 * RNG.standard_normal((nodes, p)), scale * RNG.standard_normal((nodes, 3 * p))
    for node in range(nodes):
        one = Reference(dense_[made.train[node]], made.samples.train.labels[made.train[node]], 3)
        w = y[node].reshape(p, 3)
        ridge = np.exp(x[node])[:, None] * w
        np.testing.assert_allclose(shard.f(x, y)[node], one.loss(w), rtol=1e-10, atol=1e-300)
        np.testing.assert_allclose(shard.g(x, y)[node], one.loss(w) + 0.1 * np.sum(ridge * w), rtol=1e-10, atol=1e-300)
        expected = one.gradient(w) + 0.2 * ridge
        size = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(shard.g_y(x, y)[node].reshape(p, 3), expected, rtol=1e-8, atol=1e-12 * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_oracles_on_degenerate_data_equal_the_reference(kind: str, layout: str) -> None:
    """Zero, equal, constant, huge and denormal features: the stacked oracles equal a plain loop."""
    a, labels = data(kind), np.arange(24) % 3
    owned = [np.arange(0, 8), np.arange(8, 16), np.arange(16, 24)]
    features = sparse.csr_array(a) if layout == "sparse" else a
    assert_equals_reference(problem(features, owned, labels), a)


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_nodes_with_one_sample_or_one_class_equal_the_reference(layout: str) -> None:
    """A node with one sample beside one with most of them, and nodes with a single class."""
    a, labels = data("plain"), np.sort(np.arange(24) % 3)
    owned = [np.array([0]), np.arange(1, 8), np.array([8]), np.arange(9, 24)]
    features = sparse.csr_array(a) if layout == "sparse" else a
    assert_equals_reference(problem(features, owned, labels), a)


def test_scores_that_overflow_exp_are_correct() -> None:
    """Scores above 10,000: the loss is their difference, not inf; float32 keeps its own precision."""
    a, labels = data("unnormalised"), np.arange(24) % 3
    assert_equals_reference(problem(a, [np.arange(12), np.arange(12, 24)], labels), a, scale=10.0)
    low = problem(a, [np.arange(24)], labels, "float32").shard([0])
    high = problem(a, [np.arange(24)], labels).shard([0])
    x, y = np.zeros((1, 5)), 10 * RNG.standard_normal((1, 15))
    got, expected = low.f(x.astype("f4"), y.astype("f4")), high.f(x, y)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_reference_detects_a_wrong_partition() -> None:
    """Control: one sample assigned to another node is detected."""
    a, labels = data("plain"), np.arange(24) % 3
    made = problem(a, [np.arange(12), np.arange(12, 24)], labels)
    wrong = replace(made, train=[np.arange(11), np.arange(11, 24)])
    with pytest.raises(AssertionError):
        assert_equals_reference(wrong, a)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_runs_on_degenerate_data_end_in_a_known_state(tiny: Tiny, tmp_path: Path, dtype: str) -> None:
    """A whole run on each, one-sample nodes included: finished or diverged, with finite records."""
    experiment = tiny(rounds=3, dtype=dtype, task={"name": "coefficient_tuning"}, algorithm={"name": "c2dfb"})
    owned = [np.array([0]), np.arange(1, 8), np.array([8]), np.arange(9, 24)]
    graph = prepare(tiny()).network
    for kind in KINDS:
        made = problem(data(kind), owned, np.arange(24) % 3, dtype)
        done = run(experiment, tmp_path / kind, prepared=Prepared(made, graph))
        assert done.status in ("finished", "diverged")
        values = [v for r in done.history.to_dict("records") for v in r.values() if isinstance(v, float)]
        assert all(math.isfinite(v) for v in values if v == v)


def test_float64_keeps_its_precision(tiny: Tiny) -> None:
    """No step goes through float32: one block and four agree to 1e-12, with float32 only to 1e-4."""
    error = {}
    for dtype in ("float32", "float64"):
        experiment = tiny(dtype=dtype)
        parts, made = experiment.parts, prepare(experiment)
        engines = [
            LocalEngine(parts.algorithm, parts.config, made.problem, made.network, blocks)
            for blocks in ([range(4)], [[0], [1], [2], [3]])
        ]
        for round_ in range(1, 6):
            for engine in engines:
                engine.advance(round_)
        one, other = (np.asarray(engine.rows("x"), dtype=np.float64) for engine in engines)
        assert str(engines[0].rows("x").dtype) == dtype
        error[dtype] = float(np.abs(one - other).max() / np.abs(one).max())
    assert error["float64"] < 1e-12
    assert error["float32"] < 1e-4
