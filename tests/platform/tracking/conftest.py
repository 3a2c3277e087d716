"""Fixtures of the tracking tests: an MLflow store for each test."""

import shutil
from pathlib import Path

import pytest
from tests.platform.tracking.mlflow_store import sqlite_uri

from dbo.platform.tracking.client import mlflow_environment


@pytest.fixture(autouse=True)
def _restore_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `sync_folder` sets in the environment, and work in an empty folder."""
    for name, value in mlflow_environment("").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sqlite file with MLflow's tables, which take seconds to create."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("store")
    MlflowClient(tracking_uri=sqlite_uri(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """Return the URI of an empty store in the test's folder."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return sqlite_uri(tmp_path)
