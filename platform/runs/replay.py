"""Read the recorded traffic of a run, and compute its clock on another network.

A profile is a shipped one, by name, or a file: YAML with the parameters of `Profile`, or a CSV trace of links. Nothing
is executed: plugins of a recorded experiment are not loaded. Records and traces may come from anybody: what they
announce is bounded, and no error quotes a trace, which may be another file than intended.
"""

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dbo.platform.config import yaml_io
from dbo.platform.config.paths import expand_user
from dbo.platform.config.validation import build, pick, validate
from dbo.platform.errors import InputError
from dbo.platform.network.timing import Floats, Interval, Profile, StarInterval, TraceRow, replay_star
from dbo.platform.network.timing import replay as replay_graph
from dbo.platform.network.topology import TOPOLOGIES
from dbo.platform.regular_files import open_regular
from dbo.platform.runs.atomic_io import read_bounded
from dbo.platform.runs.node_lines import read_sent
from dbo.platform.runs.run_folder import RunFolder, iterate_metrics, read_experiment, read_metrics, read_network
from dbo.platform.runs.schema import BLOCK_NODES, BLOCK_SECONDS, Record, RecordedNetwork, Target, section

_PROFILES = Path(__file__).parents[1] / "network" / "profiles"
_TRACE_COLUMNS = ("seconds", "from", "to", "latency_ms", "bandwidth_mbit")
_MAX_TRACE_ROWS = 1_000_000
_MAX_TRACE_CELLS = 50_000_000       # links × times at which a trace changes: 800 MB
_NODE_DIGITS = 9
_MAX_NUMBER = 1e15
_MAX_STEPS = 100_000_000_000        # node updates of a replay: minutes
_DENSE_GRAPHS = ("complete", "erdos_renyi")
_MAX_BUILT_LINKS = 50_000_000       # of a graph that is built again
_MAX_EDGES_FILE = 256 << 20         # bytes


# ---- profiles --------------------------------------------------------------------------------------------------------


def list_profiles() -> list[str]:
    """Return the names of the shipped profiles, from the fastest to the slowest."""
    known = {path.stem: load_profile(path.stem) for path in _PROFILES.glob("*.yaml")}
    return sorted(known, key=lambda name: -known[name].bandwidth_mbit)


