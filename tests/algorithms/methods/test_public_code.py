"""Compare methods with public code: what that code computes, transcribed in plain NumPy, on a heterogeneous quadratic.

The transcriptions follow the order of the lines and the signs of the public code, not ours: benchopt/benchmark_bilevel
for SOBA, stocBiO and F²SA, TrueNobility303/F2BA for F2BA and F²SA-2, liboyue/beer and mlolab/MoTEF for the inner loop
of C²DFB, ucr-optml/FedNest for FedNest. Full batches, MoTEF with mini-batches; float64. The largest differences are in
docs/algorithms.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.compression.compressors import Identity, TopK
from dbo.algorithms.rng import Key
from dbo.platform.config.schedules import InverseSqrt, Schedules
from dbo.platform.engine.local import LocalEngine
from dbo.platform.engine.shard_wrappers import CountingShard, pool_nodes, pool_shard
from dbo.tasks.sampling import Batches

Array = Any
ROUNDS = 40
BATCHES = Batches(lower=4, upper=4)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms.md"


@pytest.fixture(scope="module")
def problem(lab: Any) -> Any:
    return lab.quadratic(start=0.5)


@pytest.fixture(scope="module")
def pooled(problem: Any) -> Any:
    """All data on one machine."""
    return pool_shard(problem.shard(range(problem.nodes)))


def soba(s: Any, step: float, ratio: float) -> Iterator[Array]:
    """benchopt: z, v and x at once with ρ_t = step / √(t + 1) and γ_t = ρ_t / ratio; v solves H v = −∇_z f."""
    z, x, v = s.y0, s.x0, 0 * s.y0
    for t in count():
        yield x
        rho = step / np.sqrt(t + 1)
        grad_z, hvp, cross = s.g_y(x, z), s.g_yy(x, z, v), s.g_xy(x, z, v)
        grad_in, grad_out = s.f_y(x, z), s.f_x(x, z)
        z, v, x = z - rho * grad_z, v - rho * (hvp + grad_in), x - rho / ratio * (cross + grad_out)


def stocbio(s: Any, step: float, ratio: float, inner: int, hia: int) -> Iterator[Array]:
    """benchopt: n_inner_steps of gradient descent, n_shia_steps of the series, then the outer step."""
    z, x = s.y0, s.x0
    while True:
        for _ in range(inner):
            z = z - step * s.g_y(x, z)
        grad_in, grad_out = s.f_y(x, z), s.f_x(x, z)
        power = total = grad_in
        for _ in range(hia):
            power = power - step * s.g_yy(x, z, power)
            total = total + power
        x = x - step / ratio * (grad_out - s.g_xy(x, z, step * total))
        yield x


def f2sa(s: Any, penalties: list[float], effective: float, star: float, outer: float, inner: int) -> Iterator[Array]:
    """benchopt: z on f + λ g and z_star on g, then x, then λ ← λ + δ; the steps of z and x are falling sequences."""
    z = z_star = s.y0
    x, lam = s.x0, penalties[0]
    for after in penalties[1:]:
        for _ in range(inner):
            direction = lam * s.g_y(x, z) + s.f_y(x, z)
            z, z_star = z - effective / lam * direction, z_star - star * s.g_y(x, z_star)
        x = x - outer / lam * (s.f_x(x, z) + lam * (s.g_x(x, z) - s.g_x(x, z_star)))
        yield x
        lam += after - lam


def f2ba(s: Any, lam: float, eta_in: float, eta_out: float, inner: int) -> Iterator[Array]:
    """The authors' script: ŷ := y in every epoch; the ∇g of both steps is taken at ŷ. We add ∇_x f (there 0)."""
    y, x = s.y0, s.x0
    while True:
        y_hat = y
        for _ in range(inner):
            g = s.g_y(x, y_hat)
            y, y_hat = y - eta_in * (s.f_y(x, y) / lam + g), y_hat - eta_in * g
        x = x - eta_out * (s.f_x(x, y) + lam * (s.g_x(x, y) - s.g_x(x, y_hat)))
        yield x


def beer(
    gradient: Callable[[Array], Array], start: Array, w: Array, eta: float, gamma: float, q: Callable[[Array], Array]
) -> Iterator[Array]:
    """liboyue/beer, in its comment's original order: X, H, V, G, with H = G = 0 at the start."""
    x, v = start, gradient(start)
    h = g = 0 * x
    while True:
        new = x + gamma * (w @ h - h) - eta * v
        h = h + q(new - h)
        v = v + gamma * (w @ g - g) + gradient(new) - gradient(x)
        g = g + q(v - g)
        x = new
        yield x


