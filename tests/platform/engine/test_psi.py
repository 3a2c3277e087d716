"""ψ and ∇ψ: equal to the closed form on the quadratic, to finite differences elsewhere; bounded, and not counted."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine import common_point
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.evaluation import evaluate_psi
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.psi import MIN_PRODUCTS, TOLERANCE, limit_products, solve_psi
from dbo.platform.errors import InputError
from dbo.platform.runs.runner import prepare, run
from dbo.tasks.problems.quadratic import QuadraticProblem

Tiny = Callable[..., Experiment]
ORACLES: tuple[Oracle, ...] = ("f", "g", "f_x", "f_y", "g_y", "g_yy", "g_xy")


def start(experiment: Experiment, rounds: int = 3, blocks: list[list[int]] | None = None) -> LocalEngine:
    parts, prepared = experiment.parts, prepare(experiment)
    engine = LocalEngine(
        parts.algorithm, parts.config, prepared.problem, prepared.network, blocks or [[*range(experiment.nodes)]])
    for round_ in range(rounds):
        engine.advance(round_ + 1)
    return engine


def mean_point(engine: LocalEngine) -> tuple[Floats, Floats]:
    x, y = engine.rows("x"), engine.rows("y")
    assert x is not None
    assert y is not None
    return x.mean(axis=0, dtype=np.float64), y.mean(axis=0, dtype=np.float64)


def test_psi_is_that_of_the_closed_form(tiny: Tiny) -> None:
    experiment = tiny()
    problem = prepare(experiment).problem
    assert isinstance(problem, QuadraticProblem)
    x, y = mean_point(engine := start(experiment))
    found = solve_psi(engine, x, y)
    exact = problem.hypergradient(x)
    assert found.converged
    np.testing.assert_allclose(found.gradient, exact, rtol=0, atol=10 * TOLERANCE * np.linalg.norm(exact))
    h_bar = problem.h.mean(axis=0) + problem.mu * np.eye(problem.dim_y)
    right = np.einsum("nij,nj->ni", problem.h, problem.b @ x + problem.c).mean(axis=0)
    solution = np.linalg.solve(h_bar, right)
    value = 0.5 * np.mean(np.sum((solution - problem.t) ** 2, axis=1)) + 0.5 * problem.rho * x @ x
    assert found.value == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize(("task", "entries"), [
    ({"name": "coefficient_tuning", "dataset": "digits"}, 3),
    ({"name": "coefficient_tuning", "dataset": "synthetic_text", "documents": 200, "features": 60}, 3),
    ({"name": "hyper_representation", "dataset": "digits"}, 3),
    ({"name": "hyper_cleaning", "dataset": "digits"}, 2),
    ({"name": "logistic_synthetic"}, 2),
    ({"name": "policy_evaluation"}, 3),
], ids=lambda value: "/".join(filter(None, (value["name"], value.get("dataset")))) if isinstance(value, dict) else "")
def test_gradient_of_psi_is_its_finite_difference(tiny: Tiny, task: dict[str, object], entries: int) -> None:
    """Along the largest entries of the gradient, each by itself, on problems in float32 too."""
    experiment = tiny(task=task, algorithm={"name": "mdbo"}, dtype="float32")
    x, y = mean_point(engine := start(experiment, rounds=1))
    found = solve_psi(engine, x, y, tolerance=1e-11)
    assert found.converged
    for at in np.argsort(-np.abs(found.gradient))[:entries]:
        step = 1e-3 * max(1.0, abs(x[at])) * (np.arange(x.size) == at)
        above, below = (solve_psi(engine, x + sign * step, found.y, tolerance=1e-11).value for sign in (1, -1))
        assert (above - below) / (2 * step.sum()) == pytest.approx(found.gradient[at], rel=1e-5)


TORCH_TASK = """
import dbo, torch

@dbo.task("ridge")
class Ridge(dbo.TorchTask):
    '''A ridge regression on learned features.'''
    strongly_convex = True

    def data(self, seed):
        rng = torch.Generator().manual_seed(seed)
        parts = [(torch.randn(40, 3, generator=rng), torch.randn(40, generator=rng)) for _ in range(3)]
        return dbo.Split(*parts)

    def init(self, generator):
        return {"w": 0.5 * torch.randn(3, 4, generator=generator)}, {"head": torch.zeros(4)}

    def lower(self, x, y, batch):
        return self.upper(x, y, batch) + 0.1 * y["head"].square().sum()

    def upper(self, x, y, batch):
        return (torch.tanh(batch.inputs @ x["w"]) @ y["head"] - batch.labels).square().mean()

    def metrics(self, x, y, test):
        return {"test_loss": self.upper(x, y, test)}
