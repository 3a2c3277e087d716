"""Several algorithms on the same data, graph and counters, and a table that says who got how far at what price."""

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from dbo.algorithms.registry import algorithms
from dbo.platform.config import overrides as overriding
from dbo.platform.config import paths
from dbo.platform.config import yaml_io
from dbo.platform.config.validation import pick
from dbo.platform.runs.resume import check_folder
from dbo.platform.errors import InputError, InUse
from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.config.redact import masked_in
from dbo.platform.runs.run_folder import CLOSED_FORMS, RunFolder, Target, started_since
from dbo.platform.runs.runner import Result, Watcher, prepare, reached, run
from dbo.platform.engine.placement import waiting_room
from dbo.platform.runs.remote import is_url

_BY_ALGORITHM = ("rounds", "eval_every", "checkpoint_every")
DEFAULT_TARGET = Target("node_accuracy_mean", 0.9)
CLOSED_FORM_TARGET = Target("solution_error", 0.1)


def plan(
    file: str | None, overrides: Iterable[str], names: Sequence[str], target: str | None
) -> tuple[list[Experiment], Target]:
    """One experiment per algorithm, alike in everything else.

    Besides the keys of an experiment a comparison's file may hold `algorithms: {c2dfb: {lam: 10}, mdbo: {}}`, the
    algorithms with their parameters, `target: test_accuracy=0.7`, and `rounds: {c2dfb: 40, mdbo: 600}`: rounds of
    one algorithm may be many times as long as another's (`eval_every` and `checkpoint_every` likewise).
    """
    data = paths.seen_from(file, yaml_io.read(Path(file))) if file is not None else {}
    given = data.pop("algorithms", {})
    if not isinstance(given, dict) or not all(isinstance(params, dict | None) for params in given.values()):
        raise InputError("algorithms: must be a mapping of algorithm names to their parameters")
    wanted = data.get("target") if target is None else target
    data.pop("target", None)
    parsed = overriding.parse(overrides)
    for key in ("algorithm", "algorithm.name"):
        if key in parsed:
            raise InputError(f"{key}: {parsed[key]!r} is not allowed; a comparison takes --algorithms c2dfb,mdbo")
    section = data.get("algorithm", {})
    if not isinstance(section, dict):
        raise InputError(f"algorithm: {section!r} is not allowed; must be a mapping")
    Experiment(plugins=parsed.get("plugins", data.get("plugins", ())))     # the names below may be a plugin's
    names = list(names) or list(given) or ["c2dfb", "c2dfb_nc"]
    known = algorithms()
    for name in names:
        pick("--algorithms", name, known)
    for name in given:
        pick("algorithms", name, known)
    for key in _BY_ALGORITHM:
        for name in data[key] if isinstance(data.get(key), dict) else ():
            pick(key, name, known)
    if len(set(names)) < len(names):
        raise InputError(f"--algorithms: {','.join(names)} names an algorithm twice")
    _refuse_strangers(parsed, names)
    experiments = [_experiment(data, given, parsed, name) for name in names]
    return experiments, _target(wanted, experiments)


def _target(wanted: Any, experiments: Sequence[Experiment]) -> Target:
    """What is asked for, if it can be told: accuracies come from data, errors from closed forms, one for a λ."""
    learns = experiments[0].parts.data is not None
    usual = DEFAULT_TARGET if learns else CLOSED_FORM_TARGET
    level = Target.parse(str(usual if wanted is None else wanted))
    who = experiments[0].task["name"]
    unknown = level.metric in CLOSED_FORMS if learns else level.rising
    if level.metric == "penalty_error" and not any("lam" in experiment.algorithm for experiment in experiments):
        who, unknown = ", ".join(experiment.algorithm["name"] for experiment in experiments), True
    if unknown:
        raise InputError(f"--target: {level} is not allowed; {who} has no {level.metric}, take {usual} say")
    return level


def _refuse_strangers(overrides: dict[str, Any], names: Sequence[str]) -> None:
    """An override of a parameter must mean something to at least one of the algorithms."""
    known = sorted({field.name for name in names for field in fields(algorithms()[name].config)})
    for path in overrides:
        parts = path.split(".")
        if parts[0] == "algorithm" and len(parts) > 1:
            pick(path, parts[1], known)


