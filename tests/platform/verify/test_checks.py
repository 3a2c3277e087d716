"""`dbo verify` beyond closed forms: shipped algorithms pass, and faults planted in a copy of C²DFB are found."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from dbo import components
from dbo.algorithms.api import COMPRESSORS, Compressor, Key, Message, RandK, TopK, dense, param
from dbo.algorithms.methods import c2dfb
from dbo.algorithms.references import penalty_methods
from dbo.algorithms.registry import algorithms
from dbo.platform.config import plugins
from dbo.platform.verify import checks, draws, switches, trajectories

SOURCE = Path(c2dfb.__file__).read_text(encoding="utf-8")
LONG = ("c2dfb_nc", "c2dfb_lead", "lean")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in algorithms()])
def test_shipped_algorithms_pass(name: str) -> None:
    """Every check, every switch; and every shipped algorithm names a reference."""
    found = list(checks.check_algorithm(algorithms()[name]))
    assert [check.name for check in found] == list(checks.NAMES)
    assert [check.format() for check in found if check.passed is False] == []
    assert {check.name for check in found if check.passed} >= {"reference", "wide rows"}


@dataclass(frozen=True)
class Fault:
    """An edit of the source of C²DFB, the check that finds it, and words of its message."""

    edits: tuple[tuple[str, str], ...]
    check: str
    words: tuple[str, ...]


FAULTS = {
    "gamma halved in the tracker": Fault(
        (("s = s + (step.gamma * gap_s", "s = s + (0.5 * step.gamma * gap_s"),),
        "reference", ("with defaults", "differs from the reference's from round 1 on"),
    ),
    "step along the mixed tracker": Fault(
        (("- step.eta * s ", "- step.eta * (s + gap_s) "),),
        "reference", ("differs from the reference's",),
    ),
    "wrong factor under h": Fault(
        (("from dbo.algorithms.parts.penalty import YObjective, upper_gradient, y_gradient",
          "from dbo.algorithms.parts.penalty import YObjective, upper_gradient\n"
          "from dbo.algorithms.parts import penalty\n\n"
          "def y_gradient(shard, lam, objective, x, y):\n"
          "    return (2 if objective == 'h' else 1) * penalty.y_gradient(shard, lam, objective, x, y)\n"),),
        "reference", ("with y_objective=h,",),
    ),
    "cached loses the change": Fault(
        (("    for k in range(cfg.inner_steps):",
          "    if cfg.tracker == 'cached':\n"
          "        grad_y, grad_z = inner_gradients(shard, cfg, x)\n"
          "        loops['y'] = replace(loops['y'], grad=grad_y(loops['y'].d))\n"
          "        loops['z'] = replace(loops['z'], grad=grad_z(loops['z'].d))\n"
          "    for k in range(cfg.inner_steps):"),),
        "switches", ("with tracker=cached, invariant mean(s_y) = mean(∇r_i) is off",),
    ),
    "one key for all steps": Fault(
        (('grad_y, step_y, key.at(k), "y")', 'grad_y, step_y, key, "y")'),),
        "draws", ("two messages of a round draw the same numbers", "key.at(k)"),
    ),
    "one key for all rounds": Fault(
        (("key, outer = round_key(shard, st.t), st.outer", "key, outer = round_key(shard, 0 * st.t), st.outer"),),
        "draws", ("rounds 1 and 2 draw the same numbers", "count t in the state"),
    ),
    "one key for all nodes": Fault(
        (('    q_s = step.compressor(s - s_hat, key, channel + "_s")',
          '    key = replace(key, ids=0 * key.ids)\n'
          '    q_s = step.compressor(s - s_hat, key, channel + "_s")'),),
        "draws", ("nodes draw the same numbers on channel y_s", "shard.ids"),
    ),
    "one channel name for two messages": Fault(
        (('channel + "_s")', 'channel + "_d")'),),
        "draws", ("two messages of a round draw the same numbers (channel y_d",),
    ),
    "an unused channel": Fault(
        (("wx, ws = await mix(x=st.x, s=st.s)", "wx, ws, _ = await mix(x=st.x, s=st.s, u=st.u)"),),
        "channels", ("u: noise in what is received changes neither x nor y", "do not send it"),
    ),
    "a message without effect": Fault(
        (("gap_s=v.gap_s + wq_s", "gap_s=v.gap_s + 0 * wq_s"),),
        "channels", ("y_s, z_s: noise",),
    ),
    "a message without effect under compressor_x": Fault(
        (("ws = outer.wx_hat + wq_x, outer.ws_hat + wq_s", "ws = outer.wx_hat + wq_x, outer.ws_hat + 0 * wq_s"),),
        "channels", ("with compressor_x=", "s: noise in what is received changes neither x nor y"),
    ),
    "a message without effect under tracker: cached": Fault(
        (('receive(loops["y"], wy_d, wy_s)',
          'receive(loops["y"], wy_d, wy_s if cfg.tracker == "refresh" else 0 * wy_s)'),),
        "channels", ("with tracker=cached, y_s: noise",),
    ),
    "an unused channel under compressor_x": Fault(
        (("wq_x, wq_s = await mix(x=q_x, s=q_s)", "wq_x, wq_s, _ = await mix(x=q_x, s=q_s, u=st.u)"),),
        "channels", ("with compressor_x=", ", u: noise"),
    ),
    "a stale gradient": Fault(
        (("    d = d + step", "    d_old, d = d, d + step"), ("grad, gradient(d)", "grad, gradient(d_old)")),
        "reference", ("differs from the reference's from round 1 on",),
    ),
    "a stale gradient, seen by identities": Fault(
        (("    d = d + step", "    d_old, d = d, d + step"), ("grad, gradient(d)", "grad, gradient(d_old)")),
        "switches", ("with inner_steps=2, invariant mean(s_y) = mean(∇r_i) is off",),
    ),
    "a dropped message": Fault(
        (("gap_d=v.gap_d + wq_d", "gap_d=v.gap_d + wq_d * (wq_d[:, :1] > 0)"),),
        "switches", ("invariant mean(Σ_j w_ij (ŷ_j − ŷ_i)) = 0 is off",),
    ),
    "a reset of half of the pair": Fault(
        (("s_hat=0 * v.s_hat, gap_s=0 * v.gap_s", "s_hat=0 * v.s_hat"),),
        "reference", ("with defaults, ", "differs from the reference's"),
    ),
    "a reset one round late": Fault(
        (("key.round % cfg.reset_every == 0", "key.round % cfg.reset_every == 1"),),
        "reference", ("with defaults, ", "from round 2 on"),
    ),
    "a reset of the iterate's reference too": Fault(
        (("s_hat=0 * v.s_hat, gap_s=0 * v.gap_s",
          "s_hat=0 * v.s_hat, gap_s=0 * v.gap_s, d_hat=0 * v.d_hat, gap_d=0 * v.gap_d"),),
        "reference", ("with defaults, ", "from round 4 on"),
    ),
    "one bad compressor": Fault(
        (("    q_d = step.compressor(d - d_hat, key",
          "    q_d = step.compressor((2 if type(step.compressor).__name__ == 'Qsgd' else 1) * (d - d_hat), key"),),
        "reference", ("with compressor=qsgd,",),
    ),
    "arithmetic that wide rows refuse": Fault(
        (("    t, s, u, loops", "    x[:, 0] = x[:, 0]\n    t, s, u, loops"),),
        "wide rows", ("raises", "rows cannot be changed in place", "lazy sums"),
    ),
    "double precision in wide rows": Fault(
        (("    t, s, u, loops", "    x = x * (1.01 if x.shape[1] > 60000 and x.dtype == 'float32' else 1.0)\n"
                                "    t, s, u, loops"),),
        "wide rows", ("from plain float64", "lazy sums"),
    ),
}


def write_copy(folder: Path, edits: tuple[tuple[str, str], ...], name: str = "faulty") -> Path:
    """Write a plugin: the source of C²DFB under another name, with edits."""
    text = SOURCE.replace('    "c2dfb", config=', f'    "{name}", config=').replace(
        "async def c2dfb(", f"async def {name}(")
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    file = folder / f"{name}.py"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Any]:
    """Load a plugin with edits and return the algorithm; forget it afterwards."""
    def load(edits: tuple[tuple[str, str], ...]) -> Any:
        plugins.load((str(write_copy(tmp_path, edits)),))
        return algorithms()["faulty"]

    yield load
    if "faulty" in algorithms():
        components.forget(algorithms()["faulty"].round.__module__)


def test_copy_without_a_fault_passes(load: Any) -> None:
    """Control: the same plugin without an edit, its reference included."""
    found = list(checks.check_algorithm(load(())))
    assert [check.passed for check in found] == [True] * len(checks.NAMES)


@pytest.mark.parametrize("label", FAULTS)
def test_planted_fault_is_found(load: Any, label: str) -> None:
    """The message names what failed, under which configuration, and has advice."""
    fault = FAULTS[label]
    found = checks.run_check(fault.check, checks.prepare(load(fault.edits)))
    assert found.passed is False
    assert all(word in found.describe() for word in fault.words), found.describe()
    assert found.advice


@pytest.mark.parametrize(
    "label", [label for label, fault in FAULTS.items() if fault.check == "channels" and " under " in label])
def test_fault_of_a_switch_escapes_the_defaults(load: Any, label: str) -> None:
    """The negative control: with the defaults alone the check of channels passes."""
    subject = checks.prepare(load(FAULTS[label].edits))
    subject.__dict__["variants"] = {checks.DEFAULTS: subject.config}
    assert checks.run_check("channels", subject).passed is True


@pytest.mark.slow
@pytest.mark.parametrize("label", FAULTS)
def test_planted_fault_fails_the_command(dbo: Any, tmp_path: Path, label: str) -> None:
    """Exit 1; one line per check on the screen, and the failed one in the error."""
    fault = FAULTS[label]
    done = dbo("verify", "--plugin", str(write_copy(tmp_path, fault.edits)), "--algorithm", "faulty")
    components.forget(algorithms()["faulty"].round.__module__)
    assert done.code == 1
    assert all(word in done.err for word in (f"{fault.check}: ", *fault.words))
    assert f"FAILED {fault.check}" in done.out


def test_command_prints_a_line_per_check(dbo: Any) -> None:
    """With --algorithm; a check that does not apply says why."""
    done = dbo("verify", "--algorithm", "f2ba")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert ["ok", "reference"] in [line[:2] for line in lines]
    assert ["–", "channels"] in [line[:2] for line in lines]
    assert "nothing is sent" in done.out


def test_dynamics_are_not_compared_without_a_reference(load: Any) -> None:
    """The output says so, and a halved consensus step is then not found."""
    halved = FAULTS["gamma halved in the tracker"].edits
    algorithm = load((*halved, ("    reference=references.c2dfb,\n", "")))
    found = checks.run_check("reference", checks.prepare(algorithm))
    assert found.passed is None
    assert "dynamics are not compared" in found.measured


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda s: {"x": s.x0}, "the reference does not yield y"),
        (lambda s: {"x": s.x0, "y": s.y0, "loop_y.nothing": s.y0}, "loop_y.nothing, which the state does not have"),
        (lambda s: {"x": s.x0[:2], "y": s.y0}, "in the state"),
    ],
)
def test_reference_that_does_not_fit_is_an_error(rows: Any, message: str) -> None:
    """Missing rows, paths that the state does not have, other shapes."""
    def reference(s: Any, w: Any, cfg: Any) -> Iterator[Any]:
        while True:
            yield rows(s)

    found = checks.run_check("reference", checks.prepare(replace(algorithms()["c2dfb"], reference=reference)))
    assert found.passed is False
    assert message in found.measured


def test_reference_must_be_a_function() -> None:
    """The decorator refuses anything else."""
    made = algorithms()["c2dfb"]
    from dbo.algorithms.api import algorithm

    with pytest.raises(ValueError, match="reference must be a generator function"):
        algorithm("odd", config=made.config, state=made.state, init=made.init, reference=3)(made.round)  # type: ignore[arg-type]


# ---- switches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Every kind of switch."""

    mode: Literal["one", "two", "three"] = param("one")
    on: bool = param(False)
    steps: int = param(10, ge=1)
    reset: int = param(5, ge=0)
    share: float = param(1.0, gt=0, le=1)
    eta: float = param(0.3, gt=0, schedule=True)
    eta_y: float | None = param(None, gt=0)
    gamma: float | Literal["auto"] = param(0.5, gt=0, le=1)
    compressor: Compressor = param(TopK(ratio=0.3))
    compressor_x: Compressor | None = param(None)


