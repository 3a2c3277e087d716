"""Packets that arrive twice, late, in another order or not at all: the same bits, or an error that names the packet."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults import messages as faults

from dbo.algorithms.api import dense
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import ProtocolError
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.errors import NodeFailure
from dbo.platform.network import packet as wire
from dbo.platform.runs.runner import run

Tiny = Callable[..., Experiment]


@pytest.mark.parametrize("seed", range(12))
def test_duplicated_and_reordered_packets_change_no_bit(tiny: Tiny, seed: int) -> None:
    """Duplicates, any order, and old packets that arrive again before the new ones, 20 % of the time each."""
    calm, hit = faults.start(tiny()), faults.start(tiny())
    faults.advance(calm)
    network = faults.Network(seed, 0.2)
    faults.advance(hit, network.deliver)
    assert network.faults > 0
    assert faults.states(calm) == faults.states(hit)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_lost_or_stale_packet_is_an_error(tiny: Tiny, seed: int, stale: bool) -> None:
    """A step without a packet, or with an old one instead, ends with a ProtocolError."""
    network = faults.LossyNetwork(seed, stale)
    with pytest.raises(ProtocolError, match=r"no packet from node|expected packet"):
        faults.advance(faults.start(tiny()), network.deliver)
    assert network.has_lost


def test_packet_of_another_sender_is_an_error(tiny: Tiny) -> None:
    """A packet under the wrong sender's number is refused."""
    def swap(packets: dict[int, bytes]) -> dict[int, bytes]:
        return {**packets, 0: packets[1]}

    with pytest.raises(ProtocolError, match="expected packet"):
        faults.advance(faults.start(tiny()), swap)


def test_comparison_detects_a_changed_value(tiny: Tiny) -> None:
    """Control: a packet with another value and a valid checksum changes the states."""
    def change(packets: dict[int, bytes]) -> dict[int, bytes]:
        packet = wire.decode(packets[0])
        rows = {name: dense(np.nextafter(row, 9)[None]) for name, row in packet.channels.items()}
        return {**packets, 0: wire.encode(packet.header, rows, 0)}

    calm, hit = faults.start(tiny()), faults.start(tiny())
    faults.advance(calm)
    faults.advance(hit, change)
    assert faults.states(calm) != faults.states(hit)


# ---- on Ray ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "nodes": 4, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "checkpoint_every": 3,
    "rounds": 8, "engine": {"name": "ray", "nodes_per_actor": 2},
}


@pytest.mark.ray
def test_late_calls_of_an_old_epoch_change_no_bit(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the epoch before a rollback that arrive after it are refused; the run is bit-identical."""
    calm = run(Experiment(**SMALL), tmp_path / "calm")
    restore, late = RayEngine.restore, []

    def restore_and_call_late(engine: RayEngine, blocks: Any) -> None:
        restore(engine, blocks)
        epoch = engine._epoch - 1
        for actor in engine._actors:
            late.extend([actor.step.remote(epoch, 4, 0), actor.run_rounds.remote(epoch, 4, 4)])

    advance, killed = RayEngine.advance, []

    def kill_in_round_5(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 5 and not killed:
            killed.append(round_)
            os.kill(engine.pids()[0], signal.SIGKILL)
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "restore", restore_and_call_late)
    monkeypatch.setattr(RayEngine, "advance", kill_in_round_5)
    survived = run(Experiment(**SMALL), tmp_path / "hit")
    assert same(calm.folder, survived.folder)
    assert late
    for ref in late:
        with pytest.raises(ray.exceptions.RayTaskError, match="epoch"):
            ray.get(ref)


@pytest.mark.ray
def test_lost_packet_ends_the_run_with_its_sender(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without a neighbour's packet: the error names node, round and step."""
    advance = RayEngine.advance

    def lose_packets_in_round_4(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 4:
            engine._neighbours = [[] for _ in engine._neighbours]
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "advance", lose_packets_in_round_4)
    with pytest.raises(NodeFailure, match=r"round 4, step 1: ProtocolError: .*no packet from node"):
        run(Experiment(**{**SMALL, "engine": {**SMALL["engine"], "transport": "object_store"}}), tmp_path / "run")


@pytest.mark.ray
def test_actor_that_hangs_is_replaced(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: after engine.step_timeout the actors are replaced and the run continues, bit-identical."""
    settings = {**SMALL, "engine": {**SMALL["engine"], "step_timeout": 8.0}}
    calm = run(Experiment(**settings), tmp_path / "calm")
    advance, stopped = RayEngine.advance, []

    def stop_in_round_5(engine: RayEngine, round_: int, last: int | None = None) -> None:
        if round_ == 5 and not stopped:
            stopped.append(engine.pids()[0])
            os.kill(stopped[0], signal.SIGSTOP)
        advance(engine, round_, last)

    monkeypatch.setattr(RayEngine, "advance", stop_in_round_5)
    survived = run(Experiment(**settings), tmp_path / "hit")
    assert "no answer within" in survived.summary["recoveries"][0]["reason"]
    assert same(calm.folder, survived.folder)
    assert not Path(f"/proc/{stopped[0]}").exists()
