"""Place Ray actors: a placement group with one actor in each bundle, and actors that several runs reuse.

Starting a process and its imports takes seconds, often longer than the rounds of a run. Inside `reuse_actors`, actors
of a run that has ended well stay idle for the next run that requests the same resources. Inside `use_placement_group`,
runs share a placement group that exists already. A trial of a sweep needs that: trials that each hold a part of their
resources would wait for one another for ever.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dbo.platform.config.engines import RaySettings
from dbo.platform.engine.base import Blocks, Notify, show_nothing
from dbo.platform.engine.deadlines import call_within
from dbo.platform.engine.wait_notices import WaitNotices
from dbo.platform.errors import RunError

Bundle: TypeAlias = dict[str, float]
T = TypeVar("T")

_idle: list["ActorGroup"] = []
_reusing = 0                       # nested `reuse_actors` contexts
_shared_group: Any = None          # a placement group that other code creates and removes

_MIN_CPU = 0.01                    # CPUs of an actor without a reservation, so that Ray spreads actors by their number
_RELEASE_SECONDS = 5.0             # to return resources; Ray returns those of a command that has ended in any case
_SLICE_SECONDS = 2.0               # between two looks whether the actors are placed


def pack_nodes(settings: RaySettings, ray: Any, nodes: int, has_server: bool = False) -> Blocks:
    """Assign nodes to actors. Neighbouring numbers share one: on rings and grids most packets stay in their process.

    A server is one more node, the last one, and has an actor of its own.
    """
    rows = settings.nodes_per_actor
    if rows == "auto":
        resources = ray.cluster_resources()
        fitting = int(resources.get("CPU", 1) / (settings.cpus_per_node or 1))
        if settings.gpus_per_node:
            fitting = min(fitting, math.floor(resources.get("GPU", 0) / settings.gpus_per_node + 1e-9))
        actors = min(nodes, max(1, fitting - has_server))
    else:
        actors = math.ceil(nodes / rows)
    blocks = [part.tolist() for part in np.array_split(np.arange(nodes), actors)]
    return [*blocks, [nodes]] if has_server else blocks


def bundle_for(settings: RaySettings, rows: int) -> Bundle:
    """Return the resources that one actor requests.

    Without a reservation an actor requests almost nothing: it always fits, and runs on one cluster share its CPUs.
    Nodes that `auto` has packed together, because resources are short, share one node's reservation.
    """
    reserved = 1 if settings.nodes_per_actor == "auto" else rows
    bundle = {"CPU": _MIN_CPU if settings.cpus_per_node is None else settings.cpus_per_node * reserved}
    if settings.gpus_per_node:
        gpus = settings.gpus_per_node * reserved
        bundle["GPU"] = gpus if gpus <= 1 else float(math.ceil(gpus - 1e-9))    # Ray: below 1, or an integer
    return bundle


@contextmanager
def reuse_actors() -> Iterator[None]:
    """Keep actors between the runs inside; release those that are idle at the end."""
    global _reusing
    _reusing += 1
    try:
        yield
    finally:
        _reusing -= 1
        if not _reusing:
            release_idle_actors()


def release_idle_actors() -> None:
    """End idle actors and return their resources to the cluster."""
    while _idle:
        _idle.pop().release()


@contextmanager
def use_placement_group(group: Any) -> Iterator[None]:
    """Place the actors of the runs inside in the bundles of this group, if each actor finds a bundle that fits."""
    global _shared_group
    before, _shared_group = _shared_group, group
    try:
        yield
    finally:
        _shared_group = before


def place_actors(ray: Any, settings: RaySettings, rows: Sequence[int], notify: Notify = show_nothing) -> "ActorGroup":
    """Return actors for blocks of these numbers of rows: idle ones that fit, otherwise new ones."""
    bundles = [bundle_for(settings, number) for number in rows]
    session = ray.get_runtime_context().get_job_id()
    fitting = None
    for idle in list(_idle):
        _idle.remove(idle)
        if idle.session != session:
            continue            # of a cluster that this process has left
        if fitting is None and idle.bundles == bundles and idle.settings == settings:
            fitting = idle
        else:
            idle.release()      # idle actors hold resources that the new run may need
    if fitting is not None:
        fitting.notify = notify
        return fitting
    created = ActorGroup(ray, settings, bundles, session, notify)
    created.start()
    return created


@dataclass(eq=False, slots=True)
class ActorGroup:
    """The actors of one engine and their placement group."""

    ray: Any
    settings: RaySettings
    bundles: list[Bundle]
    session: str
    notify: Notify = show_nothing
    group: Any = None
    is_shared: bool = False        # whether the placement group belongs to other code
    actors: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Wait until the cluster has reserved the bundles, then start the actors."""
        try:
            self.is_shared = _shared_group is not None and _fits(self.bundles, _shared_group.bundle_specs)
            timeout = self.settings.placement_timeout
            self.group = _shared_group if self.is_shared else self._call(timeout, lambda: self.ray.util.placement_group(
                self.bundles, strategy=self.settings.placement.upper()))
            if not self._wait_for_bundles(timeout):
                raise RunError(self._call(timeout, self._describe_shortage))
            self.actors = [self._create_actor(number) for number in range(len(self.bundles))]
        except BaseException:
            self.release()
            raise

    def replace(self, dead: Sequence[int]) -> Sequence[int]:
        """Replace dead actors, in their bundles if those still exist; return the numbers of the new actors."""
        self.kill(dead)
        if dead and not self._wait_for_bundles(10):               # a machine is lost, and its bundles with it
            self.release()
            self.start()
            return range(len(self.actors))
        for number in dead:
            self.actors[number] = self._create_actor(number)
        return dead

    def kill(self, numbers: Sequence[int]) -> None:
        """End these actors; Ray fails whatever waits for their results."""
        with suppress(TimeoutError):
            call_within(_RELEASE_SECONDS, lambda: [self.ray.kill(self.actors[number]) for number in numbers])

    def retire(self) -> None:
        """Keep the actors for the next run inside `reuse_actors`; release them elsewhere."""
        if _reusing:
            _idle.append(self)
        else:
            self.release()

    def release(self) -> None:
        """End the actors and return their bundles to the cluster, as far as the cluster answers."""
        actors, group, self.actors, self.group = self.actors, self.group, [], None

        def end() -> None:
            for actor in actors:
                self.ray.kill(actor)
            if group is not None and not self.is_shared:
                self.ray.util.remove_placement_group(group)

        if self.ray.is_initialized():
            # What is left behind ends with this command. An error here must not hide how the run ended.
            with suppress(Exception):
                call_within(_RELEASE_SECONDS, end)

    def _wait_for_bundles(self, seconds: float) -> bool:
        """Wait until the cluster has reserved all bundles; return whether it has."""
        start, notices = time.monotonic(), WaitNotices(self.notify)
        while (left := start + seconds - time.monotonic()) > 0:
            wait = partial(self.group.wait, timeout_seconds=min(left, _SLICE_SECONDS))
            with suppress(TimeoutError):
                if call_within(_SLICE_SECONDS + 5, wait):
                    return True
            waited = time.monotonic() - start
            notices.report(f"waiting for the cluster to place {len(self.bundles)} actors", waited, seconds)
        return False

    def _call(self, seconds: float, call: Callable[[], T]) -> T:
        try:
            return call_within(seconds, call)
        except TimeoutError as error:
            raise RunError(f"the Ray cluster does not place the actors: {error} (engine.placement_timeout)") from None

    def _create_actor(self, number: int) -> Any:
        from dbo.platform.engine.ray_actor import BlockActor

        bundle = self.bundles[number]
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=number
        )
        return self.ray.remote(BlockActor).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy,
            max_restarts=0, max_task_retries=0,
        ).remote()

    def _describe_shortage(self) -> str:
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        shortage = "; ".join(
            f"{kind}: needed {sum(b[kind] for b in self.bundles):g} ({self.bundles[0][kind]:g} per actor), "
            f"cluster has {total.get(kind, 0):g}, free {free.get(kind, 0):g}"
            for kind in self.bundles[0]
        )
        return (
            f"the cluster did not place {len(self.bundles)} actors within {self.settings.placement_timeout:g} s: "
            f"{shortage}; lower engine.cpus_per_node or engine.gpus_per_node, raise engine.nodes_per_actor, "
            f"or add machines"
        )


def _fits(requested: Sequence[Bundle], offered: Sequence[Bundle]) -> bool:
    """Decide whether every requested bundle fits into the offered bundle of the same number."""
    return len(offered) == len(requested) and all(
        offer.get(kind, 0.0) >= amount for offer, bundle in zip(offered, requested, strict=True)
        for kind, amount in bundle.items()
    )
