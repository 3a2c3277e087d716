"""What operators see of a run, with Ray's meters replaced by ones that remember what they were told."""

import gc
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dbo.platform.engine import prometheus

SEEN: list[tuple[str, float, dict[str, str]]] = []


class Fake:
    """A gauge or counter."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.keys, self.tags = name, tag_keys, {}

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.tags = tags

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        told = {**self.tags, **(tags or {})}
        assert set(told) == set(self.keys)          # Ray refuses others
        SEEN.append((self.name, value, told))

    def inc(self, value: float) -> None:
        assert value > 0                            # Ray refuses others
        self.set(value)


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.util.metrics", SimpleNamespace(Gauge=Fake, Counter=Fake))
    monkeypatch.setattr(prometheus, "_AGAIN", 0.02)
    SEEN.clear()


@pytest.fixture
def made(_fakes: None) -> prometheus.Meters:
    return prometheus.Meters("r", "c2dfb")


def record(**changes: Any) -> dict[str, Any]:
    return {
        "bytes_links": 100, "packets": 10, "seconds": 2.0, "test_accuracy": 0.5, "test_loss": None, "upper_loss": 1.0,
        "consensus_x": 0.1, "consensus_y": 0.2, "node_accuracy_min": 0.4, "rounds": 20, **changes,
    }


def told(name: str) -> list[float]:
    return [value for seen, value, _ in SEEN if seen == name]


def test_a_run_without_losses_says_so_from_the_start(made: prometheus.Meters) -> None:
    """Recoveries are 0 before anything has happened: a rise from nothing would be no rise to an alert."""
    assert told("dbo_recoveries")[0] == 0
    made.recovered()
    assert told("dbo_recoveries")[-1] == 1


def test_replayed_rounds_are_not_counted_twice(made: prometheus.Meters) -> None:
    """Bytes and packets rise by what is new; after a roll-back they wait until the run is further than it was."""
    for sent, seconds in ((100, 2.0), (300, 4.0), (100, 2.0), (300, 4.0), (400, 5.0)):
        made.evaluated(record(bytes_links=sent, packets=sent // 10, seconds=seconds))
    assert told("dbo_bytes_links_total") == [100, 200, 100]
    assert told("dbo_packets_total") == [10, 20, 10]


def test_every_node_up_to_a_bound_and_nothing_where_there_is_nothing(made: prometheus.Meters) -> None:
    """Small networks have a series per node; large ones none; a task without accuracy has no such series."""
    made.evaluated(record(nodes={"accuracy": None, "apart_x": [0.1, 0.2], "bytes": [1, 2]}))
    nodes = {(name.removeprefix("dbo_node_"), tags["node"]) for name, _, tags in SEEN if "node" in tags}
    assert nodes == {("apart_x", "0"), ("apart_x", "1"), ("bytes", "0"), ("bytes", "1")}
    assert told("dbo_test_loss") == []
    assert told("dbo_test_accuracy")[0] == 0.5
    made.evaluated(record(nodes={"accuracy": [0.5] * (prometheus.MOST_NODES + 1)}))
    assert told("dbo_node_accuracy") == []


def test_gauges_are_told_again_as_long_as_the_run_lives(made: prometheus.Meters) -> None:
    """Ray forgets a gauge once it was exported: a run whose rounds are long would vanish between two of them."""
    made.advanced(7, 1.5)
    deadline = time.monotonic() + 10
    while len(told("dbo_round")) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(told("dbo_round")) == {7}
    assert len(told("dbo_round")) >= 3


@pytest.mark.usefixtures("_fakes")
def test_an_engine_that_is_gone_is_silent() -> None:
    """The thread does not keep the meters alive, and ends with them."""
    made = prometheus.Meters("r", "c2dfb")
    del made
    gc.collect()
    time.sleep(0.1)
    SEEN.clear()
    time.sleep(0.1)
    assert SEEN == []
