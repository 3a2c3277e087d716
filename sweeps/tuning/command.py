"""Tuned presets, found by a search that anyone can repeat: the same trials and oracle calls for every algorithm.

    python -m dbo.sweeps.tuning --write

A trial is a run of `budget` oracle calls per node; its score is the area under a curve against oracle calls: the nodes'
mean accuracy (quadratic: decades won towards the solution). Half of the trials are spread over the ranges of
`tuning.yaml` on a log scale, after the algorithm's defaults and published values; the others gather around the best.
The best then run again on other seeds for longer, with larger steps and on denser graphs, and the highest mean score
among those that neither blow up nor decay is the preset.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dbo.platform.config import yaml_io
from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.sweeps.tuning.plan import Plan, Search, Values, read, searches
from dbo.sweeps.tuning.search import Candidate, Found, tune
from dbo.sweeps.tuning.trials import NotTried, Trials

ROOT = Path(__file__).resolve().parents[2]
PRESETS, PAGE = ROOT / "algorithms" / "presets", ROOT / "docs" / "tuning.md"
LOG = PAGE.with_suffix(".jsonl") if PAGE.exists() else Path("runs") / "tuning.jsonl"      # a checkout, or installed
_REACHED = {"accuracy": "accuracy", "distance": "distance"}
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    algorithms: Annotated[str, typer.Option(metavar="A,B,…", help="Which ones; default: all.")] = "",
    tasks: Annotated[str, typer.Option(metavar="T,U,…", help="Such as quadratic; default: all without download.")] = "",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Where downloaded data lie already.")
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="Per search, instead of the plan's number.")] = None,
    log: Annotated[Path, typer.Option(metavar="FILE", help="A line per trial; what it holds is not run again.")] = LOG,
    write: Annotated[bool, typer.Option("--write", help="Write the presets and the tables of docs/tuning.md.")] = False,
) -> None:
    """Search step sizes for every algorithm and task, with equal means, and show what was found."""
    if write and not PAGE.exists():
        raise InputError(f"--write: {PAGE} is not there; presets are written in a checkout of the project")
    if write and trials is not None:
        raise InputError("--trials: presets are written for the number in tuning.yaml; change it there")
    console, plan = Console(), read()
    todo = searches(plan, _names(algorithms), _names(tasks), trials, data_dir)
    memory = Trials(log)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for search in todo:
            bar = progress.add_task(f"{search.algorithm} {search.task}", total=search.trials + 1)
            for found in tune(search, memory):
                progress.advance(bar)
                if found is not None:
                    progress.remove_task(bar)
                    console.print(told(found), highlight=False, soft_wrap=True)
                    if write:
                        write_preset(found)
    if write:
        write_page(remembered(plan, log), PAGE)
    console.print(f"{memory.ran} trials run; log: {log}", highlight=False, soft_wrap=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def remembered(plan: Plan, log: Path) -> list[Found]:
    """What the searches that the log holds completely have found; nothing is run."""
    memory = Trials(log, remember_only=True)
    found = []
    for search in searches(plan, tasks=list(plan.tasks)):
        try:
            found += [end for end in tune(search, memory) if end is not None]
        except NotTried:
            continue
    return found


def told(found: Found) -> str:
    """One line about a search."""
    search, published = found.search, found.published
    return (
        f"{search.task} {search.algorithm}: {_score(found.chosen)} with "
        f"{_show(found.chosen.values)}; defaults {_score(found.plain)}, published {_score(published)}"
    )


def _score(candidate: Candidate | None) -> str:
    if candidate is None:
        return "–"
    return "diverged" if candidate.score is None else f"{candidate.score:.3f}"


def _show(values: Values) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def write_preset(found: Found, folder: Path = PRESETS) -> None:
    """Puts the chosen values into the algorithm's file, beside those for other tasks."""
    search = found.search
    file = folder / f"{search.algorithm}.yaml"
    presets = yaml_io.read(file) if file.exists() else {}
    presets[search.task] = found.chosen.values
    order = [*search.plan.tasks, *(task for task in presets if task not in search.plan.tasks)]
    write_atomically(file, "".join([
        *(f"# {line}\n" for line in _header(search, [task for task in order if task in presets])),
        *(yaml_io.dump({task: presets[task]}) for task in order if task in presets),
    ]))


def _header(search: Search, tasks: Sequence[str]) -> Iterator[str]:
    plan = search.plan
    budgets = (
        f"{task} {plan.tasks[task].trials or plan.trials} × {plan.tasks[task].budget}" for task in tasks
        if task in plan.tasks
    )
    yield "Tuned step sizes, for what an experiment leaves out. Found by"
    yield f"    python -m dbo.sweeps.tuning --algorithms {search.algorithm} --write"
    yield "Score: area under node_accuracy_mean, quadratic: decades towards the solution,"
    yield f"against oracle calls ({_weights(plan)} per node); mean of seeds {plan.seeds.search} and {plan.seeds.final}."
    yield "Trials × oracle calls, the same for every algorithm (docs/tuning.md):"
    yield f"    {', '.join(budgets)}"


def _weights(plan: Plan) -> str:
    hvp, jvp = plan.weights["hvp_calls"], plan.weights["jvp_calls"]
    return f"gradients + {hvp:g} hvp + {jvp:g} jvp"


def write_page(found: Sequence[Found], page: Path) -> None:
    """Replaces the tables between the two marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not mark or not end:
        raise InputError(f"{page}: the marks {_BEGIN} and {_END} are missing")
    write_atomically(page, f"{before}{_BEGIN}\n\n{tables(found)}\n{_END}{after}")


def tables(found: Sequence[Found]) -> str:
    """A Markdown table per task."""
    parts = []
    for task in dict.fromkeys(end.search.task for end in found):
        here = [end for end in found if end.search.task == task]
        about, search = here[0].search.about, here[0].search
        lines = [
            f"### {task}", "",
            f"{search.trials} trials of {about.budget} oracle calls per node for every algorithm.", "",
            f"| algorithm | rounds | chosen | score | {_REACHED[about.score]} | defaults | published values | score |",
            "|---|---|---|---|---|---|---|---|",
        ]
        parts.append("\n".join([*lines, *(_row(end) for end in here), ""]))
    return "\n".join(parts)


def _row(end: Found) -> str:
    chosen, published = end.chosen, end.published
    cells = (
        end.search.algorithm, str(chosen.first.rounds), _show(chosen.values), _score(chosen),
        f"{chosen.final.reached:.3g}", _score(end.plain),
        _show(published.values) if published else "–", _score(published),
    )
    return f"| {' | '.join(cells)} |"
