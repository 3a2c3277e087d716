"""Time the start of a run: from the shell command, and from the README's Python example, to the first round.

The baseline is a process that imports the libraries which every user of this field imports. All are started in turn, as
processes of their own. The clock of a run stops with its evaluation of round 0, right before the first round.

    python benchmarks/startup.py [--quick]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure

BASELINE = [sys.executable, "-c", "import numpy, scipy, sklearn.datasets, pandas"]
COMMAND = [sys.executable, "-m", "dbo.platform.cli", "run", "rounds=1", "engine=local", "--quiet", "--out"]
EXAMPLE = [sys.executable, "-c", """
import sys, dbo
dbo.run(
    algorithm="c2dfb", task="coefficient_tuning", nodes=10, topology="ring", rounds=1, engine="local", out=sys.argv[1])
"""]


def time_baseline() -> float:
    """Return the seconds of a process that only imports."""
    start = time.perf_counter()
    subprocess.run(BASELINE, check=True)
    return time.perf_counter() - start


def time_start(command: list[str]) -> float:
    """Return the seconds from starting a process to the first round of its run."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        subprocess.run([*command, str(Path(folder, "run"))], check=True, stdout=subprocess.DEVNULL)
        first = Path(folder, "run", "metrics.jsonl").read_text().splitlines()[0]
        return float(json.loads(first)["timestamp"]) - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Time from the start of a process to the first round.")
    parser.add_argument("--quick", action="store_true", help="few repeats: does it run?")
    repeats = 1 if parser.parse_args().quick else 7
    times = measure.run_in_turn(
        {
            "import numpy, scipy, sklearn.datasets, pandas": time_baseline,
            "dbo run: to the first round": lambda: time_start(COMMAND),
            "dbo.run: to the first round": lambda: time_start(EXAMPLE),
        },
        repeats,
    )
    print("the README's example, engine local", flush=True)
    measure.show(times)
    baseline, command, example = times.values()
    measure.judge("dbo run : the imports", command, baseline, most=2)
    measure.judge("dbo.run : the imports", example, baseline, most=2)


if __name__ == "__main__":
    main()
