"""Changes of the program on the host: its speed, launches, waits for the device, delays.

Each function edits a draft; its form says how a user writes the change.
"""

from collections import defaultdict

import numpy as np

from aorta.timeline.arrays import Floats
from aorta.traces.host_spans import is_data_loading
from aorta.traces.sources import ranks_text
from aorta.why.replay.changes.change import DELAY, FACTOR, UnfitError, form
from aorta.why.replay.draft import Draft
from aorta.why.replay.graph import ArcKind, NodeKind

FEWEST_STEPS = 4
"""Traced steps, the first left out of the usual cost of a call."""
UNEQUAL = 1.25
"""Unchanged steps of one program differ by up to 15 % from minute to minute; hosts that always differ by more
are different."""
UNEQUAL_CALL_NS = 1e6
"""A delay of one rank, rather than a call that varies."""
LONGEST_WORK_NS = 2e6
"""Host time between two calls above which the rest is a sleep or a read, which no profiler slows down."""
GRAPH_LAUNCH_NS = 1_000.0
"""Largest ns from one kernel of a graph to the next."""
RETURN_NS = 10_000.0
"""From the end of the device's work to the return of the call that waits for it."""


@form(
    rf"host(?:\s+of\s+(?P<name>.+?))?\s+{FACTOR}",
    "host x0.5",
    "the program on the host takes this many times as long",
)
def scale_host(draft: Draft, factor: float, name: str | None = None) -> None:
    """The program on the host takes factor times as long; waits for the device stay."""
    nodes = draft.graph.nodes
    if name is None:
        for arc in draft.graph.host_arcs.values():
            draft.scale(arc, factor)
        return
    chosen = [
        node
        for node, kind in enumerate(nodes.kind)
        if kind in (NodeKind.CALL, NodeKind.HOST_STEP) and name.lower() in nodes.program[node].lower()
    ]
    if not chosen:
        raise UnfitError(f"no part of the program has {name!r} in its name")
    for node in chosen:
        for arc in draft.host_arcs(node):
            draft.scale(arc, factor)


def scale_calls(draft: Draft, factor: float) -> None:
    """The host's calls take factor times as long, up to LONGEST_WORK_NS each. What is beyond it is a sleep or
    a read, in which a profiler records no events."""
    for arc in draft.graph.host_arcs.values():
        length = draft.length_ns[arc]
        if length > 0:
            draft.length_ns[arc] = length - (1 - factor) * min(length, LONGEST_WORK_NS)


def typical_host(draft: Draft) -> None:
    """Every call takes as long as it usually does: the median over the traced steps but the first, and over
    all ranks that make the same calls. A single slow step says nothing about the program, and neither do a
    few steps in which one of two equal hosts is ahead."""
    rows = _host_arcs_by_step(draft)
    ranks_of_program: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, steps in rows.items():
        names = {names for names, _ in steps}
        if len(steps) >= FEWEST_STEPS - 1 and len(names) == 1:
            ranks_of_program[names.pop()].append(rank)
    for ranks in ranks_of_program.values():
        lengths = {
            rank: np.array([[draft.length_ns[a] for a in arcs] for _, arcs in rows[rank]]) for rank in ranks
        }
        for rank, usual in _usual_ns(lengths).items():
            for _, arcs in rows[rank]:
                for arc, length in zip(arcs, usual.tolist(), strict=True):
                    draft.length_ns[arc] = length


def _host_arcs_by_step(draft: Draft) -> dict[int, list[tuple[tuple[str, ...], list[int]]]]:
    """Names of the calls and arcs of the host's line, per rank, for all traced steps but the first."""
    nodes = draft.graph.nodes
    calls: dict[tuple[int, int], list[int]] = defaultdict(list)
    for node in sorted(draft.calls(), key=lambda node: nodes.start_ns[node]):
        if nodes.step[node] > 0:
            calls[nodes.rank[node], nodes.step[node]].append(node)
    rows: dict[int, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)
    for (rank, _), members in sorted(calls.items()):
        names: list[str] = []
        arcs: list[int] = []
        for node in members:
            node_arcs = draft.host_arcs(node)
            arcs += node_arcs
            names += [nodes.name[node]] * len(node_arcs)
        rows[rank].append((tuple(names), arcs))
    return rows


