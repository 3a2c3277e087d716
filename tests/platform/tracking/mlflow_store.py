"""Read an MLflow store in tests."""

from pathlib import Path
from typing import Any

import mlflow

from dbo.platform.runs.run_folder import read_metrics

KEY = "test_loss"


def sqlite_uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


class StoreView:
    """The content of a store."""

    def __init__(self, uri: str) -> None:
        self.client: Any = mlflow.MlflowClient(tracking_uri=uri)

    def runs(self) -> list[Any]:
        found = self.client.search_experiments()
        return list(self.client.search_runs([one.experiment_id for one in found if one.name != "Default"]))

    def steps(self, run: Any, key: str = KEY) -> list[int]:
        return sorted(point.step for point in self.client.get_metric_history(run.info.run_id, key))

    def assert_complete(self, run: Any, folder: Path) -> None:
        """Check that the store has every evaluation of the folder once, with its value."""
        records = {record["round"]: record for record in read_metrics(folder / "metrics.jsonl")}
        for key in (KEY, "seconds", "comm_mb"):
            assert self.steps(run, key) == sorted(records), key
        for point in self.client.get_metric_history(run.info.run_id, KEY):
            assert point.value == records[point.step][KEY]
