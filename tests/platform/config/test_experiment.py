"""Experiments: defaults, overrides, presets, refused input, and the run key."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dbo import components
from dbo.algorithms.compression.compressors import COMPRESSORS
from dbo.algorithms.registry import algorithms
from dbo.platform.config import overrides, presets, yaml_io
from dbo.platform.config import plugins as plugging
from dbo.platform.config.engines import LocalSettings
from dbo.platform.config.experiment import NOT_DECISIVE, Experiment
from dbo.platform.config.validation import list_parameters
from dbo.platform.errors import InputError
from dbo.platform.network.topology import TOPOLOGIES
from dbo.tasks.api import Task
from dbo.tasks.registry import DATASETS, PARTITIONS, TASKS

ROOT = Path(__file__).resolve().parents[3]
Tiny = Callable[..., Experiment]
TASK_DATA = [(task, data) for task, kind in TASKS.items() for data in kind.datasets or (None,)]
FLOATS = {"bits": None, "levels": "log"}       # of a compressor that sends values as they are


def refused(**keys: Any) -> str:
    """Return the error message for an experiment with these keys."""
    with pytest.raises(InputError) as error:
        Experiment(**keys)
    return str(error.value)


def overridden(*arguments: str, **data: Any) -> dict[str, Any]:
    return overrides.apply(data, overrides.parse(arguments))


# ---- defaults and round trips ----------------------------------------------------------------------------------------


def test_defaults_are_the_public_ones() -> None:
    """Without settings: ten nodes on a ring learn the embedded digits with C²DFB, as the experiment file documents."""
    experiment = Experiment()
    assert (experiment.seed, experiment.nodes, experiment.rounds, experiment.eval_every) == (0, 10, 50, 1)
    assert experiment.dtype == "float32"
    assert (experiment.task["name"], experiment.task["dataset"]) == ("coefficient_tuning", "digits")
    assert experiment.algorithm["name"] == "c2dfb"
    assert experiment.algorithm["compressor"]["name"] == "top_k"
    assert experiment.topology == {"name": "ring"}
    assert experiment.partition == {"name": "by_class", "h": 0.8}
    assert experiment.tracking.model_dump() == {"uri": None, "experiment": "dbo"}
    assert experiment.data_dir is None


def test_parts_are_the_objects_of_the_sections() -> None:
    """Every section is built once, and cannot be replaced afterwards."""
    parts = Experiment(task={"name": "quadratic"}, engine={"name": "local"}).parts
    assert isinstance(parts.task, Task)
    assert parts.data is None
    assert isinstance(parts.config, parts.algorithm.config)
    assert (parts.topology, parts.engine) == (TOPOLOGIES["ring"](), LocalSettings())
    assert Experiment().parts.data == DATASETS["digits"]()
    with pytest.raises(FrozenInstanceError):
        parts.data = DATASETS["digits"]()  # type: ignore[misc]


def test_c2dfb_has_its_own_defaults_without_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a preset the algorithm's own defaults apply, which are the paper's."""
    monkeypatch.setattr(presets, "find_preset", lambda algorithm, task, dataset: {})
    section = Experiment(task={"name": "quadratic"}).algorithm
    assert section["compressor"] == {"name": "top_k", "ratio": 0.2, **FLOATS}
    assert section == {
        "name": "c2dfb", "inner_steps": 15, "lam": 10.0, "eta_in": 1.0, "eta_out": 1.0, "gamma_in": 0.5,
        "gamma_out": 0.5, "y_objective": "h_over_lambda", "tracker": "refresh", "reset_every": 200,
        "compressor": {"name": "top_k", "ratio": 0.2, **FLOATS}, "eta_y": None, "eta_z": None, "compressor_x": None,
    }


