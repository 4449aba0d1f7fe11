"""MLflow: --to mlflow=EXPERIMENT. Goes into the program's own run where it has one."""

from typing import Any

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import scalars
from aorta.sinks.sink import Place

RANKS = "first"
TAKES_RECORDS = True
PACKAGE = "mlflow"


def open_sink(target: str, place: Place) -> "MlflowScalars":
    import mlflow

    return MlflowScalars(mlflow, target)


class MlflowScalars:
    """Scalars of rank 0, by global step."""

    def __init__(self, mlflow: Any, experiment: str) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        run = mlflow.last_active_run()
        self._is_own = run is None or run.info.status != "RUNNING"
        if self._is_own:
            existing = self._client.get_experiment_by_name(experiment)
            number = existing.experiment_id if existing else self._client.create_experiment(experiment)
            run = self._client.create_run(number, run_name="aorta")
        assert run is not None
        self.run_id = run.info.run_id

    def add(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self._client.log_metric(self.run_id, f"aorta/{name}", value, step=record.global_step)

    def close(self) -> None:
        if self._is_own:
            self._client.set_terminated(self.run_id)
