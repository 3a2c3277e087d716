"""Load run folders of all kinds, and refuse damaged ones."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dbo.dashboards.load import load_run, load_runs
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import RunFolder, read_metrics
from dbo.platform.runs.schema import Target

Copy = Callable[[str], Path]


def test_run_is_read_as_it_was_recorded(recorded: Path) -> None:
    """Columns, nodes, graph and status equal those of the files."""
    folder = recorded / "sweep" / "cells" / "k3"
    run = load_run(folder)
    lines = read_metrics(folder / "metrics.jsonl")
    assert run.status == "finished"
    assert run.columns["comm_mb"].tolist() == [line["comm_mb"] for line in lines]
    assert run.nodes is not None
    assert run.nodes.distance_x.shape == (len(lines), 4)
    assert sum(run.nodes.channels.values()) == lines[-1]["bytes_broadcast"]
    assert run.network is not None
    assert len(run.network.edges) == 4


def test_folders_of_all_kinds(recorded: Path) -> None:
    """A run, a group with its members, and any folder with both below it; given twice, counted once."""
    assert len(load_runs([recorded / "quadratic"]).runs) == 1
    group = load_runs([recorded / "sweep"])
    assert [run.folder.name for run in group.runs] == ["k1", "k3", "k9"]
    assert group.groups[0].axes == {"algorithm.inner_steps": [1, 3, 9]}
    assert {run.target for run in group.runs} == {Target("node_accuracy_mean", 0.6)}
    assert len(load_runs([recorded, recorded / "sweep"]).runs) == 8 + 3 + 1 + 1


def test_unfinished_run_is_running_or_interrupted(copy: Copy) -> None:
    """A partly written last line is no damage, and a lock file that a crash has left behind is no lock."""
    folder = copy("quadratic")
    (folder / "summary.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 99, "sec')
    assert load_run(folder).status == "interrupted"
    (folder / ".lock").touch()
    assert load_run(folder).status == "interrupted"
    locked = RunFolder(folder)
    locked.acquire()
    assert load_run(folder).status == "running"
    locked.release()
    assert load_run(folder).status == "interrupted"
    assert load_run(folder).columns["round"][-1] == 8


def test_members_that_have_not_started_are_counted(copy: Copy) -> None:
    folder = copy("sweep")
    group = json.loads((folder / "group.json").read_text())
    (folder / "group.json").write_text(json.dumps({**group, "members": [*group["members"], "cells/later"]}))
    assert load_runs([folder]).groups[0].pending == 1


def test_sample_of_nodes_keeps_its_numbers(copy: Copy) -> None:
    """Of large networks nodes.jsonl has a sample: its columns belong to the numbers in `nodes`."""
    folder = copy("quadratic")
    lines = read_metrics(folder / "nodes.jsonl")
    sample = [{**line, "nodes": [1, 3], "apart_x": [line["apart_x"][1], line["apart_x"][3]]} for line in lines]
    (folder / "nodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sample))
    nodes = load_run(folder).nodes
    assert nodes is not None
    assert nodes.ids.tolist() == [1, 3]
    assert nodes.distance_x[-1].tolist() == sample[-1]["apart_x"]
    assert nodes.bytes[-1].tolist() == [lines[-1]["bytes"][1], lines[-1]["bytes"][3]]


def test_events_become_incidents(copy: Copy) -> None:
    """Losses and recoveries from events.jsonl, divergence from the summary."""
    folder = copy("quadratic")
    with open(folder / "events.jsonl", "a") as file:
        lost = {"timestamp": 1.0, "kind": "lost", "after_round": 3, "blocks": [1], "reason": "died"}
        file.write(json.dumps(lost) + "\n")
        file.write(json.dumps({**lost, "kind": "recovered", "resumed_after": 2, "seconds": 0.5}) + "\n")
    assert [(i.kind, i.round) for i in load_run(folder).incidents] == [("lost", 3), ("recovered", 3)]
    diverged = load_run(copy("diverged"))
    assert diverged.status == "diverged"
    assert diverged.incidents[-1].kind == "diverged"


def damage_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"round": 0}\nnonsense\n{"round": 1}\n')


def text_for_numbers(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"round": 0, "comm_mb": "<img>"}\n')


def falling_rounds(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"round": 3}\n{"round": 1}\n')


def ragged_nodes(folder: Path) -> None:
    lines = (folder / "nodes.jsonl").read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "apart_x": [1.0]})
    (folder / "nodes.jsonl").write_text("\n".join(lines) + "\n")


def endless_rounds(folder: Path) -> None:
    for name in ("metrics.jsonl", "nodes.jsonl"):
        lines = (folder / name).read_text().splitlines()
        lines[-1] = json.dumps({**json.loads(lines[-1]), "round": 10**400})
        (folder / name).write_text("\n".join(lines) + "\n")


def foreign_edges(folder: Path) -> None:
    (folder / "network.json").write_text('{"nodes": 4, "edges": [[0, 77]]}')


def no_experiment(folder: Path) -> None:
    (folder / "experiment.yaml").unlink()


def not_yaml(folder: Path) -> None:
    (folder / "experiment.yaml").write_text("a: [1,\n")


def python_in_yaml(folder: Path) -> None:
    (folder / "experiment.yaml").write_text("algorithm: !!python/object/apply:os.getcwd []\n")


def not_json(folder: Path) -> None:
    (folder / "summary.json").write_text("{")


def other_status(folder: Path) -> None:
    (folder / "summary.json").write_text('{"status": "<b>"}')


DAMAGES = (
    damage_metrics, text_for_numbers, falling_rounds, ragged_nodes, endless_rounds, foreign_edges, no_experiment,
    not_yaml, python_in_yaml, not_json, other_status,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_that_names_the_folder(copy: Copy, damage: Callable[[Path], None]) -> None:
    folder = copy("quadratic")
    damage(folder)
    with pytest.raises(InputError) as error:
        load_runs([folder])
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("members", ["cells", ["../../elsewhere"], ["/etc"], [1]])
def test_group_must_name_folders_inside_it(copy: Copy, members: object) -> None:
    folder = copy("sweep")
    (folder / "group.json").write_text(json.dumps({"members": members}))
    with pytest.raises(InputError, match="members"):
        load_runs([folder])


def test_foreign_folders(tmp_path: Path) -> None:
    """Missing, without runs, or with runs too deep below."""
    with pytest.raises(InputError, match="no such folder"):
        load_runs([tmp_path / "missing"])
    deep = tmp_path / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "metrics.jsonl").write_text('{"round": 0}\n')
    with pytest.raises(InputError, match="no run, comparison or sweep"):
        load_runs([tmp_path])


def test_values_that_are_not_finite_are_missing_values(copy: Copy) -> None:
    folder = copy("quadratic")
    (folder / "metrics.jsonl").write_text('{"round": 0, "comm_mb": NaN, "seconds": null, "upper_loss": 1.5}\n')
    os.remove(folder / "nodes.jsonl")
    run = load_run(folder)
    assert np.isnan(run.columns["comm_mb"][0])
    assert run.last_value("comm_mb") is None
    assert run.last_value("upper_loss") == 1.5
