"""Define what the files of a run folder hold: typed records, and how they are parsed and serialized.

    metrics.jsonl, nodes.jsonl      `Record`: one evaluation of the whole network, and of every node
    events.jsonl                    `Event`: starts, recoveries, the end
    summary.json                    `Summary`: how the run ended
    network.json                    `RecordedNetwork`: the graph
    manifest.json                   `Manifest`: the seal of a run that has ended
    group.json                      `Group`: the runs of a comparison or a sweep
    experiment.yaml                 the resolved experiment, as plain data

No other module parses these files. Parsing returns what is valid and raises ValueError for damage; `run_folder` turns
that into an error that names the file. Keys that a file does not have get defaults, so folders of older versions stay
readable. Importing this module loads neither pandas nor an engine.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dbo.platform.config import yaml_io
from dbo.platform.config.redact import hide_tracking_path, redact_all
from dbo.platform.errors import InputError, suggest

Record = dict[str, Any]         # one line of metrics.jsonl or nodes.jsonl; the keys of the former are in METRICS
Direction = Literal["max", "min"]

STATUSES = ("finished", "diverged", "failed", "stopped")        # of a run that has ended


# ---- metrics and targets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of metrics.jsonl. A cost counts what a run has spent; the others measure how good its iterates are."""

    name: str
    direction: Direction
    meaning: str
    is_cost: bool = False


METRICS = {metric.name: metric for metric in (
    Metric("round", "min", "rounds completed; 0 is the start", is_cost=True),
    Metric("seconds", "min", "training time without evaluations and recoveries", is_cost=True),
    Metric("test_accuracy", "max", "accuracy of the mean model on the test set"),
    Metric("test_loss", "min", "loss of the mean model on the test set"),
    Metric("upper_loss", "min", "mean over nodes of f_i at the mean model"),
    Metric("lower_loss", "min", "mean over nodes of g_i at the mean model"),
    Metric("node_accuracy_mean", "max", "mean over nodes of the accuracy of their own models"),
    Metric("node_accuracy_min", "max", "accuracy of the worst node's own model"),
    Metric("public_accuracy_mean", "max", "accuracy of the nodes' published neighbourhood means, mean over nodes"),
    Metric("public_accuracy_min", "max", "the same of the worst node"),
    Metric("bytes_broadcast", "min", "encoded bytes, each message counted once", is_cost=True),
    Metric("bytes_links", "min", "encoded bytes, each message counted once per receiver", is_cost=True),
    Metric("packets", "min", "packets of all nodes", is_cost=True),
    Metric("bytes_up", "min", "encoded bytes from the clients to the server", is_cost=True),
    Metric("bytes_down", "min", "encoded bytes from the server to the clients, once per receiver", is_cost=True),
    Metric("server_bytes", "min", "encoded bytes that the server has sent and received", is_cost=True),
    Metric("comm_mb", "min", "bytes_links in 10⁶ bytes", is_cost=True),
    Metric("paper_megabytes", "min", "traffic by the convention of the paper's Table 1", is_cost=True),
    Metric("consensus_x", "min", "consensus error of x: root mean square distance of the nodes to their mean"),
    Metric("consensus_y", "min", "consensus error of y"),
    Metric("direction_norm", "min", "norm of the mean upper direction, which need not be near ∇ψ"),
    Metric("gradient_calls", "min", "gradients that a node has computed", is_cost=True),
    Metric("hvp_calls", "min", "Hessian-vector products that a node has computed", is_cost=True),
    Metric("jvp_calls", "min", "Jacobian-vector products that a node has computed", is_cost=True),
    Metric("samples", "min", "samples that a node's oracle calls have seen, repetitions counted", is_cost=True),
    Metric("psi", "min", "ψ(x̄): mean over nodes of f_i at (x̄, y*(x̄)), from a solve of the lower level"),
    Metric("psi_gradient_norm", "min", "‖∇ψ(x̄)‖ from the same solve"),
    Metric("psi_residual", "min", "relative residual of that solve"),
    Metric("psi_converged", "max", "1 if the residual is within the tolerance, else 0"),
    Metric("psi_test_accuracy", "max", "test accuracy of (x̄, y*(x̄))"),
    Metric("psi_tune_loss", "min", "upper loss of (x̄, y*(x̄)) on the samples held out for tuning"),
    Metric("tune_loss", "min", "mean over the nodes' own models of the upper loss on the samples held out for tuning"),
    Metric("tune_accuracy", "max", "mean over the nodes' own models of the accuracy on those samples"),
    *(Metric(f"consensus_{name}", "min", f"consensus error of {what}") for name, what in (
        ("z", "z"), ("v", "v"), ("theta", "θ"), ("tracker_x", "the tracker of x"), ("tracker_y", "the tracker of y"),
        ("tracker_z", "the tracker of z"), ("tracker_v", "the tracker of v"), ("tracker_theta", "the tracker of θ"))),
    *(Metric(f"compression_{name}", "min", f"root mean square distance of {what} to the neighbours' copies")
      for name, what in (
        ("x", "x"), ("y", "y"), ("z", "z"), ("tracker_x", "the tracker of x"), ("tracker_y", "the tracker of y"),
        ("tracker_z", "the tracker of z"))),
    Metric("timestamp", "min", "time at which the line was written", is_cost=True),
    Metric("solution_error", "min", "relative distance to the minimiser of ψ"),
    Metric("penalty_error", "min", "relative distance to the minimiser of ψ_λ for the method's λ"),
    Metric("hypergradient_error", "min", "|∇ψ| relative to its value at x = 0"),
)}
CLOSED_FORMS = ("solution_error", "penalty_error", "hypergradient_error")      # of tasks whose solution is known
STAR_COLUMNS = ("bytes_up", "bytes_down", "server_bytes")                     # of runs with a server
PSI = ("psi", "psi_gradient_norm", "psi_residual", "psi_converged", "psi_test_accuracy", "psi_tune_loss")
PSI_VALUES = ("psi", "psi_gradient_norm", "psi_test_accuracy", "psi_tune_loss")     # approximate if psi_converged is 0
# What only some runs or evaluations have: solves of the lower level, a tune split, an algorithm's own error terms, and
# public copies.
OPTIONAL = (*CLOSED_FORMS, *PSI, *STAR_COLUMNS, "tune_loss", "tune_accuracy", *(
    name for name in METRICS
    if name.startswith(("consensus_", "compression_", "public_")) and name not in ("consensus_x", "consensus_y")))
