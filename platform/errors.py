"""What can go wrong in ways that a user should read as one line."""

from collections.abc import Sequence


class InputError(Exception):
    """The input is wrong: one line that names the field, the value and what is allowed. Exit code 2."""


class InUse(InputError):
    """The folder is held by another process."""


class RunError(Exception):
    """The run itself failed: one line that says what happened. Exit code 1."""


class NodeFailure(RunError):
    """An exception inside a node: which nodes, which round, which phase, and the first traceback."""

    def __init__(self, nodes: Sequence[int], round_: int, phase: str, error: str, trace: str) -> None:
        super().__init__(nodes, round_, phase, error, trace)
        self.nodes, self.round, self.phase, self.error, self.trace = tuple(nodes), round_, phase, error, trace

    def __str__(self) -> str:
        who = f"node {self.nodes[0]}" if len(self.nodes) == 1 else f"nodes {self.nodes[0]}–{self.nodes[-1]}"
        return f"{who}, round {self.round}, {self.phase}: {self.error}"


class BlocksLost(Exception):
    """Processes that hosted nodes are gone; the run can go on from a checkpoint once they are replaced."""

    def __init__(self, blocks: Sequence[int], reason: str) -> None:
        super().__init__(f"lost {len(blocks)} block(s) {list(blocks)}: {reason}")
        self.blocks, self.reason = tuple(blocks), reason