def describe_profile(name: str) -> str:
    """Return the comment at the top of a shipped profile."""
    lines = (_PROFILES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def load_profile(given: str) -> Profile:
    """Load a shipped profile by its name, a YAML file, or a CSV trace."""
    path = Path(given)
    if path.suffix == ".csv":
        return replace(Profile(), trace=_read_trace(path))
    if path.suffix not in (".yaml", ".yml"):
        names = [shipped.stem for shipped in _PROFILES.glob("*.yaml")]
        path = _PROFILES / f"{pick('--network', given, sorted(names))}.yaml"
    data = yaml_io.read(path)
    trace = data.pop("trace", None)
    if trace is not None and not isinstance(trace, str):
        raise InputError(f"{path}: trace: {str(trace)[:60]!r} is not allowed; must be a CSV file")
    values = validate(str(path), (Profile,), data)
    profile = build(str(path), Profile, values)
    return profile if trace is None else replace(profile, trace=_read_trace(path.parent / trace))


def _read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read rows of seconds, from, to, latency_ms, bandwidth_mbit; `*` or nothing is any node."""
    try:
        with open(path, encoding="utf-8", newline="", opener=open_regular) as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            if missing := [name for name in _TRACE_COLUMNS[3:] if name not in columns]:
                raise InputError(
                    f"{path}: the column {missing[0]} is missing; columns: {', '.join(_TRACE_COLUMNS)}")
            if unknown := [at for at, name in enumerate(columns, 1) if name not in _TRACE_COLUMNS]:
                raise InputError(f"{path}: column {unknown[0]} is unknown; allowed: {', '.join(_TRACE_COLUMNS)}")
            reader.fieldnames = columns
            rows: list[TraceRow] = []
            for number, row in enumerate(reader, 2):
                if len(rows) == _MAX_TRACE_ROWS:
                    raise InputError(f"{path}: more than {_MAX_TRACE_ROWS} rows")
                rows.append(_parse_row(row, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    if not rows:
        raise InputError(f"{path}: no rows")
    return tuple(rows)


def _parse_row(row: Mapping[str, str | None], where: str) -> TraceRow:
    def number(name: str, least: float, default: str | None = None) -> float:
        text = (row.get(name) or default or "").strip()
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least) or (name == "bandwidth_mbit" and value == 0):
            allowed = "above 0" if name == "bandwidth_mbit" else f"of at least {least:g}"
            raise InputError(f"{where}: {name} must be a number {allowed}")
        return value

    def node(name: str) -> int | None:
        text = (row.get(name) or "*").strip()
        if text == "*":
            return None
        if not (text.isascii() and text.isdecimal() and len(text) <= _NODE_DIGITS):
            raise InputError(f"{where}: {name} must be the number of a node, or *")
        return int(text)

    return TraceRow(
        seconds=number("seconds", 0, "0"), sender=node("from"), receiver=node("to"),
        latency_ms=number("latency_ms", 0), bandwidth_mbit=number("bandwidth_mbit", 0),
    )


# ---- recorded traffic ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """What every node sent and computed between the evaluations of a run."""

    records: list[Record]                   # the evaluations; records[0] is the start
    neighbours: tuple[tuple[int, ...], ...]
    intervals: tuple[Interval, ...] | tuple[StarInterval, ...]      # one less than records
    has_compute: bool                       # computing times were measured; else they are estimated

    def up_to(self, target: Target) -> "Traffic | None":
        """Return the traffic until the target was reached; None if it was not."""
        found = target.find_first(self.records)
        if found is None:
            return None
        last = next(number for number, record in enumerate(self.records) if record["round"] == found["round"])
        return replace(self, records=self.records[: last + 1], intervals=self.intervals[:last])

    def replay(self, profile: Profile) -> Floats:
        """Return the time of each evaluation on a network, in seconds; the first is 0."""
        times = len({row.seconds for row in profile.trace})
        if times * sum(map(len, self.neighbours)) > _MAX_TRACE_CELLS:
            raise InputError(f"--network: a trace that changes at {times} times is too long for a graph of this size")
        star = [interval for interval in self.intervals if isinstance(interval, StarInterval)]
        graph = [interval for interval in self.intervals if isinstance(interval, Interval)]
        seconds = (
            replay_star(profile, len(self.neighbours) - 1, star) if star
            else replay_graph(profile, self.neighbours, graph))
        return np.concatenate([[0.0], seconds])

    @property
    def steps(self) -> int:
        """How many node updates a replay computes."""
        links = sum(map(len, self.neighbours))
        return sum(interval.exchanges for interval in self.intervals) * (len(self.neighbours) + links)


def read_traffic(folder: Path) -> Traffic:
    """Read what a run recorded; an InputError names what is missing."""
    files = RunFolder(folder)
    records = read_metrics(files.metrics)
    network = read_network(folder)
    if network is None or not records:
        raise InputError(f"{folder}: nothing to replay; the run has no evaluation")
    has_server = network.server is not None
    if has_server and (network.nodes < 2 or network.server != network.nodes - 1):
        raise InputError(f"{folder}: nothing to replay; the server must be the last of at least two nodes")
    sent = _read_sent(files.nodes, network.nodes, len(records), has_server)
    nodes = sent[0].bytes.size
    measured = [_find_compute(record, nodes, has_server) for record in records]
    compute = [one for one in measured if one is not None]
    has_compute = len(compute) == len(records)
    if not has_compute:
        seconds = _read_numbers(files.metrics, records, "seconds")
        compute = [_share([spent], [nodes], has_server) for spent in seconds]
    spent = [np.maximum(after - before, 0.0) for before, after in pairwise(compute)]
    traffic = Traffic(
        records,
        _find_neighbours(folder, network) if nodes > 1 else ((),),
        _find_star_intervals(folder, records, sent, spent) if has_server
        else _find_intervals(files.metrics, records, sent, spent),
        has_compute,
    )
    if traffic.steps > _MAX_STEPS:
        raise InputError(f"{folder}: {traffic.steps:.1e} node updates are too many to replay")
    return traffic


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """What the nodes have sent up to an evaluation. Packets are read for stars only."""

    bytes: Floats                   # (nodes,)
    packets: Floats | None          # (nodes,)
    exchanges: int | None           # of the network; None: the method does not declare them


def _find_intervals(
    path: Path, records: Sequence[Record], sent: Sequence[_Sent], compute: Sequence[Floats]
) -> tuple[Interval, ...]:
    """Return the traffic of a graph: every node takes part in every exchange."""
    nodes = sent[0].bytes.size
    exchanges = [math.ceil(count / nodes) for count in _read_numbers(path, records, "packets", default=0.0)]
    return tuple(
        Interval(last - first, after.bytes - before.bytes, spent)
        for (first, last), (before, after), spent in zip(pairwise(exchanges), pairwise(sent), compute, strict=True)
    )


def _find_star_intervals(
    folder: Path, records: Sequence[Record], sent: Sequence[_Sent], compute: Sequence[Floats]
) -> tuple[StarInterval, ...]:
    """Return the traffic of a star; an InputError refuses a run of a version that did not record packets per node."""
    if any(one.packets is None for one in sent):
        raise InputError(
            f"{folder}: cannot be replayed: its version of dbo did not record the packets of a star; run it again")
    copied = _read_numbers(RunFolder(folder).metrics, records, "bytes_down")
    return tuple(
        _find_star_interval(folder, record, before, after, received, spent)
        for record, (before, after), received, spent in zip(
            records[1:], pairwise(sent), np.diff(copied).tolist(), compute, strict=True)
    )


def _find_star_interval(
    folder: Path, record: Record, before: _Sent, after: _Sent, bytes_down: float, compute: Floats
) -> StarInterval:
    """Return what a star sent between two evaluations.

    The clients that an exchange down reaches are the bytes that they received, over those that the server sent.
    """
    assert before.packets is not None, "the caller has checked this"
    assert after.packets is not None, "the caller has checked this"
    packets, size = (after.packets - before.packets).astype(np.int64), after.bytes - before.bytes
    *clients, down = packets.tolist()
    copies = round(bytes_down / size[-1] * down) if size[-1] > 0 else 0
    if before.exchanges is not None and after.exchanges is not None:
        up = after.exchanges - before.exchanges - down
    else:       # clients that receive a packet also answer it
        up = max(*clients, 0, round(sum(clients) * down / copies) if copies else 0)
    is_possible = min(*clients, down) >= 0 and max(clients) <= up and copies <= down * len(clients)
    if not is_possible or (size < 0).any() or ((size > 0) != (packets > 0)).any():
        raise InputError(f"{folder}: round {record['round']}: packets, bytes and exchanges contradict one another")
    return StarInterval(up, packets, copies, size, compute)


def _read_numbers(path: Path, records: Sequence[Record], name: str, default: float | None = None) -> list[float]:
    """Return a column of sums since the start."""
    numbers: list[float] = []
    for record in records:
        value: Any = record.get(name, default)
        if type(value) not in (int, float) or not (numbers or [0])[-1] <= value <= _MAX_NUMBER:
            raise InputError(f"{path}: round {record['round']}: {name} must be a number that does not decrease")
        numbers.append(value)
    return numbers


def _to_floats(values: Any) -> Floats | None:
    """Return a list of numbers as an array; None if it is anything else."""
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        return None
    try:
        array = np.array(values, dtype=np.float64)
    except OverflowError:
        return None
    return array if np.isfinite(array).all() else None


def _read_sent(path: Path, nodes: int, evaluations: int, has_server: bool) -> list[_Sent]:
    """Return for each evaluation what every node has sent so far; a method on a single machine has one row."""
    rows: list[_Sent] = []
    for number, record in enumerate(iterate_metrics(path)):
        if number == evaluations:
            break
        row = _read_counts(record, "bytes")
        allowed = {rows[0].bytes.size} if rows else {nodes} if has_server else {nodes, 1}
        if row is None or row.size not in allowed:
            raise InputError(f"{path}: round {record['round']}: bytes must be a number per node")
        packets, exchanges = None, record.get("exchanges")
        if has_server and "packets" in record:
            packets = _read_counts(record, "packets")
            if packets is None or packets.size != nodes or not (np.abs(packets) <= _MAX_NUMBER).all():
                raise InputError(f"{path}: round {record['round']}: packets must be a number per node")
        if exchanges is not None and not (type(exchanges) is int and 0 <= exchanges <= _MAX_NUMBER):
            raise InputError(f"{path}: round {record['round']}: exchanges must be a number")
        rows.append(_Sent(row, packets, exchanges))
    if len(rows) < evaluations:
        raise InputError(f"{path}: nothing to replay; {len(rows)} lines for {evaluations} evaluations")
    return rows


def _read_counts(record: Record, key: Literal["bytes", "packets"]) -> Floats | None:
    """Return a number per node, packed or not; None if it is anything else."""
    counts = record.get(key)
    try:
        row = read_sent(record, key) if isinstance(counts, str) else _to_floats(counts)
    except ValueError:
        return None
    return row if row is not None and row.ndim == 1 else None


def _find_compute(record: Record, nodes: int, has_server: bool) -> Floats | None:
    """Return (nodes,) seconds of computing since the start, from the times and the sizes of the blocks."""
    per_block = _to_floats(record.get(BLOCK_SECONDS))
    if per_block is None or per_block.ndim != 1 or not 0 < per_block.size <= nodes:
        return None
    sizes = record.get(BLOCK_NODES)
    if sizes is None:           # of an older version, which packed a graph like this
        sizes = [len(part) for part in np.array_split(np.arange(nodes), per_block.size)]
    if not (isinstance(sizes, list) and len(sizes) == per_block.size and sum(map(_to_size, sizes)) == nodes):
        return None
    return _share(per_block.tolist(), sizes, has_server)


def _to_size(value: Any) -> int:
    return value if type(value) is int and value > 0 else sys.maxsize


def _share(per_block: Sequence[float], sizes: Sequence[int], has_server: bool) -> Floats:
    """Share the time of each block equally among its nodes. A server in a block with clients computes next to nothing.
    """
    shares = [np.full(size, spent / size) for spent, size in zip(per_block, sizes, strict=True)]
    if has_server and sizes[-1] > 1:
        shares[-1] = np.append(np.full(sizes[-1] - 1, per_block[-1] / (sizes[-1] - 1)), 0.0)
    return np.concatenate(shares)


def _find_neighbours(folder: Path, network: RecordedNetwork) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours of each node; a graph too large to be recorded is built again."""
    if network.server is not None:
        return ((network.server,),) * network.server + (tuple(range(network.server)),)
    near: list[set[int]] = [set() for _ in range(network.nodes)]
    for i, j in network.edges if network.edges is not None else _build_edges(folder, network.nodes):
        near[i].add(j)
        near[j].add(i)
    return tuple(tuple(sorted(some)) for some in near)


def _build_edges(folder: Path, nodes: int) -> list[tuple[int, int]]:
    experiment = read_experiment(folder)
    given: dict[str, Any] = dict(section(experiment, "topology"))
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in TOPOLOGIES or not TOPOLOGIES.is_built_in(name):
        raise InputError(f"{folder}: its graph is not recorded, and {str(name)[:60]!r} is no built-in topology")
    # No list of edges is recorded: those of the built-in ones that have many grow with the square of the nodes.
    if name in _DENSE_GRAPHS and nodes**2 > 2 * _MAX_BUILT_LINKS:
        raise InputError(f"{folder}: its graph is not recorded, and has too many links to be built")
    if "file" in given:
        _check_edges(folder, str(given["file"]))
    kind = TOPOLOGIES[name]
    topology = build("topology", kind, validate("topology", (kind,), given))
    seed = experiment.get("seed", 0)
    try:
        graph = topology.graph(nodes, seed if type(seed) is int else 0)
    except ValueError as error:
        raise InputError(f"{folder}: its graph cannot be built: {error}") from None
    return [(int(i), int(j)) for i, j in graph.edges]


def _check_edges(folder: Path, file: str) -> None:
    """Refuse a list of edges without an end: a foreign experiment may name any file."""
    try:
        read_bounded(expand_user(file), _MAX_EDGES_FILE)
    except OSError as error:
        raise InputError(f"{folder}: its graph is not recorded, and {file} cannot be read: {error.strerror}") from None
