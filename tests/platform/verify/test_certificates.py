"""`dbo verify`: green for all that is registered, red for each deliberate error."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms import registry
from dbo.algorithms.claims import MINIMISER, Limit
from dbo.algorithms.methods import c2dfb, c2dfb_nc, madsbo_gt
from dbo.algorithms.registry import algorithms
from dbo.platform.engine.block import Host
from dbo.platform.engine.shard_wrappers import Counted
from dbo.platform.verify import certificates as verifying

ROOT = Path(__file__).resolve().parents[3]
PENALTY_10 = Limit("min ψ_10", lambda problem, cfg, x: problem.penalty_hypergradient(x, 10.0), True, True)


@pytest.fixture(scope="module", params=algorithms())
def row(request: pytest.FixtureRequest) -> verifying.Row:
    """All that is found about an algorithm on a ring."""
    return verifying.verify(algorithms()[request.param])


def test_every_algorithm_is_where_it_claims_to_be(row: verifying.Row) -> None:
    """On a ring: invariants in every round, hypergradient, end, end with shorter steps, end on identical nodes."""
    assert row.verdict == "ok", row.off
    assert row.end.residuals
    assert (row.end.solution > 0.01) == ((row.limit is not None and row.limit.biased) or row.smaller is not None)


def documented() -> list[list[str]]:
    """The table in docs/algorithms.md, cell by cell."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.partition(verifying.BEGIN)[2].partition(verifying.END)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def same(told: str, found: str) -> bool:
    """Whether two cells say the same; a number's last digit may differ by 1, as machines round differently."""
    if told == found:
        return True
    told_parts, found_parts = (cell.replace("< 1e-6", "1.0e-6").split(" → ") for cell in (told, found))
    return len(told_parts) == len(found_parts) and all(map(_near, told_parts, found_parts))


def _near(told: str, found: str) -> bool:
    try:
        a, b = float(told), float(found)
    except ValueError:
        return told == found
    digit = 10.0 ** (np.floor(np.log10(min(a, b))) - 1)
    return bool(abs(a - b) < 1.5 * digit)


@pytest.mark.parametrize(
    ("told", "found", "alike"),
    [
        ("2.5e-1 → 7.0e-2", "2.6e-1 → 6.9e-2", True), ("1.0e-1", "9.9e-2", True), ("< 1e-6", "1.1e-6", True),
        ("2.5e-1", "2.7e-1", False), ("2.5e-1", "2.5e-2", False), ("< 1e-6", "1.3e-6", False),
        ("2.5e-1", "2.5e-1 → 7.0e-2", False), ("6/6", "5/6", False), ("min ψ", "min ψ_λ", False),
        ("–", "1.0e-1", False), ("2.5e-1", "nan", False),
    ],
)
def test_a_stale_number_is_told_from_a_rounded_one(told: str, found: str, alike: bool) -> None:
    """One step of the last printed digit is rounding, two are another number."""
    assert same(told, found) == alike


def test_the_documentation_shows_what_is_found(row: verifying.Row) -> None:
    """docs/algorithms.md holds the line that `dbo verify --markdown docs/algorithms.md` writes today."""
    told = {line[0]: line for line in documented()}.get(row.algorithm)
    assert told is not None, f"{row.algorithm} is not in the table: dbo verify --markdown docs/algorithms.md"
    cells = zip(verifying.HEADINGS, told, verifying.cells(row), strict=True)
    stale = [f"{heading}: {old}, now {new}" for heading, old, new in cells if not same(old, new)]
    assert not stale, "dbo verify --markdown docs/algorithms.md"


def test_it_prints_a_table(dbo: Any, tmp_path: Path) -> None:
    """Exit 0, a line per algorithm; --markdown writes the same into a new file, and again between the marks of it."""
    file = tmp_path / "table.md"
    done = dbo("verify", "--algorithm", "f2ba", "--algorithm", "sldbo", "--markdown", str(file))
    assert done.code == 0, done.err
    assert all(word in done.out for word in ("f2ba", "sldbo", "min ψ_λ", "ok", "distance", "consensus"))
    file.write_text("before\n" + file.read_text() + "after\n")
    verifying.write_markdown(file, [verifying.verify(algorithms()["f2ba"])])
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
def test_wrong_input_is_told_in_one_line(dbo: Any, tmp_path: Path, arguments: tuple[str, ...], words: Any) -> None:
    """Exit 2 before anything runs; a file that is not ours to write stays as it is."""
    (tmp_path / "other.md").write_text("somebody else's")
    done = dbo("verify", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in words)
    assert (tmp_path / "other.md").read_text() == "somebody else's"


