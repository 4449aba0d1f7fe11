"""Makes a RankTrace of the columns that every reader fills in (Activities).

Work belongs to the step that launched it: an activity's correlation id names the host call that
launched it, and the step is the one whose annotation on the host contains that call, on any thread of
the process (autograd launches on a thread of its own). Where the device runs behind the host, windows
of host time would give a step's work to its successors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.records.schema import HostSpan
from aorta.timeline.arrays import Flags, Ints
from aorta.timeline.intervals import distinct, length_ms, pairs, subtract_normalised, union
from aorta.timeline.overlap import on_compute_stream
from aorta.timeline.types import Kind, Source, Timeline
from aorta.traces.classify import COPY_KERNEL, HELPERS, UNKNOWN, Classifier, compute_op
from aorta.traces.host_spans import HostSide
from aorta.traces.model import NS_PER_MS, LeftOut, RankTrace, TraceCollective, TraceQuality, listed_names

UNLINKED = np.iinfo(np.int64).min
"""Launch time of an activity whose launch the trace lacks."""
UNTRACED_MS = 1.0
"""Longest time from a launch to its kernel while nothing else that was traced runs. Longer, and the queue was
busy with work from before the trace: a launch on an empty queue takes some 10 µs."""
LATEST_NS = 2**62
"""Latest believable time, about the year 2116: times beyond it are damage."""
FAR_LONGER = 20
"""Ratio to the next longest kernel that no kernel of the same program has."""
MOST_ENCLOSED = 3
"""Fewest kernels of the same stream that start within another one to show that its end is wrong: a stream
runs in order."""
UNTIMED_SHARE = 0.01
"""Share of the kernels of a kind above which, if these are untimed, sums over that kind are not known."""
REST_SHARE = 0.1
"""Of the usual step, below which one that launches nothing is none: the profiler opens one behind each step,
also behind the last."""
NO_LAUNCHES = (
    "no call of the host ties device work to steps: steps are the host's own windows, and work that runs"
    " behind the host counts for the step in which it runs"
)


class Category(IntEnum):
    """Kinds of device activities."""

    KERNEL = 0
    COPY = 1
    MEMSET = 2
    PEER_COPY = 3
    """Copy from one device to another: communication where metadata or a rule says so."""


OP_OF_CATEGORY = {Category.COPY: "memcpy", Category.MEMSET: "memset", Category.PEER_COPY: "memcpy"}


class CollectiveInfo(NamedTuple):
    """Metadata of a collective; None is what the trace does not tell."""

    op: str | None = None
    group: str | None = None
    ranks: list[int] | None = None
    bytes: int | None = None
    dtype: str | None = None


class StepMark(NamedTuple):
    """A step's annotation on the host."""

    step: int
    process: int
    """Index of the process, as in Activities.launch_process."""
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class Activities:
    """Device activities of one rank as columns, times in ns on the trace's clock."""

    start_ns: Ints
    end_ns: Ints
    category: NDArray[np.int8]
    name: NDArray[np.int32]
    """Index into names."""
    names: tuple[str, ...]
    stream: NDArray[np.int32]
    streams: tuple[str, ...]
    launch_ns: Ints
    """Start of the host call that launched each activity, or UNLINKED."""
    launch_process: NDArray[np.int32] | None = None
    """Process that launched each activity; None: there is only one."""
    correlation: Sequence[int | str | None] = ()
    info: Mapping[int, CollectiveInfo] = field(default_factory=dict)
    """Metadata of collectives, by index of the activity."""
    hints: Mapping[int, str] = field(default_factory=dict)
    """Operations that something weaker than metadata tells (an annotation around the launch), by index."""
    marks: Sequence[StepMark] = ()
    num_launches: int | None = None
    dropped_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Start of every kernel launch whose kernel the trace lacks."""
    is_timed: Flags | None = None
    """False where the activity has no end that can be believed; None: all have one."""
    num_without_time: int = 0
    """Activities without times that are not among the rows."""
    num_missing_dispatches: int = 0
    host: HostSide = HostSide()
    base_ns: int = 0
    """Added to every time for the Unix clock."""
    notes: list[str] = field(default_factory=list)

    def keep(self, mask: Flags) -> None:
        """Leave out the activities that are not in the mask."""
        if mask.all():
            return
        indices = np.flatnonzero(mask)
        place = {old: new for new, old in enumerate(indices.tolist())}
        for column in (
            "start_ns",
            "end_ns",
            "category",
            "name",
            "stream",
            "launch_ns",
            "launch_process",
            "is_timed",
        ):
            values = getattr(self, column)
            setattr(self, column, None if values is None else values[indices])
        if len(self.correlation):
            self.correlation = [self.correlation[i] for i in place]
        self.info = {place[i]: info for i, info in self.info.items() if i in place}
        self.hints = {place[i]: hint for i, hint in self.hints.items() if i in place}


def assemble(
    work: Activities,
    location: str,
    classifier: Classifier,
    *,
    source: Source,
    rank: int,
    world_size: int | None,
    device: str | None,
    host: str | None = None,
    versions: Mapping[str, str] | None = None,
    device_index: str | None = None,
) -> RankTrace:
    """Trace of these activities, which are changed on the way; location names the file in errors.

    device_index: the device to take from a trace of several; None: the busiest one.
    """
    if len(work.start_ns) == 0:
        raise TraceError(f"{location} holds no GPU activity (kernels, copies): was the GPU traced?")
    devices = _take_device(work, location, device_index)
    untimed = _leave_out_untimed(work, classifier)
    if len(work.start_ns) == 0:
        raise TraceError(f"{location} holds no GPU activity with a duration")
    _check_times(work, location)
    marks = _distinct(sorted(work.marks, key=lambda mark: mark.start_ns), work.notes)
    marks = _without_rests(work, marks)
    if marks and not (work.launch_ns != UNLINKED).any():
        work.notes.append(NO_LAUNCHES)
    is_comm, ops, op = _classify(work, classifier)
    timeline = _whole_timeline(work, source, rank, is_comm, ops, op)
    step_of = _steps_of(work, marks)
    windows = _step_windows(work, marks, timeline)
    return RankTrace(
        rank=rank,
        world_size=world_size,
        device=device,
        host=host,
        versions=dict(versions or {}),
        timeline=timeline,
        steps=[
            replace(timeline.select(step_of == i), step=mark.step, window_ms=window)
            for i, (mark, window) in enumerate(zip(marks, windows, strict=True))
        ],
        collectives=_collectives(work, marks, timeline, step_of),
        quality=_quality(work, marks, timeline),
        launch_step=step_of,
        correlation=work.correlation,
        devices=devices,
        untimed=untimed,
        host_spans=_host_spans(work, timeline),
        host_not_shown=work.host.not_shown,
        libraries=frozenset(work.host.libraries),
    )


def _host_spans(work: Activities, timeline: Timeline) -> tuple[HostSpan, ...]:
    origin_ns = timeline.origin_unix_ns - work.base_ns
    return tuple(
        HostSpan(
            note.kind,
            (note.start_ns - origin_ns) / NS_PER_MS,
            (note.end_ns - origin_ns) / NS_PER_MS,
            note.where,
        )
        for note in work.host.notes
    )


def _take_device(work: Activities, location: str, chosen: str | None) -> tuple[str, ...]:
    """Devices that kernels ran on. Leaves out what did not run on the one that is taken.

    Streams of several devices are labelled device:stream.
    """
    device_names = [label.partition(":")[0] if ":" in label else "" for label in work.streams]
    names, device_of_stream = indexed(device_names)
    device = device_of_stream[work.stream]
    is_kernel = work.category == Category.KERNEL
    present = distinct(device[is_kernel]).tolist()
    if chosen is not None and chosen not in names:
        raise TraceError(f"{location} has no device {chosen}; it has {listed_names(sorted(names))}")
    if len(present) > 1 or (chosen is not None and len(names) > 1):
        busy_ns = {i: _busy_ns(work, is_kernel & (device == i)) for i in present}
        device_number = names.index(chosen) if chosen is not None else max(present, key=lambda i: busy_ns[i])
        left = [i for i in present if i != device_number]
        if chosen is None:
            left_out = listed_names(f"GPU {names[i]} (busy {busy_ns[i] / NS_PER_MS:.3f} ms)" for i in left)
            busiest = f"the numbers are of GPU {names[device_number]}, the busiest"
            work.notes.append(
                LeftOut(f"the trace holds {len(present)} GPUs: {busiest}; left out: {left_out}")
            )
        work.keep(device == device_number)
    return tuple(names[i] for i in present)


def _busy_ns(work: Activities, mask: Flags) -> float:
    return length_ms(union(pairs(work.start_ns[mask].astype(float), work.end_ns[mask].astype(float))))


def _leave_out_untimed(work: Activities, classifier: Classifier) -> dict[str, str]:
    """Leave out activities whose end is not known.

    Returns the reason by kind (comm, compute) where these are so many that sums over the kind are not known.
    """
    too_long = _impossibly_long(work)
    if too_long.any():
        worst_ms = float((work.end_ns - work.start_ns)[too_long].max()) / NS_PER_MS
        which = "kernels that last on while later ones of their stream run"
        num = int(too_long.sum())
        work.notes.append(LeftOut(f"{which}, left out: {num}, the longest {worst_ms:.6g} ms"))
    timed = ~too_long if work.is_timed is None else work.is_timed & ~too_long
    untimed = {}
    if not timed.all():
        is_comm, *_ = _classify(work, classifier)
        is_kernel = work.category == Category.KERNEL
        for kind, is_of_kind in (("comm", is_comm), ("compute", is_kernel & ~is_comm)):
            num, num_untimed = int(is_of_kind.sum()), int((is_of_kind & ~timed).sum())
            if num_untimed > UNTIMED_SHARE * num:
                untimed[kind] = f"{num_untimed} of {num} {kind} kernels have no duration that can be believed"
        work.num_without_time += int(np.count_nonzero(~timed & ~too_long))
        work.keep(timed)
    return untimed


def _impossibly_long(work: Activities) -> Flags:
    """Mask of kernels whose end is wrong: far longer than others, and later ones of the stream start
    inside."""
    is_impossible = np.zeros(len(work.start_ns), dtype=bool)
    kernels = np.flatnonzero(work.category == Category.KERNEL)
    if len(kernels) <= MOST_ENCLOSED:
        return is_impossible
    length_ns = work.end_ns[kernels] - work.start_ns[kernels]
    by_length = np.sort(length_ns)
    # The jump from usual durations to impossible ones, among the longest few.
    few = max(len(kernels) // 100, 2)
    longest, shorter = by_length[-few:], by_length[-few - 1 : -1]
    jump = np.flatnonzero(longest > FAR_LONGER * np.maximum(shorter, 1))
    if len(jump) == 0:
        return is_impossible
    for i in kernels[length_ns >= longest[jump[0]]].tolist():
        later = (work.stream[kernels] == work.stream[i]) & (work.start_ns[kernels] > work.start_ns[i])
        is_impossible[i] = int((later & (work.start_ns[kernels] < work.end_ns[i])).sum()) >= MOST_ENCLOSED
    return is_impossible


def _check_times(work: Activities, location: str) -> None:
    times = [int(t) for edge in (work.start_ns, work.end_ns) for t in (edge.min(), edge.max())]
    times += [time + work.base_ns for time in times]
    times += [time for mark in work.marks for time in (mark.start_ns, mark.end_ns)]
    linked = work.launch_ns[work.launch_ns != UNLINKED]
    if len(linked):
        times += [int(linked.min()), int(linked.max())]
    worst = max(times, key=abs)
    if abs(worst) > LATEST_NS:
        raise TraceError(f"{location} has times that no clock gives: {worst} ns")


def _distinct(marks: list[StepMark], notes: list[str]) -> list[StepMark]:
    """The first mark of each step: exporters write some twice, and nest them."""
    first: dict[int, StepMark] = {}
    num_apart = 0
    for mark in marks:
        first_mark = first.setdefault(mark.step, mark)
        num_apart += mark.start_ns >= first_mark.end_ns
    if num_apart:
        notes.append(LeftOut(f"steps that are marked again later in the trace, left out: {num_apart}"))
    return list(first.values())


def _without_rests(work: Activities, marks: list[StepMark]) -> list[StepMark]:
    """Without what is marked as a step, launches nothing and is over at once."""
    if not marks:
        return marks
    launches = np.bincount(_steps_of(work, marks) + 1, minlength=len(marks) + 1)[1:] > 0
    lengths_ns = np.array([mark.end_ns - mark.start_ns for mark in marks])
    usual_ns = float(np.median(lengths_ns[launches])) if launches.any() else 0.0
    is_rest = ~launches & (lengths_ns < REST_SHARE * usual_ns)
    if is_rest.any():
        num = int(is_rest.sum())
        work.notes.append(LeftOut(f"steps that launch nothing and are over at once, left out: {num}"))
    return [mark for mark, rest in zip(marks, is_rest.tolist(), strict=True) if not rest]


def _classify(work: Activities, classifier: Classifier) -> tuple[Flags, tuple[str, ...], NDArray[np.int32]]:
    """Mask of communication, operations, operation of each activity.

    Rules are asked once per name. Metadata outweighs them, hints only fill in the operation.
    """
    named = [classifier.comm_op(name) for name in work.names]
    by_name = np.array([op is not None for op in named], dtype=bool)[work.name]
    ops: dict[str, int] = {}
    op_by_name = np.array(
        [
            ops.setdefault(comm_op if comm_op is not None else compute_op(name), len(ops))
            for comm_op, name in zip(named, work.names, strict=True)
        ],
        dtype=np.int32,
    )
    op = op_by_name[work.name]
    is_copy = (work.category != Category.KERNEL) & ~by_name
    for category, name in OP_OF_CATEGORY.items():
        op[is_copy & (work.category == category)] = ops.setdefault(name, len(ops))
    is_comm = by_name.copy()
    for i, hint in work.hints.items():
        if is_comm[i]:
            op[i] = ops.setdefault(hint, len(ops))
    for i, info in work.info.items():
        may_be = work.category[i] in (Category.KERNEL, Category.PEER_COPY)
        if not is_comm[i] and (not may_be or HELPERS.search(work.names[work.name[i]])):
            continue
        info_op = info.op or work.hints.get(i)
        if info_op is not None or not is_comm[i]:
            op[i] = ops.setdefault(info_op or UNKNOWN, len(ops))
        is_comm[i] = True
    return is_comm, tuple(ops), op


def _whole_timeline(
    work: Activities, source: Source, rank: int, is_comm: Flags, ops: tuple[str, ...], op: NDArray[np.int32]
) -> Timeline:
    """All activities as a Timeline whose origin is the first start."""
    origin_ns = int(work.start_ns.min())
    start_ms = (work.start_ns - origin_ns) / NS_PER_MS
    end_ms = np.maximum(work.end_ns - origin_ns, work.start_ns - origin_ns) / NS_PER_MS
    kind = np.where(work.category == Category.KERNEL, np.int8(Kind.COMPUTE), np.int8(Kind.COPY))
    kind[is_comm] = Kind.COMM
    timeline = Timeline(
        rank=rank,
        step=None,
        source=source,
        origin_unix_ns=origin_ns + work.base_ns,
        window_ms=(0.0, float(end_ms.max())),
        start_ms=start_ms,
        end_ms=end_ms,
        kind=kind,
        stream=work.stream,
        op=op,
        name=work.name,
        streams=work.streams,
        ops=ops,
        names=work.names,
        compute_streams=frozenset(),
        sees_copies=True,
    )
    return replace(timeline, compute_streams=_compute_stream(timeline))


def _compute_stream(timeline: Timeline) -> frozenset[int]:
    """Index of the stream that computes longest, without communication; empty where none computes."""
    computes = timeline.kind == Kind.COMPUTE
    stream = timeline.stream[computes]
    spans = pairs(timeline.start_ms[computes], timeline.end_ms[computes])
    order = np.argsort(stream, kind="stable")
    present, first = np.unique(stream[order], return_index=True)
    parts = np.split(spans[order], first[1:])
    busy_ms = [length_ms(union(part)) for part in parts]
    if not busy_ms or max(busy_ms) <= 0:
        return frozenset()
    return frozenset((int(present[int(np.argmax(busy_ms))]),))


def _steps_of(work: Activities, marks: Sequence[StepMark]) -> Ints:
    """Index of the step that launched each activity, -1 for none."""
    if not marks:
        return np.full(len(work.start_ns), -1, dtype=np.int64)
    starts = np.array([mark.start_ns for mark in marks], dtype=np.int64)
    ends = np.array([mark.end_ns for mark in marks], dtype=np.int64)
    launch_ns = work.launch_ns if (work.launch_ns != UNLINKED).any() else work.start_ns
    step = np.searchsorted(starts, launch_ns, side="right").astype(np.int64) - 1
    inside = (step >= 0) & (launch_ns < ends[step])
    if work.launch_process is not None and launch_ns is work.launch_ns:
        process = np.array([mark.process for mark in marks], dtype=np.int32)
        inside &= work.launch_process == process[step]
    step[~inside] = -1
    return step


def _step_windows(
    work: Activities, marks: Sequence[StepMark], timeline: Timeline
) -> list[tuple[float, float]]:
    """Start and end of each step: when the compute stream reaches it, as an event recorded there would
    tell."""
    if not marks:
        return []
    if not (work.launch_ns != UNLINKED).any():
        origin_ns = timeline.origin_unix_ns - work.base_ns
        return [((m.start_ns - origin_ns) / NS_PER_MS, (m.end_ns - origin_ns) / NS_PER_MS) for m in marks]
    on_compute = np.flatnonzero(on_compute_stream(timeline))
    on_compute = on_compute[np.argsort(work.start_ns[on_compute], kind="stable")]
    # A stream runs in order of launch: work without one was launched after what ran before it.
    launched_ns = np.maximum.accumulate(work.launch_ns[on_compute])
    done_ms = np.maximum.accumulate(timeline.end_ms[on_compute])

    def reached_ms(cpu_ns: int) -> float:
        cpu_ms = (cpu_ns + work.base_ns - timeline.origin_unix_ns) / NS_PER_MS
        num_before = int(np.searchsorted(launched_ns, cpu_ns, side="left"))
        return max(cpu_ms, float(done_ms[num_before - 1])) if num_before else cpu_ms

    starts = [reached_ms(mark.start_ns) for mark in marks]
    untraced_ms = min(_untraced_until_ms(work, marks[0], timeline), *starts[1:], np.inf)
    if untraced_ms > starts[0]:
        work.notes.append(
            f"step {marks[0].step} is counted from {untraced_ms - starts[0]:.3f} ms after its start on the"
            " host: until then the device was busy with work from before the trace"
        )
        starts[0] = untraced_ms
    return list(zip(starts, [*starts[1:], reached_ms(marks[-1].end_ns)], strict=True))


def _untraced_until_ms(work: Activities, first: StepMark, timeline: Timeline) -> float:
    """Time at which the device reached the first step, if its queue still held work from before the trace.

    That is the end of the last long stretch without any traced work between the launch of the step's first
    kernel on the compute stream and that kernel. Minus infinity where there is none: a kernel that waits
    for a traced collective is a part of the step.
    """
    on_compute = np.flatnonzero(on_compute_stream(timeline) & (work.launch_ns >= first.start_ns))
    if len(on_compute) == 0:
        return -np.inf
    i = int(on_compute[np.argmin(work.start_ns[on_compute])])
    launch_ms = (int(work.launch_ns[i]) + work.base_ns - timeline.origin_unix_ns) / NS_PER_MS
    if timeline.start_ms[i] - launch_ms <= UNTRACED_MS:
        return -np.inf
    gap = pairs(np.array([launch_ms]), timeline.start_ms[i : i + 1])
    untraced = subtract_normalised(gap, union(pairs(timeline.start_ms, timeline.end_ms)))
    long = untraced[untraced[:, 1] - untraced[:, 0] > UNTRACED_MS]
    return float(long[-1, 1]) if len(long) else -np.inf


def _collectives(
    work: Activities, marks: Sequence[StepMark], timeline: Timeline, step_of: Ints
) -> list[TraceCollective]:
    """Communication with its metadata, in order of starts."""
    is_comm = timeline.kind == Kind.COMM
    in_order = np.flatnonzero(is_comm)[np.argsort(timeline.start_ms[is_comm], kind="stable")].tolist()
    no_info = CollectiveInfo()
    collectives = []
    for i in in_order:
        info = work.info.get(i, no_info)
        launch_ns = int(work.launch_ns[i])
        collectives.append(
            TraceCollective(
                op=timeline.ops[timeline.op[i]],
                start_ms=float(timeline.start_ms[i]),
                end_ms=float(timeline.end_ms[i]),
                group=info.group,
                ranks=info.ranks,
                bytes=info.bytes,
                dtype=info.dtype,
                stream=timeline.streams[timeline.stream[i]],
                kernel=timeline.names[timeline.name[i]],
                step=marks[step_of[i]].step if step_of[i] >= 0 else None,
                launch_unix_ns=None if launch_ns == UNLINKED else launch_ns + work.base_ns,
                correlation=work.correlation[i] if len(work.correlation) else None,
            )
        )
    return collectives


def _quality(work: Activities, marks: Sequence[StepMark], timeline: Timeline) -> TraceQuality:
    """Faults and gaps, counted."""
    linked = work.launch_ns != UNLINKED
    ahead_ns = work.launch_ns[linked] - work.start_ns[linked]
    length = timeline.end_ms - timeline.start_ms
    is_comm = timeline.kind == Kind.COMM
    unknown = is_comm & _is_op(timeline, UNKNOWN)
    copies = (timeline.kind == Kind.COMPUTE) & _is_op(timeline, COPY_KERNEL)
    peers = (timeline.kind == Kind.COPY) & (work.category == Category.PEER_COPY)
    comm_ms = float(length[is_comm].sum())
    return TraceQuality(
        num_activities=len(work.start_ns),
        num_unlinked=int(np.count_nonzero(~linked)),
        num_launches=work.num_launches,
        num_launches_without_kernel=len(work.dropped_ns),
        num_before_launch=int(np.count_nonzero(ahead_ns > 0)),
        worst_before_launch_us=max(0.0, float(ahead_ns.max(initial=0)) / 1000),
        num_backwards=int(np.count_nonzero(work.end_ns < work.start_ns)),
        num_without_time=work.num_without_time,
        num_missing_dispatches=work.num_missing_dispatches,
        num_unknown_collectives=int(np.count_nonzero(unknown)),
        unknown_comm_share=float(length[unknown].sum()) / comm_ms if comm_ms > 0 else None,
        num_copy_kernels=int(np.count_nonzero(copies)),
        copy_kernel_ms=length_ms(union(timeline.intervals(copies))),
        num_peer_copies=int(np.count_nonzero(peers)),
        peer_copy_ms=length_ms(union(timeline.intervals(peers))),
        num_same_stream_overlaps=_num_same_stream_overlaps(work),
        truncated_steps=tuple(
            mark.step
            for mark in marks
            if bool(((work.dropped_ns >= mark.start_ns) & (work.dropped_ns < mark.end_ns)).any())
        ),
        notes=tuple(work.notes),
    )


def _is_op(timeline: Timeline, op: str) -> Flags:
    if op not in timeline.ops:
        return np.zeros(len(timeline), dtype=bool)
    return np.asarray(timeline.op == timeline.ops.index(op))


def _num_same_stream_overlaps(work: Activities) -> int:
    kernels = np.flatnonzero(work.category == Category.KERNEL)
    order = kernels[np.lexsort((work.start_ns[kernels], work.stream[kernels]))]
    is_same_stream = work.stream[order][1:] == work.stream[order][:-1]
    return int(np.count_nonzero(is_same_stream & (work.start_ns[order][1:] < work.end_ns[order][:-1])))


def indexed(values: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Distinct values in order of appearance, and the index of each value."""
    index = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return tuple(index), np.fromiter(map(index.__getitem__, values), np.int32, len(values))


def stream_labels(
    devices: Sequence[object], streams: Sequence[object]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Labels of streams: '7', or '2:7' (device:stream) where there are several devices."""
    if len(set(devices)) > 1:
        return indexed([f"{device}:{stream}" for device, stream in zip(devices, streams, strict=True)])
    return indexed(list(map(str, streams)))


def nanoseconds(values: Sequence[int], location: str) -> Ints:
    """Whole nanoseconds as an array; TraceError for what no clock gives."""
    try:
        return np.array(values, dtype=np.int64).reshape(-1)
    except (OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"{location} has times that no clock gives: {error}") from error
