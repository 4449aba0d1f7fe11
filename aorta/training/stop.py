"""Agreement of all ranks on the last step after a signal, without a collective per step.

A side thread of every rank looks at the store. Once a stop is requested it freezes its rank: the step
running now is published, and the training loop may not start another until all ranks have published
theirs. The largest of them is the last step of everyone. No rank has passed it, because each is frozen at
or before it; and no rank waits for another's training loop, only for side threads, which run even while
the loop is blocked in a collective that needs a slower rank.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

log = logging.getLogger("aorta")

_AGREE_S = 10.0
"""Seconds until a rank that has not answered is taken for gone: side threads answer within two polls."""

_SAME_SIGNAL_S = 0.5
"""Seconds in which signals count as one: a terminal and the launcher may both pass on one Ctrl-C."""


class StopStore(Protocol):
    """Methods of torch.distributed.Store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class StopAgreement:
    """Catch SIGINT and SIGTERM while entered. A second signal ends the process at once.

    Leave it only when every rank has finished its steps (after a barrier): until then others may ask.
    """

    def __init__(
        self,
        store: StopStore,
        rank: int,
        world_size: int,
        first_step: int = 0,
        poll_s: float = 0.2,
        exit_now: Callable[[int], Any] = os._exit,
    ) -> None:
        self.signal_number: int | None = None
        """Signal that ends the run, once the ranks have agreed; None until then."""
        self._store, self._rank, self._world_size = store, rank, world_size
        self._poll_s, self._exit_now = poll_s, exit_now
        self._changed = threading.Condition()
        self._running_step = first_step - 1
        self._frozen = False  # True: the loop may not start a step after _running_step, which is published
        self._last_step: int | None = None
        self._failure: Exception | None = None
        self._give_up_s: float | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="aorta-stop", daemon=True)
        self._closing = False
        self._first_signal_s: float | None = None
        self._handlers: dict[int, Any] = {}
        self._old_wakeup = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes the signal's number to the socket at once, even while the main
            # thread is blocked in a collective; Python handlers would run only after it.
            self._old_wakeup = signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake_write.send(b"\0")
        self._thread.join(timeout=10)
        if self._handlers:
            signal.set_wakeup_fd(self._old_wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        self._wake_read.close()
        self._wake_write.close()

    def may_start(self, step: int) -> bool:
        """False if the step before was the last one; call before each step, with numbers that rise by one.

        Waits only while ranks are agreeing, for about two polls.
        """
        with self._changed:
            if self._frozen and step > self._running_step:
                self._changed.wait_for(lambda: self._last_step is not None or self._failure is not None)
            if self._last_step is not None and step > self._last_step:
                return False
            if self._failure is not None and self._frozen:
                raise RuntimeError("the ranks could not agree on a last step") from self._failure
            self._running_step = step
            return True

    def request(self, signal_number: int) -> None:
        """Ask all ranks to stop, as a signal does."""
        self._store.set("stop/requested", str(signal_number))

    def _watch(self) -> None:
        try:
            while not self._closing and self._last_step is None:
                self._read_signals()
                if not self._frozen and self._store.check(["stop/requested"]):
                    self._freeze()
                if self._frozen:
                    self._decide()
            while not self._closing:  # agreed: only a second signal is left to see
                self._read_signals()
        except Exception as error:  # the store went away with the rank that holds it
            self._lose_store(error)

    def _lose_store(self, error: Exception) -> None:
        """Go on without agreement: a later signal ends the run at once, an earlier one after time to write
        records."""
        if not self._closing:
            log.warning("rank %d can no longer agree with the others on a stop: %s", self._rank, error)
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        while not self._closing:
            self._read_signals()
            if self._first_signal_s is not None and time.monotonic() - self._first_signal_s > _AGREE_S:
                self._exit_now(128 + signal.SIGTERM)

    def _read_signals(self) -> None:
        """Wait for a signal for up to one poll, a tenth of one while agreeing."""
        poll_s = self._poll_s / 10 if self._frozen and self._last_step is None else self._poll_s
        readable, _, _ = select.select([self._wake_read], [], [], poll_s)
        if not readable:
            return
        for number in set(self._wake_read.recv(64)) & {signal.SIGINT, signal.SIGTERM}:
            self._signalled(number)

    def _signalled(self, number: int) -> None:
        now_s = time.monotonic()
        if self._first_signal_s is None:
            self._first_signal_s = now_s
            _say(f"rank {self._rank}: {signal.Signals(number).name}, stopping soon; again to exit now")
            if self._failure is not None:
                self._exit_now(128 + number)
            self.request(number)
        elif now_s - self._first_signal_s > _SAME_SIGNAL_S:
            _say(f"rank {self._rank}: second {signal.Signals(number).name}, exiting now")
            self._exit_now(128 + number)

    def _freeze(self) -> None:
        # Under the lock, so that no step begins between freezing and reading which one runs.
        with self._changed:
            self._frozen = True
            self._give_up_s = time.monotonic() + _AGREE_S
            running_step = self._running_step
        self._store.set(f"stop/running/{self._rank}", str(running_step))

    def _decide(self) -> None:
        keys = [f"stop/running/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            self._give_up_on_missing(keys)
            return
        last_step = max(_numbers(self._store, keys))
        number = int(self._store.get("stop/requested"))
        with self._changed:
            self.signal_number = number
            self._last_step = last_step
            self._changed.notify_all()

    def _give_up_on_missing(self, keys: list[str]) -> None:
        assert self._give_up_s is not None
        if time.monotonic() < self._give_up_s:
            return
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        _say(f"rank {self._rank}: no answer from ranks {missing}, exiting without an agreed last step")
        self._exit_now(128 + int(self._store.get("stop/requested")))


def _numbers(store: StopStore, keys: Iterable[str]) -> list[int]:
    return [int(store.get(key)) for key in keys]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
