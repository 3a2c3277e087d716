"""Mini-batches and schedules of every registered algorithm: which samples it draws, counts, and where it resumes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.registry import algorithms
from dbo.parameters import declaration
from dbo.platform.config.schedules import Cosine, InverseSqrt, Piecewise, Schedules
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import CountingShard
from dbo.platform.engine.state_tree import flatten
from dbo.tasks.api import Batches

Array = Any
Draws = dict[tuple[str, int, int, int], tuple[int, ...]]      # (level, node, round, step) → numbers of the samples
NAMES = list(algorithms())
NETWORKED = [name for name in NAMES if algorithms()[name].network != "single"]
# The registry with its defaults, and configurations that draw other batches.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES} | {
    "c2dfb cached": ("c2dfb", {"tracker": "cached"}),
    "c2dfb_nc cached": ("c2dfb_nc", {"tracker": "cached"}),
    "mdbo sampled": ("mdbo", {"neumann": "sampled"}),
    "vrdbo sampled": ("vrdbo", {"neumann": "sampled"}),
    "d_soba first_order": ("d_soba", {"derivatives": "first_order"}),
    "sparkle mixed": ("sparkle", {"rule_x": "gt", "rule_y": "ed", "rule_v": "extra"}),
}
ALWAYS_ALL = [label for label in VARIANTS if "sampled" not in label]      # that draw all of their batches in each round
SMALL = Batches(lower=5, upper=3)
SAMPLES = 20


@pytest.fixture(scope="module")
def noisy(lab: Any) -> Any:
    """The small quadratic with 20 samples per node and level."""
    return lab.quadratic(noise=0.3, samples=SAMPLES, start=0.5)


@contextmanager
def record_draws() -> Iterator[Draws]:
    """Record the samples of every batch."""
    draws: Draws = {}
    original = Batches.draw

    def draw(self: Batches, level: Any, seed: int, ids: Array, sizes: Array, round_: int, step: int) -> Array:
        numbers = original(self, level, seed, ids, sizes, round_, step)
        for node, row in zip(ids, numbers, strict=True):
            draws[level, int(node), round_, step] = tuple(row.tolist())
        return numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "draw", draw)
        yield draws


def states(engine: LocalEngine) -> dict[str, Array]:
    """All state arrays of all nodes, in node order."""
    parts = [flatten(block.state) for block in engine.local_blocks]
    order = np.argsort([node for block in engine.local_blocks for node in block.ids])
    return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}


def assert_close(found: dict[str, Array], expected: dict[str, Array], tolerance: float = 1e-10) -> None:
    for name, array in expected.items():
        scale = max(float(np.abs(array).max(initial=0)), 1e-3)      # a part that is switched off has no columns
        assert np.abs(found[name] - array).max(initial=0) <= tolerance * scale, name


def are_equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def snapshot(engine: LocalEngine) -> list[dict[str, Array]]:
    """A copy of all that a checkpoint holds."""
    return [{key: array.copy() for part in block for key, array in part.items()} for block in engine.snapshot()]


def configure(lab: Any, label: str) -> tuple[str, Any]:
    name, changes = VARIANTS[label]
    return name, lab.config(name, **changes)


@pytest.mark.parametrize("label", [label for label, (name, _) in VARIANTS.items() if name in NETWORKED])
@pytest.mark.parametrize("blocks", [[[i] for i in range(6)], [[5, 0, 2], [4], [1, 3]]], ids=["of one", "uneven"])
def test_packing_changes_no_sample(lab: Any, noisy: Any, label: str, blocks: list[list[int]]) -> None:
    """One block of m rows and any other packing draw the same samples, and agree to 1e-10."""
    name, config = configure(lab, label)
    with record_draws() as one:
        together = lab.engine(name, config, noisy, rounds=3, batches=SMALL)
    with record_draws() as other:
        packed = lab.engine(name, config, noisy, blocks=blocks, rounds=3, batches=SMALL)
    # A sampled series may be longer on another block: no row uses what such a block draws for it.
    shared = one.keys() & other.keys() if "sampled" in label else one.keys()
    assert {key: other[key] for key in shared} == {key: one[key] for key in shared}
    assert {key[2] for key in shared} >= {1, 2}
    assert_close(states(packed), states(together))
    assert packed.counters() == together.counters()


@pytest.mark.parametrize("label", VARIANTS)
@pytest.mark.parametrize("order", ["independent", "epoch"])
def test_resumed_run_draws_the_same_samples(lab: Any, noisy: Any, label: str, order: Any) -> None:
    """A fresh engine restored from a snapshot draws the same batches and computes the same bits, counters included."""
    name, config = configure(lab, label)
    batches = replace(SMALL, order=order, per_round=algorithms()[name].batches(config))
    straight = lab.engine(name, config, noisy, rounds=2, batches=batches)
    kept = snapshot(straight)
    resumed = lab.engine(name, config, noisy, batches=batches)
    resumed.restore(kept)
    runs = []
    for engine in (straight, resumed):
        with record_draws() as draws:
            for round_ in (3, 4, 5):
                engine.advance(round_)
        runs.append(draws)
    assert runs[0] == runs[1] != {}
    for one, other in zip(snapshot(straight), snapshot(resumed), strict=True):
        assert are_equal(one, other)


@pytest.mark.parametrize("label", VARIANTS)
def test_a_batch_of_all_samples_is_the_full_batch(lab: Any, noisy: Any, label: str) -> None:
    """Drawn without repetition, all samples give the full-batch run to rounding; a batch of few does not."""
    name, config = configure(lab, label)
    full = states(lab.engine(name, config, noisy, rounds=4))
    everything = Batches(lower=SAMPLES, upper=SAMPLES)
    assert_close(states(lab.engine(name, config, noisy, rounds=4, batches=everything)), full, 1e-9)
    few, all_samples = (lab.engine(name, config, noisy, rounds=4, batches=each).rows("x") for each in (SMALL, None))
    assert np.abs(few - all_samples).max() > 1e-4


@pytest.mark.parametrize("label", ALWAYS_ALL)
def test_a_round_draws_the_declared_batches(lab: Any, noisy: Any, label: str) -> None:
    """A round draws the batches 0 … n − 1 of its number, n as declared with `batches`, and of no other round."""
    name, config = configure(lab, label)
    engine = lab.engine(name, config, noisy, rounds=2, batches=SMALL)
    with record_draws() as draws:
        engine.advance(3)
    numbers = {(round_, step) for _, _, round_, step in draws}
    assert len({round_ for round_, _ in numbers}) == 1
    assert sorted(step for _, step in numbers) == list(range(algorithms()[name].batches(config)))


@pytest.mark.parametrize("label", ALWAYS_ALL)
def test_epochs_use_every_sample_once(lab: Any, noisy: Any, label: str) -> None:
    """With order=epoch the batches of a run, one after the other, contain every sample of a node once per epoch."""
    name, config = configure(lab, label)
    batches = Batches(lower=5, upper=4, order="epoch", per_round=algorithms()[name].batches(config))
    with record_draws() as draws:
        lab.engine(name, config, noisy, rounds=11, batches=batches)
    for level, size in (("lower", 5), ("upper", 4)):
        for node in range(6):
            # Batches by their number in the run. The start may draw fewer than a round does.
            numbered = {key[2] * batches.per_round + key[3]: draws[key] for key in draws if key[:2] == (level, node)}
            length, last = SAMPLES // size, max(numbered)
            epochs = [range(at, at + length) for at in range(0, last - length + 2, length) if at >= batches.per_round]
            assert epochs
            for epoch in epochs:
                assert sorted(sample for number in epoch for sample in numbered[number]) == list(range(SAMPLES))


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_per_round(lab: Any, noisy: Any, name: str) -> None:
    """With per=round all steps of a round see one batch; the next round sees another one."""
    with record_draws() as draws:
        lab.engine(name, problem=noisy, rounds=4, batches=replace(SMALL, per="round"))
    assert {step for *_, step in draws} == {0}
    batches = {round_: draws["lower", 0, round_, 0] for _, _, round_, _ in draws}
    assert len(set(batches.values())) == len(batches) >= 4


# What sees which batch of a round, as in the table of docs/algorithms.md: (first step, last step) → oracles.
def penalty_loops(c: Any) -> dict[tuple[int, int], str]:
    return {(0, c.inner_steps): "f_y g_y g_y", (c.inner_steps + 1, c.inner_steps + 1): "f_x g_x g_x"}


def solve(c: Any, first: int) -> dict[tuple[int, int], str]:
    """HIGP: ∇_y f at first, then both derivatives with fresh samples in each of N steps; then the hypergradient."""
    last = first + c.higp_steps
    return {(first, first): "f_y", (first + 1, last): "f_y g_yy", (last + 1, last + 1): "f_x g_xy"}


def series(c: Any) -> dict[tuple[int, int], str]:
    return {(0, 0): "f_x f_y g_xy", (1, c.neumann_terms - 1): "g_yy", (c.neumann_terms, c.neumann_terms): "g_y"}


def fednest(c: Any) -> dict[tuple[int, int], str]:
    """FedOut's differences in x, T times the mean at y and differences in y, then the series and the hypergradient."""
    steps, last = c.local_steps, (c.inner_steps + 1) * c.local_steps - 1
    return {(0, steps - 2): "f_x f_x"} | {
        (n * steps - 1, n * steps - 1): "g_y" for n in range(1, c.inner_steps + 1)
    } | {
        (n * steps, (n + 1) * steps - 2): "g_y g_y" for n in range(1, c.inner_steps + 1)
    } | {(last, last): "f_x f_y g_xy", (last + 1, last + c.neumann_terms - 1): "g_yy"}


