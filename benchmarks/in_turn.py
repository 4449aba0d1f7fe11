"""What harnesses share that turn aorta on and off in one process: the middle of ratios, the clock of threads
that launch, and a lock on which the sampler of stacks sleeps only while it is on."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


class OnTime:
    """In place of the lock that the sampler of stacks sleeps on: time passes only while it is on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_on = self._is_over = False

    def switch(self, on: bool) -> None:
        with self._changed:
            self._is_on = on
            self._changed.notify_all()

    def acquire(self, timeout: float) -> bool:
        with self._changed:
            while timeout > 0 and not self._is_over:
                began_s, was_on = time.monotonic(), self._is_on
                self._changed.wait(timeout if was_on else None)
                timeout -= (time.monotonic() - began_s) if was_on else 0.0
            return self._is_over

    def locked(self) -> bool:
        return not self._is_over

    def release(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def middle(ratios: Any) -> tuple[float, float, float]:
    """Hodges and Lehmann's middle of the ratios, on a log scale, and its 95 % interval."""
    logs, n = np.log(ratios), len(ratios)
    means = np.sort(((logs[:, None] + logs[None, :]) / 2)[np.triu_indices(n)])
    least = n * (n + 1) / 4 - 1.96 * np.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    place = min(max(round(least), 0), len(means) - 1)
    found, low, high = np.exp([np.median(means), means[place], means[-1 - place]]).tolist()
    return found, low, high


def launches(thread: str) -> bool:
    return thread == "main" or thread.startswith("pt_autograd")


_launching: dict[int, str] = {}


def launching_ms() -> dict[str, float]:
    """CPU time so far of the threads that launch: a hundredth of the time that reading all threads takes."""
    if not _launching:
        _launching[threading.get_native_id()] = "main"
        for task in Path("/proc/self/task").iterdir():
            if launches(name := (task / "comm").read_text().strip()):
                _launching[int(task.name)] = name
    return {name: time.clock_gettime_ns((~number << 3) | 6) / 1e6 for number, name in _launching.items()}