def test_every_switch_is_listed() -> None:
    """Literals, bools, optional values, compressors and what is inside of them; one change at a time."""
    config = Nested()
    found = switches.list_variants(config)
    kinds = set(COMPRESSORS)
    assert found.keys() >= {
        "mode=two", "mode=three", "on=true", "steps=2", "reset=0", "reset=2", "share=0.6", "eta_y=0.25", "gamma=auto",
        "compressor.bits=2", "compressor.levels=uniform",
        *(f"compressor={kind}" for kind in kinds - {"top_k"}), *(f"compressor_x={kind}" for kind in kinds),
    }
    assert not {label for label in found if label.startswith(("eta=", "lam="))}
    for label, variant in found.items():
        name = label.partition("=")[0].partition(".")[0]
        assert getattr(variant, name) != getattr(config, name)
        assert replace(variant, **{name: getattr(config, name)}) == config
    assert switches.list_variants(replace(config, eta_y=0.2, gamma="auto")).keys() >= {"eta_y=null", "gamma=0.6"}


def test_every_switch_of_c2dfb_is_checked() -> None:
    """The ones that the paper's comparison needs, by name."""
    labels = checks.prepare(algorithms()["c2dfb"]).variants
    assert {"tracker=cached", "y_objective=h", "reset_every=2", "compressor=rand_k", "compressor=qsgd"} <= set(labels)
    assert {f"compressor={name}" for name in COMPRESSORS if name != "top_k"} <= set(labels)


