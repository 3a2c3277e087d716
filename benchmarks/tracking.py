"""What tracking costs a run, with the MLflow server up, down, and gone for a while in the middle.

The same run on the digits, in process, alone and followed by a writer; what is compared is the time from the start of
the run to its end, without the seconds in which the command then lets its writer come to an end. In the second part a
real server is killed in the middle of a run and comes back after --outage seconds: points lost and doubled are counted.

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
from dbo.platform.tracking.client import environment
from dbo.platform.tracking.process import following, sync

NOWHERE = "http://127.0.0.1:9"           # the discard port: nobody listens


def digits(rounds: int, seed: int = 0) -> Experiment:
    return Experiment(rounds=rounds, seed=seed, engine={"name": "local"}, tracking={"uri": "off"})


class Watch:
    """A watcher that slows a run down and does something at some rounds."""

    def __init__(self, pause: float, at: dict[int, Callable[[], None]]) -> None:
        self._pause, self._at = pause, at

    def started(self, experiment: Any, done: int) -> None: ...

    def evaluated(self, record: dict[str, Any]) -> None:
        time.sleep(self._pause)
        self._at.get(record["round"], lambda: None)()

    def noted(self, text: str) -> None: ...
    def ended(self, result: Any) -> None: ...


def cost(rounds: int, repeats: int, folder: Path, server: Server) -> None:
    """Alone, with the server up, with the server down."""
    experiment = digits(rounds)
    made = prepare(experiment)
    number = iter(range(10_000))

    def timed(uri: str) -> measure.Timed:
        def once() -> float:
            place = folder / f"run-{next(number)}"
            with following(place, uri, f"cost-{place.name}", lambda text: None):
                start = time.perf_counter()
                run(experiment, place, prepared=made)
                return (time.perf_counter() - start) / rounds

        return once

    times = measure.in_turn(
        {"no tracking": timed("off"), "server up": timed(server.uri), "server down": timed(NOWHERE)}, repeats
    )
    print(f"a round of C²DFB on the digits, ten nodes in process, evaluated each; {rounds} rounds")
    measure.show(times)
    for name in ("server up", "server down"):
        measure.judge(f"{name} : no tracking", times[name], times["no tracking"], most=1.02)


def outage(seconds: float, folder: Path, server: Server) -> None:
    """The server is killed after a quarter of a run and comes back `seconds` later."""
    import mlflow

    pause = 0.1
    away = int(seconds / pause)
    clock: list[float] = []

    def stop() -> None:
        server.stop()
        clock.append(time.perf_counter())

    def start() -> None:
        server.start()
        server.wait()
        clock.append(time.perf_counter())

    place = folder / "outage"
    said: list[str] = []
    with following(place, server.uri, "outage", said.append):
        run(digits(away + 100, seed=1), place, watcher=Watch(pause, {50: stop, 50 + away: start}))
    if said:
        print(f"  {said[0]}")
        sync(place, server.uri, "outage")
    client = mlflow.MlflowClient(tracking_uri=server.uri)
    experiment = client.get_experiment_by_name("outage")
    (found,) = client.search_runs([experiment.experiment_id])
    wanted = {line["round"] for line in read_metrics(place / "metrics.jsonl")}
    keys = sorted(found.data.metrics)
    lost = doubled = 0
    for key in keys:
        there = Counter(point.step for point in client.get_metric_history(found.info.run_id, key))
        lost += len(wanted - there.keys())
        doubled += sum(count - 1 for count in there.values())
    print(f"server away for {clock[1] - clock[0]:.0f} s in the middle of a run: {len(wanted)} evaluations of "
          f"{len(keys)} metrics, {lost} lost, {doubled} doubled, {found.info.status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs: that it works, not how fast it is")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds that the server is away")
    parser.add_argument("--part", action="append", choices=("cost", "outage"), help="default: both")
    given = parser.parse_args()
    os.environ.update(environment(""))
    with tempfile.TemporaryDirectory(prefix="dbo-tracking-") as name, serving(Path(name)) as server:
        if "cost" in (given.part or ("cost",)):
            cost(20 if given.quick else 600, 1 if given.quick else 5, Path(name), server)
        if "outage" in (given.part or ("outage",)):
            outage(6.0 if given.quick else given.outage, Path(name), server)


if __name__ == "__main__":
    main()
