"""Which MLflow stores an experiment may name, and the default."""

from pathlib import Path

import pytest

from dbo.platform.config import tracking_uri
from dbo.platform.errors import InputError


@pytest.fixture(autouse=True)
def _work_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("uri", [
    None, "off", "sqlite:///a.db", "sqlite:////tmp/a.db", "http://h:5000", "https://h/x", "postgresql://me@h/name",
])
def test_allowed_stores(uri: str | None) -> None:
    """None and off, a sqlite file, an MLflow server, a database."""
    tracking_uri.validate_uri("tracking.uri", uri)


@pytest.mark.parametrize("uri", [
    "", "mlruns", "./x.db", "file:///x", "sqlite:///", "sqlite:///:memory:", "databricks", "http://", "http://h:99999",
    "s3://b", "http://me:secret@h", "http://me@h:80:90", "postgresql://me:secret@h/n", "https://me@h",
    "postgresql://h/n?password=secret", "http://h:1?api_key=secret", "https://h/?access_token=secret",
    "http://h:1/?a=1&pwd=secret", "postgresql://h/n?sslpassword=secret", "sqlite:///a.db?token=secret",
    "http://h:99999/?pass%77ord=secret",
])
def test_refused_stores(uri: str) -> None:
    """Each error names what is allowed; a password is not repeated."""
    with pytest.raises(InputError, match=r"^tracking.uri: .*(allowed: null|environment)") as error:
        tracking_uri.validate_uri("tracking.uri", uri)
    assert "secret" not in str(error.value)


def test_the_default_store(tmp_path: Path) -> None:
    """One for runs/, else one in the folder; a run of a group with a store uses that."""

    def resolve(*parts: str) -> Path | None:
        return tracking_uri.sqlite_file(tracking_uri.resolve_uri(None, tmp_path.joinpath(*parts)))

    assert resolve("runs", "a", "b") == tmp_path / "runs" / "mlflow.db"
    assert resolve("else") == tmp_path / "else" / "mlflow.db"
    assert tracking_uri.resolve_uri("sqlite:///x/y.db", tmp_path) == f"sqlite:///{tmp_path / 'x' / 'y.db'}"
    (tmp_path / "mlflow.db").touch()                                    # of something else
    assert resolve("else") == tmp_path / "else" / "mlflow.db"
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "group.json").touch()
    (tmp_path / "g" / "mlflow.db").touch()
    assert resolve("g", "cells", "a") == tmp_path / "g" / "mlflow.db"
