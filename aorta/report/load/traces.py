"""Traces as runs of a report: one rank after another is reduced to its numbers, then the ranks are put
side by side.

Step windows hold all work that ran in them, whoever launched it; a step's list of collectives holds those
that it launched.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.ranks.waits import (
    Doing,
    ExposedSplit,
    GroupKey,
    RankCalls,
    RankView,
    Straggler,
    doing,
    exposed_parts,
    late_windows,
    match_ranks,
    split_exposed,
    stragglers,
)
from aorta.records.schema import CollectiveRecord, RunRecord, StepRecord
from aorta.report.load.arrivals import RankWaits, arrivals
from aorta.report.load.kernels import kernel_name
from aorta.report.load.run import Progress, RankFile, assemble, reduce_records
from aorta.report.model import Arrivals, CollectiveKind, NamedSpan, Run
from aorta.report.numbers import number
from aorta.timeline.collective import algbw_gb_s, busbw_gb_s
from aorta.timeline.intervals import Intervals, clip, intervals, length_ms, subtract, union
from aorta.timeline.overlap import active_segments, overlap, stream_uses, total
from aorta.timeline.types import Kind, OverlapRecord, Timeline, Total
from aorta.traces.calls import rank_calls
from aorta.traces.model import NS_PER_MS, RankTrace, TraceCollective
from aorta.traces.quality import Finding, RankFacts, facts, truncated, verdict, verdict_of_ranks
from aorta.traces.reading import Reading
from aorta.traces.sources import Source, map_ranks, open_source
from aorta.traces.steps import StepRule

Floats = NDArray[np.float64]

WHOLE_WINDOW = 0
"""Step number of the whole window of a trace without steps."""
NOT_IN_TRACE = "a trace does not hold it"
EARLIEST_UNIX_NS = 10**18
"""September 2001: earlier times are of a clock that began with the machine or the trace."""
LONGEST_APART_NS = 3_600_000_000_000
"""Between ranks of one run; clocks of machines differ by less."""
OF_KIND = {
    "comm": ("comm_ms", "hidden_ms", "exposed_ms", "idle_ms"),
    "compute": ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms"),
}
"""Sums that need all spans of a kind."""
MAX_DOING = 3
"""Stragglers whose traces are read again for what they were doing."""


@dataclass(slots=True)
class RankSummary:
    """What is kept of the trace of one rank."""

    rank: int
    world_size: int | None
    device: str | None
    host: str | None
    versions: dict[str, str]
    sums: Total
    """Over the whole window."""
    columns: RankFile
    """Numbers of every step."""
    calls: RankCalls
    step_of_call: NDArray[np.int64]
    """Global step that launched each collective, -1 for none."""
    windows: dict[int, tuple[float, float]]
    """Of each global step, in ms from calls.origin_ns."""
    findings: list[Finding]
    facts: RankFacts
    truncated: dict[int, str]
    devices: tuple[str, ...]
    untimed: dict[str, str]
    """As in RankTrace."""


@dataclass(slots=True)
class Sides:
    """The ranks of one source side by side."""

    view: RankView
    splits: list[ExposedSplit]
    """Exposed communication of each rank over the whole window."""
    stragglers: list[Straggler]
    doing: dict[int, Doing]
    """What the first of the stragglers did while others waited for them."""


def load_traces(
    path: Path | str,
    label: str,
    *,
    jobs: int = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
    partial_ranks: bool = False,
) -> Run:
    """The run whose traces are at path. TraceError or ReportError in one line where it cannot be used.

    Without step markers, and where nothing repeats clearly, the whole window is one step. A trace of several
    devices that is there alone is a rank per device. not_measured["collectives.bytes"] tells where sizes are
    not known.
    """
    source = open_source(path, partial=partial_ranks)
    reduce = partial(reduce_ranks, label=label, jobs=jobs, dask=dask, progress=progress)
    summaries = list(reduce(source, reading=reading))
    if len(summaries) == 1 and len(summaries[0].devices) > 1:
        source = source.by_device(summaries[0].devices)
        summaries = list(reduce(source, reading=reading))
    notes: list[str] = []
    unmarked = [one.rank for one in summaries if not one.facts.steps]
    if unmarked and len(unmarked) < len(summaries):
        notes.append(
            f"warning: rank {_some(unmarked)} marks no steps while others do: the whole window of each rank"
            " counts as one step"
        )
        reading = replace(reading, steps=StepRule(is_off=True))
        summaries = list(reduce(source, reading=reading))
    _check_times(source, summaries)
    sides = put_side_by_side(source, summaries, reading=reading)
    run = _run(source, label, summaries, reading)
    rows = [(one.calls, one.step_of_call, one.windows) for one in summaries]
    add_waits(run, rows, sides.view)
    run = replace(
        run,
        arrivals=_arrivals(run, rows, sides.view),
        clock_offset_ns=_clock_offsets(sides.view),
        kernels=partial(kernels_of, source, reading),
    )
    run.notes[:0] = [*source.notes, *notes, *describe(summaries), *describe_ranks(sides)]
    return run


def _check_times(source: Source, summaries: Sequence[RankSummary]) -> None:
    """Ranks of one run run at the same time. Clocks of boots tell nothing of that."""
    ranks = [one.facts for one in summaries]
    if len(ranks) < 2 or min(one.start_unix_ns for one in ranks) < EARLIEST_UNIX_NS:
        return
    last, first = max(ranks, key=lambda one: one.start_unix_ns), min(ranks, key=lambda one: one.end_unix_ns)
    apart_ns = last.start_unix_ns - first.end_unix_ns
    if apart_ns > LONGEST_APART_NS:
        raise TraceError(
            f"{source.path} mixes runs: rank {last.rank} starts {apart_ns / 3.6e12:.1f} hours after rank"
            f" {first.rank} has ended; keep one run in a folder"
        )


def reduce_ranks(
    source: Source,
    label: str = "",
    *,
    jobs: int = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> Iterator[RankSummary]:
    """Every rank's numbers, in order of ranks; one trace at a time and process."""
    world_size = source.world_size or len(source.ranks)
    reduce = partial(reduce_rank, world_size=world_size, reading=reading)
    for num_done, summary in enumerate(map_ranks(reduce, source, jobs=jobs, dask=dask), start=1):
        if progress is not None:
            progress(label, num_done, len(source.ranks))
        yield summary


