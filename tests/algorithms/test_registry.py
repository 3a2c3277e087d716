"""Check what every registered algorithm must satisfy, and what registration refuses.

A new algorithm is tested here as soon as it is registered. It needs four entries: its step of x, its costs, their
formulas in the documentation, and step sizes for the tasks with data.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import networkx as nx
import numpy as np
import pytest

from dbo.algorithms.claims import PENALTY
from dbo.algorithms.compression.compressors import RandK, TopK
from dbo.algorithms.registry import Algorithm, algorithm, algorithms
from dbo.components import forget
from dbo.parameters import declaration
from dbo.platform.engine import block
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import pool_nodes
from dbo.platform.engine.state_tree import flatten
from dbo.platform.network.topology import TOPOLOGIES, build_network
from dbo.tasks.problems.quadratic import Quadratic

Array = Any
T = TypeVar("T")
NAMES = list(algorithms())
NETWORKED = [name for name in NAMES if algorithms()[name].network != "single"]
GOSSIP = [name for name in NAMES if algorithms()[name].network == "gossip"]
# The registry with its defaults, and configurations under which an algorithm is random or takes other paths.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES} | {
    "c2dfb rand_k": ("c2dfb", {"compressor": RandK(ratio=0.5)}),
    "c2dfb own steps": ("c2dfb", {"eta_y": 0.3, "eta_z": 0.2}),
    "c2dfb x compressed": ("c2dfb", {"compressor_x": RandK(ratio=0.7), "gamma_out": 0.3}),
    "c2dfb_lead rand_k": ("c2dfb_lead", {"compressor": RandK(ratio=0.5, bits=6), "alpha": 0.5}),
    "c2dfb_central rand_k": ("c2dfb_central", {"compressor": RandK(ratio=0.5, bits=6)}),
    "lean rand_k": ("lean", {"compressor": RandK(ratio=0.5, bits=6), "momentum": 0.2, "ratio_x": 0.7}),
    "c2dfb_nc rand_k": ("c2dfb_nc", {"compressor": RandK(ratio=0.5)}),
    "mdbo sampled": ("mdbo", {"neumann": "sampled"}),
    "vrdbo sampled": ("vrdbo", {"neumann": "sampled"}),
    "madsbo relaxed": ("madsbo", {"gam": 0.5}),
    "d_soba first_order": ("d_soba", {"derivatives": "first_order"}),
    "sparkle extra": ("sparkle", {"rule_x": "extra", "rule_y": "extra", "rule_v": "extra"}),
    "sparkle gt": ("sparkle", {"rule_x": "gt", "rule_y": "gt", "rule_v": "gt", "eta_y": 0.1, "eta_v": 0.1}),
    "sparkle mixed": ("sparkle", {"rule_x": "gt", "rule_y": "ed", "rule_v": "extra"}),
    "ef_soba rand_k": ("ef_soba", {"compressor": RandK(ratio=0.5)}),
    "aggitd sampled": ("aggitd", {"series": "sampled"}),
} | {
    f"{name} half": (name, {"participation": 0.5}) for name in NAMES if algorithms()[name].network == "star"
}
NETWORKED_VARIANTS = [label for label, (name, _) in VARIANTS.items() if name in NETWORKED]


def states(engine: LocalEngine) -> dict[str, Array]:
    """All state arrays of all nodes, in node order."""
    parts = [flatten(block.state) for block in engine.local_blocks]
    order = np.argsort([node for block in engine.local_blocks for node in block.ids])
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def assert_close(found: dict[str, Array], expected: dict[str, Array], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape
        if not array.size:
            continue        # references of what is sent whole
        scale = max(float(np.abs(array).max()), 1e-3)
        assert np.abs(found[name] - array).max() <= tolerance * scale, name


def own_rows(arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays without copies of neighbours, (nodes, places, dim): their places are in the order of node numbers."""
    return {name: array for name, array in arrays.items() if array.ndim == 2}


def has_left_the_start(engine: LocalEngine) -> bool:
    """Control: x has left its start, so that equal trajectories are not trivially equal."""
    block = engine.local_blocks[0]
    return not np.array_equal(block.state.x, block.algorithm.init(block.shard, block.config).x)


