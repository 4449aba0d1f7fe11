"""Which thread holds the interpreter's lock while the one that trains waits for it.

The sampler of stacks wakes at random moments and needs the lock, as the thread that trains does. Where it
gets it late, though it had a core, somebody held it: not the thread that trains, if that is in a function of
torch, which lets go of the lock while it computes. How long that one slept, the kernel tells.
"""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress

from aorta.record.host import SCHEDSTAT

LATE_NS = 500_000
"""By which the sampler has the lock later than meant; a thread that runs Python lets go of it after 5 ms."""
MOST_THREADS = 32
OWN_THREADS = "aorta"
"""Begin of their names."""
_read = None
with suppress(Exception):  # no such function on another system
    _read = ctypes.PyDLL(None).pread  # as os.pread, but without letting go of the lock
    _read.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]


class LockWatch:
    """Of one thread that trains, over each sleep of the sampler, on whose thread it is made and asked."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._files: list[int] = []
        self._before: dict[int, int] = {}
        """CPU time of the program's other threads that run Python, as a sleep began."""
        self._began_ns = self._delayed_ns = self._used_ns = self._slept_ns = 0
        number = getattr(_known().get(thread), "native_id", None)
        with suppress(OSError):
            if _read is not None and number is not None:
                self._files.append(os.open(SCHEDSTAT, os.O_RDONLY))
                self._files.append(os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY))
        if self._files and not self._use(0)[0]:
            self.close()  # this kernel does not count

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def sleep_begins(self) -> None:
        threads = [
            ident
            for ident, one in _known().copy().items()  # others add to it
            if ident != self.thread and not one.name.startswith(OWN_THREADS)
        ]
        self._before = {ident: cpu_ns(clock_of(ident)) or 0 for ident in threads[:MOST_THREADS]}
        if self._before and len(self._files) == 2:
            self._began_ns = time.monotonic_ns()
            self._delayed_ns, self._used_ns = self._use(0)[1], sum(self._use(1))

    def holder(self, asked_ns: int) -> int | None:
        """The thread that held the lock when a sleep of asked_ns was meant to end; None where nobody did."""
        if not self._before or not self._began_ns:
            return None
        length_ns = time.monotonic_ns() - self._began_ns
        late_ns = length_ns - asked_ns - (self._use(0)[1] - self._delayed_ns)
        self._slept_ns += max(length_ns - (sum(self._use(1)) - self._used_ns), 0)
        self._began_ns = 0
        if late_ns < LATE_NS:
            return None
        ran = {ident: (cpu_ns(clock_of(ident)) or 0) - ns for ident, ns in self._before.items()}
        most = max(ran, key=lambda ident: ran[ident])
        return most if ran[most] >= late_ns else None

    def taken_ns(self, most_ns: int) -> int:
        """At most so long of what the thread that trains has slept: it waited for the lock no longer."""
        taken_ns = min(most_ns, self._slept_ns)
        self._slept_ns -= taken_ns
        return taken_ns

    def _use(self, place: int) -> tuple[int, int]:
        """How long a thread has run, and waited for a core."""
        text = ctypes.create_string_buffer(96)
        assert _read is not None
        _read(self._files[place], text, 95, 0)
        words = text.value.split()
        return (int(words[0]), int(words[1])) if len(words) > 1 else (0, 0)


def clock_of(thread: int) -> int | None:
    """CPU clock of a thread; None of one that Python does not know. Its id holds the thread's number."""
    number = getattr(_known().get(thread), "native_id", None)
    return None if number is None or sys.platform != "linux" else ~number << 3 | 6


def cpu_ns(clock: int | None) -> int | None:
    """CPU time of a thread; None where there is no such clock, or the thread is gone."""
    try:
        return None if clock is None else time.clock_gettime_ns(clock)
    except OSError:
        return None


def _known() -> dict[int, threading.Thread]:
    return threading._active  # type: ignore[attr-defined, no-any-return]
