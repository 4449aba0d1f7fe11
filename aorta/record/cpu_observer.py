"""Times collectives of CPU tensors (gloo) on the host's monotonic clock.

There are no streams: what a synchronous collective or a wait costs is the time in which the
step's thread stands still. Asynchronous work is timed to its completion, on the thread that
completes it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.marks import HostClock
from aorta.record.interception.stalls import BackwardWatch, current_graph_task
from aorta.record.interception.works import DoneWork, Launch, TimedWork
from aorta.record.journal import Journal
from aorta.steps.notes import CollectiveCall, Mark, Stall


class CpuObserver:
    """The observer of collectives of CPU tensors, and of the waits for them.

    hang/standing.py reads the local `call` out of this file's frames, to show which collective a thread is
    in: each function that launches or waits for one has to name it so. It takes numbered calls only
    (`seq >= 0`).
    """

    def __init__(self, journal: Journal, clock: HostClock) -> None:
        self._journal = journal
        self._clock = clock
        self._done_work = DoneWork()
        self._backward = BackwardWatch(journal, clock)
        self._without_future: set[tuple[str, str, str]] = set()
        """Backend and function of calls whose works turned out to have no future."""

    def observe(
        self,
        group: ProcessGroup,
        op: str,
        tensors: Any,
        num_bytes: int,
        dtype: str,
        is_async: bool,
        launch: Launch,
        peer: int | None = None,
    ) -> Work:
        noted_group = self._journal.group(group)
        call = CollectiveCall(noted_group, op, num_bytes, dtype, is_async, peer)
        if noted_group.coalescing is not None:
            noted_group.coalescing.append(call)
            return launch() or self._done_work
        return self._timed(call, launch) or self._done_work

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        self._journal.group(group).num_internal += num_calls

    def coalescing_started(self, group: ProcessGroup) -> None:
        self._journal.coalescing_started(group)

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        call = self._journal.coalescing_ended(group)
        if call is None:
            untimed: Work | None = launch()
            return untimed
        return self._timed(call, launch)

    def _timed(self, call: CollectiveCall, launch: Launch) -> Work | None:
        """Launch a call and time it; None where it has ended with its launch."""
        call.stream = "host"
        call.start = self._clock.mark()
        self._journal.add_call(call)  # before the launch, so that a watchdog can name a call that blocks
        try:
            work = launch()
        except BaseException:
            self._journal.withdraw_call(call)
            raise
        call.launched_ns = time.monotonic_ns()
        if work is None:
            call.end = self._clock.mark()
            self._stall(call.start, call.end)
            return None
        if call.is_async:
            self._backward.async_call(current_graph_task())
            self._time_completion(work, call, launch)
        return TimedWork(work, call, self, None)

    def wait(self, call: CollectiveCall, wait: Callable[..., Any], *timeout: timedelta) -> Any:
        # The caller of a synchronous call stands still from its launch on, not only from this wait.
        start = call.start
        since = self._clock.mark() if call.is_async or start is None else start
        result = wait(*timeout)
        self._waited(call, since)
        return result

    def wait_beyond(self, calls: Sequence[CollectiveCall], wait: Callable[..., Any]) -> Any:
        since = self._clock.mark()
        result = wait()
        for call in calls:
            self._waited(call, since)
        return result

    def lost(self, calls: Sequence[CollectiveCall]) -> None:
        self._journal.lost_futures(calls)

    def _waited(self, call: CollectiveCall, since: Mark) -> None:
        end = self._clock.mark()
        call.waited = True
        if call.end is None:
            call.end = end
        self._stall(since, end)

    def _stall(self, start: Mark, end: Mark) -> None:
        step = self._journal.current
        if step is not None and step.thread == threading.get_ident():
            step.stalls.append(Stall(start, end))

    def _time_completion(self, work: Work, call: CollectiveCall, launch: Launch) -> None:
        """Note the call's end when the backend does, where its work has a future.

        Works of some of gloo's functions have none (send, recv, a list of reduce-scatters). Asking for it
        raises an error with the stack of C++ in it, which takes far longer than the launch: once is enough.
        """

        def completed(future: Any) -> None:
            now_ns = time.monotonic_ns()
            try:
                future.value()
            except RuntimeError:  # torch hands out any error as this one
                call.failed = True  # before the end is set: who sees an end asks for this
            if call.end is None:
                call.end = Mark(now_ns)

        function = (call.group.backend, *_launching_function(launch))
        if function not in self._without_future:
            try:
                work.get_future().add_done_callback(completed)
                return
            except RuntimeError:
                self._without_future.add(function)
        call.ends_unseen = True


def _launching_function(launch: Launch) -> tuple[str, str]:
    """Return names of the backend's function, as far as the launch, often a partial of it, tells."""
    function, args = getattr(launch, "func", launch), getattr(launch, "args", ())
    return getattr(function, "__name__", ""), args[0] if args and isinstance(args[0], str) else ""
