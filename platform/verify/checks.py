"""Check what closed forms cannot show of an algorithm: every switch, its dynamics, draws, channels and wide rows.

| check       | fails if |
|-------------|----------|
| switches    | a contract or an identity of the claim is broken with another value of a switch |
| reference   | a trajectory differs from that of the reference, with the defaults or another value of a switch |
| compressors | a compressor is not contractive in the mean over keys, or its draws do not depend on the whole key |
| draws       | nodes, rounds, steps or channels draw the same random numbers |
| channels    | the content of a channel has no influence on x and y, with the defaults or another value of a switch |
| wide rows   | a float32 run through the fused kernels differs from plain NumPy in float64 |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from dbo.algorithms.api import Algorithm
from dbo.platform.config.plugins import locate_error
from dbo.platform.engine.arrangement import arrange
from dbo.platform.engine.local import LocalEngine
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES, Network, build_network
from dbo.platform.verify import certificates, channels, contracts, draws, fused_rows, switches, trajectories
from dbo.platform.verify.certificates import Certificate
from dbo.platform.verify.check import Check
from dbo.tasks.api import Problem

ROUNDS = 6          # of the identities with each switch
FEW = 3             # inner steps; 2 is another value of that switch
DEFAULTS = "defaults"
ADVICE = {
    "switches": "follow the branch of this switch through init and the round; if the identity holds with the claim's "
                "value alone, name the field in Claim(fixed=...)",
    "reference": "compare the lines of the round with those of the reference, in the order of the pseudo-code",
    "compressors": "docs/tutorial/own-algorithm.md shows a compressor",
    "draws": "equal draws do not average out",
    "channels": "use what it brings, or do not send it",
    "wide rows": "rows of 65,536 entries and more are lazy sums: write updates as arithmetic on whole arrays, and call "
                 "no function that needs plain NumPy arrays or float64",
}


@dataclass(frozen=True)
class Subject:
    """An algorithm, and the small problem that it is checked on."""

    algorithm: Algorithm
    network: Network

    @cached_property
    def problem(self) -> Problem:
        return certificates.build_problem(heterogeneity=1.0)

    @cached_property
    def config(self) -> Any:
        """The claim's configuration with few and small steps, as some values of a switch need them; all differ."""
        return trajectories.separate_numbers(switches.shorten(certificates.configure(self.algorithm), FEW))

    @cached_property
    def variants(self) -> dict[str, Any]:
        """Label → configuration: the defaults, and every other value of every switch."""
        return {DEFAULTS: self.config, **switches.list_variants(self.config)}

    def start(self, algorithm: Algorithm, config: Any, blocks: Any = None) -> LocalEngine:
        problem, network = arrange(algorithm, self.problem, self.network)
        return LocalEngine(algorithm, config, problem, network, blocks or [range(network.nodes)])


def check_algorithm(algorithm: Algorithm, topology: str = "ring") -> Iterator[Check]:
    """Yield the results of all checks."""
    subject = prepare(algorithm, topology)
    for name in NAMES:
        yield run_check(name, subject)


def prepare(algorithm: Algorithm, topology: str = "ring") -> Subject:
    """Return what the checks of an algorithm run on."""
    graph = TOPOLOGIES[topology]().graph(certificates.NODES, certificates.GRAPH_SEED)
    return Subject(algorithm, build_network(graph))


def run_check(name: str, subject: Subject) -> Check:
    """Run one of the checks; an exception of the algorithm is a failure with its place."""
    try:
        with np.errstate(all="ignore"):         # divergence shows in the results
            return _CHECKS[name](subject)
    except Exception as error:
        return Check(name, False, _describe(error), ADVICE[name])


def judge_claim(certificate: Certificate) -> Check:
    """Return the verdict of a certificate as a line beside the other checks."""
    if certificate.failures:
        return Check("closed form", False, "; ".join(certificate.failures), "the docs page Algorithms, Measured, "
                                                                           "explains each of these numbers")
    if certificate.limit is None:
        return Check("closed form", None, "it claims nothing: contracts hold, errors are measured and not judged")
    count = len(certificate.end.residuals)
    return Check("closed form", True, f"contracts, {count} identities in every round, direction, end")


def _describe(error: Exception) -> str:
    reason, place = str(error).strip().partition("\n")[0], locate_error(error)
    return f"raises {type(error).__name__}: {reason}" + (f" ({place})" if place and place not in reason else "")


# ---- every switch ----------------------------------------------------------------------------------------------------


def _check_switches(at: Subject) -> Check:
    """Contracts and identities of every variant; one that the algorithm refuses in so many words is left out."""
    failures, refused = [], []
    for label, config in at.variants.items():
        if label == DEFAULTS:
            continue                            # the certificate has it
        try:
            failures += [f"with {label}, {fault}" for fault in _find_faults(at, label, config)][:1]
        except InputError:
            refused.append(label)
        except Exception as error:
            failures.append(f"with {label} it {_describe(error)}")
    count = len(at.variants) - 1 - len(refused)
    if not count:
        return Check("switches", None, "its configuration has none")
    identities = f" and identities in {ROUNDS} rounds" if at.algorithm.claim else ""
    beside = f"; refused: {', '.join(refused)}" if refused else ""
    return _judge("switches", failures, f"{count} other values: contracts{identities}{beside}")


