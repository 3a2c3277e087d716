"""The Ray engine: one actor per block of nodes, packets through the object store, death seen by the driver.

A step of a block takes references to what its neighbouring blocks said in the step before. The driver submits all steps
of a round at once and holds nothing but references, which it drops as soon as the next step is submitted. No actor
restarts by itself: one that did would come back empty and raise nothing. The driver replaces what died, and the run
rolls back.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from dbo.algorithms.protocol import Array
from dbo.platform.config.engines import RaySettings
from dbo.platform.engine.base import Blocks, Work, in_node_order, most
from dbo.platform.engine.block import EVALUATED, View
from dbo.platform.engine.placement import seated
from dbo.platform.engine.prometheus import Meters
from dbo.platform.engine.state_tree import Flat, parts
from dbo.platform.errors import BlocksLost, NodeFailure, RunError
from dbo.platform.network.ledger import Ledger


class RayEngine:
    """Drives the actors; see `Engine` for what each method promises."""

    def __init__(self, config: RaySettings, ray: Any, work: Work, blocks: Blocks) -> None:
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
