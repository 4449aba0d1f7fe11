"""Kernel records of a device that is not there: a program says which kernels it launches."""

import threading
from time import monotonic_ns
from typing import Any

import numpy as np
import torch

from aorta.steps.notes import RECORD_DTYPE, KernelChunk, What
from tests.device.fake_device import FakeBackend

KERNEL_NS = 1000


class FakeRecords:
    """What `KernelRecords` is to a recorder. Each kernel runs for a microsecond, when it is launched."""

    def __init__(self) -> None:
        self.is_on = False
        self.version = 0
        self.launch_us = 1.5
        self._names = [""]
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._num_calls = self._last_mark = self._num_told = 0

    def kernel(self, name: str) -> None:
        """Launch a kernel."""
        if name not in self._names:
            self._names.append(name)
        self._add(What.KERNEL, self._names.index(name), stream=9)

    def _add(self, what: What, name: int, stream: int) -> None:
        now_ns = monotonic_ns()
        self._num_calls += 1
        if self.is_on:
            with self._lock:
                self._rows.append(
                    {
                        "start": now_ns,
                        "end": now_ns + KERNEL_NS,
                        "correlation": self._num_calls,
                        "stream": stream,
                        "name": name,
                        "what": what,
                    }  # fmt: skip
                )

    def start(self) -> None:
        self.is_on = True

    def stop(self) -> None:
        self.is_on = False

    def yield_buffers(self) -> None:
        self.stop()

    def synchronize(self) -> None:
        return None

    def mark(self, stream: int) -> int:
        self._last_mark += 1
        self._add(What.MARK, self._last_mark, stream)
        return self._last_mark

    def has_passed(self, number: int) -> bool:
        return True

    def flush(self, forced: bool = False) -> None:
        return None

    def poll(self, closing: bool = False, forced: bool = False) -> list[KernelChunk]:
        with self._lock:
            rows, self._rows = self._rows, []
            before_ns = monotonic_ns()
        table = np.zeros(len(rows), RECORD_DTYPE)
        for i, values in enumerate(rows):
            for name, value in values.items():
                table[name][i] = value
        names, self._num_told = self._names[self._num_told :], len(self._names)
        complete_ns = before_ns if closing or forced else 0
        return [KernelChunk(table.tobytes(), names, 1, complete_ns, 0, (0, 0), 0)]

    def discard(self) -> None:
        self._rows.clear()


class RecordingBackend(FakeBackend):
    """A device with kernel records."""

    kernels_unasked = None
    kernels_note = None

    def __init__(self) -> None:
        super().__init__()
        self.records = FakeRecords()

    def kernel_records(self, device: torch.device) -> Any:
        self.records.start()
        return self.records
