"""Traced steps of a run as dependency graphs."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from aorta.errors import TraceError
from aorta.processes import no_garbage_collection
from aorta.replay.activity import RankActivity
from aorta.replay.build import build
from aorta.replay.graph import StepGraph, TraceGraph
from aorta.replay.kineto import read_activity
from aorta.timeline.waits import match_ranks
from aorta.traces.files import read_bytes
from aorta.traces.kineto import rank_trace
from aorta.traces.kineto_file import decode_for_graph
from aorta.traces.model import RankTrace, rank_calls
from aorta.traces.sniff import read_member
from aorta.traces.sources import Source, TraceFile, open_source


def steps_of(paths: Path | str | Iterable[Path | str]) -> list[StepGraph]:
    """One graph per step that all ranks mark; one of the whole trace where none does.

    paths: a folder, a file or an archive of Kineto traces, or one file per rank. TraceError for what is no
    Kineto trace or has no device work.
    """
    files = _files(paths)
    traces: list[RankTrace] = []
    activities: list[RankActivity] = []
    for rank, file in sorted(files.items()):
        data = read_member(Path(file.paths[0]), file.member) if file.member else read_bytes(file.paths[0])
        with no_garbage_collection():
            decoded = decode_for_graph(data, file.name)
            trace = rank_trace(decoded, file.name)
            trace.timeline  # noqa: B018
            activity = read_activity(decoded, file.name, trace)
        activity.rank = rank
        traces.append(trace)
        activities.append(activity)
    return steps(build_graph(traces, activities))


def build_graph(traces: Sequence[RankTrace], activities: Sequence[RankActivity]) -> TraceGraph:
    """The graph of ranks that were read."""
    calls = [rank_calls(trace) for trace in traces]
    view = match_ranks(calls) if len(traces) > 1 else None
    graph = build(activities, calls, view)
    if view is not None:
        graph.notes += view.notes
    elif traces[0].world_size is not None and traces[0].world_size > 1:
        graph.notes.append(
            f"one rank of {traces[0].world_size}: waiting for other ranks is part of its collectives"
        )
    return graph


def steps(graph: TraceGraph) -> list[StepGraph]:
    return [StepGraph(graph, i) for i in range(len(graph.steps))]


def _files(paths: Path | str | Iterable[Path | str]) -> dict[int, TraceFile]:
    sources: list[Source]
    if isinstance(paths, (Path, str)):
        sources = [open_source(paths, partial=True)]
    else:
        sources = [open_source(path, partial=True) for path in paths]
    files: dict[int, TraceFile] = {}
    for source in sources:
        if source.kind != "kineto":
            raise TraceError(
                f"{source.path} holds {source.kind}: a replay needs Kineto traces with host calls"
            )
        for rank, file in source.files.items():
            if rank in files:
                raise TraceError(f"rank {rank} appears twice, in {files[rank].name} and {file.name}")
            files[rank] = file
    if not files:
        raise TraceError("no trace was given")
    return files
