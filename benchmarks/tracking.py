"""Measure the cost of tracking for a run, with the MLflow server up, down, and down for a while.

The first part compares the training time of one run on the digits, alone and with the background process. It does not
count the time that the command waits for the process at the end. The second part kills a real server in the middle of a
run, restarts it after --outage seconds, and counts lost and doubled points.

    python benchmarks/tracking.py [--quick] [--outage SECONDS] [--part cost] [--part outage]
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
from mlflow_server import Server, serving

from dbo.platform.config.experiment import Experiment
from dbo.platform.runs.run_folder import read_metrics
from dbo.platform.runs.runner import prepare, run
from dbo.platform.tracking.client import mlflow_environment
from dbo.platform.tracking.process import follow_in_background
from dbo.platform.tracking.sync import sync_folder

NOWHERE = "http://127.0.0.1:9"           # the discard port: no server


def digits(rounds: int, seed: int = 0) -> Experiment:
    return Experiment(rounds=rounds, seed=seed, engine={"name": "local"}, tracking={"uri": "off"})


class Slowdown:
    """Callback that pauses at every evaluation and calls functions at some rounds."""

    def __init__(self, pause: float, at: dict[int, Callable[[], None]]) -> None:
        self._pause, self._at = pause, at

    def on_start(self, experiment: Any, done: int) -> None: ...

    def on_evaluation(self, record: dict[str, Any]) -> None:
        time.sleep(self._pause)
        self._at.get(record["round"], lambda: None)()

    def on_notice(self, text: str) -> None: ...
    def on_end(self, result: Any) -> None: ...


def measure_cost(rounds: int, repeats: int, folder: Path, server: Server) -> None:
    """Time a run without tracking, with the server up and with the server down."""
    experiment = digits(rounds)
    prepared = prepare(experiment)
    number = iter(range(10_000))

    def time_run(uri: str) -> measure.Timed:
        def once() -> float:
            place = folder / f"run-{next(number)}"
            with follow_in_background(place, uri, f"cost-{place.name}", lambda text: None):
                start = time.perf_counter()
                run(experiment, place, prepared=prepared)
                return (time.perf_counter() - start) / rounds

        return once

    times = measure.run_in_turn(
        {"no tracking": time_run("off"), "server up": time_run(server.uri), "server down": time_run(NOWHERE)}, repeats
    )
    print(f"a round of C²DFB on the digits, ten nodes in process, evaluated each; {rounds} rounds")
    measure.show(times)
    for name in ("server up", "server down"):
        measure.judge(f"{name} : no tracking", times[name], times["no tracking"], most=1.02)


def measure_outage(seconds: float, folder: Path, server: Server) -> None:
    """Kill the server in the middle of a run and restart it `seconds` later; count lost and doubled points."""
    import mlflow

    pause = 0.1
    rounds_down = int(seconds / pause)
    clock: list[float] = []

    def stop() -> None:
        server.stop()
        clock.append(time.perf_counter())

    def start() -> None:
        server.start()
        server.wait()
        clock.append(time.perf_counter())

    place = folder / "outage"
    messages: list[str] = []
    with follow_in_background(place, server.uri, "outage", messages.append):
        run(digits(rounds_down + 100, seed=1), place, callback=Slowdown(pause, {50: stop, 50 + rounds_down: start}))
    if messages:
        print(f"  {messages[0]}")
        sync_folder(place, server.uri, "outage")
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    experiment = client.get_experiment_by_name("outage")
    (found,) = client.search_runs([experiment.experiment_id])
    expected = {line["round"] for line in read_metrics(place / "metrics.jsonl")}
    keys = sorted(found.data.metrics)
    lost = doubled = 0
    for key in keys:
        steps = Counter(point.step for point in client.get_metric_history(found.info.run_id, key))
        lost += len(expected - steps.keys())
        doubled += sum(count - 1 for count in steps.values())
    print(f"server down for {clock[1] - clock[0]:.0f} s in the middle of a run: {len(expected)} evaluations of "
          f"{len(keys)} metrics, {lost} lost, {doubled} doubled, {found.info.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works, not how fast it is")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds that the server is down")
    parser.add_argument("--part", action="append", choices=("cost", "outage"), help="default: both")
    given = parser.parse_args()
    os.environ.update(mlflow_environment(""))
    with tempfile.TemporaryDirectory(prefix="dbo-tracking-") as name, serving(Path(name)) as server:
        if "cost" in (given.part or ("cost",)):
            measure_cost(20 if given.quick else 600, 1 if given.quick else 5, Path(name), server)
        if "outage" in (given.part or ("outage",)):
            measure_outage(6.0 if given.quick else given.outage, Path(name), server)


if __name__ == "__main__":
    main()