def motef(
    gradients: Iterator[Callable[[Array], Array]], start: Array, w: Array, eta: float, gamma: float,
    q: Callable[[Array], Array], momentum: float, estimate: Array | None = None,
) -> Iterator[Array]:
    """mlolab/MoTEF: BEER whose tracker follows M, a moving average of sampled gradients; with momentum 1 it is BEER.

    `synthetic/solvers.py` starts M at the gradient that V starts at; `MoTEF.py` starts it at 0 (`estimate`).
    """
    x, v = start, next(gradients)(start)
    m = v if estimate is None else estimate
    h = g = 0 * x
    for gradient in gradients:
        x = x + gamma * (w @ h - h) - eta * v
        h = h + q(x - h)
        m_old, m = m, (1 - momentum) * m + momentum * gradient(x)
        v = v + gamma * (w @ g - g) + (m - m_old)
        g = g + q(v - g)
        yield x


def fednest(s: Any, eta_y: float, hlr: float, local: int, neumann: int) -> Iterator[Array]:
    """ucr-optml, `optim svrg`, `hvp_method global_batch`: one step `hlr` for the series and for x.

    p is not scaled by it. A client's factors of the series are its own (`counter`), and a sum p joins those of all
    earlier iterations.
    """
    x, y = s.x0, s.y0

    def average(rows: Array) -> Array:
        return 0 * rows + rows.mean(0)

    while True:
        q, y_0, y_i = average(s.g_y(x, y)), y, y
        for _ in range(local):
            y_i = y_i - eta_y * (s.g_y(x, y_i) - s.g_y(x, y_0) + q)
        y = average(y_i)
        p = term = average(s.f_y(x, y))
        gathered: list[Array] = []
        for _ in range(neumann):
            term = term - hlr * s.g_yy(x, y, term)
            gathered.append(p + term)
            p = average(np.mean(gathered, axis=0))
        h, x_i = average(s.f_x(x, y) - s.g_xy(x, y, p)), x
        for _ in range(local):
            x_i = x_i - hlr * (s.f_x(x_i, y) - s.f_x(x, y) + h)
        x = x - average(x - x_i)
        yield x[0]


def f2sa_2(s: Any, lam: float, eta_in: float, eta_out: float, inner: int, restart: bool) -> Iterator[Array]:
    """F²SA-2 as in its script (∇g of both steps at y₋, ∇f at y₊), or each at its own point without the restart.

    The script sets y₋ := y₊ in every epoch. It divides the step of x by its norm; we do not, and add ∇_x f (there 0).
    """
    plus = minus = s.y0
    x = s.x0
    while True:
        minus = plus if restart else minus
        for _ in range(inner):
            at_plus, at_minus = (minus, plus) if restart else (plus, minus)      # where ∇g and ∇f are taken
            grad_minus = s.g_y(x, minus) - s.f_y(x, at_minus) / lam
            grad_plus = s.g_y(x, at_plus) + s.f_y(x, plus) / lam
            minus, plus = minus - eta_in * grad_minus, plus - eta_in * grad_plus
        x = x - eta_out / 2 * (s.f_x(x, plus) + s.f_x(x, minus) + lam * (s.g_x(x, plus) - s.g_x(x, minus)))
        yield x


def advance(engine: LocalEngine, name: str = "x") -> Iterator[Array]:
    """The rows at the start, and after each round."""
    for round_ in count(1):
        yield engine.rows(name)
        engine.advance(round_)


def without_first_step(engine: LocalEngine) -> LocalEngine:
    """Our rounds begin with the step of x, theirs end with it: a first direction of 0 shifts ours by one round."""
    block = engine.local_blocks[0]
    block.state = replace(block.state, u=0 * block.state.u)
    return engine


def largest_difference(found: Iterator[Array], expected: Iterator[Array], rounds: int = ROUNDS) -> float:
    pairs = list(islice(zip(found, expected, strict=False), rounds))
    assert np.abs(pairs[-1][1] - pairs[0][1]).max() > 0.1
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def compare_soba(lab: Any, problem: Any, pooled: Any) -> float:
    schedules = Schedules({
        "eta_x": InverseSqrt(value=0.25, rounds=1),
        **{name: InverseSqrt(value=0.5, rounds=1) for name in ("eta_y", "eta_v")},
    })
    engine = lab.engine("soba", lab.config("soba"), problem, schedules=schedules)
    return largest_difference(advance(engine), soba(pooled, 0.5, 2.0))


def compare_stocbio(lab: Any, problem: Any, pooled: Any) -> float:
    config = lab.config("stocbio", inner_steps=3, neumann_terms=6, eta_y=0.5, eta_v=0.5, eta_x=0.25)
    ours = islice(advance(without_first_step(lab.engine("stocbio", config, problem))), 2, None)
    return largest_difference(ours, stocbio(pooled, 0.5, 2.0, inner=3, hia=5))


