"""The documentation is true: the site builds without a warning, and every command in it is one that `dbo` accepts."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer

import dbo
from dbo.platform.cli.compare import parse_seeds
from dbo.platform.cli.console import split_arguments
from dbo.platform.cli.main import app
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs import compare as comparing
from dbo.platform.runs.runner import run
from dbo.platform.runs.stop_rule import StopRule
from dbo.sweeps import plan
from dbo.sweeps.grid import Grid
from dbo.tasks.registry import TASKS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts)]
# Placeholders of a reader's own: such a command is parsed, but its experiment cannot be built here.
OWN_PLAN = re.compile(r"presets=|A,B,C|FILE|NAME|\[key=value|plugins=|package\.module|…|KEY=")
OWN = re.compile(r"experiment\.yaml|FILE|DIR|NAME|/path/to|…|\[key=value|data_dir|plugins=|package\.module")


def commands(page: str) -> list[str]:
    """The `dbo …` commands in the code blocks of a page, continuation lines joined, comments removed."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
    lines += [line for block in blocks for line in block.splitlines()]
    found = []
    for line in lines:
        line = re.sub(r"\s+#.*$", "", line.strip().removeprefix(".venv/bin/")).removesuffix(" &")
        line = re.sub(r"^([A-Z_]+=\S+ )+", "", line)
        if line.startswith("dbo "):
            found.append(line)
    return found


