"""Reads a Kineto (torch.profiler) trace: one Timeline of everything, one per step.

Work belongs to the step that launched it: a kernel's correlation id names the runtime call that
launched it, and the step is the one whose CPU annotation contains that call, on any thread of the
process (autograd launches on a thread of its own). Where the GPU runs behind the CPU, windows of
CPU time would give a step's work to its successors.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.timeline.intervals import length_ms, union
from aorta.timeline.overlap import on_compute_stream
from aorta.timeline.types import STEP_ANNOTATION, Kind, Timeline
from aorta.traces.classify import COMM_RULES, UNKNOWN, Classifier, CommRule
from aorta.traces.kineto_comm import Op, classify, group_ranks, read_metadata, size_bytes
from aorta.traces.kineto_file import Event, Trace, decode, is_coarse, nanoseconds, read_bytes

KIND_OF_CATEGORY = {"kernel": Kind.COMPUTE, "gpu_memcpy": Kind.COPY, "gpu_memset": Kind.COPY}
LAUNCH_CATEGORIES = frozenset(("cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "driver"))
KERNEL_LAUNCH = re.compile(r"^(cuda|cu|hip)(Ext)?(Module)?Launch(Cooperative)?Kernel", re.IGNORECASE)
STEP_NAME = re.compile(rf"^(?P<kind>{re.escape(STEP_ANNOTATION)}|ProfilerStep#)(?P<step>\d+)$")
NS_PER_MS = 1_000_000


class TraceCollective(msgspec.Struct, frozen=True, kw_only=True):
    """One communication kernel. What neither metadata nor names tell is None."""

    op: str
    """As in torch.distributed; 'unknown' where nothing tells."""
    start_ms: float
    """Relative to the origin of KinetoTrace.timeline, as end_ms."""
    end_ms: float
    group: str | None
    ranks: list[int] | None
    bytes: int | None
    """The larger of the input and the output of this rank."""
    dtype: str | None
    stream: str
    kernel: str
    step: int | None
    """Step that launched it."""
    launch_unix_ns: int | None
    """Start of the runtime call that launched it; None where the trace lacks it."""
    correlation: int | None


@dataclass(frozen=True, slots=True)
class TraceQuality:
    """What the trace lacks. Counts are of GPU activities (kernels, copies, memsets)."""

    num_activities: int
    num_unlinked: int
    """Without the runtime call that launched them: started before the trace did, as a rule."""
    num_outside_steps: int
    """In the whole window, in no step: unlinked, or launched before the first or after the last step."""
    num_launches_without_kernel: int
    """Kernel launches whose kernel the trace lacks: dropped, or not finished when it ended."""
    num_before_launch: int
    """Activities that start before the call that launched them: host and device clocks disagree."""
    worst_before_launch_us: float
    num_unknown_collectives: int
    num_comm_by_metadata_alone: int
    """Classified as communication by metadata though no rule knows the kernel's name."""
    truncated_steps: tuple[int, ...]
    """Steps that lack the kernel of one of their launches."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KinetoTrace:
    rank: int
    world_size: int | None
    device: str | None
    timeline: Timeline
    """Everything on the GPU; window from the first activity's start to the last one's end."""
    steps: list[Timeline]
    """Work launched by each step, same origin as timeline. The window starts when the compute stream
    reaches the step: the later of the step's start on the CPU and the end of the compute stream's
    earlier work; it ends where the next step's starts, the last one's when its own compute-stream
    work and CPU annotation have ended."""
    collectives: list[TraceCollective]
    quality: TraceQuality
    launch_step: NDArray[np.int64] = field(repr=False)
    """Index into steps of every span of timeline, -1 where it belongs to none."""

    def window(self, start_unix_ns: int, end_unix_ns: int) -> Timeline:
        """Everything that ran in a window of time, whoever launched it."""
        origin = self.timeline.origin_unix_ns
        return self.timeline.clipped((start_unix_ns - origin) / NS_PER_MS, (end_unix_ns - origin) / NS_PER_MS)


def read_kineto(
    path: Path | str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    compute_streams: Iterable[int | str] | None = None,
) -> KinetoTrace:
    """The trace of a .json or .json.gz file.

    compute_streams: ids of the streams on which the program computes, as in the trace; left out, the
    one with the longest union of kernels that are not communication.
    """
    data = read_bytes(path)
    return parse_kineto(data, str(path), rules=rules, compute_streams=compute_streams)


def parse_kineto(
    data: bytes,
    where: str,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
    compute_streams: Iterable[int | str] | None = None,
) -> KinetoTrace:
    """read_kineto for bytes at hand; where names them in errors."""
    trace = decode(data, where)
    try:
        return _assemble(trace, where, Classifier(rules), compute_streams)
    except OverflowError as error:
        raise TraceError(f"{where} has times that no clock gives: {error}") from error


def _assemble(
    trace: Trace, where: str, classifier: Classifier, compute_streams: Iterable[int | str] | None
) -> KinetoTrace:
    activities = [e for e in trace.events if e.cat in KIND_OF_CATEGORY and e.ph == "X"]
    if not activities:
        raise TraceError(f"{where} holds no GPU activity (kernels, copies): was the GPU traced?")
    launches: dict[int | str | None, Event] = {
        e.args.correlation: e
        for e in trace.events
        if e.cat in LAUNCH_CATEGORIES and e.args is not None and e.args.correlation is not None
    }
    launch_of = [launches.get(e.args.correlation) if e.args else None for e in activities]
    ops, num_by_metadata = classify(activities, launch_of, read_metadata(trace.events), classifier)

    whole, notes = _whole(trace, where, activities, ops, compute_streams)
    marks = _step_marks(trace.events)
    launch_ns = nanoseconds([launch.ts if launch else 0 for launch in launch_of])
    step_of = _steps_of(marks, launch_of, launch_ns)
    windows = _step_windows(marks, whole, launch_of, launch_ns, trace.base_ns or 0)
    is_comm = whole.kind == Kind.COMM
    in_order = np.flatnonzero(is_comm)[np.argsort(whole.start_ms[is_comm], kind="stable")].tolist()
    return KinetoTrace(
        rank=whole.rank,
        world_size=trace.distributed.world_size if trace.distributed else None,
        device=_device_name(trace, activities),
        timeline=whole,
        steps=[
            replace(whole.select(step_of == i), step=mark.step, window_ms=window)
            for i, (mark, window) in enumerate(zip(marks, windows, strict=True))
        ],
        collectives=[
            TraceCollective(
                op=ops[i].name,
                start_ms=float(whole.start_ms[i]),
                end_ms=float(whole.end_ms[i]),
                group=_text(ops[i].args.group if ops[i].args else None),
                ranks=group_ranks(ops[i].args, trace.distributed),
                bytes=size_bytes(ops[i].args),
                dtype=_text(ops[i].args.dtype if ops[i].args else None),
                stream=whole.streams[whole.stream[i]],
                kernel=activities[i].name,
                step=marks[step_of[i]].step if step_of[i] >= 0 else None,
                launch_unix_ns=int(launch_ns[i]) + (trace.base_ns or 0) if launch_of[i] else None,
                correlation=activities[i].args.correlation if activities[i].args else None,
            )
            for i in in_order
        ],
        quality=_quality(
            activities, launches, launch_of, launch_ns, step_of, marks, ops, num_by_metadata, notes
        ),
        launch_step=step_of,
    )


def _whole(
    trace: Trace,
    where: str,
    activities: list[Event],
    ops: list[Op],
    compute_streams: Iterable[int | str] | None,
) -> tuple[Timeline, list[str]]:
    start_ns = nanoseconds([e.ts for e in activities])
    end_ns = start_ns + nanoseconds([e.dur or 0 for e in activities])
    origin_ns = int(start_ns.min())
    start_ms, end_ms = (start_ns - origin_ns) / NS_PER_MS, (end_ns - origin_ns) / NS_PER_MS
    kind = np.array(
        [
            Kind.COMM if op.comm else KIND_OF_CATEGORY[e.cat or ""]
            for e, op in zip(activities, ops, strict=True)
        ],
        dtype=np.int8,
    )
    streams, stream = _streams(activities)
    op_names, op_index = _indexed([op.name for op in ops])
    names, name_index = _indexed([e.name for e in activities])

    notes = []
    if is_coarse(activities):
        notes.append("times are floats too large for nanoseconds: edges are good to 0.25 µs")
    rank = trace.distributed.rank if trace.distributed else None
    if rank is None:
        rank = _rank_in_name(where)
    if rank is None:
        rank = 0
        notes.append("the trace does not say its rank: 0 is assumed")
    timeline = Timeline(
        rank=rank,
        step=None,
        source="kineto",
        origin_unix_ns=origin_ns + (trace.base_ns or 0),
        window_ms=(0.0, float(end_ms.max())),
        start_ms=start_ms,
        end_ms=end_ms,
        kind=kind,
        stream=stream,
        op=op_index,
        name=name_index,
        streams=streams,
        ops=op_names,
        names=names,
        compute_streams=_compute_streams(streams, stream, kind, start_ms, end_ms, compute_streams, where),
        sees_copies=True,
    )
    return timeline, notes


def _streams(activities: list[Event]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """'7', or '2:7' (device:stream) where the trace holds several devices."""
    where = [
        (e.args.device, e.args.stream if e.args.stream is not None else e.tid) if e.args else (None, e.tid)
        for e in activities
    ]
    several = len({device for device, _ in where}) > 1
    return _indexed([f"{device}:{stream}" if several else str(stream) for device, stream in where])


def _compute_streams(
    streams: tuple[str, ...],
    stream: NDArray[np.int32],
    kind: NDArray[np.int8],
    start_ms: NDArray[np.float64],
    end_ms: NDArray[np.float64],
    given: Iterable[int | str] | None,
    where: str,
) -> frozenset[int]:
    if given is not None:
        wanted = [str(s) for s in given]
        missing = [s for s in wanted if s not in streams]
        if missing:
            raise TraceError(
                f"{where} has no stream {', '.join(missing)}; it has {', '.join(sorted(streams))}"
            )
        return frozenset(streams.index(s) for s in wanted)
    busy_ms = []
    for i in range(len(streams)):
        mask = (stream == i) & (kind == Kind.COMPUTE)
        busy_ms.append(length_ms(union(np.stack((start_ms[mask], end_ms[mask]), axis=1))))
    return frozenset((int(np.argmax(busy_ms)),)) if max(busy_ms) > 0 else frozenset()


def _indexed(values: list[str]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    index: dict[str, int] = {}
    column = [index.setdefault(value, len(index)) for value in values]
    return tuple(index), np.array(column, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _StepMark:
    step: int
    pid: Any
    start_ns: int
    end_ns: int


def _step_marks(events: list[Event]) -> list[_StepMark]:
    """CPU annotations of steps in order of time: aorta's own where there are any, else the profiler's."""
    found: dict[str, list[_StepMark]] = {}
    for e in events:
        if e.ph != "X" or e.cat not in ("user_annotation", "cpu_op"):
            continue
        match = STEP_NAME.match(e.name)
        if match:
            start, length = nanoseconds([e.ts, e.dur or 0]).tolist()
            mark = _StepMark(int(match["step"]), e.pid, start, start + length)
            found.setdefault(match["kind"], []).append(mark)
    marks = found.get(STEP_ANNOTATION) or found.get("ProfilerStep#") or []
    return sorted(marks, key=lambda mark: mark.start_ns)


def _steps_of(
    marks: list[_StepMark], launch_of: list[Event | None], launch_ns: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Index of the step that launched each activity, -1 for none."""
    if not marks:
        return np.full(len(launch_ns), -1, dtype=np.int64)
    starts = np.array([mark.start_ns for mark in marks], dtype=np.int64)
    ends = np.array([mark.end_ns for mark in marks], dtype=np.int64)
    step = np.searchsorted(starts, launch_ns, side="right").astype(np.int64) - 1
    step[(step >= 0) & (launch_ns >= ends[step])] = -1
    for i in np.flatnonzero(step >= 0).tolist():
        launch = launch_of[i]
        if launch is None or launch.pid != marks[step[i]].pid:
            step[i] = -1
    return step


