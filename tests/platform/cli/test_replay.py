"""`dbo replay` from the outside."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dbo.dashboards.charts.replay import build_replay_panels
from dbo.dashboards.groups import group_runs
from dbo.dashboards.load import load_runs


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dbo.platform.runs.compare import compare, plan

    out = tmp_path_factory.mktemp("replay") / "comparison"
    experiments, target = plan(
        None, ["task=quadratic", "nodes=6", "rounds=4", "engine=local", "tracking.uri=off"],
        ["c2dfb", "d_soba", "f2ba"], "lower_loss=1e9")
    compare(experiments, target, out)
    return out


def test_table_has_a_row_per_algorithm_and_a_column_per_network(comparison: Path, dbo: Any) -> None:
    done = dbo("replay", str(comparison))
    assert done.code == 0, done.err
    assert "seconds to lower_loss=1e+09" in done.out
    assert "datacenter" in done.out
    assert "d_soba" in done.out


def test_csv_has_every_evaluation(comparison: Path, dbo: Any, tmp_path: Path) -> None:
    done = dbo("replay", str(comparison), "--network", "wan", "--network", "radio", "--out", str(tmp_path / "t.csv"))
    assert done.code == 0, done.err
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert len(rows) == 3 * 2 * 5
    assert {row["network"] for row in rows} == {"wan", "radio"}


def test_a_star_of_an_older_version_is_refused_in_one_line(dbo: Any, tmp_path: Path) -> None:
    """Control: the same run is replayed as long as it has its packets."""
    done = dbo("run", "algorithm=simfbo", "task=quadratic", "nodes=3", "rounds=2", "engine=local", "tracking.uri=off",
               "--out", str(tmp_path / "run"))
    assert done.code == 0, done.err
    command = ["replay", str(tmp_path / "run"), "--target", "lower_loss=1e9"]
    assert dbo(*command).code == 0
    nodes = tmp_path / "run" / "nodes.jsonl"
    nodes.write_text("".join(
        json.dumps({key: value for key, value in json.loads(line).items() if key != "packets"}) + "\n"
        for line in nodes.read_text().splitlines()))
    (tmp_path / "run" / "manifest.json").unlink()
    done = dbo(*command)
    assert done.code == 2
    assert done.err.strip().endswith(
        "run: cannot be replayed: its version of dbo did not record the packets of a star; run it again")
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "moon"], "--network: unknown value 'moon'"),
        (["--network", "none.yaml"], "none.yaml: no such file"),
        (["--network", "wan", "--network", "wan"], "two networks have the same name"),
        (["--out", "times.txt"], "--out: times.txt is not allowed; must be a .csv file"),
        (["--target", "speed=3"], "--target: 'speed=3' is not metric=level"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str, comparison: Path, dbo: Any) -> None:
    done = dbo("replay", str(comparison), *arguments)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_map_names_the_fastest_group(comparison: Path) -> None:
    """f2ba sends nothing: on a slow network it wins."""
    (panel,) = build_replay_panels(group_runs(load_runs([comparison])))
    assert panel["map"] is not None
    slowest = panel["map"]["winners"][0][-1]
    assert panel["map"]["labels"][slowest] == "f2ba"
    assert [row[0] for row in panel["table"]] == ["c2dfb", "d_soba", "f2ba"]


def test_names_are_no_markup(comparison: Path, dbo: Any, tmp_path: Path) -> None:
    """A network is named after its file, an algorithm by whoever wrote the folder: neither may end the table."""
    (tmp_path / "[red].yaml").write_text("latency_ms: 1\n")
    done = dbo("replay", str(comparison), "--network", str(tmp_path / "[red].yaml"))
    assert done.code == 0, done.err
    assert "[red]" in done.out
