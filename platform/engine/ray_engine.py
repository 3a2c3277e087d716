"""Run blocks in Ray actors: one actor per block, failures detected by the driver.

Small packets between actors of one machine travel through sockets (`peer_sockets.py`), and one call per actor runs all
rounds up to the next evaluation. Otherwise packets travel through the object store. A step of a block takes references
to the packets that its neighbouring blocks sent in the step before. The driver submits all steps of a round ahead and
holds nothing but references, which it drops as soon as the next step is submitted. It learns in the first round how
many steps a round has.

No actor restarts automatically: it would come back without state, and raise nothing. The driver replaces what died, and
the run rolls back.

Whatever the driver waits for has a limit: `step_timeout` for work, `heartbeat_timeout` for signs of life
(`heartbeat.py`), and a few seconds for every step of the end.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from typing import Any, TypeVar

from dbo.algorithms.api import Array
from dbo.algorithms.kernels.fused import MIN_ENTRIES
from dbo.platform.config.engines import RaySettings
from dbo.platform.engine.base import Blocks, RunSpec, gather_rows, max_counts, mean_of_sums
from dbo.platform.engine.block import EVALUATED, BlockView, Progress, ProtocolError, is_round_open
from dbo.platform.engine.common_point import Floats, Oracle
from dbo.platform.engine.deadlines import call_within
from dbo.platform.engine.error_terms import merge_errors
from dbo.platform.engine.heartbeat import POLL_SECONDS, Heartbeats, Place
from dbo.platform.engine.peer_sockets import NeighbourLost
from dbo.platform.engine.placement import place_actors
from dbo.platform.engine.prometheus import RunGauges
from dbo.platform.engine.ray_actor import Reached
from dbo.platform.engine.ray_session import find_lost_process, leave_lost_cluster, list_stopped_workers
from dbo.platform.engine.state_tree import Flat, chunk_names
from dbo.platform.engine.wait_notices import WaitNotices
from dbo.platform.errors import BlocksLost, NodeFailure, RunError
from dbo.platform.network.ledger import Ledger

T = TypeVar("T")

_CLOSE_SECONDS = 10.0          # to release the actors of a run that has ended
_MAX_ROUNDS = 100              # that one call runs
_DEATH_SECONDS = 3.0           # for Ray to report the death of an actor whose process was killed
_MACHINE_SECONDS = 120.0       # for Ray to decide whether a silent machine is dead


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
        # Of each block: neighbouring block → the nodes whose packets it needs.
        self._links: list[dict[int, list[int]]] = [
            {peer: [i for i in ids if any(owner[j] == peer for j in spec.network.neighbours[i])] for peer in peers}
            for ids, peers in zip(self.blocks, self._neighbours, strict=True)
        ]
        # Large packets are cheaper in the object store: processes of one machine share them without copies.
        is_small = max(spec.problem.dim_x, spec.problem.dim_y) < MIN_ENTRIES
        self._use_sockets = settings.transport == "auto" and is_small
        self._connected = -1                            # epoch of the sockets
        self._notify, self._notices = spec.notify, WaitNotices(spec.notify)
        self._problem = self._put(spec.problem)         # once: actors of a machine read the same memory
        self._network_ref = self._put(spec.network)
        self._epoch = 0
        self._group = place_actors(ray, settings, [len(ids) for ids in self.blocks], spec.notify)
        self._heartbeats = Heartbeats(ray, settings.heartbeat_timeout)
        self._silent: set[int] = set()                  # blocks without a sign of life
        self._failed = False
        self._views: list[BlockView] | None = None
        self._errors: dict[str, float] = {}             # of the views
        self._point: dict[str, tuple[Array, Any]] = {}      # x and y of the last common point, and references to them
        self._unassigned = set(range(len(self.blocks)))     # actors that have no block yet
        self._stopped_workers: dict[int, float] = {}    # killed before their actors answered: process → when
        self._plugins = spec.plugins
        self._timed_out = False                         # a result is overdue; which actor hangs is unknown
        try:
            self._gauges = RunGauges(spec.experiment["name"], spec.algorithm.name)
            self._start_actors()
        except BaseException:
            self._heartbeats.close()
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
                self._notify(f"{lost}; starting them again")
        raise RunError(f"the actors cannot be started: {reason}")

    def _replace(self) -> None:
        dead = list(range(len(self._actors)))
        if not self._timed_out:
            silent = sorted(self._silent)
            self._heartbeats.end(silent)
            self._group.kill(silent)                    # what waits for their packets fails now
            self._wait_for_machines(self._heartbeats.machines_of(silent))
            dead = sorted({*silent, *self._find_dead(set(dead) - self._silent)})
        self._timed_out = False
        self._silent.clear()
        self._heartbeats.forget(dead)
        replaced = self._group.replace(dead)
        self._heartbeats.forget(replaced)
        self._unassigned |= set(replaced)

    def _wait_for_machines(self, machines: set[str]) -> None:
        """Wait until Ray has dropped the silent machines, or they answer again: until then it places actors there."""
        start = time.monotonic()
        self._notices.begin("machines")
        while machines and (waited := time.monotonic() - start) < _MACHINE_SECONDS:
            with suppress(TimeoutError):
                alive = {node["NodeID"] for node in call_within(5.0, self._ray.nodes) if node["Alive"]}
                machines = {name for name in machines & alive if not self._heartbeats.has_answered(name)}
            self._notices.report(f"waiting for Ray to drop {len(machines)} silent machine(s)", waited, _MACHINE_SECONDS)
            time.sleep(0.5 if machines else 0)

    def _assign(self) -> None:
        blocks = sorted(self._unassigned)
        self._stopped_workers.clear()
        places: list[Place] = self._collect(
            [self._actors[number].locate.remote() for number in blocks], timeout=self._settings.placement_timeout,
            blocks=blocks, task="the start of their processes", option="engine.placement_timeout")
        self._heartbeats.watch(dict(zip(blocks, places, strict=True)))
        self._stopped_workers.clear()                   # of no actor of this run
        if self._plugins:
            for number in blocks:
                self._actors[number].load_plugins.remote(self._plugins)      # an actor runs its calls in order
        self._collect([
            self._actors[number].assign.remote(
                self._problem, self._experiment, self._network_ref, self.blocks[number], self._epoch, self._settings,
            )
            for number in blocks
        ], blocks=blocks, task="their data")
        self._unassigned.clear()

    # ---- rounds ----------------------------------------------------------------------------------------------------

    def advance(self, first: int, last: int | None = None) -> None:
        last, self._views = last or first, None
        self._point.clear()
        most = _MAX_ROUNDS if len(self._actors) > 1 else 1      # the only block has no neighbour that misses it
        if not self._connect_peers():
            for round_ in range(first, last + 1):
                self._advance_by_steps(round_)
            return
        for start in range(first, last + 1, most):
            self._run_rounds(start, min(start + most - 1, last))

    def _connect_peers(self) -> bool:
        """Connect the sockets of this epoch; return False if packets must travel through the object store."""
        machines = {place.machine for place in self._heartbeats.places.values()}
        if not self._use_sockets or len(machines) > 1:
            return False
        if self._connected == self._epoch:
            return True
        paths: list[str | None] = self._collect([
            actor.listen.remote(self._epoch, number, self._links[number], self._settings.step_timeout)
            for number, actor in enumerate(self._actors)
        ], task="sockets")
        if None not in paths:
            known = dict(enumerate(paths))
            is_connected = all(self._collect([
                actor.connect.remote({peer: known[peer] for peer in links})
                for actor, links in zip(self._actors, self._links, strict=True)
            ], task="sockets"))
            if is_connected and all(self._collect([actor.accept.remote() for actor in self._actors], task="sockets")):
                self._connected = self._epoch
                return True
        self._use_sockets = False
        return False

    def _run_rounds(self, first: int, last: int) -> None:
        """Run rounds in one call per actor; whoever waits for a neighbour's packets observes `step_timeout`."""
        start, rounds = time.perf_counter(), last - first + 1
        task = f"round {first}" if rounds == 1 else f"rounds {first} to {last}"
        reached: list[Reached] = self._collect(
            [actor.run_rounds.remote(self._epoch, first, last) for actor in self._actors],
            timeout=self._settings.step_timeout * rounds, task=task)
        last_common = min(each.round for each in reached)
        progress = [
            each.progress if each.round == last_common else Progress(each.before, is_open=False) for each in reached]
        if is_round_open(self.blocks, progress) or last_common < last:
            raise ProtocolError(f"the blocks stopped in round {last_common}")
        self._gauges.record_round(last, (time.perf_counter() - start) / rounds)

    def _advance_by_steps(self, round_: int) -> None:
        """Run a round in one call per actor and step."""
        start = time.perf_counter()
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
            progress = self._collect([report for _, report in results], task=f"round {round_}")
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
        """Fetch what an evaluation needs in one call per block; keep it until the state changes.

        Wide rows are fetched one block at a time, when they are needed, to limit memory in the object store.
        """
        if self._views is None:
            self._views = self._collect([actor.view.remote() for actor in self._actors], task="an evaluation")
            self._errors = merge_errors([view.errors for view in self._views])
            if not self._views[0].rows:
                self._release_rows()
        return self._views

    def _release_rows(self) -> None:
        """Free the rows of the last evaluation in the object store; keep the rest of it, which is small."""
        if self._views is not None:
            self._views = [view.without_rows() for view in self._views]

    def rows(self, name: str) -> Array | None:
        if name in EVALUATED and name in self._fetch_views()[0].rows:
            return gather_rows(self.blocks, [view.rows[name] for view in self._fetch_views()])
        self._release_rows()
        parts = (
            self._collect([actor.rows.remote(name)], blocks=[number], task=f"rows of {name}")[0]
            for number, actor in enumerate(self._actors)
        )
        first = next(parts)
        return None if first is None else gather_rows(self.blocks, chain([first], parts))

    def losses(self, x: Array, y: Array) -> tuple[Array, Array]:
        point = self._put(x), self._put(y)
        parts = self._collect([actor.losses.remote(*point) for actor in self._actors], task="an evaluation")
        return gather_rows(self.blocks, [f for f, _ in parts]), gather_rows(self.blocks, [g for _, g in parts])

    def mean_oracle(self, oracle: Oracle, x: Array, y: Array, v: Array | None = None) -> Floats:
        self._release_rows()
        point = self._put_again("x", x), self._put_again("y", y), None if v is None else self._put(v)
        sums = self._collect([actor.sum_oracle.remote(oracle, *point) for actor in self._actors], task="an evaluation")
        return mean_of_sums(self.blocks, sums)

    def _put_again(self, name: str, row: Array) -> Any:
        """Return a reference to x or y of a common point: the last one, if it is the same array."""
        if name not in self._point or self._point[name][0] is not row:
            self._point.pop(name, None)
            self._point[name] = row, self._put(row)
        return self._point[name][1]

    def errors(self) -> dict[str, float]:
        self._fetch_views()
        return dict(self._errors)

    def first_nonfinite(self) -> str | None:
        return next((view.first_nonfinite for view in self._fetch_views() if view.first_nonfinite), None)

    def counters(self) -> Mapping[str, int]:
        return max_counts(view.counters for view in self._fetch_views())

    def count_hosts(self) -> int:
        return len({place.machine for place in self._heartbeats.places.values()})

    def compute_seconds(self) -> list[float]:
        return [view.seconds for view in self._fetch_views()]

    def ledger(self) -> Ledger:
        parts = []
        for ids, view in zip(self.blocks, self._fetch_views(), strict=True):
            part = Ledger(ids, self._network.degree[ids])
            part.restore(view.ledger)
            parts.append(part)
        return Ledger.merge(parts)

    # ---- checkpoints and recovery ----------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[Iterator[Flat]]:
        self._release_rows()
        self._point.clear()
        sizes: list[dict[str, int]] = self._collect(
            [actor.sizes.remote() for actor in self._actors], task="a checkpoint")
        for number, of_block in enumerate(sizes):
            yield self._fetch_chunks(number, of_block)

    def _fetch_chunks(self, number: int, sizes: Mapping[str, int]) -> Iterator[Flat]:
        for names in chunk_names(sizes):
            yield self._collect(
                [self._actors[number].snapshot.remote(names)], blocks=[number], task="a checkpoint")[0]

    def restore(self, blocks: list[Flat] | None) -> None:
        self._epoch, self._views = self._epoch + 1, None
        self._point.clear()
        if blocks is None:
            self._packets = self._declared
        flats = blocks if blocks is not None else [None] * len(self._actors)
        self._collect(self._submit(lambda: [
            actor.restore.remote(flat, self._epoch) for actor, flat in zip(self._actors, flats, strict=True)
        ]), task="the state of a checkpoint")

    def replace_lost(self) -> None:
        """Replace actors that do not respond. If the cluster has lost their bundles, all actors are placed anew."""
        self._gauges.count_recovery()
        self._replace()
        self._assign()

    def close(self) -> None:
        """Release the actors, or keep them idle inside `reuse_actors` if the run has left them in order.

        How a run has ended is recorded by now: whatever fails here changes nothing about it.
        """
        self._problem = self._network_ref = None
        self._point.clear()
        if not self._ray.is_initialized():
            return
        try:
            call_within(_CLOSE_SECONDS, self._end_actors)
        except Exception as error:
            self._notify(f"the actors were not released: {error or type(error).__name__}")
        leave_lost_cluster()

    def _end_actors(self) -> None:
        self._heartbeats.close()
        if self._failed:
            self._group.release()
            return
        try:
            self._ray.get([actor.idle.remote() for actor in self._actors], timeout=_CLOSE_SECONDS / 2)
        except self._ray.exceptions.RayError:
            self._group.release()
        else:
            self._group.retire()

    def pids(self) -> list[int]:
        """Return the process ids of the actors."""
        pids: list[int] = self._collect([actor.ready.remote() for actor in self._actors])
        return pids

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _put(self, value: Any) -> Any:
        return self._submit(lambda: self._ray.put(value))

    def _submit(self, call: Callable[[], T]) -> T:
        """Hand data to the object store of this machine, which blocks for ever if its raylet does not answer."""
        limit = self._settings.step_timeout

        def look(waited: float) -> None:
            if waited > self._settings.heartbeat_timeout and (lost := find_lost_process(["raylet"])):
                raise RunError(lost)
            self._notices.report("waiting for Ray's object store on this machine", waited, limit)

        self._notices.begin("store")
        try:
            return call_within(limit, call, look)
        except TimeoutError as error:
            reason = find_lost_process() or f"Ray's object store on this machine: {error} (engine.step_timeout)"
            raise RunError(reason) from None

    def _find_dead(self, blocks: set[int]) -> list[int]:
        """Return which of these blocks have no actor that responds."""
        numbers = sorted(blocks)
        refs = [self._actors[number].ready.remote() for number in numbers]
        with suppress(BlocksLost, self._ray.exceptions.GetTimeoutError):
            self._wait(refs, numbers, self._settings.placement_timeout, "the other actors", is_any_error_final=False)
        return [number for number, ref in zip(numbers, refs, strict=True) if not self._has_result(ref)]

    def _has_result(self, ref: Any) -> bool:
        try:
            self._ray.get(ref, timeout=0)
        except self._ray.exceptions.RayError:
            return False
        return True

    def _has_failed(self, ref: Any) -> bool:
        errors = self._ray.exceptions
        try:
            self._ray.get(ref, timeout=0)
        except errors.GetTimeoutError:
            return False                                # it is there, on another machine
        except errors.RayError:
            return True
        return False

    def _wait(
        self, refs: list[Any], blocks: Sequence[int], timeout: float, task: str, is_any_error_final: bool = True
    ) -> None:
        """Wait until all results exist somewhere, or one has failed; raise `BlocksLost` if an actor is silent.

        Nothing is fetched: giving up and fetching again every few seconds would restart long transfers for ever.
        """
        start, kind = time.monotonic(), task.partition(" ")[0]
        self._notices.begin(kind)
        self._heartbeats.begin()
        while True:
            ready, pending = self._ray.wait(
                refs, num_returns=len(refs), timeout=POLL_SECONDS, fetch_local=False)
            waited = time.monotonic() - start
            if not pending or (is_any_error_final and any(map(self._has_failed, ready))):
                self._notices.end(kind, waited)
                return
            if lost := find_lost_process(["raylet"], or_stopped=False):     # rounds need no GCS
                raise RunError(lost)
            if self._unassigned - self._heartbeats.places.keys():
                self._end_stopped_workers(dict(zip(refs, blocks, strict=True)), ready)
            if silent := self._heartbeats.find_silent():
                self._silent |= silent.keys()
                raise BlocksLost(sorted(silent), next(iter(silent.values())))
            if waited > timeout:
                raise self._ray.exceptions.GetTimeoutError
            text = f"waiting for {len(pending)} of {len(blocks)} actors, {task}"
            self._notices.report(text, waited, timeout)

    def _end_stopped_workers(self, blocks: Mapping[Any, int], ready: Sequence[Any]) -> None:
        """Kill workers that are stopped before their actor has answered; raise `BlocksLost` if Ray reports no death.

        Ray fails the call of the actor that a killed process hosted, and only that one is replaced. But it needs a
        minute to miss a process that had no actor yet: then all actors that have not answered start again.
        """
        located = {place.pid for place in self._heartbeats.places.values()}
        ended = self._heartbeats.end_stopped(set(list_stopped_workers()) - located)
        self._stopped_workers |= dict.fromkeys(ended, time.monotonic())
        if not self._stopped_workers or time.monotonic() - max(self._stopped_workers.values()) < _DEATH_SECONDS:
            return
        if not any(map(self._has_failed, ready)):
            missing = sorted(number for ref, number in blocks.items() if ref not in ready)
            self._silent |= set(missing)
            raise BlocksLost(missing, _describe_stopped(self._stopped_workers))

    def _collect(
        self, refs: list[Any], timeout: float | None = None, blocks: Sequence[int] | None = None,
        task: str = "an answer", option: str = "engine.step_timeout",
    ) -> list[Any]:
        """Fetch the values. Re-raise an exception in a node; everything else that fails is a lost process."""
        timeout, blocks = timeout or self._settings.step_timeout, blocks or range(len(self._actors))
        errors, start = self._ray.exceptions, time.monotonic()
        try:
            values: list[Any]
            try:
                values = self._ray.get(refs, timeout=min(timeout, POLL_SECONDS))
            except errors.GetTimeoutError:
                self._wait(refs, blocks, timeout - POLL_SECONDS, task)
                values = self._ray.get(refs, timeout=max(POLL_SECONDS, start + timeout - time.monotonic()))
            return values
        except errors.GetTimeoutError:
            # A process that hangs makes its neighbours wait too: all are replaced, which changes no result.
            self._timed_out = True
            reason = f"no answer within {timeout:g} s ({option})"
            raise BlocksLost(range(len(self._actors)), reason) from None
        except errors.RayError as error:
            cause = error.cause if isinstance(error, errors.RayTaskError) else error
            if not isinstance(cause, errors.RayError | NeighbourLost):
                self._failed = True
                plain = RunError(f"{type(cause).__name__}: {cause}")
                raise (cause if isinstance(cause, NodeFailure) else plain) from None
            # Either a process died, or a step needs the packets of a dead one.
            if lost := find_lost_process():
                raise RunError(lost) from None
            failure = self._first_failure(refs)
            if failure is not None:
                self._failed = True
                raise failure from None
            reason = _describe_stopped(self._stopped_workers) if self._stopped_workers else _describe(cause)
            raise BlocksLost(self._find_dead(set(range(len(self._actors)))), reason) from None

    def _first_failure(self, refs: list[Any]) -> NodeFailure | None:
        """Return the failure of a node that raised while other blocks died; None if there is none.

        One that comes later than a heartbeat may is raised again when the rounds are replayed.
        """
        self._ray.wait(refs, num_returns=len(refs), timeout=self._settings.heartbeat_timeout, fetch_local=False)
        for ref in refs:
            try:
                self._ray.get(ref, timeout=0)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, NodeFailure):
                    return error.cause
            except self._ray.exceptions.RayError:
                continue
        return None


def _describe_stopped(workers: Iterable[int]) -> str:
    return f"process {', '.join(map(str, workers))} was stopped before its actor answered"


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, NeighbourLost) else type(error).__name__
