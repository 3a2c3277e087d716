"""Plugins that are modules: known by content, imported from memory in other processes, packed into jobs."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from dbo import components
from dbo.platform.cli.submit import experiment_job
from dbo.platform.config import bundle, plugin_modules, plugins, yaml_io
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError
from dbo.platform.runs.run_folder import find_summary
from dbo.platform.runs.runner import prepare, run

ROOT = Path(__file__).resolve().parents[3]
NAME = "lab_of_mine"
# A package that finds its own modules, with a relative import and a folder without __init__.py.
FILES = {
    "__init__.py": """
import pkgutil
from importlib import import_module

FOUND = sorted(module.name for module in pkgutil.iter_modules(__path__))
for name in FOUND:
    import_module(f"{__name__}.{name}")
""",
    "losses.py": "def ridge(y):\n    return 0.1 * y.square().sum()\n",
    "inner/deep.py": "SAMPLES = 24\n",
    "tasks.py": '''
import torch
import dbo
from lab_of_mine.inner import deep
from .losses import ridge

@dbo.task("lab_task")
class LabTask(dbo.TorchTask):
    """Scales of a regression."""

    datasets = ()

    def data(self, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(deep.SAMPLES, 3, generator=generator)
        labels = (inputs[:, 0] > 0).long()
        return dbo.Split((inputs[:8], labels[:8]), (inputs[8:16], labels[8:16]), (inputs[16:], labels[16:]), classes=2)

    def init(self, generator):
        return torch.zeros(3), torch.zeros(3)

    def lower(self, x, y, batch):
        return self.upper(x, y, batch) + ridge(y)

    def upper(self, x, y, batch):
        return (batch.inputs @ (torch.exp(x) * y) - batch.labels.to(y.dtype)).square().mean()

    def metrics(self, x, y, test):
        return {"test_loss": self.upper(x, y, test)}
''',
}
SETTINGS: dict[str, Any] = {
    "plugins": [f"{NAME}.tasks"], "task": "lab_task", "partition": "iid", "nodes": 4, "rounds": 4, "dtype": "float64",
    "engine": "local", "tracking": {"uri": "off"},
    "algorithm": {"name": "c2dfb", "inner_steps": 2, "eta_in": 0.1, "eta_out": 0.1},
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def forget(top: str) -> None:
    """Forget a package, as if this were another process."""
    plugin_modules.uninstall(top)
    plugins._modules.pop(top, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == top]:
        components.forget(name)
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that Python finds in this process alone."""
    folder = tmp_path / "path" / NAME
    write_files(folder, FILES)
    monkeypatch.syspath_prepend(tmp_path / "path")
    yield folder
    forget(NAME)


def experiment(**changes: Any) -> Experiment:
    return Experiment(**{**SETTINGS, **changes})


# ---- run keys --------------------------------------------------------------------------------------------------------


def test_every_file_of_the_package_is_part_of_the_key(package: Path) -> None:
    """An edited module is another experiment; a comment is not, nor a file that `import` cannot find."""
    def key() -> str:
        forget(NAME)
        return experiment().run_key

    first = key()
    write_files(package, {"losses.py": f"# a comment\n{FILES['losses.py']}", ".venv/x.py": "a = 1\n", "x.y.py": "1"})
    assert key() == first
    for name, old, new in (("losses.py", "0.1", "0.2"), ("inner/deep.py", "24", "27")):
        write_files(package, {name: FILES[name].replace(old, new)})
        assert key() != first, name
        write_files(package, {name: FILES[name]})
    assert key() == first


def test_the_key_is_that_of_what_runs(package: Path) -> None:
    """An edit after the import does not run in this process: neither its key nor what it ships changes."""
    made = experiment()
    shipped = plugins.ship(made.plugins)
    write_files(package, {"losses.py": FILES["losses.py"].replace("0.1", "0.2")})
    assert plugins.ship(experiment().plugins) == shipped
    assert experiment().run_key == made.run_key


# ---- other processes -------------------------------------------------------------------------------------------------

