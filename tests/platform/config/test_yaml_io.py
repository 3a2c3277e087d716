"""YAML: the values of version 1.2, round trips, a bounded size, and errors that do not quote the file."""

import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dbo.platform.config import yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import schema
from dbo.platform.runs.runner import run

ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., Any]


def refused(text: str) -> str:
    """Return the error message for a text."""
    with pytest.raises(InputError) as error:
        yaml_io.parse(text, "e.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), [
    ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("0o17", 15), ("017", 17), ("08", 8), ("1_000", "1_000"), ("0x1F", 31),
    ("0b11", "0b11"), ("0o9", "0o9"), ("+12", 12), ("-017", -17), ("2026-01-01", "2026-01-01"), ("yes", "yes"),
    ("No", "No"), ("on", "on"), ("off", "off"), ("y", "y"), ("true", True), ("False", False), ("TRUE", True),
    ("tRue", "tRue"), ("null", None), ("~", None), ("NULL", None), ("", None), ("nUll", "nUll"), (".inf", math.inf),
    ("-.INF", -math.inf), ("+.Inf", math.inf), ("inf", "inf"), ("1e-3", 1e-3), ("1E3", 1e3), (".5", 0.5), ("5.", 5.0),
    ("-1.5e+2", -150.0), ("1e", "1e"), ("=", "="), ("<<", "<<"), ("!!str 3", "3"), ("!!float 3", 3.0),
    ("\u0661e\u0662", "\u0661e\u0662"),
])
def test_values_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    """The core schema: no base 60, no underscores, no dates, four words for truth values in three spellings."""
    found = yaml_io.parse(text, "text")
    assert (found, type(found)) == (value, type(value))


def test_nan_is_a_number() -> None:
    """`.nan` in its three spellings; without the dot it is a text."""
    assert all(math.isnan(yaml_io.parse(text, "text")) for text in (".nan", ".NaN", ".NAN"))
    assert yaml_io.parse("nan", "text") == "nan"


@pytest.mark.parametrize("text", ["tracking: {uri: off}", "tracking: {uri: 'off'}", "tracking: {uri: false}"])
def test_tracking_can_be_off(tmp_path: Path, text: str) -> None:
    """`off` is a text now; false, as which YAML 1.1 reads it, works too. So does the command line."""
    (tmp_path / "e.yaml").write_text(text)
    assert Experiment.read(tmp_path / "e.yaml").tracking.uri == "off"
    assert Experiment.read(None, ["tracking.uri=off"]).tracking.uri == "off"


# Characters of numbers, truth values, dates, merge keys and syntax: short texts of them often look like something else.
TRICKY = st.text(alphabet="0123456789abefnostuyxNOTY+-._:~<= #,[]{}'\"\n\t\x85\u2028", max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | TRICKY
DATA = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text() | TRICKY, inner), max_leaves=10)


@given(DATA)
def test_data_are_read_back_as_written(data: Any) -> None:
    """Every text, number, list and mapping, with the same types."""
    back = yaml_io.parse(yaml_io.dump(data), "text")
    assert back == data
    assert repr(back) == repr(data)


@given(TRICKY)
def test_a_reader_of_yaml_1_1_finds_the_same_text(text: str) -> None:
    """Files are also read by other programs, for which `off` and `1:30` are no texts."""
    assert yaml.safe_load(yaml_io.dump({"name": text})) == {"name": text}


@pytest.mark.parametrize("text", ["1:30", "yes", "off", "0o17", "1_000", "017", "~", ".inf", "1e-3", "2026-01-01"])
def test_ambiguous_texts_are_quoted(text: str) -> None:
    """Those of both versions."""
    assert yaml_io.dump({"name": text}) == f"{{name: '{text}'}}\n"


# ---- size ------------------------------------------------------------------------------------------------------------


def bomb(levels: int, merge: bool) -> str:
    """Return lines that each refer nine times to the line before, by merging or in a list."""
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        values = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} " + (f"{{<<: [{values}]}}" if merge else f"[{values}]"))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("merge", [True, False], ids=["merges", "aliases"])
@pytest.mark.parametrize("levels", [8, 26])
def test_a_bomb_is_refused_at_once(levels: int, merge: bool) -> None:
    """The size is known before anything is expanded."""
    started = time.perf_counter()
    message = refused(bomb(levels, merge))
    assert time.perf_counter() - started < 0.5
    assert message == "e.yaml: too large with its aliases and merges expanded; at most 100,000 values are allowed"


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a, b: 1}", "&a [[*a]]", "? &a [*a]\n: 1"])
def test_a_value_that_contains_itself_is_refused(text: str) -> None:
    """Its size has no bound."""
    assert "too large" in refused(text)


