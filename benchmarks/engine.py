"""Compare engines: Ray with the local engine and with torch.distributed, and the cost of more nodes.

    small   digits, 10 nodes, ring, K = 15: Ray with `auto` packing, gloo processes that send message by message, and
            the local engine
    rounds  digits, 10 nodes, ring, D-SOBA (one packet per round), rounds without evaluations in between: Ray with 2 and
            with 10 actors, gloo processes, and the local engine
    large   2.03 million parameters per node, the size of 20 Newsgroups: Ray with `auto` packing and the local engine
    nodes   1,000 nodes in the local engine: time per node and round relative to 100 nodes, and memory per node

Without --part all of them run. Every server listens on loopback and ends with the program.

    python benchmarks/engine.py [--part small|rounds|large|nodes] [--quick]
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gloo
import measure
import numpy as np
from round import RATIO, STEPS, digits, local

from dbo.platform.config.engines import EngineSettings, LocalSettings, RaySettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import RunSpec
from dbo.platform.engine.factory import start_engine
from dbo.platform.runs.runner import Prepared, prepare

PROC = Path("/proc")    # only on Linux: elsewhere memory and CPU times are not measured
SOBA_STEPS = {"eta_x": 0.01, "eta_y": 0.1, "eta_v": 0.1, "theta": 0.3}
DENSE: dict[str, Any] = {"name": "c2dfb", **STEPS, "compressor": {"name": "identity"}}
TOP_K = {"name": "top_k", "ratio": RATIO}


class Rounds:
    """Advance an engine by one round per call."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.done = engine, 0

    def __call__(self, rounds: int = 1) -> None:
        self.engine.advance(self.done + 1, self.done + rounds)
        self.done += rounds

    def in_a_row(self, rounds: int) -> measure.Timed:
        """Return a function that runs so many rounds at once and returns the seconds of one round."""
        timed = measure.time_rounds(lambda: self(rounds), 1)
        return lambda: timed() / rounds


@contextmanager
def start(settings: EngineSettings, experiment: Experiment, made: Prepared) -> Iterator[Rounds]:
    """Start an engine; close it at the end of the context."""
    parts = experiment.parts
    engine = start_engine(
        settings, RunSpec(parts.algorithm, parts.config, made.problem, made.network, experiment.to_dict()))
    try:
        yield Rounds(engine)
    finally:
        engine.close()


def describe_packing(rounds: Rounds) -> str:
    sizes = [len(ids) for ids in rounds.engine.blocks]
    return f"Ray, {len(sizes)} actors × {max(sizes)} rows"


def small(quick: bool) -> None:
    """Measure messages of a few hundred bytes: latency dominates."""
    nodes = 4 if quick else 10
    print(f"small messages: digits, {nodes} nodes, ring, K = 15, top-k 20 %, float32", flush=True)
    experiment = digits(nodes=nodes)
    made = prepare(experiment)
    rounds, repeats = (1, 2) if quick else (3, 15)
    with start(LocalSettings(), experiment, made) as inside, start(RaySettings(), experiment, made) as on_ray:
        actors, peers = describe_packing(on_ray), f"gloo, {nodes} processes"
        variants = {
            "in process": measure.time_rounds(inside, rounds), actors: measure.time_rounds(on_ray, rounds),
        }
        if find_spec("torch") is None:
            print("  torch is not installed: no comparison with gloo", flush=True)
            times = measure.run_in_turn(variants, repeats)
            measure.show(times)
        else:
            check_gloo(nodes)
            cut = gloo.split(made.problem, made.network, STEPS, RATIO, experiment.dtype)
            with gloo.network(cut) as processes:
                times = measure.run_in_turn(
                    {**variants, peers: lambda: processes.advance(rounds)[0]}, repeats
                )
            measure.show(times)
            measure.judge("gloo, message by message : Ray", times[peers], times[actors], least=5)
        measure.judge("Ray : in process", times[actors], times["in process"], most=4)


def rounds(quick: bool) -> None:
    """Measure rounds of one packet: calls and latency dominate."""
    nodes, count, repeats = (4, 10, 2) if quick else (10, 100, 10)
    print(f"small rounds: digits, {nodes} nodes, ring, D-SOBA, float32, {count} rounds without evaluations", flush=True)
    experiment = Experiment(**{**digits(nodes=nodes).to_dict(), "algorithm": {"name": "d_soba", **SOBA_STEPS}})
    made, peers = prepare(experiment), f"gloo, {nodes} processes"
    with ExitStack() as engines:
        inside = engines.enter_context(start(LocalSettings(), experiment, made))
        few, many = (
            engines.enter_context(start(RaySettings(nodes_per_actor=rows), experiment, made))
            for rows in (nodes // 2, 1)
        )
        variants = {
            "in process": inside.in_a_row(count), describe_packing(few): few.in_a_row(count),
            describe_packing(many): many.in_a_row(count),
        }
        if find_spec("torch") is not None:
            check_gloo(nodes, {"name": "d_soba", **SOBA_STEPS}, SOBA_STEPS)
            cut = gloo.split(made.problem, made.network, SOBA_STEPS, 1.0, experiment.dtype)
            processes = engines.enter_context(gloo.network(cut))
            variants[peers] = lambda: processes.advance(count)[0]
        times = measure.run_in_turn(variants, repeats)
    measure.show(times)
    measure.judge("Ray, 2 actors : in process", times[describe_packing(few)], times["in process"], most=3.3)
    if peers in times:
        measure.judge(f"Ray, {nodes} actors : {peers}", times[describe_packing(many)], times[peers], most=1)


def check_gloo(nodes: int, algorithm: dict[str, Any] = DENSE, steps: dict[str, float] = STEPS) -> None:
    """Check that gloo runs the same algorithm. Dense messages: with top-k, ties are broken differently."""
    experiment = Experiment(**{**digits("float64", nodes).to_dict(), "algorithm": algorithm})
    made, inside, rounds = prepare(experiment), local(experiment), 5
    with gloo.network(gloo.split(made.problem, made.network, steps, 1.0, experiment.dtype)) as processes:
        _, x = processes.advance(rounds)
    for round_ in range(1, rounds + 1):
        inside.advance(round_)
    np.testing.assert_allclose(np.asarray(inside.rows("x")), x, rtol=1e-7, atol=1e-12)
    assert np.abs(x).max() > 0, "x is still at its start: the comparison is void"
    print(f"  gloo and in process: the same x after {rounds} rounds in float64, relative 1e-7", flush=True)


def large(quick: bool) -> None:
    """Measure messages of megabytes: copies dominate."""
    features, documents, inner_steps = (2_000, 1_000, 2) if quick else (101_631, 18_846, 3)
    experiment = Experiment(
        nodes=10, dtype="float32", topology={"name": "ring"}, partition={"name": "by_class", "h": 0.8},
        task={
            "name": "coefficient_tuning", "dataset": "synthetic_text", "features": features, "classes": 20,
            "documents": documents,
        },
        algorithm={"name": "c2dfb", **STEPS, "inner_steps": inner_steps, "compressor": TOP_K},
    )
    made = prepare(experiment)
    print(
        f"large messages: synthetic text, {made.problem.dim_y / 1e6:.2f} million parameters per node, 10 nodes, ring, "
        f"K = {inner_steps}, top-k 20 %, float32", flush=True,
    )
    with start(LocalSettings(), experiment, made) as inside, start(RaySettings(), experiment, made) as on_ray:
        actors = describe_packing(on_ray)
        pids = on_ray.engine.pids()
        times = measure.run_in_turn(
            {"in process": measure.time_rounds(inside, 1), actors: measure.time_rounds(on_ray, 1)},
            repeats=2 if quick else 4, warm_up=1 if quick else 3,      # until the processes have all their memory
        )
        measure.show(times)
        measure.judge("Ray : in process", times[actors], times["in process"], most=1.15)
        if PROC.exists():
            # On a busy machine two processes wait for each other; their CPU time does not depend on that.
            alone, before = cpu_seconds(os.getpid()), [cpu_seconds(pid) for pid in pids]
            inside()
            alone = cpu_seconds(os.getpid()) - alone
            on_ray()
            used = [cpu_seconds(pid) - then for pid, then in zip(pids, before, strict=True)]
            actors = " + ".join(f"{seconds:.2f}" for seconds in used)
            print(f"  CPU seconds of a round: in process {alone:.2f}, actors {actors}", flush=True)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in user and kernel mode."""
    after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def many_nodes(nodes: int) -> Experiment:
    """Return a network of this size, with the same amount of data per node; the dimensions of digits."""
    return Experiment(
        nodes=nodes, dtype="float32", topology={"name": "exponential"}, partition={"name": "iid"},
        task={
            "name": "coefficient_tuning", "dataset": "synthetic_text", "features": 64, "classes": 10, "words": 30,
            "documents": 25 * nodes, "test_fraction": 0.2,
        },
        algorithm={"name": "c2dfb", **STEPS, "inner_steps": 5, "compressor": TOP_K},
    )


def peak_memory(nodes: int) -> int:
    """Return the peak bytes of this process after some rounds with so many nodes; run it in a new process."""
    experiment = many_nodes(nodes)
    with start(LocalSettings(), experiment, prepare(experiment)) as advance:
        for _ in range(3):
            advance()
    # The kernel's count for this program alone; getrusage also includes the parent that it was forked from.
    line = next(line for line in (PROC / "self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def per_node(timed: measure.Timed, count: int) -> measure.Timed:
    return lambda: timed() / count


def nodes(quick: bool) -> None:
    """Measure the cost of one more node."""
    few, many = (20, 100) if quick else (100, 1_000)
    print(
        "many nodes: exponential graph, in process, synthetic text of the digits' dimensions (64 × 10; the digits "
        "themselves\nhave too few samples for 1,000 nodes), 10 + 10 samples per node, K = 5, top-k 20 %, float32",
        flush=True,
    )
    with ExitStack() as open_engines:
        variants: dict[str, measure.Timed] = {}
        for count in (few, many):
            experiment = many_nodes(count)
            advance = open_engines.enter_context(start(LocalSettings(), experiment, prepare(experiment)))
            timed = measure.time_rounds(advance, many // count)
            variants[f"{count} nodes, per node and round"] = per_node(timed, count)
        times = measure.run_in_turn(variants, repeats=2 if quick else 25)
    for name, found in times.items():
        print(f"  {name:<44}{found.best * 1e6:9.2f} µs   median {found.middle * 1e6:9.2f} µs", flush=True)
    of_few, of_many = times.values()
    measure.judge(f"{many} nodes : {few} nodes", of_many, of_few, most=1.5)
    if not PROC.exists():
        print("  memory: not measured, there is no /proc here", flush=True)
        return
    used = []
    for count in (few, many):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            used.append(pool.submit(peak_memory, count).result())
    print(
        f"  memory: peak {used[0] / 2**20:.0f} MiB with {few} nodes, {used[1] / 2**20:.0f} MiB with {many}: "
        f"{(used[1] - used[0]) / (many - few) / 1024:.0f} KiB per node more", flush=True,
    )


PARTS: dict[str, Callable[[bool], None]] = {"small": small, "rounds": rounds, "large": large, "nodes": nodes}


def main() -> None:
    options: Any = argparse.ArgumentParser(description="Compare engines, as ratios.")
    options.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be repeated")
    options.add_argument("--quick", action="store_true", help="small and few repeats: does it run?")
    chosen = options.parse_args()
    busy = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load {busy:.1f} at the start: only ratios are meaningful", flush=True)
    try:
        for name in chosen.part or PARTS:
            PARTS[name](chosen.quick)
    finally:
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()


if __name__ == "__main__":
    main()
