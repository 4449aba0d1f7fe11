"""Traces as runs of a report: one rank after another is reduced to its numbers, then the ranks are put
side by side.

Step windows hold all work that ran in them, whoever launched it; a step's list of collectives holds those
that it launched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import TraceError
from aorta.ranks.match_by_order import RankCalls
from aorta.ranks.waits import (
    Doing,
    ExposedSplit,
    RankView,
    Straggler,
    doing,
    exposed_parts,
    late_windows,
    match_ranks,
    split_exposed,
    stragglers,
)
from aorta.records.schema import RunRecord, StepRecord
from aorta.records.schema import Source as RecordSource
from aorta.report.load.arrivals import RankWaits, arrivals
from aorta.report.load.collectives import add_waits_of_kinds
from aorta.report.load.rank.columns import RankFile
from aorta.report.load.rank.kernels import kernel_name
from aorta.report.load.rank.reduce import reduce_records
from aorta.report.load.run import RunFiles, assemble
from aorta.report.load.traces.record_calls import Row
from aorta.report.load.traces.steps import NOT_IN_TRACE, OF_KIND, WHOLE_WINDOW, step_records, windows_of
from aorta.report.load.waits import StepWaits, add_waits
from aorta.report.metrics import of_operation
from aorta.report.model import Arrivals, CollectiveKind, NamedSpan, Progress, Run
from aorta.report.numbers import number
from aorta.timeline.intervals import clip, length_ms, union
from aorta.timeline.overlap import total
from aorta.timeline.types import Kind, Total
from aorta.traces.calls import rank_calls
from aorta.traces.model import NS_PER_MS
from aorta.traces.quality import Finding, RankFacts, facts, truncated, verdict, verdict_of_ranks
from aorta.traces.reading import Reading
from aorta.traces.sources import Source, map_ranks, open_source
from aorta.traces.steps import StepRule

Floats = NDArray[np.float64]

EARLIEST_UNIX_NS = 10**18
"""September 2001: earlier times are of a clock that began with the machine or the trace."""
LONGEST_APART_NS = 3_600_000_000_000
"""Between ranks of one run; clocks of machines differ by less."""
MAX_DOING = 3
"""Stragglers whose traces are read again for what they were doing."""


@dataclass(slots=True)
class RankSummary:
    """Numbers of the trace of one rank."""

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
    unmarked = [summary.rank for summary in summaries if not summary.facts.steps]
    if unmarked and len(unmarked) < len(summaries):
        notes.append(
            f"warning: rank {_ranks_text(unmarked)} marks no steps while others do: the whole window of each"
            " rank counts as one step"
        )
        reading = replace(reading, steps=StepRule(is_off=True))
        summaries = list(reduce(source, reading=reading))
    _check_times(source, summaries)
    sides = put_side_by_side(source, summaries, reading=reading)
    run = _run(source, label, summaries, reading)
    rows = [(summary.calls, summary.step_of_call, summary.windows) for summary in summaries]
    _add_waits(run, rows, sides.view)
    run = replace(
        run,
        arrivals=_arrivals(run, rows, sides.view),
        clock_offset_ns=sides.view.clock.moved_ns(),
        kernels=partial(kernels_of, source, reading),
    )
    run.notes[:0] = [*source.notes, *notes, *describe(summaries), *describe_ranks(sides)]
    return run


def _check_times(source: Source, summaries: Sequence[RankSummary]) -> None:
    """Ranks of one run run at the same time. Clocks of boots tell nothing of that."""
    ranks = [rank_facts.facts for rank_facts in summaries]
    if len(ranks) < 2 or min(rank_facts.start_unix_ns for rank_facts in ranks) < EARLIEST_UNIX_NS:
        return
    last, first = (
        max(ranks, key=lambda rank_facts: rank_facts.start_unix_ns),
        min(ranks, key=lambda rank_facts: rank_facts.end_unix_ns),
    )
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
    windows = {step: window for step, window in windows_of(trace)}
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


def records_of(
    source: Source, world_size: int, reading: Reading, _source: RecordSource, rank: int
) -> Iterator[StepRecord]:
    """One rank's steps with all their details, read again."""
    return step_records(reading.read(source, rank), world_size)


def kernels_of(source: Source, reading: Reading, rank: int) -> Iterator[tuple[int, list[NamedSpan]]]:
    """One rank's kernels that are not communication, in the window of each step, read again."""
    trace = reading.read(source, rank)
    for step, window in windows_of(trace):
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
    view = match_ranks([summary.calls for summary in summaries])
    splits = [
        split_exposed(summary.calls, waits) for summary, waits in zip(summaries, view.waits, strict=True)
    ]
    late = stragglers(view, splits)
    doing_by_rank = {}
    for summary in late[:MAX_DOING]:
        row = view.ranks.index(summary.rank)
        trace = reading.read(source, summary.rank)
        doing_by_rank[summary.rank] = doing(
            trace.timeline, late_windows(summaries[row].calls, view.waits[row])
        )
    return Sides(view, splits, late, doing_by_rank)


def _totals(summary: RankSummary) -> dict[str, float | int | None]:
    totals: dict[str, float | int | None] = msgspec.structs.asdict(summary.sums)
    return totals | dict.fromkeys((name for kind in summary.untimed for name in OF_KIND[kind]), None)


def _run(source: Source, label: str, summaries: Sequence[RankSummary], reading: Reading) -> Run:
    if not summaries:
        raise TraceError(f"{source.path} holds no rank")
    world_size = source.world_size or len(source.ranks)
    run = assemble(
        RunFiles(
            source.path,
            label,
            [summary.columns for summary in summaries],
            run_record(summaries, world_size),
            records=partial(records_of, source, world_size, reading),
            totals={summary.rank: _totals(summary) for summary in summaries},
        ),
        [],
    )
    return _without_unknown_sizes(run, summaries)


