"""Compare algorithms on the same data, graph and counters: run each, and tabulate how far it got at what cost."""

import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbo.algorithms.registry import algorithms
from dbo.platform.config import overrides as overriding
from dbo.platform.config import paths, yaml_io
from dbo.platform.config.experiment import LABEL, Experiment, is_public
from dbo.platform.config.validation import pick
from dbo.platform.engine.placement import reuse_actors
from dbo.platform.errors import FolderLockedError, InputError
from dbo.platform.runs.atomic_io import write_atomically
from dbo.platform.runs.preparation import Prepared, check_compressors, prepare
from dbo.platform.runs.remote import is_url
from dbo.platform.runs.result import Result, RunCallback
from dbo.platform.runs.resume import check_environments, check_folder, read_status
from dbo.platform.runs.run_folder import (
    GROUP_FILE,
    RunFolder,
    find_group,
    has_group,
    has_started_since,
    write_group,
)
from dbo.platform.runs.runner import run
from dbo.platform.runs.schema import CLOSED_FORM_TARGET, CLOSED_FORMS, Group, Target, count_oracle_calls
from dbo.platform.runs.seed_tables import NODE_BYTES, build_pair_table, build_seed_table
from dbo.platform.runs.targets import check_measured, choose_target

if TYPE_CHECKING:
    import pandas as pd

_BY_ALGORITHM = ("rounds", "eval_every", "checkpoint_every")
_DEFAULT_ALGORITHMS = ("c2dfb", "c2dfb_nc")


def plan(
    file: str | None, overrides: Iterable[str], names: Sequence[str], target: str | None,
    seeds: Sequence[int] | None = None,
) -> tuple[list[Experiment], Target]:
    """Build one experiment per seed and algorithm, equal in everything else, and the target.

    Besides the keys of an experiment a comparison's file may hold `algorithms: {c2dfb: {lam: 10}, mdbo: {}}`, the
    algorithms with their parameters, `target: test_accuracy=0.7`, and `rounds: {c2dfb: 40, mdbo: 600}`: a round of one
    algorithm may do many times the work of another's (`eval_every` and `checkpoint_every` likewise). `seeds: [0, 1, 2]`
    repeats all of them with each seed. With a `name` among its parameters, the key of an entry is the label of a
    variant: `algorithms: {c2dfb_4bit: {name: c2dfb, compressor: {bits: 4}}}`. Of several targets, a list or separated
    by commas, the first one ranks; costs of the others are reported beside it. One of a metric public_… sets
    `eval_public`.
    """
    data = paths.resolve_from_file(file, yaml_io.read(Path(file))) if file is not None else {}
    given = data.pop("algorithms", {})
    if not isinstance(given, dict) or not all(isinstance(params, dict | None) for params in given.values()):
        raise InputError("algorithms: must be a mapping of algorithm names to their parameters")
    file_target = data.pop("target", None)
    parsed = overriding.parse(overrides)
    file_seeds = data.pop("seeds", None)
    if seeds is not None and "seed" in parsed:
        raise InputError(f"seed: {parsed['seed']!r} is not allowed together with --seeds")
    chosen = _check_seeds("--seeds", seeds) if seeds is not None else \
        [None] if file_seeds is None or "seed" in parsed else _check_seeds("seeds", file_seeds)
    for key in ("algorithm", "algorithm.name"):
        if key in parsed:
            raise InputError(f"{key}: {parsed[key]!r} is not allowed; a comparison takes --algorithms c2dfb,mdbo")
    section = data.get("algorithm", {})
    if not isinstance(section, dict):
        raise InputError(f"algorithm: {section!r} is not allowed; must be a mapping")
    Experiment(plugins=parsed.get("plugins", data.get("plugins", ())))     # registers the plugins' algorithms
    methods = _name_methods(given)
    names = expand_names(names, methods) or list(given) or list(_DEFAULT_ALGORITHMS)
    _check_names(names, methods, data)
    _check_parameters(parsed, [methods.get(name, name) for name in names])
    targets = _list_targets(file_target if target is None else target)
    if any(map(is_public, targets)):
        data = {"eval_public": True, **data}
    experiments = [
        _build_variant(data, given.get(name) or {}, parsed if seed is None else {**parsed, "seed": seed}, name)
        for seed in chosen for name in names
    ]
    return _use_one_engine(experiments), _choose_target(targets, experiments)


def _use_one_engine(experiments: list[Experiment]) -> list[Experiment]:
    """Run all on Ray if `auto` has chosen it for some: seconds on different engines cannot be compared."""
    if len({experiment.engine["name"] for experiment in experiments}) == 1:
        return experiments
    return [
        experiment.with_engine({**experiment.given.get("engine", {}), "name": "ray"})
        if experiment.engine_choice is not None else experiment for experiment in experiments
    ]


