"""TensorBoard scalars: --to tensorboard=DIR."""

from typing import Any

from aorta.records.schema import StepRecord
from aorta.sinks.scalars import scalars

EVERY_RANK = False
PACKAGE = "tensorboard"


def open_sink(target: str, rank: int, world_size: int) -> "TensorBoardScalars":
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardScalars(SummaryWriter(target))


class TensorBoardScalars:
    """Scalars of rank 0, by global step."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, record: StepRecord) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"aorta/{name}", value, record.global_step)

    def close(self) -> None:
        self._writer.close()
