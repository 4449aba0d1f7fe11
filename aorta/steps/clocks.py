"""The clock of a device beside the host's monotonic clock: times of events, in ms after the first one."""

DRIFT_PPM = 10.0
"""Assumed bound between a GPU's and the host's oscillator where nothing tighter is known."""


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