def inline_commands(page: str) -> list[str]:
    """The `dbo …` commands in the sentences and tables of a page, also where a line breaks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^    .*$", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return [" ".join(command.split()) for command in re.findall(r"`(dbo [^`]+)`", text)]


def header_commands(file: Path) -> list[str]:
    """The commands in the comments of a sweep's or comparison's file."""
    text = file.read_text(encoding="utf-8").replace("\\\n#", " ")
    return [re.sub(r"\s+#.*$", "", line) for line in re.findall(r"^#     (dbo .*)$", text, re.MULTILINE)]


# Their sentences name the runs behind numbers; the other pages' name commands in general.
RESULTS = ["docs/results.md", "docs/beyond.md", "docs/tuning.md"]
PLANNED = [file.relative_to(ROOT).as_posix() for folder in (*plan.SWEEP_FOLDERS.values(), ROOT / "docs" / "examples")
           for file in sorted(Path(folder).resolve().glob("*.yaml"))]
COMMANDS = [
    *((page, command) for page in PAGES for command in commands(page)),
    *((page, command) for page in RESULTS for command in inline_commands(page)),
    *((file, command) for file in PLANNED for command in header_commands(ROOT / file)),
]


def parse(words: list[str]) -> Any:
    """The command's parsed parameters; a usage error if `dbo` would refuse it."""
    group = typer.main.get_command(app)
    name, *rest = words
    command = group.commands[name]    # type: ignore[attr-defined]
    return command.make_context(name, rest).params


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_is_accepted(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and options exist, and the experiments that it would run are allowed."""
    words = [word for word in shlex.split(command)[1:] if not word.startswith("[")]
    if any(("[" in word and "=" not in word) or word in {"|", "…"} for word in words) or "[--" in command:
        words = words[:1]                      # a synopsis: the name is what can be checked
        assert words[0] in typer.main.get_command(app).commands    # type: ignore[attr-defined]
        return
    params = parse(words)
    if words[0] == "run" and not OWN.search(command):
        arguments = list(params["arguments"] or [])
        files = [word for word in arguments if "=" not in word]
        Experiment.read(ROOT / files[0] if files else None, [word for word in arguments if "=" in word])
    if words[0] in ("compare", "sweep") and not OWN_PLAN.search(command):
        monkeypatch.chdir(ROOT)
        build_runs(words[0], params)


def build_runs(kind: str, params: dict[str, Any]) -> list[Experiment]:
    """The experiments that a command would run, by the code that it uses; data are not loaded."""
    name, overrides = split_arguments(params["arguments"], kind)
    if kind == "compare":
        names = [name.strip() for name in (params["algorithms"] or "").split(",") if name.strip()]
        found, _ = comparing.plan(name, overrides, names, params["target"], parse_seeds(params["seeds"]))
    elif name is None:
        return []           # lists the shipped sweeps
    else:
        found = [cell.experiment for cell in Grid(plan.read_sweep(plan.find_sweep(name), overrides), False).cells]
    for experiment in found:
        StopRule.of(experiment)
    return found


@pytest.mark.parametrize("file", PLANNED)
def test_every_shipped_file_has_runs(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of data that need a download: a plan does not. Each file names the command that runs it, or has a name."""
    monkeypatch.chdir(ROOT)
    is_sweep = re.search("^axes:", Path(file).read_text(encoding="utf-8"), re.MULTILINE) is not None
    found = build_runs("sweep" if is_sweep else "compare", parse(["sweep" if is_sweep else "compare", file]))
    assert len(found) > 1
    assert len({experiment.run_key for experiment in found}) == len(found)


@pytest.mark.parametrize("command", [
    "compare sweeps/paper/table1.yaml algorithm.inner_step=3", "compare sweeps/paper/table1.yaml --target accuracy=1",
    "compare docs/examples/digits.yaml until={target: nothing=1}", "sweep sensitivity-k axes.seeds=[0]",
    "sweep paper/figure4", "compare sweeps/paper/table2.yaml",
])
def test_a_wrong_plan_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail."""
    monkeypatch.chdir(ROOT)
    kind, *words = re.split(r" (?![a-z]+=1\})", command)
    with pytest.raises(InputError):
        build_runs(kind, parse([kind, *words]))


def test_inline_commands_are_found() -> None:
    """In tables too."""
    for page, text in (("docs/results.md", "dbo sweep sensitivity-k task.name=hyper_cleaning"),
                       ("docs/results.md", "dbo compare sweeps/beyond/damping.yaml data_dir=DIR --out runs/damping")):
        assert text in inline_commands(page)
    assert header_commands(ROOT / "sweeps/paper/figure2.yaml")[1].startswith("dbo sweep paper/figure2-mdbo data_dir=")


def test_there_are_commands_to_check() -> None:
    """The test above is not empty."""
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("command", ["run --no-such-option", "compare --algorithm c2dfb", "sync"])
def test_a_wrong_command_is_refused(command: str) -> None:
    """The check can fail."""
    with pytest.raises(Exception, match=r"[Nn]o such option|[Mm]issing"):
        parse(shlex.split(command))


def test_the_site_builds(tmp_path: Path) -> None:
    """`make docs`, offline: a broken link or an undocumented name is a warning, and a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert all(f"dbo.{name}" in page or name in page for name in ("run", "compare", "sweep", "load", "mix", "param"))
    assert (tmp_path / "tutorial" / "first-comparison.html").is_file()


def test_the_python_of_the_docs_runs(tmp_path: Path) -> None:
    """As printed: the tutorial's on a comparison, and the start from a model. Each page brings its imports."""
    code = {page: re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
            for page in ("tutorial/first-comparison.md", "runs.md")}
    dbo.compare(["c2dfb", "mdbo"], rounds=2, nodes=4, engine="local", out=tmp_path / "runs" / "compare")
    (start,) = [block for block in code["runs.md"] if "start=" in block]
    for block in ("\n".join(code["tutorial/first-comparison.md"]), start):
        done = subprocess.run(
            [sys.executable, "-c", block], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "accuracy-mb.png").stat().st_size > 1000
    assert (tmp_path / "model.safetensors").is_file()


def test_every_sentence_is_short() -> None:
    """Sentences have at most 30 words; most have far fewer."""
    long = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        text = re.sub(r"```.*?```|^    .*$|^\|.*$|^#.*$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
        for paragraph in re.split(r"\n\s*\n|\n[-*\d]+[. ]", text):
            for sentence in re.split(r"(?<=[.:;!?])\s+", " ".join(paragraph.split())):
                if len(sentence.split()) > 30:
                    long.append(f"{page}: {sentence[:120]}…")
    assert long == []


@pytest.mark.parametrize("task", [*TASKS])
def test_every_metric_is_documented(task: str) -> None:
    """docs/runs.md explains each column that a run of this task writes, and each file."""
    if task in ("coefficient_tuning", "hyper_representation", "hyper_cleaning"):
        section: dict[str, Any] = {"name": task, "dataset": "digits"}
    else:
        section = {"name": task}
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        result = run(Experiment(task=section, nodes=4, rounds=1, engine="local", algorithm={"name": "c2dfb"}), folder)
        missing = [name for name in result.history.columns if f"`{name}`" not in text]
        assert missing == []
        files = {path.name for path in Path(folder).iterdir() if not path.name.startswith(".")}
        assert [name for name in sorted(files) if f"`{name}`" not in text and f"`{name}/`" not in text] == []
