"""`dbo verify`: check algorithms against closed-form solutions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from dbo.platform.cli.console import console
from dbo.platform.errors import RunError

if TYPE_CHECKING:
    from dbo.platform.verify.certificates import Certificate


def verify_algorithms(
    algorithm: Annotated[list[str] | None, typer.Option(
        "--algorithm", metavar="NAME", help="Algorithm to check, may be repeated; default: all.")] = None,
    plugin: Annotated[list[str] | None, typer.Option(
        "--plugin", metavar="FILE.py", help="File with further algorithms, may be repeated.")] = None,
    topology: Annotated[str, typer.Option("--topology", metavar="NAME", help="Communication graph.")] = "ring",
    markdown: Annotated[Path | None, typer.Option(
        "--markdown", metavar="FILE", help="Also write the table to this file, in Markdown.")] = None,
    noise: Annotated[bool, typer.Option("--noise", help="Check the claims about mini-batches instead.")] = False,
) -> None:
    """Check algorithms against closed-form solutions.

    Each algorithm runs on a small quadratic problem. Exit code 1 if a check fails.
    """
    from dbo.algorithms.registry import algorithms
    from dbo.platform.config import plugins
    from dbo.platform.config.validation import pick
    from dbo.platform.network.topology import TOPOLOGIES
    from dbo.platform.verify import certificates, table

    plugins.load(tuple(plugin or ()))
    names = [pick("--algorithm", name, algorithms()) for name in dict.fromkeys(algorithm or algorithms())]
    if noise:
        from dbo.platform.cli.verify_noise import verify_noise_claims

        verify_noise_claims(names, markdown)
        return
    pick("--topology", topology, (name for name in TOPOLOGIES if name != "edges"))
    if markdown is not None:
        table.split_markdown(markdown)
    rows = []
    with console.status("") as status:
        for number, name in enumerate(names, start=1):
            status.update(f"{number}/{len(names)}  {name}")
            rows.append(certificates.verify(algorithms()[name], topology))
            if not console.is_terminal:
                console.print(f"{number}/{len(names)}  {name}: {rows[-1].verdict}", highlight=False)
    _show_certificates(rows)
    if markdown is not None:
        table.write_markdown(markdown, rows)
    failed = [f"{row.algorithm}: {'; '.join(row.failures)}" for row in rows if row.failures]
    if failed:
        raise RunError("failed: " + " | ".join(failed))


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
