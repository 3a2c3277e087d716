"""Decide what to do after a failure: replace what was lost and replay, or fail. Pure policy, no side effects."""

from collections.abc import Sequence
from dataclasses import dataclass

from dbo.platform.config.engines import EngineSettings
from dbo.platform.config.redact import redact
from dbo.platform.errors import BlocksLost, InputError, RunError
from dbo.platform.runs.schema import Recovery


@dataclass(frozen=True, slots=True)
class Recover:
    """Replace these blocks, roll every block back to the newest checkpoint, and replay: the same bits come out."""

    blocks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run as failed."""

    reason: str


Decision = Recover | Fail


def decide(error: Exception, recoveries: Sequence[Recovery], settings: EngineSettings) -> Decision:
    """Recover from lost blocks as often as `max_recoveries` allows; every other error ends the run."""
    if not isinstance(error, BlocksLost):
        return Fail(format_failure(error))
    if len(recoveries) >= settings.max_recoveries:
        return Fail(redact(f"{error}; engine.max_recoveries = {settings.max_recoveries} is used up"))
    return Recover(error.blocks, error.reason)


def format_failure(error: Exception) -> str:
    """Return an error as one text without credentials; an unexpected one with its type."""
    is_expected = isinstance(error, RunError | InputError)
    return redact(str(error) if is_expected else f"{type(error).__name__}: {error}")
