"""One word for one thing, the field's own word: no identifier, docstring, message or page uses a private dialect.

The words are those of docs/glossary.md ("not"). Identifiers are split at underscores and capitals, so that `run_seats`
and `SeatPlan` are found. A use that is justified is listed in ALLOWED with its reason.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("algorithms", "benchmarks", "dashboards", "dbo", "docs", "platform", "sweeps", "tasks", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", ".ci/run")
SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".j2", ".yaml", ".json"}

# Words that no part of the project uses, wherever they stand.
WORDS = (
    "told", "heard", "spoken", "seat", "seats", "seated", "room", "rooms", "knock", "knocks", "complaint", "complaints",
    "habit", "habits", "standings", "glasses", "unwell", "sick", "reckon", "reckons", "reckoned", "reckoning", "jumped",
    "masked", "masking", "stranger", "strangers",
)
# Words that are forbidden as names in code, where they once named something of ours; in prose they are English.
NAMES = (
    "earlier", "origin", "drawn", "holder", "wide", "moved", "cleared", "tell", "tells", "hear", "say", "says", "said",
)
PHRASES = ("gone on with", "going on with", "go on with", "goes on with", "taken over", "an earlier run", "the house")

# (file, word): why it may stay.
ALLOWED: dict[tuple[str, str], str] = {
    ("algorithms/kernels/compiled.py", "masked"): "the name of an LLVM intrinsic",
    ("platform/config/validation.py", "origin"): "typing.get_origin",
    ("platform/verify/switches.py", "origin"): "typing.get_origin",
    **{("docs/glossary.md", word): "lists words not to use" for word in ("told", "heard", "spoken", "seat", "room")},
}


def split_identifier(name: str) -> list[str]:
    """`read_HTMLPage` as ["read", "html", "page"]."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every name token of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def prose(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string and comment of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def offences(source: str, name: str) -> list[str]:
    """`line: word` for every use of the dialect in a file."""
    found: list[tuple[int, str]] = []
    if name.endswith(".py"):
        for line, identifier in identifiers(source):
            found += [(line, part) for part in split_identifier(identifier) if part in WORDS or part in NAMES]
        texts = list(prose(source))
    else:
        texts = list(enumerate(source.splitlines(), 1))
    for line, text in texts:
        found += [(line, part) for part in split_identifier(text) if part in WORDS]
        flat = " ".join(text.lower().split())
        found += [(line, phrase) for phrase in PHRASES if re.search(rf"\b{phrase}\b", flat)]
    return [f"{name}:{line}: {word}" for line, word in sorted(set(found)) if (name, word) not in ALLOWED]


def files() -> list[str]:
    """Every file that people read, relative to the root."""
    found = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts and "site" not in path.parts
    ]
    names = [path.relative_to(ROOT).as_posix() for path in sorted(found)]
    return [name for name in [*names, *PAGES] if name != "tests/test_vocabulary.py"]


def test_no_file_speaks_a_dialect() -> None:
    """Every word in code, docs and pages is one that an engineer of the field would search for."""
    found = [text for name in files() for text in offences((ROOT / name).read_text(encoding="utf-8"), name)]
    assert found == []


def test_every_exception_is_needed() -> None:
    """An entry of ALLOWED that no file needs any more goes."""
    unused = []
    for name, word in ALLOWED:
        source = (ROOT / name).read_text(encoding="utf-8")
        without = {key: reason for key, reason in ALLOWED.items() if key != (name, word)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "ALLOWED", without)
            if not offences(source, name):
                unused.append((name, word))
    assert unused == []


@pytest.mark.parametrize(
    ("source", "name", "word"),
    [
        ("def told(x):\n    return x\n", "a.py", "told"),
        ("class RaySeats:\n    pass\n", "a.py", "seats"),
        ('"""The run is gone on with."""\n', "a.py", "gone on with"),
        ("x = f'{y} was reckoned'\n", "a.py", "reckoned"),
        ("x = 1      # as the neighbours heard it\n", "a.py", "heard"),
        ("was_moved = True\n", "a.py", "moved"),
        ("The run is gone\non with.\nThe rooms\n", "a.md", "rooms"),
        ("const toldLast = 1;\n", "a.js", "told"),
    ],
)
def test_a_planted_word_is_found(source: str, name: str, word: str) -> None:
    """The check can fail."""
    assert [text for text in offences(source, name) if text.endswith(f": {word}")]


def test_plain_english_is_not_an_offence() -> None:
    """Words that are forbidden as names only may stand in prose."""
    source = '"""Return the metrics of an earlier round."""\nround_number = 1  # moved by the engine\n'
    assert offences(source, "a.py") == []
