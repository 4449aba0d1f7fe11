"""Sees when asynchronous works of the host end, without being called by the thread that ends them.

A callback on a work's future runs on gloo's own thread. That thread then waits for the interpreter lock
before it lets the waiting rank go on, makes and destroys a Python thread state for each collective, and frees
what the callback holds. So nobody is called here. A thread of ours asks: every quarter of a millisecond of a
young call, and every twentieth of an older one's age. The step's thread asks too, at each wait and where many
calls go on. A call that is being waited for is not asked about, since its wait tells.
"""

import threading
import time
from collections import deque

from aorta.device.marks import Mark
from aorta.recording.calls import CollectiveCall

SHORTEST_PAUSE_NS = 250_000
LONGEST_PAUSE_NS = 1_000_000
"""Also between two looks where nothing goes on: a new call may have started meanwhile."""
PART_OF_AGE = 20
AWAKE_S = 0.02
"""So long the thread looks though nothing goes on: a program that communicates goes on doing so."""
ASLEEP_S = 1.0
"""After so long without a call the thread ends; the next call starts another."""
MANY_CALLS = 64
"""From so many on, the thread that launches them looks too: it may leave nobody else the interpreter lock."""


def look_at(call: CollectiveCall) -> None:
    """Note when the call ended, if it has: between the last look that saw it go on and this one.

    Nothing of a call whose end nobody has to look for.
    """
    future = call.future
    if future is None:
        return
    now_ns = time.monotonic_ns()
    if not future.done():
        call.seen_ns = now_ns
        return
    call.future = None
    if call.end is None:
        call.end = Mark((call.seen_ns + time.monotonic_ns()) // 2)


class CompletionWatch:
    """Looks at calls until they have ended."""

    def __init__(self) -> None:
        self._running: deque[CollectiveCall] = deque()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, call: CollectiveCall) -> None:
        """call: launched, with its future."""
        call.seen_ns = call.seen_ns or call.launched_ns
        look_at(call)
        if call.future is None:
            return
        self._running.append(call)
        if len(self._running) >= MANY_CALLS:
            self.look()
        if self._thread is None:
            self._start()
        elif not self._wake.is_set():
            self._wake.set()

    def look(self) -> int | None:
        """Look at all calls once; when the youngest of those that go on was launched, None if none does.

        From any thread, and from several at once.
        """
        running, youngest_ns = self._running, 0
        for _ in range(len(running)):
            try:
                call = running.popleft()
            except IndexError:  # another thread has it
                break
            look_at(call)
            if call.future is not None:
                running.append(call)
                youngest_ns = max(youngest_ns, call.launched_ns)
        return youngest_ns or None

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._wake.set()
                self._thread = threading.Thread(target=self._run, name="aorta-completion", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        last_call_ns = time.monotonic_ns()
        while True:
            youngest_ns = self.look()
            now_ns = time.monotonic_ns()
            if youngest_ns is not None:
                last_call_ns = now_ns
                pause_ns = (now_ns - youngest_ns) // PART_OF_AGE
                time.sleep(min(max(pause_ns, SHORTEST_PAUSE_NS), LONGEST_PAUSE_NS) / 1e9)
            elif now_ns - last_call_ns < AWAKE_S * 1e9:
                time.sleep(LONGEST_PAUSE_NS / 1e9)
            else:
                self._wake.clear()
                if self._running:  # launched before it could see that it has to wake us
                    self._wake.set()
                elif not self._wake.wait(ASLEEP_S) and self._ended():
                    return
                last_call_ns = time.monotonic_ns()

    def _ended(self) -> bool:
        """This thread ends now, unless a call has come meanwhile."""
        with self._starting:
            self._thread = None
            if not self._running:
                return True
            self._thread = threading.current_thread()
            return False
