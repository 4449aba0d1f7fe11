"""Step records from the driver's records of kernels, copies and sets.

`KernelSteps` takes records in chunks and steps in order. The records of a step's marks give its window;
what ran in it gives the step's times. `match_calls` finds the kernel that carried out each collective.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import (
    CollectiveRecord,
    KernelCoverage,
    KernelSpan,
    KernelSums,
    StepRecord,
)
from aorta.steps.notes import RECORD_DTYPE, CollectiveCall, KernelChunk, RecordedStep, ResolverSettings, What
from aorta.steps.record import (
    NO_DETAILS,
    NO_OVERLAP,
    collective_record,
    host_spans,
    module_places,
    noted_fields,
    scalar_reasons,
)
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.intervals import EMPTY, Intervals, length_within, run_lengths_ns
from aorta.timeline.overlap import DIGITS, active_segments, exposed_intervals, overlap, rounded, stream_uses
from aorta.timeline.types import Kind, Timeline
from aorta.traces.classify import COMM_RULES, COMMUNICATION, COPY, classifier, kernel_class

SPANS_EVERY = 20
"""Lists of segments and of kernels, some 50 kB a step, are kept in one step of this many: in one at least of
those that are recorded whatever that costs, behind the warm-up."""
NUM_TOP = 64
"""Kernels by name in a line with details: those with most time. Most programs have fewer names in all."""
CLOCK_ERROR_US = 10.0
"""How far the driver's records were seen outside of a host's bracket (docs/evidence.md)."""
_MOST_ROWS = 4_000_000
"""Records kept while no step asks for them."""
_SHOWN = 5
"""Leftovers that are named; all are counted."""

UNLIKE_COUNT = "not seen one by one, and their number is not that of the steps in which they were"
UNLIKE_KERNELS = "not seen one by one, and their kernels are not those of the steps in which they were"

_KERNEL_OF_OP = {
    "barrier": "all_reduce",
    "all_to_all": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "gather": "send_recv",
    "scatter": "send_recv",
}
"""NCCL runs a barrier as an all-reduce of one element, and these exchanges as sends and receives."""

_HOST = {1: "pageable", 2: "pinned"}
"""CUpti_ActivityMemoryKind of the host."""
_WITHIN = 8
"""CUpti_ActivityMemcpyKind of a copy within a device; 1 is one to it, 2 one from it."""

_ANY = "coalesced"
"""Operation of a coalesced group of unlike calls: its kernel may have any name."""

Rows = NDArray[np.void]


class LaunchedKernel(NamedTuple):
    """One communication kernel of a step."""

    op: str
    row: int
    """The caller's number for it."""


class MatchedCalls(NamedTuple):
    kernels_of_call: list[list[int]]
    """Rows of every call's kernels: empty where it has none or they are not known."""
    lone_calls: list[int]
    """Calls that must have had a kernel, and have none."""
    lone_kernels: list[int]
    """Rows of kernels that belong to no call."""


class _Window:
    """A step's window by the records of its marks."""

    __slots__ = ("body_end_ns", "device", "end_ns", "first_call", "num_calls", "start_ns", "stream")

    def __init__(self, start: np.void, body_end: np.void, end: np.void) -> None:
        self.start_ns, self.body_end_ns, self.end_ns = (int(mark["start"]) for mark in (start, body_end, end))
        self.device = int(start["device"])
        self.stream = int(start["stream"])
        self.first_call = start["correlation"]
        self.num_calls = (int(end["correlation"]) - int(start["correlation"])) % 2**32
        """Calls of the driver between the marks; their numbers wrap around."""


