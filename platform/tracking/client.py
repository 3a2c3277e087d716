"""Write to one experiment of an MLflow store: find runs by their keys, send every point once."""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbo.platform.config.tracking_uri import sqlite_file
from dbo.platform.errors import RunError
from dbo.platform.runs.schema import Record
from dbo.platform.tracking.reader import Ending, Facts, select_metrics

PARENT = "mlflow.parentRunId"
CLOCK = "seconds"                 # every evaluation has this metric, and a repeated evaluation has another value
_BATCH = 40                       # evaluations per request: below MLflow's limit of 1000 metrics
_NOTE = (
    "Runs of dbo, decentralized bilevel optimization. The step is the communication round. "
    "Select `comm_mb` as the metric of the X-axis to see accuracy against communication. "
    "The note of every run has its command."
)


def mlflow_environment(uri: str) -> dict[str, str]:
    """Return variables for MLflow: this store only, one attempt per request, no telemetry, no pickles."""
    return {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }


class Store:
    """One experiment of an MLflow store."""

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri, self._name = uri, experiment
        self._client: Any = None
        self._experiment = ""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Allow one writer of this machine at a time: from a search to a creation, and while a sqlite file is new."""
        with open(self._lock_file(), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_file(self) -> Path:
        file = sqlite_file(self.uri)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            return file.with_name(f".{file.name}.lock")
        folder = Path(tempfile.gettempdir()) / f"dbo-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise RunError(f"{folder} belongs to another user")
        return folder / f"{hashlib.sha256(self.uri.encode()).hexdigest()[:16]}.lock"

    def connect(self) -> Any:
        """Return an MLflow client of this store."""
        from mlflow import MlflowClient

        with self.lock():
            return MlflowClient(tracking_uri=self.uri)

    def open(self) -> None:
        """Connect, and create the experiment if it does not exist."""
        if self._client is None:
            client = self.connect()
            with self.lock():
                self._experiment = self._find_or_create_experiment(client)
            self._client = client

    def _find_or_create_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._name)
        if found is None:
            try:
                return str(client.create_experiment(self._name, artifact_location=self._artifact_location(), tags={
                    "mlflow.note.content": _NOTE, "mlflow.experimentKind": "custom_model_development",
                    "mlflow.experiment.primaryMetric.name": "test_accuracy",
                }))
            except MlflowException:             # another machine may have created it just now
                found = client.get_experiment_by_name(self._name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise RunError(f"the MLflow experiment {self._name!r} is deleted; restore it or choose another name")
        return str(found.experiment_id)

    def _artifact_location(self) -> str | None:
        """Return a folder beside the sqlite file; None: the server decides."""
        file = sqlite_file(self.uri)
        if file is None:
            return None
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in self._name).strip(".") or "dbo"
        return (file.parent.resolve() / "mlartifacts" / name).as_uri()

    # ---- runs ------------------------------------------------------------------------------------------------------

    def find_or_create(self, facts: Facts, parent: str | None) -> Any:
        """Return the run with this key below this parent (None: without a parent)."""
        with self.lock():
            found = self._find(facts, parent)
            if found:
                return found[0]
            tags = facts.tags | ({PARENT: parent} if parent else {})
            created = self._client.create_run(
                self._experiment, start_time=facts.started or None, tags=tags, run_name=facts.name)
            # The lock holds on this machine only. If another machine created the run too, one of them must retry.
            if len(self._find(facts, parent)) > 1:
                self._client.delete_run(created.info.run_id)
                raise RunError("another machine is creating the same run")
            return created

    def _find(self, facts: Facts, parent: str | None) -> list[Any]:
        query = f"tags.`{facts.key_tag}` = '{facts.key}'"
        if parent:
            query += f" and tags.`{PARENT}` = '{parent}'"
        found = self._client.search_runs([self._experiment], query, order_by=["attributes.start_time ASC"])
        return [run for run in found if parent or PARENT not in run.data.tags]

    def get(self, run_id: str) -> Any:
        return self._client.get_run(run_id)

    def log_params(self, run: Any, facts: Facts) -> None:
        """Log the parameters that MLflow does not have yet; it cannot change the others."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in facts.params.items() if key not in run.data.params]
        for start in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[start : start + 100])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items() if value])

    def set_metrics(self, run_id: str, values: Mapping[str, float], timestamp: int) -> None:
        """Log one value per metric."""
        from mlflow.entities import Metric

        self._client.log_batch(run_id, metrics=[Metric(key, value, timestamp, 0) for key, value in values.items()])

    # ---- points ----------------------------------------------------------------------------------------------------

    def read_clocks(self, run_id: str) -> dict[int, float]:
        """Return round → clock of the evaluations in MLflow. Batches are atomic, so one metric represents all."""
        return {metric.step: metric.value for metric in self._client.get_metric_history(run_id, CLOCK)}

    def send(self, run_id: str, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Send evaluations in batches; yield each batch that has arrived."""
        from mlflow.entities import Metric

        for start in range(0, len(records), _BATCH):
            batch = records[start : start + _BATCH]
            self._client.log_batch(run_id, metrics=[
                Metric(key, value, int(1000 * record["timestamp"]), record["round"])
                for record in batch for key, value in select_metrics(record)
            ])
            yield batch

    # ---- files and the end -----------------------------------------------------------------------------------------

    def upload(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._client.log_artifact(run_id, str(path), folder)

    def log_data(self, run_id: str, data: Mapping[str, Any]) -> None:
        """Log the data set as an input of the run."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.exceptions import MlflowException

        dataset = Dataset(
            name=data["name"], digest=data["digest"], source_type="dbo", source=data["source"],
            profile=data["profile"],
        )
        tags = [InputTag("mlflow.data.context", "training"), InputTag("partition", data["partition"])]
        inputs = [DatasetInput(dataset, tags)]
        try:
            self._client.log_inputs(run_id, inputs)
        except MlflowException:     # two writers that add the same data set at once collide in the store
            self._client.log_inputs(run_id, inputs)

    def set_running(self, run_id: str) -> None:
        self._client.update_run(run_id, status="RUNNING")

    def end(self, run_id: str, ending: Ending) -> None:
        self._client.set_terminated(run_id, ending.status, ending.ended)