def of(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the algorithm's entry, or fail with what is missing."""
    if name not in table:
        pytest.fail(f"{name}: {what}", pytrace=False)
    return table[name]


@pytest.mark.parametrize("label", NETWORKED_VARIANTS)
@pytest.mark.parametrize("blocks", [[[i] for i in range(6)], [[5, 0, 2], [4], [1, 3]]], ids=["of one", "uneven"])
def test_packing_does_not_matter(lab: Any, label: str, blocks: list[list[int]]) -> None:
    """One block of m rows and any other packing, with packets really encoded, agree to 1e-10."""
    name, changes = VARIANTS[label]
    config = lab.config(name, **changes)
    together = lab.engine(name, config, topology="erdos_renyi", rounds=4)
    packed = lab.engine(name, config, topology="erdos_renyi", blocks=blocks, rounds=4)
    assert has_left_the_start(together)
    assert_close(states(packed), states(together))
    assert packed.ledger().bytes_links == together.ledger().bytes_links


@pytest.mark.parametrize("label", VARIANTS)
def test_resume_is_the_straight_run(lab: Any, label: str) -> None:
    """A fresh engine restored from a snapshot computes the same bits: state, ledger and oracle counts."""
    name, changes = VARIANTS[label]
    config = lab.config(name, **changes)
    straight = lab.engine(name, config, rounds=2)
    kept = [{key: array.copy() for part in block for key, array in part.items()} for block in straight.snapshot()]
    resumed = lab.engine(name, config)
    resumed.restore(kept)
    for round_ in (3, 4, 5):
        straight.advance(round_)
        resumed.advance(round_)
    for one, other in zip(chain(*straight.snapshot()), chain(*resumed.snapshot()), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


class Relabelled:
    """The same problem with the nodes in another order; a node keeps its data and its random numbers."""

    def __init__(self, problem: Any, order: Sequence[int]) -> None:
        self.problem, self.order = problem, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.problem, name)

    def shard(self, ids: Sequence[int]) -> Any:
        return self.problem.shard([self.order[i] for i in ids])


@pytest.mark.parametrize("label", NETWORKED_VARIANTS)
def test_relabelling_permutes_the_trajectory(lab: Any, label: str) -> None:
    """Relabelling the nodes relabels their trajectories and changes nothing else."""
    name, changes = VARIANTS[label]
    config, problem, order = lab.config(name, **changes), lab.quadratic(), [3, 0, 5, 1, 4, 2]
    graph = TOPOLOGIES["erdos_renyi"]().graph(6, 0)
    renamed = nx.relabel_nodes(graph, {node: place for place, node in enumerate(order)})
    assert set(renamed.edges) != set(graph.edges)
    straight = own_rows(states(lab.engine(name, config, problem, build_network(graph), rounds=4)))
    permuted = own_rows(states(lab.engine(name, config, Relabelled(problem, order), build_network(renamed), rounds=4)))
    order += range(len(order), len(straight["t"]))         # a server stays the last node
    assert_close(permuted, {key: array[order] for key, array in straight.items()})


@pytest.mark.parametrize("name", NETWORKED)
def test_identical_nodes_are_one_machine(lab: Any, name: str) -> None:
    """With the same data everywhere and W = 11ᵀ/m, every node does what the algorithm does on the pooled data alone."""
    problem = lab.quadratic(heterogeneity=0.0)
    network_of_all = own_rows(states(lab.engine(name, problem=problem, topology="complete", rounds=5)))
    alone = lab.engine(name, problem=pool_nodes(problem), rounds=5)
    assert has_left_the_start(alone)
    repeated = {
        key: np.concatenate([np.tile(array[:1], (6, 1)), array[1:]]) for key, array in own_rows(states(alone)).items()
    }
    assert_close(network_of_all, repeated, 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_mean_of_x_moves_along_the_mean_direction(lab: Any, name: str) -> None:
    """`direction` is that of the next upper step: mean(x) moves by a negative multiple of its mean, and by no more."""
    engine = lab.engine(name, rounds=3)
    before, along = lab.model(engine, "x"), lab.model(engine, "direction")
    engine.advance(4)
    step = lab.model(engine, "x") - before
    assert np.linalg.norm(step) > 0
    np.testing.assert_allclose(step / np.linalg.norm(step), -along / np.linalg.norm(along), atol=1e-9)


RHO = Quadratic().rho

# The factor between the two: the step size of x.
STEPS: dict[str, Callable[[Any], float]] = {
    "c2dfb": lambda c: c.eta_out,
    "c2dfb_nc": lambda c: c.eta_out,
    "c2dfb_lead": lambda c: c.eta_out,
    "c2dfb_central": lambda c: c.eta_out,
    "lean": lambda c: c.eta_out,
    "mdbo": lambda c: c.beta_x * c.eta,
    "vrdbo": lambda c: c.beta_x * c.eta,
    "f2ba": lambda c: c.eta_out,
    "fedbioacc": lambda c: c.local_steps * c.eta_x,
    # ∇_x f_i(x) = ρ x: local steps contract towards x − h / ρ.
    "fednest": lambda c: (1 - (1 - c.eta_x * RHO) ** c.local_steps) / RHO,
    "storm_pl": lambda c: c.beta_x * c.eta,
} | {name: lambda c: c.eta_x for name in (
    "madsbo", "madsbo_gt", "dsgda_gt", "sldbo", "d_soba", "gossip_dsbo", "sparkle", "sun_dsbo", "slam",
    "simfbo", "aggitd", "ef_soba", "bome", "f2sa", "stocbio", "soba",
)}
# A factor on it after t rounds, where the method itself shortens its steps.
SHRINKING: dict[str, Callable[[Any, int], float]] = {
    "f2sa": lambda c, t: float((1 + t / c.lam_rounds) ** -c.lam_power),
}


@pytest.mark.parametrize("name", NAMES)
def test_mean_of_x_moves_by_the_step_size(lab: Any, name: str) -> None:
    """mean(x) moves by −(step size of x) · mean(direction): W has column sums 1, so gossip preserves the mean."""
    config = lab.config(name)
    step = of(STEPS, name, "its step size of x, a function of the configuration, is missing in STEPS")(config)
    engine = lab.engine(name, config)
    for round_ in range(1, 6):
        before, along = lab.model(engine, "x"), lab.model(engine, "direction")
        engine.advance(round_)
        length = step * SHRINKING[name](config, round_ - 1) if name in SHRINKING else step
        np.testing.assert_allclose(lab.model(engine, "x"), before - length * along, rtol=0, atol=1e-13)


Counts = dict[str, int]


def cost(
    packets: int, values: int, gradients: int, hvp: int = 0, jvp: int = 0, up: int = 0, down: int = 0
) -> Counts:
    return {
        "packets": packets, "values": values, "up": up, "down": down,
        "gradient_calls": gradients, "hvp_calls": hvp, "jvp_calls": jvp,
        "samples": 0,      # the quadratic without noise has none
    }


def kept_of(q: Any, dim: int) -> int:
    return max(1, int(q.ratio * dim))


def penalty_loops(c: Any, x: int, y: int) -> Counts:
    """K + 1 packets: x and its tracker once, then k values of four residuals per inner step."""
    k = max(1, int(c.compressor.ratio * y))
    return cost(c.inner_steps + 1, 2 * x + 4 * c.inner_steps * k, 3 * (c.inner_steps + 1) + 3)


def star_cost(exchanges: int, up: int, down: int, gradients: int, hvp: int, jvp: int) -> Counts:
    return cost(exchanges, 0, gradients, hvp, jvp, up, down)


def kept(c: Any, dim: int) -> int:
    return max(1, int(c.compressor.ratio * dim))


# Per node and round, with d_x = x and d_y = y. In a star, packets are exchanges, and values those of a client.
COSTS: dict[str, Callable[[Any, int, int], Counts]] = {
    "c2dfb": penalty_loops,
    "c2dfb_nc": penalty_loops,
    "c2dfb_lead": lambda c, x, y: cost(
        c.inner_steps + 1, 2 * x + 2 * c.inner_steps * kept_of(c.compressor, y), 3 * c.inner_steps + 3
    ),
    "c2dfb_central": lambda c, x, y: {
        **penalty_loops(c, x, y), "gradient_calls": 4 * (c.inner_steps + 1) + 4
    },
    "lean": lambda c, x, y: cost(
        c.inner_steps + 1, kept_of(c.compressor, x) + 2 * c.inner_steps * kept_of(c.compressor, y),
        3 * c.inner_steps + 3,
    ),
    "madsbo": lambda c, x, y: cost(
        c.inner_steps + c.higp_steps, x + (c.inner_steps + 2 * c.higp_steps - 1) * y, c.inner_steps + 2, c.higp_steps, 1
    ),
    "madsbo_gt": lambda c, x, y: cost(
        c.inner_steps + c.higp_steps,
        x + (2 * c.inner_steps + 2 * c.higp_steps - 1) * y,
        c.inner_steps + 3, c.higp_steps, 1,
    ),
    "mdbo": lambda c, x, y: cost(1, 2 * x + 2 * y, 3, c.neumann_terms - 1, 1),
    "vrdbo": lambda c, x, y: cost(1, 2 * x + 2 * y, 6, 2 * (c.neumann_terms - 1), 2),
    "dsgda_gt": lambda c, x, y: cost(1, 2 * x + 4 * y, 6),
    "sldbo": lambda c, x, y: cost(1, 2 * (x + 2 * y), 3, 1, 1),
    "d_soba": lambda c, x, y: cost(1, x + 2 * y, 3, 1, 1),
    "gossip_dsbo": lambda c, x, y: cost(1, 2 * x + 2 * y, 3, c.neumann_terms - 1, 1),
    "fednest": lambda c, x, y: star_cost(
        4 * c.inner_steps + 2 * c.neumann_terms + 4, 2 * x + (2 * c.inner_steps + c.neumann_terms) * y,
        3 * x + (2 * c.inner_steps + c.neumann_terms + 1) * y,
        c.local_steps * (c.inner_steps + 1) + 2, c.neumann_terms - 1, 1,
    ),
    "simfbo": lambda c, x, y: star_cost(2, x + 2 * y, x + 2 * y, 3 * c.local_steps, c.local_steps, c.local_steps),
    "fedbioacc": lambda c, x, y: star_cost(
        2, 2 * (x + 2 * y), 2 * (x + 2 * y), 6 * c.local_steps, 2 * c.local_steps, 2 * c.local_steps
    ),
    "aggitd": lambda c, x, y: star_cost(
        2 * c.inner_steps + 2, x + 2 * c.inner_steps * y, x + (2 * c.inner_steps + 1) * y,
        2 * c.inner_steps + 1, c.inner_steps - 1, 1,
    ),
    "ef_soba": lambda c, x, y: star_cost(2, kept(c, x) + 2 * kept(c, y), x + 2 * y, 3, 1, 1),
    "sparkle": lambda c, x, y: cost(1, x + 2 * y, 3, 1, 1),
    "storm_pl": lambda c, x, y: cost(1, 2 * x + 4 * y, 12),
    "sun_dsbo": lambda c, x, y: cost(1, 2 * x + 4 * y, 6),
    "slam": lambda c, x, y: cost(1, x, c.inner_steps + 2, c.neumann_terms - 1, 1),
    "f2ba": lambda c, x, y: cost(0, 0, 3 * c.inner_steps + 3),
    "bome": lambda c, x, y: cost(0, 0, c.inner_steps + 5),
    "f2sa": lambda c, x, y: cost(0, 0, 3 * c.inner_steps + 3),
    "stocbio": lambda c, x, y: cost(0, 0, c.inner_steps + 2, c.neumann_terms - 1, 1),
    "soba": lambda c, x, y: cost(0, 0, 3, 1, 1),
}


def per_round(engine: LocalEngine, rounds: int) -> Counts:
    """Return the cost of a round per node, from round 2: residuals of round 1 may have fewer nonzero entries."""
    engine.advance(1)

    def totals() -> Counts:
        ledger = engine.ledger()
        values = sum(ledger.values_by_channel().values(), np.zeros_like(ledger.ids))
        has_server = engine.local_blocks[0].algorithm.network == "star"
        nodes = slice(None, -1 if has_server else None)
        assert len(set(ledger.packets[nodes])) == 1
        assert len(set(values[nodes])) == 1
        packets, sent = int(ledger.packets[0]), int(values[0])
        if not has_server:
            return {"packets": packets, "values": sent, "up": 0, "down": 0} | dict(engine.counters())
        packets += int(ledger.packets[-1])
        return {"packets": packets, "values": 0, "up": sent, "down": int(values[-1])} | dict(engine.counters())

    before = totals()
    for round_ in range(2, rounds + 2):
        engine.advance(round_)
    after = totals()
    assert all((after[key] - before[key]) % rounds == 0 for key in after)
    return {key: (after[key] - before[key]) // rounds for key in after}


def closed_counts(name: str, config: Any) -> Counts:
    missing = "its packets, values and oracle calls per round are missing in COSTS"
    return of(COSTS, name, missing)(config, 4, 10)


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_the_closed_counts(lab: Any, name: str) -> None:
    """Packets, values sent and oracle calls per node and round are those of the algorithm's description."""
    problem, config = lab.quadratic(dim_x=4, dim_y=10), lab.config(name)
    assert per_round(lab.engine(name, config, problem), 3) == closed_counts(name, config)


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc"])
def test_a_cached_tracker_needs_fewer_gradients(lab: Any, name: str) -> None:
    """`tracker: cached`: 3 K + 3 partial gradients, no K + 1st of each loop; packets and values stay."""
    problem, config = lab.quadratic(dim_x=4, dim_y=10), lab.config(name, tracker="cached")
    steps = config.inner_steps
    assert per_round(lab.engine(name, config, problem), 3) == cost(steps + 1, 2 * 4 + 4 * steps * 2, 3 * steps + 3)


@pytest.mark.parametrize("name", GOSSIP)
def test_bytes_are_those_of_the_closed_counts(lab: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per round 8 bytes a value, 1 for the position of each kept entry, 36 a packet, and the channels' names.

    Two of ten entries are two positions of one byte and two values. A record's head is 12 bytes and its channel's name.
    """
    problem, config = lab.quadratic(dim_x=4, dim_y=10), lab.config(name)
    if hasattr(config, "compressor"):
        config = replace(config, compressor=TopK(ratio=0.2))
    counts = closed_counts(name, config)
    engine = lab.engine(name, config, problem, rounds=1)
    sent: list[tuple[str, ...]] = []
    sizes = block.measure

    def record_channels(messages: Any) -> Any:
        sent.append(tuple(messages))
        return sizes(messages)

    monkeypatch.setattr(block, "measure", record_channels)
    before = engine.ledger()
    engine.advance(2)
    after = engine.ledger()
    header = after.header - before.header
    assert (header == 36 * counts["packets"] + sum(12 + len(c) for channels in sent for c in channels)).all()
    whole = 0 if name == "lean" else 2 * 4           # values of x that are not compressed
    kept = counts["values"] - whole if hasattr(config, "compressor") else 0
    assert (after.bytes_by_node() - before.bytes_by_node() == header + 8 * counts["values"] + kept).all()


def documented() -> dict[str, list[str]]:
    """algorithm → the formulas of the table in docs/algorithms.md: packets, values, up, down, gradients, HVP, JVP."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.partition("| algorithm | packets |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: formulas[:7] for name, *formulas in rows}


@pytest.mark.parametrize("name", NAMES)
def test_documented_costs_are_the_closed_counts(lab: Any, name: str) -> None:
    """The formulas in the documentation, with this configuration's numbers for their letters, give the same counts."""
    cfg = lab.config(name)
    steps = getattr(cfg, "inner_steps", 0)
    letters = {
        "K": steps, "T": steps, "N": getattr(cfg, "higp_steps", 0), "J": getattr(cfg, "neumann_terms", 0),
        "I": getattr(cfg, "local_steps", 0), "k": 2, "k_x": 1, "d_x": 4, "d_y": 10,
    }
    formulas = of(documented(), name, "its line is missing in the table of costs in docs/algorithms.md")
    products = [re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula) for formula in formulas]
    packets, values, up, down, *calls = (eval(product, {}, letters) for product in products)
    assert cost(packets, values, *calls, up=up, down=down) == closed_counts(name, cfg)


def test_first_order_variant_needs_gradients_only(lab: Any) -> None:
    """D-SOBA-FO: seven partial gradients, no second-order product, the same messages."""
    config = lab.config("d_soba", derivatives="first_order")
    assert per_round(lab.engine("d_soba", config), 3) == cost(1, 3 + 2 * 5, 7)


@pytest.mark.parametrize(("rules", "values"), [("ed", 0), ("extra", 0), ("x", 4), ("y", 10), ("v", 10), ("gt", 24)])
def test_gradient_tracking_sends_a_variable_twice(lab: Any, rules: str, values: int) -> None:
    """SPARKLE sends d_x + 2 d_y values; each variable with the rule gt adds its tracker, in the same packet."""
    chosen = {f"rule_{s}": rules if rules in ("ed", "extra", "gt") else "gt" if rules == s else "ed" for s in "xyv"}
    config = lab.config("sparkle", **chosen, eta_y=0.1, eta_v=0.1)
    found = per_round(lab.engine("sparkle", config, lab.quadratic(dim_x=4, dim_y=10)), 3)
    assert found == cost(1, 24 + values, 3, 1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_declared_packets_are_sent(lab: Any, name: str) -> None:
    """`packets` is what a round sends; a single machine sends nothing."""
    config = lab.config(name)
    engine = lab.engine(name, config, rounds=3)
    declared = lab.algorithm(name).packets(config)
    sent = engine.ledger().packets
    if lab.algorithm(name).network == "star":       # each exchange is one packet of every client, or of the server
        sent = sent[:-1] + sent[-1]
    assert set(sent.tolist()) == {3 * declared}
    assert (declared == 0) == (lab.algorithm(name).network == "single")


@pytest.mark.parametrize("name", NETWORKED)
def test_paper_counts_name_real_channels(lab: Any, name: str) -> None:
    """A weight of Table 1 for a channel that does not exist would silently count nothing."""
    used = set(lab.engine(name, rounds=1).ledger().channels)
    assert set(lab.algorithm(name).paper_counts) <= used


@pytest.mark.parametrize("name", NAMES)
def test_dtype_is_kept(lab: Any, name: str) -> None:
    """A float32 experiment stays float32 in every floating state array."""
    engine = lab.engine(name, problem=lab.quadratic(dtype="float32"), rounds=2)
    floating = {key: array.dtype for key, array in states(engine).items() if array.dtype.kind == "f"}
    assert set(floating.values()) == {np.dtype("float32")}
    assert engine.first_nonfinite() is None


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_documented(name: str) -> None:
    """Every field of a configuration has a default and a help text."""
    config = algorithms()[name].config
    config()
    for field in fields(config):
        assert declaration(field).help, field.name


# From the papers, or the authors' code: K, λ, T, N, J, L, weights and rates, whatever the task.
PUBLISHED: dict[str, dict[str, Any]] = {
    "c2dfb": {"inner_steps": 15, "lam": 10.0, "eta_in": 1.0, "eta_out": 1.0, "gamma_in": 0.5, "gamma_out": 0.5},
    "madsbo": {"inner_steps": 15, "higp_steps": 15, "eta_x": 10.0, "eta_y": 10.0, "eta_z": 10.0, "theta": 0.3,
               "gam": 1.0},
    "mdbo": {"eta": 0.3, "beta_x": 5.0, "beta_y": 5.0, "alpha_x": 1.0, "alpha_y": 1.0, "neumann_terms": 10,
             "lipschitz": 15.0, "neumann": "deterministic"},
    "vrdbo": {"eta": 0.33, "beta_x": 1.0, "beta_y": 1.0, "alpha_x": 5.0, "alpha_y": 5.0, "neumann_terms": 10},
    "bome": {"inner_steps": 10, "rate": 1.0, "phi": "value", "floor": 1e-8},
}
PUBLISHED |= {"c2dfb_nc": PUBLISHED["c2dfb"], "madsbo_gt": PUBLISHED["madsbo"]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_are_the_published_ones(name: str) -> None:
    """An experiment without a preset that leaves a parameter out runs with its paper's value."""
    config = algorithms()[name].config()
    assert {key: getattr(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_range(name: str) -> None:
    """No step size, weight or count may be negative, and no share above 1: `param` declares it."""
    config = algorithms()[name].config
    hints = get_type_hints(config)
    for field in fields(config):
        if hints[field.name] in (int, float):
            declared = declaration(field)
            assert declared.gt is not None or declared.ge is not None, field.name
            is_share = field.name.startswith(("gam", "theta"))
            assert declared.le == 1 or not is_share, field.name


@pytest.mark.parametrize("name", NAMES)
def test_methods_with_lambda_declare_their_penalty(name: str) -> None:
    """`penalty` reads λ from the configuration of every method that goes to ψ_λ's minimiser, and of no other."""
    made = algorithms()[name]
    config = made.config()
    assert made.claim is not None
    assert (made.penalty is not None) == (hasattr(config, "lam") and made.claim.limit is PENALTY)
    assert made.penalty is None or made.penalty(made.config(lam=7.5)) == 7.5


@dataclass(frozen=True, kw_only=True)
class Config:
    step: float = 0.1


@dataclass(frozen=True)
class State:
    x: Array
    y: Array
    direction: Array


def register(**options: Any) -> Algorithm:
    """Register an algorithm that sends nothing, and remove it again."""

    async def round_(st: State, shard: Any, cfg: Config) -> State:
        """Does nothing."""
        return st

    def init(shard: Any, cfg: Config) -> State:
        return State(shard.x0, shard.y0, shard.x0)

    try:
        return algorithm("throw_away", config=Config, state=State, init=init, **options)(round_)
    finally:
        forget(__name__)


def test_packets_and_penalty_are_optional(lab: Any) -> None:
    """Without `packets` the engine accepts any number of packets; without `penalty` there is no λ."""
    made = register()
    assert made.packets is None
    assert made.penalty is None
    engine = LocalEngine(made, Config(), lab.quadratic(), lab.network(), [range(6)])
    engine.advance(1)
    assert engine.ledger().packets.tolist() == [0] * 6
    assert not made.built_in
    assert "throw_away" not in algorithms()


@pytest.mark.parametrize("name", NAMES)
def test_every_method_declares_its_family_and_oracles(name: str) -> None:
    """Family, citation and oracles are given; gradients only means no second-order product in a round."""
    made = algorithms()[name]
    assert made.family.isidentifier()
    assert re.search(r"\b(19|20)\d\d\b", made.citation), "a citation has a year"
    counts = closed_counts(name, made.config())
    assert made.oracles == ("second_order" if counts["hvp_calls"] + counts["jvp_calls"] else "first_order")


def test_older_plugins_name_a_single_machine() -> None:
    """`single_machine=True` of older plugins is `network="single"`; without both a method gossips."""
    assert register(single_machine=True).network == "single"
    assert register().network == "gossip"


@pytest.mark.parametrize(("option", "allowed"), [
    ("network", "gossip, star, single"), ("oracles", "first_order, second_order"),
])
def test_unknown_requirements_are_refused(option: str, allowed: str) -> None:
    """The error names the option, the value and what is allowed."""
    with pytest.raises(ValueError, match="not allowed") as error:
        register(**{option: "ring"})
    assert str(error.value) == f"algorithm 'throw_away': {option}: 'ring' is not allowed; allowed: {allowed}"


@pytest.mark.parametrize("option", ["packets", "penalty"])
def test_packets_and_penalty_must_be_functions(option: str) -> None:
    """A number in their place is refused, with the name of the algorithm and an example."""
    with pytest.raises(ValueError, match="must be a function") as error:
        register(**{option: 1})
    expected = f"algorithm 'throw_away': {option} must be a function of the configuration, e.g. lambda cfg: 1"
    assert str(error.value) == expected


# Step sizes with which twenty rounds make progress on each task with data.
LINEAR: dict[str, dict[str, Any]] = {
    "c2dfb": {"inner_steps": 4, "eta_in": 0.3},
    "c2dfb_nc": {"inner_steps": 4, "eta_in": 0.3, "gamma_in": 0.1},
    "c2dfb_lead": {"inner_steps": 4, "eta_in": 0.3},
    "c2dfb_central": {"inner_steps": 4, "eta_in": 0.3},
    "lean": {"inner_steps": 4, "eta_in": 0.3, "eta_out": 0.3},
    "madsbo": {"inner_steps": 4, "higp_steps": 4, "eta_x": 0.3, "eta_y": 0.3, "eta_z": 0.3},
    "madsbo_gt": {"inner_steps": 4, "higp_steps": 4, "eta_x": 0.3, "eta_y": 0.2, "eta_z": 0.2},
    "mdbo": {"beta_x": 1.0, "beta_y": 1.0, "lipschitz": 3.0},
    "vrdbo": {"lipschitz": 3.0},
    "dsgda_gt": {"eta_x": 0.1, "eta_y": 0.2, "eta_z": 0.2},
    "sldbo": {"eta_x": 0.1, "eta_y": 0.2, "eta_v": 0.2},
    "d_soba": {"eta_x": 0.1, "eta_y": 0.3, "eta_v": 0.3},
    "gossip_dsbo": {"eta_x": 0.1, "eta_y": 0.3, "lipschitz": 3.0},
    "fednest": {"local_steps": 2, "lipschitz": 3.0, "eta_x": 0.1, "eta_y": 0.3},
    "simfbo": {"local_steps": 2, "local_x": 0.05, "eta_x": 0.1, "eta_y": 0.3, "eta_v": 0.3},
    "fedbioacc": {"local_steps": 2, "eta_x": 0.05, "eta_y": 0.2, "eta_v": 0.2},
    "aggitd": {"inner_steps": 4, "eta_x": 0.1, "eta_y": 0.3, "eta_z": 0.3},
    "ef_soba": {"eta_x": 0.1, "eta_y": 0.2, "eta_v": 0.2},
    "sparkle": {"eta_x": 0.1, "eta_y": 0.3, "eta_v": 0.3},
    "storm_pl": {"eta": 0.4, "beta_x": 0.25, "beta_y": 0.5, "beta_z": 0.5},
    "sun_dsbo": {"eta_x": 0.1, "eta_y": 0.2, "eta_theta": 0.2},
    "slam": {"inner_steps": 4, "eta_x": 0.1, "eta_y": 0.3, "lipschitz": 3.0},
    "f2ba": {"inner_steps": 4, "eta_in": 0.3},
    "bome": {"inner_steps": 4, "eta_in": 0.3, "eta_x": 0.3, "eta_y": 0.3},
    "f2sa": {"inner_steps": 4, "eta_z": 0.3, "eta_y": 0.3},
    "stocbio": {"inner_steps": 4, "eta_y": 0.3, "eta_v": 0.3, "eta_x": 0.1},
    "soba": {"eta_x": 0.1, "eta_y": 0.3, "eta_v": 0.3},
}
# A backbone bends: its steps are shorter, and Lipschitz constants larger, than those of a linear model.
BACKBONE: dict[str, dict[str, Any]] = {
    "c2dfb": {"eta_out": 0.1, "eta_in": 0.1},
    "c2dfb_nc": {"eta_out": 0.05, "eta_in": 0.1},
    "c2dfb_lead": {"eta_out": 0.05, "eta_in": 0.1},
    "c2dfb_central": {"eta_out": 0.1, "eta_in": 0.1},
    "lean": {"eta_out": 0.05, "eta_in": 0.1},
    "madsbo": {"eta_x": 0.1, "eta_y": 0.1, "eta_z": 0.1},
    "madsbo_gt": {"eta_x": 0.1, "eta_y": 0.1, "eta_z": 0.1},
    "mdbo": {"beta_x": 0.1, "beta_y": 0.3, "lipschitz": 20.0},
    "vrdbo": {"beta_x": 0.1, "beta_y": 0.3, "lipschitz": 20.0},
    "gossip_dsbo": {"eta_x": 0.03, "eta_y": 0.1, "lipschitz": 20.0},
    "f2ba": {"eta_out": 0.1, "eta_in": 0.1},
}
DATA: dict[str, tuple[str, str, dict[str, Any]]] = {
    "coefficient_tuning digits": ("coefficient_tuning", "digits", {}),
    "coefficient_tuning synthetic_text": (
        "coefficient_tuning", "synthetic_text", {"documents": 400, "features": 300, "classes": 5}
    ),
    "hyper_representation digits": ("hyper_representation", "digits", {}),
}


@pytest.mark.parametrize("task", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_a_few_rounds_lower_the_upper_loss(lab: Any, name: str, task: str) -> None:
    """On every task with data the mean model's upper loss falls by 1 % or more in twenty rounds; nothing blows up."""
    kind, dataset, parameters = DATA[task]
    problem = lab.learning(kind, dataset, **parameters)
    linear = of(LINEAR, name, "step sizes with which it learns a linear model are missing in LINEAR")
    steps = linear | (BACKBONE.get(name, {}) if kind == "hyper_representation" else {})
    engine = lab.engine(name, lab.algorithm(name).config(**steps), problem)

    def upper() -> float:
        return float(engine.losses(engine.rows("x").mean(0), engine.rows("y").mean(0))[0].mean())

    before, start = upper(), engine.rows("x")
    for round_ in range(1, 21):
        engine.advance(round_)
    assert engine.first_nonfinite() is None
    assert upper() < 0.99 * before
    assert not np.array_equal(engine.rows("x"), start)


@pytest.mark.parametrize("name", NAMES)
def test_the_quadratic_upper_value_falls(lab: Any, name: str) -> None:
    """On the quadratic task ψ(x̄) = (1/m) Σ f_i(x̄, y*(x̄)) is lower after some rounds than at the start."""
    problem = lab.quadratic()
    engine = lab.engine(name, problem=problem, rounds=40)
    assert problem.psi(engine.rows("x").mean(0)) < problem.psi(np.zeros(problem.dim_x))