class KernelSteps:
    """Joins the steps of a rank with its kernel records."""

    def __init__(self, settings: ResolverSettings, names: Sequence[str] = ()) -> None:
        """names: names that lines of earlier attempts refer to."""
        self._settings = settings
        self._names = list(names)
        """Lines refer to kernels by index into these."""
        self._line_index_of_name = {name: index for index, name in enumerate(names)}
        self._line_index: list[int] = []
        """Index into `_names` by the driver's own index of a name."""
        self._classes: list[str] = []
        """Classes of kernels by the driver's index."""
        self._comm_ops: list[str | None] = []
        """Collectives that kernels carry out, by the driver's index; None: not communication."""
        self._rows: Rows = np.empty(0, RECORD_DTYPE)
        self._new: list[Rows] = []
        self._complete_ns = 0
        """Everything launched before this monotonic time has come."""
        self._settled = 0
        """All records in buffers with lower numbers have come."""
        self._lost: deque[tuple[int, int]] = deque(maxlen=64)
        self._num_lost = self._num_dropped = self._num_no_time = 0
        self._resolved_ns = 0
        """End of the window that was resolved last."""
        self._coverage: Counter[str] = Counter()
        self.num_refuted = 0
        """Steps whose kernels are not those of their collectives in this order: unseen steps which were taken
        to have others, and seen ones, which the kernels of an unseen step like them could not confirm."""
        self._leftovers: list[str] = []

    @property
    def names(self) -> Sequence[str]:
        return self._names

    def coverage(self) -> KernelCoverage:
        """Numbers of what was matched so far, and what was left over."""
        return KernelCoverage(
            num_steps=self._coverage["steps"],
            num_matched=self._coverage["matched"],
            num_calls_without_kernel=self._coverage["lone_calls"],
            num_kernels_without_call=self._coverage["lone_kernels"],
            num_graph_kernels_of_communication=self._coverage["graph_comm"],
            num_late=self._coverage["late"],
            num_lost=self._num_lost,
            num_dropped=self._num_dropped,
            num_no_time=self._num_no_time,
            num_unseen=self._coverage["unseen"],
            num_refuted=self._coverage["unknown"],
            leftovers=self._leftovers,
        )

    def add(self, chunk: KernelChunk) -> None:
        """Take records; they may come in any order."""
        rows = np.frombuffer(chunk.records, RECORD_DTYPE)
        for name in chunk.names:
            index = self._line_index_of_name.setdefault(name, len(self._names))
            if index == len(self._names):
                self._names.append(name)
            self._line_index.append(index)
            op = classifier(COMM_RULES).comm_op(name)
            self._comm_ops.append(op)
            self._classes.append(kernel_class(name) if op is None else COMMUNICATION)
        if len(rows):
            self._new.append(rows)  # joined when a step asks: chunks come more often than steps
            self._coverage["late"] += int(
                np.count_nonzero((rows["what"] != What.MARK) & (rows["start"] < self._resolved_ns))
            )
        self._settled = max(self._settled, chunk.settled)
        self._complete_ns = max(self._complete_ns, chunk.complete_ns)
        if chunk.num_lost > self._num_lost:
            self._lost.append(chunk.lost_ns)
        self._num_lost, self._num_dropped = chunk.num_lost, chunk.num_dropped
        self._num_no_time = chunk.num_no_time

    def is_complete(self, step: RecordedStep, later: Sequence[RecordedStep]) -> bool:
        """Return True when all that ran in the step's window has come.

        later: the step and some that follow it. Records come in buffers; when the buffer with a later step's
        mark is settled, everything launched before that mark has come.
        """
        if step.kernels_lost is not None:
            return True
        rows = self._gathered()
        ends = rows[(rows["what"] == What.MARK) & (rows["name"] == step.kernel_marks[2])]
        if len(ends) == 0:
            # The device has passed the mark: once all that was launched before has come, it never will.
            return self._complete_ns >= step.window_end_ns and self._complete_ns > 0
        end_ns = int(ends[0]["start"])
        if self._complete_ns >= end_ns:
            return True
        return self._launched_when_settled(rows, later) >= end_ns

    def _launched_when_settled(self, rows: Rows, later: Sequence[RecordedStep]) -> int:
        """Host time before which everything that was launched has come, by the marks of later steps."""
        marks = rows[(rows["what"] == What.MARK) & (rows["buffer"] < self._settled)]
        settled = set(marks["name"].tolist())
        best = 0
        for step in later:
            launches_ns = step.start_ns, step.body_end_ns, step.window_end_ns
            for number, host_ns in zip(step.kernel_marks, launches_ns, strict=True):
                if number in settled:
                    best = max(best, host_ns)
        return best

    def resolve(self, step: RecordedStep) -> StepRecord:
        """The step's record; where kernel records are missing it says why. Steps must come in order."""
        rows = self._gathered()
        window = _window_of(step, rows)
        reason = self._why_not(step, window)
        if reason is not None:
            self._forget(step.start_ns)
            return without_kernels(step, self._settings, reason)
        assert window is not None  # else that would have been the reason
        record = self._record(step, rows, window)
        self._resolved_ns = window.end_ns
        # Up to the start and no further: kernels that reach into the next window belong to that one too.
        self._forget(window.start_ns)
        return record

    def _gathered(self) -> Rows:
        if self._new:
            self._rows = np.concatenate([self._rows, *self._new])
            self._new.clear()
            if len(self._rows) > _MOST_ROWS:  # nobody asks for so many: do not grow for ever
                self._rows = self._rows[-_MOST_ROWS:]
        return self._rows

    def _forget(self, before_ns: int) -> None:
        """Drop what ended before the step that was resolved last began."""
        rows = self._rows
        self._rows = rows[rows["end"] >= before_ns]

    def _why_not(self, step: RecordedStep, window: _Window | None) -> str | None:
        """Why the step's records cannot be used; None where they can."""
        if step.kernels_lost is not None:
            return step.kernels_lost
        if window is None:
            return "its marks have no records"
        if any(low < window.end_ns and high > window.start_ns for low, high in self._lost):
            return f"the ring of kernel records was full: {self._num_lost} records are lost"
        if self._num_dropped:
            return f"the driver dropped {self._num_dropped} kernel records"
        return None

    # -- one step ------------------------------------------------------------------------------

    def _record(self, step: RecordedStep, rows: Rows, window: _Window) -> StepRecord:
        start_ns, end_ns = window.start_ns, window.end_ns
        settings = self._settings
        is_work = (rows["what"] != What.MARK) & (rows["device"] == window.device)
        # What the step launched is matched to its calls; what ran in its window is what its time went to.
        launched = rows[is_work & (rows["correlation"] - window.first_call < np.uint32(window.num_calls))]
        launched.sort(order="correlation")  # by launch, as the calls are
        unknown = None
        if step.is_unseen:
            step, unknown = self._checked(step, launched)
        matched = self._match(step, launched) if unknown is None else MatchedCalls([], [], [])
        inside = rows[is_work & (rows["end"] > start_ns) & (rows["start"] < end_ns)]
        timeline = self._timeline(step, inside, window, _ops_by_launch(step, launched, matched))
        detailed = step.is_detailed
        spans = detailed and step.global_step % SPANS_EVERY == 0
        exposed = exposed_intervals(timeline)
        not_measured = scalar_reasons(step)
        if not detailed:
            not_measured["active_segments"] = not_measured["collectives"] = NO_DETAILS
        elif not spans:
            not_measured["active_segments"] = f"kept in one step of {SPANS_EVERY}"
        if unknown is not None:
            not_measured["collectives"] = unknown
        elif matched.lone_calls:
            not_measured["collectives"] = (
                f"{len(matched.lone_calls)} of {len(step.calls)} have no kernel that is theirs for certain"
            )
        return StepRecord(
            **noted_fields(step, settings),
            source="kernels",
            start_unix_ns=start_ns + settings.unix_minus_monotonic_ns,
            clock_error_us=CLOCK_ERROR_US,
            step_ms=rounded((end_ns - start_ns) / 1e6),
            between_steps_ms=rounded(max(0.0, (end_ns - max(start_ns, window.body_end_ns)) / 1e6)),
            streams=rounded(stream_uses(timeline)),
            overlap=rounded(overlap(timeline)),
            active_segments=active_segments(timeline) if spans else None,
            collectives=_collectives(step, launched, matched, start_ns, exposed)
            if detailed and unknown is None
            else None,
            calls_learned=step.is_unseen and unknown is None,
            exposed_run_lengths_ns=run_lengths_ns(exposed) if detailed else None,
            kernels=self._sums(inside, window, NUM_TOP if detailed else 0, spans),
            host_spans=host_spans(step, lambda ns: (ns - start_ns) / 1e6, with_window=True),
            not_measured=not_measured,
        )

    def _checked(self, step: RecordedStep, launched: Rows) -> tuple[RecordedStep, str | None]:
        """Return an unseen step with its collectives if its kernels are theirs; else without, and the reason.

        Their number is then that of the kernels.
        """
        self._coverage.update(unseen=1)
        kernels = self._kernels_of_calls(launched)
        if step.num_calls is None and _fits(step, kernels):
            return step, None
        self._coverage.update(steps=1, unknown=1)
        reason = UNLIKE_COUNT
        if step.num_calls is None:
            self.num_refuted += 1
            reason = UNLIKE_KERNELS
        return msgspec.structs.replace(step, calls=[], num_calls=len(kernels)), reason

    def _match(self, step: RecordedStep, launched: Rows) -> MatchedCalls:
        """Match the step's calls to rows of `launched`. Kernels in graphs have no call of their own."""
        kernels = self._kernels_of_calls(launched)
        matched = match_calls(step.calls, kernels)
        self.num_refuted += not step.is_unseen and not _fits(step, kernels)
        in_graph = self._is_comm(launched) & (launched["in_graph"] != 0)
        self._count(step, launched, matched, int(np.count_nonzero(in_graph)))
        return matched

    def _kernels_of_calls(self, launched: Rows) -> list[LaunchedKernel]:
        """Return the communication kernels in the order of their launch, without those in graphs."""
        return [
            LaunchedKernel(self._comm_ops[launched["name"][row]] or "", row)
            for row in np.flatnonzero(self._is_comm(launched) & (launched["in_graph"] == 0)).tolist()
        ]

    def _count(self, step: RecordedStep, launched: Rows, matched: MatchedCalls, num_in_graphs: int) -> None:
        self._coverage.update(
            steps=1,
            matched=sum(1 for rows in matched.kernels_of_call if rows),
            lone_calls=len(matched.lone_calls),
            lone_kernels=len(matched.lone_kernels),
            graph_comm=num_in_graphs,
        )
        texts = [
            f"step {step.global_step}: {step.calls[place].op} #{step.calls[place].seq} of group "
            f"{step.calls[place].group.name}, {step.calls[place].bytes} bytes: no kernel"
            for place in matched.lone_calls
        ]
        texts += [
            f"step {step.global_step}: kernel "
            f"{self._names[self._line_index[launched['name'][row]]][:80]}: no call"
            for row in matched.lone_kernels
        ]
        self._leftovers += texts[: _SHOWN - len(self._leftovers)]

    def _is_comm(self, rows: Rows) -> Flags:
        by_name = np.array([op is not None for op in self._comm_ops] or [False], dtype=bool)
        return np.asarray((rows["what"] == What.KERNEL) & by_name[_names_of(rows, len(self._line_index))])

    def _timeline(
        self, step: RecordedStep, rows: Rows, window: _Window, ops_by_launch: dict[int, str]
    ) -> Timeline:
        start_ns, end_ns = window.start_ns, window.end_ns
        is_comm = self._is_comm(rows)
        kind = np.where(rows["what"] == What.KERNEL, np.int8(Kind.COMPUTE), np.int8(Kind.COPY))
        kind[is_comm] = Kind.COMM
        stream_ids, stream = np.unique(rows["stream"], return_inverse=True)
        ops: dict[str, int] = {"": 0}
        op = np.zeros(len(rows), dtype=np.int32)
        for row in np.flatnonzero(is_comm).tolist():
            name = ops_by_launch.get(int(rows["correlation"][row]))
            name = name or self._comm_ops[rows["name"][row]] or ""
            op[row] = ops.setdefault(name, len(ops))
        return Timeline(
            rank=self._settings.rank,
            step=step.global_step,
            source="kernels",
            origin_unix_ns=start_ns + self._settings.unix_minus_monotonic_ns,
            window_ms=(0.0, (end_ns - start_ns) / 1e6),
            start_ms=(rows["start"] - start_ns) / 1e6,
            end_ms=(rows["end"] - start_ns) / 1e6,
            kind=kind,
            stream=stream.astype(np.int32),
            op=op,
            name=np.zeros(len(rows), dtype=np.int32),
            streams=tuple(map(str, stream_ids.tolist())),
            ops=tuple(ops),
            names=("",),
            compute_streams=_compute_streams(rows, kind, stream, stream_ids, window.stream),
            sees_copies=True,
        )

    def _sums(self, rows: Rows, window: _Window, num_top: int, with_spans: bool) -> KernelSums:
        """Time and number of what ran in the window, by class and by name, of the num_top with most time."""
        starts_ns: Ints = rows["start"]
        ends_ns: Ints = rows["end"]
        ms = (np.minimum(ends_ns, window.end_ns) - np.maximum(starts_ns, window.start_ns)) / 1e6
        is_kernel = rows["what"] == What.KERNEL
        names = _names_of(rows, len(self._line_index))
        classes: dict[str, tuple[float, int]] = {}
        num_by_name = np.bincount(names[is_kernel], minlength=1)
        ms_by_name = np.bincount(names[is_kernel], ms[is_kernel], minlength=1)
        for name in np.flatnonzero(num_by_name).tolist():
            _add(classes, self._classes[name], float(ms_by_name[name]), int(num_by_name[name]))
        if not is_kernel.all():
            _add(classes, COPY, float(ms[~is_kernel].sum()), int(np.count_nonzero(~is_kernel)))
        top = np.argsort(-ms_by_name, kind="stable")[:num_top]
        return KernelSums(
            num_kernels=int(np.count_nonzero(is_kernel)),
            num_graph_nodes=int(np.count_nonzero(rows["in_graph"])),
            classes={name: (round(ms, DIGITS), num) for name, (ms, num) in classes.items()},
            top=[
                (self._line_index_of(name), round(float(ms_by_name[name]), 6), int(num_by_name[name]))
                for name in top.tolist()
                if num_by_name[name]
            ],
            copies=_copies(rows, ms) if num_top else {},
            spans=self._spans(rows, window.start_ns) if with_spans else None,
        )

    def _line_index_of(self, name: int) -> int:
        """Index into `_names`; 0 where the driver's index has no name."""
        return self._line_index[name] if name < len(self._line_index) else 0

    def _spans(self, rows: Rows, start_ns: int) -> list[KernelSpan]:
        what: NDArray[np.uint8] = rows["what"]
        in_order = rows[what == What.KERNEL]
        in_order.sort(order="start")
        starts_ms = ((in_order["start"] - start_ns) / 1e6).round(4).tolist()
        durations_ms = ((in_order["end"] - in_order["start"]) / 1e6).round(4).tolist()
        names = [self._line_index_of(name) for name in in_order["name"].tolist()]
        columns = (starts_ms, durations_ms, in_order["stream"].tolist(), names)
        return [KernelSpan(*row) for row in zip(*columns, strict=True)]


