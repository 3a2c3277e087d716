"""Load a user's samples from a text table: a line per sample, numbers in columns, one column with the class."""

import csv
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dbo.tasks.api import Array, Part, Split, dataset, param
from dbo.tasks.datasets.own_files import build_split, find_file, number_classes, scale_features

_DELIMITERS = (",", ";", "\t")


@dataset("csv")
@dataclass(frozen=True, slots=True, kw_only=True)
class Csv:
    """Your own samples in a CSV file: numeric columns and one column with the class, a number or a text."""

    file: str = param(help="text file with a line per sample; separated by comma, semicolon or tab")
    label: str | int = param(-1, help="column of the class: its name, or its number from 0; negative: from the end")
    test_file: str = param("", help="file of the same columns with the test samples; empty: take test_fraction")
    scaling: Literal["none", "standard"] = param(
        "none", help="standard: every feature has mean 0 and deviation 1 over train and val"
    )
    test_fraction: float = param(0.2, gt=0, lt=1, help="share of all samples kept for testing, without a test_file")
    val_fraction: float = param(0.5, gt=0, lt=1, help="share of the remaining samples for the upper level")

    def load(self, seed: int, data_dir: str | None) -> Split:
        named = [("file", self.file), *([("test_file", self.test_file)] if self.test_file else [])]
        tables = [self._read(key, file) for key, file in named]
        widths = [features.shape[1] for features, _ in tables]
        if len(set(widths)) > 1:
            raise ValueError(f"task.test_file: {self.test_file} has {widths[1]} features, {self.file} has {widths[0]}")
        labels, classes = number_classes(f"task.file: {self.file}", *(labels for _, labels in tables))
        parts = [Part(features, own) for (features, _), own in zip(tables, labels, strict=True)]
        test = parts[1] if self.test_file else None
        split = build_split(parts[0], None, test, classes, self.test_fraction, self.val_fraction, seed)
        return scale_features(split, self.scaling)

    def _read(self, key: str, file: str) -> tuple[Array, Array]:
        """Return (samples, columns) numbers and the texts or numbers of the label column."""
        where = f"task.{key}: {file}"
        lines = _read_lines(str(find_file(key, file)), where)
        if not lines:
            raise ValueError(f"{where} is empty; must have a line per sample")
        names, lines = _split_header(lines)
        if len(names) < 2:          # before any cell is quoted: it may be a token that was named by mistake
            raise ValueError(f"{where} has a single column; must have features and a label")
        column = self._find_column(names)
        if not lines:
            raise ValueError(f"{where} has a header and no samples")
        features = np.empty((len(lines), len(names) - 1))
        for row, (number, cells) in enumerate(lines):
            if len(cells) != len(names):
                raise ValueError(f"{where}, line {number}: {len(cells)} columns; must be {len(names)}, as in line 1")
            features[row] = _parse_numbers(cells, column, names, f"{where}, line {number}")
        texts = [cells[column].strip() for _, cells in lines]
        if "" in texts:
            raise ValueError(f"{where}, line {lines[texts.index('')][0]}: the label is empty; must be a class")
        return features, _parse_labels(texts)

    def _find_column(self, names: list[str]) -> int:
        """Return the position of the label column."""
        if isinstance(self.label, int):
            if -len(names) <= self.label < len(names):
                return self.label % len(names)
        elif self.label in names:
            return names.index(self.label)
        known = ", ".join(names) if len(", ".join(names)) <= 200 else f"{', '.join(names[:10])}, …"
        raise ValueError(
            f"task.label: {self.label!r} is not a column of {self.file}; columns: {known}, or a number from "
            f"{-len(names)} to {len(names) - 1}"
        )


def _read_lines(file: str, where: str) -> list[tuple[int, list[str]]]:
    """Return (line number, cells) of every line that is not empty."""
    try:
        with open(file, newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            delimiter = max(_DELIMITERS, key=first.count)
            stream.seek(0)
            reader = csv.reader(stream, delimiter=delimiter)
            return [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where} is not a text table ({reason}); must be a CSV file") from None


def _split_header(lines: list[tuple[int, list[str]]]) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the column names and the other lines. A first line without any number is a header."""
    first = [cell.strip() for cell in lines[0][1]]
    if any(_is_number(cell) for cell in first):
        return [str(number) for number in range(len(first))], lines
    return first, lines[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_numbers(cells: list[str], label: int, names: list[str], where: str) -> list[float]:
    """Return the cells of all columns but that of the label."""
    values = []
    for column, cell in enumerate(cells):
        if column == label:
            continue
        try:
            value = float(cell)
        except ValueError:
            shown = repr(cell.strip()[:40]) if cell.strip() else "an empty cell"
            raise ValueError(f"{where}, column {names[column]}: {shown} is not a number") from None
        if not math.isfinite(value):
            raise ValueError(f"{where}, column {names[column]}: {cell.strip()} is not allowed; must be finite")
        values.append(value)
    return values


def _parse_labels(texts: list[str]) -> Array:
    """Return labels as numbers if all of them are numbers, so that 10 follows 9."""
    return np.array([float(text) for text in texts]) if all(_is_number(text) for text in texts) else np.array(texts)
