"""Clock anchors: the same instant on the clocks that records and traces use.

Records use Unix time, rocprofv3 CLOCK_BOOTTIME, Kineto on roctracer CLOCK_MONOTONIC. Sampling
the three together is all that is needed to put them on one axis later.
"""

import time


def clock_anchor() -> dict[str, int]:
    """unix_ns, monotonic_ns, boottime_ns of one instant, and the width of the reading in ns.

    The tightest of five tries: the reading is bracketed by two looks at the monotonic clock.
    """
    best: dict[str, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        unix = time.time_ns()
        boottime = _boottime_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best["width_ns"]:
            best = {
                "unix_ns": unix,
                "monotonic_ns": (before + after) // 2,
                "boottime_ns": boottime,
                "width_ns": after - before,
            }
    assert best is not None
    return best


def _boottime_ns() -> int:
    # Linux only; elsewhere the monotonic clock is the nearest thing.
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)


class DeviceClock:
    """Maps times of marks, in ms after the first anchor mark, to the host's monotonic clock.

    An event cannot pass before the host queued it: every mark bounds the offset from below. The
    opening anchor (taken while the device was idle) bounds it from above too. The error is half
    of that interval plus what the two clocks may have drifted apart since.
    """

    DRIFT_PPM = 10.0
    """Assumed bound between a GPU's and the host's oscillator where nothing tighter is known."""

    def __init__(self, lower_ns: int, upper_ns: int) -> None:
        self._offset_ns = (lower_ns + upper_ns) / 2
        self._half_width_ns = (upper_ns - lower_ns) / 2

    def tighten(self, queued_ns: int, device_ms: float) -> None:
        """A mark at device_ms was queued by the host at queued_ns."""
        lower = queued_ns - device_ms * 1e6
        if lower > self._offset_ns:
            self._offset_ns = lower

    def monotonic_ns(self, device_ms: float) -> float:
        return self._offset_ns + device_ms * 1e6

    def error_us(self, device_ms: float) -> float:
        return self._half_width_ns / 1e3 + device_ms * self.DRIFT_PPM / 1e3
