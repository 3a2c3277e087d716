"""The command line: exit codes, one-line errors for wrong input, help."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.malformed_input import read_tree

Command = Callable[..., Any]
Check = Callable[..., None]

# (arguments, parts of the error message). The fixture `_files` writes the files.
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
    ("run task.name=hyper_representation task.dataset=synthetic_text",
     ["task.dataset", "synthetic_text has sparse features", "digits"]),
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
    ("run seed=1:30", ["seed", "'1:30'", "whole number"]),
    ("run rounds=1_000", ["rounds", "'1_000'", "whole number"]),
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
    ("run algorithm=c2dfbb", ["algorithm.name", "'c2dfbb'", "did you mean 'c2dfb'"]),
    ("run task=[quadratic]", ["task", "['quadratic']", "mapping"]),
    ("run tracking=3", ["tracking", "3", "mapping"]),
    ("run until=0.9", ["until: 0.9 is not allowed", "mapping"]),
    ("run batch_size=0", ["batch_size: 0 is not allowed", "≥ 1"]),
    ("run batch_size={lower: 0}", ["batch_size.lower: 0 is not allowed", "≥ 1"]),
    ("run batch_size={low: 1}", ["batch_size.low: unknown key", "'lower'"]),
    ("run eval_nodes=0", ["eval_nodes: 0 is not allowed", "≥ 1"]),
    ("run algorithm=C2DFB", ["algorithm.name", "'C2DFB'", "did you mean 'c2dfb'"]),
    ("run name=3", ["name", "3", "text"]),
    ("run algorithm.compressor=top_kk", ["algorithm.compressor.name", "'top_kk'", "did you mean 'top_k'"]),
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
    # combinations of components
    ("run nodes=3 topology.name=two_hop", ["topology.name", "two_hop", "at least 5", "nodes=3"]),
    ("run nodes=7 topology.name=torus", ["topology.name", "torus", "nodes=7"]),
    ("run nodes=2000 partition.name=iid", ["nodes", "2000", "samples"]),
    ("run nodes=20 partition.h=1.0", ["partition.h", "h=1", "nodes=20", "fewer nodes"]),
    ("run nodes=50 topology={name: erdos_renyi, p: 0.001}", ["topology.p", "0.001", "connected"]),
    ("run algorithm={name: mdbo, eta: 1.0, alpha_x: 5.0}", ["algorithm", "alpha_x"]),
    ("run nodes=4 topology={name: edges, file: missing.txt}", ["topology.file", "missing.txt"]),
    ("run nodes=4 topology={name: edges, file: words.txt}", ["topology.file", "words.txt", "line 2", "node numbers"]),
    ("run nodes=4 topology={name: edges, file: far.txt}", ["topology.file", "far.txt", "line 1", "numbered 0 to 3"]),
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
    ("run plugins=raises.py", ["plugins.0", "raises.py", "ZeroDivisionError"]),
    ("run plugins=3", ["plugins", "3", "list"]),
    # folders
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
    ("compare --target acuracy=0.5", ["--target", "'acuracy=0.5'", "did you mean 'test_accuracy'"]),
    ("compare --target test_accuracy=90", ["--target", "'test_accuracy=90'", "at most 1"]),
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
    ("run --rounds 5", ["--rounds", "write rounds=VALUE"]),
    ("run --batch-size 5", ["--batch-size", "write batch_size=VALUE"]),
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
def test_wrong_input_is_refused_in_one_line(
    dbo: Command, assert_refused: Check, tmp_path: Path, line: str, parts: list[str]
) -> None:
    """Exit 2; one line with the field, the value and what is allowed; no traceback; nothing written or changed."""
    before = read_tree(tmp_path)
    # Split at blanks that do not follow a comma or colon, so that `{name: dirichlet}` stays one argument.
    assert_refused(dbo(*re.split(r"(?<![,:]) ", line)), *parts)
    assert read_tree(tmp_path) == before


COMMANDS = ("run", "compare", "sweep", "report", "watch", "ui", "list", "verify", "sync", "submit", "doctor")


@pytest.mark.parametrize("arguments", [(), ("--help",), *((command, "--help") for command in COMMANDS)])
def test_help_goes_to_stdout(dbo: Command, arguments: tuple[str, ...]) -> None:
    """Help is no error."""
    done = dbo(*arguments)
    assert (done.code, done.err) == (0, "")
    assert "Usage" in done.out


def test_a_separate_process_refuses_wrong_input(dbo_process: Command, assert_refused: Check, tmp_path: Path) -> None:
    """As in this process: one line, exit 2, nothing written."""
    assert_refused(dbo_process("run", "nodes=3", "topology.name=two_hop", cwd=tmp_path), "topology.name", "two_hop")
    assert_refused(dbo_process("run", "--nonsense", cwd=tmp_path), "--nonsense")
    assert read_tree(tmp_path) == {}


def test_help_loads_no_slow_library(tmp_path: Path) -> None:
    """`dbo --help` imports neither arrays nor a cluster nor a tracking server."""
    code = (
        "import sys; from dbo.platform.cli.main import app; app(['--help'], standalone_mode=False); "
        "print(sorted({'numpy', 'pandas', 'torch', 'ray', 'mlflow', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