def test_a_bomb_is_refused_by_commands(
    dbo: Command, tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dbo run` of the file; `dbo report` of a folder with it; the parser of `dbo watch`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.yaml").write_text(bomb(26, merge=True))
    run(tiny(rounds=1), tmp_path / "r")
    (tmp_path / "r" / "experiment.yaml").write_text(bomb(26, merge=True))
    (tmp_path / "r" / "manifest.json").unlink()      # a folder of a foreign version: no seal refuses it first
    for arguments in (("run", "e.yaml"), ("report", "r")):
        done = dbo(*arguments)
        assert done.code == 2
        assert "too large" in done.err
        assert done.err.count("\n") == 1
    with pytest.raises(InputError, match="too large"):
        schema.parse_experiment(bomb(26, merge=True), "experiment.yaml")


def test_anchors_and_merges_of_a_normal_size_work() -> None:
    """Control: the order of merges counts, own keys win, and a merged mapping stays what it is."""
    text = "x: &x {<<: {k: 1, m: 1}, k: 2}\ny: &y {k: 3}\nz: {<<: [*y, *x], own: [*x, *x]}\n<<: *x\n"
    x = {"k": 2, "m": 1}
    assert yaml_io.parse(text, "text") == {"x": x, "y": {"k": 3}, "z": {"k": 3, "m": 1, "own": [x, x]}, **x}
    many = "a: &a [" + "1, " * 300 + "]\nb: [" + "*a, " * 300 + "]\n"
    assert len(yaml_io.parse(many, "text")["b"]) == 300


def test_a_key_may_not_be_repeated_in_a_merged_mapping() -> None:
    """Also where a mapping is only merged, never a value of its own."""
    assert "the key 'k' is given twice" in refused("a: {<<: {k: 1, k: 2}}")


# ---- errors ----------------------------------------------------------------------------------------------------------

SECRET = "hunter2"


@pytest.mark.parametrize("text", [
    "key: *hunter2", "key: @hunter2", "key: `hunter2", 'key: "\\hunter2"', "key: !hunter2 x", "key: !hunter2!x y",
    "key: !<hunter2> y", "key: !!int hunter2", "key: !!float hunter2", "key: !!bool hunter2", "key: !!null hunter2",
    "key: !!timestamp hunter2", "key: !!binary hunter2", "key: !!python/name:hunter2 x", "hunter2: {a", "[hunter2",
    "a: b: hunter2", "%hunter2 x\n--- a: [", "[&hunter2 a, &hunter2 b]", "'hunter2",
    "hunter2\0", "- hunter2\nkey: 1", "<<: hunter2", "? {hunter2: 1}\n: 2", "a\n--- hunter2", "key: |hunter2",
    "%TAG !hunter2! x\n%TAG !hunter2! y\n--- a", "key: \"\\xhunter2\"", "key: !!str%hunter2 a",
])
def test_errors_do_not_quote_the_text(text: str) -> None:
    """Whoever names a file of credentials instead of an experiment does not find them in the log of the job."""
    message = refused(text)
    assert SECRET not in message
    assert re.match(r"e\.yaml:( line \d+)? not valid YAML: [a-z]", message)


@pytest.mark.parametrize("content", [b"root:x:0:0:hunter2:/root\n", b"hunter2\n", b"hunter2\xff\n", b"- hunter2\n"])
def test_a_file_that_is_no_experiment_is_not_quoted(dbo: Command, tmp_path: Path, content: bytes) -> None:
    """A text, a binary file or a list: one line with the name of the file."""
    (tmp_path / "credentials").write_bytes(content)
    done = dbo("run", tmp_path / "credentials")
    assert done.code == 2
    assert f"{tmp_path}/credentials" in done.err
    assert SECRET not in done.err


def test_the_syntax_that_is_expected_stays_in_the_message() -> None:
    """Only quotations of the text go."""
    assert "expected ',' or '}', but got '<stream end>'" in refused("{a: 1")


@pytest.mark.parametrize("text", ["!!int x", "!!bool x", "!!timestamp x", "!!null x", "!!float 1_0", "!!set {a}"])
def test_a_wrong_tag_is_an_input_error(text: str) -> None:
    """A tag that does not fit its value, or that is not of the core schema."""
    assert "not valid YAML" in refused(text)


def test_yaml_is_read_in_one_place() -> None:
    """No other module of the packages uses PyYAML, so every file of foreign YAML goes through this loader."""
    found = [
        file.relative_to(ROOT).as_posix()
        for folder in ("algorithms", "benchmarks", "dashboards", "dbo", "platform", "sweeps", "tasks")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) (yaml|ruamel|omegaconf)\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert found == ["platform/config/yaml_io.py"]


def test_a_file_without_an_end_is_refused() -> None:
    """At once, and in little memory: a foreign experiment may name a device as its presets."""
    with pytest.raises(InputError, match="/dev/zero: more than 200,000 characters are not allowed"):
        yaml_io.read(Path("/dev/zero"))


def test_a_file_from_the_command_line_may_be_a_pipe(tmp_path: Path) -> None:
    """As a shell passes `<(command)`; a file that an experiment names may not."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("rounds: 3",), daemon=True)
    writer.start()
    assert yaml_io.read(tmp_path / "pipe") == {"rounds": 3}
    writer.join(10)
