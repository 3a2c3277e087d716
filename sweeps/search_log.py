"""Record which cells a search has sampled, so that it can be resumed: one line of search.jsonl per cell."""

import json
from pathlib import Path
from typing import Any

from dbo.sweeps.grid import Grid, SweepCell


class SearchLog:
    """The cells of a search in the order in which it sampled them. A line is written before its cell starts."""

    def __init__(self, path: Path, grid: Grid) -> None:
        self.path = path
        self.cells: list[SweepCell] = []
        self.configs: dict[str, dict[str, Any]] = {}         # what the searcher proposed, by the cell's name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                cell = grid.make_cell(entry["values"])
                self.cells.append(cell)
                self.configs[cell.name] = entry["config"]

    def add(self, cell: SweepCell, config: dict[str, Any]) -> None:
        """Append a cell unless it is there already."""
        if cell.name in self.configs:
            return
        self.cells.append(cell)
        self.configs[cell.name] = config
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"values": cell.values, "config": config}) + "\n")