def _step_windows(
    marks: list[_StepMark],
    whole: Timeline,
    launch_of: list[Event | None],
    launch_ns: NDArray[np.int64],
    base_ns: int,
) -> list[tuple[float, float]]:
    """When the compute stream reaches each step, as an event recorded there would tell."""
    if not marks:
        return []
    on_compute = np.flatnonzero(on_compute_stream(whole))
    unlinked = np.array([launch_of[i] is None for i in on_compute.tolist()], dtype=bool)
    launched_ns = np.where(unlinked, np.iinfo(np.int64).min, launch_ns[on_compute])
    order = np.argsort(launched_ns, kind="stable")
    launched_ns = launched_ns[order]
    done_ms = np.maximum.accumulate(whole.end_ms[on_compute][order])

    def reached_ms(cpu_ns: int) -> float:
        cpu_ms = (cpu_ns + base_ns - whole.origin_unix_ns) / NS_PER_MS
        num_before = int(np.searchsorted(launched_ns, cpu_ns, side="left"))
        return max(cpu_ms, float(done_ms[num_before - 1])) if num_before else cpu_ms

    starts = [reached_ms(mark.start_ns) for mark in marks]
    return list(zip(starts, [*starts[1:], reached_ms(marks[-1].end_ns)], strict=True))


