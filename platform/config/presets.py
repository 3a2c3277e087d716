"""Tuned step sizes that ship with an algorithm, per (task, data set): `algorithms/presets/<algorithm>.yaml`.

A preset speaks only where an experiment is silent, and what it says is written into the resolved experiment.
"""

from functools import cache
from pathlib import Path
from typing import Any

from dbo.algorithms import registry
from dbo.platform.config import yaml_io


def lookup(algorithm: str, task: str, dataset: str | None) -> dict[str, Any]:
    """The tuned values for this algorithm on this task and data set; {} if none were tuned."""
    return dict(_read(algorithm).get(f"{task}/{dataset}" if dataset else task, {}))


def known(algorithm: str) -> dict[str, Any]:
    """Task, or task/data set → its tuned values."""
    return dict(_read(algorithm))


@cache
def _read(algorithm: str) -> dict[str, Any]:
    source = Path(registry.__file__).with_name("presets") / f"{algorithm}.yaml"
    return yaml_io.read(source) if source.is_file() else {}
