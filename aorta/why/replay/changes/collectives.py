"""Changes of communication: speed, late ranks, prefetch, buckets, resharding.

Each function edits a draft; its form says how a user writes the change.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aorta.timeline.collective import canonical_op
from aorta.timeline.intervals import distinct
from aorta.traces.sources import ranks_text
from aorta.why.replay.activity import OPTIMIZER_SCOPE, SHARDING_SCOPE
from aorta.why.replay.changes.change import FACTOR, UnfitError, form
from aorta.why.replay.draft import NEVER, Draft
from aorta.why.replay.graph import ArcKind, Nodes, StepGraph, TracedCollective
from aorta.why.replay.run import replay_draft

OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
    "send", "recv", "send_recv", "barrier",
)  # fmt: skip
ANY = ("collectives", "communication", "comm")
_OPS = "|".join((*OPS, *ANY, *(op.replace("_", "") for op in OPS)))
SMALL_BYTES = 1 << 20
"""A collective of less is of a loss or a norm, not of gradients or activations."""
DDP_BUCKET_BYTES = 25 << 20
"""bucket_cap_mb of DistributedDataParallel, where it is not set."""
LATENCY_NS = 20_000.0
"""Latency of a collective if the trace holds too few sizes to tell it."""
GATHER_SCOPE = re.compile(r"FSDP::(all_gather|backward_prefetch|all_gather_copy_out)")


def ops_named(name: str) -> frozenset[str] | None:
    """The operations that a word stands for; None for all of them."""
    if name.lower() in ANY:
        return None
    op = canonical_op(name)
    return frozenset() if op is None else frozenset((op,))


@form(
    rf"(?P<op>{_OPS})(?:\s+(?:of\s+)?\(?(?P<unit>[^\s()]+)\)?)?\s+{FACTOR}",
    "all_gather x0.5",
    "transfers take this many times as long",
)
def scale_collective(draft: Draft, op: str, factor: float, unit: str | None = None) -> None:
    """Transfers take factor times as long; waiting for ranks stays what it is."""
    ops = ops_named(op)
    chosen = draft.collectives(ops, unit)
    if not chosen:
        traced_ops = sorted({collective.op for collective in draft.graph.collectives})
        raise UnfitError(
            f"the traces hold no {' or '.join(ops) if ops else 'collective'}{f' of {unit}' if unit else ''};"
            f" they hold {', '.join(traced_ops) or 'no collective'}"
        )
    for collective in chosen:
        for node in collective.members:
            draft.set_duration(node, draft.duration_ns(node) * factor)


@form(r"rank\s+(?P<rank>\d{1,7})\s+on\s+time", "rank 3 on time", "this rank arrives with the others")
def on_time(draft: Draft, rank: int) -> None:
    """A rank that comes last to a collective comes with the last but one: the time in which the others waited
    is taken out of it."""
    graph = draft.graph
    if rank not in graph.ranks:
        raise UnfitError(f"there is no rank {rank}, but {ranks_text(graph.ranks)}")
    times = replay_draft(StepGraph(graph, 0), draft).time_ns
    for collective in graph.collectives:
        if collective.meeting < 0:
            continue
        arrivals = sorted((times[2 * node], node) for node in collective.members)
        last, since = arrivals[-1], arrivals[-2][0]
        if graph.nodes.rank[last[1]] == rank and last[0] > since:
            _shorten(draft, times, 2 * last[1], since, rank)


def _shorten(draft: Draft, times: list[float], point: int, since: float, rank: int) -> None:
    """Takes the time after `since` out of the arcs of a rank that decided when the point came."""
    arcs = draft.graph.arcs
    while times[point] > since:
        candidates = [arc for arc in draft.incoming(point) if draft.length_ns[arc] > NEVER]
        if not candidates:
            return
        arc = max(candidates, key=lambda arc: times[arcs.source[arc]] + draft.length_ns[arc])
        source = arcs.source[arc]
        if draft.graph.nodes.rank[source // 2] != rank:
            return
        excess = times[point] - max(since, times[source])
        if excess > 0:
            draft.length_ns[arc] -= excess
        point = source


@form(r"(?:all\s+ranks|ranks)\s+on\s+time", "ranks on time", "no rank waits for another")
def without_waiting(draft: Draft) -> None:
    """No rank waits: each rank's transfer begins when it arrives."""
    graph = draft.graph
    for collective in graph.collectives:
        if collective.meeting < 0:
            continue
        for arc in draft.incoming(2 * collective.meeting, ArcKind.ARRIVAL):
            draft.cut(arc)
        for node in collective.members:
            draft.add(2 * node, 2 * node + 1, draft.duration_ns(node), ArcKind.TRANSFER)