CHILD = """
import sys
import cloudpickle
from dbo.platform.config import plugins
shipped, content = cloudpickle.loads(open(sys.argv[1], "rb").read())
plugins.receive(shipped)
{code}
"""


def run_elsewhere(folder: Path, content: Any, code: str) -> str:
    """Run code in a process that has dbo alone on its path."""
    (folder / "content").write_bytes(cloudpickle.dumps(content))
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(code=code), str(folder / "content")], capture_output=True, text=True,
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120, check=False,
    )
    return done.stdout + done.stderr


def test_a_package_is_imported_from_memory(package: Path, tmp_path: Path) -> None:
    """In a process without its files: relative imports, folders without __init__.py, its own listing, sources."""
    made = experiment()
    problem = prepare(made).problem
    (tmp_path / "elsewhere").mkdir()
    code = f"""
problem = cloudpickle.loads(content)
import inspect, {NAME}
from dbo.platform.config.experiment import Experiment
print({NAME}.FOUND, {NAME}.__file__, inspect.getsource({NAME}.losses.ridge).count("square"))
print(problem.shard([0]).g(problem.shard([0]).x0, 1 + problem.shard([0]).y0)[0])
print(Experiment(**{made.to_dict()!r}).run_key)
"""
    shipped = plugins.ship(made.plugins)
    package.rename(tmp_path / "gone")
    names, loss, key = run_elsewhere(
        tmp_path / "elsewhere", (shipped, cloudpickle.dumps(problem)), code).splitlines()[-3:]
    assert names == f"['inner', 'losses', 'tasks'] {package}/__init__.py 1"
    shard = problem.shard([0])
    assert float(loss) == shard.g(shard.x0, 1 + shard.y0)[0]
    assert key == made.run_key


def test_without_shipping_it_is_not_found(package: Path, tmp_path: Path) -> None:
    """Control: the process above does not have the package on its path."""
    problem = prepare(experiment()).problem
    (tmp_path / "elsewhere").mkdir()
    shown = run_elsewhere(tmp_path / "elsewhere", ((), cloudpickle.dumps(problem)), "cloudpickle.loads(content)")
    assert f"No module named '{NAME}'" in shown


def test_an_error_elsewhere_has_file_line_and_source(package: Path, tmp_path: Path) -> None:
    """Those of the user's machine, although the file does not exist where the error is raised."""
    write_files(package, {"losses.py": "def ridge(y):\n    return y.no_such_thing\n"})
    made = Experiment(plugins=SETTINGS["plugins"])
    (tmp_path / "elsewhere").mkdir()
    code = f"""
import {NAME}.losses, traceback
try:
    {NAME}.losses.ridge(1.0)
except AttributeError as error:
    print(traceback.format_exc())
    print(plugins.locate_error(error))
"""
    shipped = plugins.ship(made.plugins)
    package.rename(tmp_path / "gone")
    shown = run_elsewhere(tmp_path / "elsewhere", (shipped, b""), code)
    assert "return y.no_such_thing" in shown
    assert shown.splitlines()[-1] == f"{package}/losses.py, line 2"


def test_shipped_source_replaces_another(package: Path) -> None:
    """An actor that hosts one run after another imports what each of them ships; the same again changes nothing."""
    (first,) = plugins.ship(experiment().plugins)
    forget(NAME)
    write_files(package, {"inner/deep.py": "SAMPLES = 30\n"})
    (second,) = plugins.ship(experiment().plugins)
    forget(NAME)
    found = []
    for source in (first, first, second):
        plugins.receive([source])
        made = experiment()
        found.append((len(prepare(made).problem.split.test.labels), id(type(made.parts.task))))
    assert [samples for samples, _ in found] == [8, 8, 14]
    assert found[0][1] == found[1][1] != found[2][1]


def test_the_process_that_ships_keeps_its_modules(package: Path) -> None:
    """Receiving what is loaded here anyway imports nothing again."""
    made = experiment()
    before = sys.modules[f"{NAME}.tasks"]
    plugins.receive(plugins.ship(made.plugins))
    assert sys.modules[f"{NAME}.tasks"] is before


