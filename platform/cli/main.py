"""The command line. Exit 0: done; 1: the run failed; 2: the input is wrong, told in one line, nothing written."""

import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from dbo.platform.cli.console import Arguments, Out, Quiet, check_out, console, plainly, split, typed, warn
from dbo.platform.cli.report import report, write_outputs
from dbo.platform.cli.sweep import sweep
from dbo.platform.cli.watch import watch
from dbo.platform.config.redact import masked
from dbo.platform.errors import InputError, InUse, NodeFailure, RunError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
)

_UsageError: Any = typer.BadParameter.__base__      # click's, of which typer may carry a copy of its own


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"dbo {version('dbo')}", highlight=False)
        raise typer.Exit


@app.callback()
def common(
    shown: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Run, compare and verify decentralized bilevel optimization algorithms."""


@app.command()
def run(
    arguments: Arguments = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Go on in --out from the end of a shorter run.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run one experiment into a folder."""
    from dbo.platform.config.experiment import Experiment

    file, overrides = split(arguments)
    check_out(out)
    experiment = Experiment.read(file, overrides)       # before the rest is loaded: wrong input is told at once

    from dbo.platform.cli.progress import Bars
    from dbo.platform.runs.runner import adding_to, local_folder
    from dbo.platform.runs.runner import run as run_experiment
    from dbo.platform.tracking.process import following

    with following(local_folder(experiment, out), experiment.tracking.uri, experiment.tracking.experiment, warn):
        if quiet:
            result = run_experiment(experiment, out, resume=resume, start_from=start_from)
        else:
            with Bars(console) as bars:
                result = run_experiment(experiment, out, resume=resume, start_from=start_from, watcher=bars)
            _show_run(result)
        try:
            with adding_to(out):
                write_outputs("run", result.folder, quiet)
        except (InUse, RunError) as error:          # the run itself is where it should be
            warn(f"what is made of the results is not with them: {error}")
    if result.status != "finished":
        hint = _about_preset(experiment) if result.status == "diverged" else ""
        raise RunError(f"{result.status}: {result.summary.get('error', '')}{hint}")


def _about_preset(experiment: Any) -> str:
    """What a run that diverged had from a preset: it was found with other things at their defaults."""
    from dbo.platform.config import presets

    section = experiment.algorithm
    tuned = presets.lookup(section["name"], experiment.task["name"], experiment.task.get("dataset"))
    if not (used := [f"{key} = {value:g}" for key, value in tuned.items() if section.get(key) == value]):
        return ""
    return f"; {', '.join(used)} come from a preset, found with all else at its defaults: try smaller ones"


def _show_run(result: Any) -> None:
    last = result.history.iloc[-1] if len(result.history) else {}
    grid = Table.grid(padding=(0, 2))
    for key, value in dict(last).items():
        if value is not None and key != "timestamp":
            grid.add_row(f"  {key}", f"{value:.6g}" if isinstance(value, float) else str(value))
    console.print(f"\n{result.experiment.algorithm['name']} {result.status}", style="bold", highlight=False)
    console.print(grid)
    plainly(f"  folder              {result.folder}")


@app.command()
def compare(
    arguments: Arguments = None,
    algorithms: Annotated[
        str | None, typer.Option("--algorithms", metavar="A,B,…", help="Which ones; see dbo list.")] = None,
    target: Annotated[str | None, typer.Option(
        "--target", metavar="METRIC=LEVEL", help="Whose price is told, e.g. test_accuracy=0.7.")] = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", help="The folder for all of them; default: below runs/.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run several algorithms on the same problem and tell who reaches the target at what price."""
    from dbo.platform.cli.progress import Bars
    from dbo.platform.runs import compare as comparing
    from dbo.platform.tracking.process import following

    file, overrides = split(arguments)
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    if algorithms is not None and not names:
        raise InputError(f"--algorithms: {algorithms!r} is not allowed; must name some, as in c2dfb,mdbo")
    check_out(out, url=False)
    experiments, level = comparing.plan(file, overrides, names, target)
    folder = out or comparing.default_folder(experiments)
    tracking = experiments[0].tracking
    with following(folder, tracking.uri, tracking.experiment, warn):
        if quiet:
            results = comparing.compare(experiments, level, folder, None, typed())
        else:
            _announce(experiments[0])
            with Bars(console) as bars:
                results = comparing.compare(experiments, level, folder, bars, typed())
        _show_comparison(comparing.table(results, level), str(level))
        plainly(f"folder: {folder}")
        write_outputs("compare", folder, quiet)
    bad = [result for result in results if result.status != "finished"]
    if bad:
        raise RunError("; ".join(f"{r.experiment.algorithm['name']} {r.status}" for r in bad))


def _announce(experiment: Any) -> None:
    section = experiment.partition
    parameters = ", ".join(f"{key} = {value}" for key, value in section.items() if key != "name")
    data = experiment.task.get("dataset", "")
    console.print(
        f"{experiment.task['name']} {data} · {experiment.nodes} nodes · {experiment.topology['name']} · "
        f"{section['name']} {parameters} · seed {experiment.seed}", highlight=False,
    )


def _show_comparison(rows: Any, target: str) -> None:
    learnt = rows["test_accuracy"].notna().any()
    scores = _SCORES if learnt else {key: found for key, found in _DISTANCES.items() if found[0] in rows}
    whose = " (mean model, nodes' mean, worst node)" if learnt else " (mean model)"
    title = f"price of {target}, then where each ended{whose}"
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  show_edge=False)
    for name in ("algorithm", "rounds", "MB", "seconds", *scores, "total MB"):
        number = name != "algorithm"                # a number that is cut is none
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows.to_dict("records"):
        price = [_figure(row[key], form) for key, form in _PRICE]
        name = row["algorithm"] + ("" if row["status"] == "finished" else f" ({row['status']})")
        table.add_row(name + ("*" if row["single_machine"] else ""), price[0].replace("–", "not reached"), *price[1:],
                      *(_figure(row[key], form) for key, form in scores.values()),
                      _figure(row["comm_mb"], ".2f"))
    console.print(table)
    if rows["single_machine"].any():
        console.print("* a reference on one machine that holds all data: it has nothing to send", highlight=False)


_PRICE = (("rounds_to_target", ".0f"), ("mb_to_target", ".2f"), ("seconds_to_target", ".2f"))
_SCORES = {
    "accuracy": ("test_accuracy", ".4f"), "nodes": ("node_accuracy_mean", ".4f"), "worst": ("node_accuracy_min", ".4f"),
}
_DISTANCES = {
    "from x*": ("solution_error", ".2g"), "from x*_λ": ("penalty_error", ".2g"), "loss": ("upper_loss", ".4g"),
}


def _figure(value: Any, form: str) -> str:
    """Figures of a thousand and more without decimals: columns are narrow."""
    if value is None or value != value:
        return "–"
    return f"{value:.0f}" if value >= 1000 else format(value, form)


@app.command()
def submit(
    arguments: Arguments = None,
    address: Annotated[str, typer.Option(
        "--address", metavar="URL", help="The cluster's Jobs server, e.g. http://127.0.0.1:8265.")] = "",
    storage: Annotated[str, typer.Option(
        "--storage", metavar="PLACE", help="Below which the run's folder is made: a shared path, or a URL.")] = "",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Fetch the run's folder to here.")] = None,
    wheel: Annotated[Path | None, typer.Option(
        "--wheel", help="A dbo wheel to bring along, where the cluster has none installed.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end, or leave it.")] = True,
) -> None:
    """Run one experiment, or `sweep NAME …`, as a job of a Ray cluster; exits as the job did."""
    from dbo.platform.cli import submit as submitting
    from dbo.platform.config.experiment import Experiment

    job = submitting.job_of(arguments[0], arguments[1:]) if arguments else None
    if job is None:
        file, overrides = split(arguments)
        job = submitting.experiment_job(Experiment.read(file, overrides))
    for name, value in (("--address", address), ("--storage", storage)):
        if not value:
            raise InputError(f"{name}: a value is required")
    code = submitting.submit(job, address, storage, fetch_to=out, wheel=wheel, wait=wait, say=plainly)
    if code:
        sys.exit(code)


@app.command()
def verify(
    algorithm: Annotated[list[str] | None, typer.Option(
        "--algorithm", metavar="NAME", help="Which one, may be repeated; default: all.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(
        "--plugin", metavar="FILE.py", help="A file with further algorithms, may be repeated.")] = None,
    topology: Annotated[str, typer.Option("--topology", metavar="NAME", help="Who talks to whom.")] = "ring",
    markdown: Annotated[Path | None, typer.Option(
        "--markdown", metavar="FILE", help="Write the table to this file too, in Markdown.")] = None,
) -> None:
    """Hold algorithms against closed forms on the quadratic task; exit 1 if one is not where it should be."""
    from dbo.algorithms.registry import algorithms
    from dbo.platform.config import plugins
    from dbo.platform.config.validation import pick
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.platform.verify import certificates as verifying

    plugins.load(tuple(plugin or ()))
    names = [pick("--algorithm", name, algorithms()) for name in dict.fromkeys(algorithm or algorithms())]
    pick("--topology", topology, (name for name in TOPOLOGIES if name != "edges"))
    if markdown is not None:
        verifying.placed(markdown)
    rows = []
    with console.status("") as status:
        for number, name in enumerate(names, start=1):
            status.update(f"{number}/{len(names)}  {name}")
            rows.append(verifying.verify(algorithms()[name], topology))
            if not console.is_terminal:
                console.print(f"{number}/{len(names)}  {name}: {rows[-1].verdict}", highlight=False)
    _show_verdicts(rows)
    if markdown is not None:
        verifying.write_markdown(markdown, rows)
    off = [f"{row.algorithm}: {'; '.join(row.off)}" for row in rows if row.off]
    if off:
        raise RunError("off: " + " | ".join(off))


def _show_verdicts(rows: Any) -> None:
    from dbo.platform.verify.certificates import HEADINGS, LEGEND, cells

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in HEADINGS:
        wordy = heading == "goes to"                # all else is numbers, and a number that is cut is none
        table.add_column(heading if wordy else heading.replace(" ", "\n"), no_wrap=not wordy)
    for row in rows:
        table.add_row(*(cell.replace(" → ", "\n→") for cell in cells(row)), style="red" if row.off else "")
    console.print(table, highlight=False)
    console.print(LEGEND, style="dim", highlight=False)


@app.command()
def sync(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR…", help="Folders of runs, comparisons or sweeps.")],
    uri: Annotated[str | None, typer.Option(
        "--uri", metavar="URI", help="The MLflow store; default: the one that the runs name.")] = None,
    experiment: Annotated[str | None, typer.Option(
        "--experiment", metavar="NAME", help="The MLflow experiment; default: the one that the runs name.")] = None,
) -> None:
    """Bring recorded runs into MLflow: what is not there yet, each point once."""
    from dbo.platform.config import tracking_uri
    from dbo.platform.tracking import process

    if uri is not None:
        tracking_uri.check("--uri", "" if uri == tracking_uri.OFF else uri)
    # All of them, before the first one is sent.
    places = [process.destination(process.root_of(folder), uri) for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        process.sync(folder, place, experiment, plainly)


@app.command()
def doctor(
    arguments: Arguments = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if anything is refused.")] = False,
) -> None:
    """Tell what is installed, reachable, exposed or missing for an experiment; changes nothing."""
    from dbo.platform.cli import doctor as doctoring
    from dbo.platform.config.experiment import Experiment

    file, overrides = split(arguments)
    found = doctoring.examine(Experiment.read(file, overrides), Path.cwd())
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading, no_wrap=heading == "")
    colours = {"ok": "green", "warn": "yellow", "refuse": "red"}
    for finding in found:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, escape(finding.subject), escape(finding.text))
    console.print(table, highlight=False)
    refused = [finding for finding in found if finding.verdict == "refuse"]
    if strict and refused:
        raise RunError("; ".join(f"{finding.subject}: {finding.text}" for finding in refused))


@app.command()
def ui(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Whose runs; default: runs.")] = Path("runs"),
    port: Annotated[int | None, typer.Option(
        "--port", metavar="N", min=1, max=65535, help="Default: 5000, or a free one.")] = None,
) -> None:
    """Show the runs in MLflow's own pages, on this machine only."""
    from dbo.platform.tracking.mlflow_ui import serve

    serve(folder, port, plainly)


@app.command("list")
def list_(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="[WHAT] [plugins=[FILE.py]]",
        help="A kind (algorithms, tasks, …) or a name; plugins, whose algorithms are shown too.")] = None,
) -> None:
    """Show algorithms, tasks, data sets, topologies, partitions and compressors with their parameters."""
    from dbo.platform.cli import listing
    from dbo.platform.config import overrides
    from dbo.platform.config.experiment import Experiment
    from dbo.platform.config.validation import pick

    names = [argument for argument in arguments or [] if "=" not in argument]
    if len(names) > 1:
        raise InputError(f"list: {names[1]!r} is not allowed; one kind or name at most")
    given = overrides.parse(argument for argument in arguments or [] if "=" in argument)
    for key in given:
        pick("list", key, ["plugins"])
    if given:
        Experiment(**given)                 # loads the plugins
    if names:
        pick("list", names[0], listing.names())
    listing.show(console, *names)


