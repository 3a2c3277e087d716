"""The MLflow side: one experiment in one store, runs found again by their keys, every point once."""

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dbo.platform.config.tracking_uri import file_of
from dbo.platform.errors import RunError
from dbo.platform.runs.run_folder import Record
from dbo.platform.tracking.reader import Ending, Facts, values

PARENT = "mlflow.parentRunId"
CLOCK = "seconds"                 # a metric that every evaluation has, and whose value is not that of a repetition
_BATCH = 40                       # evaluations per request: below MLflow's limit of 1000 metrics
_NOTE = (
    "Runs of dbo, decentralized bilevel optimization. The step is the communication "
    "round. Choose `comm_mb` as the metric of the X-axis to see what accuracy costs; every run's note has its command."
)


def environment(uri: str) -> dict[str, str]:
    """What MLflow reads: this store and no other, one attempt per request, no word to its makers, no pickles."""
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
    """An experiment of an MLflow store."""

    def __init__(self, uri: str, experiment: str) -> None:
        self.uri, self._name = uri, experiment
        self._client: Any = None
        self._experiment = ""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One writer of this machine at a time: for looking before making, and for the first use of a sqlite file."""
        with open(self._lock_file(), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_file(self) -> Path:
        file = file_of(self.uri)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            return file.with_name(f".{file.name}.lock")
        folder = Path(tempfile.gettempdir()) / f"dbo-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise RunError(f"{folder} belongs to somebody else")
        return folder / f"{hashlib.sha256(self.uri.encode()).hexdigest()[:16]}.lock"

    def connect(self) -> Any:
        """MLflow's own client of this store."""
        from mlflow import MlflowClient

        with self.lock():
            return MlflowClient(tracking_uri=self.uri)

    def open(self) -> None:
        """Connects, and makes the experiment if it is not there."""
        if self._client is None:
            client = self.connect()
            with self.lock():
                self._experiment = self._found_experiment(client)
            self._client = client

    def _found_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        found = client.get_experiment_by_name(self._name)
        if found is None:
            try:
                return str(client.create_experiment(self._name, artifact_location=self._artifacts(), tags={
                    "mlflow.note.content": _NOTE, "mlflow.experimentKind": "custom_model_development",
                    "mlflow.experiment.primaryMetric.name": "test_accuracy",
                }))
            except MlflowException:             # another machine may have made it a moment ago
                found = client.get_experiment_by_name(self._name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise RunError(f"the MLflow experiment {self._name!r} was deleted; restore it or name another one")
        return str(found.experiment_id)

    def _artifacts(self) -> str | None:
        """Files lie below the sqlite file's folder; a server knows its own place."""
        file = file_of(self.uri)
        if file is None:
            return None
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in self._name).strip(".") or "dbo"
        return (file.parent.resolve() / "mlartifacts" / name).as_uri()

    # ---- runs ------------------------------------------------------------------------------------------------------

    def find_or_make(self, facts: Facts, parent: str | None) -> Any:
        """The run with this key below this parent (None: below none)."""
        with self.lock():
            found = self._find(facts, parent)
            if found:
                return found[0]
            tags = facts.tags | ({PARENT: parent} if parent else {})
            made = self._client.create_run(
                self._experiment, start_time=facts.started or None, tags=tags, run_name=facts.name)
            # The lock binds this machine only. If another one made the run at the same moment, one has to withdraw.
            if len(self._find(facts, parent)) > 1:
                self._client.delete_run(made.info.run_id)
                raise RunError("another machine makes the same run at this moment")
            return made

    def _find(self, facts: Facts, parent: str | None) -> list[Any]:
        wanted = f"tags.`{facts.key_tag}` = '{facts.key}'"
        if parent:
            wanted += f" and tags.`{PARENT}` = '{parent}'"
        found = self._client.search_runs([self._experiment], wanted, order_by=["attributes.start_time ASC"])
        return [run for run in found if parent or PARENT not in run.data.tags]

    def get(self, run_id: str) -> Any:
        return self._client.get_run(run_id)

    def describe(self, run: Any, facts: Facts) -> None:
        """Parameters that are not there yet; those that are cannot be changed in MLflow."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in facts.params.items() if key not in run.data.params]
        for start in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[start : start + 100])

    def tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items() if value])

    # ---- points ----------------------------------------------------------------------------------------------------

    def clocks(self, run_id: str) -> dict[int, float]:
        """The evaluations that are there: round and clock. A batch is written whole or not at all: one metric tells."""
        return {metric.step: metric.value for metric in self._client.get_metric_history(run_id, CLOCK)}

    def send(self, run_id: str, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Evaluations in batches; yields what has arrived."""
        from mlflow.entities import Metric

        for start in range(0, len(records), _BATCH):
            batch = records[start : start + _BATCH]
            self._client.log_batch(run_id, metrics=[
                Metric(key, value, int(1000 * record["timestamp"]), record["round"])
                for record in batch for key, value in values(record)
            ])
            yield batch

    # ---- files and the end -----------------------------------------------------------------------------------------

    def upload(self, run_id: str, path: Path, folder: str | None = None) -> None:
        self._client.log_artifact(run_id, str(path), folder)

    def log_data(self, run_id: str, data: Mapping[str, Any]) -> None:
        """The data set as an input of the run."""
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
        except MlflowException:     # a store looks whether the data set is there, then adds it: two at once collide
            self._client.log_inputs(run_id, inputs)

    def running(self, run_id: str) -> None:
        self._client.update_run(run_id, status="RUNNING")

    def end(self, run_id: str, ending: Ending) -> None:
        self._client.set_terminated(run_id, ending.status, ending.ended)
