"""`dbo verify --noise`: every claim about mini-batches holds, and false ones are found."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbo.algorithms.claims import Noise
from dbo.algorithms.methods import vrdbo
from dbo.algorithms.registry import Algorithm, algorithms
from dbo.platform.verify import noise_table
from dbo.platform.verify.stochastic import (
    SIGMA,
    NoiseCertificate,
    Spread,
    build_problem,
    check_samples,
    measure_spread,
    scale_steps,
    verify_noise,
)
from dbo.tasks.api import Batches

ROOT = Path(__file__).resolve().parents[3]
CLAIMED = [name for name, made in algorithms().items() if made.claim is not None and made.claim.noise is not None]
FAST = {"c2dfb", "mdbo", "vrdbo", "sldbo", "d_soba"}       # one of each kind; the others take as long again


def with_noise(name: str, **changes: Any) -> Algorithm:
    """The algorithm with another claim about noise."""
    made = algorithms()[name]
    assert made.claim is not None
    assert made.claim.noise is not None
    return replace(made, claim=replace(made.claim, noise=replace(made.claim.noise, **changes)))


def documented() -> dict[str, list[str]]:
    """algorithm → its line in docs/algorithms.md."""
    begin, end = noise_table.MARKS
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    lines = text.partition(begin)[2].partition(end)[0].splitlines()
    assert tuple(cell.strip() for cell in lines[0].strip("|").split("|")) == noise_table.HEADINGS
    return {cells[0]: cells for line in lines[2:] if (cells := [cell.strip() for cell in line.strip("|").split("|")])}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CLAIMED]
)
def certificate(request: pytest.FixtureRequest) -> NoiseCertificate:
    return verify_noise(algorithms()[request.param])


def test_every_claim_holds(certificate: NoiseCertificate) -> None:
    """Half of the steps, half of the noise, one node, other samples, the method without variance reduction."""
    assert certificate.verdict == "ok", certificate.failures


def test_documented_numbers_are_current(certificate: NoiseCertificate) -> None:
    """docs/algorithms.md has the line of `dbo verify --noise`; long noisy runs may differ a little between machines."""
    found = noise_table.format_row(certificate)
    for old, new in zip(documented()[certificate.algorithm][1:-1], found[1:-1], strict=True):
        if "–" in (old, new) or old.startswith(">"):
            assert old == new
        else:
            assert float(new.replace(",", "")) == pytest.approx(float(old.replace(",", "")), rel=0.3, abs=0.05)


def test_every_algorithm_is_documented() -> None:
    """The table has a line for each algorithm, in the order of `dbo list`; one has no claim."""
    verdicts = {name: cells[-1] for name, cells in documented().items()}
    assert list(verdicts) == list(algorithms())
    assert {name for name, verdict in verdicts.items() if verdict == "no claim"} == {"bome"}
    assert set(verdicts.values()) == {"ok", "no claim"}


def test_batches_are_unbiased() -> None:
    """The mean of each derivative over an epoch is that of all samples."""
    assert list(check_samples()) == []


def test_biased_batches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: batches that prefer some samples have another mean."""
    original = Batches.draw
    monkeypatch.setattr(Batches, "draw", lambda self, *at: np.minimum(original(self, *at), 20))
    found = list(check_samples())
    assert [message.split()[3] for message in found] == ["f_y", "g_x", "g_y", "g_yy", "g_xy"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("d_soba", {"reduced": True}, "half of the steps leaves"),
        ("d_soba", {"shared": True}, "new samples at every call"),
        ("d_soba", {"below": "d_soba"}, "compared with d_soba it has 1 of"),
        ("d_soba", {"below": "sldbo"}, "compared with sldbo it has"),      # which diverges with these steps
        ("d_soba", {"scale": ()}, "half of the steps leaves"),
    ],
)
def test_a_false_claim_fails(name: str, changes: dict[str, Any], message: str) -> None:
    """A method without variance reduction does not pass as one; nor is a variance proportional to nothing."""
    failures = verify_noise(with_noise(name, rounds=200, **changes)).failures
    assert any(message in failure for failure in failures), failures


def test_other_samples_at_the_old_point_break_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: VRDBO with a fresh batch at one of its two points is worse than MDBO, not better."""
    made = algorithms()["vrdbo"]
    assert made.claim is not None
    problem, setting = build_problem(SIGMA, 1.0), replace(scale_steps(made.claim, 1.0), rounds=150)
    plain = measure_spread(algorithms()["mdbo"], setting, problem).variance
    same = measure_spread(made, setting, problem).variance
    original, rounds = vrdbo.local_hypergradient, cycle((0, 1_000_000))

    def other_samples(shard: Any, cfg: Any, x: Any, y: Any, t: Any) -> Any:
        """Draw the batches of another round at every second call: at the old point."""
        return original(shard, cfg, x, y, t + next(rounds))

    monkeypatch.setattr(vrdbo, "local_hypergradient", other_samples)
    other = measure_spread(made, setting, problem).variance
    assert same < 0.5 * plain < plain < 0.1 * other


def test_a_method_with_biased_directions_is_found() -> None:
    """BOME's multiplier is a ratio of sampled numbers: mean(x) leaves its end by more than the noise explains."""
    made = algorithms()["bome"]
    assert made.claim is not None
    noise = Noise(scale=("eta_x", "eta_y"), rounds=200)
    claim = replace(made.claim, noise=noise)
    spread = measure_spread(made, scale_steps(claim, 1.0), build_problem(SIGMA, 1.0))
    assert spread.offset > 0.5


def test_an_algorithm_without_a_claim_is_not_run() -> None:
    """A plugin need not claim anything about noise."""
    found = verify_noise(replace(algorithms()["sldbo"], claim=None))
    assert (found.verdict, found.failures) == ("no claim", ())
    assert noise_table.format_row(found)[-1] == "no claim"


@pytest.mark.parametrize("ratio", [np.nan, np.inf])
def test_divergence_fails(ratio: float) -> None:
    """NaN and inf are no ratios."""
    from dbo.platform.verify import stochastic

    noise = Noise(scale=(), shared=True, below="mdbo")
    broken = NoiseCertificate("x", noise, Spread(ratio, ratio), ratio, ratio, ratio, np.nan, 1 / ratio)
    assert len(list(stochastic._check_noise(broken, noise))) == 6


def test_command_prints_a_table(dbo: Any, tmp_path: Path) -> None:
    """Exit 0, a line per algorithm; --markdown writes it to a new file."""
    file = tmp_path / "noise.md"
    done = dbo("verify", "--noise", "--algorithm", "d_soba", "--algorithm", "bome", "--markdown", str(file))
    assert done.code == 0, done.err
    assert all(word in done.out for word in ("d_soba", "bome", "no claim", "one node"))
    assert file.read_text().startswith(noise_table.MARKS[0])


def test_command_fails_with_one_line(dbo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1, and the false claim is named."""
    from dbo.platform.verify import stochastic

    monkeypatch.setattr(stochastic, "STEP_RATIO", (0.9, 1.0))
    done = dbo("verify", "--noise", "--algorithm", "d_soba")
    assert done.code == 1
    assert done.err.startswith("dbo: failed: d_soba: half of the steps leaves")