app.command("report")(report)
app.command("sweep")(sweep)
app.command("watch")(watch)


def main() -> None:
    """Entry point: turns errors into one line and an exit code."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        if code == 130:                    # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except InputError as error:
        _fail(str(error), 2)
    except _UsageError as error:
        _fail(f"{error.format_message().rstrip('.')}; --help shows what is allowed", 2)
    except NodeFailure as error:
        print(masked(error.trace.rstrip()), file=sys.stderr)
        _fail(str(error), 1)
    except RunError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; what was recorded is kept, --resume goes on", 1)
    except OSError as error:
        _fail(f"{error.filename or ''}: {error.strerror or error}", 1)
    except Exception as error:
        _tell_failure(error)


def _tell_failure(error: Exception) -> None:
    """The traceback; of an error in a plugin only what lies in the plugin and below, then where in it."""
    from dbo.platform.config import plugins

    found, at = traceback.TracebackException.from_exception(error), plugins.position(error)
    own = [number for number, frame in enumerate(found.stack) if frame.filename in plugins.files()]
    del found.stack[: own[0] if own else 0]
    print(masked("".join(found.format()).rstrip()), file=sys.stderr)
    told = f"{at}: {type(error).__name__}: {error}" if at else "the run failed; the traceback above is the first error"
    _fail(told, 1)


def _fail(text: str, code: int) -> None:
    line = masked(" ".join(text.split()))
    print(f"dbo: {line if len(line) <= 1500 else line[:1000] + ' … ' + line[-400:]}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
