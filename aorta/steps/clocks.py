"""Two clocks of a device beside the host's monotonic clock.

DeviceClock: times of events, which torch gives in ms after the first one (event_steps). DeviceTimer: the
free-running counter that the collective library reads on the device (collective_steps).
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

DRIFT_PPM = 10.0
"""Assumed bound between a GPU's and the host's oscillator where nothing tighter is known."""

WINDOW_NS = 250_000_000
"""Length of the windows of device time, of each of which the smallest distance to the host is kept."""
NUM_WINDOWS = 40
_MIN_SPAN_NS = 1_000_000
"""Readings must span this much before the timer's unit is judged."""
_MIN_DRIFT_SPAN_NS = 1_000_000_000
"""Windows must span this much before a drift is believed."""
_UNITS_NS = (1, 10)
"""Ticks of the timers in use: nanoseconds (CUDA's globaltimer), 100 MHz (AMD's constant-rate counter)."""
_UNIT_TOLERANCE = 0.1


class DeviceClock:
    """Maps times of marks, in ms after the first mark, to the host's monotonic clock.

    An event cannot pass before the host queued it: every mark bounds the offset from below. The
    opening anchor (taken while the device was idle) bounds it from above too. The error is half
    of that interval plus what the two clocks may have drifted apart since.
    """

    def __init__(self, lower_ns: int, upper_ns: int) -> None:
        self._offset_ns = (lower_ns + upper_ns) / 2
        self._half_width_ns = (upper_ns - lower_ns) / 2

    def tighten(self, queued_ns: int, run_ms: float) -> None:
        """Use a mark that passed at run_ms and was queued at queued_ns: it cannot have passed before."""
        lower = queued_ns - run_ms * 1e6
        if lower > self._offset_ns:
            self._offset_ns = lower

    def monotonic_ns(self, run_ms: float) -> float:
        return self._offset_ns + run_ms * 1e6

    def run_ms(self, monotonic_ns: int) -> float:
        return (monotonic_ns - self._offset_ns) / 1e6

    def error_us(self, run_ms: float) -> float:
        return self._half_width_ns / 1e3 + run_ms * DRIFT_PPM / 1e3


class DeviceTimer:
    """Converts ticks of the timer to monotonic ns.

    Each reading is a value of the timer and the later time at which the host saw it, so the smallest
    distance between the two is the truest. The lower hull of the windows' smallest distances follows the
    drift of the clocks.
    """

    def __init__(self) -> None:
        self._origin: tuple[int, int] | None = None
        """(ticks, monotonic ns) of the first reading: differences from it are small enough for floats."""
        self._unit_ns: int | None = None
        self._early: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []
        """Readings from before the unit was known."""
        self._windows: deque[tuple[int, float, float]] = deque(maxlen=NUM_WINDOWS)
        """(window, device ns after the origin, least distance to the host in it)."""
        self._hull: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def unit_ns(self) -> int | None:
        """Length of a tick; None until readings span _MIN_SPAN_NS, and where it is none of _UNITS_NS."""
        return self._unit_ns

    def add(self, ticks: NDArray[np.uint64], seen_ns: NDArray[np.int64]) -> None:
        """Readings: values of the timer and when each was seen, in any order."""
        if len(ticks) == 0:
            return
        if self._origin is None:
            self._origin = (int(ticks[0]), int(seen_ns[0]))
        if self._unit_ns is None:
            self._early.append((ticks, seen_ns))
            self._find_unit()
            return
        self._keep(ticks, seen_ns)

    def _find_unit(self) -> None:
        ticks = np.concatenate([ticks for ticks, _ in self._early])
        seen_ns = np.concatenate([seen_ns for _, seen_ns in self._early])
        if int(seen_ns.max()) - int(seen_ns.min()) < _MIN_SPAN_NS:
            return
        # The middle of many rates: a reading of another launch, which comes now and then, spoils few of them.
        order = np.argsort(seen_ns, kind="stable")
        half = len(order) // 2
        early, late = order[: len(order) - half], order[half:]
        num_ticks = (ticks[late] - ticks[early]).astype(np.int64)  # wraps around where time runs backwards
        rates = (seen_ns[late] - seen_ns[early])[num_ticks > 0] / num_ticks[num_ticks > 0]
        rate = float(np.median(rates)) if len(rates) else 0.0
        for unit in _UNITS_NS:
            if abs(rate / unit - 1) < _UNIT_TOLERANCE:
                self._unit_ns = unit
                self._early.clear()
                self._keep(ticks, seen_ns)
                return
        del self._early[:-1]  # a rate that is none of these: look again at what comes

    def _keep(self, ticks: NDArray[np.uint64], seen_ns: NDArray[np.int64]) -> None:
        device_ns = self._device_ns(ticks)
        assert self._origin is not None
        lag_ns = (seen_ns - self._origin[1]).astype(np.float64) - device_ns
        order = np.argsort(device_ns, kind="stable")
        for row in order.tolist():
            window, time_ns, lag = int(device_ns[row] // WINDOW_NS), float(device_ns[row]), float(lag_ns[row])
            if not self._windows or window > self._windows[-1][0]:
                self._windows.append((window, time_ns, lag))
            elif window == self._windows[-1][0] and lag < self._windows[-1][2]:
                self._windows[-1] = (window, time_ns, lag)
        self._hull = None

    def _device_ns(self, ticks: NDArray[np.uint64]) -> NDArray[np.float64]:
        assert self._origin is not None
        assert self._unit_ns is not None
        elapsed = (ticks - np.uint64(self._origin[0])).astype(np.int64)  # wraps around below the origin
        return elapsed.astype(np.float64) * self._unit_ns

    def monotonic_ns(self, ticks: NDArray[np.uint64]) -> NDArray[np.int64] | None:
        """The host's time of values of the timer; None while its unit is not known."""
        if self._unit_ns is None or self._origin is None:
            return None
        if self._hull is None:
            self._hull = _lower_hull([(time_ns, lag) for _, time_ns, lag in self._windows])
        device_ns = self._device_ns(ticks)
        hull_ns, lag_ns = self._hull
        # Beyond the ends, where the newest steps are, the drift of all windows goes on.
        span_ns = hull_ns[-1] - hull_ns[0]
        drift = (lag_ns[-1] - lag_ns[0]) / span_ns if span_ns >= _MIN_DRIFT_SPAN_NS else 0.0
        host_ns = device_ns * (1 + drift) + np.interp(device_ns, hull_ns, lag_ns - drift * hull_ns)
        return np.round(host_ns).astype(np.int64) + np.int64(self._origin[1])


def _lower_hull(points: list[tuple[float, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The corners of the lower convex hull of points that are sorted by their first."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return np.array([x for x, _ in hull]), np.array([y for _, y in hull])