def reduce_rank(
    source: Source,
    rank: int,
    *,
    world_size: int,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> RankSummary:
    trace = reading.read(source, rank)
    sums = total(trace.timeline)
    windows = {step: window for step, window in _windows(trace)}
    of_none = -1 if trace.steps else WHOLE_WINDOW
    return RankSummary(
        rank=rank,
        world_size=trace.world_size,
        device=trace.device,
        host=trace.host,
        versions=trace.versions,
        sums=sums,
        columns=reduce_records(Path(source.files[rank].name), step_records(trace, world_size)),
        calls=rank_calls(trace),
        step_of_call=np.array(
            [of_none if c.step is None else c.step for c in trace.collectives], dtype=np.int64
        ),
        windows=windows,
        findings=verdict(trace, sums),
        facts=facts(trace, sums),
        truncated=truncated(trace),
        devices=trace.devices,
        untimed=trace.untimed,
    )


def records_of(source: Source, world_size: int, reading: Reading, rank: int) -> Iterator[StepRecord]:
    """One rank's steps with all their details, read again."""
    return step_records(reading.read(source, rank), world_size)


def kernels_of(source: Source, reading: Reading, rank: int) -> Iterator[tuple[int, list[NamedSpan]]]:
    """One rank's kernels that are not communication, in the window of each step, read again."""
    trace = reading.read(source, rank)
    for step, window in _windows(trace):
        line = trace.timeline.clipped(window[0], max(window))
        is_compute = np.flatnonzero(line.kind == Kind.COMPUTE)
        names = [kernel_name(name) for name in line.names]
        yield (
            step,
            [
                (float(line.start_ms[i] - window[0]), float(line.end_ms[i] - window[0]), names[line.name[i]])
                for i in is_compute.tolist()
            ],
        )


def put_side_by_side(
    source: Source,
    summaries: Sequence[RankSummary],
    *,
    reading: Reading = Reading(),  # noqa: B008 (frozen)
) -> Sides:
    """The ranks matched; the traces of the worst stragglers are read again for what they were doing."""
    view = match_ranks([one.calls for one in summaries])
    splits = [split_exposed(one.calls, waits) for one, waits in zip(summaries, view.waits, strict=True)]
    late = stragglers(view, splits)
    found = {}
    for one in late[:MAX_DOING]:
        row = view.ranks.index(one.rank)
        trace = reading.read(source, one.rank)
        found[one.rank] = doing(trace.timeline, late_windows(summaries[row].calls, view.waits[row]))
    return Sides(view, splits, late, found)


# ---- steps of one trace ------------------------------------------------------------------------


def step_records(trace: RankTrace, world_size: int) -> Iterator[StepRecord]:
    """A record of every step of the trace, or one of the whole window where it has none."""
    by_step: dict[int | None, list[TraceCollective]] = {}
    seq: Counter[str] = Counter()
    numbers: dict[int, int] = {}
    for one in trace.collectives:
        by_step.setdefault(one.step, []).append(one)
        numbers[id(one)] = seq[one.group or ""]
        seq[one.group or ""] += 1
    for step, window in _windows(trace):
        issued = trace.collectives if not trace.steps else by_step.get(step, [])
        yield _record(trace, step, window, issued, numbers, max(world_size, trace.rank + 1))


def _windows(trace: RankTrace) -> list[tuple[int, tuple[float, float]]]:
    if not trace.steps:
        return [(WHOLE_WINDOW, trace.timeline.window_ms)]
    return [(line.step or 0, line.window_ms) for line in trace.steps]


def _record(
    trace: RankTrace,
    step: int,
    window: tuple[float, float],
    issued: Sequence[TraceCollective],
    numbers: dict[int, int],
    world_size: int,
) -> StepRecord:
    start_ms, end_ms = window[0], max(window)
    line = _from_start(trace.timeline.clipped(start_ms, end_ms), step, start_ms)
    computes = {trace.timeline.streams[i] for i in trace.timeline.compute_streams}
    not_measured = dict.fromkeys(("loss", "lr", "grad_norm", "tokens", "host_ms"), NOT_IN_TRACE)
    not_measured["between_steps_ms"] = "a trace does not tell the step's body from what follows it"
    if any(one.bytes is None for one in issued):
        not_measured["collectives.bytes"] = "the trace does not tell the size of every collective"
    for kind, why in trace.untimed.items():
        not_measured |= dict.fromkeys((f"overlap.{name}" for name in OF_KIND[kind]), why)
    return StepRecord(
        rank=trace.rank,
        world_size=world_size,
        epoch=0,
        step=step,
        global_step=step,
        loss=None,
        lr=None,
        grad_norm=None,
        tokens=None,
        source=trace.source,
        start_unix_ns=line.origin_unix_ns,
        clock_error_us=None,
        step_ms=end_ms - start_ms,
        between_steps_ms=None,
        host_ms=None,
        streams=stream_uses(line),
        overlap=_known(overlap(line), trace.untimed),
        active_segments=active_segments(line),
        collectives=[
            _collective(
                one, start_ms, trace.timeline.origin_unix_ns, one.stream in computes, numbers[id(one)]
            )
            for one in issued
        ],
        num_collectives=len(issued),
        not_measured=not_measured,
    )


def _known(found: OverlapRecord, untimed: Mapping[str, str]) -> OverlapRecord:
    """Without what needs kernels whose duration is not known."""
    if not untimed:
        return found
    lost = dict.fromkeys(name for kind in untimed for name in OF_KIND[kind])
    more = ("exposed_copy_ms", "overlap_ratio", "hidden_per_compute", "compute_stream",
            "compute_allreduce_ms", "compute_reducescatter_ms")  # fmt: skip
    return msgspec.structs.replace(found, hidden_by_op={}, exposed_by_op={}, **dict.fromkeys((*lost, *more)))


def _totals(one: RankSummary) -> dict[str, float | int | None]:
    totals: dict[str, float | int | None] = msgspec.structs.asdict(one.sums)
    return totals | dict.fromkeys((name for kind in one.untimed for name in OF_KIND[kind]), None)


def _from_start(line: Timeline, step: int, start_ms: float) -> Timeline:
    """The same with times from the start of its window."""
    return replace(
        line,
        step=step,
        origin_unix_ns=line.origin_unix_ns + round(start_ms * NS_PER_MS),
        window_ms=(0.0, line.window_ms[1] - start_ms),
        start_ms=line.start_ms - start_ms,
        end_ms=line.end_ms - start_ms,
    )


def _collective(
    one: TraceCollective, start_ms: float, origin_ns: int, on_compute: bool, seq: int
) -> CollectiveRecord:
    duration_ms = one.end_ms - one.start_ms
    algbw = busbw = None
    if one.bytes:  # neither unknown nor 0, as a barrier's: that has no bandwidth
        algbw = algbw_gb_s(one.bytes, duration_ms)
        busbw = busbw_gb_s(one.op, one.bytes, len(one.ranks), duration_ms) if one.ranks else None
    launch_ms = None
    if one.launch_unix_ns is not None:
        launch_ms = (one.launch_unix_ns - origin_ns) / NS_PER_MS - start_ms
    return CollectiveRecord(
        op=one.op,
        stream="compute" if on_compute else "group",
        group=one.group or "",
        ranks=one.ranks or [],
        bytes=one.bytes,
        dtype=one.dtype or "",
        seq=seq,
        launch_ms=launch_ms,
        start_ms=one.start_ms - start_ms,
        end_ms=one.end_ms - start_ms,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
    )


# ---- all ranks ---------------------------------------------------------------------------------


def _run(source: Source, label: str, summaries: Sequence[RankSummary], reading: Reading) -> Run:
    if not summaries:
        raise TraceError(f"{source.path} holds no rank")
    world_size = source.world_size or len(source.ranks)
    again = partial(records_of, source, world_size, reading)
    run = assemble(
        source.path,
        label,
        [one.columns for one in summaries],
        run_record(summaries, world_size),
        [],
        lambda _: again,
        {one.rank: _totals(one) for one in summaries},
    )
    return _without_unknown_sizes(run, summaries)


def run_record(summaries: Sequence[RankSummary], world_size: int) -> RunRecord:
    """What the traces tell of the run: devices and versions, and no configuration."""
    missing = (
        "command",
        "config",
        "model",
        "layout",
        "environment",
        "clock_anchors",
        "coverage",
        "placement",
    )
    return RunRecord(
        started_unix_ns=min(one.facts.start_unix_ns for one in summaries),
        finished_unix_ns=max(one.facts.end_unix_ns for one in summaries),
        world_size=world_size,
        command=[],
        config=None,
        model=None,
        layout=None,
        versions=dict(summaries[0].versions),
        devices=[{"name": one.device, "host": one.host} for one in summaries if one.device is not None],
        environment={},
        clock_anchors=[],
        coverage={},
        placement=None,
        not_measured=dict.fromkeys(missing, NOT_IN_TRACE),
    )


def _without_unknown_sizes(run: Run, summaries: Sequence[RankSummary]) -> Run:
    """Bytes and bandwidth are not known where any collective of the operation has no size."""
    unknown = {
        op
        for one in summaries
        for op, size in zip(one.calls.op, one.calls.size_bytes, strict=True)
        if size is None
    }
    for op in unknown:
        for name in (f"bytes.{op}", f"busbw_gb_s.{op}"):
            if name in run.metrics:
                run.metrics[name][:] = np.nan
    alone = {
        op
        for one in summaries
        for op, key in zip(one.calls.op, one.calls.group, strict=True)
        if key.ranks is None
    }
    for op in alone:
        if f"busbw_gb_s.{op}" in run.metrics:
            run.metrics[f"busbw_gb_s.{op}"][:] = np.nan
    return run


Row = tuple[RankCalls, NDArray[np.int64], dict[int, tuple[float, float]]]
"""Of one rank: its calls, the global step that issued each, and the steps' windows in ms from
RankCalls.origin_ns."""


def add_waits(run: Run, rows: Sequence[Row], view: RankView) -> None:
    """Adds to the run's metrics exposed_wait_ms, and per operation wait_ms.<op> and transfer_ms.<op>
    (sums over the collectives that a step issued); to its collectives their wait and transfer.

    Nothing is added for a rank and step with a collective between ranks that was not matched."""
    if len(run.ranks) < 2:
        return
    shape = (len(run.ranks), run.num_steps)
    place = {int(step): i for i, step in enumerate(run.global_step)}
    exposed_wait = np.full(shape, np.nan)
    sums: dict[str, Floats] = {}
    for r, ((calls, step_of_call, windows), waits) in enumerate(zip(rows, view.waits, strict=True)):
        parts = exposed_parts(calls, waits)
        waiting = union(np.concatenate([*parts.wait.values()])) if parts.wait else None
        unknown = np.isnan(waits.wait_ms)
        for step, window in windows.items():
            if step in place and not unknown[_within(calls, window)].any():
                exposed_wait[r, place[step]] = 0.0 if waiting is None else length_ms(clip(waiting, *window))
        column = np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        for op in set(calls.op):
            chosen = np.flatnonzero((column >= 0) & np.array([o == op for o in calls.op], dtype=bool))
            for name, values in (("wait_ms", waits.wait_ms), ("transfer_ms", waits.transfer_ms)):
                into = sums.setdefault(f"{name}.{op}", np.full(shape, np.nan))
                here = np.bincount(column[chosen], minlength=shape[1]) > 0
                found = np.bincount(column[chosen], weights=values[chosen], minlength=shape[1])
                into[r, here] = found[here]
    if np.isfinite(exposed_wait).any():
        run.metrics["exposed_wait_ms"] = exposed_wait
    run.metrics.update({name: values for name, values in sums.items() if np.isfinite(values).any()})
    for kind in run.collectives:
        _add_waits_of(kind, run, rows, view)


def _arrivals(run: Run, rows: Sequence[Row], view: RankView) -> Arrivals | None:
    if len(run.ranks) < 2 or not any(view.num_matched):
        return None
    place = {int(step): i for i, step in enumerate(run.global_step)}
    of_ranks = [
        RankWaits(
            start_ns=calls.start_ns,
            column=np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64),
            num_ranks=np.array(
                [len(key.ranks or ()) or len(run.ranks) for key in calls.group], dtype=np.int64
            ),
            wait_ms=waits.wait_ms,
            late_rank=waits.late_rank,
        )
        for (calls, step_of_call, _), waits in zip(rows, view.waits, strict=True)
    ]
    return arrivals(run.ranks, of_ranks, run.num_steps, view.clock.residual_us)


