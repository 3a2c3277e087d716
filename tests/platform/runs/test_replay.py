"""Read the traffic that a run recorded, and profiles of networks."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.network.timing import Profile, StarInterval, TraceRow
from dbo.platform.runs.replay import describe_profile, list_profiles, load_profile, read_traffic
from dbo.platform.runs.run_folder import build_history, read_metrics
from dbo.platform.runs.runner import NoCallback, run
from dbo.platform.runs.schema import Target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("replay") / "run"
    run(Experiment(**SMALL), out=out)
    return out


SMALL: dict[str, Any] = {
    "task": {"name": "quadratic"}, "nodes": 6, "rounds": 6, "eval_every": 2, "checkpoint_every": 3,
    "engine": {"name": "local"}, "tracking": {"uri": "off"}, "algorithm": {"name": "c2dfb", "inner_steps": 3},
}


def test_traffic_has_all_bytes_and_exchanges(folder: Path) -> None:
    traffic = read_traffic(folder)
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert sum(interval.bytes.sum() for interval in traffic.intervals) == last["bytes_broadcast"]
    assert sum(interval.exchanges for interval in traffic.intervals) * 6 == last["packets"]
    assert traffic.neighbours[0] == (1, 5)


def test_computing_times_are_measured_per_block(folder: Path) -> None:
    traffic = read_traffic(folder)
    seconds = [record["block_seconds"][0] for record in read_metrics(folder / "metrics.jsonl")]
    assert traffic.has_compute
    assert seconds[0] == 0
    assert seconds == sorted(seconds)
    assert sum(interval.compute.sum() for interval in traffic.intervals) == pytest.approx(seconds[-1])


def test_extended_run_keeps_counting(folder: Path, tmp_path: Path) -> None:
    run(Experiment(**{**SMALL, "rounds": 12}), out=tmp_path / "longer", start_from=folder)
    before, after = (
        [record["block_seconds"][0] for record in read_metrics(place / "metrics.jsonl")]
        for place in (folder, tmp_path / "longer")
    )
    assert after[: len(before)] == before
    assert after[len(before)] > before[-1]


def test_clock_grows_with_latency(folder: Path) -> None:
    traffic = read_traffic(folder)
    slow, fast = (load_profile(name) for name in ("mobile", "datacenter"))
    assert (traffic.replay(slow)[1:] > 100 * traffic.replay(fast)[1:]).all()
    assert traffic.replay(fast)[0] == 0


def test_traffic_up_to_the_target_ends_there(folder: Path) -> None:
    traffic = read_traffic(folder)
    level = traffic.records[2]["lower_loss"]
    part = traffic.up_to(Target("lower_loss", level))
    assert part is not None
    assert part.records[-1]["round"] <= 4
    assert part.replay(load_profile("wan"))[-1] == traffic.replay(load_profile("wan"))[len(part.intervals)]
    assert traffic.up_to(Target("lower_loss", -1.0)) is None


def test_run_without_computing_times_is_estimated(folder: Path, tmp_path: Path) -> None:
    """Folders of older versions have none: the training time is divided among the nodes."""
    for name in ("network.json", "nodes.jsonl", "experiment.yaml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        del record["block_seconds"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    traffic = read_traffic(tmp_path)
    assert not traffic.has_compute
    assert sum(interval.compute.sum() for interval in traffic.intervals) == pytest.approx(
        records[-1]["seconds"] - records[0]["seconds"])


def test_sizes_of_blocks_are_recorded(folder: Path, tmp_path: Path) -> None:
    """Four nodes in one block and two in another; without sizes the blocks are equal, as older versions packed them."""
    copy_files(folder, tmp_path)

    def shares(**changes: Any) -> list[float]:
        rewrite(tmp_path / "metrics.jsonl", block_seconds=[8.0, 6.0], **changes)
        return read_traffic(tmp_path).intervals[0].compute.tolist()

    records = read_metrics(folder / "metrics.jsonl")
    assert all(record["block_nodes"] == [6] for record in records)
    assert "block_nodes" not in build_history(records)
    rewrite(tmp_path / "metrics.jsonl", where=slice(1), block_seconds=[0.0, 0.0], block_nodes=[3, 3])
    assert shares(block_nodes=[4, 2]) == [2.0, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert shares(block_nodes=None) == pytest.approx([8 / 3] * 3 + [2.0] * 3)


def copy_files(folder: Path, to: Path) -> None:
    for file in folder.glob("*.*"):
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())


def test_graph_that_is_not_recorded_is_built_again(folder: Path, tmp_path: Path) -> None:
    copy_files(folder, tmp_path)
    network = json.loads((folder / "network.json").read_text())
    (tmp_path / "network.json").write_text(json.dumps({**network, "edges": None}))
    assert read_traffic(tmp_path).neighbours == read_traffic(folder).neighbours


def test_missing_line_of_the_nodes_is_named(folder: Path, tmp_path: Path) -> None:
    copy_files(folder, tmp_path)
    lines = (tmp_path / "nodes.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "nodes.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match=r"nodes.jsonl: nothing to replay; 3 lines for 4 evaluations"):
        read_traffic(tmp_path)


@pytest.mark.parametrize("name", list_profiles())
def test_shipped_profile_is_valid_and_described(name: str) -> None:
    assert load_profile(name).bandwidth_mbit > 0
    assert len(describe_profile(name)) > 20


def test_wan_latencies_are_symmetric() -> None:
    table = np.reshape(load_profile("wan").region_latency_ms, (8, 8))
    assert (table == table.T).all()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("p.yaml", "latency_ms: -1", r"p.yaml.latency_ms: -1 is not allowed"),
        ("p.yaml", "bandwith_mbit: 3", r"bandwith_mbit"),
        ("p.yaml", "compute: [1, -2]", r"p.yaml.compute.1: -2 is not allowed; must be ≥ 0"),
        ("p.yaml", "compute: -2", r"p.yaml.compute: -2 is not allowed; must be ≥ 0"),
        ("p.yaml", "compute: [1, fast]", r"p.yaml.compute.1: 'fast' is not allowed; must be a number"),
        ("p.yaml", "compute: fast", r"p.yaml.compute: 'fast' is not allowed; must be a number"),
        ("p.yaml", "compute: []", r"p.yaml.compute: \[\] is not allowed; must be a number, or a list with one number"),
        ("p.yaml", "trace: 3", r"p.yaml: trace: '3' is not allowed; must be a CSV file"),
        ("p.yaml", "trace: none.csv", r"none.csv: cannot be read: No such file"),
        ("p.yaml", "regions: [a]", r"region_latency_ms: 0 values for 1 regions"),
        ("t.csv", "", r"the column latency_ms is missing"),
        ("t.csv", "latency_ms,bandwidth_mbit\n", r"t.csv: no rows"),
        ("t.csv", "latency_ms,bandwidth_mbit,speed\n1,2,3\n", r"t.csv: column 3 is unknown"),
        ("t.csv", "latency_ms,bandwidth_mbit\n1,0\n", r"line 2: bandwidth_mbit must be a number above 0"),
        ("t.csv", "latency_ms,bandwidth_mbit\nnan,1\n", r"line 2: latency_ms must be a number of at least 0"),
        ("t.csv", "from,latency_ms,bandwidth_mbit\n-1,1,1\n", r"line 2: from must be the number of a node"),
        ("t.csv", f"to,latency_ms,bandwidth_mbit\n{'9' * 5000},1,1\n", r"line 2: to must be the number of a node"),
    ],
)
def test_wrong_profile_is_one_line(file: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError, match=message):
        load_profile(str(tmp_path / file))


@pytest.mark.parametrize(("text", "value"), [("2", 2.0), ("[1, 2.5]", (1.0, 2.5)), ("[4]", (4.0,))])
def test_compute_is_a_number_or_a_list(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "p.yaml").write_text(f"compute: {text}\n")
    assert load_profile(str(tmp_path / "p.yaml")).compute == value


def test_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"--network: unknown value 'wam', did you mean 'wan'\?; allowed: broadband"):
        load_profile("wam")


def test_profile_file_may_name_a_trace(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("latency_ms: 3\ntrace: t.csv\n")
    (tmp_path / "t.csv").write_text("seconds,from,to,latency_ms,bandwidth_mbit\n2,*,1,7,0.5\n")
    profile = load_profile(str(tmp_path / "p.yaml"))
    assert profile.latency_ms == 3
    assert (profile.trace[0].seconds, profile.trace[0].sender, profile.trace[0].receiver) == (2, None, 1)


TOKEN = "ghp_0123456789abcdef"


@pytest.mark.parametrize("text", [
    TOKEN, f"{TOKEN},{TOKEN}\n", f"latency_ms,bandwidth_mbit,{TOKEN}\n", f"latency_ms,bandwidth_mbit\n{TOKEN},1\n",
    f"from,latency_ms,bandwidth_mbit\n{TOKEN},1,1\n", f"to,latency_ms,bandwidth_mbit\n*,1,{TOKEN}\n",
])
def test_a_trace_is_never_quoted(text: str, tmp_path: Path) -> None:
    """A profile of somebody else may name any file as its trace."""
    (tmp_path / "secret.csv").write_text(text)
    (tmp_path / "p.yaml").write_text("trace: secret.csv\n")
    with pytest.raises(InputError) as caught:
        load_profile(str(tmp_path / "p.yaml"))
    assert TOKEN not in str(caught.value)


def test_a_trace_without_an_end_is_refused(tmp_path: Path) -> None:
    """Neither a device nor a pipe is read."""
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zero.csv"):
        with pytest.raises(InputError, match="not a regular file"):
            load_profile(str(tmp_path / name))


def test_a_trace_too_long_for_the_graph_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time at which it changes needs a latency and a rate per link."""
    monkeypatch.setattr("dbo.platform.runs.replay._MAX_TRACE_CELLS", 10)
    rows = tuple(
        TraceRow(seconds=at, sender=None, receiver=None, latency_ms=1.0, bandwidth_mbit=1.0) for at in range(9))
    with pytest.raises(InputError, match="a trace that changes at 9 times is too long"):
        read_traffic(folder).replay(replace(load_profile("wan"), trace=rows))