def _window_of(step: RecordedStep, rows: Rows) -> _Window | None:
    """None where the mark at the step's start or at its window's end has no record."""
    start_number, body_number, end_number = step.kernel_marks
    marks = {int(row["name"]): row for row in rows[rows["what"] == What.MARK]}
    start, end = marks.get(start_number), marks.get(end_number)
    if start is None or end is None:
        return None
    return _Window(start, marks.get(body_number, end), end)


def _names_of(rows: Rows, num_names: int) -> NDArray[np.intp]:
    """The driver's indices of names, 0 for what is not a kernel."""
    name: NDArray[np.uint32] = rows["name"]
    is_kernel = (rows["what"] == What.KERNEL) & (name < num_names)
    return np.where(is_kernel, name, 0).astype(np.intp)


def _copies(rows: Rows, ms: Floats) -> dict[str, float]:
    """Time of copies by what they are from and to."""
    found: defaultdict[str, float] = defaultdict(float)
    is_copy = rows["what"] == What.COPY
    for kinds in np.unique(rows["name"][is_copy]).tolist():
        kind, source, target = kinds & 255, kinds >> 8 & 255, kinds >> 16
        ends = {1: (_HOST.get(source, "host"), "device"), 2: ("device", _HOST.get(target, "host"))}
        if kind in ends or kind == _WITHIN:
            name = "_to_".join(ends.get(kind, ("device", "device")))
            found[name] += float(ms[is_copy & (rows["name"] == kinds)].sum())
    return {name: round(ms, DIGITS) for name, ms in found.items()}


