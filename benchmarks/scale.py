"""Measure 10,000 nodes in one process: a round per node, an evaluation, and the files and pages of a run.

Coefficient tuning on synthetic text of the digits' dimensions (64 features, 10 classes), K = 5, exponential graph. The
ratios of one run: a node's share of a round relative to that with 1,000 nodes, and an evaluation relative to a round,
of all nodes and of a sample. Then a whole run is recorded, reported and read back.

    python benchmarks/scale.py [--quick]
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import measure
from engine import many_nodes, per_node, start

from dbo.dashboards.load import load_runs
from dbo.dashboards.outputs import export_report
from dbo.dashboards.watch.runs import WatchedFolder
from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.evaluation import evaluate
from dbo.platform.runs.runner import prepare, run
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
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        sizes["checkpoint"] = sum(path.stat().st_size for path in folder.rglob("checkpoints/*/*"))
        for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
            print(f"  {name:<24}{size / 1e6:9.2f} MB", flush=True)
        print(f"  a line of nodes.jsonl   {sizes['nodes.jsonl'] / (1 + rounds // 2) / 1e3:9.1f} kB", flush=True)
        page, table = folder / "report.html", folder / "nodes.parquet"
        for what, work in {
            "load": lambda: load_runs([folder]),
            "report": lambda: list(export_report([folder], page, None, None, None)),
            "live page, first look": lambda: WatchedFolder(folder).get_updates("", -1),
            "table of the nodes for MLflow": lambda: write_nodes_table(folder / "nodes.jsonl", table),
        }.items():
            begin = time.perf_counter()
            work()
            print(f"  {what:<32}{time.perf_counter() - begin:6.2f} s", flush=True)
        print(f"  report.html             {page.stat().st_size / 1e6:9.2f} MB", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description="Measure runs with 10,000 nodes.")
    options.add_argument("--quick", action="store_true", help="few nodes and repeats: does it run?")
    quick = options.parse_args().quick
    few, many = (100, 1_000) if quick else (1_000, 10_000)
    print(f"{many:,} nodes: exponential graph, 64 features × 10 classes, K = 5, top-k 20 %, float32", flush=True)
    measure_ratios(few, many, warm_up=2 if quick else 4, repeats=2 if quick else 5)
    measure_run(many, rounds=4)


if __name__ == "__main__":
    main()
