"""Weights & Biases: --to wandb=PROJECT. Goes into the program's own run where it has one."""

from typing import Any

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import scalars
from aorta.sinks.sink import Place

RANKS = "first"
TAKES_RECORDS = True
PACKAGE = "wandb"


def open_sink(target: str, place: Place) -> "WandbScalars":
    import wandb

    return WandbScalars(wandb, target)


class WandbScalars:
    """Scalars of rank 0, against aorta/global_step."""

    def __init__(self, wandb: Any, project: str) -> None:
        self._wandb = wandb
        self._project = project
        self._is_own = False
        self._defined = False

    def add(self, record: StepRecord) -> None:
        if self._wandb.run is None:
            self._wandb.init(project=self._project)
            self._is_own = True
        if not self._defined:
            self._wandb.define_metric("aorta/*", step_metric="aorta/global_step")
            self._defined = True
        values = {f"aorta/{name}": value for name, value in scalars(record).items()}
        # commit=False: the steps of a run belong to the program, which commits with its own numbers.
        self._wandb.log(values | {"aorta/global_step": record.global_step}, commit=self._is_own)

    def close(self) -> None:
        if self._is_own:
            self._wandb.finish()