def compare_f2sa(lab: Any, problem: Any, pooled: Any) -> float:
    config = lab.config("f2sa", inner_steps=3, lam_start=3.0, lam_rounds=2.0, eta_z=0.6, eta_y=0.5, eta_x=0.4)
    penalties = [3.0 * (1 + k / 2.0) ** (1 / 3) for k in range(1, ROUNDS + 3)]
    ours = islice(advance(without_first_step(lab.engine("f2sa", config, problem))), 2, None)
    return largest_difference(ours, f2sa(pooled, penalties, 0.5, 0.6, 0.4 * 3.0, inner=3))


def compare_f2ba(lab: Any, problem: Any, pooled: Any, inner: int = 1) -> float:
    config = lab.config("f2ba", inner_steps=inner, lam=7.0, eta_in=0.6, eta_out=0.1, z_start="y")
    ours = islice(advance(without_first_step(lab.engine("f2ba", config, problem))), 2, None)
    return largest_difference(ours, f2ba(pooled, 7.0, 0.6, 0.1, inner))


def compare_beer(lab: Any, problem: Any, pooled: Any) -> float:
    """x does not move: the z loop of C²DFB is BEER on g, K of its iterations a round."""
    k, top = 3, TopK(ratio=0.4)
    config = lab.config("c2dfb", inner_steps=k, eta_in=0.2, gamma_in=0.3, eta_out=1e-300, compressor=top, reset_every=0)
    shard, w = problem.shard(range(6)), lab.network().weights.toarray()
    theirs = beer(lambda z: shard.g_y(shard.x0, z), shard.y0, w, 0.2, 0.3, keep_largest)
    ours = islice(advance(lab.engine("c2dfb", config, problem), "z"), 1, None)
    return largest_difference(ours, islice(theirs, k - 1, None, k))


def keep_largest(rows: Array) -> Array:
    """Top-40 % of every row."""
    kept = np.zeros_like(rows)
    for row, out in zip(rows, kept, strict=True):
        at = np.argsort(-np.abs(row), kind="stable")[: int(0.4 * rows.shape[1])]
        out[at] = row[at]
    return kept


def run_motef(lab: Any, sampled: Any, momentum: float = 1.0, from_zero: bool = False) -> tuple[Iterator[Array], Any]:
    """Return MoTEF's iterates on the samples of C²DFB's batches, every third one, and the shard."""
    shard = CountingShard(sampled.shard(range(6)), BATCHES)
    keys = (Key(shard.seed, shard.ids, round_, step) for round_ in count() for step in range(3))
    batches = chain([shard.sample(Key(shard.seed, shard.ids, 0))], map(shard.sample, keys))
    gradients = ((lambda z, batch=batch: batch.g_y(shard.x0, z)) for batch in batches)
    first = 0 * shard.y0 if from_zero else None
    w = lab.network().weights.toarray()
    theirs = motef(gradients, shard.y0, w, 0.2, 0.3, keep_largest, momentum, first)
    return islice(theirs, 2, None, 3), shard


def compare_motef(lab: Any, problem: Any, pooled: Any, momentum: float = 1.0, from_zero: bool = False) -> float:
    """x does not move, `tracker: cached`: every inner step of the z loop has a batch of its own, as in MoTEF."""
    sampled = lab.quadratic(start=0.5, noise=0.3)
    config = lab.config("c2dfb", inner_steps=3, eta_in=0.2, gamma_in=0.3, eta_out=1e-300, compressor=TopK(ratio=0.4),
                        reset_every=0, tracker="cached")
    ours = islice(advance(lab.engine("c2dfb", config, sampled, batches=BATCHES), "z"), 1, None)
    return largest_difference(ours, run_motef(lab, sampled, momentum, from_zero)[0])


def compare_fednest(lab: Any, problem: Any, pooled: Any, neumann: int = 1) -> float:
    """One step of 1 for the series and x, as their code has it: our L = 1 leaves p unscaled too."""
    config = lab.config("fednest", inner_steps=1, local_steps=3, neumann_terms=neumann + 1, lipschitz=1.0, eta_x=1.0,
                        eta_y=0.3)
    shard = problem.shard(range(problem.nodes))
    ours = (rows[-1] for rows in advance(lab.engine("fednest", config, problem)))
    return largest_difference(islice(ours, 2, None), fednest(shard, 0.3, 1.0, 3, neumann))


def compare_f2sa_2(lab: Any, problem: Any, pooled: Any, restart: bool = False) -> float:
    """One node with all data; nothing is compressed, so the tracked loops are gradient descent."""
    one = pool_nodes(problem)
    config = lab.config("c2dfb_central", inner_steps=3, lam=10.0, eta_in=0.4, eta_out=0.1, compressor=Identity())
    engine = lab.engine("c2dfb_central", config, one)
    block = engine.local_blocks[0]
    block.state = replace(block.state, s=0 * block.state.s, u=0 * block.state.u)       # as in without_first_step
    return largest_difference(islice(advance(engine), 2, None), f2sa_2(pooled, 10.0, 0.4, 0.1, 3, restart))