def _clock_offsets(view: RankView) -> dict[int, int]:
    offsets = zip(view.ranks, view.clock.offset_ns.round().astype(int).tolist(), strict=True)
    return {rank: ns for rank, ns in offsets if ns}


def _within(calls: RankCalls, window: tuple[float, float]) -> NDArray[np.bool_]:
    start = (calls.start_ns - calls.origin_ns) / NS_PER_MS
    end = (calls.end_ns - calls.origin_ns) / NS_PER_MS
    return np.asarray((start < window[1]) & (end > window[0]))


def _add_waits_of(kind: CollectiveKind, run: Run, rows: Sequence[Row], view: RankView) -> None:
    """The mean wait and transfer of the collectives of this kind, in every step with details."""
    place = {int(step): i for i, step in enumerate(run.global_step[run.has_collectives])}
    for r, ((calls, step_of_call, _), waits) in enumerate(zip(rows, view.waits, strict=True)):
        column = np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        chosen = (column >= 0) & np.array(
            [
                op == kind.op
                and (kind.bytes is None or size == kind.bytes)
                and (kind.num_ranks is None or key.ranks is None or len(key.ranks) == kind.num_ranks)
                for op, size, key in zip(calls.op, calls.size_bytes, calls.group, strict=True)
            ],
            dtype=bool,
        )
        num = np.bincount(column[chosen], minlength=len(place))
        for into, values in ((kind.wait_ms, waits.wait_ms), (kind.transfer_ms, waits.transfer_ms)):
            sums = np.bincount(column[chosen], weights=values[chosen], minlength=len(place))
            into[r, num > 0] = sums[num > 0] / num[num > 0]


