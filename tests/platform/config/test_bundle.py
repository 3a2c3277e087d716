"""Files of a job: only what is an edge list or a plugin leaves this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    for file, reason in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        assert reason in refused(job, {"topology": {"name": "edges", "file": str(file)}})


def test_files_are_packed_byte_for_byte(tmp_path: Path, job: Path) -> None:
    """Control: the run key contains their digest."""
    edges, plugin = b"# a path\r\n0 1\r\n\r\n1 2   # middle\r\n", b"# -*- coding: latin-1 -*-\nname = '\xe9'\n"
    (tmp_path / "edges.txt").write_bytes(edges)
    (tmp_path / "mine.py").write_bytes(plugin)
    data = {"plugins": [str(tmp_path / "mine.py"), "a.module"], "topology": {"file": str(tmp_path / "edges.txt")}}
    packed = bundle.copy_experiment_files(data, job)
    assert packed == {"plugins": ["mine.py", "a.module"], "topology": {"file": "edges.txt"}}
    assert ((job / "edges.txt").read_bytes(), (job / "mine.py").read_bytes()) == (edges, plugin)


def test_a_job_does_not_send_a_token(tiny: Callable[..., Experiment], tmp_path: Path, job: Path) -> None:
    """`dbo submit topology={name: edges, file: ~/.token}` ends before anything is sent."""
    (tmp_path / "token").write_text(SECRET)
    experiment = tiny(topology={"name": "edges", "file": str(tmp_path / "token")}, engine={"name": "ray"})
    with pytest.raises(InputError, match=r"^topology\.file: .*expected two node numbers") as error:
        submit.experiment_job(experiment).pack(job)
    assert SECRET not in str(error.value)
    assert not any(SECRET in file.read_text() for file in job.iterdir())
