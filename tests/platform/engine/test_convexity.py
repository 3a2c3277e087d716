"""A method that needs a combination of f and g to be strongly convex warns where it is not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.engine.convexity import describe_convexity, find_smallest_curvature
from dbo.platform.experiment import Experiment
from dbo.platform.run import run
from dbo.platform.runs.preparation import prepare
from dbo.platform.runs.result import RunCallback


def problem_of(**task: Any) -> Any:
    return prepare(Experiment(task={"name": "quadratic", **task}, nodes=4, dtype="float64")).problem


@pytest.mark.parametrize("lam", [4.0, 10.0, 1000.0])
def test_smallest_curvature_is_the_smallest_eigenvalue(lam: float) -> None:
    """On the quadratic, ∇²(g − f/λ) is H̄ − I/λ."""
    problem = problem_of(dim_y=12)
    expected = np.linalg.eigvalsh(problem.hessians.mean(0))[0] - 1 / lam
    assert find_smallest_curvature(problem, -1 / lam, 1.0) == pytest.approx(expected, rel=1e-4)


def test_a_negative_curvature_is_a_witness() -> None:
    """Where g − f/λ is indefinite a negative quotient is returned, not below the smallest eigenvalue."""
    problem = problem_of(dim_y=12)
    smallest = np.linalg.eigvalsh(problem.hessians.mean(0))[0]
    lam = 1 / (smallest + 0.05)
    assert -0.05 - 1e-9 <= find_smallest_curvature(problem, -1 / lam, 1.0) < 0


@pytest.mark.parametrize(("lam", "warns"), [(10.0, False), (2.0, True)])
def test_the_warning_names_method_function_and_curvature(lam: float, warns: bool) -> None:
    made = algorithms()["c2dfb_central"]
    found = describe_convexity(made, made.config(lam=lam), problem_of())
    if warns:
        assert found is not None
        assert found.startswith("warning: c2dfb_central needs g − 0.5 f to be strongly convex in y; at the start its")
    else:
        assert found is None
    assert describe_convexity(replace(made, convex=None), made.config(lam=lam), problem_of()) is None


@pytest.mark.parametrize(("dataset", "warns"), [("digits", False), ("synthetic_text", True)])
def test_a_run_warns_once_at_its_start(tmp_path: Any, dataset: str, warns: bool) -> None:
    """In text, validation documents have words that no training document has: g is nearly flat there, f is not."""
    notices: list[str] = []

    class Listener(RunCallback):
        def on_notice(self, text: str) -> None:
            notices.append(text)

    small = {"documents": 200, "features": 400} if dataset == "synthetic_text" else {}
    run(Experiment(
        task={"name": "coefficient_tuning", "dataset": dataset, **small},
        algorithm={"name": "c2dfb_central", "lam": 2.0}, nodes=4, rounds=1, engine={"name": "local"},
        tracking={"uri": "off"},
    ), tmp_path / "run", callback=Listener())
    assert sum("needs g − 0.5 f" in text for text in notices) == warns
