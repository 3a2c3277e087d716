"""Format certificates as a table, for the terminal and for a Markdown file."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from dbo.platform.errors import InputError
from dbo.platform.verify.certificates import EXACT, MAX_RESIDUAL, Certificate

HEADINGS = ("algorithm", "goes to", "∇ψ error", "distance", "from x*", "alike", "consensus", "kept", "verdict")
LEGEND = (
    "goes to: the limit, the zero of ∇ψ, of ∇ψ_λ (penalty), or of ∇ψ with other inverses instead of H̄⁻¹. "
    "∇ψ error: of the mean direction with x fixed at the start. distance: of the worst node's end to the limit; "
    "from x*: to the minimiser of ψ; alike: the same if all nodes have the same data; consensus: to the mean over "
    "nodes. kept: invariants that hold. All errors are relative; a → b: b with a quarter of the step sizes, or "
    "with four times the rounds for a method whose distance falls with them (f2sa)."
)
BEGIN, END = "<!-- dbo verify -->\n", "<!-- end of dbo verify -->\n"


def format_row(certificate: Certificate) -> tuple[str, ...]:
    """Return a row of the table."""
    ends, directions = [certificate.end], [certificate.direction]
    if certificate.smaller is not None:
        ends.append(certificate.smaller[0])
        directions.append(certificate.smaller[1])
    residuals, identical = certificate.end.residuals, certificate.identical
    kept = sum(residual <= MAX_RESIDUAL for residual in residuals.values())
    return (
        certificate.algorithm, certificate.limit.label if certificate.limit else "?",
        _format_numbers(direction.from_exact for direction in directions),
        _format_numbers(end.from_limit for end in ends) if certificate.limit else "?",
        _format_numbers(end.from_solution for end in ends),
        _format_numbers([identical.from_solution]) if identical else "–",
        _format_numbers(end.consensus for end in ends) if identical else "–",
        f"{kept}/{len(residuals)}" if certificate.limit else "–", certificate.verdict,
    )


def _format_numbers(values: Iterable[float]) -> str:
    return " → ".join(
        f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+") if not value <= EXACT else "< 1e-6" for value in values
    )


def split_markdown(path: Path, marks: tuple[str, str] = (BEGIN, END)) -> tuple[str, str]:
    """Return the text of a Markdown file before and after the table; a new file has none."""
    if not path.exists():
        return "", ""
    text, (begin, end) = path.read_text(encoding="utf-8"), marks
    if text.count(begin) != 1 or text.count(end) != 1:
        raise InputError(f"--markdown: {path} must be a new file, or hold the lines {begin.strip()} and {end.strip()}")
    return text.partition(begin)[0], text.partition(end)[2]


def write_markdown(path: Path, certificates: Sequence[Certificate]) -> None:
    """Write the table between its two marks and keep the rest of the file."""
    write_table(path, HEADINGS, map(format_row, certificates), (BEGIN, END))


def write_table(
    path: Path, headings: Sequence[str], rows: Iterable[Sequence[str]], marks: tuple[str, str]
) -> None:
    """Write any table between two marks and keep the rest of the file."""
    before, after = split_markdown(path, marks)
    lines = [headings, ("---",) * len(headings), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    path.write_text(before + marks[0] + table + marks[1] + after, encoding="utf-8")
