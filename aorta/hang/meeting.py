"""Ranks that tell each other, through a store, that they hang, pause, have reported or leave.

The store is the one that torch.distributed made for the run, or any object with the same four methods.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from aorta.processes import asking_thread

ANSWER_S = 2.0
"""Longest wait for an answer of the store: one whose machine is gone may not answer for minutes."""


class MeetingStore(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Meeting:
    """One rank's side of the meeting.

    Every question is asked in a thread of its own: the caller never waits longer than a limit.
    """

    def __init__(self, store: MeetingStore | None, world_size: int, rank: int = 0) -> None:
        self._store, self._world_size, self._rank = store, world_size, rank
        self._number = 0
        """Number of the hang that is reported next: a run may hang more than once."""
        self._asking: threading.Thread | None = None

    def connect(self) -> None:
        """Take a connection of its own: one connection answers one question at a time, and the main thread
        may hang in its own."""
        clone = getattr(self._store, "clone", None)
        if clone is not None:
            with suppress(RuntimeError, NotImplementedError):
                self._store = clone()

    def is_called(self) -> bool:
        """True where another rank reports a hang that this one has not reported."""
        key = self._key(self._number)
        return bool(self._ask(lambda store: store.check([key])))

    def count_pause(self, change: int, place: int = 0) -> None:
        """Tell the others that this rank begins an announced pause (1) or ends it (-1).

        place: how far it is in its run, in a measure that all ranks share.
        """

        def tell(store: MeetingStore) -> None:
            store.set(f"pausing/{self._rank}", str(place) if change > 0 else "")
            store.add("pausing", change)

        self._ask(tell)

    def waits_for_pause(self, place: int) -> bool:
        """True where a rank that is no further than this one is in a pause.

        A rank that is further waits for this one, in a checkpoint say: its pause explains no standstill here.
        """
        if self.num_pausing() == 0:
            return False

        def is_waited_for(store: MeetingStore) -> bool:
            for rank in range(self._world_size):
                key = f"pausing/{rank}"
                if rank != self._rank and store.check([key]):
                    text = store.get(key).decode()
                    if text and int(text) <= place:
                        return True
            return False

        return self._ask(is_waited_for) is not False

    def num_pausing(self) -> int:
        """Number of ranks in an announced pause; 0 where the store does not answer."""
        return self._ask(lambda store: store.add("pausing", 0)) or 0

    def count_in(self) -> int:
        """Count this rank as one that has reported: its place among them, 1 without an answer."""
        key = self._key(self._number)
        self._number += 1
        return self._ask(lambda store: store.add(key, 1)) or 1

    def wait_for_all(self, limit_s: float) -> int:
        """Number of ranks that have reported, once all have or limit_s is over."""
        return self._wait(self._key(self._number - 1), self._world_size, limit_s)

    def leave_together(self, num_ranks: int, limit_s: float) -> None:
        """Wait until num_ranks have nothing left to write, this one included, or until limit_s is over.

        A launcher ends the other ranks when the first one ends.
        """
        key = self._key(self._number - 1) + "/left"
        self._ask(lambda store: store.add(key, 1))
        self._wait(key, num_ranks, limit_s)

    def _wait(self, key: str, num_expected: int, limit_s: float) -> int:
        num = 1
        end_s = time.monotonic() + limit_s
        while self._store is not None and num < num_expected and (left_s := end_s - time.monotonic()) > 0:
            num = self._ask(lambda store: store.add(key, 0), left_s) or num
            if num < num_expected:
                time.sleep(min(0.5, 0.1 * max(1.0, self._world_size / 64)))  # all ranks may ask one store
        return num

    def _key(self, number: int) -> str:
        return f"hang/{number}"

    def _ask(self, question: Callable[[MeetingStore], Any], limit_s: float = ANSWER_S) -> Any:
        """Answer of the store; None where there is none in time, or an earlier question is still open."""
        store = self._store
        if store is None or (self._asking is not None and self._asking.is_alive()):
            return None
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question(store))
            except RuntimeError:  # the store went away with the rank that holds it
                self._store = None

        self._asking = asking_thread(ask, "aorta-hang-store")
        self._asking.join(min(limit_s, ANSWER_S))
        return answers[0] if answers else None