COLUMNS = tuple(name for name in METRICS if name not in OPTIONAL)              # of every run
RENAMED = {"hypergradient_norm": "direction_norm"}                             # in files of older versions
BLOCK_SECONDS = "block_seconds"         # computing time of each block: a list in a line of metrics.jsonl, no column
BLOCK_NODES = "block_nodes"             # the number of nodes of each block, likewise a list
BLOCK_LISTS = (BLOCK_SECONDS, BLOCK_NODES)
# What depends on the machine and the engine; all else is the same in every repetition of a run.
CLOCKS = ("seconds", "timestamp", *BLOCK_LISTS)
# Oracle calls in partial gradients: a Hessian- or Jacobian-vector product by automatic differentiation costs about two.
ORACLE_WEIGHTS = {"gradient_calls": 1, "hvp_calls": 2, "jvp_calls": 2}
_COSTS_OF_TARGET = ("round", "bytes_links", "bytes_broadcast", "comm_mb", "paper_megabytes", "seconds")


_TARGET = re.compile(r"(?P<metric>[A-Za-z_]\w*)(?P<sign><=|>=|=)(?P<level>.+)")


def count_oracle_calls(record: Mapping[str, Any]) -> float | None:
    """Return the oracle calls of a node up to an evaluation, in partial gradients; None: a counter is missing."""
    if any(record.get(name) is None for name in ORACLE_WEIGHTS):
        return None
    return float(sum(weight * record[name] for name, weight in ORACLE_WEIGHTS.items()))


