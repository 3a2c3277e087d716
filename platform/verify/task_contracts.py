"""Check what engines and algorithms rely on: independent rows, unbiased batches, equal bits, other processes."""

from collections.abc import Mapping

import numpy as np

from dbo.algorithms.api import Array
from dbo.algorithms.registry import algorithms
from dbo.platform.config.experiment import Experiment
from dbo.platform.engine.local import LocalEngine
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.platform.verify.check import Check
from dbo.platform.verify.shipping import compute_losses, ship_problem
from dbo.platform.verify.task_point import GRADIENTS, PRODUCTS, Point, evaluate, judge, measure_distance
from dbo.tasks.api import Batches

SAME = 1e-10            # relative: sums may run in another order
ISOLATED = 1e-12        # relative: rows that must not change at all
SINGLE = 1e-3           # relative: float32 against float64
ROUNDS = 3
MAX_BATCHES = 64        # of an epoch


def check_rows(at: Point) -> Check:
    """Another point or other samples of one node change nothing elsewhere; rows alone are the rows of the stack."""
    shard, nodes = at.shard, at.shard.nodes
    for node in range(nodes):
        for name, rows in at.ask_alone(node).items():
            if (error := measure_distance(rows, at.answers[name][[node]])) > SAME:
                return judge("rows", False, f"{name} of node {node} alone and stacked differ by {error:.1e}")
    if nodes == 1:
        return Check("rows", None, "a single node")
    changed = [rows.copy() for rows in at.rows]
    for rows in changed:
        rows[1] *= -3.0
    others = np.arange(nodes) != 1
    if change := _find_change(at.answers, evaluate(shard, changed), others):
        return judge("rows", False, f"{change} of other nodes changes with the variables of node 1")
    lower, upper = shard.sizes
    if min(lower.min(), upper.min()) >= 2:
        first = [np.zeros((nodes, 1), dtype=np.int64) for _ in range(2)]
        last = [numbers.copy() for numbers in first]
        for numbers in last:
            numbers[1] = 1
        before, after = (evaluate(shard.subset(*each), at.rows) for each in (first, last))
        if change := _find_change(before, after, others):
            return judge("rows", False, f"{change} of other nodes changes with the samples of node 1")
    return judge("rows", True, f"{nodes} nodes alone and stacked agree; one changes nothing of another")


def _find_change(before: Mapping[str, Array], after: Mapping[str, Array], rows: Array) -> str | None:
    """Return the name of an oracle whose results of these rows have changed."""
    for name, values in before.items():
        if not measure_distance(after[name][rows], values[rows]) <= ISOLATED:
            return name
    return None


def check_batches(at: Point) -> Check:
    """The mean over the batches of an epoch is the full gradient; the same key draws the same batch."""
    if not any(int(size.min()) for size in at.shard.sizes):
        return Check("batches", None, "this task has no samples")
    checked = 0
    for node in range(at.shard.nodes):
        alone, rows = at.problem.shard([node]), [rows[[node]] for rows in at.rows]
        full = evaluate(alone, rows)
        for level, size in zip(("lower", "upper"), alone.sizes, strict=True):
            count = next((k for k in range(2, MAX_BATCHES + 1) if int(size[0]) % k == 0), None)
            if count is None:
                continue
            part = int(size[0]) // count
            batches = Batches(
                lower=part if level == "lower" else None, upper=part if level == "upper" else None, order="epoch")
            names = tuple(name for name in (*GRADIENTS, *PRODUCTS) if name[0] == ("f" if level == "upper" else "g"))
            sampled = [evaluate(alone.draw_batch(batches, round_, 0), rows, names) for round_ in range(count)]
            for name in names:
                error = measure_distance(np.mean([one[name] for one in sampled], axis=0), full[name])
                if not error <= SAME:
                    return judge("batches", False,
                                  f"the mean of {name} over an epoch of node {node} is {error:.1e} from the full one")
            again = evaluate(alone.draw_batch(batches, 1, 0), rows, names)
            if not all(np.array_equal(again[name], sampled[1][name]) for name in again):
                return judge("batches", False, "the same key gives another batch")
            checked += 1
    if not checked:
        return Check("batches", None, f"no node's number of samples has a divisor ≤ {MAX_BATCHES}; choose other nodes")
    return judge("batches", True, f"epoch mean = full gradient on {checked} of {2 * at.shard.nodes} levels; "
                  f"the same key draws the same batch")