def test_the_documented_file_is_valid(tmp_path: Path) -> None:
    """The file of the public documentation can be read."""
    file = tmp_path / "e.yaml"
    file.write_text("""
name: ring-h08
seed: 0
nodes: 10
rounds: 50
eval_every: 1
dtype: float32                          # or float64
task:      {name: coefficient_tuning, dataset: digits}
algorithm: {name: c2dfb, inner_steps: 15, lam: 10.0, eta_in: 1.0, eta_out: 1.0, gamma_in: 0.5, gamma_out: 0.5,
            compressor: {name: top_k, ratio: 0.2}}
topology:  {name: ring}
partition: {name: by_class, h: 0.8}
engine:    {name: local}
tracking:  {uri: null, experiment: dbo}
data_dir: null
""")
    experiment = Experiment.read(file)
    assert experiment.name == "ring-h08"
    assert experiment.algorithm["inner_steps"] == 15


@pytest.mark.parametrize(("task", "data"), TASK_DATA)
def test_resolved_experiments_resolve_to_themselves(task: str, data: str | None) -> None:
    """Every task x data set x algorithm x topology x partition: resolving twice changes nothing, also through YAML."""
    sections = {"name": task} | ({"dataset": data} if data else {})
    for algorithm, topology, partition in itertools.product(algorithms(), TOPOLOGIES, PARTITIONS):
        if algorithms()[algorithm].network == "star" and topology != "star":
            continue
        graph = {"name": topology} | ({"file": "/a file"} if topology == "edges" else {})
        made = Experiment(
            task=sections, algorithm={"name": algorithm}, topology=graph, partition={"name": partition}
        )
        resolved = made.to_dict()
        assert Experiment(**resolved).to_dict() == resolved
        assert yaml_io.parse(made.to_yaml(), "text") == resolved


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor_can_be_named(name: str) -> None:
    """Naming a compressor gives its own parameters with their defaults, and survives a round trip."""
    made = Experiment(algorithm={"name": "c2dfb", "compressor": {"name": name}})
    expected = {parameter.name: parameter.default for parameter in list_parameters(COMPRESSORS[name])}
    assert {k: v for k, v in made.algorithm["compressor"].items() if k != "name"} == expected
    assert Experiment(**made.to_dict()).to_dict() == made.to_dict()


@given(st.text(min_size=1, max_size=30).filter(lambda t: t.isprintable()))
def test_any_name_survives_the_file(name: str) -> None:
    """A text is read back as the same text, even if it looks like a number, a date or a truth value."""
    assert yaml_io.parse(yaml_io.dump({"name": name}), "text") == {"name": name}


@pytest.mark.parametrize("name", ["1e-3", "5E6", ".5e1", "null", "on", "2024-01-01", "0x10", "~", "1:30", "[a]"])
def test_texts_that_look_like_something_else_survive(name: str) -> None:
    """The loader reads 1e-3 as a number, so the dumper must put such a text in quotes."""
    assert Experiment(**yaml_io.parse(Experiment(name=name).to_yaml(), "text")).name == name


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300))
def test_numbers_survive_the_file_to_the_last_bit(value: float) -> None:
    """A step size is the same float after it was written and read."""
    assert yaml_io.parse(yaml_io.dump({"eta": value}), "text") == {"eta": value}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    """`<<: *anchor` is YAML too."""
    text = "task: &t {name: quadratic, dim_x: 4}\nalgorithm: {<<: {lam: 3.0}, name: c2dfb}\n"
    (tmp_path / "e.yaml").write_text(text)
    assert Experiment.read(tmp_path / "e.yaml").algorithm["lam"] == 3.0


def test_empty_file_is_all_defaults(tmp_path: Path) -> None:
    """A file with nothing but a comment sets nothing."""
    (tmp_path / "e.yaml").write_text("# nothing\n")
    assert Experiment.read(tmp_path / "e.yaml").to_dict() == Experiment().to_dict()


def test_no_python_objects_are_built_from_yaml(tmp_path: Path) -> None:
    """A tag that would call a function is refused, and nothing is called."""
    (tmp_path / "e.yaml").write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'called'}']\n")
    with pytest.raises(InputError, match="not valid YAML"):
        Experiment.read(tmp_path / "e.yaml")
    assert not (tmp_path / "called").exists()


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E3", 1000.0), ("-2.5e+1", -25.0), (".5", 0.5), ("7", 7), ("null", None), ("", None),
        ("true", True), ("[1, 2e-1]", [1, 0.2]), ("'1e-3'", "1e-3"), ('"7"', "7"), ("{name: ring}", {"name": "ring"}),
        ("a b", "a b"), ("a=b", "a=b"), ("nan", "nan"),
    ],
)
def test_override_values_are_yaml(text: str, value: Any) -> None:
    """The text after the first = is read as a YAML value, with 1e-3 as a number."""
    (found,) = overrides.parse([f"a.b={text}"]).values()
    assert found == value
    assert type(found) is type(value)


