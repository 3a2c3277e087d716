"""Compare a `TorchTask` with the hand-derived task of the same problem, and mini-batches with full batches.

The problem is hyper-representation on MNIST with layers 784-96-64-10, ten nodes in one block, one thread. Without
--data-dir the images are random numbers of the same sizes.

    python benchmarks/torch_task.py [--data-dir DIR] [--quick]
"""

import argparse
import time
from typing import Any

import measure
import numpy as np
import torch
from threadpoolctl import threadpool_limits

import dbo
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.base import RunSpec
from dbo.platform.engine.factory import start_engine
from dbo.platform.runs.preparation import prepare

MU = 0.01


@dbo.dataset("random_images")
class RandomImages:
    """Random numbers in the sizes of MNIST."""

    images: int = dbo.param(60_000, ge=100, help="train and validation images")

    def load(self, seed: int, data_dir: str | None) -> dbo.Split:
        rng = np.random.default_rng(seed)
        half = self.images // 2
        parts = [
            dbo.Part(rng.standard_normal((n, 784), dtype=np.float32), rng.integers(0, 10, n))
            for n in (half, half, 1_000)
        ]
        return dbo.Split(*parts, classes=10)


@dbo.task("perceptron")
class Perceptron(dbo.TorchTask):
    """Hyper-representation, written in torch."""

    datasets = ("mnist",)

    def init(self, generator: torch.Generator) -> tuple[Any, Any]:
        shapes = ((784, 96), (96,), (96, 64), (64,))
        return [0.1 * torch.randn(shape, generator=generator) for shape in shapes], torch.zeros(64, 10)

    def representation(self, x: Any, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(inputs @ x[0] + x[1]) @ x[2] + x[3])

    def lower(self, x: Any, y: torch.Tensor, batch: dbo.Batch) -> torch.Tensor:
        return self.upper(x, y, batch) + 0.5 * MU * y.square().sum()

    def upper(self, x: Any, y: torch.Tensor, batch: dbo.Batch) -> torch.Tensor:
        return dbo.linear_cross_entropy(batch.representation, y, batch.labels)

    def metrics(self, x: Any, y: torch.Tensor, test: dbo.Batch) -> dict[str, Any]:
        return {"test_accuracy": ((test.representation @ y).argmax(1) == test.labels).float().mean()}


def main() -> None:
    options = argparse.ArgumentParser(description="Compare a TorchTask with closed forms, batches with all data.")
    options.add_argument("--data-dir", help="folder with MNIST/raw")
    options.add_argument("--quick", action="store_true", help="small and few repeats: does it run?")
    arguments = options.parse_args()
    data: dict[str, Any] = {"dataset": "mnist" if arguments.data_dir else "random_images"}
    data["images"] = 1_000 if arguments.quick else 60_000
    base: dict[str, Any] = {
        "data_dir": arguments.data_dir, "engine": "local", "partition": "iid", "tracking": {"uri": "off"},
        "algorithm": {"name": "c2dfb", "inner_steps": 15, "eta_in": 0.03, "eta_out": 0.1, "gamma_in": 0.3,
                      "compressor": {"name": "top_k", "ratio": 0.3}},
    }
    torch.set_num_threads(1)
    with threadpool_limits(1):
        compare_oracles(base, data, arguments.quick)
        compare_rounds(base, data, arguments.quick)


def compare_oracles(base: dict[str, Any], data: dict[str, Any], quick: bool) -> None:
    """Print the time of each oracle in torch over that of the closed form."""
    hidden = {"name": "hyper_representation", "hidden": [96, 64], "mu": MU, **data}
    shards = [
        prepare(Experiment(**base, task=task)).problem.shard(range(10))
        for task in ({"name": "perceptron", **data}, hidden)
    ]
    rng = np.random.default_rng(0)
    x = (0.05 * rng.standard_normal(shards[0].x0.shape)).astype(np.float32)
    y, v = ((0.1 * rng.standard_normal(shards[0].y0.shape)).astype(np.float32) for _ in range(2))
    for name in ("f_y", "g_y"):
        np.testing.assert_allclose(*(getattr(shard, name)(x, y) for shard in shards), rtol=1e-2, atol=1e-4)
    for label, name, moves, limit in (
        ("f_x at a new x", "f_x", True, 2.0), ("g_x at a new x", "g_x", True, 2.0),
        ("g_xy at a new x", "g_xy", True, 2.0), ("g_y at a new x", "g_y", True, 2.0),
        ("g_y at the same x", "g_y", False, 3.0), ("g_yy at the same x", "g_yy", False, 3.0),
    ):
        variants = {
            kind: time_oracle(shard, name, x, y, v, moves)
            for kind, shard in zip(("TorchTask", "closed form"), shards, strict=True)
        }
        times = measure.run_in_turn(variants, repeats=2 if quick else 7 if moves else 25)
        measure.judge(f"{label}, TorchTask : closed form", times["TorchTask"], times["closed form"], most=limit)


def time_oracle(shard: Any, name: str, x: Any, y: Any, v: Any, moves: bool) -> measure.Timed:
    at = x.copy()

    def timed() -> float:
        if moves:
            at[0, 0] += 1e-3
        start = time.perf_counter()
        getattr(shard, name)(at, y, v) if name in ("g_yy", "g_xy") else getattr(shard, name)(at, y)
        return time.perf_counter() - start

    return timed


def compare_rounds(base: dict[str, Any], data: dict[str, Any], quick: bool) -> None:
    """Print the time of a C²DFB round with full batches over that with batches of 64."""
    task = {"name": "hyper_representation", "hidden": [96, 64], "mu": MU, **data}
    size = 16 if quick else 64
    settings: dict[str, dict[str, Any]] = {
        "all samples": {}, "a batch per step": {"batch_size": size},
        "a batch per round": {"batch_size": size, "batch_per": "round"},
    }
    problem, rounds = None, {}
    for name, setting in settings.items():
        experiment = Experiment(**base, **setting, task=task)
        prepared = prepare(experiment, problem)
        problem = prepared.problem
        rounds[name] = time_round(experiment, prepared)
    times = measure.run_in_turn(rounds, repeats=2 if quick else 5)
    print(f"a round of C²DFB, K = 15, batches of {size} samples per node and level", flush=True)
    measure.show(times)
    measure.judge("all samples : a batch per step", times["all samples"], times["a batch per step"], least=8)
    measure.judge("all samples : a batch per round", times["all samples"], times["a batch per round"], least=35)


def time_round(experiment: Experiment, prepared: Any) -> measure.Timed:
    parts, at = experiment.parts, 0
    engine = start_engine(parts.engine, RunSpec(
        parts.algorithm, parts.config, prepared.problem, prepared.network, experiment.to_dict(), batches=parts.batches))

    def advance() -> None:
        nonlocal at
        at += 1
        engine.advance(at)

    return measure.time_rounds(advance, 1)


if __name__ == "__main__":
    main()
