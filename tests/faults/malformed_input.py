"""Generate malformed input: values outside the declared range of every parameter, and selected files and commands.

A case is a command line, the files it needs, and what the error message must name. `find_fault` checks the response.
"""

import random
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from dbo.algorithms.compression.compressors import COMPRESSORS
from dbo.algorithms.registry import algorithms
from dbo.parameters import declaration
from dbo.platform.config.engines import ENGINES
from dbo.platform.config.experiment import Experiment
from dbo.platform.network.topology import TOPOLOGIES
from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

LOCAL = "engine.name=local"
# An error message must have one of these: they introduce what is allowed.
ALLOWED = (
    "allowed", "must", "known keys", "expected", "required", "at least", "key=value", "metric=level", "did you mean",
    "YAML", "cannot", "no such file", "twice", "one experiment file", "choose", "use ", "above", "numbered", "needs",
    "requires", "own neighbour", "no keys of its own", "not the folder of", "e.g. ", "damaged", "belongs to another",
    "no such", "unexpected", "leaves", "connected",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong input; the error message must contain every entry of `expected`."""

    kind: str
    arguments: tuple[str, ...]
    expected: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.arguments)}"[:120]


def cases(seed: int = 0) -> list[Case]:
    """Return all cases; the same for the same seed."""
    rng = random.Random(seed)
    found = [
        *_top(), *_components(), *_typos(rng), *_overrides(rng), *_files(rng), *_edges(rng), *_places(), *_commands(),
        *_uris(), *_sweeps(),
    ]
    return list({(case.arguments, tuple(case.files.values())): case for case in found}.values())


def find_fault(case: Case, code: int, out: str, err: str, changed: bool, seconds: float | None = None) -> str | None:
    """Return what is wrong with the response to a case; None if it is correct."""
    if "Traceback" in err + out:
        return "a traceback"
    if code != 2:
        return f"exit {code}: {err.strip()[:200]}"
    if changed:
        return "something was written"
    if not err.startswith("dbo: ") or err.count("\n") != 1 or out:
        return f"not one line: {(err + out)[:300]!r}"
    if len(err) > 2_000:
        return f"a line of {len(err)} characters"
    missing = [part for part in case.expected if part not in err]
    if missing:
        return f"does not name {missing}: {err.strip()[:300]}"
    if not any(phrase in err for phrase in ALLOWED):
        return f"does not name what is allowed: {err.strip()[:300]}"
    if seconds is not None and seconds > 2:
        return f"took {seconds:.1f} s"
    return None


# ---- values ----------------------------------------------------------------------------------------------------------


def _run(kind: str, expected: str | tuple[str, ...], *arguments: str, **files: bytes) -> Case:
    named = {name.replace("__", "."): data for name, data in files.items()}
    return Case(kind, ("run", *arguments), (expected,) if isinstance(expected, str) else expected, named)


def _wrong(entry: "Field[Any]", hint: Any) -> Iterator[str]:
    """Yield values, as they are typed, that the type or the declared range of a parameter does not allow."""
    text, limits = str(hint), declaration(entry)
    is_number, is_list, is_choice = "int" in text or "float" in text, "tuple" in text, "Literal" in text
    is_text = "str" in text and not is_choice
    yield "{a: 1}"
    if is_number and "Optional" not in text and "None" not in text:
        yield ""
    if not is_text:
        yield "nonsense words"
    if is_number:
        yield from (".nan", ".inf", "-.inf", "[[1], [2]]", "'1'", "2026-01-01")
        yield "true" if "bool" not in text else "maybe"
    if "int" in text and "float" not in text and not is_list:
        yield from ("1.5", "1e3")
    if is_text or (is_choice and not is_number):
        yield from ("3", "[a]", "true")
    if is_text and "None" not in text:
        yield "''"
    if is_list:                              # the range is that of its entries
        yield "[]"
        return
    if limits.gt is not None:
        yield from (str(limits.gt), str(limits.gt - 1))
    if limits.ge is not None:
        yield from (str(limits.ge - 1), "-1000000")
    if limits.lt is not None:
        yield str(limits.lt)
    if limits.le is not None:
        yield str(limits.le + 1)


def _top() -> Iterator[Case]:
    wrong = {
        "name": ("3", "''", "[]", "{}", "true", "", "x" * 101),
        "seed": ("-1", "1.5", "x", str(2**31), "1" + "0" * 400, "", "true", "[1]", "{a: 1}", ".nan"),
        "nodes": ("0", "-3", "1.5", "x", "100001", "", "true", "[1]", ".inf", "1e2"),
        "rounds": ("0", "-1", "1.5", "x", "", "false", "[1]", "{}", "'5'"),
        "eval_every": ("0", "-1", "0.5", "often", "", "[2]"),
        "checkpoint_every": ("0", "-1", "0.5", "never", "", "{}"),
        "dtype": ("float16", "int", "3", "", "[float32]", "FLOAT64", "bfloat16"),
        "task": ("nothing", "3", "[]", ""), "algorithm": ("nothing", "3", "[]", ""),
        "topology": ("nothing", "3", "[]", ""),
        "partition": ("nothing", "3", "[]", ""), "engine": ("nothing", "3", "[]", ""),
        "tracking": ("off", "3", "[]", ""),
        "tracking.experiment": ("''", "3", "[]", ""), "tracking.uri": ("3", "[]", "true", "{}"),
        "data_dir": ("3", "[]", "true", "{}"), "plugins": ("3", "x.py", "{}", "[3]", "[[a.py]]", "true"),
    }
    for key, values in wrong.items():
        engine = () if key == "engine" else (LOCAL,)
        for value in values:
            yield _run("value", key, *engine, f"{key}={value}")


def _components() -> Iterator[Case]:
    """Yield every parameter of every component with every kind of wrong value for its type and range."""
    tables: list[tuple[str, dict[str, Any]]] = [
        ("algorithm", {name: known.config for name, known in algorithms().items()}), ("topology", dict(TOPOLOGIES)),
        ("partition", dict(PARTITIONS)), ("engine", dict(ENGINES)), ("task", dict(TASKS)),
    ]
    for section, table in tables:
        for name, kind in table.items():
            yield from _parameters(section, (f"{section}.name={name}",), section, kind)
    for name, kind in COMPRESSORS.items():
        yield from _parameters("compressor", (f"algorithm.compressor.name={name}",), "algorithm.compressor", kind)
    for task, known in TASKS.items():
        for name in known.datasets:
            chosen = (f"task.name={task}", f"task.dataset={name}")
            yield from _parameters("dataset", chosen, "task", DATASETS[name])


def _parameters(label: str, chosen: tuple[str, ...], path: str, kind: Any) -> Iterator[Case]:
    local = () if path == "engine" else (LOCAL,)
    hints = get_type_hints(kind)
    for entry in fields(kind):
        where = f"{path}.{entry.name}"
        if entry.name == "compressor":
            values = ["zip", "3", "[]", "{name: zip}", "{name: top_k, ratio: 2}", "{bogus: 1}"]
        else:
            values = list(_wrong(entry, hints[entry.name]))
        for value in dict.fromkeys(values):
            named = (path, entry.name) if value in ("''", "[]") else where         # checked by the component itself
            yield _run(label, named, *local, *chosen, f"{where}={value}")
    required = ("topology.file=g.txt",) if "topology.name=edges" in chosen else ()
    yield _run(label, f"{path}.no_such_thing", *local, *chosen, *required, f"{path}.no_such_thing=1")


def _typos(rng: random.Random) -> Iterator[Case]:
    """Yield keys and names with a letter dropped, doubled or exchanged."""
    for key in Experiment.model_fields:
        wrong = _typo(key, rng) + "_"
        yield _run("typo", wrong, LOCAL, f"{wrong}=1")
    names = {
        "algorithm.name": list(algorithms()), "topology.name": list(TOPOLOGIES), "partition.name": list(PARTITIONS),
        "task.name": list(TASKS), "task.dataset": list(DATASETS), "engine.name": list(ENGINES),
        "algorithm.compressor.name": list(COMPRESSORS),
    }
    for path, known in names.items():
        for name in known:
            wrong = _typo(name, rng)
            if wrong not in known:
                local = () if path.startswith("engine") else (LOCAL,)
                yield _run("typo", (path, wrong), *local, f"{path}={wrong}")


def _typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word))
    return rng.choice([word[:at] + word[at + 1 :] + "q", word[:at] + word[at] * 2 + word[at:], word[::-1] + "x"])


# ---- the command line ------------------------------------------------------------------------------------------------


def _overrides(rng: random.Random) -> Iterator[Case]:
    for text in ("=", "=3", "a..b=3", ".a=3", "a.=3", "..=3", " =3", "\t=1"):
        yield _run("override", "=", LOCAL, text)
    for path, value in (
        ("rounds", "{a"), ("rounds", "[1"), ("rounds", "'"), ("rounds", '"'), ("rounds", "&a *b"), ("rounds", "*a"),
        ("rounds", "!!python/object/apply:os.system ['true']"), ("rounds", "!!python/name:os.system"),
        ("rounds", "a: b: c"), ("rounds", "%"),
        ("rounds", "@"), ("rounds", "`"), ("rounds", "\0"), ("rounds", "\x1b[2J"), ("name", "\ud800"),
        ("rounds", "[" * 3000), ("rounds", "0x"), ("rounds", "9" * 5000),
    ):
        yield _run("override", path, LOCAL, f"{path}={value}")
    for path in ("rounds.x", "name.y.z", "seed.a", "dtype.b", "task.name.c", "algorithm.lam.d"):
        yield _run("override", path.partition(".")[0], LOCAL, "task.name=quadratic", f"{path}=1")
    for _ in range(20):
        junk = "".join(rng.choice("abcxyz{}[]:,&*#!|>'\"%@`\\ \t-.0123456789") for _ in range(rng.randint(1, 12)))
        yield _run("override", "rounds", LOCAL, f"rounds=x{junk}")


def _commands() -> Iterator[Case]:
    for arguments, expected in (
        (("nonsense",), "nonsense"), (("run", "--nonsense"), "--nonsense"), (("run", "--out"), "--out"),
        (("list", "nonsense"), "nonsense"), (("run", "--out", "", LOCAL), "--out"),
        (("run", "--out", " ", LOCAL), "--out"),
        (("compare", "--algorithms", "c2dfb,nonsense", LOCAL), "nonsense"),
        (("compare", "--algorithms", "c2dfb,c2dfb", LOCAL), "c2dfb"), (("compare", "--target", "x", LOCAL), "--target"),
        (("compare", "--target", "round=3", LOCAL), "--target"),
        (("compare", "--target", "test_accuracy=", LOCAL), "--target"),
        (("compare", "--target", "test_accuracy=inf", LOCAL), "--target"),
        (("compare", "algorithm.name=mdbo", LOCAL), "algorithm"), (("compare", "rounds=0", LOCAL), "rounds"),
        (("compare", "--out", "s3://x/y", LOCAL), "--out"),
        (("submit", LOCAL, "--address", "http://127.0.0.1:1", "--storage", "x"), "engine.name"),
        (("submit",), "--address"), (("submit", "--address", "http://127.0.0.1:1"), "--storage"),
        (("submit", "rounds=0"), "rounds"), (("verify", "--algorithm", "nonsense"), "nonsense"),
        (("verify", "--topology", "nonsense"), "nonsense"), (("verify", "--topology", "edges"), "edges"),
        (("verify", "--plugin", "missing.py"), "missing.py"),
    ):
        yield Case("command", arguments, (expected,))


# ---- files -----------------------------------------------------------------------------------------------------------

GOOD = b"""name: good
nodes: 4
rounds: 3
engine: {name: local}
task: {name: quadratic, dim_x: 4, dim_y: 8}
algorithm: {name: c2dfb, inner_steps: 2}
"""


def _files(rng: random.Random) -> Iterator[Case]:
    bomb = b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    for one, other in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{other}: &{other} [{', '.join(['*' + one] * 9)}]\n".encode()
    texts = {
        "list": b"- 1\n- 2\n", "number": b"3\n", "text": b"words\n", "keys": b"1: 2\n", "null_key": b"null: 2\n",
        "open": GOOD + b"topology: {name: ring\n", "twice": GOOD + b"rounds: 4\n", "tabs": b"rounds:\t3\n\tnodes: 4\n",
        "nested_twice": b"algorithm: {lam: 1.0, lam: 2.0}\n", "binary": b"\xff\xfe\x00name", "nul": b"rounds: 3\0\n",
        "python": b"name: !!python/object/apply:os.mkdir [ran]\n", "deep": b"name: " + b"[" * 5000 + b"]" * 5000,
        "two_documents": GOOD + b"---\n" + GOOD, "bomb": bomb, "named_bomb": bomb + b"name: *i\n",
        "loop": b"task: &t {name: quadratic, more: *t}\n", "unknown_alias": b"name: *nobody\n",
        "utf16": GOOD.decode().encode("utf-16"),
        "merge": b"<<: 3\nrounds: 3\n", "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        "json_comma": b'{"rounds": 3,, "nodes": 4}', "directive": b"%YAML 9.9\n---\nrounds: x\n",
        "set": b"!!set {a, b}\n",
        "long": b"name: " + b"x" * 100_000 + b"\n", "key_long": b"x" * 5_000 + b": 1\n", "date": b"seed: 2026-01-01\n",
        "octal": b"rounds: 0o9\n", "base60": b"rounds: 1:30.5\n", "yes": b"rounds: yes\n",
    }
    expected = {
        "date": "seed", "octal": "rounds", "base60": "rounds", "yes": "rounds", "long": "name", "key_long": "e.yaml",
        "directive": "", "bomb": "", "named_bomb": "", "loop": "", "merge": "", "set": "",
    }
    for name, data in texts.items():
        yield _run("file", expected.get(name, "e.yaml"), "e.yaml", e__yaml=data)
    yield _run("file", "missing.yaml", "missing.yaml")
    yield _run("file", "one experiment file", "e.yaml", "f.yaml", e__yaml=GOOD, f__yaml=GOOD)
    yield _run("file", "", "\0.yaml")
    yield _run("file", "", "x" * 5_000)
    for at in range(3, len(GOOD) - 2, 5):            # every truncation that is not a valid experiment
        cut = GOOD[:at] + b"\xff"
        yield _run("file", "e.yaml", "e.yaml", e__yaml=cut)
    for number in range(40):                         # a wrong line somewhere
        lines = GOOD.splitlines()
        lines[rng.randrange(len(lines))] = rng.choice(
            [b"}{", b"rounds: {", b"? [", b"nodes: 'x", b"- x", b": :", b"\tx: 1", b"bogus_key: 1", b"rounds: -5"]
        )
        lines.append(b"wrong_key_%d: 1" % number)
        yield _run("file", "", "e.yaml", e__yaml=b"\n".join(lines) + b"\n")


def _edges(rng: random.Random) -> Iterator[Case]:
    four = ("nodes=4", LOCAL, "task.name=quadratic", "topology={name: edges, file: g.txt}")
    texts: list[bytes] = [
        b"", b"0 1\n", b"0 1\n2 3\n", b"1 1\n", b"0 9\n", b"0 -1\n", b"0 1 2\n", b"0\n", b"0,1\n", b"a b\n", b"0 1.0\n",
        b"0 1\n1 two\n", b"0 1e0\n", b"\xff\xfe0 1", b"0 \xd9\xa1\n", b"0 1\n1 2\n2 3\n3 4\n", b"0x0 0x1\n",
        b"+0 +1\n", b"0 1 # a\nb\n",
        b"# nothing\n", b"0 99999999999999999999999\n", b"\0 1\n", b"0 1;1 2;2 3\n", b"0\n1\n1\n2\n", b"[0, 1]\n",
        b'{"0": 1}\n',
    ]
    for _ in range(30):
        good = [b"0 1", b"1 2", b"2 3"]
        good[rng.randrange(3)] = rng.choice(
            [b"x", b"0 0", b"5 1", b"1", b"1 2 3", b"0 1 ;", b"-1 2", b"1 2.5", b"..", b"\x80"])
        texts.append(b"\n".join(good) + b"\n" * rng.randint(0, 2))
    for text in texts:
        yield _run("edges", "topology", *four, g__txt=text)
    yield _run("edges", "topology.file", "nodes=4", LOCAL, "topology={name: edges, file: missing.txt}")
    yield _run("edges", "topology.file", "nodes=4", LOCAL, "topology={name: edges, file: .}")
    yield _run("edges", "topology.file", "nodes=4", LOCAL, "topology.name=edges")
    for nodes, name in ((3, "two_hop"), (7, "torus"), (2, "torus"), (4, "two_hop"), (13, "torus")):
        yield _run("edges", "topology.name", LOCAL, f"nodes={nodes}", f"topology.name={name}", "partition.name=iid")
    for nodes, p in ((50, 0.001), (30, 0.0001), (99, 1e-9)):
        topology = f"topology={{name: erdos_renyi, p: {p}}}"
        yield _run("edges", "topology.p", LOCAL, f"nodes={nodes}", "task.name=quadratic", topology)
    for nodes in (2_000, 5_000):
        yield _run("edges", "nodes", LOCAL, f"nodes={nodes}", "partition.name=iid")
    yield _run("edges", "partition.h", LOCAL, "nodes=20", "partition.h=1.0")


def _places() -> Iterator[Case]:
    small = (LOCAL, "task.name=quadratic", "rounds=1")
    for place in ("taken", "taken/below", "/proc/dbo/run", "/dev/null", "/dev/null/x", "nosuch://x", "://x", "x" * 300):
        yield Case("place", ("run", *small, "--out", place), ("--out",), {"taken": b"a file\n"})
    for plugin, text in (
        ("raises.py", b"1 / 0\n"), ("syntax.py", b"def (:\n"), ("leaves.py", b"raise SystemExit(0)\n"),
        ("nul.py", b"\0"), ("bytes.py", b"\xff\xfe"), ("exits.py", b"import sys; sys.exit(3)\n"),
        ("interrupts.py", b"raise MemoryError\n"), ("deep.py", b"(" * 2000 + b")" * 2000),
    ):
        yield Case("plugin", ("run", LOCAL, f"plugins=[{plugin}]"), ("plugins.0", plugin), {plugin: text})
    for plugin in ("missing.py", "no_such_module", "no.such.module", "''", "..", ".x", "os.path.nothing"):
        yield Case("plugin", ("run", LOCAL, f"plugins=[{plugin}]"), ("plugins.0",))


URIS = (
    "x", "sqlite://", "sqlite:///", "sqlite:///:memory:", "http://", "http://:5000", "http://h:99999", "http://h:abc",
    "ftp://h", "file:///x", "databricks", "http://me:word@h:1", "http://me@h:1", "postgresql://", "mysql://h/x",
    "s3://b/x", "://", "http:///x", "javascript:alert(1)", "' '", "../x", "runs", "sqlite:x.db", "//h:1",
    "postgresql://me:word@h/x",
)


def _uris() -> Iterator[Case]:
    """Yield URIs that are no MLflow store, or that would record a password."""
    for uri in URIS:
        yield _run("uri", "tracking.uri", LOCAL, "task.name=quadratic", f"tracking.uri={uri}")
    yield Case("uri", ("sync", "missing"), ("missing",))
    yield Case("uri", ("sync", "e.yaml"), ("e.yaml",), {"e.yaml": GOOD})
    yield Case("uri", ("sync", "."), ("",))
    yield Case("uri", ("sync", ".", "--uri", "ftp://h"), ("--uri",))
    yield Case("uri", ("sync",), ("",))


SWEEP = b"name: s\nexperiment: {rounds: 3, task: {name: quadratic}}\naxes: {algorithm.lam: [1.0, 2.0]}\n"


def _sweeps() -> Iterator[Case]:
    values = b"[1.0, 2.0]"
    texts: dict[bytes, str] = {
        b"": "axes", b"- 1\n": "s.yaml", b"3\n": "s.yaml", b"axes: 3\n": "axes", b"axes: []\n": "axes",
        b"axes: {}\n": "axes",
        SWEEP + b"bogus: 1\n": "bogus", SWEEP + b"mode: magic\n": "mode", SWEEP + b"mode: random\n": "trials",
        SWEEP + b"trials: 3\n": "trials", SWEEP + b"target: nonsense\n": "target",
        SWEEP + b"metric: nonsense\n": "metric",
        SWEEP.replace(values, b"[1.0, 1.0]"): "axes.algorithm.lam", SWEEP.replace(values, b"1.0"): "axes.algorithm.lam",
        SWEEP.replace(values, b"[]"): "axes.algorithm.lam", SWEEP.replace(values, b"[-1.0]"): "algorithm.lam",
        SWEEP.replace(values, b"[x]"): "algorithm.lam",
        SWEEP.replace(b"algorithm.lam", b"algorithm.bogus"): "algorithm.bogus",
        SWEEP.replace(b"algorithm.lam", b"bogus"): "bogus", SWEEP.replace(b"algorithm.lam", b"..."): "axes",
        SWEEP.replace(values, b"{low: 2, high: 1}"): "axes.algorithm.lam",
        SWEEP.replace(b"rounds: 3", b"rounds: 0"): "rounds",
        SWEEP.replace(b"name: quadratic", b"name: nonsense"): "task.name", SWEEP[:-20]: "s.yaml",
        SWEEP + SWEEP: "s.yaml", SWEEP.replace(b"name: s", b"name: 3"): "name",
        SWEEP.replace(b"experiment: {", b"experiment: [{"): "s.yaml",
        b"\xff\xfe": "s.yaml", b"name: !!python/object/apply:os.mkdir [ran]\n": "s.yaml",
        SWEEP + b"experiment: 3\n": "s.yaml", SWEEP.replace(values, str(list(range(1, 200_001))).encode()): "",
        b"name: s\nexperiment: 3\naxes: {seed: [1]}\n": "experiment",
    }
    for text, expected in texts.items():
        yield Case("sweep", ("sweep", "s.yaml", "--quiet"), (expected,), {"s.yaml": text})
    for arguments, expected in (
        (("missing.yaml",), "missing.yaml"), (("nonsense",), "nonsense"), (("s.yaml", "t.yaml"), "one sweep"),
        (("s.yaml", "rounds=0"), "rounds"), (("s.yaml", "axes.algorithm.lam=3"), "axes.algorithm.lam"),
        (("s.yaml", "axes.bogus=[1]"), "bogus"), (("s.yaml", "mode=magic"), "mode"),
        (("s.yaml", "--out", "s3://x/y"), "--out"), (("s.yaml", "--out", ""), "--out"),
        (("s.yaml", "--out", "s.yaml"), "--out"), (("s.yaml", "=3"), "key=value"),
    ):
        yield Case("sweep", ("sweep", *arguments, "--quiet"), (expected,), {"s.yaml": SWEEP})


def read_tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder: path → content, None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }
