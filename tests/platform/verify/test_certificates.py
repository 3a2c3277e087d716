"""`dbo verify`: every registered algorithm passes, and every deliberate error is found."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo import components
from dbo.algorithms import registry
from dbo.algorithms.claims import MINIMISER, Limit
from dbo.algorithms.methods import c2dfb, c2dfb_lead, c2dfb_nc, lean, madsbo_gt
from dbo.algorithms.parts import edges
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.block import Block
from dbo.platform.engine.shard_wrappers import CountingShard
from dbo.platform.verify import table, trajectories
from dbo.platform.verify.certificates import Certificate, configure, verify

ROOT = Path(__file__).resolve().parents[3]
PENALTY_10 = Limit("min ψ_10", lambda problem, cfg, x: problem.penalty_hypergradient(x, 10.0), True, True)


@pytest.fixture(scope="module", params=algorithms())
def certificate(request: pytest.FixtureRequest) -> Certificate:
    """Return the results of all checks of an algorithm on a ring."""
    return verify(algorithms()[request.param])


def test_every_algorithm_keeps_its_claim(certificate: Certificate) -> None:
    """Invariants in every round, hypergradient, end, end with smaller steps, end on identical nodes."""
    assert certificate.verdict == "ok", certificate.failures
    assert certificate.end.residuals
    is_biased = certificate.limit is not None and certificate.limit.biased
    assert (certificate.end.from_solution > 1e-3) == (is_biased or certificate.smaller is not None)


def documented() -> list[list[str]]:
    """Return the table in docs/algorithms.md, cell by cell."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    lines = text.partition(table.BEGIN)[2].partition(table.END)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def is_same(documented: str, found: str) -> bool:
    """Decide whether two cells agree; the last digit of a number may differ by 1, as machines round differently."""
    if documented == found:
        return True
    old, new = (cell.replace("< 1e-6", "1.0e-6").split(" → ") for cell in (documented, found))
    return len(old) == len(new) and all(map(_is_near, old, new))


def _is_near(documented: str, found: str) -> bool:
    try:
        a, b = float(documented), float(found)
    except ValueError:
        return documented == found
    digit = 10.0 ** (np.floor(np.log10(min(a, b))) - 1)
    return bool(abs(a - b) < 1.5 * digit)


@pytest.mark.parametrize(
    ("documented", "found", "expected"),
    [
        ("2.5e-1 → 7.0e-2", "2.6e-1 → 6.9e-2", True), ("1.0e-1", "9.9e-2", True), ("< 1e-6", "1.1e-6", True),
        ("2.5e-1", "2.7e-1", False), ("2.5e-1", "2.5e-2", False), ("< 1e-6", "1.3e-6", False),
        ("2.5e-1", "2.5e-1 → 7.0e-2", False), ("6/6", "5/6", False), ("min ψ", "min ψ_λ", False),
        ("–", "1.0e-1", False), ("2.5e-1", "nan", False),
    ],
)
def test_stale_number_is_distinguished_from_a_rounded_one(documented: str, found: str, expected: bool) -> None:
    """One step of the last printed digit is rounding, two are another number."""
    assert is_same(documented, found) == expected


def test_documented_numbers_are_current(certificate: Certificate) -> None:
    """docs/algorithms.md has the line that `dbo verify --markdown docs/algorithms.md` writes."""
    line = {line[0]: line for line in documented()}.get(certificate.algorithm)
    assert line is not None, f"{certificate.algorithm} is not in the table: dbo verify --markdown docs/algorithms.md"
    cells = zip(table.HEADINGS, line, table.format_row(certificate), strict=True)
    stale = [f"{heading}: {old}, now {new}" for heading, old, new in cells if not is_same(old, new)]
    assert not stale, "dbo verify --markdown docs/algorithms.md"


