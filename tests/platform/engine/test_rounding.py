"""Rounding errors of float32 runs: top-k magnifies them where two entries of a residual are nearly equal.

    pytest -m slow -s tests/platform/engine/test_rounding.py      # prints the numbers of docs/results.md
"""

from typing import Any

import numpy as np
import pytest

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.preparation import prepare

NODES = 10


def measure_distances(compressor: str, rounds: tuple[int, ...]) -> list[float]:
    """Return how far apart one block of ten nodes and two blocks of five are: the relative distance of all rows of y.

    Both compute the same sums; matrix products of other sizes and encoded packets round them otherwise.
    """
    experiment = Experiment(
        algorithm={"name": "c2dfb", "compressor": {"name": compressor}}, task={"name": "coefficient_tuning"},
        nodes=NODES, engine={"name": "local"},
    )
    prepared, parts = prepare(experiment), experiment.parts
    engines = [
        LocalEngine(parts.algorithm, parts.config, prepared.problem, prepared.network, blocks)
        for blocks in ([list(range(NODES))], [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]])
    ]
    found, done = [], 0
    for last in rounds:
        ends: list[Any] = []
        for engine in engines:
            engine.advance(done + 1, last)
            ends.append(np.asarray(engine.rows("y"), dtype=np.float64))
        done = last
        found.append(float(np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[1])))
    return found


@pytest.mark.slow
def test_top_k_magnifies_rounding() -> None:
    """Without compression two orders of summation stay at float32's precision; with top-k they drift apart."""
    rounds = (1, 10, 50)
    plain, top_k = measure_distances("identity", rounds), measure_distances("top_k", rounds)
    for name, found in (("identity", plain), ("top_k", top_k)):
        print(name, ", ".join(f"{n} rounds: {error:.1e}" for n, error in zip(rounds, found, strict=True)))
    assert max(plain) < 1e-5
    assert top_k[-1] > 10 * plain[-1]
