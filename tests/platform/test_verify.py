"""`dbo verify`: green for all that is registered, red for each deliberate error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms import c2dfb, sldbo
from dbo.algorithms.registry import algorithms
from dbo.platform import verify as verifying
from dbo.platform.host import Host
from dbo.platform.oracles import Counted

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", algorithms())
def test_every_algorithm_is_where_it_claims_to_be(name: str) -> None:
    """On a ring: invariants in every round, hypergradient, end, end with shorter steps, end on identical nodes."""
    row = verifying.verify(algorithms()[name])
    assert row.verdict == "ok", row.off
    assert row.end.residuals
    assert (row.end.solution > 0.01) == ((row.limit is not None and row.limit.biased) or row.smaller is not None)


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
    """docs/algorithms.md holds the table that `dbo verify --markdown` made: all algorithms, all ok."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.partition(verifying.BEGIN)[2].partition(verifying.END)[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert tuple(cells[0]) == verifying.HEADINGS
    assert sorted((line[0], line[-1]) for line in cells[2:]) == sorted((name, "ok") for name in algorithms())


def test_a_plugin_without_a_claim_is_shown(dbo: Any) -> None:
    """A student's algorithm runs, its errors are printed, nobody judges it."""
    done = dbo("verify", "--plugin", str(ROOT / "docs/examples/gossip_penalty.py"), "--algorithm", "gossip_penalty")
    assert done.code == 0, done.err
    assert "no claim" in done.out


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


def test_without_the_refresh_it_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """∇r⁰ re-evaluated at the new x without the jump in the tracker: mean(s) drifts, and the end is another."""
    monkeypatch.setattr(c2dfb, "refresh", lambda v, gradient: replace(v, grad=gradient(v.d)))
    told = red(dbo, "c2dfb")
    assert "invariant mean(s_z) = mean(∇_y g_i)" in told
    assert "end is" in told


@pytest.mark.parametrize("name", ["c2dfb", "f2ba"])
def test_a_wrong_sign_in_the_hypergradient_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """λ (∇_x g(x, z) − ∇_x g(x, y)): invariants hold all the same, direction and end do not."""
    monkeypatch.setattr(
        f"dbo.algorithms.{name}.upper_gradient",
        lambda s, lam, x, y, z: s.f_x(x, y) - lam * (s.g_x(x, y) - s.g_x(x, z)),
    )
    told = red(dbo, name)
    assert "hypergradient is" in told
    assert "end is" in told


def test_a_wrong_sign_in_second_order_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """∇_x f + ∇²_xy g v in the place of ∇_x f − ∇²_xy g v."""
    original = sldbo.directions

    def wrong(shard: Any, x: Any, y: Any, v: Any) -> Any:
        return replace(original(shard, x, y, v), x=shard.f_x(x, y) + shard.g_xy(x, y, v))

    monkeypatch.setattr(sldbo, "directions", wrong)
    assert "hypergradient is" in red(dbo, "sldbo")


@pytest.mark.parametrize("name", ["sldbo", "dsgda_gt", "mdbo"])
def test_a_stale_gradient_is_red(dbo: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """∇_y g of the call before: trackers follow something, but not the gradients at the present point."""
    last: dict[int, Any] = {}
    original = Counted.g_y

    def stale(self: Counted, x: Any, y: Any) -> Any:
        fresh = original(self, x, y)
        answer = last.get(id(self), fresh)
        last[id(self)] = fresh
        return answer

    monkeypatch.setattr(Counted, "g_y", stale)
    assert "invariant" in red(dbo, name)