def test_command_prints_a_table(dbo: Any, tmp_path: Path) -> None:
    """Exit 0, a line per algorithm; --markdown writes it to a new file, or between the marks of an existing one."""
    file = tmp_path / "table.md"
    done = dbo("verify", "--algorithm", "f2ba", "--algorithm", "sldbo", "--markdown", str(file))
    assert done.code == 0, done.err
    assert all(word in done.out for word in ("f2ba", "sldbo", "min ψ_λ", "ok", "distance", "consensus"))
    file.write_text("before\n" + file.read_text() + "after\n")
    table.write_markdown(file, [verify(algorithms()["f2ba"])])
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1], sum(line.startswith("| f2ba") for line in lines)) == ("before", "after", 1)
    assert "sldbo" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--algorithm", "c2df"), ("--algorithm", "c2df", "did you mean 'c2dfb'", "sldbo")),
        (("--topology", "rign"), ("--topology", "rign", "ring")),
        (("--plugin", "missing.py"), ("missing.py",)),
        (("--algorithm", "f2ba", "--markdown", "{tmp}/other.md"), ("--markdown", "other.md")),
    ],
)
def test_wrong_input_is_one_line(dbo: Any, tmp_path: Path, arguments: tuple[str, ...], words: Any) -> None:
    """Exit 2 before anything runs; a file without the marks stays unchanged."""
    (tmp_path / "other.md").write_text("somebody else's")
    done = dbo("verify", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in words)
    assert (tmp_path / "other.md").read_text() == "somebody else's"


def test_every_algorithm_is_documented() -> None:
    """The table in docs/algorithms.md has a line for each, in the order of `dbo list`, and no other; all are ok."""
    lines = documented()
    assert tuple(lines[0]) == table.HEADINGS
    assert [(line[0], line[-1]) for line in lines[2:]] == [(name, "ok") for name in algorithms()]


def test_plugin_without_a_claim_is_measured_only(dbo: Any) -> None:
    """Its errors are printed and not judged."""
    done = dbo("verify", "--plugin", str(ROOT / "docs/examples/gossip_penalty.py"), "--algorithm", "gossip_penalty")
    assert done.code == 0, done.err
    assert "no claim" in done.out


def test_second_example_keeps_its_claim(dbo: Any, tmp_path: Path) -> None:
    """docs/examples/compressed_gossip.py: compression, random numbers, nested state, a claim; with rand_k as well."""
    file = ROOT / "docs/examples/compressed_gossip.py"
    done = dbo("verify", "--plugin", str(file), "--algorithm", "compressed_gossip")
    assert done.code == 0, done.err
    assert "compressed_gossip: ok" in done.out
    keys = ("task.name=quadratic", "rounds=3", "engine.name=local", "tracking.uri=off", "--quiet")
    chosen = ("algorithm.name=compressed_gossip", "algorithm.compressor.name=rand_k")
    assert dbo("run", f"plugins=[{file}]", *chosen, *keys, "--out", str(tmp_path / "r")).code == 0


def verify_with_line(folder: Path, line: str, start: str = "y=shard.y0") -> tuple[str, ...]:
    """Return the command for the first example of the documentation with one more line in its round."""
    text = (ROOT / "docs/examples/gossip_penalty.py").read_text(encoding="utf-8")
    before = "    x, y, z = await dbo.mix("
    assert before in text
    text = text.replace(before, f"    {line}\n{before}").replace("y=shard.y0", start).replace("gossip_penalty", "loose")
    file = folder / "loose.py"
    file.write_text(text.replace("import dbo\n", "import dbo\nimport numpy as np\nmemory = []\n"))
    return "verify", "--plugin", str(file), "--algorithm", "loose"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pass", ""),
        ("y = np.where(st.direction[:, :1] > 0, y, y)", ""),
        ("y = y / max(1, np.linalg.norm(y))", "rows may see each other only through `await mix(...)`"),
        ("y = y + np.random.default_rng().standard_normal(y.shape)", "a second run differs from the first"),
        ("memory.append(y); y = y + 0.1 * len(memory)", "a second run differs from the first"),
        ("st.x[:] = st.x - 0.1", "a round writes into state.x"),
        ("y = y * np.inf", "is not finite after 4 rounds"),
        ("st = State(9 * st.x, st.y, st.z, st.direction)", "x is not finite at the end"),
    ],
)
def test_broken_contracts_fail_without_a_claim(dbo: Any, tmp_path: Path, line: str, message: str) -> None:
    """They would silently change results: on Ray, after a crash, or in a second run."""
    done = dbo(*verify_with_line(tmp_path, line))
    components.forget(algorithms()["loose"].round.__module__)
    assert done.code == (1 if message else 0), done.err
    assert message in done.err
    assert ("no claim" in done.out) == (not message)


