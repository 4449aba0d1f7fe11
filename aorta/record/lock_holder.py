"""Which thread holds the interpreter's lock while the one that trains waits for it.

The sampler of stacks wakes at random moments and needs the lock, as the thread that trains does. Where it
gets it late, though it had a core, somebody held it: not the thread that trains, if that is in a function of
torch, which lets go of the lock while it computes. How long that one slept, the kernel tells; but for the
lock no longer than the others ran: it sleeps in backward passes too.
"""

import ctypes
import os
import threading
import time
from contextlib import suppress

from aorta.record.thread_state import clock_of_number, cpu_ns

SCHEDSTAT = "/proc/thread-self/schedstat"
"""Linux: ns on a core, ns ready without a core, and time slices of the thread that reads it."""
LATE_NS = 500_000
"""By which the sampler has the lock later than meant; a thread that runs Python lets go of it after 5 ms."""
ALONE = 0.01
"""Part of a core up to which other threads of the program leave the one that trains alone."""
MOST_THREADS = 32
OWN_THREADS = "aorta"
"""Begin of their names."""
_read = None
with suppress(Exception):  # no such function on another system
    _read = ctypes.PyDLL(None).pread  # as os.pread, but without letting go of the lock
    _read.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]


class LockWatch:
    """Of one thread that trains, over each sleep of the sampler, on whose thread it is made and asked.

    A sleep that is not late takes a reading and a clock for each of the program's threads, and no more.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.is_alone = False
        """Whether the program's other threads hardly ran between the starts of the last two sleeps. Of a new
        thread that is not known yet."""
        self._files: list[int] = []
        self._text = ctypes.create_string_buffer(96)
        self._known: tuple[int, ...] = ()
        """Ids of all threads that Python knows, to see when there are others."""
        self._clocks: dict[int, int | None] = {}
        """Of the program's other threads that run Python."""
        self._before: list[int] = []
        """Their CPU time as a sleep began."""
        self._last_ns = 0
        """When the last one did."""
        self.late_ns = 0
        """How much later than meant the last sleep ended, waits for a core left out."""
        self._began_ns = self._delayed_ns = self._slept_ns = 0
        self._since_ns = self._used_ns = self._ran_ns = 0
        """When all were looked at last, how long the one that trains had run or waited for a core, and how
        long the others had run."""
        number = number_of(thread)
        with suppress(OSError):
            if _read is not None and number is not None:
                self._files.append(os.open(SCHEDSTAT, os.O_RDONLY))
                self._files.append(os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY))
        if self._files and not self._use(0)[0]:
            self.close()  # this kernel does not count

    def close(self) -> None:
        while self._files:
            with suppress(OSError):  # a program may close all files, as daemons do
                os.close(self._files.pop())

    def sleep_begins(self) -> None:
        threads = _known().copy()  # others add to it
        if has_changed := (known := tuple(map(id, threads.values()))) != self._known:
            self._known, self._since_ns = known, 0
            others = [
                ident
                for ident, one in threads.items()
                if ident != self.thread and not one.name.startswith(OWN_THREADS)
            ]
            self._clocks = {ident: clock_of(ident) for ident in others[:MOST_THREADS]}
        ran, now_ns = [cpu_ns(clock) for clock in self._clocks.values()], time.monotonic_ns()
        before = [ns or 0 for ns in ran]
        are_known = not has_changed and None not in ran and len(ran) < MOST_THREADS
        ran_ns, length_ns = sum(before) - sum(self._before), now_ns - self._last_ns
        self.is_alone = are_known and ran_ns < ALONE * length_ns
        self._before, self._last_ns = before, now_ns
        if len(self._files) == 2:
            self._began_ns, self._delayed_ns = now_ns, self._use(0)[1]
            if self._clocks and not self._since_ns:
                self._since_ns, self._used_ns = self._began_ns, sum(self._use(1))
                self._ran_ns = sum(self._before)

    def holder(self, asked_ns: int) -> int | None:
        """The thread that held the lock when a sleep of asked_ns was meant to end; None where nobody did."""
        began_ns, self._began_ns, self.late_ns = self._began_ns, 0, 0
        now_ns = time.monotonic_ns()
        late_ns = now_ns - began_ns - asked_ns
        if not began_ns or late_ns < LATE_NS:
            return None
        self.late_ns = late_ns = late_ns - (self._use(0)[1] - self._delayed_ns)
        if late_ns < LATE_NS or not self._clocks:
            return None
        used_ns, run_ns = sum(self._use(1)), [cpu_ns(clock) or 0 for clock in self._clocks.values()]
        slept_ns = now_ns - self._since_ns - (used_ns - self._used_ns)
        self._slept_ns += max(min(slept_ns, sum(run_ns) - self._ran_ns), 0)
        self._since_ns, self._used_ns, self._ran_ns = now_ns, used_ns, sum(run_ns)
        ran = [ns - before_ns for ns, before_ns in zip(run_ns, self._before, strict=True)]
        return max(zip(ran, self._clocks, strict=True))[1] if max(ran) >= late_ns else None

    def taken_ns(self, most_ns: int) -> int:
        """At most so long of what the thread that trains has slept and the others have run."""
        taken_ns = min(most_ns, self._slept_ns)
        self._slept_ns -= taken_ns
        return taken_ns

    def _use(self, place: int) -> tuple[int, int]:
        """How long a thread has run, and waited for a core."""
        assert _read is not None
        _read(self._files[place], self._text, 95, 0)
        words = self._text.value.split()
        return (int(words[0]), int(words[1])) if len(words) > 1 else (0, 0)


def clock_of(thread: int) -> int | None:
    """CPU clock of a thread; None of one that Python does not know."""
    return clock_of_number(number_of(thread))


def number_of(thread: int) -> int | None:
    """What the kernel calls a thread; None of one that Python does not know."""
    return getattr(_known().get(thread), "native_id", None)


def _known() -> dict[int, threading.Thread]:
    return threading._active  # type: ignore[attr-defined, no-any-return]
