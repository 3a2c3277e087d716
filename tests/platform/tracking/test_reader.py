"""What MLflow gets from a run folder: metrics, names and parameters."""

from pathlib import Path
from typing import Any

import pytest

from dbo.platform.errors import InputError
from dbo.platform.runs.schema import Group
from dbo.platform.tracking.reader import (
    MAX_KEYS,
    Points,
    flatten,
    format_run_name,
    list_artifacts,
    list_axis_keys,
    select_metrics,
    write_nodes_table,
)


def test_metrics_are_few_and_finite() -> None:
    """At most MAX_KEYS keys, and no value that MLflow would store as another one."""
    record = {"round": 1, "timestamp": 2.0, "seconds": 3.0, "test_loss": float("inf"), "test_accuracy": None}
    assert dict(select_metrics(record)) == {"seconds": 3.0}
    many = record | {f"extra_{number}": 1.0 for number in range(100)}
    assert len(dict(select_metrics(many))) <= MAX_KEYS


def test_points_follow_a_growing_file(tmp_path: Path) -> None:
    """Half a line waits for its end; a file that was rolled back is read again, which `read` returns."""
    file = tmp_path / "metrics.jsonl"
    points = Points(file)
    assert not points.read()
    file.write_text('{"round": 0, "timestamp": 1}\n{"round": 1, "time')
    assert (points.read(), sorted(points.records)) == (False, [0])
    with open(file, "a") as appended:
        appended.write('stamp": 2}\n')
    assert (points.read(), sorted(points.records)) == (False, [0, 1])
    file.write_text('{"round": 0, "timestamp": 1}\n')
    assert (points.read(), sorted(points.records)) == (True, [0])
    file.write_text('{"round": 0, "timestamp": 3}\n{"round": 1, "timestamp": 4}\n')
    assert (points.read(), points.records[0]["timestamp"]) == (True, 3)
    file.unlink()
    assert (points.read(), points.records) == (True, {})


def test_run_names_and_parameters() -> None:
    """A run's name holds what runs differ in; nested parameters have dotted names and limited length."""
    data = {"algorithm": {"name": "mdbo"}, "topology": {"name": "torus"}, "partition": {"name": "iid"}, "seed": 3}
    assert format_run_name(data) == "mdbo seed 3 · torus · iid"
    assert format_run_name(data | {"name": "dbo"}, (), "r1") == "mdbo seed 3 · r1 · torus · iid"
    assert format_run_name(data | {"name": "wide"}, (), "r1") == "mdbo seed 3 · wide · r1 · torus · iid"
    assert format_run_name(data | {"name": "r1"}, (), "r1") == "mdbo seed 3 · r1 · torus · iid"
    cell = data | {"algorithm": {"name": "c2dfb", "inner_steps": 5, "compressor": {"ratio": 0.2}}}
    axes = ("seed", "algorithm.inner_steps", "algorithm.compressor.ratio")
    assert format_run_name(cell, axes) == "c2dfb seed 3 · inner_steps 5 · ratio 0.2 · torus · iid"
    assert format_run_name(data, ("topology", "partition.name"), "r1") == "mdbo seed 3 · torus · iid · r1"
    params = flatten({"a": {"b": {"c": 0.5}}, "d": [1, "x"], "e": None, "f": "y" * 9000})
    assert (params["a.b.c"], params["d"], params["e"], len(params["f"])) == ("0.5", '[1, "x"]', "null", 6000)


def test_names_begin_with_what_the_runs_of_a_group_differ_in() -> None:
    """Values that are sections too: same algorithm, same kind of graph, other parameters."""
    algorithms = [{"name": "c2dfb", "compressor": {"name": "top_k", "ratio": ratio}} for ratio in (0.1, 0.2)]
    graphs = [{"name": "erdos_renyi", "p": 0.4}, {"name": "erdos_renyi", "p": 0.8}]
    axes: dict[str, list[Any]] = {"algorithm": algorithms, "topology": graphs, "seed": [0, 1]}
    group = Group(kind="sweep", name="s", key="k", command="", started="", status="", target="", members=(), axes=axes)
    keys = list_axis_keys(group)
    names = [
        format_run_name({"name": "long-name", "algorithm": algorithm | {"lam": 10}, "topology": graph, "seed": seed,
                         "partition": {"name": "label_skew", "h": 0.8}}, keys, "sweep-folder")
        for algorithm in algorithms for graph in graphs for seed in (0, 1)
    ]
    first = "c2dfb seed 1 · top_k · ratio 0.1 · erdos_renyi · p 0.4"
    assert names[1] == f"{first} · long-name · sweep-folder · label_skew h 0.8"
    assert len({name[:len(first)] for name in names}) == 8


@pytest.mark.parametrize("line", [
    "0", "[]", "{}", '{"round": 1}', '{"round": -1, "timestamp": 1}', '{"round": 1, "timestamp": 1e300}',
    '{"round": 1, "timestamp": "x"}', '{"round": 1, "timestamp": null}', '{"round": 1' + "0" * 30 + ', "timestamp": 1}',
])
def test_a_damaged_line_is_an_input_error(tmp_path: Path, line: str) -> None:
    """One line with the file, instead of an error of MLflow's store."""
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: a line is damaged"):
        Points(tmp_path / "metrics.jsonl").read()


@pytest.mark.parametrize("nodes", ['"xy"', "null", "7", '[1, "x"]', "[1" + "0" * 400 + "]"])
def test_a_damaged_line_of_nodes_is_an_input_error(tmp_path: Path, nodes: str) -> None:
    """The table of nodes needs numbers, and as many in each column."""
    (tmp_path / "nodes.jsonl").write_text(f'{{"round": 0, "apart_x": {nodes}, "apart_y": [1.0], "bytes": [1]}}\n')
    with pytest.raises(InputError, match=r"nodes\.jsonl: a line is damaged"):
        write_nodes_table(tmp_path / "nodes.jsonl", tmp_path / "nodes.parquet")


def test_links_are_not_sent(tmp_path: Path) -> None:
    """A foreign folder may hold links to files of the user; the folder itself may be reached by a link."""
    private, folder = tmp_path / "private", tmp_path / "c"
    private.mkdir()
    folder.mkdir()
    (private / "token.yaml").write_text("hunter2")
    (private / "a.png").write_text("hunter2")
    (folder / "token.yaml").symlink_to(private / "token.yaml")
    (folder / "summary.json").symlink_to(private / "token.yaml")
    (folder / "figures").symlink_to(private)
    (folder / "compare.csv").write_text("a\n")
    (folder / "experiment.yaml").write_text("{}")
    (tmp_path / "latest").symlink_to(folder)
    for place in (folder, tmp_path / "latest"):
        assert list(list_artifacts(place, is_group=True)) == ["compare.csv", "experiment.yaml"]
        assert list(list_artifacts(place, is_group=False)) == ["experiment.yaml"]