def test_hidden_memory_that_resets_itself_is_found_by_resume(dbo: Any, tmp_path: Path) -> None:
    """A global that counts rounds from the first one on is the same in each run, but not after a resume."""
    line = "memory[:] = [0] if not st.y.any() else memory; memory.append(1); y = y + 0.01 * len(memory)"
    done = dbo(*verify_with_line(tmp_path, line, start="y=0 * shard.y0"))
    components.forget(algorithms()["loose"].round.__module__)
    assert "a run resumed from a checkpoint ends elsewhere" in done.err


def fail(dbo: Any, name: str) -> str:
    """Run `dbo verify` and return its error: exit 1, one line that starts with the algorithm's name."""
    done = dbo("verify", "--algorithm", name)
    assert done.code == 1
    message: str = done.err.splitlines()[-1]                 # a first run also says that it compiles kernels
    assert message.startswith(f"dbo: failed: {name}: ")
    return message


@pytest.fixture
def lost_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One packet of node 2, in one round, reaches nobody else: neighbours hear zeros."""
    original = Block._mix

    def mix(self: Block, under: Any, packets: Any) -> Any:
        answer = original(self, under, packets)
        first = 0 if under.outgoing.route == "edges" else 1       # a client's first packet answers the server's
        if (under.number, under.step) != (5, first) or len(self.ids) == 1:
            return answer
        if under.outgoing.separate:
            is_lost = (self._places[0] == 2)[:, :, None]          # one block: places are nodes
            return tuple(replace(each, rows=np.where(is_lost, 0, each.rows)) for each in answer)
        lost = []
        for mixed, message in zip(answer, under.channels.values(), strict=True):
            silenced = np.zeros_like(message.values)
            silenced[2] = message.values[2]
            gone = self._plan(under.outgoing).apply_weights(silenced, ())
            gone[2] = 0
            lost.append(mixed - gone)
        return tuple(lost)

    monkeypatch.setattr(Block, "_mix", mix)


@pytest.mark.usefixtures("lost_message")
@pytest.mark.parametrize("name", [name for name, made in algorithms().items() if made.network != "single"])
def test_lost_message_breaks_an_invariant(name: str) -> None:
    """Of every networked algorithm, even if a single packet does not arrive."""
    claim = algorithms()[name].claim
    assert claim is not None
    shorter = replace(algorithms()[name], claim=replace(claim, rounds=8))
    assert any(message.startswith("invariant") for message in verify(shorter).failures)


@pytest.mark.usefixtures("lost_message")
def test_lost_message_fails_the_command(dbo: Any) -> None:
    """Exit 1, and the invariant is named."""
    assert "invariant mean(s_x) = mean(D_x,i)" in fail(dbo, "sldbo")


async def unrefreshed(st: Any, shard: Any, cfg: Any) -> Any:
    """A round of MA-DSBO-GT that believes the last gradient to be one at the present x: there is no jump to take in."""
    return await madsbo_gt.madsbo_gt.round(replace(st, grad=shard.g_y(st.x, st.y)), shard, cfg)


@pytest.mark.parametrize(
    ("name", "tracker"),
    [("c2dfb", "mean(s_z) = mean(∇_y g_i)"), ("c2dfb_nc", "mean(s_z) = mean(∇_y g_i)"),
     ("madsbo_gt", "mean(s) = mean(∇_y g_i)")],
)
def test_tracker_without_the_refresh_fails(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str, tracker: str) -> None:
    """∇r⁰ re-evaluated at the new x without the jump in the tracker: mean(s) drifts, and the end changes."""
    monkeypatch.setattr(c2dfb, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d)))
    monkeypatch.setattr(c2dfb_nc, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d.v)))
    changed = replace(madsbo_gt.madsbo_gt, round=unrefreshed)
    monkeypatch.setitem(registry.ALGORITHMS._found, "madsbo_gt", (changed, madsbo_gt.__name__))
    error = fail(dbo, name)
    assert f"invariant {tracker}" in error
    assert "end is" in error


def test_a_trigger_at_one_end_of_an_edge_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that a node itself has sent do not count: corrections no longer cancel, and lean's duals drift."""
    def advance(loop: Any, grad: Any, step: Any, sent: Any, *rest: Any) -> Any:
        return edges.advance(loop, grad, step, sent._replace(change=0 * sent.change), *rest)

    monkeypatch.setattr(lean, "advance", advance)
    claim = algorithms()["lean"].claim
    assert claim is not None
    failures = verify(replace(algorithms()["lean"], claim=replace(claim, rounds=8))).failures
    assert {"invariant mean(D_y) = 0", "invariant mean(D_z) = 0"} <= {failure.split(" is ")[0] for failure in failures}