COMPARED: dict[str, Callable[[Any, Any, Any], float]] = {
    "soba": compare_soba, "stocbio": compare_stocbio, "f2sa": compare_f2sa, "f2ba": compare_f2ba, "c2dfb": compare_beer,
    "c2dfb, mini-batches": compare_motef, "fednest": compare_fednest,
}


@pytest.mark.parametrize("name", COMPARED)
def test_iterates_are_those_of_the_public_code(lab: Any, problem: Any, pooled: Any, name: str) -> None:
    """In every one of forty rounds, to rounding."""
    assert COMPARED[name](lab, problem, pooled) < 1e-12


def test_the_gradient_at_the_wrong_point_differs(lab: Any, problem: Any, pooled: Any) -> None:
    """F2BA's script takes the ∇g of the y step at ŷ: with more than one inner step its iterates are not ours."""
    assert compare_f2ba(lab, problem, pooled, inner=3) > 1e-3


def test_the_script_of_f2sa_2_is_another_method(lab: Any, problem: Any, pooled: Any) -> None:
    """It restarts y₋ at y₊ and mixes the points of ∇f and ∇g; with both undone its loops are those of c2dfb_central."""
    assert compare_f2sa_2(lab, problem, pooled, restart=True) > 0.1
    assert compare_f2sa_2(lab, problem, pooled, restart=False) < 1e-12


def test_a_longer_series_of_local_factors_differs(lab: Any, problem: Any, pooled: Any) -> None:
    """FedNest's code keeps a client's own factors and earlier sums: more than one iteration is another series."""
    assert compare_fednest(lab, problem, pooled, neumann=3) > 1e-3


@pytest.mark.parametrize(("momentum", "from_zero"), [(0.9, False), (1.0, True)])
def test_momentum_or_another_start_differs(
    lab: Any, problem: Any, pooled: Any, momentum: float, from_zero: bool
) -> None:
    """Control: C²DFB has no momentum, and its tracker starts at the gradient that it adds differences to."""
    assert compare_motef(lab, problem, pooled, momentum, from_zero) > 1e-2


def test_momentum_lowers_the_consensus_error(lab: Any) -> None:
    """What C²DFB would gain from it: smaller changes are compressed. The noise of mean(z) stays what it is."""
    consensus, noise = {}, {}
    for momentum in (1.0, 0.1):
        late = np.array(list(islice(run_motef(lab, lab.quadratic(start=0.5, noise=0.3), momentum)[0], 150, 350)))
        mean = late.mean(1, keepdims=True)
        consensus[momentum] = np.square(late - mean).mean()
        noise[momentum] = np.square(mean - mean.mean(0)).mean()
    assert consensus[0.1] < 0.2 * consensus[1.0]
    assert noise[0.1] > 0.6 * noise[1.0]


def test_a_tracker_beside_its_estimate_stays_wrong(lab: Any) -> None:
    """MoTEF.py starts V at ∇ and M at 0: mean(V) − mean(M) stays the mean ∇ of the start, so x ends elsewhere."""
    sampled = lab.quadratic(start=0.5, noise=0.3)
    ends = {}
    for from_zero in (False, True):
        theirs, shard = run_motef(lab, sampled, 1.0, from_zero)
        late = np.array([z.mean(0) for z in islice(theirs, 100, 300)])
        ends[from_zero] = np.linalg.norm(CountingShard(sampled.shard(range(6))).g_y(
            shard.x0, np.tile(late.mean(0), (6, 1))).mean(0))
    start = np.linalg.norm(shard.g_y(shard.x0, shard.y0).mean(0))
    assert ends[False] < 0.05 * start < 0.5 * start < ends[True]


@pytest.mark.parametrize("name", ["soba", "stocbio", "f2sa"])
def test_another_step_is_found(lab: Any, problem: Any, pooled: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a public code whose Hessian- or Jacobian-vector product, or ∇_x g, is 1 % larger has other iterates."""
    other = type(pooled)
    for oracle in ("g_xy", "g_x"):
        original = getattr(other, oracle)
        monkeypatch.setattr(other, oracle, lambda self, *at, original=original: (
            1.01 * original(self, *at) if self is pooled else original(self, *at)
        ))
    assert COMPARED[name](lab, problem, pooled) > 1e-6


def test_documented_comparisons_are_these() -> None:
    """The page has a line for each comparison."""
    table = PAGE.read_text(encoding="utf-8").partition("| method | public code |")[2].partition("\n\n")[0]
    assert [line.strip("|").split("|")[0].strip() for line in table.splitlines()[2:]] == list(COMPARED)
