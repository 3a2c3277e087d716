"""What operators see of a run on a cluster: gauges and counters through Ray's metrics agent, bounded labels.

For liveness, not for science: scraped samples are lossy. Figures are made from metrics.jsonl.
"""

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

LABELS = ("run", "algorithm")
MOST_NODES = 64      # runs with more nodes have no series per node: labels stay bounded
_AGAIN = 3.0         # seconds

# `dbo_…` here is `ray_dbo_…` at the Prometheus endpoint.
GAUGES = {
    "dbo_round": "Rounds done",
    "dbo_rounds_planned": "Rounds that the run is to have",
    "dbo_round_seconds": "Duration of the last round",
    "dbo_bytes_per_second": "Encoded bytes on all links per second of training",
    "dbo_test_accuracy": "Accuracy of the mean model",
    "dbo_node_accuracy_min": "Accuracy of the worst node",
    "dbo_test_loss": "Loss of the mean model on the test data",
    "dbo_upper_loss": "Upper loss of the mean model",
    "dbo_consensus_x": "Root mean square distance of the nodes' x to their mean",
    "dbo_consensus_y": "Root mean square distance of the nodes' y to their mean",
    # A gauge, so that it is 0 from the start: a rise from nothing is no rise to an alert.
    "dbo_recoveries": "Times that lost actors were replaced",
}
COUNTERS = {
    "dbo_bytes_links_total": "Encoded bytes on all links",
    "dbo_packets_total": "Packets that nodes have broadcast",
}
NODE_GAUGES = {
    "dbo_node_accuracy": "Accuracy of a node's own model",
    "dbo_node_apart_x": "Distance of a node's x to the mean",
    "dbo_node_bytes": "Encoded bytes that a node has broadcast",
}
_OF_RECORD = ("test_accuracy", "node_accuracy_min", "test_loss", "upper_loss", "consensus_x", "consensus_y")
_OF_NODES = {"accuracy": "dbo_node_accuracy", "apart_x": "dbo_node_apart_x", "bytes": "dbo_node_bytes"}


class Meters:
    """The metrics of one run, labelled with its name and its algorithm, those of a node with its number too.

    Ray exports what a gauge was set to once and then forgets it. A thread sets them again as long as the run lives, so
    that they are there between evaluations that lie far apart, and while a run stands still.
    """

    def __init__(self, run: str, algorithm: str) -> None:
        from ray.util.metrics import Counter, Gauge

        tags = dict(zip(LABELS, (run, algorithm), strict=True))

        def made(kind: Any, texts: Mapping[str, str], *more: str) -> dict[str, Any]:
            meters = {name: kind(name, description=text, tag_keys=(*LABELS, *more)) for name, text in texts.items()}
            for meter in meters.values():
                meter.set_default_tags(tags)
            return meters

        self._gauges = made(Gauge, GAUGES) | made(Gauge, NODE_GAUGES, "node")
        self._counters = made(Counter, COUNTERS)
        self._values: dict[tuple[str, int | None], float] = {}       # of a gauge, of a node
        self._last: Mapping[str, Any] = {}
        self._recoveries = 0
        self._set("dbo_recoveries", 0)
        threading.Thread(target=_repeat, args=(weakref.ref(self),), name="dbo-meters", daemon=True).start()

    def _set(self, name: str, value: float | None, node: int | None = None) -> None:
        if value is not None:              # where the task has no such thing there is no series
            self._values[name, node] = value
            self._gauges[name].set(value, tags=None if node is None else {"node": str(node)})

    def repeat(self) -> None:
        for (name, node), value in list(self._values.items()):
            self._set(name, value, node)

    def advanced(self, round_: int, seconds: float) -> None:
        self._set("dbo_round", round_)
        self._set("dbo_round_seconds", seconds)

    def evaluated(self, record: Mapping[str, Any]) -> None:
        """Counters only ever rise: rounds that are replayed after a recovery are not counted twice."""
        for name in _OF_RECORD:
            self._set(f"dbo_{name}", record.get(name))
        self._set("dbo_rounds_planned", record.get("rounds"))
        self._show_nodes(record.get("nodes") or {})
        before = self._last or {"bytes_links": 0, "packets": 0, "seconds": 0.0}
        said, packets = record["bytes_links"] - before["bytes_links"], record["packets"] - before["packets"]
        if said > 0:
            self._counters["dbo_bytes_links_total"].inc(said)
            self._counters["dbo_packets_total"].inc(packets)
            if record["seconds"] > before["seconds"]:
                self._set("dbo_bytes_per_second", said / (record["seconds"] - before["seconds"]))
            self._last = record

    def _show_nodes(self, nodes: Mapping[str, Any]) -> None:
        for key, name in _OF_NODES.items():
            values = nodes.get(key) or ()
            for number, value in enumerate(values if len(values) <= MOST_NODES else ()):
                self._set(name, value, number)

    def recovered(self) -> None:
        self._recoveries += 1
        self._set("dbo_recoveries", self._recoveries)


def _repeat(meters: "weakref.ref[Meters]") -> None:
    """Until the run's engine is gone, or its Ray."""
    while True:
        time.sleep(_AGAIN)
        living, ray = meters(), sys.modules.get("ray")
        if living is None or ray is None or not ray.is_initialized():
            return
        living.repeat()
        del living
