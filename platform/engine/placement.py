"""Where actors sit: a placement group, an actor in each of its bundles, and a waiting room between two runs.

Starting a process and importing what a node needs takes seconds; a run of rounds often takes less. Where a driver makes
several runs (`waiting_room`), actors that have ended one in good order wait for the next that asks for the same seats.
Where a run is one of many on a cluster, the placement group is there before it starts and is `lent` to it: runs that
each hold a part of what they need would wait for one another for ever.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dbo.platform.config.engines import RaySettings
from dbo.platform.engine.base import Blocks
from dbo.platform.errors import RunError

Bundle = dict[str, float]
_parked: list["Seats"] = []
_rooms = 0
_lent: Any = None      # a placement group that somebody else has made and will remove


_TOKEN = 0.01      # CPUs, so that Ray spreads actors by their number


def pack_nodes(settings: RaySettings, ray: Any, nodes: int) -> Blocks:
    """Assign nodes to actors. Neighbouring numbers share one: on rings and grids most packets stay in their process."""
    rows = settings.nodes_per_actor
    if rows == "auto":
        resources = ray.cluster_resources()
        fitting = int(resources.get("CPU", 1) / (settings.cpus_per_node or 1))
        if settings.gpus_per_node:
            fitting = min(fitting, math.floor(resources.get("GPU", 0) / settings.gpus_per_node + 1e-9))
        actors = min(nodes, max(1, fitting))
    else:
        actors = math.ceil(nodes / rows)
    return [part.tolist() for part in np.array_split(np.arange(nodes), actors)]


def bundle_for(settings: RaySettings, rows: int) -> Bundle:
    """Return the resources that one actor requests.

    Without a reservation next to nothing: there is always space, and runs on one cluster share its CPUs. Nodes that
    `auto` has packed together, because resources are short, share one node's reservation.
    """
    reserved = 1 if settings.nodes_per_actor == "auto" else rows
    wanted = {"CPU": _TOKEN if settings.cpus_per_node is None else settings.cpus_per_node * reserved}
    if settings.gpus_per_node:
        gpus = settings.gpus_per_node * reserved
        wanted["GPU"] = gpus if gpus <= 1 else float(math.ceil(gpus - 1e-9))    # Ray: below 1, or whole
    return wanted


@contextmanager
def waiting_room() -> Iterator[None]:
    """Inside, actors wait between runs; at its end those that still wait are let go, and their resources with them."""
    global _rooms
    _rooms += 1
    try:
        yield
    finally:
        _rooms -= 1
        if not _rooms:
            dismiss()


def dismiss() -> None:
    """Lets go who waits, for others who need the room."""
    while _parked:
        _parked.pop().leave()


@contextmanager
def lent(group: Any) -> Iterator[None]:
    """Inside, actors sit in the bundles of this placement group, as far as it has a fitting one for each of them."""
    global _lent
    before, _lent = _lent, group
    try:
        yield
    finally:
        _lent = before


def seated(ray: Any, config: RaySettings, rows: Sequence[int]) -> "Seats":
    """Actors for blocks of so many rows each: waiting ones if they fit, otherwise new ones."""
    bundles = [bundle_for(config, number) for number in rows]
    session = ray.get_runtime_context().get_job_id()
    fitting = None
    for seats in list(_parked):
        _parked.remove(seats)
        if seats.session != session:
            continue        # of a cluster that this process has left
        if fitting is None and seats.bundles == bundles and seats.config == config:
            fitting = seats
        else:
            seats.leave()   # what waits holds resources that the new run may need
    if fitting is not None:
        return fitting
    seats = Seats(ray, config, bundles, session)
    seats.take()
    return seats


@dataclass(eq=False, slots=True)
class Seats:
    """The actors of one engine."""

    ray: Any
    config: RaySettings
    bundles: list[Bundle]
    session: str
    group: Any = None
    borrowed: bool = False
    actors: list[Any] = field(default_factory=list)

    def take(self) -> None:
        """Waits for the cluster to set the bundles aside, then starts the actors."""
        try:
            self.borrowed = _lent is not None and _covers(_lent.bundle_specs, self.bundles)
            self.group = _lent if self.borrowed else self.ray.util.placement_group(
                self.bundles, strategy=self.config.placement.upper())
            if not self.group.wait(timeout_seconds=self.config.placement_timeout):
                raise RunError(self._missing())
            self.actors = [self._actor(number) for number in range(len(self.bundles))]
        except BaseException:
            self.leave()
            raise

    def replace(self, dead: Sequence[int]) -> Sequence[int]:
        """New actors for dead ones, on the same seats if those still exist; answers who is new."""
        for number in dead:
            self.ray.kill(self.actors[number])
        if dead and not self.group.wait(timeout_seconds=10):      # a machine is gone, and its bundles with it
            self.leave()
            self.take()
            return range(len(self.actors))
        for number in dead:
            self.actors[number] = self._actor(number)
        return dead

    def park(self) -> None:
        """Into the waiting room, if there is one."""
        if _rooms:
            _parked.append(self)
        else:
            self.leave()

    def leave(self) -> None:
        """Ends the actors and gives the bundles back."""
        if self.ray.is_initialized():
            for actor in self.actors:
                self.ray.kill(actor)
            if self.group is not None and not self.borrowed:
                self.ray.util.remove_placement_group(self.group)
        self.actors, self.group = [], None

    def _actor(self, number: int) -> Any:
        from dbo.platform.engine.ray_actor import Block

        bundle = self.bundles[number]
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=number
        )
        return self.ray.remote(Block).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy,
            max_restarts=0, max_task_retries=0,
        ).remote()

    def _missing(self) -> str:
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        told = "; ".join(
            f"{kind}: needed {sum(b[kind] for b in self.bundles):g} ({self.bundles[0][kind]:g} per actor), "
            f"cluster has {total.get(kind, 0):g}, free {free.get(kind, 0):g}"
            for kind in self.bundles[0]
        )
        return (
            f"the cluster did not place {len(self.bundles)} actors within {self.config.placement_timeout:g} s: "
            f"{told}; lower engine.cpus_per_node or engine.gpus_per_node, raise engine.nodes_per_actor, or add machines"
        )


def _covers(offered: Sequence[Bundle], wanted: Sequence[Bundle]) -> bool:
    """Whether each bundle has room for what is wanted of it."""
    return len(offered) == len(wanted) and all(
        there.get(kind, 0.0) >= amount for there, bundle in zip(offered, wanted, strict=True)
        for kind, amount in bundle.items()
    )
