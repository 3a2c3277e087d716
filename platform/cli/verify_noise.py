"""`dbo verify --noise`: check what algorithms claim about mini-batches."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from dbo.platform.cli.console import console
from dbo.platform.errors import RunError


def verify_noise_claims(names: Sequence[str], markdown: Path | None) -> None:
    """Check the algorithms, print a table and write it to a file; raise `RunError` if a claim is false."""
    from dbo.algorithms.registry import algorithms
    from dbo.platform.verify import noise_table, stochastic, table

    if markdown is not None:
        table.split_markdown(markdown, noise_table.MARKS)
    shown = Table(*noise_table.HEADINGS, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    rows = []
    with console.status("") as status:
        for number, name in enumerate(names, start=1):
            status.update(f"{number}/{len(names)}  {name}")
            rows.append(stochastic.verify_noise(algorithms()[name]))
            shown.add_row(*noise_table.format_row(rows[-1]), style="red" if rows[-1].failures else "")
            if not console.is_terminal:
                console.print(f"{number}/{len(names)}  {name}: {rows[-1].verdict}", highlight=False)
    console.print(shown, highlight=False)
    console.print(noise_table.LEGEND, style="dim", highlight=False)
    if markdown is not None:
        table.write_table(markdown, noise_table.HEADINGS, map(noise_table.format_row, rows), noise_table.MARKS)
    failed = [f"{row.algorithm}: {'; '.join(row.failures)}" for row in rows if row.failures]
    if failed:
        raise RunError("failed: " + " | ".join(failed))
