"""Send a problem to a new process as Ray does: run its plugins there, unpickle it, and compare its losses.

    python -m dbo.platform.verify.shipping FILE      # the new process; the file comes from `ship_problem`
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import cloudpickle
import numpy as np

from dbo.platform.config import plugins as plugging
from dbo.tasks.api import Problem

TIMEOUT = 120       # seconds; the new process imports the libraries first


class ShippingError(Exception):
    """A problem cannot be sent to another process; the message is one line."""


def ship_problem(problem: Problem, plugins: Sequence[str]) -> list[float]:
    """Return the losses that a new process computes at the start of node 0."""
    try:
        content = cloudpickle.dumps(problem)
    except Exception as error:
        raise ShippingError(f"cannot be pickled: {type(error).__name__}: {error}") from error
    with TemporaryDirectory(prefix="dbo-verify-") as folder:
        file = Path(folder) / "problem"
        file.write_bytes(cloudpickle.dumps((plugging.ship(plugins), content)))
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(file)], capture_output=True, text=True, timeout=TIMEOUT, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ShippingError(f"fails in another process: {reason}")
    losses: list[float] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return losses


def compute_losses(problem: Problem) -> list[float]:
    """Return f, g and the norm of ∇_y g of node 0 at the start."""
    shard = problem.shard([0])
    x, y = shard.x0, shard.y0
    return [float(shard.f(x, y)[0]), float(shard.g(x, y)[0]), float(np.linalg.norm(shard.g_y(x, y)))]


def _receive(file: str) -> None:
    shipped, content = cloudpickle.loads(Path(file).read_bytes())
    plugging.receive(shipped)
    print(json.dumps(compute_losses(cloudpickle.loads(content))))


if __name__ == "__main__":
    _receive(sys.argv[1])
