"""HostRecorder for runs with recording.enabled = false, and LoopRecorder: it or the recorder of other runs.

Both take the same calls, so that the loop has no branches.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from aorta.device.backend import accelerator
from aorta.record.companions import Companion, Companions
from aorta.record.recorder import Recorder
from aorta.record.scalars import DeviceScalar, read_scalars, scalar
from aorta.records.schema import StepRecord
from aorta.steps.record import partial_record

OnRecord = Callable[[StepRecord], None]

_OFF = "recording.enabled is false"
"""Reason in the records why device times are missing."""


class HostRecorder:
    """Recorder of losses and host times for the progress line. Writes no file itself; its companions may."""

    def __init__(
        self, rank: int, world_size: int, output_dir: str | Path = ".", companions: Iterable[Companion] = ()
    ) -> None:
        """output_dir: folder that the companions write to."""
        self.rank, self.world_size = rank, world_size
        self.output_dir = Path(output_dir)
        self.companions = Companions(companions)
        self._callbacks: list[OnRecord] = []
        self._pending: deque[_HostStep] = deque()

    def __enter__(self) -> Self:
        self.companions.opened(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.companions.closing(exc_type)
        # The last losses are on their way to the host. Not after an error: the device may never be done.
        if exc_type is None and accelerator().is_initialized():
            accelerator().synchronize()
        self._deliver()
        self.companions.closed(exc_type)

    def on_record(self, callback: OnRecord) -> None:
        """Call back with each StepRecord a few steps later; callback must not block."""
        self._callbacks.append(callback)

    @property
    def store_prefix(self) -> str:
        """Prefix of the companions' keys; the training loop's store puts a word of the attempt before it."""
        return "aorta"

    def pausing(self, activity: str) -> AbstractContextManager[None]:
        """Context of an activity between steps that may take long, such as a checkpoint."""
        return self.companions.pausing(activity)

    def stopped(self, reason: str) -> None:
        """Note that the run was asked to end early, by a signal of this name."""

    @contextmanager
    def step(
        self,
        *,
        tokens: int | None = None,
        epoch: int = 0,
        step: int | None = None,
        global_step: int | None = None,
    ) -> Iterator["_HostStep"]:
        self._deliver()  # records of steps that have arrived by now: a step never waits for an earlier one
        started = _HostStep(tokens, epoch, step or 0, global_step or 0)
        self.companions.step_begins(global_step or 0)
        yield started
        started.finish()
        self._pending.append(started)
        self.companions.step_ended(global_step or 0)

    def _deliver(self) -> None:
        while self._pending and self._pending[0].is_done():
            record = self._pending.popleft().record(self.rank, self.world_size)
            for callback in self._callbacks:
                callback(record)


LoopRecorder = Recorder | HostRecorder
"""What the training loop calls."""


class _HostStep:
    def __init__(self, tokens: int | None, epoch: int, step: int, global_step: int) -> None:
        self._tokens, self._epoch, self._step, self._global_step = tokens, epoch, step, global_step
        self._values: dict[str, float | DeviceScalar] = {}
        self._copied: Any = None
        self._start_unix_ns = time.time_ns()
        self._start_s = time.perf_counter()
        self._host_ms = 0.0

    def log(self, **values: Tensor | float | None) -> None:
        """Tensors are copied asynchronously and read later."""
        self._values |= {name: scalar(value) for name, value in values.items() if value is not None}

    def finish(self) -> None:
        self._host_ms = (time.perf_counter() - self._start_s) * 1e3
        if any(isinstance(value, DeviceScalar) for value in self._values.values()):
            # Behind all copies of the step, on the stream that they are on.
            self._copied = accelerator().new_event()
            self._copied.record()

    def is_done(self) -> bool:
        return self._copied is None or bool(self._copied.query())

    def record(self, rank: int, world_size: int) -> StepRecord:
        return partial_record(
            rank,
            world_size,
            self._global_step,
            epoch=self._epoch,
            step=self._step,
            tokens=self._tokens,
            source="host",
            start_unix_ns=self._start_unix_ns,
            host_ms=self._host_ms,
            not_measured={"overlap": _OFF, "step_ms": _OFF, "streams": _OFF, "collectives": _OFF},
            **read_scalars(self._values),
        )
