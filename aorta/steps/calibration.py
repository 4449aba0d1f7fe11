"""Learns the bias of event numbers from steps whose kernels were traced, and corrects other steps.

`calibrate` makes a Calibration of traced steps (aorta.calibration collects them); a `Calibrator` applies it.

Events are blind in two ways. A collective's start mark fires before its kernel runs: the kernel crosses
streams, waits for room on the device, or was launched late. And between two marks of the compute stream
the time is not all kernels: there are gaps, and where the host is late the stream runs dry.

A training step is the same program every time, so both are learned piece by piece from the kernels of some
steps and applied to others:

- every call gets the mean distance from its record to its kernel, by its place in the step and by what it
  began after (its stream, its launch, the group's previous call), since these differ in kind;
- every stretch of the compute stream between two marks gets its kernels' length: where work was queued, that
  of stretches as long as it (on one rank the stream is full, on its peer it runs dry somewhere within); where
  the stream ran dry, as milliseconds (the same kernels, however late the host);
- every such stretch gets the share of communication that kernels hide there, again by what the collective
  began after: one that starts at its launch starts beside an empty queue.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import CollectiveRecord, SegmentState, StartBy, StepRecord
from aorta.timeline.intervals import EMPTY, Intervals, clip, intersect, length_ms, union
from aorta.timeline.types import Calibrated, Kind, Timeline

_KNOWN_SHARE = 0.8
"""A step is corrected if the window has seen this much of its compute stream in the same state, and calls
that began as this much of its communication did."""
_GROUP_SIZE, _MOST_GROUPS = 3, 8
"""Segments of like length, of which only the median counts, so that an odd one does not; groups at most."""
_ENOUGH_MS = 0.05
"""A share learned from less communication is noise: the next coarser share is used."""


class CallShift(msgspec.Struct, frozen=True, array_like=True):
    """Kernel minus record, mean over the window's calls of this kind."""

    place: int | None
    """Index in the step's list of collectives; None: any."""
    op: str | None
    bytes: int | None
    """None for op and bytes: any."""
    start_by: StartBy
    start_ms: float
    end_ms: float


class SegmentCompute(msgspec.Struct, frozen=True, array_like=True):
    """Time of kernels within one segment of the compute stream."""

    place: int | None
    """Index of the segment in the step; None: any."""
    state: SegmentState
    busy_ms: float
    """Mean over the traced steps."""
    share: float
    """Median share of the segment's length."""
    by_length: list[tuple[float, float]] = []
    """(length, kernels) in ms, medians of groups of segments of like length, the shortest first."""

    def kernels_ms(self, length_ms: float) -> float:
        """Kernel time in a segment of this length, interpolated between lengths that were seen.

        Beyond the shortest and the longest of them: the same share of the length as there.
        """
        if not self.by_length:
            return length_ms * self.share
        (shortest, least), (longest, longest_busy) = self.by_length[0], self.by_length[-1]
        if length_ms <= shortest:
            return length_ms * least / shortest
        if length_ms >= longest:
            return length_ms * longest_busy / longest
        lengths_ms, kernels_ms = np.array(self.by_length).T
        return float(np.interp(length_ms, lengths_ms, kernels_ms))


class HiddenShare(msgspec.Struct, frozen=True, array_like=True):
    """Share of the communication in a segment that ran beside kernels of the compute stream."""

    place: int | None
    state: SegmentState
    start_by: StartBy
    share: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Corrections learned from traced steps. Never judge them on those steps."""

    steps: list[int]
    num_calls: int
    num_segments: int
    """Numbers in most traced steps. In a step with other numbers places mean nothing: only kinds count."""
    calls: list[CallShift]
    segments: list[SegmentCompute]
    hidden: list[HiddenShare]

    def start_shift_ms(self) -> float | None:
        """Mean over all calls of how much later kernels began than their uncorrected records say."""
        shifts = [call.start_ms for call in self.calls if call.place is not None]
        return float(np.mean(shifts)) if shifts else None


class CallError(NamedTuple):
    """Times of a call's kernel minus those of its record; place: in the step's list of collectives."""

    place: int
    start_ms: float
    end_ms: float


class TracedStep(NamedTuple):
    """A step's record with its details, and its kernels in the window of the record."""

    record: StepRecord
    kernels: Timeline
    calls: list[CallError]