def _find_faults(at: Subject, label: str, config: Any) -> Iterator[str]:
    nodes = arrange(at.algorithm, at.problem, at.network)[1].nodes
    yield from contracts.find_violations(lambda blocks: at.start(at.algorithm, config, blocks), nodes)
    if (claim := at.algorithm.claim) is None or label.partition("=")[0] in claim.fixed:
        return
    engine, residuals = at.start(at.algorithm, config), dict[str, float]()
    block = engine.local_blocks[0]
    for round_ in range(1, ROUNDS + 1):
        before = block.state
        engine.advance(round_)
        certificates.update_residuals(residuals, claim, before, block)
    for name, residual in residuals.items():
        if not residual <= certificates.MAX_RESIDUAL:
            yield f"invariant {name} is off by {residual:.1e}"


# ---- dynamics --------------------------------------------------------------------------------------------------------


def _check_reference(at: Subject) -> Check:
    if at.algorithm.reference is None:
        return Check("reference", None, "it names none, so its dynamics are not compared: "
                                        "docs/tutorial/own-algorithm.md shows how to write one")
    failures, largest = [], 0.0
    for label, config in at.variants.items():
        try:
            found = trajectories.compare(at.algorithm, config, trajectories.run_reference(at.algorithm, config))
        except InputError:
            continue                            # refused: the check of switches lists it
        except trajectories.ReferenceMismatchError as error:
            return Check("reference", False, str(error), "yield rows by their path in the state")
        except Exception as error:
            failures.append(f"with {label} it {_describe(error)}")
            continue
        largest = max(largest, found.error)
        if not found.error <= trajectories.TOLERANCE:
            failures.append(f"with {label}, {found.path} differs from the reference's from round {found.round} on, "
                            f"by up to {found.error:.1e}")
    return _judge("reference", failures, f"{len(at.variants)} configurations, {trajectories.ROUNDS} rounds: "
                                         f"differences up to {largest:.1e}")


# ---- compressors and draws -------------------------------------------------------------------------------------------


def _check_compressors(at: Subject) -> Check:
    used = {
        label: q for label, config in at.variants.items() for q in switches.list_compressors(config).values()
        if label == DEFAULTS or label.startswith(tuple(switches.list_compressors(at.config)))
    }
    if not used:
        return Check("compressors", None, "its configuration has none")
    kinds = {repr(q): q for q in used.values()}
    failures = [f"{name}: {fault}" for name, q in kinds.items() for fault in _list_compressor_faults(q)]
    return _judge("compressors", failures, f"{len(kinds)} are contractive in the mean over {draws.SAMPLES} keys")


@cache
def _list_compressor_faults(q: Any) -> tuple[str, ...]:
    return tuple(draws.find_compressor_faults(q))


def _check_draws(at: Subject) -> Check:
    names = switches.list_compressors(at.config)
    if not names:
        return Check("draws", None, "no compressor, so no key to check")
    config, calls = draws.record_draws(at.config, names)
    failures = list(draws.find_draw_faults(at.start(at.algorithm, config), calls))
    return _judge("draws", failures, f"differ between nodes, rounds, steps and channels in {draws.ROUNDS} rounds")


# ---- channels and wide rows ------------------------------------------------------------------------------------------


def _check_channels(at: Subject) -> Check:
    if at.algorithm.network == "single":
        return Check("channels", None, "nothing is sent")
    found, failures, lengths = dict[str, None](), [], switches.list_lengths(at.config)
    for label, config in at.variants.items():
        if label.partition("=")[0] in lengths:
            continue            # two steps of MA-DSBO's HIGP send no q but the last, which nothing uses, as printed
        try:
            names, unused = channels.find_channels(
                at.algorithm, lambda changed, config=config: at.start(changed, config))    # type: ignore[misc]
        except InputError:
            continue                            # refused: the check of switches lists it
        found.update(dict.fromkeys(names))
        if unused:
            failures.append(f"with {label}, {', '.join(unused)}: noise in what is received changes neither x nor y")
    return _judge("channels", failures, f"{', '.join(found)} have influence on x or y")


def _check_fused_rows(at: Subject) -> Check:
    single, double = fused_rows.measure_errors(at.algorithm, certificates.configure(at.algorithm))
    measured = (f"float32 through the fused kernels is {single:.1e} from plain float32 and {double:.1e} from plain "
                f"float64 after {fused_rows.ROUNDS} rounds")
    return _judge("wide rows", [] if max(single, double) <= fused_rows.TOLERANCE else [measured], measured)


def _judge(name: str, failures: list[str], measured: str) -> Check:
    if not failures:
        return Check(name, True, measured)
    more = f" (and {len(failures) - 3} more)" if len(failures) > 3 else ""
    return Check(name, False, "; ".join(failures[:3]) + more, ADVICE[name])


_CHECKS: dict[str, Callable[[Subject], Check]] = {
    "switches": _check_switches, "reference": _check_reference, "compressors": _check_compressors,
    "draws": _check_draws, "channels": _check_channels, "wide rows": _check_fused_rows,
}
NAMES = tuple(_CHECKS)