def test_a_module_of_one_file_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that file, whatever lies beside it."""
    write_files(tmp_path, {"one_of_mine.py": FILES["tasks.py"].replace("from .losses import ridge", "").replace(
        "from lab_of_mine.inner import deep", "class deep: SAMPLES = 24\ndef ridge(y): return y.square().sum()"),
        "token.py": "x = 'hunter2'\n"})
    monkeypatch.syspath_prepend(tmp_path)
    try:
        (source,) = plugins.ship(experiment(plugins=["one_of_mine"]).plugins)
        assert [file.name for file in source.files] == ["one_of_mine.py"]      # type: ignore[union-attr]
        assert source.files[0].source == (tmp_path / "one_of_mine.py").read_bytes()      # type: ignore[union-attr]
    finally:
        forget("one_of_mine")


@pytest.mark.ray
def test_a_package_runs_on_ray(package: Path, tmp_path: Path) -> None:
    """Two actors, which do not have the package on their path, give the results of one process."""
    local = run(experiment(), tmp_path / "local")
    remote = run(experiment(engine={"name": "ray", "nodes_per_actor": 2}), tmp_path / "ray")
    np.testing.assert_allclose(remote.state["y"], local.state["y"], rtol=1e-10)


@pytest.mark.ray
def test_trials_of_a_sweep_get_the_package(dbo: Callable[..., Any], package: Path, tmp_path: Path) -> None:
    """Their workers do not have it on their path either."""
    experiment = {key: value for key, value in SETTINGS.items() if key != "engine"}
    sweep = {"name": "seeds", "experiment": experiment, "axes": {"seed": [0, 1]}, "metric": "upper_loss"}
    (tmp_path / "sweep.yaml").write_text(yaml_io.dump(sweep))
    done = dbo("sweep", tmp_path / "sweep.yaml", "--out", tmp_path / "swept")
    assert done.code == 0, done.out + done.err
    runs = [find_summary(path.parent) for path in (tmp_path / "swept").rglob("summary.json")]
    assert [run and run.status for run in runs] == ["finished"] * 2


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_job_packs_the_package(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python files and no others; on the cluster, in the job's folder, the run key is the same."""
    write_files(package, {"data.json": "{}", ".venv/x.py": "a = 1\n", "__pycache__/x.py": "a = 1\n"})
    job = experiment_job(experiment(engine={"name": "ray"}))
    (tmp_path / "job").mkdir()
    job.pack(tmp_path / "job")
    packed = {
        path.relative_to(tmp_path / "job").as_posix(): path.read_text()
        for path in (tmp_path / "job").rglob("*") if path.is_file() and path.name != "experiment.yaml"
    }
    assert packed == {f"{NAME}/{name}": text for name, text in FILES.items()}
    package.rename(tmp_path / "gone")
    forget(NAME)
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.syspath_prepend(tmp_path / "job")       # as `python -m` has it
    assert Experiment.read("experiment.yaml").run_key == job.key


def test_two_modules_of_a_package_are_packed_once(package: Path, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    named = [f"{NAME}.tasks", NAME]
    experiment(plugins=named)
    assert bundle.copy_experiment_files({"plugins": named}, tmp_path / "job")["plugins"] == named


def refuse(tmp_path: Path, data: dict[str, Any]) -> str:
    """Return the one-line error of a job, which has packed nothing."""
    (tmp_path / "job").mkdir(exist_ok=True)
    with pytest.raises(InputError) as error:
        bundle.copy_experiment_files(data, tmp_path / "job")
    assert list((tmp_path / "job").iterdir()) == []
    assert "\n" not in str(error.value)
    return str(error.value)


def test_only_python_is_packed(package: Path, tmp_path: Path) -> None:
    """A file that does not compile is refused by its name; its content is not shown."""
    write_files(package, {"inner/token.py": "hunter2 x\n"})
    experiment()
    message = refuse(tmp_path, {"plugins": SETTINGS["plugins"]})
    assert message == f"plugins.0: {package}/inner/token.py, line 1: is not a plugin; must be Python that compiles"


def test_a_plugin_that_is_not_loaded_is_not_packed(tmp_path: Path) -> None:
    """A job packs what was validated."""
    assert "no_such_package_of_mine is not loaded" in refuse(tmp_path, {"plugins": ["no_such_package_of_mine"]})


def test_two_plugins_of_one_name_are_refused(package: Path, tmp_path: Path) -> None:
    """A file and a package would overwrite each other."""
    experiment()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / NAME).touch()
    with pytest.raises(InputError, match=f"plugins.0: {NAME}: two files of an experiment are called {NAME}"):
        bundle.copy_experiment_files({"plugins": SETTINGS["plugins"]}, tmp_path / "job")