def broken_identities(name: str, **steps: Any) -> set[str]:
    """Return the identities that a method breaks within eight rounds, with other steps than its claim's."""
    claim = algorithms()[name].claim
    assert claim is not None
    shorter = replace(claim, rounds=8, steps={**claim.steps, **steps})
    failures = verify(replace(algorithms()[name], claim=shorter)).failures
    broken = [failure.removeprefix("invariant ") for failure in failures if failure.startswith("invariant ")]
    return {failure.split(" is off by ")[0] for failure in broken}


@pytest.mark.parametrize("is_triggered", [True, False])
def test_a_receiver_that_forgets_what_explains_z_fails(monkeypatch: pytest.MonkeyPatch, is_triggered: bool) -> None:
    """Copies of h_z without q_y are not what their sender has: corrections no longer cancel."""
    def advance(*arguments: Any) -> Any:
        return edges.advance(*arguments[:5])

    assert broken_identities("lean", edge_triggered=is_triggered) == set()
    monkeypatch.setattr(lean, "advance", advance)
    assert broken_identities("lean", edge_triggered=is_triggered) == {
        "mean(D_z) = 0", "mean(z) steps by −η mean(∇) + β mean(z − z_old)"}


STEPS_OF_THE_MEAN = {
    "mean(y) steps by −η mean(∇) + β mean(y − y_old)", "mean(z) steps by −η mean(∇) + β mean(z − z_old)"}


@pytest.mark.parametrize("steps", [{}, *({"momentum": 0.3, "inner_steps": steps} for steps in (1, 2, 3))], ids=repr)
def test_wrong_steps_of_leans_loops_fail(monkeypatch: pytest.MonkeyPatch, steps: dict[str, Any]) -> None:
    """η 1 % too large in y and z, or β: their means do not move as the identities say."""
    assert broken_identities("lean", **steps) == set()
    for name in ("eta", "momentum") if steps else ("eta",):
        def advance(loop: Any, grad: Any, step: Any, *rest: Any, name: str = name) -> Any:
            is_inner = loop.v.shape[1] == 10
            wrong = step._replace(**{name: getattr(step, name) * 1.01}) if is_inner else step
            return edges.advance(loop, grad, wrong, *rest)

        monkeypatch.setattr(lean, "advance", advance)
        assert broken_identities("lean", **steps) == STEPS_OF_THE_MEAN


def test_duals_of_lead_that_start_apart_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """D = 0.01 at the start: the sum stays, and the loops end where mean(∇) = −0.01."""
    start = c2dfb_lead.start
    monkeypatch.setattr(c2dfb_lead, "start", lambda d: replace(start(d), dual=0 * d + 0.01))
    failures = verify(algorithms()["c2dfb_lead"]).failures
    assert {"invariant mean(D_y) = 0", "invariant mean(D_z) = 0", "end"} <= {one.split(" is ")[0] for one in failures}