class _Parts(NamedTuple):
    """A record's details as arrays."""

    edges_ms: NDArray[np.float64]
    """Ends of the compute stream's segments, after 0."""
    lengths_ms: NDArray[np.float64]
    states: list[SegmentState]
    calls: list[tuple[int, CollectiveRecord]]
    """(place in the step's list, call) of the calls that have kernels."""
    times: list[tuple[float, float]]


_Traced = list[tuple[TracedStep, _Parts]]


def calibrate(steps: Iterable[TracedStep], rank: int | None = None) -> Calibration | None:
    """Learn from steps whose kernels were traced; None where none of them can be used.

    Steps of all ranks that run the same program may be put together: where the host is the bottleneck of
    one rank, the others wait for it, and only together do the ranks show both kinds of step. rank: whose
    records are to be corrected; the delays of its own calls count first.
    """
    traced = [(step, parts) for step in steps if (parts := _parts(step.record)) is not None]
    if not traced:
        return None
    num_calls = _most_common(len(parts.calls) for _, parts in traced)
    num_segments = _most_common(len(parts.states) for _, parts in traced)
    learned = Calibration(
        steps=sorted({step.record.global_step for step, _ in traced}),
        num_calls=num_calls,
        num_segments=num_segments,
        calls=_shifts_of(rank, traced, num_calls),
        segments=[],
        hidden=[],
    )
    learned = msgspec.structs.replace(learned, segments=_learn_compute(traced, num_segments))
    return msgspec.structs.replace(learned, hidden=_learn_hidden(traced, Calibrator(learned), num_segments))


def _shifts_of(rank: int | None, traced: _Traced, num_calls: int) -> list[CallShift]:
    rank_steps = [row for row in traced if row[0].record.rank == rank]
    shifts = [*_learn_shifts(traced, num_calls), *_learn_shifts(rank_steps, num_calls)]
    return list({(s.place, s.op, s.bytes, s.start_by): s for s in shifts}.values())


def _learn_shifts(traced: _Traced, num_calls: int) -> list[CallShift]:
    shifts: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for step, parts in traced:
        assert step.record.collectives is not None
        for error in step.calls:
            call = step.record.collectives[error.place]
            start_by = call.start_by or "stream"
            row = (error.start_ms, error.end_ms)
            if len(parts.calls) == num_calls:
                shifts[error.place, call.op, call.bytes, start_by].append(row)
            shifts[None, call.op, call.bytes, start_by].append(row)
            shifts[None, None, None, start_by].append(row)
    return [CallShift(*key, *_trimmed_mean(rows)) for key, rows in shifts.items()]  # type: ignore[call-arg]