def test_overrides_reach_into_sections() -> None:
    """A dotted path changes one value and leaves its neighbours alone; of the same path the last value counts."""
    data = {"algorithm": {"name": "c2dfb", "lam": 1.0, "compressor": {"name": "top_k", "ratio": 0.5}}}
    found = overridden("algorithm.compressor.ratio=0.1", "algorithm.lam=2", "algorithm.lam=3", **data)
    assert found["algorithm"] == {"name": "c2dfb", "lam": 3, "compressor": {"name": "top_k", "ratio": 0.1}}
    assert data["algorithm"]["compressor"] == {"name": "top_k", "ratio": 0.5}


def test_naming_another_component_drops_the_old_one_s_parameters() -> None:
    """madsbo has no lam: the file's parameters are dropped with their algorithm, in any order of the overrides."""
    data: dict[str, Any] = {"algorithm": {"name": "c2dfb", "lam": 5.0}, "topology": {"name": "erdos_renyi", "p": 0.3}}
    for arguments in itertools.permutations(["algorithm.name=madsbo", "algorithm.eta_x=0.5", "topology.name=ring"]):
        found = overridden(*arguments, **data)
        assert found == {"algorithm": {"name": "madsbo", "eta_x": 0.5}, "topology": {"name": "ring"}}
        Experiment(**found)


def test_naming_the_same_component_keeps_its_parameters() -> None:
    """Repeating the name in the file changes nothing, also where the file leaves the name to the default."""
    assert overridden("algorithm.name=c2dfb", algorithm={"name": "c2dfb", "lam": 5.0})["algorithm"]["lam"] == 5.0
    assert overridden("algorithm.name=c2dfb", algorithm={"lam": 5.0})["algorithm"]["lam"] == 5.0


def test_naming_another_compressor_drops_the_old_one_s_parameters() -> None:
    """The same one level deeper."""
    data = {"algorithm": {"name": "c2dfb", "compressor": {"name": "top_k", "ratio": 0.5}}}
    assert overridden("algorithm.compressor.name=identity", **data)["algorithm"]["compressor"] == {"name": "identity"}


@pytest.mark.parametrize("key", ["algorithm.lam=7.0", "partition.h=0.5", "algorithm.compressor.ratio=0.1"])
def test_a_parameter_of_an_unnamed_component_is_one_of_the_default(key: str) -> None:
    """Every key has a default, names too: `dbo run algorithm.lam=7` is C²DFB with another λ."""
    made = Experiment(**overridden(key))
    path, _, value = key.partition("=")
    found: Any = made.to_dict()
    for part in path.split("."):
        found = found[part]
    assert found == float(value)
    assert (made.algorithm["name"], made.partition["name"]) == ("c2dfb", "by_class")
    assert made.algorithm["compressor"]["name"] == "top_k"


@pytest.mark.parametrize("argument", ["rounds", "=3", ".a=3", "a..b=3", "a.=3"])
def test_malformed_overrides_are_refused(argument: str) -> None:
    """An override is key=value with a whole path."""
    with pytest.raises(InputError, match="key=value"):
        overrides.parse([argument])


def test_an_override_below_a_value_is_refused() -> None:
    """rounds has no keys of its own."""
    with pytest.raises(InputError, match=r"rounds\.x: rounds is 3"):
        overridden("rounds.x=1", rounds=3)