def run_record(summaries: Sequence[RankSummary], world_size: int) -> RunRecord:
    """Facts that traces give about a run: devices and versions, and no configuration."""
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
        started_unix_ns=min(summary.facts.start_unix_ns for summary in summaries),
        finished_unix_ns=max(summary.facts.end_unix_ns for summary in summaries),
        world_size=world_size,
        command=[],
        config=None,
        model=None,
        layout=None,
        versions=dict(summaries[0].versions),
        devices=[
            {"name": summary.device, "host": summary.host}
            for summary in summaries
            if summary.device is not None
        ],
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
        for summary in summaries
        for op, size in zip(summary.calls.op, summary.calls.size_bytes, strict=True)
        if size is None
    }
    for op in unknown:
        for name in (of_operation("bytes", op), of_operation("busbw_gb_s", op)):
            if name in run.metrics:
                run.metrics[name][:] = np.nan
    alone = {
        op
        for summary in summaries
        for op, key in zip(summary.calls.op, summary.calls.group, strict=True)
        if key.ranks is None
    }
    for op in alone:
        if (name := of_operation("busbw_gb_s", op)) in run.metrics:
            run.metrics[name][:] = np.nan
    return run


def _add_waits(run: Run, rows: Sequence[Row], view: RankView) -> None:
    """Adds exposed_wait_ms, and waits and transfers per operation and kind of collective.

    Nothing is added for a rank and step with a collective between ranks that was not matched."""
    if len(run.ranks) < 2:
        return
    place = {int(step): i for i, step in enumerate(run.global_step)}
    exposed_wait = np.full((len(run.ranks), run.num_steps), np.nan)
    step_waits = []
    for r, ((calls, step_of_call, windows), waits) in enumerate(zip(rows, view.waits, strict=True)):
        parts = exposed_parts(calls, waits)
        waiting = union(np.concatenate([*parts.wait.values()])) if parts.wait else None
        unknown = np.isnan(waits.wait_ms)
        for step, window in windows.items():
            if step in place and not unknown[_is_in_window(calls, window)].any():
                exposed_wait[r, place[step]] = 0.0 if waiting is None else length_ms(clip(waiting, *window))
        column = np.array([place.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        step_waits.append(StepWaits(np.array(calls.op, dtype=str), column, waits))
    if np.isfinite(exposed_wait).any():
        run.metrics["exposed_wait_ms"] = exposed_wait
    add_waits(run.metrics, step_waits, run.num_steps)
    detailed = {int(step): i for i, step in enumerate(run.global_step[run.has_collectives])}
    for r, ((calls, step_of_call, _), waits) in enumerate(zip(rows, view.waits, strict=True)):
        column = np.array([detailed.get(step, -1) for step in step_of_call.tolist()], dtype=np.int64)
        add_waits_of_kinds([(kind, _is_of(kind, calls)) for kind in run.collectives], r, column, waits)


def _is_of(kind: CollectiveKind, calls: RankCalls) -> NDArray[np.bool_]:
    """[call]: as far as the trace tells, it is of this kind."""
    belongs = [
        op == kind.op
        and (kind.bytes is None or size == kind.bytes)
        and (kind.num_ranks is None or key.ranks is None or len(key.ranks) == kind.num_ranks)
        for op, size, key in zip(calls.op, calls.size_bytes, calls.group, strict=True)
    ]
    return np.array(belongs, dtype=bool)


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


def _is_in_window(calls: RankCalls, window: tuple[float, float]) -> NDArray[np.bool_]:
    start = (calls.start_ns - calls.origin_ns) / NS_PER_MS
    end = (calls.end_ns - calls.origin_ns) / NS_PER_MS
    return np.asarray((start < window[1]) & (end > window[0]))


# ---- in words ----------------------------------------------------------------------------------


def describe(summaries: Sequence[RankSummary]) -> list[str]:
    """Lines on gaps in the traces, one for the same finding of several ranks."""
    lines = [f"{f.severity}: {f.text}" for f in verdict_of_ranks([summary.facts for summary in summaries])]
    by_text: dict[str, list[int]] = {}
    for summary in summaries:
        for finding in summary.findings:
            by_text.setdefault(f"{finding.severity}: {finding.text}", []).append(summary.rank)
    for text, ranks in sorted(by_text.items(), key=lambda item: not item[0].startswith("warning")):
        lines.append(text if len(ranks) == len(summaries) else f"{text} (rank {_ranks_text(ranks)})")
    cut: dict[int, str] = {}
    for summary in summaries:
        cut.update(summary.truncated)
    lines += [f"note: step {step} may be cut off: {reason}" for step, reason in sorted(cut.items())]
    if summaries and all(not summary.facts.steps for summary in summaries):
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
    for late in sides.stragglers[:MAX_DOING]:
        text = f"rank {late.rank} arrived last in {late.num_late} of {late.num_judged} collectives"
        text += f" and cost the others {number(late.caused_ms)} ms of exposed waiting in all"
        late_doing = sides.doing.get(late.rank)
        lines.append(
            text + (f": {describe_doing(late_doing)}" if late_doing and late_doing.window_ms > 0 else "")
        )
    return lines


def describe_doing(late_doing: Doing) -> str:
    busy = ", ".join(f"{kernel_name(name)} {number(ms)} ms" for name, ms in late_doing.kernels)
    idle, window = number(late_doing.idle_ms), number(late_doing.window_ms)
    text = f"of {window} ms before it came its compute stream was idle {idle} ms"
    if late_doing.comm_ms > 0:
        text += f" ({number(late_doing.comm_ms)} ms of it in other collectives)"
    return f"{text}, and ran {busy}" if busy else text


def _ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
