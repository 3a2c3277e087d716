"""The result of one check, as a line for the user."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    passed: bool | None     # None: does not apply
    measured: str
    advice: str = ""

    def format(self) -> str:
        """Return the line that a user reads."""
        verdict = "–" if self.passed is None else "ok" if self.passed else "FAILED"
        return f"{verdict:<7}{self.name:<15}{self.describe()}"

    def describe(self) -> str:
        """Return what was measured, with the advice if it failed."""
        return self.measured + (f": {self.advice}" if self.passed is False else "")