def _compute_streams(
    rows: Rows, kind: NDArray[np.int8], stream: NDArray[np.intp], stream_ids: NDArray[np.uint32], marked: int
) -> frozenset[int]:
    """The stream that carries the marks, if the program computes there; else the busiest."""
    computes = kind == Kind.COMPUTE
    if not computes.any():
        return frozenset()
    durations_ns: Ints = rows["end"] - rows["start"]
    busy = np.bincount(stream[computes], durations_ns[computes], minlength=len(stream_ids))
    indices = np.flatnonzero(stream_ids == marked)
    if len(indices) and busy[indices[0]] > 0:
        return frozenset((int(indices[0]),))
    return frozenset((int(np.argmax(busy)),))


def _ops_by_launch(step: RecordedStep, launched: Rows, matched: MatchedCalls) -> dict[int, str]:
    """Operations by a kernel's correlation, from the matched calls: surer than by its name."""
    return {
        int(launched["correlation"][row]): call.op
        for call, rows in zip(step.calls, matched.kernels_of_call, strict=True)
        for row in rows
    }


def _collectives(
    step: RecordedStep, launched: Rows, matched: MatchedCalls, start_ns: int, exposed: Intervals
) -> list[CollectiveRecord]:
    places = module_places(step)
    return [
        _collective(call, places, launched[rows] if rows else None, start_ns, exposed)
        for call, rows in zip(step.calls, matched.kernels_of_call, strict=True)
    ]


