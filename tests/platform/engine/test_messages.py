"""Messages that come twice, late, in another order or not at all: the same bits, or an error with a name."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults import messages as faults

from dbo.algorithms.gossip import dense
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.block import Host, ProtocolError
from dbo.platform.engine.ray_engine import RayEngine
from dbo.platform.errors import NodeFailure
from dbo.platform.network import wire
from dbo.platform.runs.runner import prepare, run

Tiny = Callable[..., Experiment]
BLOCKS = [[0], [1, 2], [3]]
ROUNDS = 3


def hosts(experiment: Experiment) -> list[Host]:
    made, parts = prepare(experiment), experiment.parts
    return [Host(parts.algorithm, parts.config, made.problem, made.network, ids) for ids in BLOCKS]


def states(made: list[Host]) -> list[bytes]:
    return [array.tobytes() for host in made for array in host.snapshot().values()]


def driven(made: list[Host], carry: Callable[[dict[int, bytes]], dict[int, bytes]]) -> None:
    for round_ in range(1, ROUNDS + 1):
        said = [host.begin(round_) for host in made]
        while any(packets is not None for packets in said):
            posted = {node: data for packets in said for node, data in (packets or {}).items()}
            said = [host.step(carry(posted)) for host in made]


@pytest.mark.parametrize("seed", range(12))
def test_duplicated_and_reordered_packets_change_no_bit(tiny: Tiny, seed: int) -> None:
    """Duplicates, any order, and old packets that arrive again before the new ones, a fifth of the time each."""
    calm, hit = hosts(tiny()), hosts(tiny())
    driven(calm, lambda packets: packets)
    network = faults.Network(seed, 0.2)
    driven(hit, network.posted)
    assert network.mischief > 0
    assert states(calm) == states(hit)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_lost_or_stale_packet_is_an_error(tiny: Tiny, seed: int, stale: bool) -> None:
    """A packet that is missing, or of which only an older one is there, ends the step with a ProtocolError."""
    thief = faults.Thief(seed, stale)
    with pytest.raises(ProtocolError, match=r"no packet from node|expected packet"):
        driven(hosts(tiny()), thief.posted)
    assert thief.stolen


def test_another_sender_s_packet_is_an_error(tiny: Tiny) -> None:
    """A packet under the wrong address is not taken for the one that should be there."""
    def swapped(packets: dict[int, bytes]) -> dict[int, bytes]:
        return {**packets, 0: packets[1]}

    with pytest.raises(ProtocolError, match="expected packet"):
        driven(hosts(tiny()), swapped)


def test_the_comparison_sees_a_changed_value(tiny: Tiny) -> None:
    """Control: a packet with one other value, under a right checksum, changes the states."""
    def changed(packets: dict[int, bytes]) -> dict[int, bytes]:
        packet = wire.decode(packets[0])
        header = wire.Header(sender=packet.sender, epoch=packet.epoch, round=packet.round, step=packet.step)
        rows = {name: dense(np.nextafter(row, 9)[None]) for name, row in packet.channels.items()}
        return {**packets, 0: wire.encode(header, rows, 0)}

    calm, hit = hosts(tiny()), hosts(tiny())
    driven(calm, lambda packets: packets)
    driven(hit, changed)
    assert states(calm) != states(hit)


# ---- on Ray ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "nodes": 4, "dtype": "float64", "task": {"name": "quadratic", "dim_x": 4, "dim_y": 8}, "checkpoint_every": 3,
    "rounds": 8, "engine": {"name": "ray", "nodes_per_actor": 2},
}


@pytest.mark.ray
def test_late_calls_of_an_earlier_epoch_change_no_bit(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of an epoch that was given up, delivered after the rollback: refused, and the run is what it was."""
    calm = run(Experiment(**SMALL), tmp_path / "calm")
    restore, late = RayEngine.restore, []

    def haunted(engine: RayEngine, blocks: Any) -> None:
        restore(engine, blocks)
        late.extend(actor.begin.remote(engine._epoch - 1, 4) for actor in engine._actors)

    advance, struck = RayEngine.advance, []

    def hit(engine: RayEngine, round_: int) -> None:
        if round_ == 5 and not struck:
            struck.append(round_)
            os.kill(engine.pids()[0], signal.SIGKILL)
        advance(engine, round_)

    monkeypatch.setattr(RayEngine, "restore", haunted)
    monkeypatch.setattr(RayEngine, "advance", hit)
    survived = run(Experiment(**SMALL), tmp_path / "hit")
    assert same(calm.folder, survived.folder)
    assert late
    for ref in late:
        with pytest.raises(ray.exceptions.RayTaskError, match="epoch"):
            ray.get(ref)


@pytest.mark.ray
def test_a_lost_packet_ends_the_run_with_its_name(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is handed no packet of a neighbour: node, round and step are told, nothing is made up."""
    advance = RayEngine.advance

    def robbed(engine: RayEngine, round_: int) -> None:
        if round_ == 4:
            heard, engine._heard = engine._heard, [[] for _ in engine._heard]
            try:
                advance(engine, round_)
            finally:
                engine._heard = heard
        else:
            advance(engine, round_)

    monkeypatch.setattr(RayEngine, "advance", robbed)
    with pytest.raises(NodeFailure, match=r"round 4, step 1: ProtocolError: .*no packet from node"):
        run(Experiment(**SMALL), tmp_path / "run")


@pytest.mark.ray
def test_an_actor_that_hangs_is_replaced(
    ray: Any, same: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: no death is seen, only silence; after engine.step_timeout the run goes on, bit-identical."""
    settings = {**SMALL, "engine": {**SMALL["engine"], "step_timeout": 8.0}}
    calm = run(Experiment(**settings), tmp_path / "calm")
    advance, struck = RayEngine.advance, []

    def stopped(engine: RayEngine, round_: int) -> None:
        if round_ == 5 and not struck:
            struck.append(engine.pids()[0])
            os.kill(struck[0], signal.SIGSTOP)
        advance(engine, round_)

    monkeypatch.setattr(RayEngine, "advance", stopped)
    survived = run(Experiment(**settings), tmp_path / "hit")
    assert "no answer within" in survived.summary["recoveries"][0]["reason"]
    assert same(calm.folder, survived.folder)
    assert not Path(f"/proc/{struck[0]}").exists()