def find_direction(metric: str) -> Direction:
    """Return whether a metric is maximized or minimized; one that nobody declared is minimized."""
    return METRICS[metric].direction if metric in METRICS else "min"


@dataclass(frozen=True, slots=True)
class Target:
    """A metric and the level to reach, such as test_accuracy=0.7."""

    metric: str
    level: float
    declared: Direction | None = None       # of a task's own metric, which METRICS does not have
    further: tuple["Target", ...] = field(default=(), compare=False)     # whose costs are reported beside this one's

    @classmethod
    def parse(cls, text: str, own: Mapping[str, Direction] | None = None) -> "Target":
        """Parse metric=level; `own` are a task's own metrics. With <= or >= the text itself gives the direction.

        An InputError lists the metrics.
        """
        allowed = [*(name for name, known in METRICS.items() if not known.is_cost), *(own or ())]
        found = _TARGET.fullmatch(text)
        try:
            if found is None or not math.isfinite(level := float(found["level"])):
                raise ValueError
            metric = RENAMED.get(found["metric"], found["metric"])
            directions = {"<=": "min", ">=": "max", "=": (own or {}).get(metric)}
            if metric in METRICS:
                known: Direction = METRICS[metric].direction
                if metric not in allowed or found["sign"] not in ("=", ">=" if known == "max" else "<="):
                    raise ValueError
                if "accuracy" in metric and level > 1:
                    raise InputError(f"--target: {text!r} is not allowed; an accuracy is at most 1, e.g. {metric}=0.9")
                return cls(metric, level)
            if (declared := directions[found["sign"]]) is None:
                raise ValueError
            return cls(metric, level, "max" if declared == "max" else "min")
        except ValueError:
            metric = re.split("[<>=]", text)[0]
            near = "" if metric in allowed else suggest(metric, allowed)
            raise InputError(f"--target: {text!r} is not metric=level{near}; metrics: {', '.join(allowed)}") from None

    @property
    def direction(self) -> Direction:
        return self.declared or find_direction(self.metric)

    @property
    def is_maximized(self) -> bool:
        return self.direction == "max"

    def find_first(self, records: Sequence[Record]) -> Record | None:
        """Return the first evaluation at or beyond the level."""
        for record in records:
            if record["round"] == 0 and not self.is_maximized:
                continue       # at the start the nodes agree and have no direction yet
            value = record.get(self.metric)
            if value is not None and (value >= self.level if self.is_maximized else value <= self.level):
                return record
        return None

    def find_cost(self, records: Sequence[Record]) -> Record | None:
        """Return rounds, bytes and training seconds to the target; None if it was not reached."""
        record = self.find_first(records)
        return None if record is None else {key: record[key] for key in _COSTS_OF_TARGET}

    def __str__(self) -> str:
        """The text that `parse` reads, also where the task that declares the metric is not known."""
        sign = "=" if self.metric in METRICS else ">=" if self.is_maximized else "<="
        return f"{self.metric}{sign}{self.level:g}"


DEFAULT_TARGET = Target("node_accuracy_mean", 0.9)
CLOSED_FORM_TARGET = Target("solution_error", 0.1)      # for tasks without data, which have no accuracies


# ---- lines of .jsonl files -------------------------------------------------------------------------------------------


def parse_record(line: str | bytes) -> Record:
    """Parse a line of metrics.jsonl or nodes.jsonl."""
    record = parse_object(line)
    if type(record.get("round")) is not int:
        raise ValueError("a line without a round")
    return _rename(record)


def _rename(record: Record) -> Record:
    """Return a record of an older version with today's names, in its order."""
    if not RENAMED.keys() & record.keys():
        return record
    return {RENAMED.get(name, name): value for name, value in record.items()}


def serialize_line(record: Mapping[str, Any], allow_nan: bool = False) -> str:
    """Return a line of a .jsonl file; a number that is not finite raises ValueError unless it is allowed."""
    return json.dumps(record, allow_nan=allow_nan) + "\n"


