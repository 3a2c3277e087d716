"""Files of a job: only what is an edge list or a plugin leaves this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dbo.platform.cli import submit
from dbo.platform.config import bundle
from dbo.platform.config.experiment import Experiment
from dbo.platform.errors import InputError

SECRET = "hunter2"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return an empty folder."""
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def refused(folder: Path, data: dict[str, Any]) -> str:
    """Return the error message for an experiment's data; nothing of its file was copied."""
    with pytest.raises(InputError) as error:
        bundle.copy_experiment_files(data, folder)
    assert list(folder.iterdir()) == []
    assert "\n" not in str(error.value)
    return str(error.value)


NOT_EDGES = [b"hunter2\n", b"0 1\nhunter2\n", b"\xff\xfehunter2", b"# hunter2\n", b"", b"72 72\n", b"1 2 hunter2\n"]


@pytest.mark.parametrize("content", NOT_EDGES)
def test_only_an_edge_list_is_packed(tmp_path: Path, job: Path, content: bytes) -> None:
    """`topology.file` that names a token is refused by its key, without the token; so is a list without edges."""
    (tmp_path / "file").write_bytes(content)
    message = refused(job, {"topology": {"name": "edges", "file": str(tmp_path / "file")}})
    assert message.startswith(f"topology.file: {tmp_path}/file")
    assert SECRET not in message
    with pytest.raises(InputError, match=r"^topology\.file: "):          # as the axes of a sweep do
        bundle.copy_file(str(tmp_path / "file"), job)


@pytest.mark.parametrize("content", [b"hunter2 x\n", b"x = 'hunter2\n", b"\xffhunter2", b"hunter2\0", b"return\n"])
def test_only_python_is_packed_as_a_plugin(tmp_path: Path, job: Path, content: bytes) -> None:
    """A plugin must compile."""
    (tmp_path / "token.py").write_bytes(content)
    message = refused(job, {"plugins": ["dbo.algorithms", str(tmp_path / "token.py")]})
    assert message.startswith(f"plugins.1: {tmp_path}/token.py")
    assert SECRET not in message


def test_an_unreadable_file_is_an_input_error(tmp_path: Path, job: Path) -> None:
    """Its key and the reason, in one line."""
    for file, reason in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null"),
                         ("/dev/zero", "not a regular file")):
        assert reason in refused(job, {"topology": {"name": "edges", "file": str(file)}})


def test_files_are_packed_byte_for_byte(tmp_path: Path, job: Path) -> None:
    """Control: the run key contains their digest."""
    edges, plugin = b"# a path\r\n0 1\r\n\r\n1 2   # middle\r\n", b"# -*- coding: latin-1 -*-\nname = '\xe9'\n"
    (tmp_path / "edges.txt").write_bytes(edges)
    (tmp_path / "mine.py").write_bytes(plugin)
    data = {"plugins": [str(tmp_path / "mine.py"), "dbo.tasks"], "topology": {"file": str(tmp_path / "edges.txt")}}
    packed = bundle.copy_experiment_files(data, job)
    assert packed == {"plugins": ["mine.py", "dbo.tasks"], "topology": {"file": "edges.txt"}}
    assert sorted(file.name for file in job.iterdir()) == ["edges.txt", "mine.py"]      # every machine has dbo
    assert ((job / "edges.txt").read_bytes(), (job / "mine.py").read_bytes()) == (edges, plugin)


def test_a_job_does_not_send_a_token(tiny: Callable[..., Experiment], tmp_path: Path, job: Path) -> None:
    """`dbo submit topology={name: edges, file: ~/.token}` ends before anything is sent."""
    (tmp_path / "token").write_text(SECRET)
    experiment = tiny(topology={"name": "edges", "file": str(tmp_path / "token")}, engine={"name": "ray"})
    with pytest.raises(InputError, match=r"^topology\.file: .*expected two node numbers") as error:
        submit.experiment_job(experiment).pack(job)
    assert SECRET not in str(error.value)
    assert not any(SECRET in file.read_text() for file in job.iterdir())


# ---- starts ----------------------------------------------------------------------------------------------------------


def write_model(path: Path, **arrays: Any) -> None:
    save_file({name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}, path)


