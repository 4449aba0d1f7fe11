"""Kernels that are slower beside a collective than alone, measured on kernels of the same name and shape."""

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from aorta.replay.graph import NodeKind, TraceGraph

ALONE = 0.02
"""Share of a kernel beside a collective below which it ran alone,"""
BESIDE = 0.5
"""and above which it is compared with those that did."""
FEWEST = 3
"""Runs alone that a median needs."""

Key = tuple[int, str, str]
"""Rank, name, grid and block."""


_KNOWN: "WeakKeyDictionary[TraceGraph, dict[Key, Alone]]" = WeakKeyDictionary()


@dataclass(slots=True)
class Alone:
    """Kernels of one key."""

    median_ns: float
    """Of those that ran alone."""
    num_alone: int
    slower_ns: dict[int, float] = field(default_factory=dict)
    """By node that ran beside a collective: by how much it took longer than the median alone, at least 0."""
    collective: dict[int, int] = field(default_factory=dict)
    """The collective that it ran beside, by its place in the graph's."""


def alone_ns(graph: TraceGraph) -> dict[Key, Alone]:
    """By kernel; those that never ran alone, or never beside a collective, are left out."""
    if graph not in _KNOWN:
        _KNOWN[graph] = _alone_ns(graph)
    return _KNOWN[graph]


def _alone_ns(graph: TraceGraph) -> dict[Key, Alone]:
    nodes = graph.nodes
    spans = _collective_spans(graph)
    rows: dict[Key, list[tuple[int, float, float, int]]] = defaultdict(list)
    for node, kind in enumerate(nodes.kind):
        if kind == NodeKind.KERNEL:
            start, end = nodes.start_ns[node], nodes.end_ns[node]
            share, collective = spans[nodes.rank[node]].share(start, end) if end > start else (0.0, -1)
            key = (nodes.rank[node], nodes.name[node], nodes.shape[node])
            rows[key].append((node, end - start, share, collective))
    by_kernel: dict[Key, Alone] = {}
    for key, members in rows.items():
        lengths = [length for _, length, share, _ in members if share <= ALONE]
        beside_rows = [row for row in members if row[2] >= BESIDE]
        if len(lengths) < FEWEST or not beside_rows:
            continue
        alone = Alone(float(np.median(lengths)), len(lengths))
        for node, length, _, collective in beside_rows:
            if length > alone.median_ns:
                alone.slower_ns[node] = length - alone.median_ns
                alone.collective[node] = collective
        by_kernel[key] = alone
    return by_kernel


def slower_ns(graph: TraceGraph) -> dict[int, tuple[float, int]]:
    """Kernels slowed by a collective: by how much, and its place."""
    return {
        node: (slower, alone.collective[node])
        for alone in alone_ns(graph).values()
        for node, slower in alone.slower_ns.items()
    }


class _Spans:
    """Collectives of one rank in order of their starts."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int]] = []
        self.starts: list[float] = []
        self.latest: list[float] = []

    def close(self) -> None:
        self.rows.sort()
        self.starts = [row[0] for row in self.rows]
        self.latest = np.maximum.accumulate([row[1] for row in self.rows]).tolist() if self.rows else []

    def share(self, start: float, end: float) -> tuple[float, int]:
        """Of a stretch of time, the part beside one of them, and which it was for longest."""
        row = bisect_right(self.starts, end) - 1
        covered, longest, place, edge = 0.0, 0.0, -1, end
        while row >= 0 and self.latest[row] > start:
            since, stop, of_row = self.rows[row]
            length = min(stop, end) - max(since, start)
            if length > longest:
                longest, place = length, of_row
            covered += max(0.0, min(stop, edge) - max(since, start))
            edge = min(edge, max(since, start))
            row -= 1
        return min(1.0, covered / (end - start)), place


def _collective_spans(graph: TraceGraph) -> dict[int, _Spans]:
    """Transfers alone would say more, but a kernel that waits occupies the device as well."""
    spans: dict[int, _Spans] = {rank: _Spans() for rank in graph.ranks}
    for place, collective in enumerate(graph.collectives):
        for node in collective.members:
            start, end = graph.nodes.start_ns[node], graph.nodes.end_ns[node]
            spans[graph.nodes.rank[node]].rows.append((start, end, place))
    for of_rank in spans.values():
        of_rank.close()
    return spans