# ---- refused input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"round": 3}, ["round:", "'rounds'", "known keys"]),
        ({"tracking": {"urii": "x"}}, ["tracking.urii", "'uri'", "known keys: uri, experiment"]),
        ({"algorithm": {"name": "c2dfb", "lamb": 1.0}}, ["algorithm.lamb", "'lam'", "known keys: inner_steps"]),
        ({"task": {"name": "quadratic", "dimx": 1}}, ["task.dimx", "'dim_x'"]),
        ({"algorithm": {"name": "madsbo", "compressor": {"name": "top_k"}}}, ["algorithm.compressor", "known keys"]),
        ({"algorithm": {"name": "c2dfb", "compressor": {"ratoi": 0.1}}}, ["algorithm.compressor.ratoi", "'ratio'"]),
        ({"algorithm": {"name": "c2dbf"}}, ["algorithm.name", "'c2dbf'", "did you mean 'c2dfb'", "allowed: c2dfb"]),
        ({"algorithm": {"name": None}}, ["algorithm.name", "None", "allowed: c2dfb"]),
        ({"topology": {"name": ["ring"]}}, ["topology.name", "['ring']", "allowed: ring"]),
        ({"task": {"dataset": "digit"}}, ["task.dataset", "'digit'", "'digits'", "allowed: digits"]),
        ({"task": {"name": "quadratic", "dataset": "digits"}}, ["task.dataset", "known keys"]),
        ({"topology": {"name": "edges"}}, ["topology.file", "required"]),
        ({"topology": 3}, ["topology", "3", "a mapping"]),
        ({"algorithm": {"compressor": 3}}, ["algorithm.compressor", "3", "a mapping"]),
        ({"dtype": "float16"}, ["dtype", "'float16'", "'float32' or 'float64'"]),
        ({"seed": -1}, ["seed", "-1", "≥ 0"]),
        ({"seed": 2**31}, ["seed", str(2**31), f"< {2**31}"]),
        ({"seed": True}, ["seed", "True", "whole number"]),
        ({"nodes": 0}, ["nodes", "0", "≥ 1"]),
        ({"rounds": 1.5}, ["rounds", "1.5", "whole number"]),
        ({"rounds": "abc"}, ["rounds", "'abc'", "whole number"]),
        ({"name": ""}, ["name", "''", "at least 1"]),
        ({"plugins": 3}, ["plugins", "3", "a list"]),
        ({"plugins": [3]}, ["plugins.0", "3", "a text"]),
        ({"data_dir": 3}, ["data_dir", "3", "a text"]),
        ({"algorithm": {"name": "c2dfb", "lam": float("nan")}}, ["algorithm.lam", "nan", "finite"]),
        ({"algorithm": {"name": "c2dfb", "lam": float("inf")}}, ["algorithm.lam", "inf", "finite"]),
        ({"algorithm": {"name": "c2dfb", "inner_steps": True}}, ["algorithm.inner_steps", "True", "whole number"]),
        ({"algorithm": {"name": "c2dfb", "y_objective": "hh"}}, ["algorithm.y_objective", "'hh'", "'h'"]),
        ({"engine": {"nodes_per_actor": 0}}, ["engine.nodes_per_actor: 0", "auto or ≥ 1"]),
        ({"engine": {"cpus_per_node": -1.0}}, ["engine.cpus_per_node: -1.0", "> 0"]),
    ],
)
def test_refusal_names_field_value_and_what_is_allowed(keys: dict[str, Any], parts: list[str]) -> None:
    """One line: the field, the value, what is allowed, and the nearest known name for a misspelt one."""
    message = refused(**keys)
    assert "\n" not in message
    for part in parts:
        assert part in message


def _outside(allowed: str) -> list[Any]:
    """Return values just outside of a range as `dbo list` shows it, e.g. "float > 0 ≤ 1"."""
    kind, *limits = allowed.split()
    number = float if kind == "float" else int
    wrong: list[Any] = []
    for sign, limit in zip(limits[::2], limits[1::2], strict=True):
        at = number(float(limit))
        wrong.append({">": at, "<": at, "≥": at - 1, "≤": at + 1}[sign])
    return wrong


CHECKED = [
    *(("algorithm", name, algorithm.config) for name, algorithm in algorithms().items()),
    *(("task", name, kind) for name, kind in TASKS.items()),
    *(("topology", name, kind) for name, kind in TOPOLOGIES.items()),
    *(("partition", name, kind) for name, kind in PARTITIONS.items()),
    *(("algorithm.compressor", name, kind) for name, kind in COMPRESSORS.items()),
]