@dataclass(frozen=True, slots=True)
class Event:
    """A line of events.jsonl. Which fields are set depends on the kind."""

    kind: str                               # started | continued | lost | recovered | *_changed | ended
    timestamp: float = 0.0
    after_round: int | None = None
    run_key: str = ""
    source: str = ""                        # continued: the folder of the shorter run
    blocks: tuple[int, ...] = ()            # lost, recovered
    reason: str = ""
    resumed_after: int | None = None        # recovered
    seconds: float | None = None
    status: str = ""                        # ended
    error: str = ""
    version: str = ""                       # started: provenance
    commit: str = ""                        # of the user's repository
    dbo_commit: str = ""                    # of the checkout that holds this code
    user: str = ""
    hosts: int | None = None                # machines that host blocks
    submission: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    differences: str = ""                   # environment_changed
    previous_run_key: str = ""              # code_changed


def parse_event(line: str | bytes) -> Event:
    """Parse a line of events.jsonl; fields of the wrong type get their defaults."""
    data = parse_object(line)
    if not isinstance(data.get("kind"), str):
        raise ValueError("a line without a kind")
    return Event(
        kind=data["kind"], timestamp=_number(data.get("timestamp")) or 0.0,
        after_round=_whole(data.get("after_round")), run_key=_text(data.get("run_key")),
        source=_text(data.get("source")),
        blocks=tuple(block for block in _sequence(data.get("blocks")) if type(block) is int),
        reason=_text(data.get("reason")), resumed_after=_whole(data.get("resumed_after")),
        seconds=_number(data.get("seconds")), status=_text(data.get("status")), error=_text(data.get("error")),
        version=_text(data.get("version")), commit=_text(data.get("commit")),
        dbo_commit=_text(data.get("dbo_commit")), hosts=_whole(data.get("hosts")), user=_text(data.get("user")),
        submission=_text(data.get("submission")),
        environment={str(key): _text(value) for key, value in _mapping(data.get("environment")).items()},
        differences=_text(data.get("differences")), previous_run_key=_text(data.get("previous_run_key")),
    )


# ---- summary.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """Blocks that were lost, and what their replacement took."""

    after_round: int
    blocks: list[int]
    reason: str
    resumed_after: int | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended, and what it was."""

    status: str
    name: str = ""
    run_key: str = ""
    algorithm: str = ""
    rounds: int = 0
    ended_by: str | None = None                                             # `until` or the rounds; None: an error
    final: Record = field(default_factory=dict)                             # the last evaluation
    targets: dict[str, Record | None] = field(default_factory=dict)         # cost of each; None: not reached
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)                 # training, evaluation
    problem: dict[str, Any] | None = None
    network: dict[str, Any] | None = None
    started: str | None = None
    ended: str | None = None
    version: str | None = None
    error: str | None = None
    changes: list[str] = field(default_factory=list)     # code_changed, environment_changed: resumed in spite of them
    sealed: bool = False                                 # a manifest.json belongs to it

    @property
    def data_digest(self) -> str | None:
        """The SHA-256 of the data; None for tasks without data."""
        return _text((self.problem or {}).get("data_sha256")) or None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of summary.json, without credentials."""
        data = asdict(self)
        error, changes, sealed = data.pop("error"), data.pop("changes"), data.pop("sealed")
        ordered = {"status": data.pop("status"), **({"error": error} if error else {}), **data}
        ordered |= ({"changes": changes} if changes else {}) | ({"sealed": True} if sealed else {})
        plain: dict[str, Any] = redact_all({key: value for key, value in ordered.items() if value is not None})
        return plain