def _collective(
    call: CollectiveCall,
    places: dict[str, int],
    kernels: Rows | None,
    start_ns: int,
    exposed: Intervals = EMPTY,
) -> CollectiveRecord:
    start_ms = end_ms = exposed_ms = None
    if kernels is not None:
        start_ms = (int(kernels["start"].min()) - start_ns) / 1e6
        end_ms = (int(kernels["end"].max()) - start_ns) / 1e6
        exposed_ms = rounded(float(length_within(exposed, np.array([start_ms]), np.array([end_ms]))[0]))
    elif call.start is not None and call.end is not None:  # of CPU tensors: timed by the host
        start_ms, end_ms = ((mark.host_ns - start_ns) / 1e6 for mark in (call.start, call.end))
    launch_ms = (call.launched_ns - start_ns) / 1e6 if call.launched_ns else None
    return collective_record(call, places, launch_ms, start_ms, end_ms, exposed_ms=exposed_ms)


def _add(classes: dict[str, tuple[float, int]], name: str, ms: float, count: int) -> None:
    previous_ms, previous_count = classes.get(name, (0.0, 0))
    classes[name] = (previous_ms + ms, previous_count + count)


def without_kernels(step: RecordedStep, settings: ResolverSettings, reason: str) -> StepRecord:
    """The record of a step whose kernel records are missing: what the host noted."""
    not_measured, places = scalar_reasons(step), module_places(step)
    for name in ("step_ms", "between_steps_ms", "overlap", "streams", "active_segments", "kernels"):
        not_measured[name] = reason
    return StepRecord(
        **noted_fields(step, settings),
        source="kernels",
        start_unix_ns=step.start_ns + settings.unix_minus_monotonic_ns,
        clock_error_us=None,
        step_ms=None,
        between_steps_ms=None,
        overlap=NO_OVERLAP,
        collectives=None
        if step.num_calls is not None
        else [_collective(call, places, None, step.start_ns) for call in step.calls],
        host_spans=host_spans(step, lambda ns: (ns - step.start_ns) / 1e6),
        not_measured=not_measured,
    )


