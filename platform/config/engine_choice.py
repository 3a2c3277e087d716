"""Choose the engine of an experiment that leaves the choice to `auto`.

The rule looks at the experiment alone, so it gives the same answer on every machine and at every time:

1. A key of `engine` that only one engine has chooses it: `address`, `gpus_per_node`, `nodes_per_actor` and others are
   Ray's, `device` is the local engine's.
2. Otherwise the local engine runs what it finishes sooner than Ray starts: an estimate of at most `RAY_START_SECONDS`.
3. Work of unknown size runs on Ray: a plugin's task or data without an estimate, samples from a file. To know them,
   data would have to be loaded, or a user's code run, for every experiment that is only read.

The estimate is rounds × exchanges per round × (`EXCHANGE_SECONDS` + `OPERATION_SECONDS` × operations of an oracle call
over all nodes + `ENTRY_SECONDS` × entries of all rows), and a share of it for every evaluation. The constants were
measured once, on one core; nothing is timed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dbo.platform.config.engines import LocalSettings, RaySettings
from dbo.tasks.api import Work

AUTO = "auto"
RAY_START_SECONDS = 10.0        # from the command to the first round
EXCHANGE_SECONDS = 5e-4
OPERATION_SECONDS = 1e-9        # of a multiplication and an addition
ENTRY_SECONDS = 2e-8
EVALUATION_SHARE = 2.0          # an evaluation takes the time of about two exchanges


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why it was chosen."""

    name: str
    reason: str


def choose_engine(
    given: Mapping[str, Any], work: Work | None, nodes: int, rounds: int, exchanges: int, evaluations: int
) -> Choice:
    """Return the engine for these keys of `engine` and this amount of work (None: unknown)."""
    local, ray = ({field.name for field in fields(kind)} for kind in (LocalSettings, RaySettings))
    keys = given.keys() - {"name"}
    if keys - local:
        return Choice("ray", f"engine.{min(keys - local)} is given")
    if keys - ray:
        return Choice("local", f"engine.{min(keys - ray)} is given")
    if work is None:
        return Choice("ray", "the amount of work is not known")
    seconds = estimate_seconds(work, nodes, rounds, exchanges, evaluations)
    name, relation = ("local", "less") if seconds <= RAY_START_SECONDS else ("ray", "more")
    return Choice(name, f"estimated work of {seconds:.1f} s is {relation} than the start of Ray")


def estimate_seconds(work: Work, nodes: int, rounds: int, exchanges: int, evaluations: int) -> float:
    """Estimate how long the local engine takes for all rounds and evaluations, on one core."""
    step = EXCHANGE_SECONDS + OPERATION_SECONDS * work.operations + ENTRY_SECONDS * nodes * work.entries
    return step * (rounds * max(1, exchanges) + EVALUATION_SHARE * evaluations)
