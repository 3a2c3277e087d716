"""`dbo verify --task` passes the built-in tasks and names what is wrong with a task that has a planted fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.platform.verify.differences import compare_gradient, compare_product
from dbo.platform.verify.tasks import Check, check_task, read_experiment
from dbo.tasks.registry import TASKS

# Ridge regression with a coefficient per feature on the upper level; every node has twelve samples per level.
PLUGIN = '''
import threading
from dataclasses import dataclass, field, replace

import numpy as np

import dbo
from dbo.tasks.api import Shard, Task, generator

calls = []


@dataclass(frozen=True, eq=False)
class RidgeShard(Shard):
    a: np.ndarray
    b: np.ndarray

    @property
    def sizes(self):
        return (np.full(self.nodes, self.a.shape[1]),) * 2

    def subset(self, lower, upper):
        chosen = lower if lower is not None else upper
        rows = np.arange(self.nodes)[:, None]
        return replace(self, a=self.a[rows, chosen], b=self.b[rows, chosen])

    def residual(self, y):
        return np.einsum("nsd,nd->ns", self.a, y) - self.b

    def f(self, x, y):
        return np.mean(self.residual(y) ** 2, axis=1) / 2 + 0.05 * np.sum(x * x, axis=1)

    def g(self, x, y):
        return np.mean(self.residual(y) ** 2, axis=1) / 2 + np.sum(np.exp(x) * y * y, axis=1) / 2

    def f_x(self, x, y):
        return x / 10

    def data_y(self, y):
        return np.einsum("nsd,ns->nd", self.a, self.residual(y)) / self.a.shape[1]

    def f_y(self, x, y):
        return self.data_y(y)

    def g_x(self, x, y):
        return np.exp(x) * y * y / 2

    def g_y(self, x, y):
        return self.data_y(y) + np.exp(x) * y

    def g_yy(self, x, y, v):
        av = np.einsum("nsd,nd->ns", self.a, v)
        return np.einsum("nsd,ns->nd", self.a, av) / self.a.shape[1] + np.exp(x) * v

    def g_xy(self, x, y, v):
        return np.exp(x) * y * v


@dataclass(frozen=True, eq=False)
class RidgeProblem(dbo.tasks.api.Problem):
    a: np.ndarray
    b: np.ndarray
    seed: int

    nodes = property(lambda self: len(self.a))
    dim_x = dim_y = property(lambda self: self.a.shape[2])

    def shard(self, ids):
        rows, zeros = np.asarray(ids), np.zeros((len(ids), self.dim_x), dtype=self.a.dtype)
        return RidgeShard(rows, self.seed, zeros, zeros, self.a[rows], self.b[rows])

    def sample_sizes(self):
        return [12] * self.nodes, [12] * self.nodes

    def evaluate(self, x, y):
        return {"test_loss": np.mean((np.einsum("sd,nd->ns", self.a[0], y) - self.b[0]) ** 2, axis=1)}

    def describe(self):
        return {}


@dbo.task("ridge")
class Ridge(Task):
    """Ridge regression."""

    directions = {"test_loss": "min"}
    strongly_convex = True

    def build(self, setup):
        rng = generator(setup.seed, "ridge")
        a, b = rng.standard_normal((setup.nodes, 12, 3)), rng.standard_normal((setup.nodes, 12))
        return RidgeProblem(a.astype(setup.dtype), b.astype(setup.dtype), setup.seed)
'''
# name: (right line, planted line, the check that must fail)
FAULTS = {
    "wrong sign in f_x": ("return x / 10", "return -x / 10", "f_x"),
    "an entry of f_y missing": (
        "def f_y(self, x, y):\n        return self.data_y(y)",
        "def f_y(self, x, y):\n        return self.data_y(y) * np.array([1, 1, 0], dtype=x.dtype)", "f_y"),
    "factor in g_x": ("return np.exp(x) * y * y / 2", "return np.exp(x) * y * y", "g_x"),
    "error of a thousandth in g_y": (
        "return self.data_y(y) + np.exp(x) * y", "return self.data_y(y) + 1.001 * np.exp(x) * y", "g_y"),
    "ridge missing in g_yy": ("/ self.a.shape[1] + np.exp(x) * v", "/ self.a.shape[1]", "g_yy"),
    "g_xy without y": ("return np.exp(x) * y * v", "return np.exp(x) * v", "g_xy"),
    "Hessian with rolled entries": (
        "/ self.a.shape[1] + np.exp(x) * v", "/ self.a.shape[1] + np.exp(x) * np.roll(v, 1, axis=1)", "symmetry"),
    "concave lower level": ("/ self.a.shape[1] + np.exp(x) * v", "/ self.a.shape[1] - 9 * v", "convexity"),
    "a row that sees the others": ("return x / 10", "return (x - x.mean(axis=0)) / 10", "rows"),
    "a row that sees the others' samples": (
        'np.einsum("nsd,ns->nd", self.a, self.residual(y)) / self.a.shape[1]',
        'np.einsum("nsd,ns->nd", self.a, self.residual(y)) / self.a.shape[1] + self.b.sum(dtype=y.dtype)', "rows"),
    "a batch that is summed": (
        "return replace(self, a=self.a[rows, chosen], b=self.b[rows, chosen])",
        "return replace(self, a=2 * self.a[rows, chosen], b=2 * self.b[rows, chosen])", "batches"),
    "always the first samples": (
        "rows = np.arange(self.nodes)[:, None]", "rows, chosen = np.arange(self.nodes)[:, None], chosen * 0 + "
        "np.arange(chosen.shape[1])", "batches"),
    "unseeded data": ('rng = generator(setup.seed, "ridge")', "rng = np.random.default_rng()", "determinism"),
    "random state": (
        "return x / 10", "calls.append(0)\n        return x / 10 + len(calls) * 1e-9", "determinism"),
    "the number of stacked rows in g_y": (
        "return self.data_y(y) + np.exp(x) * y", "return self.data_y(y) + np.exp(x) * y + 1e-4 * len(x)", "packing"),
    "arguments written into": ("return x / 10", "y *= 2\n        return x / 10", "determinism"),
    "float64 everywhere": ("return x / 10", "return x.astype(np.float64) / 10", "float32"),
    "a lock in the problem": (
        "    seed: int\n", "    seed: int\n    lock: object = field(default_factory=threading.Lock)\n", "shipping"),
    "a metric without direction": ('directions = {"test_loss": "min"}', "directions = {}", "metrics"),
    "a metric that is not finite": ('return {"test_loss": np', 'return {"test_loss": np.nan * np', "metrics"),
    "a loss that is not finite": ("0.05 * np.sum(x * x, axis=1)", "np.sum(np.log(-np.ones_like(x)), axis=1)", "start"),
    "a transposed gradient": ("return x / 10", "return x.T / 10", "start"),
    "an exception": ("return np.exp(x) * y * v", 'raise KeyError("missing")', "start"),
}


def check(text: str, folder: Path, until: str = "") -> dict[str, Check]:
    """Return the checks of a plugin's task, up to one of them."""
    file = folder / "planted.py"
    file.write_text(text)
    found = {}
    for one in check_task(read_experiment("ridge", (str(file),), [])):
        found[one.name] = one
        if one.name == until:
            break
    return found


