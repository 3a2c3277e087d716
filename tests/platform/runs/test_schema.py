"""The schema of a run folder: metrics, targets, and the parsing and serialization of every file."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dbo.platform.errors import InputError
from dbo.platform.runs import schema
from dbo.platform.runs.schema import (
    BLOCK_LISTS,
    CLOCKS,
    CLOSED_FORMS,
    COLUMNS,
    METRICS,
    OPTIONAL,
    Event,
    Group,
    RecordedNetwork,
    Recovery,
    Summary,
    Target,
)

ROOT = Path(__file__).resolve().parents[3]
SUMMARY = Summary(
    status="finished", name="n", run_key="abc", algorithm="c2dfb", rounds=3, final={"round": 3, "upper_loss": 0.5},
    targets={"test_accuracy=0.5": None, "test_accuracy=0.6": {"round": 2}},
    recoveries=[Recovery(2, [0], "died", resumed_after=1, seconds=0.5).to_dict()],
    seconds={"training": 1.0, "evaluation": 0.5}, problem={"data_sha256": "d"}, network={"nodes": 4}, started="s",
    ended="e", version="1",
)
GROUP = Group(
    kind="sweep", name="g", key="k", command="dbo sweep g", started="s", status="running", target="test_accuracy=0.7",
    members=("cells/a", "cells/b"), axes={"seed": [0, 1]}, mode="grid", metric="upper_loss", goal="min", claim="",
    tracking={"uri": None, "experiment": "dbo"},
)


def test_importing_the_schema_is_cheap() -> None:
    """Neither pandas nor an engine nor the experiment is loaded; the same holds for the run folder."""
    heavy = ("pandas", "scipy", "pydantic", "dbo.platform.engine", "dbo.platform.config.experiment", "dbo.tasks")
    code = f"import sys; import dbo.platform.runs.{{}}; print([name for name in {heavy!r} if name in sys.modules])"
    for module in ("schema", "run_folder", "statistics"):
        done = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n", module


FILES = {"summary.json", "manifest.json", "group.json", "metrics.jsonl", "nodes.jsonl", "events.jsonl", "network.json"}
OWNERS = {
    "platform/runs/run_folder.py",
    "platform/runs/checkpoints.py",             # a checkpoint has a manifest of its own
    "platform/runs/remote.py",                  # the order of uploads
    "platform/config/tracking_uri.py",          # whether there is a group; config cannot import runs
    "platform/tracking/process.py",             # whether there is a group, before the slow imports
}


def test_no_other_module_names_the_files_of_a_run_folder() -> None:
    """Who wants their content calls `run_folder`, which parses with the schema."""
    packages = ("algorithms", "dashboards", "dbo", "platform", "sweeps", "tasks")
    modules = [file.relative_to(ROOT) for package in packages for file in (ROOT / package).rglob("*.py")]
    assert len(modules) > 100
    found = {
        module.as_posix() for module in modules
        for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in FILES
    }
    assert found == OWNERS


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_every_column_is_a_metric_with_a_direction() -> None:
    """Accuracies are maximized, everything else is minimized; a metric that nobody declared is minimized."""
    assert set(METRICS) == {*COLUMNS, *OPTIONAL}
    assert set(CLOSED_FORMS) < set(OPTIONAL)
    assert set(CLOCKS) - {*BLOCK_LISTS} < set(COLUMNS)
    assert (COLUMNS[0], COLUMNS[-1]) == ("round", "timestamp")
    maximized = {name for name, metric in METRICS.items() if metric.direction == "max"}
    assert maximized == {
        "test_accuracy", "node_accuracy_mean", "node_accuracy_min", "public_accuracy_mean", "public_accuracy_min",
        "psi_test_accuracy", "psi_converged", "tune_accuracy",
    }
    assert all(metric.meaning for metric in METRICS.values())
    assert schema.find_direction("a_task_s_own") == "min"


def test_names_of_older_versions_are_read_as_todays() -> None:
    """In evaluations, in the last one of a summary, and in targets; everything else keeps its order."""
    old = '{"round": 3, "hypergradient_norm": 0.5, "packets": 1}'
    assert list(schema.parse_record(old).items()) == [("round", 3), ("direction_norm", 0.5), ("packets", 1)]
    summary = schema.parse_summary(json.dumps({"status": "finished", "final": json.loads(old)}))
    assert summary.final["direction_norm"] == 0.5
    assert Target.parse("hypergradient_norm=0.1") == Target("direction_norm", 0.1)


def test_declared_direction_of_a_task_s_own_metric_counts() -> None:
    """A name with "accuracy" in it decides nothing."""
    records = [{"round": 1, "inaccuracy": 0.2}, {"round": 2, "inaccuracy": 0.6}]
    assert Target("inaccuracy", 0.3).find_first(records) == records[0]
    assert Target("inaccuracy", 0.3, "max").find_first(records) == records[1]


def test_cost_of_a_target_is_that_of_the_first_evaluation_at_it() -> None:
    """Rounds, bytes and seconds; None if it was not reached."""
    keys = ("bytes_links", "bytes_broadcast", "comm_mb", "paper_megabytes", "seconds")
    records = [{"round": n, "test_accuracy": 0.3 * n, **dict.fromkeys(keys, float(n))} for n in range(4)]
    cost = Target("test_accuracy", 0.5).find_cost(records)
    assert cost == {"round": 2, **dict.fromkeys(keys, 2.0)}
    assert Target("test_accuracy", 0.95).find_cost(records) is None


# ---- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["test_accuracy=0.7", "upper_loss=1e-3", "consensus_y=12", "consensus_x=-1"])
def test_target_round_trips(text: str) -> None:
    """Parse and format metric=level."""
    target = Target.parse(text)
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "text",
    ["", "test_accuracy", "=0.7", "test_accuracy=", "test_accuracy=x", "bogus=1", "round=3", "seconds=1", "timestamp=1",
     "test_accuracy=nan", "test_accuracy=inf", "test_accuracy=0.7=0.8"],
)
def test_malformed_target_is_refused(text: str) -> None:
    """One line with the value and the known metrics."""
    with pytest.raises(InputError, match=r"--target: .* metrics: test_accuracy") as error:
        Target.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("metric", "values", "level", "expected"),
    [
        ("test_accuracy", [0.1, 0.5, 0.7, 0.6, 0.9], 0.7, 2),
        ("node_accuracy_min", [0.1, 0.5], 0.1, 0),
        ("test_accuracy", [0.1, 0.5], 0.7, None),
        ("test_accuracy", [None, None], 0.7, None),
        ("test_accuracy", [None, 0.8], 0.7, 1),
        ("upper_loss", [3.0, 2.0, 1.0, 2.0], 2.0, 1),
        ("consensus_x", [0.0, 1.0], 0.5, None),
        ("upper_loss", [3.0, 2.0], 1.0, None),
        ("upper_loss", [], 1.0, None),
    ],
)
def test_target_is_reached_in_the_direction_of_its_metric(
    metric: str, values: list[float | None], level: float, expected: int | None
) -> None:
    """Maximized metrics rise to a level, others fall to it; the first evaluation at or beyond it counts."""
    found = Target(metric, level).find_first([{"round": n, metric: value} for n, value in enumerate(values)])
    assert (None if found is None else found["round"]) == expected


# ---- files -----------------------------------------------------------------------------------------------------------


def test_summary_round_trips() -> None:
    """Parsing what was serialized returns the same summary."""
    assert schema.parse_summary(schema.serialize_summary(SUMMARY)) == SUMMARY


def test_summary_keeps_its_format() -> None:
    """Keys, order and indentation of summary.json; a failed run has its error after its status."""
    text = schema.serialize_summary(SUMMARY)
    assert list(json.loads(text)) == [
        "status", "name", "run_key", "algorithm", "rounds", "final", "targets", "recoveries", "seconds", "problem",
        "network", "started", "ended", "version",
    ]
    assert text.startswith('{\n  "status": "finished",\n  "name"')
    assert text.endswith("\n}\n")
    assert list(json.loads(schema.serialize_summary(Summary("failed", error="no")))) == [
        "status", "error", "name", "run_key", "algorithm", "rounds", "final", "targets", "recoveries", "seconds"]


def test_credentials_are_not_written() -> None:
    """Texts in summaries and groups are redacted; the tracking URI, which holds no password, is kept."""
    secret = "s3://me:password@bucket/run"
    assert "password" not in schema.serialize_summary(Summary("failed", error=f"cannot write {secret}"))
    group = Group("sweep", "g", "k", f"dbo sweep --out {secret}", "", "", "", (), {}, tracking={"uri": "http://u@h"})
    assert "password" not in schema.serialize_group(group)
    assert json.loads(schema.serialize_group(group))["tracking"] == {"uri": "http://u@h"}


def test_group_round_trips() -> None:
    """Parsing what was serialized returns the same group; a comparison lacks the keys of a sweep."""
    sweep = json.loads(schema.serialize_group(GROUP))
    assert list(sweep) == [
        "kind", "name", "key", "command", "started", "status", "target", "members", "axes", "mode", "metric", "goal",
        "claim", "tracking",
    ]
    assert schema.parse_group(json.dumps({**sweep, "claim": "c"})).to_dict() == {**sweep, "claim": "c"}
    assert {"mode", "metric", "goal", "claim"}.isdisjoint(Group("compare", "", "", "", "", "", "", (), {}).to_dict())


@pytest.mark.parametrize("parse", [
    schema.parse_summary, schema.parse_group, schema.parse_network, schema.parse_event, schema.parse_record,
])
@pytest.mark.parametrize("text", [
    "", "{", "[1]", "3", "null", '"x"', b"\xff\xfe", pytest.param("[" * 100_000, id="nested"),
])
def test_damaged_text_is_a_value_error(parse: Callable[[Any], Any], text: str | bytes) -> None:
    """Whatever the file, whatever the damage."""
    with pytest.raises(ValueError):  # noqa: PT011 - each has a text of its own
        parse(text)


def test_older_files_stay_readable() -> None:
    """Missing keys have defaults."""
    assert schema.parse_summary('{"status": "finished"}') == Summary("finished")
    assert schema.parse_event('{"kind": "started"}') == Event("started")
    assert schema.parse_group('{"members": []}').axes == {}
    assert schema.parse_network('{"nodes": 3}') == RecordedNetwork(3, None, None, None)


@pytest.mark.parametrize("value", [None, True, [], {}, "x", 1e999, 10**400, -1.5])
def test_fields_of_the_wrong_type_get_defaults(value: Any) -> None:
    """A foreign summary or event never has a field of another type than declared."""
    text = json.dumps(dict.fromkeys(schema.parse_summary("{}").to_dict(), value) | {"problem": value})
    summary = schema.parse_summary(text)
    assert isinstance(summary.status, str)
    assert isinstance(summary.rounds, int)
    assert isinstance(summary.final, dict)
    assert isinstance(summary.recoveries, list)
    event = schema.parse_event(json.dumps({"kind": "lost", "timestamp": value, "after_round": value, "blocks": value}))
    assert isinstance(event.timestamp, float | int)
    assert event.after_round is None
    assert event.blocks == ()


@pytest.mark.parametrize(("change", "message"), [
    ({"members": "cells"}, "members"), ({"members": [1]}, "members"), ({"members": None}, "members"),
    ({"axes": [1]}, "axes"), ({"axes": {"seed": 1}}, "axes"),
])
def test_malformed_group_is_refused(change: dict[str, Any], message: str) -> None:
    """With the field; a tolerant reader gets what is valid, as long as there is a list of members."""
    text = json.dumps({"members": ["a"], "axes": {}} | change)
    with pytest.raises(ValueError, match=f"{message}: .* is not allowed"):
        schema.parse_group(text)
    if isinstance(change.get("members", []), list):
        assert all(isinstance(member, str) for member in schema.parse_group(text, tolerant=True).members)


@pytest.mark.parametrize("edge", [[0, 9], [0], [0, 1, 2], "01", None, [0, 1.0], [True, 1]])
def test_malformed_edge_is_refused(edge: Any) -> None:
    """A tolerant reader gets the other edges."""
    text = json.dumps({"nodes": 3, "links": 2, "spectral_gap": 0.5, "edges": [[0, 1], edge]})
    with pytest.raises(ValueError, match="is not a pair of nodes"):
        schema.parse_network(text)
    assert schema.parse_network(text, tolerant=True) == RecordedNetwork(3, 2, 0.5, [[0, 1]])


def test_experiment_round_trips_as_plain_data() -> None:
    """Numbers stay numbers, credentials are redacted, and damage names the file."""
    data = {"rounds": 3, "algorithm": {"name": "c2dfb", "eta_in": 1e-05}, "data_dir": "s3://me:password@b/d"}
    text = schema.serialize_experiment(data)
    assert schema.parse_experiment(text, "f") == {**data, "data_dir": "s3://***@b/d"}
    for bad in ("a: [1,\n", "- 1\n", "3: x\n", "a: !!python/object/apply:os.getcwd []\n"):
        with pytest.raises(InputError, match="f:"):
            schema.parse_experiment(bad, "f")
