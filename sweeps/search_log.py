"""Record which cells a search has sampled, so that it can be resumed: one line of search.jsonl per cell."""

import json
from pathlib import Path
from typing import Any

from dbo.platform.errors import InputError
from dbo.platform.runs.atomic_io import append_durably
from dbo.sweeps.grid import Grid, SweepCell


class SearchLog:
    """The cells of a search in the order in which it sampled them. A line is written before its cell starts."""

    def __init__(self, path: Path, grid: Grid) -> None:
        self.path = path
        self.cells: list[SweepCell] = []
        self.configs: dict[str, dict[str, Any]] = {}         # what the searcher proposed, by the cell's name
        text = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                break              # the process died while it wrote this line; its cell has not started
            try:
                entry = json.loads(line)
                values, config = dict(entry["values"]), dict(entry["config"])
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(f"{path}: line {number} is damaged: {error}") from None
            cell = grid.make_cell(values)
            self.cells.append(cell)
            self.configs[cell.name] = config

    def add(self, cell: SweepCell, config: dict[str, Any]) -> None:
        """Append a cell unless it is there already."""
        if cell.name in self.configs:
            return
        line = json.dumps({"values": cell.values, "config": config}) + "\n"
        append_durably(self.path, line, "a cell of the search")
        self.cells.append(cell)
        self.configs[cell.name] = config
