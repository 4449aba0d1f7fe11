"""Waits of threads that sample, after which they have the interpreter's lock at once.

Who runs Python lets go of the lock for a waiting thread after 5 ms, or before in a call of torch or of the
system. A thread that has woken up to sample would get it there: it would see that call, and never the lines
before it. So for the last moment before a sample waiting threads ask for the lock sooner. How soon is one
value of the interpreter. The program's own comes back, also where the program has set another since, or has
read ours and sets that later.

A call written in C that holds the lock for longer, such as torch.tensor() of arrays, is where the thread
still is when such a thread gets it: another wait would see what comes after that call, and never the call.
"""

import operator
import os
import sys
from functools import partial
from random import Random
from typing import Any, Protocol

LEAST_S, MORE_S = 0.001, 0.011
"""Length of the moment, and what chance adds. At its start the thread that is sampled has just let go of the
lock: the end must be anywhere in what that one does over and over."""
_OURS_US = 21
"""No value that a program sets: in place of its own it is ours."""
_OURS_S = 1e-6 * _OURS_US  # as getswitchinterval works it out; set, it is the same number again
_HALF_S = 0.5e-6
"""setswitchinterval cuts off to whole microseconds: of 1001, read as 1001 * 1e-6, it makes 1000."""
_call: Any = operator.call
_hands_on = partial(sys.setswitchinterval, _OURS_S)
_before: list[Any] = []
_programs: dict[float, float] = {}
"""What to set where ours is found."""
_has_lock = getattr(sys, "_is_gil_enabled", lambda: True)
"""Whether this Python has one."""


class Stopping(Protocol):
    """A lock, which is let go of where sampling shall end."""

    def acquire(self, *, timeout: float) -> bool: ...


def held_ns() -> int:
    """By which a thread that woke up has the lock late where another was in one call of C all the time."""
    return int(1e9 * (sys.getswitchinterval() + LEAST_S / 2))


def waits_soon(stopping: Stopping, random: Random) -> bool:
    """Wait for a moment, or until sampling shall end, and say whether it shall. Its caller has the lock."""
    if sys.getswitchinterval() < _OURS_S or not _has_lock():
        return False
    # Both calls, as those below, are made in C: no other thread gets the lock in between, and sets a value.
    _before[:] = map(_call, (sys.getswitchinterval, _hands_on))
    if _before[0] != _OURS_S:
        _programs[_OURS_S] = _before[0] + _HALF_S
    try:
        return stopping.acquire(timeout=LEAST_S + random.random() * MORE_S)
    finally:
        _put_back()


def _put_back() -> None:
    """Set the program's own interval where ours is found."""
    found = map(_call, (sys.getswitchinterval,))
    list(map(sys.setswitchinterval, filter(None, map(_programs.get, found))))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_put_back)  # the thread that would is not there