def test_the_documentation_shows_every_algorithm() -> None:
    """The table in docs/algorithms.md has a line for each, in the order of `dbo list`, and no other; all are ok."""
    table = documented()
    assert tuple(table[0]) == verifying.HEADINGS
    assert [(line[0], line[-1]) for line in table[2:]] == [(name, "ok") for name in algorithms()]


def test_a_plugin_without_a_claim_is_shown(dbo: Any) -> None:
    """A student's algorithm runs, its errors are printed, nobody judges it."""
    done = dbo("verify", "--plugin", str(ROOT / "docs/examples/gossip_penalty.py"), "--algorithm", "gossip_penalty")
    assert done.code == 0, done.err
    assert "no claim" in done.out


def test_the_second_example_keeps_its_claim(dbo: Any, tmp_path: Path) -> None:
    """docs/examples/compressed_gossip.py: compression, draws, parts of a state, a claim; with rand_k as well."""
    file = ROOT / "docs/examples/compressed_gossip.py"
    done = dbo("verify", "--plugin", str(file), "--algorithm", "compressed_gossip")
    assert done.code == 0, done.err
    assert "compressed_gossip: ok" in done.out
    keys = ("task.name=quadratic", "rounds=3", "engine.name=local", "tracking.uri=off", "--quiet")
    chosen = ("algorithm.name=compressed_gossip", "algorithm.compressor.name=rand_k")
    assert dbo("run", f"plugins=[{file}]", *chosen, *keys, "--out", str(tmp_path / "r")).code == 0


def loose(folder: Path, line: str, start: str = "y=shard.y0") -> tuple[str, ...]:
    """`dbo verify` of the documentation's first example with one more line in its round, after the steps of y and z."""
    text = (ROOT / "docs/examples/gossip_penalty.py").read_text(encoding="utf-8")
    before = "    x, y, z = await mix("
    assert before in text
    text = text.replace(before, f"    {line}\n{before}").replace("y=shard.y0", start).replace("gossip_penalty", "loose")
    file = folder / "loose.py"
    file.write_text(text.replace("from typing import", "import numpy as np\nmemory = []\nfrom typing import"))
    return "verify", "--plugin", str(file), "--algorithm", "loose"


@pytest.mark.parametrize(
    ("line", "told"),
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
def test_bad_habits_are_red_without_a_claim(dbo: Any, tmp_path: Path, line: str, told: str) -> None:
    """What would be wrong in silence: other results on Ray, after a crash, or when run again."""
    done = dbo(*loose(tmp_path, line))
    registry.forget(algorithms()["loose"].round.__module__)
    assert done.code == (1 if told else 0), done.err
    assert told in done.err
    assert ("no claim" in done.out) == (not told)


def test_a_memory_that_starts_anew_is_seen_after_a_checkpoint(dbo: Any, tmp_path: Path) -> None:
    """A global that counts rounds from the first one on is the same in each run, but not in one that goes on."""
    line = "memory[:] = [0] if not st.y.any() else memory; memory.append(1); y = y + 0.01 * len(memory)"
    done = dbo(*loose(tmp_path, line, start="y=0 * shard.y0"))
    registry.forget(algorithms()["loose"].round.__module__)
    assert "a run that goes on from a checkpoint ends elsewhere" in done.err


def red(dbo: Any, name: str) -> str:
    """What is told when an algorithm is off: exit 1, one line that begins with its name."""
    done = dbo("verify", "--algorithm", name)
    assert done.code == 1
    assert done.err.startswith(f"dbo: off: {name}: ")
    message: str = done.err
    return message


@pytest.fixture
def lost_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """One packet of node 2, in one round, reaches nobody else: neighbours hear zeros."""
    original = Host._mix

    def mix(self: Host, under: Any, packets: Any) -> Any:
        answer = original(self, under, packets)
        if (under.round, under.step) != (5, 0) or len(self.ids) == 1:
            return answer
        lost = []
        for mixed, message in zip(answer, under.spoken.channels.values(), strict=True):
            silenced = np.zeros_like(message.values)
            silenced[2] = message.values[2]
            gone = self._weighted(silenced)
            gone[2] = 0
            lost.append(mixed - gone)
        return tuple(lost)

    monkeypatch.setattr(Host, "_mix", mix)


@pytest.mark.usefixtures("lost_message")
@pytest.mark.parametrize("name", [name for name, made in algorithms().items() if not made.single_machine])
def test_a_lost_message_is_seen(name: str) -> None:
    """A single packet that does not arrive breaks an invariant of every networked algorithm."""
    claim = algorithms()[name].claim
    assert claim is not None
    shorter = replace(algorithms()[name], claim=replace(claim, rounds=8))
    row = verifying.verify(shorter)
    assert any(message.startswith("invariant") for message in row.off)


@pytest.mark.usefixtures("lost_message")
def test_a_lost_message_turns_the_command_red(dbo: Any) -> None:
    """Exit 1, and the invariant is named."""
    assert "invariant mean(s_x) = mean(D_x,i)" in red(dbo, "sldbo")


async def unrefreshed(st: Any, shard: Any, cfg: Any) -> Any:
    """A round of MA-DSBO-GT that believes the last gradient to be one at the present x: there is no jump to take in."""
    return await madsbo_gt.madsbo_gt.round(replace(st, grad=shard.g_y(st.x, st.y)), shard, cfg)


@pytest.mark.parametrize(
    ("name", "tracker"),
    [("c2dfb", "mean(s_z) = mean(∇_y g_i)"), ("c2dfb_nc", "mean(s_z) = mean(∇_y g_i)"),
     ("madsbo_gt", "mean(s) = mean(∇_y g_i)")],
)
def test_without_the_refresh_it_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str, tracker: str) -> None:
    """∇r⁰ re-evaluated at the new x without the jump in the tracker: mean(s) drifts, and the end is another."""
    monkeypatch.setattr(c2dfb, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d)))
    monkeypatch.setattr(c2dfb_nc, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d.v)))
    monkeypatch.setitem(registry._registry, "madsbo_gt", replace(madsbo_gt.madsbo_gt, round=unrefreshed))
    told = red(dbo, name)
    assert f"invariant {tracker}" in told
    assert "end is" in told