def parse_summary(text: str | bytes) -> Summary:
    """Parse summary.json; fields of the wrong type get their defaults."""
    data = parse_object(text)
    return Summary(
        status=_text(data.get("status")), name=_text(data.get("name")), run_key=_text(data.get("run_key")),
        algorithm=_text(data.get("algorithm")), rounds=_whole(data.get("rounds")) or 0,
        ended_by=_text(data.get("ended_by")) or None, final=_rename(_mapping(data.get("final"))),
        targets=_mapping(data.get("targets")),
        recoveries=[entry for entry in _sequence(data.get("recoveries")) if isinstance(entry, dict)],
        seconds={key: seconds for key, value in _mapping(data.get("seconds")).items()
                 if (seconds := _number(value)) is not None},
        problem=_mapping(data.get("problem")) or None, network=_mapping(data.get("network")) or None,
        started=_text(data.get("started")) or None, ended=_text(data.get("ended")) or None,
        version=_text(data.get("version")) or None, error=_text(data.get("error")) or None,
        changes=[kind for kind in _sequence(data.get("changes")) if isinstance(kind, str)],
        sealed=data.get("sealed") is True,
    )


def serialize_summary(summary: Summary) -> str:
    """Return the text of summary.json; a number that is not finite raises ValueError."""
    return json.dumps(summary.to_dict(), indent=2, allow_nan=False) + "\n"


# ---- manifest.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The seal of a run that has ended: what its final files hold, and the text of those that cannot be computed."""

    run_key: str
    status: str
    files: dict[str, FileDigest]
    copies: dict[str, str] = field(default_factory=dict)        # file name → text


_MANIFEST_FORMAT = 1


def parse_manifest(text: str | bytes) -> Manifest:
    """Parse manifest.json; one that does not match its own checksum raises ValueError."""
    data = parse_object(text)
    digest = data.pop("sha256", None)
    if data.get("format") != _MANIFEST_FORMAT:
        raise ValueError(f"format {str(data.get('format'))[:20]!r} is unknown, this version reads {_MANIFEST_FORMAT}")
    if digest != _hash_object(data):
        raise ValueError("it does not match its own checksum")
    return Manifest(
        _text(data.get("run_key")), _text(data.get("status")),
        {name: FileDigest(_whole(entry.get("size")) or 0, _text(entry.get("sha256")))
         for name, entry in _mapping(data.get("files")).items() if isinstance(entry, dict) and _is_file_name(name)},
        {name: text for name, text in _mapping(data.get("copies")).items() if isinstance(text, str)},
    )


def serialize_manifest(manifest: Manifest) -> str:
    """Return the text of manifest.json, with its own checksum."""
    data = {"format": _MANIFEST_FORMAT, **asdict(manifest)}
    return json.dumps({**data, "sha256": _hash_object(data)}, indent=1) + "\n"