def test_numbers_of_a_configuration_are_made_to_differ() -> None:
    """Equal step sizes would hide that one is used for the other; ends of ranges stay."""
    config = trajectories.separate_numbers(Nested())
    assert config.share == 1.0
    assert 0 < config.eta < 0.05
    assert len({config.eta, config.gamma, config.share}) == 3


def test_another_number_is_seen_in_the_trajectory() -> None:
    """Control: a reference that takes η_in for η_out is found, although the claim has the same value for both."""
    def swapped(s: Any, w: Any, cfg: Any) -> Any:
        return penalty_methods.c2dfb(s, w, replace(cfg, eta_out=cfg.eta_in))

    made = algorithms()["c2dfb"]
    assert made.claim is not None
    assert made.claim.steps["eta_in"] == made.claim.steps["eta_out"]
    found = checks.run_check("reference", checks.prepare(replace(made, reference=swapped)))
    assert found.passed is False


# ---- compressors -----------------------------------------------------------------------------------------------------


class Scaled(RandK):
    """rand-k that is scaled to be unbiased, and no longer contractive."""

    def __call__(self, rows: Any, key: Key, channel: str) -> Message:
        message = RandK.__call__(self, rows, key, channel)
        return replace(message, values=message.values / self.ratio)


class SameForAll(RandK):
    """rand-k with one mask for all channels."""

    def __call__(self, rows: Any, key: Key, channel: str) -> Message:
        return RandK.__call__(self, rows, key, "")


