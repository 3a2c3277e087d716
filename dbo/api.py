"""The functions of the public API: run, compare, sweep and load experiments from Python.

They write the same folders as the commands of the same names. `dbo sync FOLDER` sends a folder to MLflow.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError, RunError

if TYPE_CHECKING:
    import pandas as pd

    from dbo.platform.runs.runner import Result, RunCallback

Base: TypeAlias = "Experiment | str | Path | Mapping[str, Any] | None"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A run, a comparison or a sweep, read from its folder."""

    folder: Path
    kind: str                       # run | compare | sweep
    summary: "pd.DataFrame"         # a row per run: its parameters, status and last evaluation
    history: "pd.DataFrame"         # a row per run and evaluation
    table: "pd.DataFrame | None"    # compare: cost of the target per algorithm; means over the seeds if several
    pairs: "pd.DataFrame | None" = None     # compare, sweep, several seeds: paired differences, and who wins or ties

    def __repr__(self) -> str:
        """Return one line about the folder; the tables are attributes."""
        runs = f"{len(self.summary)} run{'' if len(self.summary) == 1 else 's'}"
        return f"<Loaded {self.kind}: {runs}, {len(self.history)} evaluations, folder={str(self.folder)!r}>"

    def _repr_html_(self) -> str:
        """Return the table of a comparison or a sweep, or the summary of a run, as a notebook shows it."""
        shown = self.summary if self.table is None else self.table
        return f"<b>{escape(self.kind)}</b> <small>{escape(str(self.folder))}</small>{shown.to_html(index=False)}"


def run(
    experiment: Base = None, *, out: str | Path | None = None, resume: bool = False,
    start_from: str | Path | None = None, callback: "RunCallback | None" = None, **settings: Any,
) -> "Result":
    """Run one experiment and return its result.

    `experiment` is an `Experiment`, a YAML file or a mapping; keywords override its keys. A section may be given by
    its name: `run(algorithm="madsbo", topology="ring")`. `out` is the run folder; `resume` continues an interrupted
    run in it, `start_from` extends a finished run that has fewer rounds. A notebook shows the progress; `callback`
    replaces that display. `start` may be a model instead of a file: that of a result, a `state_dict` with the names x.…
    and y.…, or a pair (x, y) of trees or modules; it is written to runs/starts.
    """
    from dbo.platform.runs import runner

    return runner.run(_build_experiment(experiment, settings), out, resume=resume, start_from=start_from,
                      callback=callback or _choose_display())


def compare(
    algorithms: Sequence[str] = (), *, file: str | Path | None = None, target: str | None = None,
    seeds: Sequence[int] | None = None, out: str | Path | None = None, callback: "RunCallback | None" = None,
    allow_changed_code: bool = False, **settings: Any,
) -> Loaded:
    """Run several algorithms on the same problem and return all of their runs.

    `file` is a comparison's YAML file; keywords override its keys. `target` is a metric and a level, such as
    "test_accuracy=0.7"; `table` of the result has the rounds, megabytes and seconds that each needs to reach it.
    With several `seeds` it has means and intervals, and `pairs` the paired differences.
    Finished runs in `out` are kept, interrupted ones are resumed. Finished runs of another environment are refused
    while others are left to run, unless `allow_changed_code` is set.
    """
    from dbo.platform.runs import compare as comparing

    experiments, level = comparing.plan(
        None if file is None else str(file), _format_overrides(settings), list(algorithms), target, seeds)
    folder = Path(out) if out is not None else comparing.default_folder(experiments)
    comparing.compare(
        experiments, level, folder, callback or _choose_display(), allow_changed_code=allow_changed_code)
    return load(folder)


def sweep(
    sweep: str | Path, *, out: str | Path | None = None, allow_changed_code: bool = False, **settings: Any
) -> Loaded:
    """Run a sweep on Ray Tune and return all of its runs.

    `sweep` is a YAML file or the name of a shipped sweep. Keywords override its base experiment, its `axes` or its own
    keys: `sweep("sensitivity-k", rounds=20, axes={"seed": [0, 1, 2]})`. Finished cells in `out` are kept;
    `allow_changed_code` keeps also those of another environment.
    """
    from dbo.sweeps import plan, runner

    grid = runner.build_grid(plan.read_sweep(plan.find_sweep(str(sweep)), _format_overrides(settings)))
    path = Path(out) if out is not None else runner.default_sweep_folder(grid)
    folder = runner.SweepFolder(path, grid, f"dbo.sweep({str(sweep)!r})")
    folder.read_group()
    progress = runner.SweepProgress(folder, None)
    if progress.left:
        runner.check_cells(folder, progress, allow_changed_code)
        runner.connect_cluster(grid)
    with folder:
        result = runner.run_sweep(folder, progress, None)
    if result.failed:
        label, error = result.failed[0]
        raise RunError(f"{len(result.failed)} of {len(result.cells)} cells failed; {label}: {error}")
    return load(path)


