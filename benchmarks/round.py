"""Measure the overhead of the engine: a round of C²DFB in process against the same arithmetic in bare NumPy.

The bare version is what an experienced user would write for this one case: stacked arrays, padded batched products,
updates in place, `argpartition` for top-k, `W @ q`; no classes, no messages, no byte counts. Both run on one thread.
Before the measurement the results are compared: after some rounds every row of x, y and z must agree.

    python benchmarks/round.py [--quick]
"""

import argparse
from collections.abc import Callable
from typing import Any, Literal

import measure
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.runs.runner import prepare

Array = NDArray[Any]

STEPS = {"inner_steps": 15, "lam": 10.0, "eta_in": 0.3, "eta_out": 1.0, "gamma_in": 0.5, "gamma_out": 0.5}
RATIO = 0.2


def digits(dtype: Literal["float32", "float64"] = "float32", nodes: int = 10) -> Experiment:
    """Return an experiment on digits: nodes on a ring, 80 % of each class on one node."""
    return Experiment(
        nodes=nodes, dtype=dtype, topology={"name": "ring"}, partition={"name": "by_class", "h": 0.8},
        task={"name": "coefficient_tuning", "dataset": "digits"},
        algorithm={"name": "c2dfb", **STEPS, "compressor": {"name": "top_k", "ratio": RATIO}},
    )


def local(experiment: Experiment) -> LocalEngine:
    """Return the in-process engine, all nodes in one block."""
    parts, made = experiment.parts, prepare(experiment)
    return LocalEngine(parts.algorithm, parts.config, made.problem, made.network, [range(experiment.nodes)])


def largest(magnitude: Array, k: int) -> Array:
    """Return the positions of each row's k largest entries; ties are broken arbitrarily."""
    return np.argpartition(magnitude, magnitude.shape[1] - k, axis=1)[:, -k:]


def largest_first(magnitude: Array, k: int) -> Array:
    """Do the same, with the first of equal ones. Digits have ties: a pixel of a single image."""
    return np.argsort(-magnitude, axis=1, kind="stable")[:, :k]