def calls_of_records(rank: int, records: Iterator[StepRecord]) -> Row | None:
    """The same for a rank's step records; None where it has none with details."""
    ops: list[str] = []
    groups: list[GroupKey] = []
    keys: dict[GroupKey, GroupKey] = {}
    sizes: list[int | None] = []
    times: list[tuple[int, int]] = []
    step_of: list[int] = []
    exposed: list[Intervals] = []
    windows: dict[int, tuple[float, float]] = {}
    origin: int | None = None
    for record in records:
        if record.collectives is None or record.active_segments is None:
            continue
        origin = record.start_unix_ns if origin is None else origin
        offset_ms = (record.start_unix_ns - origin) / NS_PER_MS
        windows[record.global_step] = (offset_ms, offset_ms + (record.step_ms or 0.0))
        exposed.append(_exposed_of(record) + offset_ms)
        for one in record.collectives:
            if one.start_ms is None or one.end_ms is None:
                continue
            ops.append(one.op)
            # One object per group: comparing the ranks of a thousand takes long.
            key = GroupKey(tuple(one.ranks) or None, one.group or None)
            groups.append(keys.setdefault(key, key))
            sizes.append(one.bytes)
            start_ns = record.start_unix_ns + round(one.start_ms * NS_PER_MS)
            times.append((start_ns, start_ns + round((one.end_ms - one.start_ms) * NS_PER_MS)))
            step_of.append(record.global_step)
    if origin is None:
        return None
    start, end = np.array(times, dtype=np.int64).reshape(-1, 2).T
    order = np.argsort(start, kind="stable")
    calls = RankCalls(
        rank=rank,
        op=[ops[i] for i in order],
        group=[groups[i] for i in order],
        size_bytes=[sizes[i] for i in order],
        start_ns=start[order],
        end_ns=end[order],
        exposed=union(np.concatenate(exposed)),
        origin_ns=origin,
    )
    return calls, np.array(step_of, dtype=np.int64)[order], windows