def _learn_compute(traced: _Traced, num_segments: int) -> list[SegmentCompute]:
    busy: dict[tuple[int | None, SegmentState], list[float]] = defaultdict(list)
    lengths: dict[tuple[int | None, SegmentState], list[float]] = defaultdict(list)
    sums: dict[SegmentState, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step, parts in traced:
        kernel_ms = _length_within(_compute_stream(step.kernels), parts)
        for index, state in enumerate(parts.states):
            length = float(parts.lengths_ms[index])
            if state == "stalled" or length <= 0:
                continue
            sums[state][0] += float(kernel_ms[index])
            sums[state][1] += length
            if len(parts.states) == num_segments:
                busy[index, state].append(float(kernel_ms[index]))
                lengths[index, state].append(length)
    placed = [_segment_compute(key, np.array(lengths[key]), np.array(busy[key])) for key in busy]
    return placed + [SegmentCompute(None, state, ms, ms / length) for state, (ms, length) in sums.items()]


def _segment_compute(
    key: tuple[int | None, SegmentState], lengths_ms: NDArray[np.float64], kernels_ms: NDArray[np.float64]
) -> SegmentCompute:
    num_groups = max(1, min(_MOST_GROUPS, len(lengths_ms) // _GROUP_SIZE))
    groups = np.array_split(np.argsort(lengths_ms, kind="stable"), num_groups)
    return SegmentCompute(
        *key,
        busy_ms=float(np.mean(kernels_ms)),
        share=float(np.median(kernels_ms / lengths_ms)),
        by_length=[(float(np.median(lengths_ms[g])), float(np.median(kernels_ms[g]))) for g in groups],
    )


def _learn_hidden(traced: _Traced, calibrator: "Calibrator", num_segments: int) -> list[HiddenShare]:
    sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step, parts in traced:
        calls = calibrator.corrected(parts)
        kernels = _compute_stream(step.kernels)
        overlap_ms = _overlap_ms(parts, calls)
        for place, (_, call) in enumerate(parts.calls):
            hidden_ms = _length_within(intersect(calls[place : place + 1], kernels), parts)
            start_by = call.start_by or "stream"
            for index in np.flatnonzero(overlap_ms[:, place] > 0):
                state = parts.states[index]
                keys: list[tuple[Any, ...]] = [(None, state, start_by)]
                if len(parts.states) == num_segments:
                    keys.append((int(index), state, start_by))
                for key in keys:
                    sums[key][0] += float(hidden_ms[index])
                    sums[key][1] += float(overlap_ms[index, place])
    return [
        HiddenShare(*key, hidden / total)  # type: ignore[call-arg]
        for key, (hidden, total) in sums.items()
        if total > _ENOUGH_MS and key[1] != "stalled"
    ]


class Calibrator:
    """Applies a calibration to the records of other steps."""

    def __init__(self, calibration: Calibration) -> None:
        self._num_calls = calibration.num_calls
        self._num_segments = calibration.num_segments
        self._shifts = {(c.place, c.op, c.bytes, c.start_by): c for c in calibration.calls}
        self._compute = {(s.place, s.state): s for s in calibration.segments}
        self._hidden = {(h.place, h.state, h.start_by): h.share for h in calibration.hidden}

    def apply(self, record: StepRecord, carried: Intervals = EMPTY) -> Calibrated | None:
        """The step's numbers after correction.

        record: with its details. carried: communication of earlier steps that reaches into this one, in ms
        of this step. None where the step has no details, has calls without times, or is in a state that
        the window did not show.
        """
        parts = _parts(record)
        if parts is None or record.overlap.comm_ms is None or record.step_ms is None:
            return None
        busy_ms = self._busy_ms(parts, bool(record.overlap.host_bound))
        if busy_ms is None or not self._knows_calls(parts):
            return None
        calls = self.corrected(parts)
        window = (0.0, record.step_ms)
        comm = clip(union(np.concatenate([calls, carried])), *window)
        hidden_ms = float(self._hidden_ms(parts, calls, comm, busy_ms).sum())
        comm_ms, compute_ms = length_ms(comm), float(busy_ms.sum())
        exposed_ms = comm_ms - hidden_ms
        return Calibrated(
            compute_ms=compute_ms,
            comm_ms=comm_ms,
            hidden_ms=hidden_ms,
            exposed_ms=exposed_ms,
            idle_ms=max(0.0, record.step_ms - compute_ms - exposed_ms),
        )

    def corrected(self, parts: "_Parts") -> Intervals:
        """Starts and ends of the calls, shifted to where their kernels ran."""
        by_place = len(parts.calls) == self._num_calls
        rows = []
        for place, (index, call) in enumerate(parts.calls):
            start_ms, end_ms = parts.times[place]
            shift = self._shift(index if by_place else None, call)
            if shift is not None:
                start_ms, end_ms = start_ms + shift.start_ms, end_ms + shift.end_ms
            rows.append((min(start_ms, end_ms), end_ms))
        return np.array(rows, dtype=np.float64).reshape(-1, 2)

    def _knows_calls(self, parts: "_Parts") -> bool:
        known_ms = total_ms = 0.0
        for (_, call), (start_ms, end_ms) in zip(parts.calls, parts.times, strict=True):
            total_ms += end_ms - start_ms
            if (None, None, None, call.start_by or "stream") in self._shifts:
                known_ms += end_ms - start_ms
        return known_ms >= _KNOWN_SHARE * total_ms

    def _shift(self, index: int | None, call: CollectiveRecord) -> CallShift | None:
        start_by = call.start_by or "stream"
        return (
            self._shifts.get((index, call.op, call.bytes, start_by))
            or self._shifts.get((None, call.op, call.bytes, start_by))
            or self._shifts.get((None, None, None, start_by))
        )

    def _busy_ms(self, parts: "_Parts", host_bound: bool) -> NDArray[np.float64] | None:
        """Kernel ms of every segment; None where too little of the stream is known in its state."""
        by_place = len(parts.states) == self._num_segments
        busy_ms = np.zeros(len(parts.states))
        unknown_ms = 0.0
        for index, (state, length) in enumerate(zip(parts.states, parts.lengths_ms, strict=True)):
            if state == "stalled" or length <= 0:
                continue
            place = index if by_place else None
            same_state = self._compute.get((place, state))
            other_state = self._compute.get((place, "starved" if state == "queued" else "queued"))
            general = self._compute.get((None, state))
            if same_state is not None:
                kernel_ms = (
                    min(length, same_state.busy_ms) if state == "starved" else same_state.kernels_ms(length)
                )
                if host_bound:
                    # Work at a segment's end does not mean that the stream never ran dry within it.
                    kernel_ms = min(kernel_ms, same_state.busy_ms)
            elif other_state is not None and place is not None:
                kernel_ms = min(length, other_state.busy_ms)  # the same kernels, in the other state
            elif general is not None:
                kernel_ms = length * general.share
            else:
                kernel_ms, unknown_ms = length, unknown_ms + length
            busy_ms[index] = kernel_ms
        running_ms = float(parts.lengths_ms[[state != "stalled" for state in parts.states]].sum())
        return None if unknown_ms > (1.0 - _KNOWN_SHARE) * running_ms else busy_ms

    def _hidden_ms(
        self, parts: "_Parts", calls: Intervals, comm: Intervals, busy_ms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Hidden communication of every segment: its communication times the share that kernels hide."""
        overlap_ms = _overlap_ms(parts, calls)
        comm_ms = _length_within(comm, parts)
        by_place = len(parts.states) == self._num_segments
        hidden = np.zeros(len(parts.states))
        for index in np.flatnonzero(comm_ms > 0):
            state = parts.states[index]
            if state == "stalled":
                continue
            density = busy_ms[index] / parts.lengths_ms[index]
            total = shared = 0.0
            for place in np.flatnonzero(overlap_ms[index] > 0):
                start_by = parts.calls[place][1].start_by or "stream"
                share = self._hidden.get((int(index) if by_place else None, state, start_by))
                if share is None:
                    share = self._hidden.get((None, state, start_by), density)
                total += overlap_ms[index, place]
                shared += overlap_ms[index, place] * share
            share = shared / total if total > 0 else density
            hidden[index] = min(comm_ms[index] * share, busy_ms[index])
        return hidden


def _parts(record: StepRecord) -> _Parts | None:
    """None where the record was written without its details."""
    if record.compute_segments is None or record.collectives is None:
        return None
    calls: list[tuple[int, CollectiveRecord]] = []
    times: list[tuple[float, float]] = []
    for index, call in enumerate(record.collectives):
        if len(call.ranks) > 1 and call.start_ms is not None and call.end_ms is not None:
            calls.append((index, call))
            times.append((call.start_ms, call.end_ms))
    edges = np.array([0.0, *(segment.end_ms for segment in record.compute_segments)])
    states = [segment.state for segment in record.compute_segments]
    return _Parts(edges, np.maximum(np.diff(edges), 0.0), states, calls, times)


def _compute_stream(kernels: Timeline) -> Intervals:
    """Intervals of the compute streams' kernels without communication, in ms of the window."""
    on_stream = np.isin(kernels.stream, list(kernels.compute_streams))
    return union(kernels.intervals(on_stream & (kernels.kind == Kind.COMPUTE))) - kernels.window_ms[0]


def _overlap_ms(parts: _Parts, calls: Intervals) -> NDArray[np.float64]:
    """(segments, calls): ms that each pair has in common."""
    if not len(calls):
        return np.zeros((len(parts.states), 0))
    starts = np.maximum(parts.edges_ms[:-1, None], calls[None, :, 0])
    ends = np.minimum(parts.edges_ms[1:, None], calls[None, :, 1])
    common: NDArray[np.float64] = np.maximum(ends - starts, 0.0)
    return common


def _length_within(spans: Intervals, parts: _Parts) -> NDArray[np.float64]:
    """ms of disjoint, sorted spans in every segment."""
    if not len(spans):
        return np.zeros(len(parts.states))
    edges_ms = spans.reshape(-1)
    passed = np.repeat(np.concatenate([[0.0], np.cumsum(spans[:, 1] - spans[:, 0])]), 2)[1:-1]
    lengths_ms: NDArray[np.float64] = np.maximum(np.diff(np.interp(parts.edges_ms, edges_ms, passed)), 0.0)
    return lengths_ms


def _trimmed_mean(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Means without the outer tenth of either side: a kernel matched wrongly must not count."""
    values = np.sort(np.array(rows), axis=0)
    cut = len(values) // 10
    start_ms, end_ms = values[cut : len(values) - cut].mean(axis=0).tolist()
    return start_ms, end_ms


def _most_common(counts: Iterable[int]) -> int:
    return Counter(counts).most_common(1)[0][0]
