"""Runs of methods with a server: their topology, their columns, and comparisons with methods on a graph."""

from pathlib import Path
from typing import Any

import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import compare
from dbo.platform.runs.run_folder import read_network
from dbo.platform.runs.runner import run

SMALL: dict[str, Any] = {
    "nodes": 4, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 3, "dim_y": 5}, "engine": {"name": "local"},
    "rounds": 3,
}


def test_the_star_is_the_default_and_nothing_else_is_allowed() -> None:
    """Without a topology a method with a server gets the star; another one is refused in one line."""
    assert Experiment(**SMALL, algorithm={"name": "simfbo"}).topology == {"name": "star"}
    with pytest.raises(InputError) as error:
        Experiment(**SMALL, algorithm={"name": "simfbo"}, topology={"name": "ring"})
    assert str(error.value).startswith("topology.name: 'ring' is not allowed with simfbo, which needs a server")


def test_a_run_records_both_directions_and_the_servers_model(tmp_path: Path) -> None:
    """Columns add up, the state is the server's row, network.json names the server, ψ is that of the clients."""
    result = run(Experiment(**SMALL, algorithm={"name": "simfbo"}), tmp_path / "run")
    last = result.history.iloc[-1]
    assert last["bytes_up"] == last["bytes_down"] > 0
    assert last["server_bytes"] == last["bytes_up"] + last["bytes_down"] == last["bytes_links"]
    assert result.state["x"].shape == (1, 3)
    network = read_network(tmp_path / "run")
    assert network is not None
    assert (network.nodes, network.server) == (5, 4)
    same = run(Experiment(**SMALL, algorithm={"name": "soba"}), tmp_path / "soba")
    assert "bytes_up" not in same.history
    assert last["upper_loss"] == pytest.approx(same.history.iloc[0]["upper_loss"], rel=0.5)
    assert run(Experiment(**SMALL, algorithm={"name": "simfbo"}), tmp_path / "run", resume=True).status == "finished"


def test_psi_is_the_mean_over_clients(tmp_path: Path) -> None:
    """At the common start a method with a server and one on a graph report the same ψ: the server is no node."""
    start = {**SMALL, "rounds": 1}
    values = [
        run(Experiment(**start, algorithm={"name": name}), tmp_path / name).history.iloc[-1]["psi"]
        for name in ("simfbo", "d_soba")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)      # neither moves x in its first round


def test_names_of_groups_stand_for_algorithms() -> None:
    """`all`, networks and families expand in the order of the registry, without repetition."""
    assert compare.expand_names(["all"]) == list(algorithms())
    star = [name for name, made in algorithms().items() if made.network == "star"]
    assert compare.expand_names(["star"]) == star
    assert compare.expand_names(["d_soba", "soba"])[:2] == ["d_soba", "soba"]        # a method wins over its family
    assert set(compare.expand_names(["star", "neumann"])) >= {"mdbo", *star}
    with pytest.raises(InputError, match=r"allowed: .*all.*star"):
        compare.plan(None, [], ["sta"], None)


def test_a_comparison_gives_each_method_its_network(tmp_path: Path) -> None:
    """A given graph holds for gossip methods; a method with a server gets its star; the table has both traffics."""
    overrides = [
        "nodes=4", "dtype=float64", "task={name: quadratic, dim_x: 3, dim_y: 5}", "engine.name=local", "rounds=2",
        "topology.name=complete", "tracking.uri=off",
    ]
    experiments, target = compare.plan(None, overrides, ["simfbo", "d_soba"], None)
    assert [experiment.topology["name"] for experiment in experiments] == ["star", "complete"]
    results = compare.compare(experiments, target, tmp_path / "both")
    table = compare.comparison_table(results, target).set_index("algorithm")
    networks = [read_network(tmp_path / "both" / name) for name in ("simfbo", "d_soba")]
    assert [(network.nodes, network.links) for network in networks if network] == [(5, 4), (4, 6)]
    star, gossip = table.loc["simfbo"], table.loc["d_soba"]
    assert star["server_mb"] == pytest.approx(star["comm_mb"])
    assert star["node_mb"] == pytest.approx(star["comm_mb"] / 4)
    assert gossip["server_mb"] == 0
    assert gossip["node_mb"] == pytest.approx(2 * gossip["comm_mb"] / 4)
