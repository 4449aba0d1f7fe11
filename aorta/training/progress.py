"""What a person sees while the run goes on: a progress line and TensorBoard scalars, from the records."""

import logging
import queue
import sys
import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aorta.config import Config
from aorta.records.schema import StepRecord

log = logging.getLogger("aorta")


class Reporter:
    """Takes StepRecords on any thread without blocking it, shows them on its own. Outlives the recorder.

    One line that changes on a terminal, a plain line every training.log_interval steps elsewhere.
    """

    def __init__(self, config: Config, first_step: int, num_steps: int) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self._config, self._first_step, self._num_steps = config, first_step, num_steps
        self._records: queue.SimpleQueue[StepRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aorta-progress", daemon=True)
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._config.logging.progress and sys.stdout.isatty():
            self._progress = _progress_line()
            self._progress.add_task("training", total=self._num_steps, completed=self._first_step, numbers="")
            self._progress.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._records.put(None)
        self._thread.join(timeout=30)
        if self._progress is not None:
            self._progress.stop()

    def add(self, record: StepRecord) -> None:
        self._records.put(record)

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            if record.loss is not None:
                self.first_loss = record.loss if self.first_loss is None else self.first_loss
                self.last_loss = record.loss
            try:
                self._show(record)
            except OSError as error:  # a closed terminal must not end the training
                log.warning("progress is no longer shown: %s", error)
                return

    def _show(self, record: StepRecord) -> None:
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], completed=record.global_step + 1, numbers=progress_numbers(record)
            )
        elif self._config.logging.progress and self._is_shown(record.global_step):
            print(f"step {record.global_step + 1}/{self._num_steps}  {progress_numbers(record)}", flush=True)

    def _is_shown(self, step: int) -> bool:
        return (step + 1) % self._config.training.log_interval == 0 or step in (
            self._first_step,
            self._num_steps - 1,
        )


def progress_numbers(record: StepRecord) -> str:
    """Loss, step and exposed time, overlap. What was not measured is a dash."""
    overlap = record.overlap
    time_name, time_ms = ("step", record.step_ms) if record.step_ms is not None else ("host", record.host_ms)
    percent = None if overlap.overlap_ratio is None else 100 * overlap.overlap_ratio
    return "  ".join(
        (
            f"loss {_number(record.loss, '8.4f')}",
            f"{time_name} {_number(time_ms, '8.2f')} ms",
            f"exposed {_number(overlap.exposed_ms, '8.2f')} ms",
            f"overlap {_number(percent, '5.1f')} %",
        )
    )


def _number(value: float | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)


def _progress_line() -> Progress:
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=Console(),
    )
