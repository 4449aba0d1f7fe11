"""Times of collectives by the device's timer, on the axis of events.

Both count the same oscillator: they differ by an offset that stays. A call's end mark passes soon after its
last channel has ended and never before, so the greatest distance from marks to ends in a step is the offset,
less the microsecond or two that the mark takes. The median over steps is taken: one wrong time moves nothing.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

Span = tuple[int, int]
"""Start and end in ns of the device's timer."""

_NUM_STEPS = 64


class ExactCalls:
    def __init__(self) -> None:
        self._origin_ns: int | None = None
        """Differences from it are small enough for floats."""
        self._least_ms: deque[float] = deque(maxlen=_NUM_STEPS)
        """Of each step, what the offset from run ms to ms after the origin is at least."""

    def run_ms(
        self, spans: Sequence[Span | None], ends_run_ms: Sequence[float | None]
    ) -> list[tuple[float, float] | None]:
        """Start and end in run ms of the calls of a step. ends_run_ms: of their end marks."""
        found = [span for span in spans if span is not None]
        if not found:
            return [None] * len(spans)
        if self._origin_ns is None:
            self._origin_ns = found[0][0]
        origin_ns = self._origin_ns
        bounds = [
            (span[1] - origin_ns) / 1e6 - end_ms
            for span, end_ms in zip(spans, ends_run_ms, strict=True)
            if span is not None and end_ms is not None
        ]
        if bounds:
            self._least_ms.append(max(bounds))
        if not self._least_ms:
            return [None] * len(spans)
        offset_ms = median(self._least_ms)
        return [
            None
            if span is None
            else ((span[0] - origin_ns) / 1e6 - offset_ms, (span[1] - origin_ns) / 1e6 - offset_ms)
            for span in spans
        ]