def _exposed_of(record: StepRecord) -> Intervals:
    comm, compute = [], []
    for segment in record.active_segments or ():
        span = (segment.start_ms, segment.end_ms)
        if "compute" in segment.active_streams:
            compute.append(span)
        if any(name not in ("compute", "copy") for name in segment.active_streams):
            comm.append(span)
    return subtract(intervals(comm), intervals(compute))


# ---- in words ----------------------------------------------------------------------------------


def describe(summaries: Sequence[RankSummary]) -> list[str]:
    """What the traces lack: the same finding of several ranks in one line."""
    lines = [f"{f.severity}: {f.text}" for f in verdict_of_ranks([one.facts for one in summaries])]
    by_text: dict[str, list[int]] = {}
    for one in summaries:
        for finding in one.findings:
            by_text.setdefault(f"{finding.severity}: {finding.text}", []).append(one.rank)
    for text, ranks in sorted(by_text.items(), key=lambda item: not item[0].startswith("warning")):
        lines.append(text if len(ranks) == len(summaries) else f"{text} (rank {_some(ranks)})")
    cut: dict[int, str] = {}
    for one in summaries:
        cut.update(one.truncated)
    lines += [f"note: step {step} may be cut off: {why}" for step, why in sorted(cut.items())]
    if summaries and all(not one.facts.steps for one in summaries):
        lines.append("note: the trace marks no steps: its whole window counts as one")
    return lines


