"""Reads Kineto traces of a run into dependency graphs, one per step: calls, device work, synchronisation."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from aorta.errors import ReplayError, TraceError
from aorta.processes import no_garbage_collection
from aorta.timeline.waits import match_ranks
from aorta.traces.classify import COMM_RULES, Classifier, CommRule, classifier
from aorta.traces.host_calls import is_mark, step_marks
from aorta.traces.kineto import CATEGORIES, LAUNCH_CATEGORIES, rank_trace
from aorta.traces.kineto_file import GraphArgs, GraphEvent, Trace, decode, intervals_ns, timed
from aorta.traces.model import NS_PER_MS, RankTrace, rank_calls
from aorta.traces.sources import TraceFile, open_source
from aorta.why.replay.activity import (
    CallKind,
    Calls,
    RankActivity,
    Scopes,
    StepAnnotation,
    SyncRecord,
    Work,
    WorkKind,
    call_kind,
)
from aorta.why.replay.build import build
from aorta.why.replay.graph import StepGraph, TraceGraph

# ---- from files to graphs ------------------------------------------------------------------------


def steps_of(
    paths: Path | str | Iterable[Path | str],
    rules: Sequence[CommRule] = COMM_RULES,
    within_unix_ns: tuple[int, int] | None = None,
) -> list[StepGraph]:
    """A graph per step that all ranks mark; a single one of the whole trace if none is marked on all.

    paths: a folder, a file or an archive of Kineto traces, or one file per rank. within_unix_ns: when the run
    that they are of began and ended. ReplayError for traces of other formats and of another time, TraceError
    if a file is no trace or has no device work.
    """
    files = _files(paths)
    traces: list[RankTrace] = []
    activities: list[RankActivity] = []
    for rank, file in sorted(files.items()):
        data = file.data()
        with no_garbage_collection():
            decoded = decode(data, file.name, GraphArgs)
            trace = rank_trace(decoded, file.name, rules=rules)
            timeline = trace.timeline  # computed here, where garbage is not collected: it makes many objects
            activity = read_activity(decoded, file.name, trace, rules)
        began_ns = timeline.origin_unix_ns + round(timeline.window_ms[0] * NS_PER_MS)
        if within_unix_ns is not None and not within_unix_ns[0] <= began_ns <= within_unix_ns[1]:
            raise ReplayError(f"{file.name} is of another time than the run's steps")
        activity.rank = rank
        traces.append(trace)
        activities.append(activity)
    return steps(build_graph(traces, activities))


def _files(paths: Path | str | Iterable[Path | str]) -> dict[int, TraceFile]:
    given = paths if isinstance(paths, Path | str) else list(map(Path, paths))
    if given == []:
        raise TraceError("no trace was given")
    source = open_source(given)
    if unread := next((file for file in source.files.values() if file.format != "kineto"), None):
        raise ReplayError(f"{unread.name} is {unread.format}: a replay needs Kineto traces with host calls")
    return source.files


def build_graph(traces: Sequence[RankTrace], activities: Sequence[RankActivity]) -> TraceGraph:
    """The graph of ranks that were read."""
    calls = [rank_calls(trace) for trace in traces]
    num_ranks = max(trace.world_size or 1 for trace in traces)
    ranks = [trace.rank for trace in traces]
    view = match_ranks(ranks, calls, are_all=num_ranks <= len(traces)) if len(traces) > 1 else None
    graph = build(activities, calls, view)
    if view is not None:
        graph.notes += view.notes
    if num_ranks > len(traces):
        graph.notes.append(
            f"{len(traces)} of {num_ranks} ranks: waiting for the others is part of the collectives"
        )
    return graph


def steps(graph: TraceGraph) -> list[StepGraph]:
    """The steps of a graph, in order."""
    return [StepGraph(graph, i) for i in range(len(graph.steps))]


# ---- the activity of one rank --------------------------------------------------------------------


def read_activity(
    decoded: Trace[GraphArgs], source: str, trace: RankTrace, rules: Sequence[CommRule]
) -> RankActivity:
    """The activity of the rank whose trace, made of the same events, is `trace`.

    TraceError where they hold no device work that can be used.
    """
    by_category: dict[str | None, list[GraphEvent]] = defaultdict(list)
    for event in decoded.events:
        by_category[event.cat].append(event)
    device_work = [e for cat in CATEGORIES for e in by_category[cat] if e.dur is not None]
    if not device_work:
        raise TraceError(f"{source} holds no device work with a time")
    devices = {e.args.device for e in device_work if e.args is not None}
    if len(devices) > 1:
        raise TraceError(f"{source} holds {len(devices)} GPUs: a replay needs one trace per GPU")
    device_work.sort(key=lambda e: e.ts)
    all_calls = [e for cat in LAUNCH_CATEGORIES for e in by_category[cat] if e.args is not None]
    launching = {e.args.correlation for e in device_work if e.args is not None}
    calls = _calls(all_calls, launching, source)
    place = {c: i for i, c in enumerate(calls.correlation) if c is not None}
    work = _work(device_work, place, source, trace, decoded.base_ns or 0, classifier(tuple(rules)))
    waits = [
        SyncRecord(
            e.args.correlation,
            e.name,
            _stream(e.args.stream),
            _recorded(e.args.recorded),
            _stream(e.args.wait_on_stream),
            e.args.event if isinstance(e.args.event, int) else None,
        )
        for e in by_category["cuda_sync"]
        if e.args is not None and e.args.correlation is not None
    ]
    annotations = by_category["user_annotation"]
    known = {line.step for line in trace.steps}
    marks = [mark for mark in _marks(annotations + by_category["cpu_op"], source) if mark.step in known]
    notes = []
    if not len(calls):
        notes.append("no host calls: the graph holds device work alone, in the order of its streams")
    elif not waits:
        notes.append("no synchronisation events: waits between streams are inferred from times")
    return RankActivity(
        rank=trace.rank,
        calls=calls,
        work=work,
        waits=waits,
        scopes=_scopes(by_category["cpu_op"], annotations, source),
        marks=marks,
        compute_stream=_compute_stream(trace),
        base_ns=decoded.base_ns or 0,
        host_events=_host_events(by_category, marks),
        has_host=bool((work.call >= 0).any()),
        notes=notes,
    )


def _calls(events: list[GraphEvent], launching: set[int | str | None], source: str) -> Calls:
    kinds: dict[str, CallKind | None] = {name: call_kind(name) for name in {e.name for e in events}}
    rows: list[tuple[GraphEvent, CallKind]] = []
    for e in events:
        kind = kinds[e.name]
        if e.args is not None and e.args.correlation in launching and kind is not CallKind.SYNC:
            kind = CallKind.LAUNCH
        if kind is not None:
            rows.append((e, kind))
    rows.sort(key=lambda row: row[0].ts)
    start_ns, end_ns = intervals_ns([e for e, _ in rows], source)
    return Calls(
        start_ns=start_ns,
        end_ns=end_ns,
        kind=np.array([kind for _, kind in rows], dtype=np.int64),
        name=[e.name for e, _ in rows],
        thread=[_thread(e) for e, _ in rows],
        correlation=[e.args.correlation if e.args is not None else None for e, _ in rows],
    )


def _work(
    events: list[GraphEvent],
    place: dict[int | str, int],
    source: str,
    trace: RankTrace,
    base_ns: int,
    rules: Classifier,
) -> Work:
    start_ns, end_ns = intervals_ns(events, source)
    origin_ns = trace.timeline.origin_unix_ns - base_ns
    collectives: dict[tuple[int, str], int] = {
        (round(traced.start_ms * NS_PER_MS) + origin_ns, traced.kernel): i
        for i, traced in enumerate(trace.collectives)
    }
    kind = np.empty(len(events), dtype=np.int64)
    collective = np.full(len(events), -1, dtype=np.int64)
    for i, (e, start) in enumerate(zip(events, start_ns.tolist(), strict=True)):
        place_of = collectives.get((start, e.name))
        if place_of is not None:
            kind[i], collective[i] = WorkKind.COMM, place_of
        elif rules.comm_op(e.name) is not None:
            kind[i] = WorkKind.COMM
        else:
            kind[i] = WorkKind.COMPUTE if e.cat == "kernel" else WorkKind.COPY
    return Work(
        start_ns=start_ns,
        end_ns=end_ns,
        kind=kind,
        name=[e.name for e in events],
        shape=[f"{e.args.grid}{e.args.block}" if e.args is not None else "" for e in events],
        stream=[
            str(e.args.stream if e.args is not None and e.args.stream is not None else e.tid) for e in events
        ],
        call=np.array(
            [place.get(e.args.correlation, -1) if e.args is not None else -1 for e in events],  # type: ignore[arg-type]
            dtype=np.int64,
        ),
        collective=collective,
    )


def _scopes(operators: list[GraphEvent], annotations: list[GraphEvent], source: str) -> Scopes:
    return Scopes(
        [
            (_thread(e), start, end, e.name, is_annotation)
            for events, is_annotation in ((operators, False), (annotations, True))
            for e, start, end in timed(events, source)
        ]
    )


def _marks(events: list[GraphEvent], source: str) -> list[StepAnnotation]:
    rows = [e for e in events if is_mark(e.name)]
    threads: dict[str, int] = {}
    marks = step_marks(
        (e.name, threads.setdefault(_thread(e), len(threads)), start, end)
        for e, start, end in timed(rows, source)
    )
    names = list(threads)
    distinct: dict[int, StepAnnotation] = {}
    for mark in sorted(marks, key=lambda mark: mark.start_ns):
        distinct.setdefault(
            mark.step, StepAnnotation(mark.step, names[mark.process], mark.start_ns, mark.end_ns)
        )
    return list(distinct.values())


def _compute_stream(trace: RankTrace) -> str:
    line = trace.timeline
    return next((line.streams[i] for i in sorted(line.compute_streams)), line.streams[0])


def _host_events(by_category: dict[str | None, list[GraphEvent]], marks: list[StepAnnotation]) -> float:
    num = sum(len(by_category[cat]) for cat in ("cpu_op", "user_annotation", *LAUNCH_CATEGORIES))
    return num / len(marks) if marks else 0.0


def _thread(event: GraphEvent) -> str:
    return f"{event.pid}/{event.tid}"


def _stream(value: int | str | None) -> str | None:
    return None if value is None or str(value).startswith("-") else str(value)


def _recorded(value: int | str | None) -> int | str | None:
    return None if value is None or str(value).startswith("-") else value