def test_duals_of_lead_from_old_copies_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """H in the place of Ŷ = H + q: means and end are the same, the trajectory is not."""
    receive, made = c2dfb_lead.receive, algorithms()["c2dfb_lead"]

    def receive_late(v: Any, grad: Any, cfg: Any, hat: Any, wq: Any) -> Any:
        after = receive(v, grad, cfg, hat, wq)
        dual = v.dual + cfg.gamma_in / (2 * cfg.eta_in) * (v.ref - v.w_ref)
        return replace(after, dual=dual, d=v.d - cfg.eta_in * (grad + dual))

    config = configure(made)
    expected = trajectories.run_reference(made, config)
    assert trajectories.compare(made, config, expected).error < trajectories.TOLERANCE
    monkeypatch.setattr(c2dfb_lead, "receive", receive_late)
    assert trajectories.compare(made, config, expected).path
    assert broken_identities("c2dfb_lead") == set()


@pytest.mark.parametrize("name", algorithms())
def test_wrong_sign_in_the_hypergradient_fails(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """−∇_x g or −∇²_xy g v, whichever it uses, instead of the right one: direction and end change."""
    in_x, product = CountingShard.g_x, CountingShard.g_xy
    monkeypatch.setattr(CountingShard, "g_x", lambda self, x, y: -in_x(self, x, y))
    monkeypatch.setattr(CountingShard, "g_xy", lambda self, x, y, v: -product(self, x, y, v))
    error, claim = "; ".join(verify(algorithms()[name]).failures), algorithms()[name].claim
    assert claim is not None
    assert "end is" in error
    assert "hypergradient is" in error or not claim.follows


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("gossip_dsbo", MINIMISER, "hypergradient is .* and with a quarter of the steps still"),
        ("madsbo", PENALTY_10, "end on identical nodes is"),
        ("sldbo", PENALTY_10, "end is"),
    ],
)
def test_wrong_claim_fails(name: str, limit: Limit, message: str) -> None:
    """The distance to another point does not shrink, and identical nodes do not end there."""
    claim = algorithms()[name].claim
    assert claim is not None
    failures = verify(replace(algorithms()[name], claim=replace(claim, limit=limit))).failures
    assert any(re.match(message, failure) for failure in failures), failures


@pytest.mark.parametrize(
    ("name", "order", "message"),
    [("c2dfb", 1, None), ("c2dfb", 2, "bias falls like lam^−0.9"), ("c2dfb_central", 1, "bias falls like lam^−2 ")],
)
def test_the_order_of_a_bias_is_checked(name: str, order: int, message: str | None) -> None:
    """A penalty's bias falls like 1/λ, a central difference's like 1/λ²; claims of another order fail."""
    claim = algorithms()[name].claim
    assert claim is not None
    failures = verify(replace(algorithms()[name], claim=replace(claim, bias=("lam", order)))).failures
    assert [failure.startswith(message or "") for failure in failures] == [True] * (message is not None)


def test_nearly_kept_identity_fails() -> None:
    """An error of a millionth is an error: rounding is far smaller."""
    made = algorithms()["sldbo"]
    assert made.claim is not None
    invariants = made.claim.invariants
    nearly = replace(made.claim, rounds=20, invariants=lambda *at: {
        name: residual + 1e-6 for name, residual in invariants(*at).items()
    })
    found = verify(replace(made, claim=nearly))
    assert sum(failure.startswith("invariant") for failure in found.failures) == len(found.end.residuals) == 5


def test_wrong_upper_gradient_is_found_at_the_start(dbo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice ∇_x f: the start is not at 0, where ∇_x f is 0 and the error would not show."""
    original = CountingShard.f_x
    monkeypatch.setattr(CountingShard, "f_x", lambda self, x, y: 2 * original(self, x, y))
    assert "hypergradient is" in fail(dbo, "sldbo")


@pytest.mark.parametrize("name", ["sldbo", "dsgda_gt", "mdbo"])
def test_stale_gradient_fails(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """∇_y g of the previous call: trackers do not follow the gradients at the current point."""
    original = CountingShard.g_y

    def stale(self: CountingShard, x: Any, y: Any) -> Any:
        fresh = original(self, x, y)
        answer = vars(self).get("before", fresh)
        vars(self)["before"] = fresh
        return answer

    monkeypatch.setattr(CountingShard, "g_y", stale)
    assert "invariant" in fail(dbo, name)
