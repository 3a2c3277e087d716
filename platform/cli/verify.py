"""`dbo verify`: check algorithms against closed-form solutions, and tasks against differences and contracts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dbo.platform.cli.console import console, print_line
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    from dbo.platform.verify.certificates import Certificate
    from dbo.platform.verify.check import Check


def verify_components(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="key=value", help="With --task: settings such as data_dir=DIR, task.images=500 or nodes=6.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(
        "--algorithm", metavar="NAME", help="Algorithm to check, may be repeated; default: all.")] = None,
    task: Annotated[list[str] | None, typer.Option(
        "--task", metavar="NAME", help="Task to check instead of algorithms, may be repeated.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(
        "--plugin", metavar="FILE.py", help="File with further algorithms or tasks, may be repeated.")] = None,
    topology: Annotated[str, typer.Option("--topology", metavar="NAME", help="Communication graph.")] = "ring",
    markdown: Annotated[Path | None, typer.Option(
        "--markdown", metavar="FILE", help="Also write the table of algorithms to this file, in Markdown.")] = None,
    noise: Annotated[bool, typer.Option(
        "--noise", help="Check the claims of algorithms about mini-batches instead.")] = False,
) -> None:
    """Check algorithms against closed-form solutions, or tasks.

    Each algorithm runs on small problems: against closed forms, with every switch of its configuration, and against
    its plain reference if it names one; --algorithm prints a line per check. Of a task, derivatives, independence of
    nodes, batches, determinism, packing and shipping to other processes are checked. Exit code 1 if a check fails.
    """
    from dbo.platform.config import plugins

    plugins.load(tuple(plugin or ()))
    if arguments and not task:
        raise InputError(f"{arguments[0]!r} is not allowed without --task")
    if noise:
        from dbo.algorithms.registry import algorithms
        from dbo.platform.cli.verify_noise import verify_noise_claims
        from dbo.platform.config.validation import pick

        verify_noise_claims([pick("--algorithm", name, algorithms()) for name in algorithm or algorithms()], markdown)
        return
    failed = _verify_algorithms(algorithm, topology, markdown) if algorithm or not task else []
    failed += _verify_tasks(task or [], tuple(plugin or ()), arguments or [])
    if failed:
        raise RunError("failed: " + " | ".join(failed))


def _verify_algorithms(chosen: list[str] | None, topology: str, markdown: Path | None) -> list[str]:
    """Check algorithms, show their table, and return what failed."""
    from dbo.algorithms.registry import algorithms
    from dbo.platform.config.validation import pick
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.platform.verify import certificates, checks, table

    names = [pick("--algorithm", name, algorithms()) for name in dict.fromkeys(chosen or algorithms())]
    pick("--topology", topology, (name for name in TOPOLOGIES if name != "edges"))
    if markdown is not None:
        table.split_markdown(markdown)
    rows, lines = [], []
    with console.status("") as status:
        for number, name in enumerate(names, start=1):
            at = f"{number}/{len(names)}  {name}"
            status.update(f"{at}: closed form")
            certificate = certificates.verify(algorithms()[name], topology)
            found = [checks.judge_claim(certificate)]
            subject = checks.prepare(algorithms()[name], topology)
            for check in checks.NAMES:
                status.update(f"{at}: {check}")
                found.append(checks.run_check(check, subject))
            failures = [f"{each.name}: {each.describe()}" for each in found[1:] if each.passed is False]
            rows.append(replace(certificate, failures=(*certificate.failures, *failures)))
            lines.append((name, found))
            if not console.is_terminal:
                console.print(f"{at}: {rows[-1].verdict}", highlight=False)
    _show_certificates(rows)
    if chosen:
        _show_checks(lines)
    if markdown is not None:
        table.write_markdown(markdown, rows)
    return [f"{row.algorithm}: {'; '.join(row.failures)}" for row in rows if row.failures]


def _show_checks(lines: "Sequence[tuple[str, Sequence[Check]]]") -> None:
    """Print a line per check of each algorithm, failed ones in red."""
    for name, found in lines:
        print_line(name, style="bold")
        for check in found:
            print_line(check.format(), style="red" if check.passed is False else None)


def _verify_tasks(names: Sequence[str], plugins: tuple[str, ...], overrides: list[str]) -> list[str]:
    """Check tasks, print a line per check, and return what failed."""
    if not names:
        return []
    from dbo.platform.verify import tasks

    experiments = [tasks.read_experiment(name, plugins, overrides) for name in dict.fromkeys(names)]
    failed = []
    for experiment in experiments:
        data = experiment.task.get("dataset")
        print_line(f"{experiment.task['name']}{f' on {data}' if data else ''}", style="bold")
        wrong = []
        with console.status("") as status:
            for check in tasks.check_task(experiment):
                print_line(check.format(), style="red" if check.passed is False else None)
                status.update(f"after {check.name}")
                wrong += [check.name] if check.passed is False else []
        if wrong:
            failed.append(f"task {experiment.task['name']}: {', '.join(wrong)}")
    print_line(tasks.LEGEND, style="dim")
    return failed


def _show_certificates(rows: "Sequence[Certificate]") -> None:
    """Print a row per algorithm, failed ones in red."""
    from dbo.platform.verify.table import HEADINGS, LEGEND, format_row

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in HEADINGS:
        is_text = heading == "goes to"              # the other columns hold numbers, which must not be truncated
        table.add_column(heading if is_text else heading.replace(" ", "\n"), no_wrap=not is_text)
    for row in rows:
        table.add_row(*(cell.replace(" → ", "\n→") for cell in format_row(row)), style="red" if row.failures else "")
    console.print(table, highlight=False)
    console.print(LEGEND, style="dim", highlight=False)
