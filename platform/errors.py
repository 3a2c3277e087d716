"""Define the errors that a user reads as one line."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

_NEAR = 0.6       # share of equal letters, as in difflib


def suggest(name: Any, known: Iterable[str]) -> str:
    """Return ", did you mean …?" with the nearest known name, of several the first one; "": none is near."""
    by_lower = {one.lower(): one for one in known}
    wanted = SequenceMatcher(b=str(name)[:200].lower())

    def rate(one: str) -> float:
        wanted.set_seq1(one)
        return wanted.ratio()

    nearest = max(by_lower, key=rate, default="")
    return f", did you mean {by_lower[nearest]!r}?" if nearest and rate(nearest) >= _NEAR else ""


class InputError(Exception):
    """Wrong input: one line that names the field, the value and what is allowed. Exit code 2."""


class FolderLockedError(InputError):
    """The folder is locked by another process."""


class ShorterRunError(InputError):
    """The folder holds the same experiment with fewer rounds, which --from can extend."""

    def __init__(self, message: str, folder: str, rounds: int) -> None:
        super().__init__(message)
        self.folder, self.rounds = folder, rounds       # the folder of the shorter run; the rounds that are wanted


class RunError(Exception):
    """The run failed: one line with the reason. Exit code 1."""


class NodeFailure(RunError):
    """An exception in a node: which nodes, which round, which phase, and the first traceback."""

    def __init__(self, nodes: Sequence[int], round_: int, phase: str, error: str, trace: str) -> None:
        super().__init__(nodes, round_, phase, error, trace)
        self.nodes, self.round, self.phase, self.error, self.trace = tuple(nodes), round_, phase, error, trace

    def __str__(self) -> str:
        nodes = f"node {self.nodes[0]}" if len(self.nodes) == 1 else f"nodes {self.nodes[0]}–{self.nodes[-1]}"
        return f"{nodes}, round {self.round}, {self.phase}: {self.error}"


class BlocksLost(Exception):
    """Processes that hosted nodes died; the run can resume from a checkpoint once they are replaced."""

    def __init__(self, blocks: Sequence[int], reason: str) -> None:
        super().__init__(f"lost {len(blocks)} block(s) {list(blocks)}: {reason}")
        self.blocks, self.reason = tuple(blocks), reason