@pytest.mark.parametrize(("path", "name", "kind"), CHECKED, ids=[f"{path}-{name}" for path, name, _ in CHECKED])
def test_the_range_of_every_parameter_is_enforced(path: str, name: str, kind: type) -> None:
    """Whatever range or list of choices `dbo list` shows, a value outside of it, or of another type, is refused."""
    for parameter in list_parameters(kind):
        if parameter.name.startswith("compressor"):
            continue            # a component of its own, which is among those checked
        if "|" in parameter.allowed:
            wrong = ["none of them"]
        elif parameter.allowed.split()[0] in {"int", "float"}:
            wrong = [*_outside(parameter.allowed), "a text", [1], float("nan")]
        elif parameter.allowed == "str":
            wrong = [3, *([""] if path == "topology" else [])]
        else:
            continue
        for value in wrong:
            section = {"name": name, parameter.name: value}
            message = refused(**({"algorithm": {"compressor": section}} if "." in path else {path: section}))
            assert message.startswith(f"{path}.{parameter.name}: "), message
            assert repr(value) in message


# ---- presets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if step sizes for one task had been tuned."""
    values = {"lam": 77.0, "eta_in": 0.77, "compressor": {"name": "rand_k", "ratio": 0.77}}
    monkeypatch.setattr(
        presets, "_read", lambda algorithm: {"coefficient_tuning/digits": values} if algorithm == "c2dfb" else {}
    )


@pytest.mark.usefixtures("tuned")
def test_presets_fill_in_what_the_experiment_leaves_out() -> None:
    """A tuned value applies where none is given, and only on the task and data set that it was tuned for."""
    section = Experiment(algorithm={"name": "c2dfb", "lam": 1.0}).algorithm
    assert (section["lam"], section["eta_in"]) == (1.0, 0.77)
    assert section["compressor"] == {"name": "rand_k", "ratio": 0.77, **FLOATS}
    for other in ({"name": "coefficient_tuning", "dataset": "synthetic_text"}, {"name": "quadratic"}):
        assert Experiment(task=other).algorithm["lam"] == 10.0
    assert Experiment(algorithm={"name": "c2dfb_nc"}).algorithm["lam"] == 10.0


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("given_", "found"),
    [
        ({"ratio": 0.1}, {"name": "rand_k", "ratio": 0.1, **FLOATS}),
        ({"name": "rand_k"}, {"name": "rand_k", "ratio": 0.77, **FLOATS}),
        ({"name": "top_k"}, {"name": "top_k", "ratio": 0.2, **FLOATS}),
        ({"name": "identity"}, {"name": "identity"}),
        (None, {"name": "rand_k", "ratio": 0.77, **FLOATS}),
    ],
)
def test_presets_of_a_compressor(given_: dict[str, Any] | None, found: dict[str, Any]) -> None:
    """A tuned ratio belongs to the tuned compressor: another one has its own defaults."""
    assert Experiment(algorithm={"name": "c2dfb", "compressor": given_}).algorithm["compressor"] == found


@pytest.mark.usefixtures("tuned")
def test_presets_are_part_of_the_resolved_experiment() -> None:
    """The resolved experiment has the values of the preset, so it means the same when presets change."""
    assert Experiment().to_dict()["algorithm"]["lam"] == 77.0


def test_shipped_presets_are_valid() -> None:
    """Every preset file names known tasks and data sets, and values that its algorithm accepts."""
    folder = Path(presets.registry.__file__).with_name("presets")
    for file in folder.glob("*.yaml"):
        assert file.stem in algorithms()
        for place in yaml_io.read(file):
            task, _, data = place.partition("/")
            Experiment(task={"name": task, **({"dataset": data} if data else {})}, algorithm={"name": file.stem})


# ---- the run key -----------------------------------------------------------------------------------------------------

