"""Marks: points in time on a device's stream or on the host's clock, and the distances between them.

A MarkClock sets and measures them: HostClock here, EventClock (event_clock.py) on a device.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from aorta.steps.notes import Mark


class NotPassedError(Exception):
    """The device has not reached a mark whose time was asked for."""


class MarkClock(Protocol):
    """Sets marks on the current stream and measures their distance once they have passed."""

    is_device: bool

    def mark(self, stream: object = None) -> Mark:
        """Queue a mark on `stream`, by default the caller's current one. Never blocks."""
        ...

    def passed(self, mark: Mark) -> bool:
        """Return True once the device has reached the mark. Never blocks."""
        ...

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        """Milliseconds from start to each mark, None for marks that this clock did not set.

        Raises NotPassedError where one of them has not passed. Never blocks.
        """
        ...

    def recycle(self, marks: Sequence[Mark]) -> None:
        """Take marks back for reuse. The caller must not use them again."""
        ...


class HostClock:
    """Marks on the host's monotonic clock: they pass when they are set."""

    is_device = False

    def mark(self, stream: object = None) -> Mark:
        return Mark(time.monotonic_ns())

    def passed(self, mark: Mark) -> bool:
        return True

    def distances_ms(self, start: Mark, marks: Sequence[Mark]) -> list[float | None]:
        origin_ns = start.host_ns
        return [(mark.host_ns - origin_ns) / 1e6 for mark in marks]

    def recycle(self, marks: Sequence[Mark]) -> None:
        return None


def clock_anchor() -> dict[str, int]:
    """unix_ns, monotonic_ns, boottime_ns of one instant, and the width of the reading in ns.

    The tightest of five tries: the reading is bracketed by two looks at the monotonic clock.
    """
    best: dict[str, int] | None = None
    for _ in range(5):
        start_ns = time.monotonic_ns()
        unix = time.time_ns()
        boottime = _boottime_ns()
        end_ns = time.monotonic_ns()
        if best is None or end_ns - start_ns < best["width_ns"]:
            best = {
                "unix_ns": unix,
                "monotonic_ns": (start_ns + end_ns) // 2,
                "boottime_ns": boottime,
                "width_ns": end_ns - start_ns,
            }
    assert best is not None
    return best


def _boottime_ns() -> int:
    # Linux only; elsewhere the monotonic clock is the nearest thing.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)
