"""Report what the program waits for, once it takes longer than usual."""

from collections.abc import Callable
from dataclasses import dataclass, field

_FIRST_SECONDS = 5.0           # nothing is reported before
_UNUSUAL = 3.0                 # times the longest wait of the same kind so far: a round may well take a minute
_REPEAT = 2.0                  # each notice comes after so many times the wait of the one before


@dataclass(slots=True)
class WaitNotices:
    """The notices of one engine: the longer a wait, the rarer they are."""

    notify: Callable[[str], None]
    _longest: dict[str, float] = field(default_factory=dict)      # kind of wait → seconds of the longest that ended
    _next: float = 0.0

    def begin(self, kind: str) -> None:
        """Begin a wait of this kind."""
        self._next = max(_FIRST_SECONDS, _UNUSUAL * self._longest.get(kind, 0.0))

    def report(self, text: str, waited: float, limit: float) -> None:
        """Notify the user if the wait is unusually long by now."""
        if waited >= max(self._next, _FIRST_SECONDS):
            self._next = _REPEAT * waited
            self.notify(f"{text}: {waited:.0f} s so far, {limit:g} s at most")

    def end(self, kind: str, waited: float) -> None:
        """Remember how long a wait of this kind has taken."""
        self._longest[kind] = max(waited, self._longest.get(kind, 0.0))