# ---- what cannot be sent ---------------------------------------------------------------------------------------------

ADVICE = "; put what it registers into a .py file or a package of its own, and install the rest on every machine"


def assert_not_sent(tmp_path: Path, reason: str) -> None:
    """A run on Ray and a job are refused in one line that says what to do; a run in one process is not."""
    expected = f"plugins.0: {NAME}.tasks cannot be sent to other processes: {reason}{ADVICE}"
    assert run(experiment(rounds=1), tmp_path / "local").status == "finished"
    with pytest.raises(InputError) as error:
        run(experiment(engine={"name": "ray"}), tmp_path / "ray")
    assert str(error.value) == expected
    assert not (tmp_path / "ray" / "summary.json").exists()
    assert refuse(tmp_path, {"plugins": SETTINGS["plugins"]}) == expected


def test_a_compiled_module_is_not_sent(package: Path, tmp_path: Path) -> None:
    """Another machine may have another processor or Python."""
    name = f"fast{EXTENSION_SUFFIXES[0]}"
    (package / "inner" / name).write_bytes(b"\x7fELF")
    assert_not_sent(tmp_path, f"{NAME}/inner/{name} is compiled")


def test_a_large_package_is_not_sent(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every actor would get it."""
    monkeypatch.setattr(plugin_modules, "LARGEST", 1_000)
    size = sum(map(len, FILES.values())) / 1e6
    assert_not_sent(tmp_path, f"{NAME} has {size:.1f} MB of Python files, of which at most 0.001 MB are sent")


def test_a_module_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key nor another process could know it."""
    module = type(sys)("nowhere_of_mine")
    monkeypatch.setitem(sys.modules, "nowhere_of_mine", module)
    monkeypatch.setattr(components, "find_owned", lambda name: [(None, name)])
    monkeypatch.setattr(plugins, "_validate_components", lambda name: None)
    with pytest.raises(InputError, match=r"^plugins\.0: the source of nowhere_of_mine cannot be found$"):
        plugins.load(("nowhere_of_mine",))


def test_a_pipe_in_a_package_is_refused(package: Path) -> None:
    """Reading it would never end."""
    os.mkfifo(package / "inner" / "pipe.py")
    with pytest.raises(InputError, match=f"{package}/inner/pipe.py cannot be read: not a regular file"):
        experiment()


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "line", "message"),
    [
        ("inner/deep.py", "24", "1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("tasks.py", '@dbo.task("lab_task")', '@dbo.task("Lab")', 7, "ValueError: task 'Lab': the name is not allowed"),
    ],
)
def test_mistakes_have_file_and_line(
    package: Path, file: str, old: str, new: str, line: int, message: str
) -> None:
    """Also those in a file that the named module imports."""
    assert old in FILES[file]
    write_files(package, {file: FILES[file].replace(old, new)})
    with pytest.raises(InputError) as error:
        experiment()
    expected = f"plugins.0: {NAME}.tasks cannot be imported, {package}/{file}, line {line}: {message}"
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_mistakes_at_run_time_have_file_and_line(package: Path) -> None:
    write_files(package, {"losses.py": FILES["losses.py"].replace("y.square()", "y.squared()")})
    with pytest.raises(InputError) as error:
        prepare(experiment())
    assert "no attribute 'squared'" in str(error.value)
    assert f"{package}/losses.py, line 2" in str(error.value)