class Unkeyed(RandK):
    """rand-k with a generator of its own."""

    def __call__(self, rows: Any, key: Key, channel: str) -> Message:
        return dense(rows * (np.random.default_rng().random(rows.shape) < self.ratio))


class Stacked(TopK):
    """top-k over all rows together."""

    def __call__(self, rows: Any, key: Key, channel: str) -> Message:
        return dense(np.where(np.abs(rows) >= np.sort(np.abs(rows), axis=None)[-5], rows, 0))


@pytest.mark.parametrize(
    ("q", "words"),
    [
        (Scaled(ratio=0.2), "more than 1 − δ = 0.8"),
        (SameForAll(ratio=0.3), "different channels draw the same numbers"),
        (Unkeyed(ratio=0.3), "the same key gives another message"),
        (Stacked(ratio=0.01), "a row alone gives another message"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else "",
)
def test_wrong_compressor_is_found(q: Compressor, words: str) -> None:
    """Contraction in the mean over keys, draws, rows."""
    faults = list(draws.find_compressor_faults(q))
    assert len(faults) == 1
    assert words in faults[0]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_shipped_compressors_pass(name: str) -> None:
    """With their defaults and every other value of their switches."""
    q = COMPRESSORS[name]()
    for label, each in {"defaults": q, **switches.list_variants(q)}.items():      # type: ignore[type-var]
        assert list(draws.find_compressor_faults(each)) == [], label