"""


def test_psi_of_a_torch_task_is_computed_in_double_precision(tmp_path: Path) -> None:
    plugin = tmp_path / "ridge_task.py"
    plugin.write_text(TORCH_TASK)
    experiment = Experiment(
        plugins=(str(plugin),), task={"name": "ridge"}, nodes=4, engine={"name": "local"},
        partition={"name": "iid"}, algorithm={"name": "mdbo"})
    x, y = mean_point(engine := start(experiment, rounds=1))
    found = solve_psi(engine, x, y, tolerance=1e-11)
    assert found.converged                  # float32 would end at a residual of about 1e-7
    at = int(np.argmax(np.abs(found.gradient)))
    step = 1e-4 * (np.arange(x.size) == at)
    above, below = (solve_psi(engine, x + sign * step, found.y, tolerance=1e-11).value for sign in (1, -1))
    assert (above - below) / 2e-4 == pytest.approx(found.gradient[at], rel=1e-5)


def test_psi_does_not_depend_on_the_packing(tiny: Tiny) -> None:
    one, two = (evaluate_psi(start(tiny(), blocks=blocks), prepare(tiny()).problem)
                for blocks in ([[0, 1, 2, 3]], [[2], [0, 3], [1]]))
    assert one.keys() == two.keys()
    for name in ("psi", "psi_gradient_norm"):
        assert one[name] == pytest.approx(two[name], rel=1e-7)


@pytest.mark.parametrize("is_large", [False, True])
def test_large_rows_are_evaluated_a_few_at_a_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """The sums are the same, in float64 or, with too much data for it, in the run's dtype."""
    problem = prepare(tiny(task={"name": "coefficient_tuning", "dataset": "digits"}, dtype="float32")).problem
    if is_large:
        monkeypatch.setattr(common_point, "MAX_BYTES", 1000)
    whole = common_point.CommonPoint(problem, range(4))
    monkeypatch.setattr(common_point, "MAX_ENTRIES", 3 * problem.dim_y + 5)
    parts = common_point.CommonPoint(problem, range(4))
    assert [shard.nodes for shard in whole._shards] == [4]
    assert [shard.nodes for shard in parts._shards] == [3, 1]
    assert {shard.y0.dtype.name for shard in parts._shards} == {"float32" if is_large else "float64"}
    random = np.random.default_rng(0)
    x, y, v = random.standard_normal(problem.dim_x), *random.standard_normal((2, problem.dim_y))
    for name in ORACLES:
        point = (x, y, v) if name in ("g_yy", "g_xy") else (x, y)
        np.testing.assert_allclose(
            parts.sum_oracle(name, *point), whole.sum_oracle(name, *point), rtol=1e-4 if is_large else 1e-13,
            atol=1e-6 if is_large else 1e-15, err_msg=name)


def test_sums_over_parts_of_the_rows_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a node's result does not depend on the others: text in compiled loops, ten nodes."""
    task = {"name": "coefficient_tuning", "dataset": "synthetic_text", "features": 4000, "documents": 400}
    problem = prepare(Experiment(nodes=10, task={**task, "classes": 20}, algorithm={"name": "mdbo"})).problem
    whole = common_point.CommonPoint(problem, range(10))
    monkeypatch.setattr(common_point, "MAX_ENTRIES", 3 * problem.dim_y)
    parts = common_point.CommonPoint(problem, range(10))
    assert [shard.nodes for shard in parts._shards] == [3, 3, 3, 1]
    random = np.random.default_rng(0)
    x, y, v = random.standard_normal(problem.dim_x), *random.standard_normal((2, problem.dim_y))
    for name in ORACLES:
        point = (x, y, v) if name in ("g_yy", "g_xy") else (x, y)
        assert parts.sum_oracle(name, *point).tobytes() == whole.sum_oracle(name, *point).tobytes(), name


def test_psi_takes_no_oracle_calls_of_the_algorithm(tiny: Tiny) -> None:
    engine = start(tiny())
    before = dict(engine.counters())
    evaluate_psi(engine, prepare(tiny()).problem)
    assert dict(engine.counters()) == before


def test_a_solve_ends_when_its_products_are_spent(tiny: Tiny) -> None:
    """An ill-conditioned problem: the result is flagged, its cost bounded."""
    experiment = tiny(task={"name": "quadratic", "dim_x": 4, "dim_y": 200, "condition": 1e8, "mu": 0.0})
    x, y = mean_point(engine := start(experiment, rounds=0))
    found = solve_psi(engine, x, y, max_products=20)
    assert not found.converged
    assert found.residual > TOLERANCE
    assert found.products <= 21