def load(folder: str | Path) -> Loaded:
    """Read a run, a comparison or a sweep into DataFrames; runs that have not ended are included as far as they are.

    A file that differs from the seal of its run is an InputError that names it.
    `summary` and `history` begin with the columns `run`, `algorithm` and `seed`, and one for each axis of a sweep.
    """
    import pandas as pd

    from dbo.platform.runs.run_folder import (
        RunFolder,
        build_history,
        has_group,
        read_experiment,
        read_group,
        read_metrics,
        read_summary,
    )
    from dbo.platform.runs.schema import section
    from dbo.platform.runs.seal import require_intact

    place = Path(folder)
    group = read_group(place) if has_group(place) else None
    members = [place / member for member in group.members] if group else [place]
    found = [member for member in members if RunFolder(member).has_run()]
    if not found:
        raise InputError(f"{folder}: holds no run, comparison or sweep")
    require_intact(found)
    summaries, histories = [], []
    for member in found:
        experiment, ended = read_experiment(member), read_summary(member)
        records = read_metrics(RunFolder(member).metrics)
        history = build_history(records)
        facts = {
            "run": member.name, "algorithm": section(experiment, "algorithm").get("name"),
            "seed": experiment.get("seed"),
            **{axis: _value_at(experiment, axis) for axis in (group.axes if group else ())
               if axis not in ("algorithm.name", "seed")},
        }
        last = records[-1] if records else {}
        summaries.append({**facts, "status": ended.status if ended else "unfinished", **last, "folder": str(member)})
        columns = {key: [value] * len(history) for key, value in facts.items()}      # a value may be a list
        histories.append(pd.concat([pd.DataFrame(columns, index=history.index), history], axis=1))
    kind = group.kind if group else "run"
    has_seeds = group is not None and "seed" in group.axes
    tables = {"compare": "summary.csv" if has_seeds else "compare.csv", "sweep": "summary.csv"}
    table = _read_table(place / tables[kind]) if kind in tables else None
    pairs = _read_table(place / "pairs.csv") if kind in tables and has_seeds else None
    return Loaded(place, kind, pd.DataFrame(summaries), pd.concat(histories, ignore_index=True), table, pairs)


def _read_table(path: Path) -> "pd.DataFrame | None":
    import pandas as pd

    try:
        return _rename_columns(pd.read_csv(path)) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {str(error).partition(chr(10))[0]}") from None


def _rename_columns(table: "pd.DataFrame") -> "pd.DataFrame":
    """Give columns and targets of an older version today's names, as in lines of metrics.jsonl."""
    from dbo.platform.runs.schema import RENAMED

    for old, new in RENAMED.items():
        table = table.rename(columns={f"{old}{end}": f"{new}{end}" for end in ("", "_mean", "_low", "_high")})
        if "target" in table:
            table["target"] = table["target"].str.replace(rf"^{old}(?=[<>=])", new, regex=True)
    return table


def _choose_display() -> "RunCallback | None":
    """Return the display of a notebook; None elsewhere: scripts print nothing."""
    from dbo.notebook import NotebookProgress, is_notebook

    return NotebookProgress() if is_notebook() else None


def _build_experiment(base: Base, settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment that `base` and the keywords describe."""
    from dbo.platform.config import overrides, paths, yaml_io

    if isinstance(base, Experiment):
        if not settings:
            return base
        data = base.given       # not its presets, which belong to its task and algorithm
    elif isinstance(base, str | Path):
        data = paths.resolve_from_file(base, yaml_io.read(Path(base)))
    elif isinstance(base, Mapping) or base is None:
        data = dict(base or {})
    else:
        raise InputError(f"experiment: {base!r:.80} is not allowed; must be an Experiment, a YAML file or a mapping")
    return Experiment(**overrides.apply(data, dict(_flatten_sections(_save_start(settings)))))


def _save_start(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a model that is given as `start` by a file with its content."""
    start = settings.get("start")
    if isinstance(start, Path):
        return {**settings, "start": str(start)}
    if start is None or isinstance(start, str):
        return settings
    from dbo.platform.runs.result import save_start

    return {**settings, "start": save_start(start)}


def _format_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Keywords as the `key=value` texts of the command line; JSON is YAML."""
    settings = _save_start(settings)
    axes = settings.get("axes", {})
    if not isinstance(axes, Mapping):
        raise InputError(f"axes: {axes!r:.80} is not allowed; must map keys to lists of values")
    flat = [*_flatten_sections({key: value for key, value in settings.items() if key != "axes"}),
            *((f"axes.{axis}", values) for axis, values in axes.items())]
    return [f"{key}={json.dumps(value, ensure_ascii=False, default=_to_plain)}" for key, value in flat]


def _to_plain(value: Any) -> Any:
    """A value that JSON does not know as one that it does: NumPy's numbers and arrays, paths."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InputError(f"{value!r:.80} is not allowed; must be a number, a text, a list or a mapping")


def _flatten_sections(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Settings with dotted keys, the keys of a section one by one, its name first."""
    from dbo.platform.config.overrides import SECTIONS

    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if key in SECTIONS and isinstance(value, Mapping):
            flat += sorted(((f"{key}.{inner}", item) for inner, item in value.items()),
                           key=lambda item: not item[0].endswith(".name"))
        else:
            flat.append((key, value))
    return flat


def _value_at(experiment: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; a section is given by its name where that says it all."""
    value: Any = experiment
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return value["name"] if set(value) == {"name"} else json.dumps(dict(value))
    return value
