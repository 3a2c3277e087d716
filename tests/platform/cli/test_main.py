"""The command line: exit codes, one line for wrong input, nothing written then; and what it prints when all is well."""

import fcntl
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from dbo.algorithms.registry import algorithms
from dbo.platform.cli import main

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def _work_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def assert_refused(done: Any, *parts: str) -> None:
    """Exit 2, one line on stderr with all of `parts` in it, nothing on stdout, no traceback."""
    assert done.code == 2, done.err
    assert done.err.startswith("dbo: ")
    assert done.err.count("\n") == 1
    assert done.err.endswith("\n")
    assert "Traceback" not in done.err
    assert done.out == ""
    for part in parts:
        assert part in done.err, done.err


# (arguments, what the line must say). Files are written by `_files` below.
WRONG: list[tuple[str, list[str]]] = [
    # keys
    ("run bogus=1", ["bogus", "known keys", "rounds"]),
    ("run round=3", ["round", "did you mean 'rounds'"]),
    ("run task.bogus=1", ["task.bogus", "known keys"]),
    ("run algorithm.lamda=1", ["algorithm.lamda", "did you mean 'lam'"]),
    ("run topology.p=0.3", ["topology.p", "unknown key"]),
    ("run tracking.uri=file:///tmp/mlruns", ["tracking.uri", "'file:///tmp/mlruns'", "sqlite:///", "http", "off"]),
    ("run tracking.uri=mlruns", ["tracking.uri", "'mlruns'", "sqlite:///"]),
    ("run tracking.uri=sqlite://", ["tracking.uri", "'sqlite://'", "sqlite:///FILE.db"]),
    ("run tracking.uri=http://me:word@127.0.0.1:5000", ["tracking.uri", "MLFLOW_TRACKING_PASSWORD"]),
    ("run tracking.bogus=1", ["tracking.bogus", "known keys: uri, experiment"]),
    ("run algorithm.compressor.bogus=1", ["algorithm.compressor.bogus", "ratio"]),
    ("run rounds.x=1", ["rounds"]),
    ("run =3", ["=3", "key=value"]),
    ("run a..b=3", ["a..b=3", "key=value"]),
    # names
    ("run algorithm.name=c2dfbb", ["algorithm.name", "'c2dfbb'", "did you mean 'c2dfb'", "madsbo"]),
    ("run task.name=nonsense", ["task.name", "'nonsense'", "quadratic"]),
    ("run topology.name=circle", ["topology.name", "'circle'", "two_hop"]),
    ("run partition.name=some", ["partition.name", "'some'", "dirichlet"]),
    ("run algorithm.compressor.name=zip", ["algorithm.compressor.name", "'zip'", "top_k"]),
    ("run task.dataset=cifar", ["task.dataset", "'cifar'", "digits"]),
    ("run task.name=hyper_representation task.dataset=synthetic_text", ["task.dataset", "'synthetic_text'", "digits"]),
    ("run engine.name=mpi", ["engine.name", "'mpi'", "local"]),
    ("run algorithm.name=3", ["algorithm.name", "3", "c2dfb"]),
    ("run algorithm.name=", ["algorithm.name", "None", "c2dfb"]),
    # ranges
    ("run algorithm.inner_steps=0", ["algorithm.inner_steps", "0", "≥ 1"]),
    ("run algorithm.compressor.ratio=0", ["algorithm.compressor.ratio", "0", "> 0"]),
    ("run algorithm.compressor.ratio=1.5", ["algorithm.compressor.ratio", "1.5", "≤ 1"]),
    ("run algorithm.lam=-1", ["algorithm.lam", "-1", "> 0"]),
    ("run nodes=0", ["nodes", "0", "≥ 1"]),
    ("run nodes=-3", ["nodes", "-3", "≥ 1"]),
    ("run seed=-1", ["seed", "-1", "≥ 0"]),
    ("run rounds=0", ["rounds", "0", "≥ 1"]),
    ("run eval_every=0", ["eval_every", "0", "≥ 1"]),
    ("run checkpoint_every=0", ["checkpoint_every", "0", "≥ 1"]),
    ("run partition.h=1.01", ["partition.h", "1.01", "≤ 1"]),
    ("run partition={name: dirichlet, alpha: 0}", ["partition.alpha", "0", "> 0"]),
    ("run topology={name: erdos_renyi, p: 2}", ["topology.p", "2", "≤ 1"]),
    ("run engine={name: local, threads: 0}", ["engine.threads", "0", "≥ 1"]),
    # types
    ("run rounds=abc", ["rounds", "'abc'", "whole number"]),
    ("run rounds=1.5", ["rounds", "1.5", "whole number"]),
    ("run rounds=true", ["rounds", "True", "whole number"]),
    ("run rounds=", ["rounds", "None", "whole number"]),
    ("run rounds=[1, 2]", ["rounds", "[1, 2]", "whole number"]),
    ("run dtype=float16", ["dtype", "'float16'", "float64"]),
    ("run algorithm.lam=.nan", ["algorithm.lam", "nan", "finite"]),
    ("run algorithm.lam=.inf", ["algorithm.lam", "inf", "finite"]),
    ("run algorithm.lam=nan", ["algorithm.lam", "'nan'", "number"]),
    ("run algorithm.y_objective=g", ["algorithm.y_objective", "'g'", "'h'"]),
    ("run algorithm=c2dfb", ["algorithm", "'c2dfb'", "mapping"]),
    ("run task=[quadratic]", ["task", "['quadratic']", "mapping"]),
    ("run tracking=3", ["tracking", "3"]),
    ("run name=3", ["name", "3", "text"]),
    ("run algorithm.compressor=top_k", ["algorithm.compressor", "'top_k'", "mapping"]),
    ("run data_dir=3", ["data_dir", "3", "text"]),
    # files
    ("run missing.yaml", ["missing.yaml", "no such file"]),
    ("run list.yaml", ["list.yaml", "mapping", "list"]),
    ("run number_keys.yaml", ["number_keys.yaml", "mapping"]),
    ("run syntax.yaml", ["syntax.yaml", "line 3", "YAML"]),
    ("run twice.yaml", ["twice.yaml", "line 2", "'rounds'", "twice"]),
    ("run nested_twice.yaml", ["nested_twice.yaml", "'lam'", "twice"]),
    ("run binary.yaml", ["binary.yaml", "cannot be read"]),
    ("run folder", ["folder", "cannot be read"]),
    ("run deep.yaml", ["deep.yaml", "YAML"]),
    ("run good.yaml other.yaml", ["other.yaml", "one experiment file"]),
    ("run rounds={a", ["rounds", "YAML"]),
    # what only shows when components meet
    ("run nodes=3 topology.name=two_hop", ["topology.name", "two_hop", "at least 5", "nodes=3"]),
    ("run nodes=7 topology.name=torus", ["topology.name", "torus", "nodes=7"]),
    ("run nodes=2000 partition.name=iid", ["nodes", "2000", "samples"]),
    ("run nodes=20 partition.h=1.0", ["partition.h", "h=1", "nodes=20", "fewer nodes"]),
    ("run nodes=50 topology={name: erdos_renyi, p: 0.001}", ["topology.p", "0.001", "connected"]),
    ("run algorithm={name: mdbo, eta: 1.0, alpha_x: 5.0}", ["algorithm", "alpha_x"]),
    ("run nodes=4 topology={name: edges, file: missing.txt}", ["topology.file", "missing.txt"]),
    ("run nodes=4 topology={name: edges, file: words.txt}", ["topology.file", "words.txt", "line 2", "node numbers"]),
    ("run nodes=4 topology={name: edges, file: far.txt}", ["topology.file", "far.txt", "line 1", "9"]),
    ("run nodes=4 topology={name: edges, file: apart.txt}", ["topology", "connected"]),
    ("run nodes=4 topology={name: edges, file: loop.txt}", ["topology.file", "own neighbour"]),
    ("run nodes=4 topology={name: edges, file: folder}", ["topology.file", "folder"]),
    ("run topology.name=edges", ["topology.file", "required"]),
    # plugins
    ("run plugins=[missing.py]", ["plugins.0", "missing.py", "No such file"]),
    ("run plugins=[raises.py]", ["plugins.0", "raises.py", "ZeroDivisionError"]),
    ("run plugins=[syntax.py]", ["plugins.0", "syntax.py", "SyntaxError"]),
    ("run plugins=[leaves.py]", ["plugins.0", "leaves.py", "SystemExit"]),
    ("run plugins=[doubles.py]", ["plugins.0", "doubles.py", "'c2dfb'", "a built-in"]),
    ("run plugins=[no_such_module]", ["plugins.0", "no_such_module"]),
    ("run plugins=raises.py", ["plugins", "'raises.py'", "list"]),
    # places
    ("run --out taken", ["--out", "taken", "folder"]),
    ("run --out taken/below", ["--out", "taken/below", "folder"]),
    ("run --out /proc/dbo/run", ["--out", "/proc/dbo/run", "folder"]),
    # comparisons
    ("compare --algorithms c2dfb,nonsense", ["--algorithms", "'nonsense'", "mdbo"]),
    ("compare --algorithms c2dfb,c2dfb", ["--algorithms", "c2dfb,c2dfb", "twice"]),
    ("compare --target nonsense", ["--target", "'nonsense'", "test_accuracy"]),
    ("compare --target test_accuracy=much", ["--target", "'test_accuracy=much'", "metric=level"]),
    ("compare --target test_accuracy=nan", ["--target", "'test_accuracy=nan'", "metric=level"]),
    ("compare --target bogus=0.5", ["--target", "'bogus=0.5'", "test_accuracy"]),
    ("compare --target timestamp=1", ["--target", "'timestamp=1'", "test_accuracy"]),
    ("compare algorithm.name=mdbo", ["algorithm.name", "'mdbo'", "--algorithms"]),
    ("compare algorithm={name: mdbo}", ["algorithm", "mdbo", "--algorithms"]),
    ("compare algorithm.bogus=1", ["algorithm.bogus", "'bogus'", "lam"]),
    ("compare compare_text.yaml", ["algorithms", "mapping"]),
    ("compare compare_typo.yaml", ["algorithms", "'c2dbf'", "'c2dfb'"]),
    ("compare compare_section.yaml", ["algorithm", "'c2dfb'", "mapping"]),
    ("compare compare_target.yaml", ["target", "'bogus'"]),
    ("compare plugins=3", ["plugins", "3", "list"]),
    ("compare --quiet --out taken", ["--out", "taken", "folder"]),
    ("compare bogus=1", ["bogus", "known keys"]),
    # tracking
    ("sync folder", ["folder", "not the folder of a run"]),
    ("sync missing", ["missing", "not the folder of a run"]),
    ("sync folder --uri mlruns", ["--uri", "'mlruns'", "sqlite:///"]),
    ("sync folder --uri off", ["--uri", "sqlite:///"]),
    ("ui folder", ["folder", "no MLflow store"]),
    ("ui --port 0", ["--port", "equal to 1"]),
    # commands and options
    ("nonsense", ["'nonsense'"]),
    ("run --nonsense", ["--nonsense"]),
    ("run --out", ["--out"]),
    ("list nonsense", ["'nonsense'", "algorithms"]),
    ("list a b", ["b"]),
    ("list plugins=[raises.py]", ["plugins.0", "raises.py", "ZeroDivisionError"]),
    ("list rounds=3", ["'rounds'", "plugins"]),
]


