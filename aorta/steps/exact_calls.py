"""Times of collectives by the device's timer, on the axis of events.

Both count the same oscillator: they differ by an offset that stays. A call's end mark passes soon after its
last channel has ended and never before, so the distances from marks to ends gather just below the offset.
Those above it are times of other launches, which NCCL mixes up at times; a call whose times lie outside of
its own marks keeps its marks.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

Span = tuple[int, int]
"""Start and end in ns of the device's timer."""
Marks = tuple[float, float] | None
"""Run ms at which a call's start and end marks passed."""

_NUM_CALLS = 2048
_GATHERED_MS = 0.02
_SHARE_GATHERED = 0.25
_OUTSIDE_MS = 0.02
"""By which a time may lie outside of its marks."""


class ExactCalls:
    def __init__(self) -> None:
        self._origin_ns: int | None = None
        """Differences from it are small enough for floats."""
        self._distances_ms: deque[float] = deque(maxlen=_NUM_CALLS)
        """From the end marks of the last calls to their ends, less the origin."""

    def run_ms(
        self, spans: Sequence[Span | None], marks: Sequence[Marks]
    ) -> list[tuple[float, float] | None]:
        """Start and end in run ms of the calls of a step; None where they are not known for certain."""
        pairs = [
            (span, around)
            for span, around in zip(spans, marks, strict=True)
            if span is not None and around is not None
        ]
        if pairs and self._origin_ns is None:
            self._origin_ns = pairs[0][0][0]
        origin_ns = self._origin_ns or 0
        self._distances_ms.extend((span[1] - origin_ns) / 1e6 - around[1] for span, around in pairs)
        offset_ms = self._offset_ms()
        if offset_ms is None:
            return [None] * len(spans)
        result: list[tuple[float, float] | None] = []
        for span, around in zip(spans, marks, strict=True):
            times = None
            if span is not None and around is not None:
                start, end = ((time_ns - origin_ns) / 1e6 - offset_ms for time_ns in span)
                if around[0] - _OUTSIDE_MS <= start <= end <= around[1] + _OUTSIDE_MS:
                    times = (start, end)
            result.append(times)
        return result

    def _offset_ms(self) -> float | None:
        """The greatest distance at the top of a quarter of all; None where they gather nowhere."""
        distances = np.sort(np.array(self._distances_ms))
        num_within = np.arange(1, len(distances) + 1) - np.searchsorted(distances, distances - _GATHERED_MS)
        gathered = np.flatnonzero(num_within >= max(1.0, _SHARE_GATHERED * len(distances)))
        return float(distances[gathered[-1]]) if len(gathered) else None