# -- which kernel carried out which call ---------------------------------------------------------------


def match_calls(calls: Sequence[CollectiveCall], kernels: Sequence[LaunchedKernel]) -> MatchedCalls:
    """Match the calls of a step to the communication kernels that the step launched.

    Both are in the order of launch; where that does not fit, operation by operation. A call has one kernel; a
    coalesced one has as many as it has members where the numbers then agree, since a library may launch a
    group in parts.
    """
    expected = [place for place, call in enumerate(calls) if has_kernel(call)]
    result = MatchedCalls([[] for _ in calls], [], [])
    if _in_order(calls, expected, kernels):
        for place, kernel in zip(expected, kernels, strict=True):
            result.kernels_of_call[place].append(kernel.row)
        return result
    calls_by_op: dict[str, list[int]] = defaultdict(list)
    kernels_by_op: dict[str, list[LaunchedKernel]] = defaultdict(list)
    for place in expected:
        calls_by_op[kernel_op(calls[place].op)].append(place)
    for kernel in kernels:
        kernels_by_op[kernel_op(kernel.op)].append(kernel)
    for op in sorted(calls_by_op.keys() | kernels_by_op.keys()):
        _match_op(calls, calls_by_op[op], kernels_by_op[op], result)
    return result


def kernel_op(op: str) -> str:
    """The operation that the kernel of a collective carries out."""
    return _KERNEL_OF_OP.get(op, op)