@pytest.mark.parametrize("name", algorithms())
def test_a_wrong_sign_in_the_hypergradient_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """−∇_x g or −∇²_xy g v, whichever it asks for, in the place of the right one: direction and end are others."""
    in_x, product = Counted.g_x, Counted.g_xy
    monkeypatch.setattr(Counted, "g_x", lambda self, x, y: -in_x(self, x, y))
    monkeypatch.setattr(Counted, "g_xy", lambda self, x, y, v: -product(self, x, y, v))
    told, claim = red(dbo, name), algorithms()[name].claim
    assert claim is not None
    assert "end is" in told
    assert "hypergradient is" in told or not claim.follows


@pytest.mark.parametrize(
    ("name", "limit", "told"),
    [
        ("gossip_dsbo", MINIMISER, "hypergradient is .* and with a quarter of the steps still"),
        ("madsbo", PENALTY_10, "end on identical nodes is"),
        ("sldbo", PENALTY_10, "end is"),
    ],
)
def test_a_claim_that_is_not_true_is_red(name: str, limit: Limit, told: str) -> None:
    """A floor around another point does not shrink, and identical nodes do not end there; each check has its say."""
    claim = algorithms()[name].claim
    assert claim is not None
    row = verifying.verify(replace(algorithms()[name], claim=replace(claim, limit=limit)))
    assert any(re.match(told, message) for message in row.off), row.off


def test_an_identity_that_is_nearly_kept_is_red() -> None:
    """What is off by a millionth is off: rounding is far smaller."""
    made = algorithms()["sldbo"]
    assert made.claim is not None
    invariants = made.claim.invariants
    nearly = replace(made.claim, rounds=20, invariants=lambda *at: {
        name: residual + 1e-6 for name, residual in invariants(*at).items()
    })
    row = verifying.verify(replace(made, claim=nearly))
    assert sum(message.startswith("invariant") for message in row.off) == len(row.end.residuals) == 5


def test_a_wrong_upper_gradient_is_seen_at_the_start(dbo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice ∇_x f: the start is not at 0, where ∇_x f would be 0 and nobody could tell."""
    original = Counted.f_x
    monkeypatch.setattr(Counted, "f_x", lambda self, x, y: 2 * original(self, x, y))
    assert "hypergradient is" in red(dbo, "sldbo")


@pytest.mark.parametrize("name", ["sldbo", "dsgda_gt", "mdbo"])
def test_a_stale_gradient_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """∇_y g of the call before: trackers follow something, but not the gradients at the present point."""
    original = Counted.g_y

    def stale(self: Counted, x: Any, y: Any) -> Any:
        fresh = original(self, x, y)
        answer = vars(self).get("before", fresh)
        vars(self)["before"] = fresh
        return answer

    monkeypatch.setattr(Counted, "g_y", stale)
    assert "invariant" in red(dbo, name)
