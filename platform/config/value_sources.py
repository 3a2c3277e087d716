"""Trace the values of a resolved experiment to their source: the user, a preset, or a default."""

from dataclasses import dataclass
from typing import Any, Literal

from dbo.platform.config import presets
from dbo.platform.config.experiment import Experiment
from dbo.platform.config.overrides import expand_names, flatten

Source = Literal["you", "preset", "default"]

# Keys that cannot make a run diverge.
_HARMLESS = (
    "name", "label", "seed", "rounds", "eval_every", "checkpoint_every", "keep_checkpoints", "tracking", "engine",
    "data_dir", "presets", "plugins", "algorithm.name", "task.name", "task.dataset",
)


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A value of a resolved experiment, and who chose it."""

    value: Any
    source: Source


def trace_values(experiment: Experiment) -> dict[str, TracedValue]:
    """Return every value of an experiment under its dotted key, with its source."""
    given, preset = _flatten_given(experiment), _flatten_preset(experiment)

    def find_source(key: str) -> Source:
        parts = key.split(".")
        if key == "engine.name" and experiment.engine_choice is not None:       # the user has named none, or auto
            return "default"
        if any(".".join(parts[:count]) in given for count in range(1, len(parts) + 1)):     # batch_size=64 sets both
            return "you"
        return "preset" if key in preset else "default"

    return {key: TracedValue(value, find_source(key)) for key, value in flatten(experiment.to_dict()).items()}


def explain_divergence(experiment: Experiment) -> str:
    """Name the values that may have made a run diverge: those that the user has set first, then untested steps."""
    traced, tuned = trace_values(experiment), _flatten_preset(experiment)
    chosen = sorted(
        (key for key, found in traced.items() if found.source == "you" and not _is_harmless(key)),
        key=lambda key: not key.startswith("algorithm."))
    steps = [f"algorithm.{name}" for name in presets.list_steps(experiment.algorithm["name"])]
    parts = []
    if chosen:
        parts.append("you set " + ", ".join(
            _format(key, traced[key].value) + (f" (the preset has {tuned[key]})" if key in tuned else "")
            for key in chosen))
    if used := [_format(key, traced[key].value) for key in tuned if traced[key].source == "preset"]:
        parts.append(f"preset values tuned for the default settings: {', '.join(used)}")
    elif untuned := [_format(key, traced[key].value) for key in steps if traced[key].source == "default"]:
        parts.append(f"defaults that are not tuned for this task: {', '.join(untuned)}; dbo tune finds better ones")
    return "; ".join([*parts, "try smaller steps"])


def _is_harmless(key: str) -> bool:
    return key in _HARMLESS or key.startswith(tuple(f"{prefix}." for prefix in _HARMLESS))


def _format(key: str, value: Any) -> str:
    shown = f"{value:g}" if isinstance(value, float) else value
    return f"{key.removeprefix('algorithm.')} = {shown}"


def _flatten_given(experiment: Experiment) -> dict[str, Any]:
    return flatten(expand_names(experiment.given))


def _flatten_preset(experiment: Experiment) -> dict[str, Any]:
    """Return the preset of the experiment's algorithm and task under dotted keys."""
    section = {"name": experiment.algorithm["name"], **expand_names(experiment.given).get("algorithm", {})}
    return flatten(presets.find_values(experiment.presets, section, experiment.task), "algorithm.")