def test_models_with_more_weights_get_fewer_products() -> None:
    assert limit_products(10, 2_000_000) == MIN_PRODUCTS
    assert limit_products(10, 640) > limit_products(10, 100_000) > MIN_PRODUCTS


class _Curved:
    """g(y) = Σ log cosh(5 y): Newton's full step diverges from far away."""

    def mean_oracle(self, oracle: Oracle, x: Floats, y: Floats, v: Floats | None = None) -> Floats:
        if oracle == "g":
            return np.asarray(np.sum(np.logaddexp(5 * y, -5 * y)) + 0.05 * y @ y)
        if oracle == "g_y":
            return 5 * np.tanh(5 * y) + 0.1 * y
        if oracle == "g_yy":
            assert v is not None
            return (25 / np.cosh(5 * y) ** 2 + 0.1) * v
        return {"f": np.asarray(np.sum(y)), "f_y": np.ones_like(y)}.get(oracle, np.zeros_like(x))


def test_newton_steps_are_shortened_where_they_overshoot() -> None:
    found = solve_psi(_Curved(), np.zeros(1), np.full(3, 2.0))
    assert found.converged
    np.testing.assert_allclose(found.y, 0, atol=1e-8)


def test_psi_is_evaluated_as_often_as_the_experiment_asks(tiny: Tiny, tmp_path: Path) -> None:
    for every, rounds in {"end": [6], 2: [0, 4, 6], None: [], 0: []}.items():
        result = run(tiny(psi_every=every, eval_every=2, rounds=6), tmp_path / str(every))
        history = result.history
        has_psi = history["psi"].notna() if "psi" in history else history["round"] < 0
        assert history["round"][has_psi].tolist() == rounds


def test_psi_is_no_part_of_the_training_time(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from dbo.platform.runs import training

    slow = training.evaluate_psi
    monkeypatch.setattr(training, "evaluate_psi", lambda *args: (time.sleep(0.3), slow(*args))[1])
    result = run(tiny(psi_every="end"), tmp_path / "run")
    assert result.summary["seconds"]["training"] < 0.3 < result.summary["seconds"]["evaluation"]


def test_a_task_that_is_not_strongly_convex_has_no_psi(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from dbo.tasks.problems.quadratic import Quadratic

    monkeypatch.setattr(Quadratic, "strongly_convex", False)
    assert tiny().psi_every is None
    with pytest.raises(InputError, match=r"psi_every: 3 is not allowed; quadratic does not declare strongly_convex"):
        tiny(psi_every=3)


def test_psi_of_a_single_machine_method_is_that_of_the_network(tiny: Tiny) -> None:
    from dbo.platform.engine.shard_wrappers import pool_nodes
    from dbo.platform.network.topology import single_node

    experiment = tiny(algorithm={"name": "f2ba"})
    parts, problem = experiment.parts, prepare(experiment).problem
    pooled = LocalEngine(parts.algorithm, parts.config, pool_nodes(problem), single_node(), [[0]])
    x, y = np.ones(problem.dim_x), np.zeros(problem.dim_y)
    assert solve_psi(pooled, x, y).value == pytest.approx(solve_psi(start(tiny()), x, y).value, rel=1e-9)


def test_the_tune_split_is_scored_at_the_solution(tiny: Tiny) -> None:
    experiment = tiny(task={"name": "coefficient_tuning", "dataset": "digits"}, tune_fraction=0.3, dtype="float32")
    engine, problem = start(experiment), prepare(experiment).problem
    record = evaluate_psi(engine, problem)
    x, y = mean_point(engine)
    losses = problem.tune_losses(
        x[None].astype(np.float32), solve_psi(engine, x.astype(np.float32), y).y[None].astype(np.float32))
    assert losses is not None
    assert record["psi_tune_loss"] == pytest.approx(float(losses[0]), rel=1e-5)
    assert "psi_tune_loss" not in evaluate_psi(start(tiny()), prepare(tiny()).problem)


@pytest.mark.ray
def test_psi_on_ray_is_that_of_one_process(tiny: Tiny, ray: object, tmp_path: Path) -> None:
    engine = {"name": "ray", "nodes_per_actor": 2}
    local, remote = (run(replace_engine(tiny, e), tmp_path / e["name"]) for e in ({"name": "local"}, engine))
    for name in ("psi", "psi_gradient_norm"):
        assert remote.history[name].iloc[-1] == pytest.approx(local.history[name].iloc[-1], rel=1e-8)


def replace_engine(tiny: Tiny, engine: dict[str, object]) -> Experiment:
    return tiny(engine=engine, psi_every=3)
