"""Writes {label}.perfetto.json.gz: a run in Chrome's trace format, which opens in ui.perfetto.dev.

A rank is a process. Its tracks: the steps, what the time went to (compute, hidden, exposed, idle: a
partition of the window), every collective with its numbers, copies, and counters of the device. Steps of
kernel records that keep every kernel (one in 20) also give one track per device stream.

Times are µs since an origin that is written beside them, ns in the decimals: µs since 1970 would lose
the ns in readers that use doubles.
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aorta._version import __version__
from aorta.errors import RecordError
from aorta.files import replacing
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.timeline.types import COPY, Segment

COMPUTE, HIDDEN, EXPOSED, IDLE = "compute", "compute + comm (hidden)", "exposed comm", "idle"
"""Slices of the overlap track: communication is HIDDEN and EXPOSED, compute COMPUTE and HIDDEN."""
STEPS, OVERLAP, COPIES, HOST = "steps", "overlap", "copies", "host"
ROUNDING_NS = 100
"""How far slices that meet may overlap, because their ends were rounded apart."""
PIDS_APART = 1000
"""Distance between the process ids of two ranks, so that only the steps have the thread id of their process:
Perfetto calls that one the main thread and puts it first."""
LEAD_NS = 3600 * 10**9
"""The origin is this long before the first record, so that ranks that began earlier have no negative time."""
COUNTERS = {
    "power_w": "power, W",
    "sm_clock_mhz": "SM clock, MHz",
    "memory_clock_mhz": "memory clock, MHz",
    "temperature_c": "temperature, °C",
    "utilization_percent": "utilization, %",
    "memory_used_bytes": "memory used on the device, bytes",
}
MEMORY_COUNTERS = {
    "allocated_bytes": "memory allocated, bytes",
    "reserved_bytes": "memory reserved, bytes",
}

Event = dict[str, Any]


def write_perfetto(
    path: Path | str,
    label: str,
    records: Iterable[StepRecord],
    *,
    offset_ns: Mapping[int, int] | None = None,
    kernel_names: Mapping[int, Sequence[str]] | None = None,
) -> int:
    """Write the trace of a run, one step at a time; returns the number of events.

    records are the steps of all ranks; those of one rank in the order of their steps. offset_ns is added
    to every time of a rank: what brings the ranks' clocks together where the clock of the records does
    not. kernel_names: by rank, what lines of kernel records
    refer to, for the steps that keep every kernel. Without any record the trace is valid and empty.
    """
    try:
        with (
            replacing(path) as raw,
            gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file,
        ):
            num_events = _write(file, label, records, offset_ns or {}, kernel_names or {})  # type: ignore[arg-type]
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
    return num_events


def _write(
    file: BinaryIO,
    label: str,
    records: Iterable[StepRecord],
    offset_ns: Mapping[int, int],
    kernel_names: Mapping[int, Sequence[str]],
) -> int:
    encode = msgspec.json.Encoder().encode
    origin_ns: int | None = None
    ranks: dict[int, _Rank] = {}
    num_events = 0
    for record in records:
        if origin_ns is None:
            origin_ns = record.start_unix_ns - LEAD_NS
            file.write(_head(label, origin_ns, offset_ns))
        rank = ranks.get(record.rank)
        if rank is None:
            rank = ranks[record.rank] = _Rank(record.rank, label, kernel_names.get(record.rank, ()))
        for event in rank.record(record, record.start_unix_ns + offset_ns.get(record.rank, 0) - origin_ns):
            file.write(b",\n" if num_events else b"\n")
            file.write(encode(event))
            num_events += 1
    if origin_ns is None:
        file.write(_head(label, 0, offset_ns))
    file.write(b"\n]}\n")
    return num_events


def _head(label: str, origin_ns: int, offset_ns: Mapping[int, int]) -> bytes:
    metadata = {
        "label": label,
        "origin_unix_ns": origin_ns,
        "rank_offset_ns": {str(rank): offset for rank, offset in offset_ns.items()},
        "written_by": f"aorta {__version__}",
    }
    return b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(metadata) + b',"traceEvents":['


class _Rank:
    """Makes the events of one rank.

    Slices of a track never overlap: one that would goes to another track beside it.
    """

    def __init__(self, rank: int, label: str, kernel_names: Sequence[str]) -> None:
        self.pid = PIDS_APART * (rank + 1)  # process 0 is the idle process to readers of this format
        self._name = f"rank {rank}" + (f" ({label})" if label else "")
        self._rank = rank
        self._named = False
        self._kernel_names = kernel_names
        self._lanes: dict[str, list[tuple[int, int]]] = {}
        """Threads that show each track: (id, end of its last slice in ns)."""
        self._num_others = 0
        """Threads besides the first, which shows the steps."""
        self._sampled_ns: int | None = None

    def record(self, record: StepRecord, start_ns: int) -> Iterator[Event]:
        yield from self._process()
        window_ms = record.step_ms
        if window_ms is not None:
            yield from self._slice(STEPS, start_ns, 0.0, window_ms, f"step {record.global_step}", {
                "global_step": record.global_step, "epoch": record.epoch, "source": record.source,
                "loss": record.loss, "tokens": record.tokens, "comm_ms": record.overlap.comm_ms,
                "compute_ms": record.overlap.compute_ms, "exposed_ms": record.overlap.exposed_ms,
                "idle_ms": record.overlap.idle_ms, "clock_error_us": record.clock_error_us,
            })  # fmt: skip
        if record.active_segments is not None:
            yield from self._segments(record.active_segments, start_ns, window_ms)
        for collective in sorted(record.collectives or (), key=lambda row: row.start_ms or 0.0):
            if collective.start_ms is not None and collective.end_ms is not None:
                yield from self._slice(
                    f"collectives: {collective.stream}", start_ns, collective.start_ms, collective.end_ms,
                    record.name_of(collective),
                    self._collective_args(collective, record),
                )  # fmt: skip
        for span in sorted(record.host_spans or (), key=lambda row: row.start_ms):
            yield from self._slice(
                HOST,
                start_ns,
                span.start_ms,
                span.end_ms,
                span.kind,
                {"where": span.where, "bytes": span.bytes},
            )
        yield from self._kernels(record, start_ns)
        yield from self._counters(record, start_ns)

    def _kernels(self, record: StepRecord, start_ns: int) -> Iterator[Event]:
        """Kernels of a step that keeps all of them; communication too, besides its collectives."""
        if record.kernels is None or record.kernels.spans is None:
            return
        for span in record.kernels.spans:
            is_named = span.name < len(self._kernel_names)
            kernel = self._kernel_names[span.name] if is_named else ""
            yield from self._slice(
                f"stream {span.stream}", start_ns, span.start_ms, span.start_ms + span.duration_ms,
                kernel or "kernel", {"kind": "kernel", "global_step": record.global_step},
            )  # fmt: skip

    def _process(self) -> Iterator[Event]:
        if not self._named:
            self._named = True
            yield self._metadata_event("process_name", self.pid, {"name": self._name})
            yield self._metadata_event("process_sort_index", self.pid, {"sort_index": self._rank})

    def _segments(self, segments: list[Segment], start_ns: int, hi: float | None) -> Iterator[Event]:
        if hi is None:
            hi = max((segment.end_ms for segment in segments), default=0.0)
        for begin, end, state in states(segments, 0.0, hi):
            yield from self._slice(OVERLAP, start_ns, begin, end, state, None)
        for segment in segments:
            if COPY in segment.active_streams:
                yield from self._slice(COPIES, start_ns, segment.start_ms, segment.end_ms, "copy", None)

    def _collective_args(self, collective: CollectiveRecord, record: StepRecord) -> dict[str, Any]:
        args: dict[str, Any] = {
            "op": collective.op,
            "bytes": collective.bytes,
            "dtype": collective.dtype,
            "group": collective.group,
            "num_ranks": len(collective.ranks),
            "seq": collective.seq,
            "async": collective.is_async,
            "busbw_gb_s": collective.busbw_gb_s,
            "algbw_gb_s": collective.algbw_gb_s,
            "global_step": record.global_step,
            "module": record.module_of(collective),
            "phase": collective.phase,
        }
        if collective.members:
            args["members"] = [f"{member.op} {member.bytes} bytes" for member in collective.members]
        return args

    def _counters(self, record: StepRecord, start_ns: int) -> Iterator[Event]:
        """The device's sample at its own time, memory at the end of the step."""
        device = record.device
        if device is not None and (self._sampled_ns is None or device.sample_unix_ns > self._sampled_ns):
            self._sampled_ns = device.sample_unix_ns
            at_ns = start_ns + device.sample_unix_ns - record.start_unix_ns
            for field, name in COUNTERS.items():
                if (value := getattr(device, field)) is not None:
                    yield self._counter(name, at_ns, value)
        if record.memory is not None:
            at_ns = start_ns + round((record.step_ms or 0.0) * 1e6)
            for field, name in MEMORY_COUNTERS.items():
                if (value := getattr(record.memory, field)) is not None:
                    yield self._counter(name, at_ns, value)

    def _counter(self, name: str, at_ns: int, value: float) -> Event:
        return {"ph": "C", "name": name, "pid": self.pid, "ts": at_ns / 1000, "args": {"value": value}}

    def _slice(
        self, track: str, start_ns: int, begin_ms: float, end_ms: float, name: str, args: Event | None
    ) -> Iterator[Event]:
        begin_ns, end_ns = start_ns + round(begin_ms * 1e6), start_ns + round(end_ms * 1e6)
        if end_ns <= begin_ns:
            return
        # The first thread of the track that is free: readers of this format nest slices that overlap.
        lanes = self._lanes.setdefault(track, [])
        for i, (tid, busy_ns) in enumerate(lanes):
            if begin_ns >= busy_ns - ROUNDING_NS and end_ns > busy_ns:
                begin_ns = max(begin_ns, busy_ns)
                lanes[i] = (tid, end_ns)
                break
        else:
            tid = self._next_tid(is_main=track == STEPS and not lanes)
            lanes.append((tid, end_ns))
            suffix = f" ({len(lanes)})" if len(lanes) > 1 else ""
            yield self._metadata_event("thread_name", tid, {"name": track + suffix})
            sort_index = {STEPS: 0, OVERLAP: 1}.get(track, 10 + tid - self.pid)
            yield self._metadata_event("thread_sort_index", tid, {"sort_index": sort_index})
        event: Event = {
            "ph": "X",
            "name": name,
            "cat": track,
            "pid": self.pid,
            "tid": tid,
            "ts": begin_ns / 1000,
            "dur": (end_ns - begin_ns) / 1000,
        }
        if args is not None:
            event["args"] = {key: value for key, value in args.items() if value not in (None, "")}
        yield event

    def _next_tid(self, is_main: bool) -> int:
        if is_main:
            return self.pid
        self._num_others += 1
        return self.pid + self._num_others

    def _metadata_event(self, name: str, tid: int, args: Event) -> Event:
        return {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}


def states(segments: list[Segment], lo: float, hi: float) -> Iterator[tuple[float, float, str]]:
    """The window as stretches of COMPUTE, HIDDEN, EXPOSED and IDLE, in order and without gaps."""
    start = lo
    state: str | None = None
    for begin, _, following in _pieces(segments, lo, hi):
        if following != state:
            if state is not None:
                yield start, begin, state
            start, state = begin, following
    if state is not None:
        yield start, hi, state


def _pieces(segments: list[Segment], lo: float, hi: float) -> Iterator[tuple[float, float, str]]:
    """Stretches as `states` gives, but neighbours may have the same state."""
    position = lo
    for segment in segments:
        begin, end = max(segment.start_ms, position), min(segment.end_ms, hi)
        if end > begin:
            if begin > position:
                yield position, begin, IDLE
            yield begin, end, _state(segment)
            position = end
    if hi > position:
        yield position, hi, IDLE


def _state(segment: Segment) -> str:
    active = set(segment.active_streams)
    computes, communicates = "compute" in active, bool(active - {"compute", COPY})
    if communicates:
        return HIDDEN if computes else EXPOSED
    return COMPUTE if computes else IDLE
