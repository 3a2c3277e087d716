"""Rounding errors: top-k magnifies them where two entries of a residual are nearly equal.

    pytest -m slow -s tests/platform/engine/test_rounding.py      # prints the numbers of docs/results.md
"""

from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import start_at
from dbo.platform.runs.preparation import prepare

NODES = 10
CHANGE = 1e-7       # of the start: the size of float32's rounding
ROUNDS = (1, 10, 50)
STEPS = {"eta_in": 0.2, "eta_out": 0.488, "gamma_in": 0.552, "gamma_out": 0.136}     # whatever the presets are


def measure_distances(compressor: str) -> list[float]:
    """Return how far apart two float32 runs of C²DFB on digits are, whose starts differ by `CHANGE`: all rows of y."""
    experiment = Experiment(
        algorithm={"name": "c2dfb", "compressor": {"name": compressor}, **STEPS},
        task={"name": "coefficient_tuning"}, nodes=NODES, engine={"name": "local"},
    )
    prepared, parts = prepare(experiment), experiment.parts
    shard = prepared.problem.shard([0])
    x, y = shard.x0[0], shard.y0[0]
    noise = CHANGE * np.random.default_rng(0).standard_normal(y.shape)
    engines = [
        LocalEngine(parts.algorithm, parts.config, start_at(prepared.problem, x, start.astype(y.dtype)),
                    prepared.network, [range(NODES)])
        for start in (y, y + noise)
    ]
    found, done = [], 0
    for last in ROUNDS:
        ends: list[Any] = []
        for engine in engines:
            engine.advance(done + 1, last)
            ends.append(np.asarray(engine.rows("y"), dtype=np.float64))
        done = last
        found.append(float(np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[1])))
    return found


@pytest.mark.slow
def test_top_k_magnifies_rounding() -> None:
    """With top-k other entries are sent: early differences are hundreds of times those without compression."""
    plain, top_k = measure_distances("identity"), measure_distances("top_k")
    for name, found in (("identity", plain), ("top_k", top_k)):
        print(name, ", ".join(f"{n} rounds: {error:.1e}" for n, error in zip(ROUNDS, found, strict=True)))
    assert all(one > 100 * other for one, other in zip(top_k[:2], plain[:2], strict=True))