DECISIVE: dict[str, Any] = {
    "name": "other", "seed": 1, "nodes": 5, "rounds": 7, "eval_every": 2, "checkpoint_every": 3, "dtype": "float32",
    "task": {"name": "quadratic", "dim_x": 5}, "algorithm": {"name": "c2dfb", "lam": 11.0},
    "topology": {"name": "complete"}, "partition": {"name": "iid"}, "engine": {"name": "local", "threads": 2},
    "batch_size": 2, "tune_fraction": 0.1, "psi_every": 2, "until": {"rounds": 3},
    "eval_nodes": 2, "eval_public": True,
}


def test_run_key_changes_with_every_decisive_field(tiny: Tiny) -> None:
    """No two experiments that differ in anything but places share a key; no field is forgotten."""
    keys = {tiny().run_key, *(tiny(**{field: value}).run_key for field, value in DECISIVE.items())}
    assert len(keys) == 1 + len(DECISIVE)
    batches = {tiny(batch_size=2, **other).run_key for other in ({}, {"batch_per": "round"}, {"batch_order": "epoch"})}
    assert len(batches) == 3
    known = {*DECISIVE, *NOT_DECISIVE, "batch_per", "batch_order", "start", "plugins"}
    assert known == set(Experiment.model_fields)


@pytest.mark.parametrize("every", ["start", -1, 2.5, True])
def test_psi_every_is_a_number_of_evaluations_or_end(tiny: Tiny, every: Any) -> None:
    with pytest.raises(InputError, match=r"psi_every: .* is not allowed; must be a whole number ≥ 0, end or null"):
        tiny(psi_every=every)
    assert tiny(psi_every=0).run_key == tiny(psi_every=None).run_key != tiny().run_key


def test_order_of_batches_does_not_matter_without_batches(tiny: Tiny) -> None:
    """With full batches nothing is drawn: such runs keep their key."""
    assert tiny(batch_per="round", batch_order="epoch").run_key == tiny().run_key


def test_content_of_the_start_is_part_of_the_key(tiny: Tiny, tmp_path: Path) -> None:
    """Another model is another run; the same one under another name is not."""
    keys = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).write_bytes(content)
        keys.append(tiny(start=str(tmp_path / name)).run_key)
    assert keys[0] == keys[1] != keys[2]
    assert tiny().run_key not in keys


def test_run_key_does_not_depend_on_places(tiny: Tiny) -> None:
    """Where runs are tracked and data are stored changes no result."""
    other = tiny(tracking={"uri": "http://elsewhere", "experiment": "x"}, data_dir="/elsewhere")
    assert other.run_key == tiny().run_key


def test_run_key_is_that_of_the_resolved_experiment(tiny: Tiny) -> None:
    """Writing out a default, 10 for 10.0, or keys in another order is the same run."""
    base = tiny()
    assert Experiment(**base.to_dict()).run_key == base.run_key
    assert Experiment(**dict(reversed(base.to_dict().items()))).run_key == base.run_key
    section = {**base.algorithm, "lam": 10}
    assert tiny(algorithm=section).run_key == base.run_key


def test_run_key_is_the_same_in_every_process(tiny: Tiny) -> None:
    """Nothing of Python's hash seed or of a process gets into the key."""
    text = yaml.safe_dump(tiny().to_dict())
    code = "from dbo.platform.config.experiment import Experiment; import yaml\n" \
        f"print(Experiment(**yaml.safe_load({text!r})).run_key)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            timeout=120, check=True,
        )
        assert done.stdout.strip() == tiny().run_key


def test_run_key_changes_with_the_code_of_a_plugin(tiny: Tiny, tmp_path: Path) -> None:
    """Other code is another run; the same code under another path, or with another comment, is not."""
    example = (ROOT / "docs" / "examples" / "gossip_penalty.py").read_text(encoding="utf-8")
    keys = []
    for name, more in (("first", ""), ("second", ""), ("third", "# edited\n"), ("fourth", "edited = 1\n")):
        file = tmp_path / f"{name}.py"
        file.write_text(example + more)
        keys.append(tiny(plugins=[str(file)]).run_key)
        components.forget(algorithms()["gossip_penalty"].round.__module__)        # as in another process
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert tiny().run_key not in keys


