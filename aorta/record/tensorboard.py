"""Scalars of the steps for TensorBoard."""

import logging
from pathlib import Path
from typing import Any

from aorta.records.schema import StepRecord

log = logging.getLogger(__name__)


class ScalarFile:
    """TensorBoard scalars. Made with the first record: the recorder moves an older run's files aside before.

    A missing package or a full disk is one warning and ends the scalars, not the training.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._failed = False

    def add(self, record: StepRecord) -> None:
        if self._failed:
            return
        try:
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._folder))
            for name, value in _scalars(record):
                self._writer.add_scalar(name, value, record.global_step)
        except (ImportError, OSError) as error:
            self._fail(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        log.warning("tensorboard: no more scalars: %s", error)


def _scalars(record: StepRecord) -> list[tuple[str, float]]:
    values = {
        "loss": record.loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "step_ms": record.step_ms,
        "exposed_ms": record.overlap.exposed_ms,
        "overlap_ratio": record.overlap.overlap_ratio,
    }
    return [(name, value) for name, value in values.items() if value is not None]
