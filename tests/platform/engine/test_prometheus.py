"""Metrics for monitoring, with Ray's gauges and counters replaced by fakes that keep what was set."""

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dbo.platform.engine import prometheus

EXPORTED: list[tuple[str, float, dict[str, str]]] = []


class Fake:
    """A gauge or counter."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.keys, self.tags = name, tag_keys, {}

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.tags = tags

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        all_tags = {**self.tags, **(tags or {})}
        assert set(all_tags) == set(self.keys)      # Ray refuses others
        EXPORTED.append((self.name, value, all_tags))

    def inc(self, value: float) -> None:
        assert value > 0                            # Ray refuses others
        self.set(value)


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=Fake, Counter=Fake))
    monkeypatch.setattr(prometheus, "_REPEAT_SECONDS", 0.02)
    EXPORTED.clear()


@pytest.fixture
def gauges(_fakes: None) -> prometheus.RunGauges:
    return prometheus.RunGauges("r", "c2dfb")


def record(**changes: Any) -> dict[str, Any]:
    return {
        "bytes_links": 100, "packets": 10, "seconds": 2.0, "test_accuracy": 0.5, "test_loss": None, "upper_loss": 1.0,
        "consensus_x": 0.1, "consensus_y": 0.2, "node_accuracy_min": 0.4, "rounds": 20, **changes,
    }


def exported(name: str) -> list[float]:
    return [value for metric, value, _ in EXPORTED if metric == name]


def test_recoveries_are_zero_from_the_start(gauges: prometheus.RunGauges) -> None:
    """The gauge exists before the first recovery: an alert does not see a rise from nothing."""
    assert exported("dbo_recoveries")[0] == 0
    gauges.count_recovery()
    assert exported("dbo_recoveries")[-1] == 1


def test_replayed_rounds_are_not_counted_twice(gauges: prometheus.RunGauges) -> None:
    """Bytes and packets rise by what is new; after a rollback they stay until the run is further than before."""
    for sent, seconds in ((100, 2.0), (300, 4.0), (100, 2.0), (300, 4.0), (400, 5.0)):
        gauges.record_evaluation(record(bytes_links=sent, packets=sent // 10, seconds=seconds))
    assert exported("dbo_bytes_links_total") == [100, 200, 100]
    assert exported("dbo_packets_total") == [10, 20, 10]


def test_series_per_node_are_bounded_and_missing_metrics_have_none(gauges: prometheus.RunGauges) -> None:
    """Small networks have a series per node; large ones none; a task without accuracy has no such series."""
    gauges.record_evaluation(record(nodes={"accuracy": None, "apart_x": [0.1, 0.2], "bytes": [1, 2]}))
    nodes = {(name.removeprefix("dbo_node_"), tags["node"]) for name, _, tags in EXPORTED if "node" in tags}
    assert nodes == {("apart_x", "0"), ("apart_x", "1"), ("bytes", "0"), ("bytes", "1")}
    assert exported("dbo_test_loss") == []
    assert exported("dbo_test_accuracy")[0] == 0.5
    gauges.record_evaluation(record(nodes={"accuracy": [0.5] * (prometheus.MAX_NODES + 1)}))
    assert exported("dbo_node_accuracy") == []


def test_gauges_are_repeated_while_the_run_lives(gauges: prometheus.RunGauges) -> None:
    """Ray forgets a gauge once it was exported: a run with long rounds would vanish between two of them."""
    gauges.record_round(7, 1.5)
    deadline = time.monotonic() + 10
    while len(exported("dbo_round")) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(exported("dbo_round")) == {7}
    assert len(exported("dbo_round")) >= 3


@pytest.mark.usefixtures("_fakes")
def test_closed_engine_exports_nothing() -> None:
    """The thread does not keep the gauges alive, and ends with them."""
    gauges = prometheus.RunGauges("r", "c2dfb")
    del gauges
    gc.collect()
    time.sleep(0.1)
    EXPORTED.clear()
    time.sleep(0.1)
    assert EXPORTED == []
