"""In which phase of the program a collective was launched, by what the host did then."""

from bisect import bisect_right
from collections.abc import Sequence

from aorta.recording.calls import CollectiveCall, RecordedStep
from aorta.records.schema import Phase

PHASES: dict[str, Phase] = {"data": "data", "backward": "backward", "optimizer": "optimizer"}


class Phases:
    """The phases of one step. Costs a search per call, off the training's path."""

    _spans: Sequence[tuple[int, int, Phase]] = ()
    _starts: Sequence[int] = ()
    _last_backward_ns: int | None = None

    def __init__(self, step: RecordedStep) -> None:
        if not step.host_notes:
            return
        spans = sorted(
            (note.start_ns, note.end_ns, PHASES[note.kind]) for note in step.host_notes if note.kind in PHASES
        )
        self._spans = spans
        self._starts = [start for start, _, _ in spans]
        self._last_backward_ns = max((end for _, end, phase in spans if phase == "backward"), default=None)

    def of_call(self, call: CollectiveCall) -> Phase | None:
        """None where the program was seen to run no backward pass, so that nothing tells the phases apart."""
        at_ns = issued_ns(call)
        if self._last_backward_ns is None or not at_ns:
            return None
        place = bisect_right(self._starts, at_ns) - 1
        if place >= 0 and at_ns <= self._spans[place][1]:
            return self._spans[place][2]
        return "forward" if at_ns < self._last_backward_ns else "optimizer"


def issued_ns(call: CollectiveCall) -> int:
    """Monotonic host time at which the call was launched, or nearly; 0 where unknown."""
    return call.launched_ns or call.issued_ns or (call.start.host_ns if call.start is not None else 0)
