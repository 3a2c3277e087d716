"""Export a run's progress to Prometheus: gauges and counters through Ray's metrics agent, with bounded labels.

They are for monitoring: scraped samples are lossy. Figures are made from metrics.jsonl.
"""

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

LABELS = ("run", "algorithm")
MAX_NODES = 64            # runs with more nodes have no series per node: labels stay bounded
_REPEAT_SECONDS = 3.0

# `dbo_…` here is `ray_dbo_…` at the Prometheus endpoint.
GAUGES = {
    "dbo_round": "Rounds done",
    "dbo_rounds_planned": "Rounds that are planned",
    "dbo_round_seconds": "Duration of the last round",
    "dbo_bytes_per_second": "Encoded bytes on all links per second of training",
    "dbo_test_accuracy": "Accuracy of the mean model",
    "dbo_node_accuracy_min": "Accuracy of the worst node",
    "dbo_test_loss": "Loss of the mean model on the test data",
    "dbo_upper_loss": "Upper loss of the mean model",
    "dbo_consensus_x": "Root mean square distance of the nodes' x to their mean",
    "dbo_consensus_y": "Root mean square distance of the nodes' y to their mean",
    # A gauge, so that it is 0 from the start: a rise from nothing is no rise to an alert.
    "dbo_recoveries": "Number of times that lost actors were replaced",
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


class RunGauges:
    """Export the metrics of one run, labelled with its name and algorithm; series of a node with its number too.

    Ray exports the value of a gauge once and then forgets it. A thread repeats all values while the run lives, so that
    they stay visible between evaluations and while a run is blocked.
    """

    def __init__(self, run: str, algorithm: str) -> None:
        from ray.util.metrics import Counter, Gauge

        tags = dict(zip(LABELS, (run, algorithm), strict=True))

        def create(kind: Any, texts: Mapping[str, str], *more: str) -> dict[str, Any]:
            metrics = {name: kind(name, description=text, tag_keys=(*LABELS, *more)) for name, text in texts.items()}
            for metric in metrics.values():
                metric.set_default_tags(tags)
            return metrics

        self._gauges = create(Gauge, GAUGES) | create(Gauge, NODE_GAUGES, "node")
        self._counters = create(Counter, COUNTERS)
        self._values: dict[tuple[str, int | None], float] = {}       # (gauge, node) → the value set last
        self._last: Mapping[str, Any] = {}
        self._recoveries = 0
        self._set("dbo_recoveries", 0)
        threading.Thread(target=_repeat, args=(weakref.ref(self),), name="dbo-gauges", daemon=True).start()

    def _set(self, name: str, value: float | None, node: int | None = None) -> None:
        if value is not None:              # a task without this metric has no series
            self._values[name, node] = value
            self._gauges[name].set(value, tags=None if node is None else {"node": str(node)})

    def repeat(self) -> None:
        """Set every gauge to its last value again."""
        for (name, node), value in list(self._values.items()):
            self._set(name, value, node)

    def record_round(self, round_: int, seconds: float) -> None:
        """Export the number and the duration of a round that has ended."""
        self._set("dbo_round", round_)
        self._set("dbo_round_seconds", seconds)

    def record_evaluation(self, record: Mapping[str, Any]) -> None:
        """Export an evaluation. Counters never decrease: rounds replayed after a recovery are not counted twice."""
        for name in _OF_RECORD:
            self._set(f"dbo_{name}", record.get(name))
        self._set("dbo_rounds_planned", record.get("rounds"))
        self._record_nodes(record.get("nodes") or {})
        before = self._last or {"bytes_links": 0, "packets": 0, "seconds": 0.0}
        sent, packets = record["bytes_links"] - before["bytes_links"], record["packets"] - before["packets"]
        if sent > 0:
            self._counters["dbo_bytes_links_total"].inc(sent)
            self._counters["dbo_packets_total"].inc(packets)
            if record["seconds"] > before["seconds"]:
                self._set("dbo_bytes_per_second", sent / (record["seconds"] - before["seconds"]))
            self._last = record

    def _record_nodes(self, nodes: Mapping[str, Any]) -> None:
        for key, name in _OF_NODES.items():
            values = nodes.get(key) or ()
            for number, value in enumerate(values if len(values) <= MAX_NODES else ()):
                self._set(name, value, number)

    def count_recovery(self) -> None:
        """Count that lost actors were replaced."""
        self._recoveries += 1
        self._set("dbo_recoveries", self._recoveries)


def _repeat(gauges: "weakref.ref[RunGauges]") -> None:
    """Repeat the values until the run's engine, or Ray, is gone."""
    while True:
        time.sleep(_REPEAT_SECONDS)
        living, ray = gauges(), sys.modules.get("ray")
        if living is None or ray is None or not ray.is_initialized():
            return
        living.repeat()
        del living