@pytest.mark.parametrize("content", [
    b"hunter2\n", b"", b"\xff" * 40, b'\x10\0\0\0\0\0\0\0{"hunter2": "abc"}', (8).to_bytes(8, "little") + b'hunter2{',
])
def test_only_a_model_is_packed_as_a_start(tmp_path: Path, job: Path, content: bytes) -> None:
    """`start` that names a token is refused without the token."""
    (tmp_path / "token").write_bytes(content)
    message = refused(job, {"start": str(tmp_path / "token")})
    assert message == f"start: {tmp_path}/token is not a model; must be a safetensors file with the arrays x and y"


def test_a_start_without_x_and_y_is_refused(tmp_path: Path, job: Path) -> None:
    """Other tensors of the user are no start."""
    write_model(tmp_path / "weights", hunter2=[1.0])
    assert SECRET not in refused(job, {"start": str(tmp_path / "weights")})


def test_a_start_travels_with_the_job(
    tiny: Callable[..., Experiment], tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cluster the run starts from the same model, and has the same key."""
    write_model(tmp_path / "model.safetensors", x=[1.0] * 4, y=[2.0] * 8)
    experiment = tiny(start=str(tmp_path / "model.safetensors"), engine={"name": "ray"})
    submit.experiment_job(experiment).pack(job)
    assert (job / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.chdir(job)
    sent = Experiment.read("experiment.yaml")
    assert (sent.start, sent.run_key) == ("model.safetensors", experiment.run_key)


# ---- data files ------------------------------------------------------------------------------------------------------


TABLE = "a,b,kind\n" + "".join(f"{k},{k % 3},{k % 2}\n" for k in range(20))


@pytest.mark.parametrize("nested", [True, False])
def test_data_files_are_packed(tmp_path: Path, job: Path, nested: bool) -> None:
    """The files of a data set travel with the job, byte for byte; the experiment names the copies."""
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(TABLE)
    keys = {"file": str(tmp_path / "train.csv"), "test_file": str(tmp_path / "test.csv"), "label": "kind"}
    task = {"name": "coefficient_tuning", **({"dataset": {"name": "csv", **keys}} if nested else
                                             {"dataset": "csv", **keys})}
    packed = bundle.copy_experiment_files({"task": task}, job)["task"]
    section = packed["dataset"] if nested else packed
    assert (section["file"], section["test_file"], section["label"]) == ("train.csv", "test.csv", "kind")
    assert {file.name: file.read_text() for file in job.iterdir()} == {"train.csv": TABLE, "test.csv": TABLE}


@pytest.mark.parametrize("dataset", ["csv", "arrays", "libsvm"])
@pytest.mark.parametrize("content", [
    b"hunter2\n", b"a,b\nhunter2,1\n", b"-----BEGIN KEY-----\nhunter2\nhunter3\n-----END-----\n", b"\xffhunter2", b"",
])
def test_only_what_the_data_set_reads_is_packed(tmp_path: Path, job: Path, dataset: str, content: bytes) -> None:
    """`task.file` that names a token is refused without the token, and no copy is left."""
    (tmp_path / "token").write_bytes(content)
    task = {"name": "coefficient_tuning", "dataset": dataset, "file": str(tmp_path / "token")}
    message = refused(job, {"task": task})
    assert message.startswith(f"task.file: {tmp_path}/token cannot be read as {dataset};")
    assert SECRET not in message


def test_large_data_files_are_refused(tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would upload them with every submission."""
    (tmp_path / "data.csv").write_text(TABLE)
    monkeypatch.setattr(bundle, "_LARGEST", 100)
    task = {"name": "coefficient_tuning", "dataset": "csv", "file": str(tmp_path / "data.csv")}
    assert refused(job, {"task": task}).startswith(f"task.file: {tmp_path}/data.csv has 0 MB; a job's files may have")


def test_a_packed_experiment_has_the_same_run_key(tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cluster the file has another path and the same content."""
    (tmp_path / "data.csv").write_text(TABLE)
    task = {"name": "coefficient_tuning", "dataset": "csv", "file": str(tmp_path / "data.csv"), "label": "kind"}
    experiment = Experiment(task=task)
    submit.experiment_job(experiment).pack(job)
    monkeypatch.chdir(job)
    sent = Experiment.read("experiment.yaml")
    assert sent.task["file"] == "data.csv"
    assert sent.run_key == experiment.run_key
