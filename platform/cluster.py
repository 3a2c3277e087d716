"""The Ray engine: one actor per block of nodes, packets through the object store, death seen by the driver.

A step of a block takes references to what its neighbouring blocks said in the step before. The driver submits all steps
of a round at once and holds nothing but references, which it drops as soon as the next step is submitted. No actor
restarts by itself: one that did would come back empty and raise nothing. The driver replaces what died, and the run
rolls back.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt
from typing_extensions import Doc

from dbo.algorithms.protocol import Array
from dbo.platform.engine import Blocks, Work, in_node_order, most
from dbo.platform.errors import BlocksLost, NodeFailure, RunError
from dbo.platform.host import EVALUATED, View
from dbo.platform.ledger import Ledger
from dbo.platform.meters import Meters
from dbo.platform.ray_session import connect
from dbo.platform.seats import seated
from dbo.platform.states import Flat, parts

_TOKEN = 0.01      # CPUs, so that Ray spreads actors by their number


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Nodes in Ray actors, one each while the cluster has the CPUs or GPUs, several to an actor otherwise."""

    # What has no say in the results, and may differ when a run is gone on with.
    aside: ClassVar[frozenset[str]] = frozenset(
        {"address", "placement", "placement_timeout", "step_timeout", "max_recoveries"}
    )

    nodes_per_actor: Annotated[int | Literal["auto"], Doc("rows per actor; auto: as few as fit")] = "auto"
    gpus_per_node: Annotated[float, Ge(0), Doc("share of a GPU for each node; 0: CPU")] = 0.0
    cpus_per_node: Annotated[
        float | None, Doc("CPUs reserved for each node; null: the actors share what the cluster has")
    ] = None
    threads: Annotated[int, Ge(1), Doc("threads of an actor's linear algebra")] = 1
    address: Annotated[str | None, Doc("a running cluster; null: RAY_ADDRESS, else an own one on loopback")] = None
    placement: Annotated[Literal["spread", "pack"], Doc("actors over the machines, or as close as possible")] = "spread"
    placement_timeout: Annotated[float, Gt(0), Doc("seconds to wait for the cluster to place the actors")] = 60.0
    step_timeout: Annotated[float, Gt(0), Doc("seconds to wait for an answer before actors count as lost")] = 600.0
    max_recoveries: Annotated[int, Ge(0), Doc("how often lost actors are replaced before the run fails")] = 100

    def __post_init__(self) -> None:
        if isinstance(self.nodes_per_actor, int) and self.nodes_per_actor < 1:
            raise ValueError(f"nodes_per_actor: {self.nodes_per_actor} is not allowed; must be auto or ≥ 1")
        if self.cpus_per_node is not None and self.cpus_per_node <= 0:
            raise ValueError(f"cpus_per_node: {self.cpus_per_node} is not allowed; must be > 0")

    def notice(self) -> str | None:
        """What there is to wait for before the first round."""
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            return None
        return "connecting to Ray" if self.address or os.environ.get("RAY_ADDRESS") else "starting Ray on this machine"

    def start(self, work: Work) -> "RayEngine":
        """The engine, its actors placed and ready."""
        ray = connect(self.address)
        return RayEngine(self, ray, work, work.blocks or self.pack(ray, work.network.nodes))

    def pack(self, ray: Any, nodes: int) -> Blocks:
        """Neighbouring numbers share an actor: on rings and grids most packets then never leave their process."""
        rows = self.nodes_per_actor
        if rows == "auto":
            resources = ray.cluster_resources()
            seats = int(resources.get("CPU", 1) / (self.cpus_per_node or 1))
            if self.gpus_per_node:
                seats = min(seats, math.floor(resources.get("GPU", 0) / self.gpus_per_node + 1e-9))
            actors = min(nodes, max(1, seats))
        else:
            actors = math.ceil(nodes / rows)
        return [part.tolist() for part in np.array_split(np.arange(nodes), actors)]

    def bundle(self, rows: int) -> dict[str, float]:
        """What one actor asks of the cluster.

        Without a reservation next to nothing: there is always room, and runs on one cluster share its CPUs. Nodes that
        `auto` has packed together, for want of room, share one node's reservation.
        """
        reserved = 1 if self.nodes_per_actor == "auto" else rows
        wanted = {"CPU": _TOKEN if self.cpus_per_node is None else self.cpus_per_node * reserved}
        if self.gpus_per_node:
            gpus = self.gpus_per_node * reserved
            wanted["GPU"] = gpus if gpus <= 1 else float(math.ceil(gpus - 1e-9))    # Ray: below 1, or whole
        return wanted