def _experiment(data: dict[str, Any], given: dict[str, Any], overrides: dict[str, Any], name: str) -> Experiment:
    known = {field.name for field in fields(algorithms()[name].config)}
    section = data.get("algorithm", {})
    own = {**section} if section.get("name") == name else {"name": name}
    mine = {
        path: value for path, value in overrides.items()
        if not path.startswith("algorithm.") or path.split(".")[1] in known
    }
    for key in _BY_ALGORITHM:
        if isinstance(data.get(key), dict) and key not in overrides:
            if name not in data[key] and key == "rounds":
                raise InputError(f"{key}: {data[key]!r} is not allowed; must be a number, or have one for {name}")
            usual = Experiment.model_fields[key].default
            data = {**data, key: data[key].get(name, usual)}
    return Experiment(**overriding.apply({**data, "algorithm": {**own, **(given.get(name) or {})}}, mine))


def default_folder(experiments: Sequence[Experiment]) -> Path:
    """runs/compare-<hash of the run keys>."""
    return Path("runs") / f"compare-{_key(experiments)[:8]}"


def compare(
    experiments: Sequence[Experiment], target: Target, out: Path, watcher: Watcher | None = None, command: str = ""
) -> list[Result]:
    """Runs each into out/<algorithm>, on one problem that is built once. `command`: what was typed, for the record.

    Runs that have finished are kept as they are, an interrupted one is gone on with.
    """
    if is_url(out):
        raise InputError(f"--out: {out} is not allowed; a comparison needs a folder")
    folders = [RunFolder(out / experiment.algorithm["name"]) for experiment in experiments]
    group = out / "group.json"
    if group.exists() and _kind(out) != "compare":
        raise InputError(f"--out: {out} holds something else than a comparison; choose another folder")
    earlier = group.read_bytes() if group.exists() else None
    for experiment, folder in zip(experiments, folders, strict=True):
        check_folder(folder, experiment, resume=True)       # all of them, before the first one starts
    prepared = prepare(experiments[0])
    results: list[Result] = []
    since = time.time()
    try:
        with waiting_room():
            for experiment, folder in zip(experiments, folders, strict=True):
                _describe(out, experiments, target, "running", command)
                resume = folder.holds_run()
                results.append(run(experiment, folder.path, resume=resume, watcher=watcher, prepared=prepared))
        table(results, target).to_csv(out / "compare.csv", index=False)
    except InputError as error:
        if earlier is None and not any(folder.holds_run() for folder in folders):       # nothing was run: nothing stays
            with suppress(OSError):
                group.unlink(missing_ok=True)
                out.rmdir()
        elif isinstance(error, InUse):
            pass                # another command is at work there, and says itself how it ends
        elif earlier is None or any(started_since(folder.path, since) for folder in folders):
            _describe(out, experiments, target, "failed", command)
        else:
            write_atomically(group, earlier)
        raise
    except Exception:
        _describe(out, experiments, target, "failed", command)
        raise
    finished = all(result.status == "finished" for result in results)
    _describe(out, experiments, target, "finished" if finished else "failed", command)
    return results


def _describe(out: Path, experiments: Sequence[Experiment], target: Target, status: str, command: str) -> None:
    """group.json: which runs belong together, for all who look at the folder later."""
    names = [experiment.algorithm["name"] for experiment in experiments]
    first = experiments[0]
    file = out / "group.json"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError, ValueError, KeyError, TypeError):
        started = str(json.loads(file.read_bytes())["started"])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: {out} cannot be used as an output folder: {error.strerror}") from None
    write_atomically(file, json.dumps(masked_in({
        "kind": "compare",
        "name": first.name,
        "key": _key(experiments),
        "command": command or f"dbo compare … --algorithms {','.join(names)} --target {target}",
        "started": started,
        "status": status,
        "target": str(target),
        "members": names,
        "axes": {"algorithm.name": names},
    }) | {"tracking": first.tracking.model_dump()}, indent=2) + "\n")


def _kind(out: Path) -> str | None:
    try:
        return str(dict(json.loads((out / "group.json").read_bytes()))["kind"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _key(experiments: Sequence[Experiment]) -> str:
    return hashlib.sha256("".join(experiment.run_key for experiment in experiments).encode()).hexdigest()


def table(results: Sequence[Result], target: Target) -> pd.DataFrame:
    """A row per algorithm: price of the target (empty: not reached), and where it ended."""
    rows = []
    for result in results:
        records: list[Any] = result.history.to_dict("records")
        hit = reached(records, target) or {}
        final = records[-1] if records else {}
        rows.append({
            "algorithm": result.experiment.algorithm["name"],
            "single_machine": result.experiment.parts.algorithm.single_machine,
            "status": result.status,
            "target": str(target),
            "rounds_to_target": hit.get("round"),
            "mb_to_target": hit.get("comm_mb"),
            "seconds_to_target": hit.get("seconds"),
            **{key: final.get(key) for key in (
                "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "upper_loss", "comm_mb", "seconds")},
            **{key: final[key] for key in CLOSED_FORMS if key in final},
        })
    return pd.DataFrame(rows)