def check_determinism(at: Point) -> Check:
    answers, copies = at.answers, [rows.copy() for rows in at.rows]
    if name := _find_other_bits(answers, evaluate(at.shard, at.rows)):
        return judge("determinism", False, f"a second call of {name} gives other bits")
    if not all(np.array_equal(rows, copy) for rows, copy in zip(at.rows, copies, strict=True)):
        return judge("determinism", False, "an oracle writes into its arguments")
    second = at.build()
    shard = second.shard(range(second.nodes))
    starts = {"x0": at.shard.x0, "y0": at.shard.y0}, {"x0": shard.x0, "y0": shard.y0}
    if name := _find_other_bits(*starts) or _find_other_bits(answers, evaluate(shard, at.rows)):
        return judge("determinism", False, f"a second build gives another {name}")
    x, y, _ = at.rows
    if name := _find_other_bits(at.problem.evaluate(x, y), second.evaluate(x, y)):
        return judge("determinism", False, f"a second build gives another {name}")
    return judge("determinism", True, "two builds and two calls give equal bits")


def _find_other_bits(one: Mapping[str, Array], other: Mapping[str, Array]) -> str | None:
    return next((name for name, rows in one.items() if not np.array_equal(rows, other[name], equal_nan=True)), None)


def check_packing(at: Point) -> Check:
    nodes = at.problem.nodes
    if nodes == 1:
        return Check("packing", None, "a single node")
    sizes = [int(min(size)) for size in at.problem.sample_sizes()]
    lower, upper = (min(8, size) or None for size in sizes)
    error = max(_compare_packings(at, Batches()), _compare_packings(at, Batches(lower=lower, upper=upper)))
    return judge("packing", error <= SAME, f"{ROUNDS} rounds of c2dfb: one block of {nodes} nodes and {nodes} blocks "
                  f"of one differ by {error:.1e}")


def _compare_packings(at: Point, batches: Batches) -> float:
    """Return how far apart the two runs end; small steps and no compression, whose ties would magnify rounding."""
    nodes = at.problem.nodes
    algorithm = algorithms()["c2dfb"]
    section = {
        "name": "c2dfb", "inner_steps": 2, "eta_in": 0.01, "eta_out": 0.01, "gamma_in": 0.5, "gamma_out": 0.5,
        "compressor": {"name": "identity"},
    }
    config = Experiment(**{**at.experiment.given, "algorithm": section}).parts.config
    network = build_network(TOPOLOGIES["ring"]().graph(nodes, 0))
    ends = []
    for blocks in ([list(range(nodes))], [[node] for node in range(nodes)]):
        engine = LocalEngine(algorithm, config, at.problem, network, blocks, batches=batches)
        for round_ in range(1, ROUNDS + 1):
            engine.advance(round_)
        ends.append([np.asarray(engine.rows(name)) for name in ("x", "y")])
    return max(measure_distance(one, other) for one, other in zip(*ends, strict=True))


# ---- float32 and other processes  -------------------------------------------------------------------------------


def check_float32(at: Point) -> Check:
    problem = at.build("float32")
    shard = problem.shard(range(problem.nodes))
    rows = [rows.astype(np.float32) for rows in at.rows]
    expected = evaluate(at.shard, [each.astype(np.float64) for each in rows])
    worst = 0.0
    for name, found in {"x0": shard.x0, "y0": shard.y0, **evaluate(shard, rows)}.items():
        if found.dtype != np.float32:
            return judge("float32", False, f"{name} is {found.dtype} in a float32 experiment")
        if name in expected:
            worst = max(worst, measure_distance(found.astype(np.float64), expected[name]))
    return judge("float32", worst <= SINGLE, f"{worst:.1e} from float64")


def check_shipping(at: Point) -> Check:
    here, there = compute_losses(at.problem), ship_problem(at.problem, at.experiment.plugins)
    error = measure_distance(np.array([there]), np.array([here]))
    return judge("shipping", error <= SAME, f"pickled; losses in another process differ by {error:.1e}")