def find_failed(checks: dict[str, Check]) -> list[str]:
    return [name for name, one in checks.items() if one.passed is False]


@pytest.mark.parametrize(("task", "overrides"), [
    ("quadratic", []), ("quadratic", ["task.noise=0.1", "task.samples=12"]),
    *((name, []) for name in TASKS if name != "quadratic"),
    ("coefficient_tuning", ["task.dataset=synthetic_text", "task.documents=300", "task.features=60", "nodes=3"]),
    ("hyper_representation", ["partition=by_class", "nodes=10", "task.activation=tanh"]),
])
def test_built_in_tasks_pass(task: str, overrides: list[str]) -> None:
    """Every check of every built-in task passes or does not apply; relu is no false alarm."""
    checks = list(check_task(read_experiment(task, (), overrides)))
    assert [one.format() for one in checks if one.passed is False] == []
    assert len(checks) == 17


def test_task_without_a_fault_passes(tmp_path: Path) -> None:
    """Control: the plugin that faults are planted in; all checks but that of a fused gradient apply."""
    checks = check(PLUGIN, tmp_path)
    assert find_failed(checks) == []
    assert [name for name, one in checks.items() if one.passed is None] == ["h_y"]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_by_its_check(fault: str, tmp_path: Path) -> None:
    """Each fault fails its own line, with advice."""
    right, planted, expected = FAULTS[fault]
    assert PLUGIN.count(right) >= 1
    found = check(PLUGIN.replace(right, planted), tmp_path, until=expected)[expected]
    assert found.passed is False
    assert found.advice
    assert found.advice in found.format()


