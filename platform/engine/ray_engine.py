"""Run blocks in Ray actors: one actor per block, packets through the object store, failures detected by the driver.

A step of a block takes references to the packets that its neighbouring blocks sent in the step before. The driver
submits all steps of a round ahead and holds nothing but references, which it drops as soon as the next step is
submitted. It learns in the first round how many steps a round has. No actor restarts automatically: it would come back
without state, and raise nothing. The driver replaces what died, and the run rolls back.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Any

from dbo.algorithms.api import Array
from dbo.platform.config.engines import RaySettings
from dbo.platform.engine.base import Blocks, RunSpec, gather_rows, max_counts
from dbo.platform.engine.block import EVALUATED, BlockView, Progress, is_round_open
from dbo.platform.engine.placement import place_actors
from dbo.platform.engine.prometheus import RunGauges
from dbo.platform.engine.state_tree import Flat, chunk_names
from dbo.platform.errors import BlocksLost, NodeFailure, RunError
from dbo.platform.network.ledger import Ledger


class RayEngine:
    """Drive the actors; `Engine` documents the methods."""

    def __init__(self, settings: RaySettings, ray: Any, spec: RunSpec, blocks: Blocks) -> None:
        self._ray, self._settings, self._experiment, self._network = ray, settings, spec.experiment, spec.network
        self.blocks: Blocks = [list(ids) for ids in blocks]
        self._declared = 0 if spec.algorithm.packets is None else spec.algorithm.packets(spec.config)
        self._packets = self._declared                  # per node, expected in the next round
        owner = {node: number for number, ids in enumerate(self.blocks) for node in ids}
        self._neighbours = [
            sorted({owner[j] for i in ids for j in spec.network.neighbours[i]} - {number})
            for number, ids in enumerate(self.blocks)
        ]
        self._problem = ray.put(spec.problem)           # once: actors of a machine read the same memory
        self._network_ref = ray.put(spec.network)
        self._epoch = 0
        self._group = place_actors(ray, settings, [len(ids) for ids in self.blocks])
        self._failed = False
        self._views: list[BlockView] | None = None
        self._unassigned = set(range(len(self.blocks)))     # actors that have no block yet
        self._plugins = spec.plugins
        self._timed_out = False                         # a result is overdue; which actor hangs is unknown
        try:
            self._gauges = RunGauges(spec.experiment["name"], spec.algorithm.name)
            self._start_actors()
        except BaseException:
            self._group.release()
            raise

    @property
    def _actors(self) -> list[Any]:
        return self._group.actors

    def _start_actors(self) -> None:
        """Give every actor its block; retry if processes die meanwhile."""
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
        dead = list(range(len(self._actors))) if self._timed_out else self._find_dead()
        self._timed_out = False
        self._unassigned |= set(self._group.replace(dead))

    def _assign(self) -> None:
        if self._plugins:
            for number in sorted(self._unassigned):
                self._actors[number].load_plugins.remote(self._plugins)      # an actor runs its calls in order
        self._collect([
            self._actors[number].assign.remote(
                self._problem, self._experiment, self._network_ref, self.blocks[number], self._epoch, self._settings,
            )
            for number in sorted(self._unassigned)
        ], timeout=max(self._settings.step_timeout, self._settings.placement_timeout))    # processes start first
        self._unassigned.clear()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def advance(self, round_: int) -> None:
        start, self._views = time.perf_counter(), None
        payloads: list[Any] = []                        # references, never fetched here
        for number in range(self._packets):
            payloads = [actor.step.remote(*call) for actor, call in self._calls(round_, number, payloads)]
        progress: list[Progress]
        for number in count(self._packets):             # one step, unless the round is longer than expected
            results = [
                actor.report_step.options(num_returns=2).remote(*call)
                for actor, call in self._calls(round_, number, payloads)
            ]
            payloads = [payload for payload, _ in results]
            progress = self._collect([report for _, report in results])
            if not is_round_open(self.blocks, progress):
                break
        self._packets = progress[0].packets
        self._gauges.record_round(round_, time.perf_counter() - start)

    def _calls(self, round_: int, number: int, payloads: list[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield every actor with the arguments of its step; step 0 takes no payloads."""
        for actor, neighbours in zip(self._actors, self._neighbours, strict=True):
            yield actor, (self._epoch, round_, number, *(payloads[j] for j in neighbours if payloads))

    def export_metrics(self, record: Mapping[str, Any]) -> None:
        self._gauges.record_evaluation(record)

    def _fetch_views(self) -> list[BlockView]:
        """Fetch everything that an evaluation needs in one call per block; keep it until the state changes."""
        if self._views is None:
            self._views = self._collect([actor.view.remote() for actor in self._actors])
        return self._views

    def rows(self, name: str) -> Array | None:
        if name in EVALUATED:
            return gather_rows(self.blocks, [view.rows[name] for view in self._fetch_views()])
        # One block at a time, and without the views of the last evaluation, to limit memory in the object store.
        self._views = None
        parts = (self._collect([actor.rows.remote(name)])[0] for actor in self._actors)
        first = next(parts)
        return None if first is None else gather_rows(self.blocks, chain([first], parts))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        point = self._ray.put(x), self._ray.put(y)
        parts = self._collect([actor.losses.remote(*point) for actor in self._actors])
        return gather_rows(self.blocks, [f for f, _ in parts]), gather_rows(self.blocks, [g for _, g in parts])

    def first_nonfinite(self) -> str | None:
        return next((view.first_nonfinite for view in self._fetch_views() if view.first_nonfinite), None)

    def counters(self) -> Mapping[str, int]:
        return max_counts(view.counters for view in self._fetch_views())

    def ledger(self) -> Ledger:
        parts = []
        for ids, view in zip(self.blocks, self._fetch_views(), strict=True):
            part = Ledger(ids, self._network.degree[ids])
            part.restore(view.ledger)
            parts.append(part)
        return Ledger.merge(parts)

    # ---- checkpoints and recovery ----------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        self._views = None
        sizes: list[dict[str, int]] = self._collect([actor.sizes.remote() for actor in self._actors])
        for actor, of_block in zip(self._actors, sizes, strict=True):
            yield (self._collect([actor.snapshot.remote(names)])[0] for names in chunk_names(of_block))

    def restore(self, blocks: list[Flat] | None) -> None:
        self._epoch, self._views = self._epoch + 1, None
        if blocks is None:
            self._packets = self._declared
        flats = blocks if blocks is not None else [None] * len(self._actors)
        self._collect([
            actor.restore.remote(flat, self._epoch) for actor, flat in zip(self._actors, flats, strict=True)
        ])

    def replace_lost(self) -> None:
        """Replace actors that do not respond. If the cluster has lost their bundles, all actors are placed anew."""
        self._gauges.count_recovery()
        self._replace()
        self._assign()

    def close(self) -> None:
        """Release the actors, or keep them idle inside `reuse_actors` if the run has left them in order."""
        self._problem = self._network_ref = None
        if not self._ray.is_initialized():
            return
        if self._failed:
            self._group.release()
            return
        try:
            self._ray.get([actor.idle.remote() for actor in self._actors], timeout=5)
        except self._ray.exceptions.RayError:
            self._group.release()
        else:
            self._group.retire()

    def pids(self) -> list[int]:
        """Return the process ids of the actors."""
        pids: list[int] = self._collect([actor.ready.remote() for actor in self._actors])
        return pids

    def _find_dead(self) -> list[int]:
        """Return the numbers of the actors that do not respond."""
        refs = [actor.ready.remote() for actor in self._actors]
        self._ray.wait(refs, num_returns=len(refs), timeout=self._settings.placement_timeout)
        return [number for number, ref in enumerate(refs) if not self._has_result(ref)]

    def _has_result(self, ref: Any) -> bool:
        try:
            self._ray.get(ref, timeout=0)
        except self._ray.exceptions.RayError:
            return False
        return True

    def _collect(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """Fetch the values. Re-raise an exception in a node; everything else that fails is a lost process."""
        timeout = timeout or self._settings.step_timeout
        errors = self._ray.exceptions
        try:
            values: list[Any] = self._ray.get(refs, timeout=timeout)
            return values
        except errors.GetTimeoutError:
            # A process that hangs makes its neighbours wait too: all are replaced, which changes no result.
            self._timed_out = True
            reason = f"no answer within {timeout:g} s (engine.step_timeout)"
            raise BlocksLost(range(len(self._actors)), reason) from None
        except errors.RayError as error:
            if isinstance(error, errors.RayTaskError) and not isinstance(error.cause, errors.RayError):
                self._failed, cause = True, error.cause
                plain = RunError(f"{type(cause).__name__}: {cause}")
                raise (cause if isinstance(cause, NodeFailure) else plain) from None
            # Either a process died, or a step needs the packets of a dead one.
            failure = self._first_failure(refs)
            if failure is not None:
                self._failed = True
                raise failure from None
            raise BlocksLost(self._find_dead(), type(error).__name__) from None

    def _first_failure(self, refs: list[Any]) -> NodeFailure | None:
        """Return the failure of a node that raised while other blocks died; None if there is none."""
        self._ray.wait(refs, num_returns=len(refs), timeout=self._settings.step_timeout)
        for ref in refs:
            try:
                self._ray.get(ref, timeout=0)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, NodeFailure):
                    return error.cause
            except self._ray.exceptions.RayError:
                continue
        return None
