"""Search the step sizes of presets. Every algorithm gets the same number of trials and oracle calls; you can repeat it:

    python -m dbo.sweeps.tuning --write

A trial is a run of `budget` oracle calls per node. Its score is the area under a curve against oracle calls: the
share by which the upper loss on the tune split has fallen, at (x̄, y*(x̄)) or at the nodes' own models (quadratic:
decades won towards the solution). No test sample has a part in it. Half of the trials are spread over the ranges of
`tuning.yaml` on a log scale, after the algorithm's defaults and published values; the others are sampled around the
best. The best run again on other seeds for longer, with larger steps and on denser graphs. The preset is the highest
mean score among those that neither diverge nor decay. Stop the command at any time; the same command continues from
its log.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dbo.platform.config import yaml_io
from dbo.platform.config.terminal import escape_control
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.sweeps.tuning.plan import StepSizes, StepSizeSearch, TuningPlan, list_searches, read_plan
from dbo.sweeps.tuning.search import Candidate, NoStableTrial, SearchResult, build_entry, run_search
from dbo.sweeps.tuning.trials import TrialNotLogged, TrialRunner

ROOT = Path(__file__).resolve().parents[2]
PRESETS, PAGE = ROOT / "algorithms" / "presets", ROOT / "docs" / "tuning.md"
LOG = PAGE.with_name("tuning-psi.jsonl") if PAGE.exists() else Path("runs") / "tuning.jsonl"    # a checkout, or not
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    algorithms: Annotated[str, typer.Option(metavar="A,B,…", help="Algorithms to tune; default: all.")] = "",
    tasks: Annotated[
        str, typer.Option(metavar="T,U,…", help="Tasks, such as quadratic; default: all that need no download.")
    ] = "",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Folder with downloaded data.")
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="Trials per search; default: the plan's.")] = None,
    log: Annotated[Path, typer.Option(metavar="FILE", help="A line per trial; logged trials do not run again.")] = LOG,
    write: Annotated[bool, typer.Option("--write", help="Write the presets and the tables of docs/tuning.md.")] = False,
) -> None:
    """Search step sizes for every algorithm and task, with equal budgets, and print the results."""
    if write and not PAGE.exists():
        raise InputError(f"--write: {PAGE} does not exist; presets are written in a checkout of the project")
    if write and trials is not None:
        raise InputError("--trials: is not allowed with --write; change the number in tuning.yaml")
    console, plan = Console(), read_plan()
    searches = list_searches(plan, _split_names(algorithms), _split_names(tasks), trials, data_dir)
    runner = TrialRunner(log)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left:"), TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            whole = progress.add_task("searches", total=len(searches))
            for search in searches:
                bar = progress.add_task(f"{search.algorithm} {search.task}", total=search.trials + 1)
                runner.on_trial = lambda bar=bar, name=f"{search.algorithm} {search.task}": progress.update(    # type: ignore[misc]
                    bar, description=f"{name}, {runner.ran} trials run")
                line = ""
                try:
                    for result in run_search(search, runner):
                        progress.advance(bar)
                        if result is not None:
                            line = format_result(result)
                            if write:
                                write_preset(result)
                except NoStableTrial as error:
                    line = f"{error}; no preset"
                progress.remove_task(bar)
                console.print(escape_control(line), highlight=False, markup=False, soft_wrap=True)
                progress.advance(whole)
    except KeyboardInterrupt:
        stopped = escape_control(f"stopped after {runner.ran} trials; the same command continues from {log}")
        console.print(stopped, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if write:
        write_page(replay_log(plan, log), PAGE)
    ended = escape_control(f"{runner.ran} trials run; log: {log}")
    console.print(ended, highlight=False, markup=False, soft_wrap=True)


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def replay_log(plan: TuningPlan, log: Path) -> list[SearchResult]:
    """Return the results of the searches that the log holds completely, with a result; no trial runs."""
    runner = TrialRunner(log, replay_only=True)
    results = []
    for search in list_searches(plan, tasks=list(plan.tasks)):
        try:
            results += [result for result in run_search(search, runner) if result is not None]
        except (TrialNotLogged, NoStableTrial):
            continue
    return results


def format_result(result: SearchResult) -> str:
    """Describe a search in one line."""
    search = result.search
    return (
        f"{search.task} {search.algorithm}: {_format_score(result.chosen)} with {_format_steps(result.chosen.values)}; "
        f"defaults {_format_score(result.defaults)}, published {_format_score(result.published)}"
    )


def _format_score(candidate: Candidate | None) -> str:
    if candidate is None:
        return "–"
    return "diverged" if candidate.score is None else f"{candidate.score:.3f}"


def _format_steps(values: StepSizes) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def write_preset(result: SearchResult, folder: Path = PRESETS) -> None:
    """Write the chosen values into the algorithm's preset file; entries of other tasks stay."""
    search = result.search
    file = folder / f"{search.algorithm}.yaml"
    presets = yaml_io.read(file) if file.exists() else {}
    presets[search.task] = build_entry(result)
    order = [*search.plan.tasks, *(task for task in presets if task not in search.plan.tasks)]
    write_atomically(file, "".join([
        *(f"# {line}\n" for line in _make_header(search)),
        *(yaml_io.dump({task: presets[task]}) for task in order if task in presets),
    ]))


def _make_header(search: StepSizeSearch) -> Iterator[str]:
    plan = search.plan
    yield "Tuned step sizes, for what an experiment leaves out. Entries with a score were found by"
    yield f"    python -m dbo.sweeps.tuning --algorithms {search.algorithm} --write"
    yield f"with oracle calls counted as {_format_weights(plan)} per node, the same number for every algorithm."
    yield "Bare entries are older: they were selected on test accuracy (docs/tuning.md)."


def _format_weights(plan: TuningPlan) -> str:
    hvp, jvp = plan.weights["hvp_calls"], plan.weights["jvp_calls"]
    return f"gradients + {hvp:g} hvp + {jvp:g} jvp"


def write_page(results: Sequence[SearchResult], page: Path) -> None:
    """Replace the tables between the two marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        raise InputError(f"{page}: the marks {_BEGIN} and {_END} are missing")
    write_atomically(page, f"{before}{_BEGIN}\n\n{format_tables(results)}\n{_END}{after}")


def format_tables(results: Sequence[SearchResult]) -> str:
    """Return a Markdown table per task."""
    parts = []
    for task in dict.fromkeys(result.search.task for result in results):
        of_task = [result for result in results if result.search.task == task]
        search = of_task[0].search
        task_plan = search.task_plan
        reached = task_plan.score
        lines = [
            f"### {task}", "",
            f"{search.trials} trials of {task_plan.budget} oracle calls per node for every algorithm"
            f"{_format_rungs(search)}.", "",
            f"| algorithm | rounds | chosen | score | {reached} | defaults | published values | score |",
            "|---|---|---|---|---|---|---|---|",
        ]
        parts.append("\n".join([*lines, *(_format_row(result) for result in of_task), ""]))
    return "\n".join(parts)


def _format_rungs(search: StepSizeSearch) -> str:
    """Return what successive halving adds to the trials."""
    budget = search.task_plan.budget
    return "".join(f"; the best {kept} again with {budget * stretch}" for stretch, kept in search.rungs.items())


def _format_row(result: SearchResult) -> str:
    chosen, published = result.chosen, result.published
    entries = (
        result.search.algorithm, str(chosen.first.rounds), _format_steps(chosen.values), _format_score(chosen),
        f"{chosen.final.reached:.3g}", _format_score(result.defaults),
        _format_steps(published.values) if published else "–", _format_score(published),
    )
    return f"| {' | '.join(entries)} |"