def test_exception_names_file_and_line(tmp_path: Path) -> None:
    """The line of a check that raises has the error and the place in the plugin."""
    right, planted, name = FAULTS["an exception"]
    line = check(PLUGIN.replace(right, planted), tmp_path, until=name)[name].measured
    assert "KeyError" in line
    assert "planted.py, line" in line


def test_command_prints_a_line_per_check(dbo: Any, tmp_path: Path) -> None:
    """Exit 0; with a fault exit 1, and the error names task and check."""
    (tmp_path / "right.py").write_text(PLUGIN)
    done = dbo("verify", "--task", "ridge", "--plugin", tmp_path / "right.py", "nodes=3")
    assert done.code == 0
    assert sum(line.startswith("ok ") for line in done.out.splitlines()) == 16
    (tmp_path / "wrong.py").write_text(PLUGIN.replace("return x / 10", "return -x / 10").replace("ridge", "other"))
    done = dbo("verify", "--task", "other", "--plugin", tmp_path / "wrong.py")
    assert done.code == 1
    assert done.err == "dbo: failed: task other: f_x\n"
    assert "FAILED f_x" in done.out


def test_algorithms_and_tasks_are_checked_together(dbo: Any) -> None:
    """With both options, both; with --task alone, no algorithm."""
    both = dbo("verify", "--task", "quadratic", "--algorithm", "f2ba")
    assert both.code == 0
    assert "f2ba: ok" in both.out
    assert "ok     g_yy" in both.out
    assert "c2dfb: ok" not in dbo("verify", "--task", "quadratic").out


@pytest.mark.parametrize(("arguments", "message"), [
    (("--task", "quadratc"), "did you mean 'quadratic'"), (("nodes=3",), "--task"),
    (("--task", "quadratic", "task.nois=1"), "did you mean 'noise'"),
    (("--task", "quadratic", "file.yaml"), "key=value"),
    (("--task", "hyper_representation", "task.dataset=mnist", "data_dir=/nowhere"), "data_dir"),
])
def test_wrong_input_is_one_line(dbo: Any, arguments: tuple[str, ...], message: str) -> None:
    """Exit 2."""
    done = dbo("verify", *arguments)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1


def test_kinks_do_not_fail() -> None:
    """A sum of many absolute values is measured beside its kinks; a gradient that is wrong there is found."""
    rng = np.random.default_rng(1)
    at, weights = 1e-2 * rng.standard_normal((3, 200)), 1 + rng.random(200)

    def value(x: Any) -> Any:
        return np.sum(weights * np.abs(x), axis=1)

    gradient = weights * np.sign(at)
    found = compare_gradient(value, at, gradient, rng)
    assert found.is_small
    assert found.step < 1e-3
    wrong = gradient.copy()
    wrong[1, :5] *= -1
    assert not compare_gradient(value, at, wrong, rng).is_small


def test_product_is_compared_entry_by_entry() -> None:
    """A single wrong entry of a product is found."""
    rng = np.random.default_rng(2)
    at, along = rng.standard_normal((2, 4)), rng.standard_normal((2, 4))
    product = 3 * at**2 * along
    assert compare_product(lambda y: y**3, at, along, product).is_small
    product[1, 2] *= 1 + 1e-4
    assert not compare_product(lambda y: y**3, at, along, product).is_small
