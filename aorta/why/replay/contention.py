"""Kernels that are slower beside a collective than alone.

What a kernel loses is taken to grow with the time that it runs beside collectives: rate = (length - length
alone) / time beside them. The rate is measured on runs of the same kernel with and without; a kernel that
never ran alone has the usual rate of its class.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np

from aorta.timeline.arrays import Floats, Ints
from aorta.why.replay.activity import work_class
from aorta.why.replay.graph import ArcKind, NodeKind, TraceGraph

ALONE = 0.02
"""Share of a kernel beside a collective below which it ran alone,"""
BESIDE = 0.5
"""and above which it is compared with those that did."""
FEWEST = 3
"""Runs alone that a median needs, and runs beside a collective that a class's rate needs."""
MOST_RATE = 0.75
"""A kernel that loses more is slow for another reason."""
ONE_SIZE = 1.5
"""Runs alone that differ by more are of several sizes: persistent kernels have one grid for all of them."""


@dataclass(slots=True)
class Contention:
    """Cost of collectives to the kernels of a graph, as measured and at other times."""

    nodes: Ints
    """Kernels, as the columns below."""
    rank: Ints
    rates: Floats
    """Time lost per time beside collectives."""
    arcs: Ints
    """The graph's arc of each kernel's duration."""
    length_ns: list[float]
    """Length of each arc of the graph, with kernels as long as they are alone."""
    slower_ns: dict[int, float] = field(default_factory=dict)
    """Slowdown in ns of each kernel that ran beside a collective and, at least FEWEST times, alone."""
    place: dict[int, int] = field(default_factory=dict)
    """Index among the graph's collectives of the one that each of these kernels ran beside."""
    usual_ns: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Median ns of each of these kernels alone, and the number of runs behind it."""


_KNOWN: "WeakKeyDictionary[TraceGraph, Contention]" = WeakKeyDictionary()


def contention(graph: TraceGraph) -> Contention:
    """The contention of a graph, measured once and kept as long as the graph is."""
    if graph not in _KNOWN:
        _KNOWN[graph] = _contention(graph)
    return _KNOWN[graph]


class Occupied:
    """When collectives run on each rank, for overlaps of kernels with them."""

    def __init__(self, graph: TraceGraph, time_ns: Sequence[float]) -> None:
        times = np.asarray(time_ns)
        rows: dict[int, list[int]] = defaultdict(list)
        for collective in graph.collectives:
            for node in collective.members:
                rows[graph.nodes.rank[node]].append(node)
        self._of_rank: dict[int, tuple[Floats, Floats]] = {}
        for rank, members in rows.items():
            nodes = np.array(members)
            self._of_rank[rank] = _union(times[2 * nodes], times[2 * nodes + 1])

    def overlap_ns(self, rank: int, start_ns: Floats, end_ns: Floats) -> Floats:
        """Part of each time span in which a collective runs."""
        if rank not in self._of_rank:
            return np.zeros(len(start_ns))
        edges, busy = self._of_rank[rank]
        return np.interp(end_ns, edges, busy) - np.interp(start_ns, edges, busy)


def _union(start_ns: Floats, end_ns: Floats) -> tuple[Floats, Floats]:
    """Edges of the union of intervals, and the time in it up to each edge."""
    order = np.argsort(start_ns)
    start, latest = start_ns[order], np.maximum.accumulate(end_ns[order])
    is_first = np.append(True, start[1:] > latest[:-1])
    first = start[is_first]
    last = np.append(latest[:-1][is_first[1:]], latest[-1])
    edges = np.stack([first, last], axis=1).ravel()
    busy = np.cumsum(np.stack([np.zeros(len(first)), last - first], axis=1).ravel())
    return edges, busy


def _contention(graph: TraceGraph) -> Contention:
    nodes = graph.nodes
    kernels = [node for node, kind in enumerate(nodes.kind) if kind == NodeKind.KERNEL]
    arc_of = {
        graph.arcs.target[arc] // 2: arc
        for arc, kind in enumerate(graph.arcs.kind)
        if kind == ArcKind.DURATION
    }
    kernels = [node for node in kernels if node in arc_of]
    start, end = (np.array([times[node] for node in kernels]) for times in (nodes.start_ns, nodes.end_ns))
    rank = np.array([nodes.rank[node] for node in kernels], dtype=np.int64)
    measured_times = np.empty(2 * len(nodes))
    measured_times[0::2], measured_times[1::2] = nodes.start_ns, nodes.end_ns
    occupied = Occupied(graph, measured_times)  # type: ignore[arg-type]
    beside_ns = np.zeros(len(kernels))
    for number in graph.ranks:
        is_of_rank = rank == number
        beside_ns[is_of_rank] = occupied.overlap_ns(number, start[is_of_rank], end[is_of_rank])
    length = end - start
    rates, medians = _rates(graph, kernels, length, beside_ns)
    alone = np.maximum(length - rates * beside_ns, 0.0)
    arcs = np.array([arc_of[node] for node in kernels], dtype=np.int64)
    lengths = list(graph.arcs.length_ns)
    for arc, alone_ns in zip(arcs.tolist(), alone.tolist(), strict=True):
        lengths[arc] = alone_ns
    spans = _Spans.of_ranks(graph)
    measured = Contention(np.array(kernels, dtype=np.int64), rank, rates, arcs, lengths)
    for row, (median_ns, num_alone) in medians.items():
        node = kernels[row]
        if beside_ns[row] >= BESIDE * length[row] and length[row] > median_ns:
            measured.slower_ns[node] = float(length[row] - median_ns)
            measured.place[node] = spans[int(rank[row])].longest(float(start[row]), float(end[row]))
            measured.usual_ns[node] = (median_ns, num_alone)
    return measured


def _rates(
    graph: TraceGraph, kernels: Sequence[int], length: Floats, beside_ns: Floats
) -> tuple[Floats, dict[int, tuple[float, int]]]:
    """The rate of every kernel; by row of those that ran alone often enough, the median and its runs."""
    nodes = graph.nodes
    share = np.divide(beside_ns, length, out=np.zeros(len(length)), where=length > 0)
    shares, lengths = share.tolist(), length.tolist()
    medians: dict[int, tuple[float, int]] = {}
    rates = np.full(len(kernels), np.nan)
    # Kernels with the same neighbours come first: those of the same name alone do not overwrite their median.
    for rows in _same_kernels(graph, kernels):
        alone = sorted(lengths[row] for row in rows if shares[row] <= ALONE)
        if len(alone) < FEWEST or alone[-1 - len(alone) // 10] > ONE_SIZE * alone[len(alone) // 10]:
            continue
        usual_ns = median(alone)
        new = [row for row in rows if row not in medians]
        medians.update(dict.fromkeys(new, (usual_ns, len(alone))))
        lost = [(lengths[row] - usual_ns) / beside_ns[row] for row in rows if shares[row] >= BESIDE]
        if new and lost:
            rates[new] = min(max(median(lost), 0.0), MOST_RATE)
    if not share.any():
        return np.zeros(len(kernels)), medians
    keys = [(nodes.name[node], nodes.program[node], nodes.unit[node]) for node in kernels]
    label_of = {key: work_class(*key) for key in set(keys)}
    labels = np.array([label_of[key] for key in keys])
    is_measured = ~np.isnan(rates) & (share >= BESIDE)
    otherwise = _median(rates[is_measured])
    for label in sorted(set(labels.tolist())):
        is_of_label = labels == label
        usual = _median(rates[is_measured & is_of_label])
        rates[is_of_label & np.isnan(rates)] = (usual if usual is not None else otherwise) or 0.0
    return rates, medians


def _median(rates: Floats) -> float | None:
    return float(np.median(rates)) if len(rates) >= FEWEST else None


def _same_kernels(graph: TraceGraph, kernels: Sequence[int]) -> Iterator[list[int]]:
    """Rows of kernels that do the same work: those with the same neighbours, then all of a name and shape."""
    nodes = graph.nodes
    neighbours = _neighbours(graph)
    plain: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    between: dict[tuple[int, str, str, str, str], list[int]] = defaultdict(list)
    for row, node in enumerate(kernels):
        key = (nodes.rank[node], nodes.name[node], nodes.shape[node])
        plain[key].append(row)
        between[(*key, *neighbours[node])].append(row)
    yield from between.values()
    yield from plain.values()


def _neighbours(graph: TraceGraph) -> dict[int, tuple[str, str]]:
    """Names and shapes of the work before and after each device work on its stream."""
    nodes = graph.nodes
    nodes_of_stream: dict[tuple[int, str], list[int]] = defaultdict(list)
    for node, kind in enumerate(nodes.kind):
        if kind in (NodeKind.KERNEL, NodeKind.COPY):
            nodes_of_stream[nodes.rank[node], nodes.lane[node]].append(node)
    neighbours: dict[int, tuple[str, str]] = {}
    for members in nodes_of_stream.values():
        members.sort(key=lambda node: nodes.start_ns[node])
        names = ["", *(nodes.name[node] + nodes.shape[node] for node in members), ""]
        for i, node in enumerate(members):
            neighbours[node] = (names[i], names[i + 2])
    return neighbours


class _Spans:
    """Collectives of one rank in order of their starts."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int]] = []

    @classmethod
    def of_ranks(cls, graph: TraceGraph) -> "dict[int, _Spans]":
        spans: dict[int, _Spans] = {rank: cls() for rank in graph.ranks}
        for place, collective in enumerate(graph.collectives):
            for node in collective.members:
                row = (graph.nodes.start_ns[node], graph.nodes.end_ns[node], place)
                spans[graph.nodes.rank[node]].rows.append(row)
        for rank_spans in spans.values():
            rank_spans.rows.sort()
            rank_spans.starts = [row[0] for row in rank_spans.rows]
            rank_spans.latest = np.maximum.accumulate([0.0, *(row[1] for row in rank_spans.rows)])[
                1:
            ].tolist()
        return spans

    starts: list[float]
    latest: list[float]

    def longest(self, start: float, end: float) -> int:
        """Place of the collective that ran beside a stretch of time for longest; -1 for none."""
        row = bisect_right(self.starts, end) - 1
        longest, place = 0.0, -1
        while row >= 0 and self.latest[row] > start:
            since, stop, of_row = self.rows[row]
            length = min(stop, end) - max(since, start)
            if length > longest:
                longest, place = length, of_row
            row -= 1
        return place
