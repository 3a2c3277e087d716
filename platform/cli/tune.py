"""`dbo tune`: search step sizes for an experiment's task and write them to a preset file."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dbo.platform.cli.console import Arguments, Quiet, console, print_line, split_arguments, typed_command
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    from dbo.sweeps.tuning.plan import StepSizeSearch
    from dbo.sweeps.tuning.search import SearchResult
    from dbo.sweeps.tuning.trials import TrialRunner

_LINE_EVERY = 5.0      # seconds between lines where there is no screen


def tune_steps(
    arguments: Arguments = None,
    algorithms: Annotated[str | None, typer.Option(
        "--algorithms", metavar="A,B,...", help="Algorithms to tune; default: the experiment's.")] = None,
    trials: Annotated[int, typer.Option(
        "--trials", metavar="N", help="Step sizes to try per algorithm; the best run again.")] = 16,
    budget: Annotated[int | None, typer.Option(
        "--budget", metavar="CALLS", help="Oracle calls of a node per trial; default: 2000, or the shipped plan's.",
    )] = None,
    ranges: Annotated[list[str] | None, typer.Option(
        "--range", metavar="ROLE=LOW:HIGH", help="Range of lower, upper, solve, curvature, consensus, weight or rate "
        "steps, may be repeated.")] = None,
    out: Annotated[Path, typer.Option(
        "--out", metavar="FILE.yaml", help="Preset file to write.")] = Path("presets.yaml"),
    resume: Annotated[bool, typer.Option(
        "--resume", help="Keep the trials that an interrupted search has logged beside the preset file.")] = False,
    quiet: Quiet = False,
) -> None:
    """Search step sizes for a task and write a preset file.

    Every algorithm gets the same trials and oracle calls. A trial scores the upper loss on samples that are held out
    for it. Experiments use the file with presets=FILE.
    """
    from dbo.platform.config import presets
    from dbo.platform.config.experiment import Experiment

    file, overrides = split_arguments(arguments)
    if trials < 4:
        raise InputError(f"--trials: {trials} is not allowed; must be ≥ 4")
    if budget is not None and budget < 1:
        raise InputError(f"--budget: {budget} is not allowed; must be ≥ 1")
    experiment = Experiment.read(file, overrides)
    names = [name.strip() for name in (algorithms or experiment.algorithm["name"]).split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise InputError(f"--algorithms: {algorithms!r} is not allowed; must be different names, e.g. c2dfb,mdbo")
    if out.suffix not in (".yaml", ".yml") or out.is_dir():
        raise InputError(f"--out: {out} is not allowed; must be a file that ends with .yaml")
    if out.exists():
        presets.read_file(out, "--out")

    from dbo.sweeps.tuning import own_plan
    from dbo.sweeps.tuning.trials import TrialRunner

    bounds = own_plan.parse_ranges(ranges or [])
    plan = own_plan.plan_searches(experiment, names, trials, budget, bounds)
    log = out.with_suffix(".jsonl")
    runner = TrialRunner(log)
    for search in plan.searches:
        if not resume and runner.has_logged(search):
            raise InputError(
                f"--out: {log} has trials of {search.algorithm} on {search.task}; --resume keeps them, "
                f"or choose another --out")
    failed = []
    for search in plan.searches:
        try:
            result = _run_search(search, runner, quiet)
        except InputError as error:
            if search is plan.searches[0] and not runner.ran:
                raise
            failed.append(str(error))
            continue
        own_plan.write_preset(out, result, typed_command())
        print_line(_describe(result))
    print_line(f"{runner.ran} trials run; log: {log}")
    if len(failed) < len(plan.searches):
        print_line(f"preset file: {out}; use it with presets={out}")
    if failed:
        raise RunError("; ".join(failed))


def _run_search(search: "StepSizeSearch", runner: "TrialRunner", quiet: bool) -> "SearchResult":
    """Run one search under a progress bar; without a screen, print a line every few seconds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dbo.sweeps.tuning.search import run_search

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as progress:
        name = f"{search.algorithm} on {search.task}"
        bar = progress.add_task(name, total=search.trials)
        done, extra, printed_at = 0, 0, time.monotonic()

        def show(text: str, at_once: bool = False) -> None:
            nonlocal printed_at
            if quiet or console.is_terminal or not (at_once or time.monotonic() - printed_at > _LINE_EVERY):
                return
            printed_at = time.monotonic()
            print_line(f"{name}: {text}")

        show(f"{search.trials} trials of at most {search.task_plan.budget:,} oracle calls", at_once=True)

        def count() -> None:
            nonlocal extra
            if done == search.trials:          # trials of the best on other seeds, with larger steps
                extra += 1
                progress.update(bar, description=f"{name}: confirming the best, trial {extra}")
                show(f"confirming the best, trial {extra}")

        runner.on_trial = count
        for result in run_search(search, runner):
            if result is not None:
                return result
            done += 1
            progress.advance(bar)
            show(f"trial {done} of {search.trials}")
    raise AssertionError("a search ends with a result")


def _describe(result: "SearchResult") -> str:
    search, chosen = result.search, result.chosen
    metric = search.task_plan.score
    steps = ", ".join(f"{name} {value:g}" for name, value in chosen.values.items())
    defaults = "diverge" if result.defaults.score is None else f"score {result.defaults.score:.3f}"
    value = f"{metric} {chosen.first.reached:.4g} after {search.horizon} oracle calls"
    return f"{search.algorithm} on {search.task}: {steps}; score {chosen.score:.3f}, {value}; the defaults {defaults}"
