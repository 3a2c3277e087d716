"""Choose the target of a comparison or a sweep from the metrics that its task declares."""

from collections.abc import Mapping

from dbo.platform.errors import InputError
from dbo.platform.runs.schema import (
    CLOSED_FORM_TARGET,
    CLOSED_FORMS,
    DEFAULT_TARGET,
    METRICS,
    Direction,
    Record,
    Target,
)
from dbo.tasks.api import Problem
from dbo.tasks.registry import TASKS


def read_directions(task: str) -> Mapping[str, Direction]:
    """Return the metrics that a task declares; a plugin may declare none."""
    declared: Mapping[str, Direction] = getattr(TASKS[task], "directions", {})
    return declared


def list_own_metrics(task: str) -> dict[str, Direction]:
    """Return the metrics of a task besides those that every run has; `node_…_mean` is a mean over the nodes."""
    own = {name: direction for name, direction in read_directions(task).items() if name not in METRICS}
    return own | {f"node_{name}_mean": direction for name, direction in own.items()}


def choose_target(requested: str | None, task: str) -> Target:
    """Return the requested target, or that of the first of accuracy and distance to the solution that a task declares.

    A metric that the task does not declare is refused.
    """
    declared = read_directions(task)
    default = DEFAULT_TARGET if "test_accuracy" in declared else CLOSED_FORM_TARGET
    if requested is None and default is CLOSED_FORM_TARGET and default.metric not in declared:
        raise InputError(f"--target: a value is required; {task} declares {_list_declared(declared)}, e.g. "
                         f"--target {next(iter(declared), 'upper_loss')}=LEVEL")
    target = Target.parse(str(default) if requested is None else requested, list_own_metrics(task))
    needed = {name: name for name in CLOSED_FORMS} | {
        "test_accuracy": "test_accuracy", "node_accuracy_mean": "test_accuracy", "node_accuracy_min": "test_accuracy",
        "public_accuracy_mean": "test_accuracy", "public_accuracy_min": "test_accuracy"}
    if needed.get(target.metric, target.metric) not in declared and target.metric in needed:
        advice = f"; try {default}" if requested is not None and _is_declared(default, declared) else ""
        raise InputError(
            f"--target: {target} is not allowed; {task} has no {target.metric}, it declares "
            f"{_list_declared(declared)}{advice}")
    return target


def check_measured(target: Target, problem: Problem, task: str) -> None:
    """Refuse a target that the task declares but does not measure."""
    shard = problem.shard([0])
    measured: Record = dict(problem.evaluate(shard.x0, shard.y0))
    needed = "test_accuracy" if target.metric.startswith("node_accuracy_") else target.metric
    if needed in read_directions(task) and needed not in {*measured, *problem.task_metrics(shard.x0[0], shard.y0[0])} \
            and needed not in CLOSED_FORMS:
        raise InputError(
            f"--target: {target} is not allowed; {task} declares {needed} but measures {', '.join(measured)}; "
            f"e.g. --target {next(iter(measured), 'upper_loss')}=LEVEL")


def _is_declared(target: Target, declared: Mapping[str, Direction]) -> bool:
    return target is DEFAULT_TARGET or target.metric in declared


def _list_declared(declared: Mapping[str, Direction]) -> str:
    return ", ".join(f"{name} ({direction})" for name, direction in declared.items()) or "no metrics"