def _check_seeds(where: str, seeds: Any) -> list[int]:
    """Refuse anything but a list of different seeds."""
    good = isinstance(seeds, list | tuple) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not good or len(set(seeds)) < len(seeds):
        raise InputError(f"{where}: {seeds!r} is not allowed; must be different whole numbers ≥ 0, e.g. 0,1,2")
    return list(seeds)


def list_members(experiments: Sequence[Experiment]) -> list[str]:
    """Return the folder of each run: the algorithm's name or label, with the seed if there are several."""
    has_seeds = len({experiment.seed for experiment in experiments}) > 1
    return [
        f"{experiment.title}-seed{experiment.seed}" if has_seeds else experiment.title for experiment in experiments
    ]


def _name_methods(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the algorithm of each entry of `algorithms`, by its name or label; refuse labels that mislead."""
    methods, known = {}, algorithms()
    for label, params in given.items():
        if "name" not in (params or {}):
            methods[label] = pick("algorithms", label, known)
            continue
        methods[label] = pick(f"algorithms.{label}.name", params["name"], known)
        if not isinstance(label, str) or not re.match(LABEL, label):
            raise InputError(f"algorithms: {label!r} is not allowed; a label has letters, digits, '_', '.' and '-'")
        if label != params["name"] and (label in known or label in ("all", *_list_groups())):
            raise InputError(f"algorithms: {label!r} is not allowed as the label of {params['name']}: it names others")
    return methods


def expand_names(names: Sequence[str], labels: Iterable[str] = ()) -> list[str]:
    """Return the algorithms that are meant: `all`, a network (gossip, star, single) or a family stands for several."""
    known = algorithms()
    expanded: list[str] = []
    for name in names:
        several = [
            one for one, made in known.items()
            if name not in (*known, *labels) and name in ("all", made.network, made.family)
        ]
        expanded += [one for one in several if one not in expanded] if several else [name]
    return expanded


def _check_names(names: Sequence[str], methods: Mapping[str, str], data: Mapping[str, Any]) -> None:
    known = list(dict.fromkeys([*algorithms(), *methods]))
    for name in names:
        pick("--algorithms", name, [*known, "all", *_list_groups()])
    for key in _BY_ALGORITHM:
        for name in data[key] if isinstance(data.get(key), dict) else ():
            pick(key, name, known)
    if len(set(names)) < len(names):
        raise InputError(f"--algorithms: {','.join(names)} names an algorithm twice")


def _list_groups() -> list[str]:
    """Return the names of networks and families that stand for several algorithms."""
    return list(dict.fromkeys(
        name for kind in ("network", "family") for made in algorithms().values() if (name := getattr(made, kind))))


def _check_parameters(overrides: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse an override of a parameter that none of the algorithms has."""
    known = sorted({field.name for name in names for field in fields(algorithms()[name].config)})
    for path in overrides:
        parts = path.split(".")
        if parts[0] == "algorithm" and len(parts) > 1:
            pick(path, parts[1], known)


def _list_targets(requested: Any) -> list[str]:
    """Return the texts of the requested targets: a list, or separated by commas."""
    if requested is None:
        return []
    return [str(text) for text in (requested if isinstance(requested, list) else str(requested).split(","))]


def _choose_target(texts: Sequence[str], experiments: Sequence[Experiment]) -> Target:
    """Return the first requested target with the further ones, or the default one of the task."""
    first, *further = [_choose_one(text, experiments) for text in texts] or [_choose_one(None, experiments)]
    return replace(first, further=tuple(further))


def _choose_one(requested: Any, experiments: Sequence[Experiment]) -> Target:
    """Return a target that the task can reach; the penalty error needs a λ."""
    target = choose_target(None if requested is None else str(requested).strip(), experiments[0].task["name"])
    if target.metric == "penalty_error" and not any(e.parts.algorithm.penalty for e in experiments):
        names = ", ".join(dict.fromkeys(experiment.title for experiment in experiments))
        raise InputError(f"--target: {target} is not allowed; {names} have no λ; try {CLOSED_FORM_TARGET}")
    return target


def _build_variant(
    data: Mapping[str, Any], params: Mapping[str, Any], overrides: Mapping[str, Any], label: str
) -> Experiment:
    """Build the experiment of an entry; errors in a labelled variant name its label."""
    if "name" not in params:
        return _build_experiment(data, params, overrides, label, label)
    try:
        return _build_experiment(data, params, overrides, str(params["name"]), label)
    except InputError as error:
        raise InputError(f"algorithms.{label}: {error}") from None


def _build_experiment(
    data: Mapping[str, Any], params: Mapping[str, Any], overrides: Mapping[str, Any], name: str, label: str
) -> Experiment:
    known = {field.name for field in fields(algorithms()[name].config)}
    if algorithms()[name].network == "star":
        data = {key: value for key, value in data.items() if key != "topology"}
        overrides = {path: value for path, value in overrides.items() if path.partition(".")[0] != "topology"}
    section = data.get("algorithm", {})
    own = {**section} if section.get("name") == name else {"name": name}
    applicable = {
        path: value for path, value in overrides.items()
        if not path.startswith("algorithm.") or path.split(".")[1] in known
    }
    for key in _BY_ALGORITHM:
        if isinstance(data.get(key), dict) and key not in overrides:
            if label not in data[key] and key == "rounds":
                raise InputError(f"{key}: {data[key]!r} is not allowed; must be a number, or have one for {label}")
            data = {**data, key: data[key].get(label, Experiment.model_fields[key].default)}
    labelled = {"label": label} if label != name else {}
    return Experiment(**overriding.apply({**data, **labelled, "algorithm": {**own, **params}}, applicable))


def default_folder(experiments: Sequence[Experiment]) -> Path:
    """Return runs/compare-<hash of the run keys>."""
    return Path("runs") / f"compare-{_hash_keys(experiments)[:8]}"


def compare(
    experiments: Sequence[Experiment], target: Target, out: Path, callback: RunCallback | None = None,
    command: str = "", allow_changed_code: bool = False,
) -> list[Result]:
    """Run each experiment into a folder of its own below `out`; `command` repeats the comparison.

    The problem of a seed is built once. Tables: compare.csv has a row per run; with several seeds summary.csv has means
    and intervals, pairs.csv the paired differences.

    Runs that have finished are kept as they are; an interrupted one is resumed. Finished runs of another environment
    are refused while others are left to run; `allow_changed_code` keeps them, which group.json records.
    """
    folders, previous = find_folders(experiments, out), find_group(out)
    ended = [folder for folder in folders if has_ended(folder)]
    changes = check_environments(ended, allow_changed_code) if len(ended) < len(folders) else ()
    group = _describe_group(experiments, target, command, previous, changes)
    prepared, prepared_seed = _prepare_seed(experiments, experiments[0].seed), experiments[0].seed
    for experiment in experiments:
        check_compressors(experiment, prepared.problem.dim_x, prepared.problem.dim_y)
    for one in (target, *target.further):
        check_measured(one, prepared.problem, experiments[0].task["name"])
    results: list[Result] = []
    since = time.time()
    try:
        with reuse_actors():
            for experiment, folder in zip(experiments, folders, strict=True):
                write_group(out, group)
                if experiment.seed != prepared_seed:
                    prepared, prepared_seed = _prepare_seed(experiments, experiment.seed), experiment.seed
                resume = folder.has_run()
                results.append(run(experiment, folder.path, resume=resume, callback=callback, prepared=prepared))
        _write_tables(comparison_table(results, target), out)
    except InputError as error:
        if previous is None and not any(folder.has_run() for folder in folders):       # nothing was run
            with suppress(OSError):
                (out / GROUP_FILE).unlink(missing_ok=True)
                out.rmdir()
        elif isinstance(error, FolderLockedError):
            pass                # another command is running there, and records itself how it ends
        elif previous is None or any(has_started_since(folder.path, since) for folder in folders):
            write_group(out, replace(group, status="failed"))
        else:
            write_group(out, previous)
        raise
    except Exception:
        write_group(out, replace(group, status="failed"))
        raise
    has_finished = all(result.status == "finished" for result in results)
    write_group(out, replace(group, status="finished" if has_finished else "failed"))
    return results


def find_folders(experiments: Sequence[Experiment], out: Path) -> list[RunFolder]:
    """Return the folder of each run; refuse folders that hold anything else, before the first run starts."""
    if is_url(out):
        raise InputError(f"--out: {out} is not allowed; a comparison needs a folder")
    previous = find_group(out)
    if has_group(out) and (previous is None or previous.kind != "compare"):
        raise InputError(f"--out: {out} does not hold a comparison; choose another folder")
    if RunFolder(out).has_run():
        raise InputError(f"--out: {out} holds a run; choose another folder")
    folders = [RunFolder(out / member) for member in list_members(experiments)]
    for experiment, folder in zip(experiments, folders, strict=True):
        check_folder(folder, experiment, resume=True)
    return folders


def has_ended(folder: RunFolder) -> bool:
    """Decide whether a run of a comparison is kept as it is."""
    return read_status(folder) in ("finished", "diverged")


def _write_tables(table: "pd.DataFrame", out: Path) -> None:
    tables = {"compare": table}
    if table["seed"].nunique() > 1:
        tables |= {"summary": build_seed_table(table), "pairs": build_pair_table(table)}
    for name, content in tables.items():
        write_atomically(out / f"{name}.csv", content.to_csv(index=False), "a table of the comparison")


def _prepare_seed(experiments: Sequence[Experiment], seed: int) -> Prepared:
    """Build the problem and the graph of a seed; a method with a server has a star instead of the others' graph."""
    of_seed = [experiment for experiment in experiments if experiment.seed == seed]
    on_graph = [experiment for experiment in of_seed if experiment.parts.algorithm.network != "star"]
    return prepare((on_graph or of_seed)[0])


def _describe_group(
    experiments: Sequence[Experiment], target: Target, command: str, previous: Group | None, changes: Sequence[str]
) -> Group:
    names = list(dict.fromkeys(experiment.title for experiment in experiments))
    seeds = list(dict.fromkeys(experiment.seed for experiment in experiments))
    first, targets = experiments[0], ",".join(map(str, (target, *target.further)))
    axis = "label" if any(experiment.label for experiment in experiments) else "algorithm.name"
    return Group(
        kind="compare", name=first.name, key=_hash_keys(experiments),
        command=command or f"dbo compare … --algorithms {','.join(names)} --target {targets}",
        started=(previous.started if previous else "") or datetime.now(UTC).isoformat(timespec="seconds"),
        status="running", target=str(target), members=tuple(list_members(experiments)),
        axes={axis: names, **({"seed": seeds} if len(seeds) > 1 else {})},
        tracking=first.tracking.model_dump(),
        changes=tuple(dict.fromkeys([*(previous.changes if previous else ()), *changes])),
    )


def _hash_keys(experiments: Sequence[Experiment]) -> str:
    return hashlib.sha256("".join(experiment.run_key for experiment in experiments).encode()).hexdigest()


def _find_traffic(experiment: Experiment, final: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the MB that a node has sent and received, the server apart, and those that passed the server."""
    links = final.get("bytes_links")
    if links is None:
        return {"node_mb": None, "server_mb": None}
    ends = 1 if experiment.parts.algorithm.network == "star" else 2     # of a link at nodes with data
    return {"node_mb": ends * links / experiment.nodes / 1e6, "server_mb": final.get("server_bytes", 0) / 1e6}


def name_cost(target: Target) -> str:
    """Return the column of the comparison table with the bytes per node to a target."""
    return f"{NODE_BYTES}{target}"


def _find_node_bytes(target: Target, records: Sequence[Any], nodes: int) -> float | None:
    """Return the encoded bytes that a node has sent until the target, each message counted once; a mean over nodes."""
    cost = target.find_cost(records)
    return None if cost is None else cost["bytes_broadcast"] / nodes


def comparison_table(results: Sequence[Result], target: Target) -> "pd.DataFrame":
    """Return a row per run: the cost of the target (empty: not reached), and its last evaluation."""
    import pandas as pd

    rows = []
    for result in results:
        records: list[Any] = result.history.to_dict("records")
        cost = target.find_first(records) or {}
        final = records[-1] if records else {}
        rows.append({
            "algorithm": result.experiment.title,
            "seed": result.experiment.seed,
            "network": result.experiment.parts.algorithm.network,
            "single_machine": result.experiment.parts.algorithm.network == "single",
            "status": result.status,
            **{key: final.get(key) for key in ("psi", "psi_gradient_norm", "psi_converged", "psi_residual")},
            "target": str(target),
            "rounds_to_target": cost.get("round"),
            "mb_to_target": cost.get("comm_mb"),
            "seconds_to_target": cost.get("seconds"),
            "calls_to_target": count_oracle_calls(cost),
            "samples_to_target": cost.get("samples"),
            **{name_cost(one): _find_node_bytes(one, records, result.experiment.nodes)
               for one in (target, *target.further) if target.further},
            **{key: final.get(key) for key in (
                "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "test_loss", "upper_loss", "comm_mb",
                "seconds")},
            **_find_traffic(result.experiment, final),
            **{key: final.get(key) for key in ("gradient_calls", "hvp_calls", "jvp_calls", "samples")},
            **({"psi_test_accuracy": final["psi_test_accuracy"]} if "psi_test_accuracy" in final else {}),
            **{key: final[key] for key in (*CLOSED_FORMS, target.metric) if key in final},
        })
    return pd.DataFrame(rows)