class RayEngine:
    """Drives the actors; see `Engine` for what each method promises."""

    def __init__(self, config: Ray, ray: Any, work: Work, blocks: Blocks) -> None:
        self._ray, self._config, self._settings, self._network = ray, config, work.settings, work.network
        self.blocks: Blocks = [list(ids) for ids in blocks]
        self._steps = work.algorithm.packets(work.config)
        owner = {node: number for number, ids in enumerate(self.blocks) for node in ids}
        self._heard = [
            sorted({owner[j] for i in ids for j in work.network.neighbours[i]} - {number})
            for number, ids in enumerate(self.blocks)
        ]
        self._problem = ray.put(work.problem)       # once: actors of a machine read the same memory
        self._graph = ray.put(work.network)
        self._epoch = 0
        self._seats = seated(ray, config, [len(ids) for ids in self.blocks])
        self._failed = False
        self._views: list[View] | None = None
        self._empty = set(range(len(self.blocks)))      # actors that have not been given their rows
        self._silent = False                            # an answer is overdue; whose fault it is cannot be seen
        try:
            self._meters = Meters(work.settings["name"], work.algorithm.name)
            self._begin()
        except BaseException:
            self._seats.leave()
            raise

    @property
    def _actors(self) -> list[Any]:
        return self._seats.actors

    def _begin(self) -> None:
        """Seats everybody; processes may die at this moment as at any other."""
        for attempt in range(3):
            try:
                if attempt:
                    self._replace()
                self._assign()
                return
            except BlocksLost as lost:
                reason = lost
        raise RunError(f"the actors cannot be started: {reason}")

    def _replace(self) -> None:
        dead = list(range(len(self._actors))) if self._silent else self._dead()
        self._silent = False
        self._empty |= set(self._seats.replace(dead))

    def _assign(self) -> None:
        """Gives the actors that have none their rows."""
        numbers = sorted(self._empty)
        self._collect([
            self._actors[number].assign.remote(
                self._problem, self._settings, self._graph, self.blocks[number], self._epoch, self._config.threads,
                self._config.gpus_per_node,
            )
            for number in numbers
        ], timeout=max(self._config.step_timeout, self._config.placement_timeout))    # processes start first
        self._empty.clear()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def advance(self, round_: int) -> None:
        start, self._views = time.perf_counter(), None
        said = [actor.begin.remote(self._epoch, round_) for actor in self._actors]
        for number in range(1, self._steps + 1):
            said = [
                actor.step.remote(self._epoch, number, *(said[j] for j in heard))
                for actor, heard in zip(self._actors, self._heard, strict=True)
            ]
        self._collect(said)
        self._meters.advanced(round_, time.perf_counter() - start)

    def observe(self, record: Mapping[str, Any]) -> None:
        self._meters.evaluated(record)

    def _seen(self) -> list[View]:
        """What an evaluation asks of every block, fetched in one call and kept until the state moves on."""
        if self._views is None:
            self._views = self._collect([actor.view.remote() for actor in self._actors])
        return self._views

    def rows(self, name: str) -> Array | None:
        if name in EVALUATED:
            return in_node_order(self.blocks, [view.rows[name] for view in self._seen()])
        # A block at a time, and without what the last evaluation was shown: the object store's memory comes on top.
        self._views = None
        parts = (self._collect([actor.rows.remote(name)])[0] for actor in self._actors)
        first = next(parts)
        return None if first is None else in_node_order(self.blocks, chain([first], parts))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        point = self._ray.put(x), self._ray.put(y)
        parts = self._collect([actor.losses.remote(*point) for actor in self._actors])
        return in_node_order(self.blocks, [f for f, _ in parts]), in_node_order(self.blocks, [g for _, g in parts])

    def sick(self) -> str | None:
        return next((view.sick for view in self._seen() if view.sick), None)

    def counters(self) -> Mapping[str, int]:
        return most(view.counters for view in self._seen())

    def ledger(self) -> Ledger:
        parts = []
        for ids, view in zip(self.blocks, self._seen(), strict=True):
            part = Ledger(ids, self._network.degree[ids])
            part.restore(view.ledger)
            parts.append(part)
        return Ledger.merge(parts)

    # ---- life and death --------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        self._views = None
        sizes: list[dict[str, int]] = self._collect([actor.sizes.remote() for actor in self._actors])
        for actor, of_block in zip(self._actors, sizes, strict=True):
            yield (self._collect([actor.snapshot.remote(names)])[0] for names in parts(of_block))

    def restore(self, blocks: list[Flat] | None) -> None:
        self._epoch, self._views = self._epoch + 1, None
        flats = blocks if blocks is not None else [None] * len(self._actors)
        self._collect([
            actor.restore.remote(flat, self._epoch) for actor, flat in zip(self._actors, flats, strict=True)
        ])

    def revive(self) -> None:
        """Replaces actors that do not answer. If the cluster cannot seat them where they were, all move."""
        self._meters.recovered()
        self._replace()
        self._assign()

    def close(self) -> None:
        """The actors go, or wait for the next run if there is a waiting room and they have come to rest."""
        self._problem = self._graph = None
        if not self._ray.is_initialized():
            return
        if self._failed:
            self._seats.leave()
            return
        try:
            self._ray.get([actor.idle.remote() for actor in self._actors], timeout=5)
        except self._ray.exceptions.RayError:
            self._seats.leave()
        else:
            self._seats.park()

    def pids(self) -> list[int]:
        """The actors' processes."""
        pids: list[int] = self._collect([actor.ready.remote() for actor in self._actors])
        return pids

    def _dead(self) -> list[int]:
        """Who does not answer, all of them asked at once."""
        asked = [actor.ready.remote() for actor in self._actors]
        self._ray.wait(asked, num_returns=len(asked), timeout=self._config.placement_timeout)
        return [number for number, ref in enumerate(asked) if not self._answered(ref)]

    def _answered(self, ref: Any) -> bool:
        try:
            self._ray.get(ref, timeout=0)
        except self._ray.exceptions.RayError:
            return False
        return True

    def _collect(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """The values. An exception in a node is told as it was; anything else that goes wrong is a lost process."""
        timeout = timeout or self._config.step_timeout
        try:
            values: list[Any] = self._ray.get(refs, timeout=timeout)
            return values
        except self._ray.exceptions.GetTimeoutError:
            # A process that hangs keeps its neighbours waiting too: all are replaced, which changes no result.
            self._silent = True
            reason = f"no answer within {timeout:g} s (engine.step_timeout)"
            raise BlocksLost(range(len(self._actors)), reason) from None
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            task = isinstance(error, self._ray.exceptions.RayTaskError)
            if task and not isinstance(cause, self._ray.exceptions.RayError):
                self._failed = True
                told = cause if isinstance(cause, NodeFailure) else RunError(f"{type(cause).__name__}: {cause}")
                raise told from None
            # Either a process died, or a step was handed what a dead one should have said.
            failure = self._first_failure(refs)
            if failure is not None:
                self._failed = True
                raise failure from None
            raise BlocksLost(self._dead(), type(error).__name__) from None

    def _first_failure(self, refs: list[Any]) -> NodeFailure | None:
        """A node that raised, among blocks of which others died."""
        self._ray.wait(refs, num_returns=len(refs), timeout=self._config.step_timeout)
        for ref in refs:
            try:
                self._ray.get(ref, timeout=0)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, NodeFailure):
                    return error.cause
            except self._ray.exceptions.RayError:
                continue
        return None