def _usual_ns(lengths: dict[int, Floats]) -> dict[int, Floats]:
    """Usual length of every arc by rank, from [step, arc] of ranks that run one program.

    A rank whose host is always slower by more than UNEQUAL, and single calls that always differ by more than
    UNEQUAL_CALL_NS, keep their own lengths.
    """
    rank_medians = {rank: np.median(rank_lengths, axis=0) for rank, rank_lengths in lengths.items()}
    totals = {rank: rank_lengths.sum(axis=1) for rank, rank_lengths in lengths.items()}
    slowest, fastest = max(totals, key=lambda r: totals[r].min()), min(totals, key=lambda r: totals[r].max())
    stacked = np.stack(
        [[rank_lengths.min(axis=0), rank_lengths.max(axis=0)] for rank_lengths in lengths.values()]
    )
    differs = (stacked[:, 0].max(axis=0) > stacked[:, 1].min(axis=0)) & (
        np.ptp(np.stack(list(rank_medians.values())), axis=0) > UNEQUAL_CALL_NS
    )
    # One host is slower in every step, and not only in the calls that always differ.
    if totals[slowest].min() > UNEQUAL * totals[fastest].max():
        equal_parts = {
            rank: np.where(differs, 0.0, rank_lengths).sum(axis=1) for rank, rank_lengths in lengths.items()
        }
        if equal_parts[slowest].min() > UNEQUAL * equal_parts[fastest].max():
            return rank_medians
    common = np.median(np.concatenate(list(lengths.values())), axis=0)
    return {rank: np.where(differs, rank_lengths, common) for rank, rank_lengths in rank_medians.items()}


@form(r"(?:launches\s+as\s+)?graphs", "graphs", "launches replayed from a captured graph")
def launch_graphs(draft: Draft) -> None:
    """A step's launches are replayed from a captured graph: the host's part of them vanishes."""
    nodes = draft.graph.nodes
    loading = {
        arc for node in draft.calls() if is_data_loading(nodes.program[node]) for arc in draft.host_arcs(node)
    }
    for node in draft.calls():
        for arc in draft.host_arcs(node):
            if arc not in loading:
                draft.cut_to(arc, 0.0)
    for node in draft.device_work():
        for arc in draft.incoming(2 * node, ArcKind.STREAM):
            draft.cut_to(arc, GRAPH_LAUNCH_NS)
    draft.notes.append(
        "launches as graphs: data loading stays, everything else on the host is taken to vanish"
    )


@form(r"no\s+sync(?:\s+(?P<name>.+))?", "no sync aten::item", "the host does not wait for the device there")
def without_sync(draft: Draft, name: str | None) -> None:
    """The host does not wait for the device in these calls."""
    nodes = draft.graph.nodes
    num_cut = 0
    for node in draft.calls():
        arcs = draft.incoming(2 * node + 1, ArcKind.SYNC)
        label = f"{nodes.name[node]} {nodes.program[node]}".lower()
        if arcs and (name is None or name.lower() in label):
            num_cut += 1
            for arc in arcs:
                draft.cut(arc)
    if num_cut == 0:
        named = f" with {name!r} in its name" if name else ""
        raise UnfitError(f"the traces hold no wait of the host for the device{named}")


@form(r"sync\s+each\s+step", "sync each step", "the host waits for the device at the end of each step")
def sync_each_step(draft: Draft) -> None:
    """The host waits for all of its device's work at the end of every step."""
    graph = draft.graph
    for end in draft.step_ends():
        for point in (end.first, end.last):
            sources = [graph.arcs.source[arc] for arc in draft.incoming(point, ArcKind.STEP)]
            host = [source for source in sources if graph.nodes.kind[source // 2] == NodeKind.HOST_STEP]
            for host_point in host[:1]:
                for source in sources:
                    if source not in host:
                        draft.add(source, 2 * (host_point // 2), RETURN_NS, ArcKind.SYNC)


@form(r"no\s+loader\s+delay", "no loader delay", "the next batch is always there")
def without_loading(draft: Draft) -> None:
    """The next batch is always there."""
    nodes = draft.graph.nodes
    chosen = [node for node in draft.calls() if is_data_loading(nodes.program[node])]
    if not chosen:
        raise UnfitError("no part of the program in these traces is called a loader")
    for node in chosen:
        for arc in draft.incoming(2 * node, ArcKind.HOST):
            draft.cut_to(arc, 0.0)


@form(
    rf"rank\s+(?P<rank>\d{{1,7}})\s*\+\s*{DELAY}", "rank 1 +20ms", "the host of this rank sleeps at each step"
)
@form(rf"loader\s*\+\s*{DELAY}", "loader +20ms", "every rank waits this long for its batch at each step")
def delay_host(draft: Draft, ms: float, rank: int | None = None) -> None:
    """The host of these ranks takes longer at the beginning of every step."""
    graph = draft.graph
    if rank is not None and rank not in graph.ranks:
        raise UnfitError(f"there is no rank {rank}, but {ranks_text(graph.ranks)}")
    chosen = [
        node
        for node, kind in enumerate(graph.nodes.kind)
        if kind == NodeKind.HOST_STEP and rank in (None, graph.nodes.rank[node])
    ]
    if not chosen:
        raise UnfitError("no step is marked in these traces: nowhere to put a delay")
    for node in chosen:
        for arc in draft.incoming(2 * node + 1, ArcKind.CALL):
            draft.length_ns[arc] += ms * 1e6