@pytest.mark.parametrize(("name", "value", "message"), [
    ("packets", 10**15, "node updates are too many to replay"),
    ("packets", 10**400, "packets must be a number"),
    ("packets", -1, "packets must be a number"),
    ("packets", "12", "packets must be a number"),
    ("packets", [1], "packets must be a number"),
    ("packets", True, "packets must be a number"),
])
def test_forged_traffic_is_refused(folder: Path, tmp_path: Path, name: str, value: object, message: str) -> None:
    """A foreign folder must neither hang a report nor end it with a traceback."""
    copy_files(folder, tmp_path)
    records = read_metrics(folder / "metrics.jsonl")
    records[-1][name] = value
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(InputError, match=message):
        read_traffic(tmp_path)


@pytest.mark.parametrize("value", [
    None, 3, "text", {"a": 1}, ["1"] * 4, [[1], [2, 3]], [1, 2], [None] * 4, [10**400] * 4, [{}] * 4, [1e999] * 4])
def test_forged_bytes_and_computing_times(folder: Path, tmp_path: Path, value: object) -> None:
    """Bytes that are not a number per node are refused; computing times of another kind count as missing."""
    copy_files(folder, tmp_path)
    records = read_metrics(folder / "metrics.jsonl")
    if value != [1, 2]:                 # the times of two blocks
        for record in records:
            record["block_seconds"] = value
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        assert not read_traffic(tmp_path).has_compute
    rows = [json.loads(line) | {"bytes": value} for line in (folder / "nodes.jsonl").read_text().splitlines()]
    (tmp_path / "nodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="bytes must be a number per node"):
        read_traffic(tmp_path)


def test_a_graph_with_too_many_links_is_not_built(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links of a complete graph grow with the square of its nodes."""
    copy_files(folder, tmp_path)
    network = json.loads((folder / "network.json").read_text())
    (tmp_path / "network.json").write_text(json.dumps({**network, "edges": None}))
    (tmp_path / "experiment.yaml").write_text("topology: {name: complete}\nseed: x\n")
    assert len(read_traffic(tmp_path).neighbours[0]) == network["nodes"] - 1
    monkeypatch.setattr("dbo.platform.runs.replay._MAX_BUILT_LINKS", 3)
    with pytest.raises(InputError, match="too many links"):
        read_traffic(tmp_path)


@pytest.mark.parametrize("file", ["/dev/zero", "pipe", "missing"])
def test_a_list_of_edges_without_an_end_is_refused(folder: Path, tmp_path: Path, file: str) -> None:
    """A foreign experiment names any file. Control: the same graph as a list is read."""
    copy_files(folder, tmp_path)
    network = json.loads((folder / "network.json").read_text())
    (tmp_path / "network.json").write_text(json.dumps({**network, "edges": None}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "edges.txt").write_text("\n".join(f"{i} {j}" for i, j in network["edges"]))
    (tmp_path / "experiment.yaml").write_text(f"topology: {{name: edges, file: {tmp_path / 'edges.txt'}}}\n")
    assert read_traffic(tmp_path).neighbours == read_traffic(folder).neighbours
    (tmp_path / "experiment.yaml").write_text(f"topology: {{name: edges, file: {tmp_path / file}}}\n")
    with pytest.raises(InputError, match=r"its graph is not recorded, and .* cannot be read"):
        read_traffic(tmp_path)


# ---- stars -----------------------------------------------------------------------------------------------------------

SECOND = Profile(latency_ms=1000, bandwidth_mbit=math.inf, compute=0)
STAR: dict[str, Any] = {
    "task": {"name": "quadratic"}, "nodes": 10, "rounds": 20, "eval_every": 5, "engine": {"name": "local"},
    "tracking": {"uri": "off"},
}


def rewrite(path: Path, drop: str = "", where: slice = slice(1, None), **changes: Any) -> None:
    """Change every line but the first, which is the start, or those of `where`; drop a key from all lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[where]:
        line |= changes
    for line in lines:
        line.pop(drop, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which three of ten clients take part in a round."""
    out = tmp_path_factory.mktemp("star") / "run"
    run(Experiment(**STAR, algorithm={"name": "simfbo", "participation": 0.3}), out=out)
    return out


@pytest.mark.parametrize("participation", [1.0, 0.2])
def test_a_round_with_a_server_goes_down_and_up(participation: float, tmp_path: Path) -> None:
    """20 rounds of simfbo at a latency of 1 s take 40 s, whoever takes part."""
    run(Experiment(**STAR, algorithm={"name": "simfbo", "participation": participation}), out=tmp_path / "run")
    assert read_traffic(tmp_path / "run").replay(SECOND) == pytest.approx([0, 10, 20, 30, 40])


@pytest.mark.parametrize("name", [name for name, made in algorithms().items() if made.network == "star"])
def test_every_declared_packet_with_a_server_is_an_exchange(name: str, tmp_path: Path) -> None:
    """At a latency of 1 s a round takes as many seconds as the method declares packets, half of them of the server."""
    experiment = Experiment(**{**STAR, "rounds": 3, "eval_every": 3}, algorithm={"name": name, "participation": 0.4})
    run(experiment, out=tmp_path / "run")
    declared = experiment.parts.algorithm.packets
    assert declared is not None
    assert read_traffic(tmp_path / "run").replay(SECOND)[-1] == pytest.approx(3 * declared(experiment.parts.config))


def test_star_has_all_bytes_packets_and_receivers(star: Path) -> None:
    """The server's bytes go to three of ten clients."""
    traffic = read_traffic(star)
    last = read_metrics(star / "metrics.jsonl")[-1]
    assert all(isinstance(interval, StarInterval) for interval in traffic.intervals)
    stars = [interval for interval in traffic.intervals if isinstance(interval, StarInterval)]
    assert sum(interval.bytes.sum() for interval in stars) == last["bytes_broadcast"]
    assert sum(interval.packets.sum() for interval in stars) == last["packets"]
    assert [(interval.up, int(interval.packets[-1]), interval.copies) for interval in stars] == [(5, 5, 15)] * 4
    assert sum(interval.bytes[-1] * 3 for interval in stars) == last["bytes_down"]
    assert traffic.neighbours[-1] == tuple(range(10))


def test_a_server_in_the_block_of_its_clients_has_no_share_of_the_time(star: Path, tmp_path: Path) -> None:
    """On Ray it has a block of its own, and its own time."""
    copy_files(star, tmp_path)
    rewrite(tmp_path / "metrics.jsonl", block_seconds=[5.0])
    assert read_traffic(tmp_path).intervals[0].compute.tolist() == [0.5] * 10 + [0.0]
    rewrite(tmp_path / "metrics.jsonl", where=slice(1), block_seconds=[0.0] * 3, block_nodes=[6, 4, 1])
    rewrite(tmp_path / "metrics.jsonl", block_seconds=[6.0, 2.0, 0.5], block_nodes=[6, 4, 1])
    assert read_traffic(tmp_path).intervals[0].compute.tolist() == [1.0] * 6 + [0.5] * 5


def test_exchanges_that_a_method_does_not_declare_follow_from_its_packets(star: Path, tmp_path: Path) -> None:
    copy_files(star, tmp_path)
    assert [json.loads(line)["exchanges"] for line in (star / "nodes.jsonl").read_text().splitlines()] == [
        0, 10, 20, 30, 40]
    rewrite(tmp_path / "nodes.jsonl", drop="exchanges")
    assert read_traffic(tmp_path).replay(SECOND) == pytest.approx([0, 10, 20, 30, 40])


def test_a_star_of_an_older_version_is_refused(star: Path, tmp_path: Path) -> None:
    """In one line that says what to do. Control: on a graph the same line is not needed."""
    copy_files(star, tmp_path)
    rewrite(tmp_path / "nodes.jsonl", drop="packets")
    with pytest.raises(InputError, match=r"did not record the packets of a star; run it again"):
        read_traffic(tmp_path)


def test_a_graph_of_an_older_version_is_replayed_as_before(folder: Path, tmp_path: Path) -> None:
    copy_files(folder, tmp_path)
    for key in ("packets", "exchanges"):
        rewrite(tmp_path / "nodes.jsonl", drop=key)
    rewrite(tmp_path / "metrics.jsonl", drop="block_nodes")
    wan = load_profile("wan")
    assert read_traffic(tmp_path).replay(wan).tolist() == read_traffic(folder).replay(wan).tolist()


@pytest.mark.parametrize(("changes", "message"), [
    ({"packets": [1] * 10}, "packets must be a number per node"),
    ({"packets": "no base64!"}, "packets must be a number per node"),
    ({"packets": [1e300] * 11}, "packets must be a number per node"),
    ({"packets": [6] * 11}, "round 20: packets, bytes and exchanges contradict"),
    ({"packets": [900] * 10 + [20]}, "packets, bytes and exchanges contradict"),
    ({"packets": [-3] * 11}, "packets, bytes and exchanges contradict"),
    ({"exchanges": 10**14}, "node updates are too many to replay"),
    ({"exchanges": -1}, "exchanges must be a number"),
    ({"exchanges": True}, "exchanges must be a number"),
    ({"exchanges": [3]}, "exchanges must be a number"),
    ({"bytes": [0] * 11}, "packets, bytes and exchanges contradict"),
    ({"bytes": [5]}, "bytes must be a number per node"),
])
def test_forged_star_is_refused(star: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    copy_files(star, tmp_path)
    rewrite(tmp_path / "nodes.jsonl", where=slice(4, None), **changes)
    with pytest.raises(InputError, match=message):
        read_traffic(tmp_path)


def test_forged_receivers_are_refused(star: Path, tmp_path: Path) -> None:
    """A server cannot send to more clients than there are."""
    copy_files(star, tmp_path)
    rewrite(tmp_path / "metrics.jsonl", where=slice(4, None), bytes_down=1e9)
    with pytest.raises(InputError, match="packets, bytes and exchanges contradict"):
        read_traffic(tmp_path)


@pytest.mark.parametrize("network", [{"server": 3}, {"server": 0, "nodes": 1, "edges": None}])
def test_forged_server_is_refused(star: Path, tmp_path: Path, network: dict[str, Any]) -> None:
    copy_files(star, tmp_path)
    (tmp_path / "network.json").write_text(json.dumps(json.loads((star / "network.json").read_text()) | network))
    with pytest.raises(InputError, match="the server must be the last of at least two nodes"):
        read_traffic(tmp_path)


class _Interrupt(NoCallback):
    def on_evaluation(self, record: dict[str, Any]) -> None:
        if record["round"] == 15:
            raise KeyboardInterrupt


def test_resumed_and_extended_runs_record_the_same_packets(star: Path, tmp_path: Path) -> None:
    """Interrupted after round 15 and resumed from 12, or extended from 10: the lines of an uninterrupted run."""
    whole: dict[str, Any] = {**STAR, "checkpoint_every": 4, "algorithm": {"name": "simfbo", "participation": 0.3}}
    with pytest.raises(KeyboardInterrupt):
        run(Experiment(**whole), out=tmp_path / "resumed", callback=_Interrupt())
    run(Experiment(**whole), out=tmp_path / "resumed", resume=True)
    run(Experiment(**{**whole, "rounds": 10}), out=tmp_path / "half")
    run(Experiment(**whole), out=tmp_path / "extended", start_from=tmp_path / "half")
    for name in ("resumed", "extended"):
        assert (tmp_path / name / "nodes.jsonl").read_text() == (star / "nodes.jsonl").read_text()