def describe_ranks(sides: Sides) -> list[str]:
    """Clock, matching and stragglers."""
    view = sides.view
    if len(view.ranks) < 2:
        return []
    lines = [f"note: {note}" for note in view.notes]
    clock = view.clock
    if clock.residual_us is not None:
        apart_ms = float(np.ptp(clock.offset_ns)) / NS_PER_MS
        moved = f"shifted by up to {number(apart_ms)} ms" if clock.offset_ns.any() else "left as they were"
        lines.append(
            f"note: clocks of ranks {moved}: ends of {clock.num_anchors} collectives agree within"
            f" {clock.residual_us:.1f} µs; who was late is said only above that"
        )
    left = sum(view.num_left)
    if left:
        lines.append(f"note: collectives that were not found on all ranks of their group: {left}")
    for one in sides.stragglers[:MAX_DOING]:
        text = f"rank {one.rank} arrived last in {one.num_late} of {one.num_judged} collectives"
        text += f" and cost the others {number(one.caused_ms)} ms of exposed waiting in all"
        found = sides.doing.get(one.rank)
        lines.append(text + (f": {describe_doing(found)}" if found and found.window_ms > 0 else ""))
    return lines


def describe_doing(found: Doing) -> str:
    busy = ", ".join(f"{kernel_name(name)} {number(ms)} ms" for name, ms in found.kernels)
    idle, whole = number(found.idle_ms), number(found.window_ms)
    text = f"of {whole} ms before it came its compute stream was idle {idle} ms"
    if found.comm_ms > 0:
        text += f" ({number(found.comm_ms)} ms of it in other collectives)"
    return f"{text}, and ran {busy}" if busy else text


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