@pytest.fixture
def _files(tmp_path: Path) -> None:
    texts = {
        "list.yaml": "- 1\n- 2\n", "number_keys.yaml": "1: 2\n", "syntax.yaml": "rounds: 3\ntask: {name: quadratic\n",
        "twice.yaml": "rounds: 3\nrounds: 4\n", "good.yaml": "rounds: 3\n", "other.yaml": "rounds: 3\n",
        "nested_twice.yaml": "algorithm: {lam: 1.0, lam: 2.0}\n", "taken": "a file\n",
        "deep.yaml": "name: " + "[" * 5000 + "]" * 5000 + "\n",
        "words.txt": "0 1\n1 two\n", "far.txt": "0 9\n", "apart.txt": "0 1\n2 3\n", "loop.txt": "1 1\n",
        "raises.py": "1 / 0\n", "syntax.py": "def (:\n", "leaves.py": "raise SystemExit(0)\n",
        "doubles.py": (
            "from dbo.algorithms.registry import algorithm, algorithms\n"
            "algorithms()\n"
            "@algorithm('c2dfb', config=int, state=int, init=int, packets=int)\n"
            "async def mine(state, shard, cfg):\n    'Mine.'\n"
        ),
        "compare_text.yaml": "algorithms: c2dfb\n", "compare_typo.yaml": "algorithms: {c2dbf: {}}\n",
        "compare_section.yaml": "algorithm: c2dfb\n", "compare_target.yaml": "target: bogus\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    (tmp_path / "folder").mkdir()


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(("line", "parts"), WRONG, ids=[line for line, _ in WRONG])
def test_wrong_input_is_told_in_one_line(dbo: Command, tmp_path: Path, line: str, parts: list[str]) -> None:
    """Exit 2; one line with the field, the value and what is allowed; no traceback; nothing written or changed."""
    before = tree(tmp_path)
    # Words are separated by blanks that do not follow a comma or colon, so that `{name: dirichlet}` stays one word.
    assert_refused(dbo(*re.split(r"(?<![,:]) ", line)), *parts)
    assert tree(tmp_path) == before


def test_folder_of_another_experiment(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """A run never replaces another experiment's, with and without --resume."""
    assert dbo("run", *tiny_overrides, "rounds=1", "--out", "r", "--quiet").code == 0
    before = tree(tmp_path)
    for more in ([], ["--resume"]):
        assert_refused(dbo("run", *tiny_overrides, "seed=1", "--out", "r", *more), "--out", "r", "another experiment")
        assert tree(tmp_path) == before


def test_folder_with_foreign_files(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Files that look like a run's but are none are not overwritten."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text("mine\n")
    before = tree(tmp_path)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "another experiment")
    assert tree(tmp_path) == before


def test_unfinished_run_is_not_overwritten(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Without --resume an unfinished run is left alone, and the line says what to do."""
    assert dbo("run", *tiny_overrides, "--out", "r", "--quiet").code == 0
    (tmp_path / "r" / "summary.json").unlink()
    before = tree(tmp_path)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "unfinished", "--resume")
    assert tree(tmp_path) == before


def test_folder_in_use(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """While another run holds the folder a second one is refused."""
    (tmp_path / "r").mkdir()
    with open(tmp_path / "r" / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "r", "in use")
    assert tree(tmp_path) == {"r": None, "r/.lock": b""}


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind the superuser")
def test_folder_that_cannot_be_written(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """A folder without write permission is an input error."""
    (tmp_path / "r").mkdir(mode=0o500)
    assert_refused(dbo("run", *tiny_overrides, "--out", "r"), "--out", "Permission denied")


def test_comparison_checks_all_folders_first(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """If the second algorithm's folder is taken, the first one is not started."""
    keys = [word for word in tiny_overrides if not word.startswith("algorithm")]
    assert dbo("run", *keys, "algorithm.name=f2ba", "seed=1", "--out", "c/f2ba", "--quiet").code == 0
    before = tree(tmp_path)
    done = dbo("compare", *keys, "--algorithms", "d_soba,f2ba", "--out", "c", "--quiet")
    assert_refused(done, "--out", "c/f2ba", "another experiment")
    assert tree(tmp_path) == before


# ---- what works ------------------------------------------------------------------------------------------------------


def test_run_prints_and_records(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 0; the last metrics and the folder are shown; --quiet says nothing at all."""
    done = dbo("run", *tiny_overrides, "--out", "r")
    assert (done.code, done.err) == (0, "")
    for part in ("finished", "upper_loss", "comm_mb", "round 6/6"):
        assert part in done.out
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "finished"
    assert dbo("run", *tiny_overrides, "--out", "r", "--quiet") == type(done)(0, "", "")


def test_run_without_out_goes_below_runs(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The folder is runs/<name>-<key>; a name with odd characters cannot lead out of it."""
    assert dbo("run", *tiny_overrides, "name=../../a b", "rounds=1", "--quiet").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"a-b-[0-9a-f]{8}|.*a-b-[0-9a-f]{8}", folder.name)
    assert set(os.listdir(tmp_path)) == {"runs"}


def test_file_and_overrides_together(dbo: Command, tmp_path: Path) -> None:
    """Overrides win over the file, and their place among the arguments does not matter."""
    (tmp_path / "e.yaml").write_text("rounds: 9\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\n")
    words = ["rounds=1", "e.yaml", "algorithm={name: d_soba}", "tracking.uri=off"]
    assert dbo("run", *words, "--out", "r", "--quiet").code == 0
    text = (tmp_path / "r" / "experiment.yaml").read_text()
    assert "rounds: 1\n" in text
    assert "nodes: 4\n" in text


@pytest.mark.parametrize("target", ["upper_loss=1e9", "solution_error=1e-9", "upper_loss=-1"])
def test_compare_tells_who_reaches_the_target(
    dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path, target: str
) -> None:
    """A row per algorithm, also when nobody reaches the target, and a table file beside the runs."""
    keys = [word for word in tiny_overrides if not word.startswith("algorithm")]
    wanted = ["--algorithms", "d_soba, f2ba", "--target", target]
    done = dbo("compare", *keys, "rounds=2", *wanted, "--out", "c", "--quiet")
    assert done.code == 0, done.err
    assert "d_soba" in done.out
    assert ("not reached" in done.out) == (target != "upper_loss=1e9")
    rows = (tmp_path / "c" / "compare.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["algorithm", "d_soba", "f2ba"]
    assert {"compare.csv", "d_soba", "f2ba", "group.json"} <= set(os.listdir(tmp_path / "c"))


def test_compare_takes_algorithms_from_a_file(dbo: Command, tmp_path: Path) -> None:
    """`algorithms:` names them with their parameters; an override reaches those that know the parameter."""
    (tmp_path / "c.yaml").write_text(
        "rounds: 1\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\ntarget: upper_loss=0.1\n"
        "algorithms: {f2ba: {lam: 3.0}, d_soba: }\n"
    )
    assert dbo("compare", "c.yaml", "algorithm.inner_steps=2", "tracking.uri=off", "--out", "c", "--quiet").code == 0
    text = (tmp_path / "c" / "f2ba" / "experiment.yaml").read_text()
    assert "inner_steps: 2" in text
    assert "lam: 3.0" in text
    assert "inner_steps" not in (tmp_path / "c" / "d_soba" / "experiment.yaml").read_text()


def test_compare_judges_by_what_can_be_told(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Distances where the solution is known, accuracies where there are data; references on one machine are marked."""
    keys = [word for word in tiny_overrides if not word.startswith("algorithm")]
    done = dbo("compare", *keys, "rounds=2", "--algorithms", "d_soba,f2ba", "--out", "c", "--quiet")
    assert done.code == 0, done.err
    assert "solution_error=0.1" in done.out
    assert "f2ba*" in done.out
    assert "d_soba*" not in done.out
    assert "accuracy" not in done.out
    last = json.loads((tmp_path / "c" / "f2ba" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['solution_error']:.2g}" in done.out
    refused = dbo("compare", *keys, "--algorithms", "d_soba", "--target", "test_accuracy=0.7", "--out", "d")
    assert_refused(refused, "--target", "quadratic has no test_accuracy", "solution_error=0.1")
    learning = ("engine.name=local", "tracking.uri=off", "--algorithms", "d_soba", "--target", "solution_error=0.7")
    assert_refused(dbo("compare", *learning, "--out", "d"), "coefficient_tuning has no solution_error")
    free = dbo("compare", *keys, "--algorithms", "d_soba,sldbo", "--target", "penalty_error=0.1", "--out", "d")
    assert_refused(free, "d_soba, sldbo has no penalty_error")
    empty = dbo("compare", *keys, "--algorithms", "d_soba", "--target", "", "--out", "d")
    assert_refused(empty, "--target", "metric=level")
    assert not (tmp_path / "d").exists()


def test_an_override_wins_over_numbers_by_algorithm(dbo: Command, tmp_path: Path) -> None:
    """rounds=… means all of them; whom `checkpoint_every` does not name has the usual one."""
    (tmp_path / "c.yaml").write_text(
        "rounds: {f2ba: 5}\ncheckpoint_every: {f2ba: 3}\nnodes: 4\ntask: {name: quadratic, dim_x: 4, dim_y: 8}\n"
        "algorithms: {f2ba: {}}\n"
    )
    wanted = ("--algorithms", "f2ba,d_soba", "tracking.uri=off", "--out", "c", "--quiet")
    assert_refused(dbo("compare", "c.yaml", *wanted), "rounds", "d_soba")
    (tmp_path / "typo.yaml").write_text("eval_every: {f2ab: 5}\nalgorithms: {f2ba: {}}\n")
    assert_refused(dbo("compare", "typo.yaml", "--out", "d"), "eval_every", "'f2ab'", "f2ba")
    done = dbo("compare", "c.yaml", "rounds=2", *wanted)
    assert done.code == 0, done.err
    for name, every in (("f2ba", 3), ("d_soba", 10)):
        text = (tmp_path / "c" / name / "experiment.yaml").read_text()
        assert "rounds: 2\n" in text
        assert f"checkpoint_every: {every}\n" in text


def test_a_comparison_is_not_a_run(dbo: Command, tmp_path: Path) -> None:
    """`dbo run` on a comparison's file says so; --algorithms without a name is refused."""
    (tmp_path / "c.yaml").write_text("algorithms: {f2ba: {}}\n")
    assert_refused(dbo("run", "c.yaml", "--out", "r"), "c.yaml", "dbo compare")
    assert_refused(dbo("compare", "--algorithms=", "--out", "r"), "--algorithms", "c2dfb,mdbo")


def test_a_run_that_blew_up_is_told(dbo: Command, tiny_overrides: tuple[str, ...]) -> None:
    """Finite or not: a loss a million times the first is told; a divergence names the preset that it came from."""
    keys = [word for word in tiny_overrides if not word.startswith("algorithm")]
    grown = dbo("run", *keys, "rounds=12", "algorithm={name: d_soba, eta_x: 300.0}", "--out", "r")
    assert "the run has blown up" in grown.out + grown.err
    tame = dbo("run", *keys, "rounds=2", "algorithm={name: d_soba}", "--out", "tame")
    assert "blown up" not in tame.out + tame.err
    gone = dbo("run", *keys, "rounds=900", "algorithm={name: d_soba, eta_x: 300.0}", "--out", "q", "--quiet")
    assert gone.code == 1
    assert "diverged: " in gone.err
    assert "eta_y = 0.19" in gone.err
    assert "eta_x" not in gone.err
    assert "come from a preset" in gone.err


def test_interrupted_comparison_goes_on(dbo: Command, tiny_overrides: tuple[str, ...], tmp_path: Path) -> None:
    """An unfinished algorithm is resumed, a finished one repeated: the same table in the end."""
    keys = [word for word in tiny_overrides if not word.startswith("algorithm")]
    command = ["compare", *keys, "--algorithms", "d_soba,f2ba", "--target", "upper_loss=1e9", "--out", "c", "--quiet"]
    first = dbo(*command)
    (tmp_path / "c" / "f2ba" / "summary.json").unlink()
    again = dbo(*command)
    assert (first.code, again.code) == (0, 0)
    assert json.loads((tmp_path / "c" / "f2ba" / "summary.json").read_text())["status"] == "finished"


def test_list_shows_everything(dbo: Command) -> None:
    """Every name that an experiment can say is listed; one name shows its parameters with range and meaning."""
    done = dbo("list")
    assert (done.code, done.err) == (0, "")
    for name in (*algorithms(), "quadratic", "digits", "two_hop", "by_class", "top_k", "local"):
        assert name in done.out
    one = dbo("list", "top_k").out
    assert "ratio" in one
    assert "> 0 ≤ 1" in one
    assert "madsbo" not in one
    assert not any(word in done.out for word in ("typing", "Annotated", "Union"))
    assert "list of int ≥ 1" in " ".join(dbo("list", "hyper_representation").out.split())
    tuned = " ".join(dbo("list", "sldbo").out.split())
    assert "coefficient_tuning/digits eta_x 0.094" in tuned


@pytest.mark.parametrize("arguments", [(), ("--help",), ("run", "--help"), ("compare", "--help")])
def test_help(dbo: Command, arguments: tuple[str, ...]) -> None:
    """Help goes to stdout and is no error."""
    done = dbo(*arguments)
    assert (done.code, done.err) == (0, "")
    assert "Usage" in done.out


# ---- in a process of its own -----------------------------------------------------------------------------------------


def test_a_real_process_keeps_the_contract(dbo_process: Command, tmp_path: Path) -> None:
    """What holds in this process holds for the command: one line, exit 2, nothing written."""
    assert_refused(dbo_process("run", "nodes=3", "topology.name=two_hop", cwd=tmp_path), "topology.name", "two_hop")
    assert_refused(dbo_process("run", "--nonsense", cwd=tmp_path), "--nonsense")
    assert tree(tmp_path) == {}


def test_no_number_of_a_comparison_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns, with a long name and large figures: names fold, numbers stay whole."""
    screen = io.StringIO()
    monkeypatch.setattr(main, "console", Console(file=screen, width=80))
    row = {
        "algorithm": "algorithm_of_somebody", "single_machine": False, "status": "diverged", "rounds_to_target": None,
        "mb_to_target": 123.45, "seconds_to_target": 234.56, "test_accuracy": 0.9123, "node_accuracy_mean": 0.8234,
        "node_accuracy_min": 0.7345, "comm_mb": 98765.4,
    }
    main._show_comparison(pd.DataFrame([row]), "node_accuracy_mean=0.9")
    said = screen.getvalue()
    assert "…" not in said
    for figure in ("not reached", "123.45", "234.56", "0.9123", "0.8234", "0.7345", "98765"):
        assert figure in said