def bare(
    experiment: Experiment, largest: Callable[[Array, int], Array] = largest
) -> tuple[dict[str, Array], Callable[[], None]]:
    """Return the arrays x, y and z, and a function that advances them by one round."""
    made = prepare(experiment)
    problem: Any = made.problem
    m, p, c, dtype = problem.nodes, problem.dim_x, problem.samples.classes, experiment.dtype
    weights = made.network.weights.toarray().astype(dtype)
    scale = problem.scale
    k = int(RATIO * p * c)
    lam, eta_in, eta_out = STEPS["lam"], STEPS["eta_in"], STEPS["eta_out"]
    gamma_in, gamma_out, inner_steps = STEPS["gamma_in"], STEPS["gamma_out"], int(STEPS["inner_steps"])

    def pad(part: Any, index: list[Array]) -> tuple[Array, Array, Array]:
        size = max(map(len, index))
        features = np.zeros((m, size, p), dtype)
        weight = np.zeros((m, size), dtype)
        target = np.zeros((m, size, c), dtype)
        for i, own in enumerate(index):
            features[i, : len(own)] = part.features[own]
            weight[i, : len(own)] = 1 / len(own)
            target[i, np.arange(len(own)), part.labels[own]] = 1 / len(own)
        # Classes first: softmax over ten classes is several times faster along the samples.
        return features, weight.reshape(-1), np.ascontiguousarray(target.reshape(m * size, c).T)

    train, val = pad(problem.samples.train, problem.train), pad(problem.samples.val, problem.val)

    def cross_entropy_gradient(level: tuple[Array, Array, Array], w: Array) -> Array:
        features, weight, target = level
        scores = np.ascontiguousarray((features @ w.reshape(m, p, c)).reshape(-1, c).T)
        scores -= scores.max(axis=0)
        np.exp(scores, out=scores)
        scores *= weight / scores.sum(axis=0)
        scores -= target
        gradient: Array = features.transpose(0, 2, 1) @ scores.T.reshape(m, -1, c)
        return gradient

    def g_y(x: Array, w: Array) -> Array:
        gradient = cross_entropy_gradient(train, w)
        gradient += (2 * scale * np.exp(x))[:, :, None] * w.reshape(m, p, c)
        return gradient.reshape(m, p * c)

    def h_y(x: Array, w: Array) -> Array:
        gradient = cross_entropy_gradient(val, w).reshape(m, p * c)
        gradient /= lam
        gradient += g_y(x, w)
        return gradient

    def upper(x: Array, y: Array, z: Array) -> Array:
        squares = [np.square(w).reshape(m, p, c).sum(axis=2) for w in (y, z)]
        difference: Array = scale * np.exp(x) * (squares[0] - squares[1]) * lam
        return difference

    rows = np.arange(m)[:, None]

    def top_k(v: Array) -> Array:
        kept = largest(np.abs(v), k)
        q = np.zeros_like(v)
        q[rows, kept] = v[rows, kept]
        return q

    x = np.zeros((m, p), dtype)
    loops: dict[str, list[Any]] = {}
    for name, gradient in (("y", h_y), ("z", g_y)):
        d = np.zeros((m, p * c), dtype)
        grad = gradient(x, d)
        loops[name] = [gradient, d, grad.copy(), grad, *(np.zeros_like(d) for _ in range(4))]
    u = upper(x, loops["y"][1], loops["z"][1])
    s = u.copy()

    def advance() -> None:
        nonlocal u, s
        wx, ws = weights @ x, weights @ s
        x[:] = x + gamma_out * (wx - x) - eta_out * s
        for loop in loops.values():
            gradient, d, tracker, grad = loop[:4]
            new = gradient(x, d)
            tracker += new - grad
            loop[3] = new
        for _ in range(inner_steps):
            for loop in loops.values():
                gradient, d, tracker, grad, d_hat, s_hat, wd_hat, ws_hat = loop
                d += gamma_in * (wd_hat - d_hat) - eta_in * tracker
                q = top_k(d - d_hat)
                d_hat += q
                wd_hat += weights @ q
                new = gradient(x, d)
                tracker += gamma_in * (ws_hat - s_hat) + new - grad
                loop[3] = new
                q = top_k(tracker - s_hat)
                s_hat += q
                ws_hat += weights @ q
        new = upper(x, loops["y"][1], loops["z"][1])
        s += gamma_out * (ws - s) + new - u
        u = new

    return {"x": x, "y": loops["y"][1], "z": loops["z"][1]}, advance


def check(rounds: int = 5) -> None:
    """Check that both are the same algorithm: in float64 they agree after some rounds, up to rounding."""
    experiment = digits("float64")
    engine = local(experiment)
    arrays, advance = bare(experiment, largest_first)
    with threadpool_limits(1):
        for round_ in range(1, rounds + 1):
            engine.advance(round_)
            advance()
    for name, array in arrays.items():
        np.testing.assert_allclose(np.asarray(engine.rows(name)), array, rtol=1e-7, atol=1e-10, err_msg=name)
        assert np.abs(array).max() > 0, f"{name} has not moved: the comparison is void"
    print(f"the same x, y and z after {rounds} rounds in float64, relative 1e-7", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description="Compare a round in process with bare NumPy.")
    options.add_argument("--quick", action="store_true", help="few repeats: does it run?")
    quick = options.parse_args().quick
    check()
    engine = local(digits())
    _, advance = bare(digits())
    count = 0

    def one_round() -> None:
        nonlocal count
        count += 1
        engine.advance(count)

    print("a round of C²DFB on digits, 10 nodes, ring, K = 15, top-k 20 %, float32, one thread", flush=True)
    with threadpool_limits(1):
        times = measure.run_in_turn(
            {"bare NumPy": measure.time_rounds(advance, 1), "in-process engine": measure.time_rounds(one_round, 1)},
            repeats=3 if quick else 150,
        )
    measure.show(times)
    measure.judge("engine : bare NumPy", times["in-process engine"], times["bare NumPy"], most=3)


if __name__ == "__main__":
    main()
