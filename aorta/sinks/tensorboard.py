"""TensorBoard scalars: --to tensorboard=DIR."""

from collections.abc import Callable
from typing import Any

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import scalars
from aorta.sinks.sink import Place

RANKS = "first"
TAKES_RECORDS = True
PACKAGE = "tensorboard"


def open_sink(target: str, place: Place) -> "TensorBoardScalars":
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardScalars(SummaryWriter, target)


class TensorBoardScalars:
    """Scalars of rank 0, by global step. The folder is made with the first one."""

    def __init__(self, writer: Callable[[str], Any], folder: str) -> None:
        self._make_writer = writer
        self._folder = folder
        self._writer: Any = None

    def add(self, record: StepRecord) -> None:
        if self._writer is None:
            self._writer = self._make_writer(self._folder)
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"aorta/{name}", value, record.global_step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