def has_kernel(call: CollectiveCall) -> bool:
    """Return True for collectives that run as kernels: not on the host, not in a group of one rank."""
    return call.stream != "host" and call.reason is None and len(call.group.ranks) > 1


def _fits(step: RecordedStep, kernels: Sequence[LaunchedKernel]) -> bool:
    """True where the kernels are those of the step's calls, one each and in their order."""
    expected = [place for place, call in enumerate(step.calls) if has_kernel(call)]
    return _in_order(step.calls, expected, kernels)


def _in_order(
    calls: Sequence[CollectiveCall], expected: Sequence[int], kernels: Sequence[LaunchedKernel]
) -> bool:
    if len(expected) != len(kernels):
        return False
    return all(
        calls[place].op == _ANY or kernel_op(calls[place].op) == kernel_op(kernel.op)
        for place, kernel in zip(expected, kernels, strict=True)
    )


def _match_op(
    calls: Sequence[CollectiveCall], places: list[int], kernels: list[LaunchedKernel], result: MatchedCalls
) -> None:
    sizes = [1] * len(places)
    if len(kernels) != len(places):
        sizes = [len(calls[place].members or (None,)) for place in places]
    if len(kernels) != sum(sizes):
        result.lone_calls.extend(places)
        result.lone_kernels.extend(kernel.row for kernel in kernels)
        return
    rows = iter(kernel.row for kernel in kernels)
    for place, size in zip(places, sizes, strict=True):
        result.kernels_of_call[place].extend(next(rows) for _ in range(size))