ORACLES: dict[str, Callable[[Any], dict[tuple[int, int], str]]] = {
    "c2dfb": penalty_loops,
    "c2dfb_nc": penalty_loops,
    "madsbo": lambda c: {(0, c.inner_steps - 1): "g_y"} | solve(c, c.inner_steps),
    "madsbo_gt": lambda c: {(0, c.inner_steps): "g_y"} | solve(c, c.inner_steps + 1),
    "mdbo": series,
    "vrdbo": lambda c: {steps: f"{names} {names}" for steps, names in series(c).items()},
    "dsgda_gt": lambda c: {(0, 0): "f_x f_y g_x g_x g_y g_y"},
    "sldbo": lambda c: {(0, 0): "f_x f_y g_y g_yy g_xy"},
    "d_soba": lambda c: {(0, 0): "f_x f_y g_y g_yy g_xy"},
    "gossip_dsbo": series,
    "fednest": fednest,
    "simfbo": lambda c: {(0, c.local_steps - 1): "f_x f_y g_y g_yy g_xy"},
    "fedbioacc": lambda c: {(0, c.local_steps - 1): "f_x f_x f_y f_y g_y g_y g_yy g_yy g_xy g_xy"},
    "aggitd": lambda c: {
        (0, 0): "f_y g_y", (1, c.inner_steps - 1): "f_y g_y g_yy", (c.inner_steps, c.inner_steps): "f_x g_xy",
    },
    "ef_soba": lambda c: {(0, 0): "f_x f_y g_y g_yy g_xy"},
    "sparkle": lambda c: {(0, 0): "f_x f_y g_y g_yy g_xy"},
    "storm_pl": lambda c: {(0, 0): "f_x f_y g_x g_x g_y g_y f_x f_y g_x g_x g_y g_y"},
    "sun_dsbo": lambda c: {(0, 0): "f_x f_y g_x g_x g_y g_y"},
    "slam": lambda c: {
        (0, c.inner_steps - 1): "g_y", (c.inner_steps, c.inner_steps): "f_x f_y g_xy",
        (c.inner_steps + 1, c.inner_steps + c.neumann_terms - 1): "g_yy",
    },
    "c2dfb_lead": lambda c: {
        (0, c.inner_steps - 1): "f_y g_y g_y", (c.inner_steps, c.inner_steps): "f_x g_x g_x",
    },
    "c2dfb_central": lambda c: {
        (0, c.inner_steps): "f_y f_y g_y g_y", (c.inner_steps + 1, c.inner_steps + 1): "f_x f_x g_x g_x",
    },
    "lean": lambda c: {
        (0, c.inner_steps - 1): "f_y g_y g_y", (c.inner_steps, c.inner_steps): "f_x g_x g_x",
    },
    "f2ba": lambda c: {
        (0, c.inner_steps - 1): "f_y g_y g_y", (c.inner_steps, c.inner_steps): "f_x g_x g_x",
    },
    "bome": lambda c: {
        (0, c.inner_steps - 1): "g_y", (c.inner_steps, c.inner_steps): "f_x f_y g_x g_x g_y",
    },
    "f2sa": lambda c: {
        (0, c.inner_steps - 1): "f_y g_y g_y", (c.inner_steps, c.inner_steps): "f_x g_x g_x",
    },
    "stocbio": lambda c: {
        (0, c.inner_steps - 1): "g_y", (c.inner_steps, c.inner_steps): "f_x f_y",
        (c.inner_steps + 1, c.inner_steps + c.neumann_terms - 1): "g_yy",
        (c.inner_steps + c.neumann_terms, c.inner_steps + c.neumann_terms): "g_xy",
    },
    "soba": lambda c: {(0, 0): "f_x f_y g_y g_yy g_xy"},
}