def _hash_object(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _is_file_name(name: str) -> bool:
    """Decide whether a name stays in its folder: a foreign manifest must not make us read other files."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


# ---- group.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of a comparison or a sweep: which folders belong together, and in what they differ."""

    kind: str                                   # compare | sweep
    name: str
    key: str
    command: str                                # repeats it
    started: str
    status: str                                 # running | finished | failed
    target: str
    members: tuple[str, ...]                    # run folders, relative to the group's
    axes: dict[str, list[Any]]
    mode: str | None = None                     # from here: of a sweep
    metric: str | None = None
    goal: str | None = None
    claim: str | None = None                    # what it is to show
    tracking: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()               # environment_changed: finished runs of another one were kept

    def to_dict(self) -> dict[str, Any]:
        """Return the content of group.json, without credentials."""
        data = asdict(self) | {"members": list(self.members), "changes": list(self.changes) or None}
        tracking = data.pop("tracking")
        plain: dict[str, Any] = redact_all({key: value for key, value in data.items() if value is not None})
        return plain | {"tracking": hide_tracking_path(tracking)}


def parse_group(text: str | bytes, tolerant: bool = False) -> Group:
    """Parse group.json. Tolerant: drop members and axes of the wrong type instead of raising ValueError."""
    data = parse_object(text)
    members, axes = data.get("members"), data.get("axes") or {}
    names = [member for member in _sequence(members) if isinstance(member, str)]
    lists = {str(key): values for key, values in _mapping(axes).items() if isinstance(values, list)}
    if not isinstance(members, list) or (not tolerant and len(names) < len(members)):
        raise ValueError(f"members: {str(members)[:60]!r} is not allowed; must be a list of folders")
    if not tolerant and (not isinstance(axes, dict) or len(lists) < len(axes)):
        raise ValueError(f"axes: {str(axes)[:60]!r} is not allowed; must map keys to lists of values")
    return Group(
        kind=_text(data.get("kind")), name=_text(data.get("name")), key=_text(data.get("key")),
        command=_text(data.get("command")), started=_text(data.get("started")), status=_text(data.get("status")),
        target=_text(data.get("target")), members=tuple(names), axes=lists, mode=_text(data.get("mode")) or None,
        metric=_text(data.get("metric")) or None, goal=_text(data.get("goal")) or None,
        claim=_text(data.get("claim")) or None, tracking=_mapping(data.get("tracking")),
        changes=tuple(kind for kind in _sequence(data.get("changes")) if isinstance(kind, str)),
    )


def serialize_group(group: Group) -> str:
    """Return the text of group.json."""
    return json.dumps(group.to_dict(), indent=2) + "\n"


# ---- network.json, experiment.yaml -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedNetwork:
    """The graph of a run. Edges are not recorded (None) where there are too many to be drawn."""

    nodes: int
    links: int | None
    spectral_gap: float | None
    edges: list[list[int]] | None
    server: int | None = None           # the node without data, of a star


def parse_network(text: str | bytes, tolerant: bool = False) -> RecordedNetwork:
    """Parse network.json. Tolerant: drop edges that are not pairs of nodes instead of raising ValueError."""
    data = parse_object(text)
    nodes, edges, gap = data.get("nodes"), data.get("edges"), _number(data.get("spectral_gap"))
    if type(nodes) is not int or nodes < 1:
        raise ValueError(f"nodes: {str(nodes)[:60]!r} is not a number of nodes")

    def is_edge(pair: Any) -> bool:
        return isinstance(pair, list) and len(pair) == 2 and all(type(end) is int and 0 <= end < nodes for end in pair)

    wrong = [pair for pair in _sequence(edges) if not is_edge(pair)]
    if wrong and not tolerant:
        raise ValueError(f"edges: {str(wrong[0])[:60]!r} is not a pair of nodes")
    return RecordedNetwork(
        nodes, _whole(data.get("links")), gap if gap is not None and 0 < gap <= 1 else None,
        [pair for pair in edges if is_edge(pair)] if isinstance(edges, list) else None,
        _whole(data.get("server")),
    )


def serialize_network(network: Mapping[str, Any]) -> str:
    """Return the text of network.json."""
    return json.dumps(network) + "\n"


def parse_experiment(text: str, where: str) -> dict[str, Any]:
    """Parse experiment.yaml into plain data; `where` names the file in the InputError that damage raises."""
    data = yaml_io.parse(text, where)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError(f"{where}: must hold a mapping of keys to values, not a {type(data).__name__}")
    return data


def serialize_experiment(experiment: Mapping[str, Any]) -> str:
    """Return the text of experiment.yaml, without credentials."""
    tracking = experiment.get("tracking")
    hidden = {"tracking": hide_tracking_path(tracking)} if isinstance(tracking, Mapping) else {}
    return yaml_io.dump(redact_all({**experiment, **hidden}))


def section(experiment: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a section of a recorded experiment; empty where the file has none."""
    return _mapping(experiment.get(key))


def name_algorithm(experiment: Mapping[str, Any]) -> str:
    """Return the name of a recorded experiment in tables and figures: its label, or that of its algorithm."""
    return _text(experiment.get("label")) or str(section(experiment, "algorithm").get("name", ""))


# ---- plain data ------------------------------------------------------------------------------------------------------


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; anything else raises ValueError."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError(f"must hold an object, not a {type(data).__name__}")
    return data


def _text(value: Any) -> str:
    if not isinstance(value, str | int | float):
        return ""
    try:
        return str(value)
    except ValueError:          # a number of thousands of digits
        return ""


def _number(value: Any) -> float | None:
    """Return a finite number as it is, None for everything else."""
    try:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return None
    return value if good else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and _number(value) is not None else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
