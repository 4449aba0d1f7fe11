"""What the kernel knows of a thread of this process: its CPU clock, and whether it runs, could or sleeps."""

import os
import sys
import time
from contextlib import suppress

from aorta.records.stacks import DOING

PROBE_S = 0.0005
"""Time over which the CPU clock tells whether the thread runs."""
RUNNING = 0.3
"""Part of this time that it has on a core, from which on it runs."""
_RUNS, _READY, _SLEEPS = (DOING.index(name) for name in ("runs", "ready", "sleeps"))


class ThreadState:
    def __init__(self, number: int | None) -> None:
        """number: the kernel's, since the one that threading knows in a forked process is the parent's."""
        self._clock, self._stat = clock_of_number(number), -1
        with suppress(OSError):  # another system
            self._stat = os.open(f"/proc/self/task/{number}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        stat, self._stat = self._stat, -1
        if stat >= 0:
            with suppress(OSError):  # a program may close all files, as daemons do
                os.close(stat)

    def doing(self) -> int:
        """What it does from now on for a moment, which this takes: a place in DOING."""
        before_ns, began_ns = cpu_ns(self._clock), time.monotonic_ns()
        if before_ns is None:
            return _RUNS
        time.sleep(PROBE_S)
        after_ns, length_ns = cpu_ns(self._clock), time.monotonic_ns() - began_ns
        if after_ns is None or after_ns - before_ns >= RUNNING * length_ns:
            return _RUNS
        return _READY if self._is_ready() else _SLEEPS

    def _is_ready(self) -> bool:
        """Whether the kernel lists it as one that runs or could."""
        try:
            text = b"" if self._stat < 0 else os.pread(self._stat, 256, 0)
        except OSError:  # it has ended
            return False
        return text.rpartition(b") ")[2][:1] == b"R"


def clock_of_number(number: int | None) -> int | None:
    """CPU clock of the thread that the kernel has under this number. The clock's id holds it."""
    return None if number is None or sys.platform != "linux" else ~number << 3 | 6


def cpu_ns(clock: int | None) -> int | None:
    """CPU time of a thread; None where there is no such clock, or the thread is gone."""
    try:
        return None if clock is None else time.clock_gettime_ns(clock)
    except OSError:
        return None