@form(
    r"prefetch\s*(?P<units>[+-]\s*\d{1,3})",
    "prefetch +1",
    "gathers are asked for units earlier (-: later)",
    lambda units: "" if units else "by how many units? prefetch +1 or prefetch -1",
)
def prefetch(draft: Draft, units: int) -> None:
    """Gathers of parameters are asked for this many units earlier (later where negative)."""
    graph = draft.graph
    num_moved = 0
    for chain in gather_chains(draft):
        for i in range(len(chain)):
            j = i - units
            if (
                not 0 <= j < len(chain)
                or graph.collectives[chain[j].place].step != graph.collectives[chain[i].place].step
            ):
                continue
            num_moved += 1
            donor = chain[j].starts(draft)
            if donor is None:
                continue
            for node in chain[i].nodes:
                for arc in draft.incoming(2 * node, ArcKind.LAUNCH) + draft.incoming(2 * node, ArcKind.EVENT):
                    if units > 0 and graph.arcs.source[arc] // 2 not in chain[i].nodes:
                        draft.cut(arc)
                if units < 0 or node == chain[i].nodes[0]:
                    for source, length in donor:
                        draft.add(source, 2 * node, length, ArcKind.EVENT)
    if num_moved == 0:
        raise UnfitError("the traces hold no series of all_gathers to move")


@dataclass(frozen=True, slots=True)
class Gather:
    """An all_gather on one rank with the copies that fill its input."""

    place: int
    """Among the graph's collectives."""
    nodes: tuple[int, ...]
    """Nodes in order; the collective is the last."""

    def starts(self, draft: Draft) -> list[tuple[int, float]] | None:
        """Points and lengths that the first node waits for, beside its stream."""
        arcs = draft.graph.arcs
        starts = [
            (arcs.source[arc], arcs.length_ns[arc])
            for node in self.nodes
            for kind in (ArcKind.LAUNCH, ArcKind.EVENT)
            for arc in draft.incoming(2 * node, kind)
            if arcs.source[arc] // 2 not in self.nodes
        ]
        return starts or None


def gather_chains(draft: Draft) -> list[list[Gather]]:
    """Per rank, group and step the all_gathers that a sharded model asks for, in order."""
    graph, nodes = draft.graph, draft.graph.nodes
    rows: dict[tuple[int, str | None, int], list[Gather]] = defaultdict(list)
    copies: dict[tuple[int, str], list[int]] = defaultdict(list)
    for node in draft.device_work():
        if GATHER_SCOPE.search(nodes.unit[node]) and "copy_out" not in nodes.unit[node]:
            copies[nodes.rank[node], nodes.unit[node]].append(node)
    copied: set[int] = set()
    for place, collective in enumerate(graph.collectives):
        if collective.op != "all_gather" or collective.step < 0:
            continue
        for node in collective.members:
            copies_in = [
                c
                for c in copies.get((nodes.rank[node], nodes.unit[node]), ())
                if c not in copied and c < node and nodes.step[c] == nodes.step[node]
                and nodes.start_ns[c] <= nodes.start_ns[node]
            ]  # fmt: skip
            copied.update(copies_in)
            rows[nodes.rank[node], collective.group, collective.step].append(
                Gather(place, (*copies_in, node))
            )
    return list(rows.values())


@form(
    r"(?:no\s+reshard|parameters\s+kept|reshard\s+off)",
    "no reshard",
    "parameters stay gathered after forward",
)
def keep_parameters(draft: Draft) -> None:
    """Parameters stay gathered after forward: what backward gathers again is not gathered."""
    graph, nodes = draft.graph, draft.graph.nodes
    gathered: set[tuple[int, str | None, str]] = set()
    dropped: set[tuple[int, str]] = set()
    num = 0
    for collective in graph.collectives:
        if collective.op != "all_gather" or not collective.unit or collective.step < 0:
            continue
        key = (collective.step, collective.group, collective.unit)
        if key not in gathered:
            gathered.add(key)
            continue
        num += 1
        for node in collective.members:
            draft.set_duration(node, 0.0)
            dropped.add((nodes.rank[node], f"{collective.step}|{collective.unit}"))
    if num == 0:
        raise UnfitError(
            "no all_gather of one unit comes twice in a step (its unit is told by the"
            " annotations FSDP::all_gather (...))"
        )
    _drop_copies(draft, dropped)


