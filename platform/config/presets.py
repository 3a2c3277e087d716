"""Read presets: tuned step sizes per algorithm, task and data set, from `algorithms/presets/<algorithm>.yaml`.

A preset fills in only parameters that an experiment leaves out; its values are part of the resolved experiment.
"""

from functools import cache
from pathlib import Path
from typing import Any

from dbo.algorithms import registry
from dbo.platform.config import yaml_io


def find_preset(algorithm: str, task: str, dataset: str | None) -> dict[str, Any]:
    """Return the tuned values of an algorithm for a task and data set; {} if there are none."""
    return dict(_read(algorithm).get(f"{task}/{dataset}" if dataset else task, {}))


def list_presets(algorithm: str) -> dict[str, Any]:
    """Return task, or task/data set → the tuned values of an algorithm."""
    return dict(_read(algorithm))


@cache
def _read(algorithm: str) -> dict[str, Any]:
    source = Path(registry.__file__).with_name("presets") / f"{algorithm}.yaml"
    return yaml_io.read(source) if source.is_file() else {}
