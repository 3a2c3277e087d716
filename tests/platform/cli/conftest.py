"""Fixtures of the command-line tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _work_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def assert_refused() -> Callable[..., None]:
    """Check that a command was refused: exit 2, one line on stderr with all of `parts`, nothing on stdout."""

    def check(done: Any, *parts: str) -> None:
        assert done.code == 2, done.err
        assert done.err.startswith("dbo: ")
        assert done.err.count("\n") == 1
        assert done.err.endswith("\n")
        assert "Traceback" not in done.err
        assert done.out == ""
        for part in parts:
            assert part in done.err, done.err

    return check