def _drop_copies(draft: Draft, dropped: set[tuple[int, str]]) -> None:
    """The copies in and out of the dropped gathers, and the host's part of them: the second half of each
    unit's."""
    nodes = draft.graph.nodes
    nodes_of_unit: dict[tuple[int, str], list[int]] = defaultdict(list)
    for node in draft.device_work():
        unit = re.search(r"\(([^()]+)\)", nodes.unit[node])
        if GATHER_SCOPE.search(nodes.unit[node]) and unit:
            nodes_of_unit[nodes.rank[node], f"{nodes.step[node]}|{unit[1]}"].append(node)
    for key in dropped:
        rows = sorted(nodes_of_unit.get(key, ()), key=lambda node: nodes.start_ns[node])
        for node in rows[len(rows) // 2 :]:
            draft.take_out(node)


@form(
    rf"buckets\s+{FACTOR}",
    "buckets x4",
    "gradient buckets this many times as large",
    lambda factor: "" if factor not in (0, 1) else "a size of buckets other than x1, above 0",
)
def resize_buckets(draft: Draft, factor: float) -> None:
    """Gradients are reduced in buckets factor times as large."""
    latency = latency_ns(draft)
    rows: dict[tuple[str, str | None, int], list[TracedCollective]] = defaultdict(list)
    for collective in draft.graph.collectives:
        if collective.op == "all_reduce" and (collective.size_bytes or 0) > SMALL_BYTES:
            rows[collective.op, collective.group, collective.step].append(collective)
    if not rows:
        raise UnfitError("the traces hold no all_reduce above 1 MiB (FSDP reduces units, not buckets)")
    for (op, _, _), series in rows.items():
        (_merge if factor > 1 else _split)(draft, series, latency.get(op, LATENCY_NS), factor)


def _merge(draft: Draft, series: Sequence[TracedCollective], fixed: float, factor: float) -> None:
    """The last of each handful carries all; the others take no time. The first bucket is smaller than the
    rest and stays, so that reducing begins early."""
    limit = factor * _bucket_bytes(series)
    end = 1
    while end < len(series):
        size, first = 0, end
        while end < len(series) and size < limit:
            size += series[end].size_bytes or 0
            end += 1
        members = series[first:end]
        for rank_nodes in zip(*(collective.members for collective in members), strict=False):
            total = sum(max(0.0, draft.duration_ns(node) - fixed) for node in rank_nodes)
            for node in rank_nodes[:-1]:
                draft.set_duration(node, 0.0)
            draft.set_duration(rank_nodes[-1], total + fixed)


def _split(draft: Draft, series: Sequence[TracedCollective], fixed: float, factor: float) -> None:
    """Add one latency per part to each bucket. In the last bucket all parts but one are reduced before
    the last gradient is there."""
    parts = max(2, round(1 / factor))
    for previous, collective in zip([None, *series[:-1]], series, strict=True):
        for row, node in enumerate(collective.members):
            length = draft.duration_ns(node)
            part = max(0.0, length - fixed) / parts + fixed
            draft.set_duration(node, part if collective is series[-1] else parts * part)
            if collective is series[-1] and previous is not None and row < len(previous.members):
                # After the last part of the bucket before, its stream has all parts to carry.
                draft.add(2 * previous.members[row], 2 * node + 1, (parts + 1) * part, ArcKind.TRANSFER)


def _bucket_bytes(series: Sequence[TracedCollective]) -> int:
    """Bytes at which DDP closes a bucket, DDP's own setting if it agrees. The gradient that reaches the
    limit closes the bucket, so all but the first and the last have at least that many."""
    inner = [collective.size_bytes or 0 for collective in series[1:-1]]
    least = min(inner, default=max(collective.size_bytes or 0 for collective in series))
    return DDP_BUCKET_BYTES if least >= DDP_BUCKET_BYTES else least


def collectives_of_activations(draft: Draft) -> list[TracedCollective]:
    """all_to_all, and the large collectives of groups that communicate in forward too, but for those that
    gather parameters or reduce gradients: tensor and sequence parallelism."""
    graph, nodes = draft.graph, draft.graph.nodes
    launched_by = [_launching_thread(draft, collective.members[0]) for collective in graph.collectives]
    main = {
        nodes.lane[node]
        for node in draft.calls()
        if nodes.step[node] >= 0 and OPTIMIZER_SCOPE.search(nodes.program[node])
    }
    in_forward = {
        collective.group
        for collective, thread in zip(graph.collectives, launched_by, strict=True)
        if thread in main and _is_of_activations(nodes, collective)
    }
    return [
        collective
        for collective in graph.collectives
        if collective.op == "all_to_all"
        or (collective.group in in_forward and _is_of_activations(nodes, collective))
    ]


def _is_of_activations(nodes: Nodes, collective: TracedCollective) -> bool:
    node = collective.members[0]
    scope = f"{nodes.program[node]} {nodes.unit[node]}"
    is_large = collective.size_bytes is None or collective.size_bytes > SMALL_BYTES
    return is_large and not OPTIMIZER_SCOPE.search(scope) and not SHARDING_SCOPE.search(scope)


def _launching_thread(draft: Draft, node: int) -> str | None:
    arcs = draft.incoming(2 * node, ArcKind.LAUNCH)
    return draft.graph.nodes.lane[draft.graph.arcs.source[arcs[0]] // 2] if arcs else None


def latency_ns(draft: Draft) -> dict[str, float]:
    """Latency per operation: what is left of a transfer at 0 bytes, from the sizes in the trace; at most
    the shortest transfer."""
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for collective in draft.graph.collectives:
        if collective.size_bytes:
            length = min(draft.duration_ns(node) for node in collective.members)
            rows[collective.op].append((float(collective.size_bytes), length))
    latencies = {}
    for op, points in rows.items():
        sizes = np.array([size for size, _ in points])
        lengths = np.array([length for _, length in points])
        shortest = float(lengths.min())
        if len(distinct(sizes)) >= 3 and sizes.max() > 2 * sizes.min():
            slope, level = np.polyfit(sizes, lengths, 1)
            latencies[op] = float(np.clip(level, 0.0, shortest)) if slope > 0 else min(LATENCY_NS, shortest)
        else:
            latencies[op] = min(LATENCY_NS, shortest)
    return latencies