def expected_calls(name: str, config: Any) -> list[tuple[int, str]]:
    """(step, oracle) of every call in a round."""
    if name not in ORACLES:
        pytest.fail(f"{name}: the oracles that see each batch of a round are missing in ORACLES", pytrace=False)
    return [
        (step, oracle) for (first, last), names in ORACLES[name](config).items() for step in range(first, last + 1)
        for oracle in names.split()
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_oracle_sees_its_batch(lab: Any, noisy: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh samples where the paper draws them, the same ones where a difference needs them, never all samples."""
    engine = lab.engine(name, problem=noisy, rounds=2, batches=SMALL)
    calls: list[tuple[int, str]] = []
    sample = CountingShard.sample

    def sample_step(self: CountingShard, key: Any) -> CountingShard:
        batch = sample(self, key)
        vars(batch)["step"] = key.step
        return batch

    monkeypatch.setattr(CountingShard, "sample", sample_step)
    for oracle in ("f_x", "f_y", "g_x", "g_y", "g_yy", "g_xy"):
        original = getattr(CountingShard, oracle)

        def record(self: CountingShard, *rows: Array, oracle: str = oracle, original: Any = original) -> Array:
            calls.append((vars(self)["step"], oracle))
            return original(self, *rows)

        monkeypatch.setattr(CountingShard, oracle, record)
    engine.advance(3)
    assert sorted(calls) == sorted(expected_calls(name, lab.config(name)))


@pytest.mark.parametrize("name", NAMES)
def test_counters_count_samples(lab: Any, noisy: Any, name: str) -> None:
    """Per round: calls on each level times the samples of its batch; a single machine sees those of every node."""
    config = lab.config(name)
    calls = [oracle for _, oracle in expected_calls(name, config)]
    upper = sum(oracle.startswith("f") for oracle in calls)
    engine = lab.engine(name, config, noisy, rounds=1, batches=SMALL)
    before = engine.counters()["samples"]
    engine.advance(2)
    nodes = noisy.nodes if algorithms()[name].network == "single" else 1
    assert engine.counters()["samples"] - before == nodes * (5 * (len(calls) - upper) + 3 * upper)


@pytest.mark.parametrize("name", ["madsbo", "madsbo_gt"])
def test_full_batches_need_one_upper_gradient_in_the_solve(lab: Any, noisy: Any, name: str) -> None:
    """∇_y f is evaluated again only where its samples change: once with full batches, or with one batch per round."""
    config = lab.config(name)
    for batches in (None, replace(SMALL, per="round")):
        engine = lab.engine(name, config, noisy, rounds=1, batches=batches)
        before = engine.counters()["gradient_calls"]
        engine.advance(2)
        extra = 3 if name == "madsbo_gt" else 2
        assert engine.counters()["gradient_calls"] - before == config.inner_steps + extra


@pytest.mark.parametrize("name", NAMES)
def test_batches_do_not_change_the_evaluation(lab: Any, noisy: Any, name: str) -> None:
    """Losses are those of all samples, and an evaluation between rounds does not change the run."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal(noisy.dim_x), rng.standard_normal(noisy.dim_y)
    straight, evaluated = (lab.engine(name, problem=noisy, batches=SMALL) for _ in range(2))
    expected = lab.engine(name, problem=noisy).losses(x, y)
    for round_ in (1, 2, 3):
        straight.advance(round_)
        evaluated.advance(round_)
        for found, full in zip(evaluated.losses(x, y), expected, strict=True):
            np.testing.assert_array_equal(found, full)
    assert are_equal(snapshot(straight)[0], snapshot(evaluated)[0])


def test_old_and_new_point_of_storm_see_the_same_samples(lab: Any, noisy: Any) -> None:
    """VRDBO with no correction and no step: estimates do not move, whatever the batches. MDBO's do."""
    config = lab.config("vrdbo", beta_x=1e-12, beta_y=1e-12, alpha_x=1e-12, alpha_y=1e-12)
    engine = lab.engine("vrdbo", config, noisy, topology="complete", batches=SMALL)
    start = states(engine)
    engine.advance(1)
    for name in ("u", "v"):
        np.testing.assert_allclose(states(engine)[name], start[name], rtol=0, atol=1e-9)
    config = lab.config("mdbo", beta_x=1e-12, beta_y=1e-12)
    engine = lab.engine("mdbo", config, noisy, topology="complete", batches=SMALL)
    start = states(engine)
    engine.advance(1)
    assert np.abs(states(engine)["v"] - start["v"]).max() > 1e-2


def test_estimates_of_storm_pl_do_not_move_without_a_step(lab: Any, noisy: Any) -> None:
    """STORM-PL with no correction and no step: both points of a difference see the same samples, so it is 0."""
    config = lab.config("storm_pl", beta_x=1e-12, beta_y=1e-12, beta_z=1e-12, alpha=1e-12)
    engine = lab.engine("storm_pl", config, noisy, topology="complete", batches=SMALL)
    start = states(engine)
    engine.advance(1)
    for name in ("x", "y", "z"):
        key = f"estimate.{name}"
        np.testing.assert_allclose(states(engine)[key], start[key], rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["c2dfb", "c2dfb_nc", "dsgda_gt", "f2ba", "f2sa", "sun_dsbo"])
def test_penalty_terms_share_their_samples(lab: Any, noisy: Any, name: str) -> None:
    """At y = z the λ-term of a sampled upper gradient is 0 exactly; two batches would leave λ times their noise."""
    engine = lab.engine(name, problem=noisy, batches=SMALL)
    shard = engine.local_blocks[0].shard
    np.testing.assert_allclose(engine.rows("direction"), shard.f_x(shard.x0, shard.y0), rtol=0, atol=1e-12)


def test_first_order_differences_share_their_samples(lab: Any, noisy: Any) -> None:
    """D-SOBA's differences with a tiny δ stay near the products of the same batches: noise is not divided by δ."""
    runs = {
        kind: states(lab.engine("d_soba", lab.config("d_soba", derivatives=kind, delta=1e-5), noisy, rounds=5,
                                batches=SMALL))
        for kind in ("first_order", "second_order")
    }
    assert_close(runs["first_order"], runs["second_order"], 1e-6)


# ---- schedules -------------------------------------------------------------------------------------------------------

# Numbers that are no step sizes: penalties, constants of the problem, safeguards, and shares of clients.
CONSTANTS = {
    "lam", "lam_start", "lam_rounds", "lam_power", "c", "prox", "lipschitz", "radius", "delta", "rate", "floor",
    "participation", "momentum",
}
# Step sizes that are null by default, and then those of another parameter.
OPTIONAL = {"c2dfb": {"eta_y", "eta_z"}}
STEP = 0.2           # in place of null, and of a zero that switches a term off


def can_vary(name: str) -> list[str]:
    return [field.name for field in fields(algorithms()[name].config) if declaration(field).schedule]


@pytest.mark.parametrize("name", NAMES)
def test_every_step_size_can_have_a_schedule(name: str) -> None:
    """Step sizes, consensus steps and averaging weights can; λ, L, δ and counts cannot."""
    config = algorithms()[name].config()
    numbers = {field.name for field in fields(config) if isinstance(getattr(config, field.name), float)}
    assert set(can_vary(name)) == numbers - CONSTANTS | OPTIONAL.get(name, set())


@pytest.mark.parametrize(("name", "parameter"), [(name, each) for name in NAMES for each in can_vary(name)])
def test_a_schedule_is_the_number_that_it_states(lab: Any, noisy: Any, name: str, parameter: str) -> None:
    """Two rounds with one number and two with another: the bits of two runs with a constant each, chained.

    With mini-batches: on full ones the weight of a variance-reduced estimate has no effect.
    """
    config = lab.config(name)
    config = config if getattr(config, parameter) else replace(config, **{parameter: STEP})
    later = replace(config, **{parameter: 0.7 * getattr(config, parameter)})
    schedule = Piecewise(value=getattr(config, parameter), after=(2,), values=(getattr(later, parameter),))
    scheduled = lab.engine(name, config, noisy, rounds=4, batches=SMALL, schedules=Schedules({parameter: schedule}))
    first = lab.engine(name, config, noisy, rounds=2, batches=SMALL)
    second = lab.engine(name, later, noisy, batches=SMALL)
    second.restore(snapshot(first))
    for round_ in (3, 4):
        first.advance(round_)
        second.advance(round_)
    assert are_equal(states(scheduled), states(second))
    assert not are_equal(states(scheduled), states(first))


@pytest.mark.parametrize("name", NAMES)
def test_schedules_survive_a_resume(lab: Any, noisy: Any, name: str) -> None:
    """With schedules and batches a restored engine computes the bits of the straight run."""
    config = lab.config(name)
    kinds = (lambda v: Cosine(value=v, end=0.5 * v, rounds=6), lambda v: InverseSqrt(value=v, rounds=4))
    schedules = Schedules({
        each: kinds[at % 2](getattr(config, each) or STEP) for at, each in enumerate(can_vary(name))
    })
    straight = lab.engine(name, config, noisy, rounds=3, batches=SMALL, schedules=schedules)
    resumed = lab.engine(name, config, noisy, batches=SMALL, schedules=schedules)
    resumed.restore(snapshot(straight))
    constant = lab.engine(name, config, noisy, batches=SMALL)
    constant.restore(snapshot(straight))
    for round_ in (4, 5, 6):
        for engine in (straight, resumed, constant):
            engine.advance(round_)
    assert are_equal(snapshot(straight)[0], snapshot(resumed)[0])
    assert not are_equal(states(straight), states(constant))


def test_a_full_batch_is_the_shard_itself(noisy: Any) -> None:
    """Without a batch size nothing is drawn: the algorithm gets its own shard back."""
    from dbo.algorithms.rng import counter, round_key

    shard = CountingShard(noisy.shard(range(6)))
    assert shard.sample(round_key(shard, counter(shard))) is shard