def test_run_key_changes_with_any_file_of_a_plugin_package(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package is all of its modules, also those further down."""
    package = tmp_path / "a_package_of_mine"
    (package / "deep").mkdir(parents=True)
    example = (ROOT / "docs" / "examples" / "gossip_penalty.py").read_text(encoding="utf-8")
    for name, text in (("__init__.py", example), ("helper.py", ""), ("deep/kernel.py", "")):
        (package / name).write_text(f"{text}a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = [tiny(plugins=["a_package_of_mine"]).run_key]
    for name in ("__init__.py", "helper.py", "deep/kernel.py"):
        (package / name).write_text("a = 2\n")
        plugging._modules.clear()               # as in a new process
        keys.append(tiny(plugins=["a_package_of_mine"]).run_key)
    monkeypatch.delitem(sys.modules, "a_package_of_mine")
    components.forget("a_package_of_mine")
    assert len(set(keys)) == 4
    assert tiny().run_key not in keys


def test_run_key_changes_with_the_edges(tiny: Tiny, tmp_path: Path) -> None:
    """The graph in the file decides, not the file's name."""
    keys = []
    for name, text in (("a", "0 1\n1 2\n2 3\n"), ("b", "0 1\n1 2\n2 3\n"), ("c", "0 1\n1 2\n1 3\n")):
        (tmp_path / name).write_text(text)
        keys.append(tiny(topology={"name": "edges", "file": str(tmp_path / name)}).run_key)
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("given", [{"eta": 0.5}, {"eta": 0.5, "alpha_y": 0.1}, {"eta": 0.5, "alpha_x": 2.0}])
def test_an_error_names_values_of_the_preset(given: dict[str, Any]) -> None:
    """A value that the user did not give is not blamed on the user: the line names those of the preset."""
    alpha = presets.find_preset("mdbo", "quadratic", None)["alpha_x"]
    with pytest.raises(InputError, match=r"algorithm: alpha_x.* must be below 1") as error:
        Experiment(task={"name": "quadratic"}, algorithm={"name": "mdbo", **given})
    note = f"; alpha_x = {alpha} comes from the preset for quadratic, give it too"
    assert str(error.value).endswith(note) == ("alpha_x" not in given)
    assert ("preset" in str(error.value)) == ("alpha_x" not in given)


@pytest.mark.parametrize("overrides", [
    ["algorithm=mdbo", "topology=complete", "engine=local", "partition=iid", "task=quadratic"],
    ["algorithm.name=mdbo", "topology.name=complete", "engine.name=local", "partition.name=iid", "task.name=quadratic"],
])
def test_component_may_be_given_by_its_name_alone(overrides: list[str], tmp_path: Path) -> None:
    """On the command line and in a file; another name drops the parameters of the file's component."""
    file = tmp_path / "e.yaml"
    file.write_text("algorithm: {name: c2dfb, lam: 3.0}\ntopology: ring\n")
    found = Experiment.read(file, overrides)
    sections = (found.algorithm, found.topology, found.engine, found.partition, found.task)
    assert [section["name"] for section in sections] == ["mdbo", "complete", "local", "iid", "quadratic"]
    assert "lam" not in found.algorithm
    assert Experiment.read(file).topology["name"] == "ring"


def test_compressor_may_be_given_by_its_name_alone() -> None:
    """The default compressor keeps its tuned parameters, another one gets its defaults."""
    assert Experiment(algorithm={"name": "c2dfb", "compressor": "rand_k"}).algorithm["compressor"]["name"] == "rand_k"
    named = Experiment.read(None, ["algorithm.compressor=top_k"])
    assert named.algorithm["compressor"] == Experiment().algorithm["compressor"]


def test_unknown_component_name_lists_the_known_ones() -> None:
    """The short form has the errors of the long one."""
    with pytest.raises(InputError, match=r"algorithm.name: unknown value 'madsboo', did you mean 'madsbo'"):
        Experiment.read(None, ["algorithm=madsboo"])
    with pytest.raises(InputError, match=r"topology: 3 is not allowed; must be a mapping"):
        Experiment.read(None, ["topology=3"])
