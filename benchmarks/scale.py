"""Measure 10,000 nodes in one process: a round per node, an evaluation, and the files and pages of a run.

Coefficient tuning on synthetic text of the digits' dimensions (64 features, 10 classes), K = 5, exponential graph. The
ratios of one run: a node's share of a round relative to that with 1,000 nodes, and an evaluation relative to a round,
of all nodes and of a sample. Then a whole run is recorded, and its checkpoint is loaded and saved again. The run is
lengthened to 400 evaluations, and read in every way.

    python benchmarks/scale.py [--quick] [--files]
"""

import argparse
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import measure
import numpy as np
from engine import many_nodes, per_node, start

from dbo.dashboards.outputs import export_report
from dbo.dashboards.watch.runs import WatchedFolder
from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.evaluation import evaluate
from dbo.platform.runs.checkpoints import Checkpoints
from dbo.platform.runs.node_lines import read_sent
from dbo.platform.runs.replay import read_traffic
from dbo.platform.runs.run_folder import RunFolder, read_metrics, read_summary
from dbo.platform.runs.runner import prepare, run
from dbo.platform.runs.seal import measure_files, seal_run
from dbo.platform.tracking.reader import write_nodes_table


def measure_ratios(few: int, many: int, warm_up: int, repeats: int) -> None:
    """Compare rounds with few and with many nodes, and evaluations with rounds."""
    with ExitStack() as open_engines:
        rounds, evaluations = {}, {}
        for count in (few, many):
            experiment = many_nodes(count)
            made, parts = prepare(experiment), experiment.parts
            advance = open_engines.enter_context(start(LocalSettings(), experiment, made))
            advance(warm_up)
            rounds[f"a node's share of a round, {count:,} nodes"] = per_node(
                measure.time_rounds(advance, many // count), count)
        engine = advance.engine
        for what, nodes in (("all nodes", "all"), (f"{many // 10:,} nodes", many // 10)):
            evaluations[f"an evaluation of {what}"] = measure.time_rounds(
                lambda nodes=nodes: evaluate(engine, made.problem, parts.algorithm, parts.config, nodes), 1)
        times = measure.run_in_turn({**rounds, **evaluations}, repeats, warm_up=1)
    for name, found in times.items():
        per = 1e6 if name in rounds else 1e3
        unit = "µs" if name in rounds else "ms"
        print(f"  {name:<44}{found.best * per:9.1f} {unit}   median {found.middle * per:9.1f} {unit}", flush=True)
    of_few, of_many, all_nodes, sample = times.values()
    whole = measure.Times(tuple(seconds * many for seconds in of_many.seconds))
    measure.judge(f"a node's share, {many:,} : {few:,} nodes", of_many, of_few, most=1.3)
    measure.judge("an evaluation of all nodes : a round", all_nodes, whole, most=2)
    measure.judge("an evaluation of a sample : a round", sample, whole, most=2)


def measure_run(count: int, rounds: int) -> None:
    """Record a run with many nodes; print the sizes of its files and the seconds of everything that reads them."""
    experiment = Experiment(**{
        **many_nodes(count).to_dict(), "rounds": rounds, "eval_every": 2, "checkpoint_every": rounds,
        "engine": {"name": "local"}, "tracking": {"uri": "off"},
    })
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run(experiment, folder)
        checkpoint = sum(path.stat().st_size for path in folder.rglob("checkpoints/*/*"))
        print(f"  a checkpoint            {checkpoint / 1e6:9.2f} MB", flush=True)
        measure_checkpoint(folder / "checkpoints", Path(temporary) / "again" / "checkpoints", repeats=3)
        measure_readers(folder)
        print(f"the same with {_LONG} evaluations, repeated from the last one", flush=True)
        repeat_last(folder, _LONG)
        measure_readers(folder)


def measure_checkpoint(source: Path, target: Path, repeats: int) -> None:
    """Print the least time to load the newest checkpoint, checksums included, and to save it elsewhere durably."""
    loads, saves = [], []
    for _ in range(repeats):
        begin = _read_clocks()
        checkpoint = Checkpoints(source, "", allow_other=True).load_latest()
        loads.append(_read_clocks() - begin)
        assert checkpoint is not None
        begin = _read_clocks()
        Checkpoints(target, checkpoint.trajectory).save(
            checkpoint.round, ([block] for block in checkpoint.blocks), checkpoint.run)
        saves.append(_read_clocks() - begin)
    for what, times in (("load the checkpoint", loads), ("save a checkpoint", saves)):
        wall, processor = np.min(times, axis=0)
        print(f"  {what:<32}{wall:6.2f} s, {processor:6.2f} s of the processor", flush=True)


def _read_clocks() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def repeat_last(folder: Path, evaluations: int) -> None:
    """Append evaluations to a finished run, each with the traffic of the last interval, and seal it again."""
    files, summary = RunFolder(folder), read_summary(folder)
    assert summary is not None
    record, before, nodes = read_metrics(files.metrics)[-1], *read_metrics(files.nodes)[-2:]
    sent = read_sent(nodes)
    assert sent is not None
    step, numbers = sent - read_sent(before), np.random.default_rng(0)
    files.acquire()
    for number in range(1 + record["round"], evaluations):
        sent = sent + numbers.permutation(step)
        more = {**nodes, "round": number, "bytes": sent.astype(np.int64).tolist()}
        files.append({**record, "round": number, "bytes_links": record["bytes_links"] * number}, more)
    seal_run(files, summary, measure_files(files))
    files.release()


def measure_readers(folder: Path) -> None:
    """Print the sizes of the files, and the time and memory of everything that reads them, each in its own process."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:4]:
        print(f"  {name:<24}{size / 1e6:9.2f} MB", flush=True)
    lines = len((folder / "metrics.jsonl").read_text().splitlines())
    print(f"  a line of nodes.jsonl   {sizes['nodes.jsonl'] / lines / 1e3:9.1f} kB", flush=True)
    for what in _READERS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            seconds, memory = process.submit(_read, what, folder).result()
        print(f"  {what:<32}{seconds:6.2f} s of the processor, {memory:5.0f} MB at most", flush=True)
    print(f"  report.html             {(folder / 'report.html').stat().st_size / 1e6:9.2f} MB", flush=True)


def _open_details(folder: Path) -> None:
    watched = WatchedFolder(folder)
    assert watched.get_details(watched.get_updates("", -1)["order"][0]) is not None


def _read(what: str, folder: Path) -> tuple[float, float]:
    """Read a run folder in one of the ways; return the processor time and the peak memory in MB."""
    begin = time.process_time()
    _READERS[what](folder)
    status = Path("/proc/self/status").read_text()          # ru_maxrss would be that of the parent
    return time.process_time() - begin, int(status.partition("VmHWM:")[2].split()[0]) / 1024


_LONG = 400
_READERS = {
    "report": lambda folder: list(export_report([folder], folder / "report.html", None, None, None)),
    "live page, first look": lambda folder: WatchedFolder(folder).get_updates("", -1),
    "live page, one run": _open_details,
    "table of the nodes for MLflow": lambda folder: write_nodes_table(folder / "nodes.jsonl", folder / "nodes.parquet"),
    "traffic for dbo replay": read_traffic,
}


def main() -> None:
    options = argparse.ArgumentParser(description="Measure runs with 10,000 nodes.")
    options.add_argument("--quick", action="store_true", help="few nodes and repeats: does it run?")
    options.add_argument("--files", action="store_true", help="only the files of a run, and what reads them")
    given = options.parse_args()
    quick = given.quick
    few, many = (100, 1_000) if quick else (1_000, 10_000)
    print(f"{many:,} nodes: exponential graph, 64 features × 10 classes, K = 5, top-k 20 %, float32", flush=True)
    if not given.files:
        measure_ratios(few, many, warm_up=2 if quick else 4, repeats=2 if quick else 5)
    measure_run(many, rounds=4)


if __name__ == "__main__":
    main()
