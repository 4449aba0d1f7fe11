"""How long a thread had a core, and how long it wanted one that others had."""

import os
import time
from threading import get_native_id

SCHEDSTAT = "/proc/thread-self/schedstat"


class ThreadUse:
    """Reads the counters of the calling thread; 2 to 3 us a reading."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._file: int | None = None

    def read(self) -> tuple[int, int, int | None]:
        """The thread, its ns of CPU time, and its ns of being ready to run without a core, since it began;
        None where the system does not count these."""
        thread = get_native_id()  # another one in a forked process, unlike get_ident()
        if thread != self._thread:
            self.close()
            self._thread = thread
            try:
                self._file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # no Linux, or a kernel without CONFIG_SCHED_INFO
                self._file = None
        ready_ns = None
        if self._file is not None:
            try:
                ready_ns = int(os.pread(self._file, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # a thread that is gone had this one's number
                self.close()
        return thread, time.thread_time_ns(), ready_ns

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._thread = None


def use_ms(
    begin: tuple[int, int, int | None] | None, end: tuple[int, int, int | None] | None
) -> tuple[float, float | None] | None:
    """CPU and ready ms between two readings; None where they are of two threads, or missing."""
    if begin is None or end is None or begin[0] != end[0]:
        return None
    ready_ns = None if begin[2] is None or end[2] is None else end[2] - begin[2]
    return (end[1] - begin[1]) / 1e6, None if ready_ns is None else ready_ns / 1e6
