"""The default target comes from the metrics that a task declares, and a task's own metric can be one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards.load import load_runs
from dbo.platform.errors import InputError
from dbo.platform.runs.compare import plan
from dbo.platform.runs.schema import Target
from dbo.platform.runs.targets import choose_target, list_own_metrics
from dbo.sweeps.plan import read_sweep

OWN_TASK = '''
import dbo, torch

@dbo.task("regression_of_test")
class Regression(dbo.TorchTask):
    """Ridge regression whose regularisation is tuned."""

    directions = {**dbo.TorchTask.directions, "r_squared": "max"}

    def data(self, seed):
        inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
        labels = inputs @ torch.tensor([1.0, -2.0, 0.5])
        return dbo.Split(*((inputs[part::3], labels[part::3]) for part in range(3)))

    def init(self, generator):
        return torch.zeros(3), torch.zeros(3)

    def lower(self, x, y, batch):
        return (batch.inputs @ y - batch.labels).square().mean() + (x.exp() * y.square()).mean()

    def upper(self, x, y, batch):
        return (batch.inputs @ y - batch.labels).square().mean()

    def metrics(self, x, y, test):
        return {"r_squared": 1 - (test.inputs @ y - test.labels).var() / test.labels.var()}
'''


@pytest.mark.parametrize(("task", "target"), [
    ("coefficient_tuning", "node_accuracy_mean=0.9"), ("logistic_synthetic", "node_accuracy_mean=0.9"),
    ("quadratic", "solution_error=0.1"), ("policy_evaluation", "solution_error=0.1"),
])
def test_the_default_is_a_metric_that_the_task_declares(task: str, target: str) -> None:
    """Also of a task that generates its samples and so has no data set."""
    assert str(choose_target(None, task)) == target


def test_own_metrics_can_be_targets() -> None:
    """Of the mean model, and as a mean over the nodes; the text of the target keeps their direction."""
    assert list_own_metrics("hyper_cleaning") == {"corruption_f1": "max", "node_corruption_f1_mean": "max"}
    target = choose_target("corruption_f1=0.8", "hyper_cleaning")
    assert target == Target("corruption_f1", 0.8, "max")
    assert str(target) == "corruption_f1>=0.8"
    assert Target.parse(str(target)) == target
    assert choose_target("value_error=0.3", "policy_evaluation").direction == "min"


@pytest.mark.parametrize(("requested", "task", "part"), [
    ("corruption_f1=0.8", "quadratic", "is not metric=level"),
    ("test_accuracy=0.5", "quadratic", "try solution_error=0.1"),
    ("solution_error=0.1", "coefficient_tuning", "declares test_accuracy"),
    ("test_accuracy<=0.5", "hyper_cleaning", "is not metric=level"),
    ("round>=5", "quadratic", "is not metric=level"),
])
def test_a_metric_that_is_not_declared_is_refused(requested: str, task: str, part: str) -> None:
    """One line with what the task declares."""
    with pytest.raises(InputError, match="--target: ") as error:
        choose_target(requested, task)
    assert part in str(error.value)


def test_a_comparison_measures_a_task_s_own_metric(
    dbo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plugin: table, group and report use it; the accuracy that it inherits but does not measure is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_TASK)
    keys = ["plugins=[own.py]", "task=regression_of_test", "engine=local", "nodes=3", "partition=iid", "rounds=3",
            "tracking.uri=off", "algorithm.eta_y=0.1", "--algorithms", "d_soba"]
    refused = dbo("compare", *keys, "--out", "c")
    assert refused.code == 2
    assert "measures r_squared; e.g. --target r_squared=LEVEL" in refused.err
    done = dbo("compare", *keys, "--target", "r_squared=0.01", "--out", "c")
    assert done.code == 0, done.err
    assert "r_squared>=0.01" in done.out
    assert f"{json.loads(Path('c/d_soba/summary.json').read_text())['final']['r_squared']:.4g}" in done.out
    (run,) = load_runs([Path("c")]).runs
    assert run.target == Target("r_squared", 0.01, "max")
    assert run.last_value("r_squared") is not None
    _, target = plan(None, keys[:2], ["d_soba"], "node_r_squared_mean=0.5")
    assert target.is_maximized


def test_a_sweep_ranks_by_its_target(tmp_path: Path) -> None:
    """Without a metric: that of the target; without a target: that of the task."""
    file = tmp_path / "s.yaml"
    file.write_text("axes: {seed: [0, 1]}\nexperiment: {task: quadratic}\n")
    sweep = read_sweep(file)
    assert (sweep.target, sweep.metric, sweep.direction) == ("solution_error=0.1", "solution_error", "min")
    sweep = read_sweep(file, ["task=hyper_cleaning", "target=corruption_f1=0.5"])
    assert (sweep.metric, sweep.direction) == ("corruption_f1", "max")