def _quality(
    activities: list[Event],
    launches: dict[int | str | None, Event],
    launch_of: list[Event | None],
    launch_ns: NDArray[np.int64],
    step_of: NDArray[np.int64],
    marks: list[_StepMark],
    ops: list[Op],
    num_by_metadata: int,
    notes: list[str],
) -> TraceQuality:
    linked = np.array([launch is not None for launch in launch_of])
    ahead_ns = np.where(linked, launch_ns - nanoseconds([e.ts for e in activities]), 0)
    used = {e.args.correlation for e in activities if e.args}
    dropped_ns = nanoseconds(
        [e.ts for key, e in launches.items() if key not in used and KERNEL_LAUNCH.match(e.name)]
    )
    return TraceQuality(
        num_activities=len(activities),
        num_unlinked=int(np.count_nonzero(~linked)),
        num_outside_steps=int(np.count_nonzero(step_of < 0)),
        num_launches_without_kernel=len(dropped_ns),
        num_before_launch=int(np.count_nonzero(ahead_ns > 0)),
        worst_before_launch_us=float(ahead_ns.max()) / 1000 if (ahead_ns > 0).any() else 0.0,
        num_unknown_collectives=sum(op.comm and op.name == UNKNOWN for op in ops),
        num_comm_by_metadata_alone=num_by_metadata,
        truncated_steps=tuple(
            mark.step
            for mark in marks
            if bool(((dropped_ns >= mark.start_ns) & (dropped_ns < mark.end_ns)).any())
        ),
        notes=tuple(notes),
    )


def _device_name(trace: Trace, activities: list[Event]) -> str | None:
    device = next((e.args.device for e in activities if e.args and e.args.device is not None), None)
    return next((_text(row.get("name")) for row in trace.devices if row.get("id") == device), None)


def _rank_in_name(where: str) -> int | None:
    found = re.findall(r"(?:rank|worker)[-_]?(\d{1,6})", Path(where).name)
    return int(found[-1]) if found else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
