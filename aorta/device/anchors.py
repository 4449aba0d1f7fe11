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
