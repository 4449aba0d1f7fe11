"""Lint of a program: orders that it lacks, and orders that it imposes without need.

missing edge: two operations touch the same data, one of them writes, and nothing makes the second wait
for the first (a race). false edge: a record and wait, or a chain of them, makes an operation wait for
another one whose data it does not need. Both are reduced: an edge that follows from the others is not
listed. The order within one stream or one process group is the programmer's choice and never counted,
nor is a stream's wait for a communication that it issued itself.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from aorta.programs.language.graph import Graph, Node, Precedence, graph_of
from aorta.programs.language.ir import Program
from aorta.programs.lint.ranks import rank_mismatches


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    """One instruction of a chain."""

    text: str
    stream: str
    line: int
    """Line of the program's text; 0 for the caller's own work."""
    iteration: dict[str, int]


class OrderEdge(msgspec.Struct, frozen=True, kw_only=True):
    """Order of two operations: `after` waits for `before`, or should."""

    before: str
    after: str
    chain: list[Instruction]
    """Instructions that cause a false edge, ends included; for a missing edge the two ends."""
    reason: str
    ranks: list[int]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Findings for a program; it is safe without missing edges and without mismatches of ranks."""

    program: str
    num_ranks: int
    missing_edges: list[OrderEdge]
    false_edges: list[OrderEdge]
    rank_mismatches: list[str]
    warnings: list[str]

    @property
    def is_safe(self) -> bool:
        return not self.missing_edges and not self.rank_mismatches

    @property
    def fault(self) -> str | None:
        """The first race, or that ranks do not meet; None of a safe program."""
        if self.rank_mismatches:
            return f"{self.program} would hang: {self.rank_mismatches[0]}"
        if not self.missing_edges:
            return None
        edge, more = self.missing_edges[0], len(self.missing_edges) - 1
        return f"{self.program} has a race: {edge.after} {edge.reason}{f', and {more} more' if more else ''}"


def lint(*programs: Program) -> Verdict:
    """Findings for one program of all ranks, or for one program per rank.

    Raises HostProgramError for programs that cannot be unrolled.
    """
    first = programs[0]
    num_ranks = first.num_ranks if len(programs) == 1 else len(programs)
    graphs = [
        graph_of(programs[rank if len(programs) > 1 else 0], rank % first.num_ranks)
        for rank in range(num_ranks)
    ]
    missing: list[list[OrderEdge]] = []
    false: list[list[OrderEdge]] = []
    for rank, graph in enumerate(graphs):
        ordered = graph.precedence()
        required = set(nearest_pairs(graph, ordered))
        missing.append(list(_missing_edges(graph, rank, ordered, required)))
        false.append(list(_false_edges(graph, rank, ordered, required)))
    return Verdict(
        program=first.name,
        num_ranks=num_ranks,
        missing_edges=_merged(missing),
        false_edges=_merged(false),
        rank_mismatches=rank_mismatches(programs, graphs),
        warnings=list(dict.fromkeys(text for graph in graphs for text in graph.warnings)),
    )


def nearest_pairs(graph: Graph, ordered: Precedence) -> Iterator[tuple[int, int]]:
    """Pairs that touch the same part, one of them writing, and imply all others with the order in streams.

    For each access these are, of every other stream, the last one that it must not overtake, and the last one
    of those that it is ordered behind.
    """
    # By buffer, then by part, then by chain: nodes that read and that write, ascending.
    accesses: dict[str, _Parts] = {}
    for v in graph.data():
        node, chain = graph.nodes[v], ordered.chain_of[v]
        for is_write, parts in ((False, node.reads), (True, node.writes)):
            for part in parts:
                of_buffer = accesses.setdefault(part.name, _Parts())
                for of_chain in of_buffer.overlapping(part.index):
                    for other, (reads, writes) in of_chain.items():
                        if other != chain:
                            for nodes in (reads, writes) if is_write else (writes,):
                                yield from _nearest(nodes, v, ordered)
        for is_write, parts in ((False, node.reads), (True, node.writes)):
            for part in parts:
                accesses[part.name].at(part.index).setdefault(chain, ([], []))[is_write].append(v)


def _nearest(nodes: list[int], v: int, ordered: Precedence) -> Iterator[tuple[int, int]]:
    """The last of the nodes, which are in one stream, and the last of them that is before v."""
    if nodes:
        yield nodes[-1], v
        num_before = bisect_left(nodes, True, key=lambda u: not ordered.is_before(u, v))
        if 0 < num_before < len(nodes):
            yield nodes[num_before - 1], v


_ByChain = dict[int, tuple[list[int], list[int]]]
_Index = tuple[Any, ...]


class _Parts:
    """Accesses to the parts of one buffer. A shorter index contains all longer ones that begin with it."""

    def __init__(self) -> None:
        self._of_index: dict[_Index, _ByChain] = {}
        self._below: dict[_Index, list[_Index]] = {}

    def at(self, index: _Index) -> _ByChain:
        if index not in self._of_index:
            self._of_index[index] = {}
            for length in range(len(index)):
                self._below.setdefault(index[:length], []).append(index)
        return self._of_index[index]

    def overlapping(self, index: _Index) -> Iterator[_ByChain]:
        for length in range(len(index) + 1):
            if index[:length] in self._of_index:
                yield self._of_index[index[:length]]
        yield from (self._of_index[below] for below in self._below.get(index, ()))

    def is_any(self, index: _Index) -> bool:
        """True if some access overlaps the part."""
        return next(self.overlapping(index), None) is not None


def _missing_edges(
    graph: Graph, rank: int, ordered: Precedence, required: set[tuple[int, int]]
) -> Iterator[OrderEdge]:
    yield from _uninitialised(graph, rank)
    if all(ordered.is_before(u, v) for u, v in required):
        return
    for u, v in graph.precedence(extra=required).among(graph.data()).reduced():
        if not ordered.is_before(u, v):
            earlier, later = graph.nodes[u], graph.nodes[v]
            yield OrderEdge(
                before=earlier.label,
                after=later.label,
                chain=[instruction(earlier), instruction(later)],
                reason=f"{_hazard(earlier, later)}: nothing makes {later.stream} wait for {earlier.stream}",
                ranks=[rank],
            )


def _uninitialised(graph: Graph, rank: int) -> Iterator[OrderEdge]:
    written: dict[str, _Parts] = {}
    for node in (graph.nodes[index] for index in graph.data()):
        for part in node.reads:
            if part.name not in written or not written[part.name].is_any(part.index):
                yield OrderEdge(
                    before="nothing",
                    after=node.label,
                    chain=[instruction(node)],
                    reason=f"reads {part}, which nothing wrote before",
                    ranks=[rank],
                )
        for part in node.writes:
            written.setdefault(part.name, _Parts()).at(part.index)


def _false_edges(
    graph: Graph, rank: int, ordered: Precedence, required: set[tuple[int, int]]
) -> Iterator[OrderEdge]:
    ordered_pairs = [(u, v) for u, v in required if ordered.is_before(u, v)]
    needed = graph.precedence(excluded=frozenset(("event",)), extra=ordered_pairs)
    for u, v in ordered.among(graph.data()[1:-1]).reduced():
        if not needed.is_before(u, v):
            chain = [graph.nodes[index] for index in graph.chain(u, v)]
            yield OrderEdge(
                before=graph.nodes[u].label,
                after=graph.nodes[v].label,
                chain=[instruction(node) for node in chain],
                reason=f"no data needs it; {_relays(chain)}",
                ranks=[rank],
            )


def _relays(chain: list[Node]) -> str:
    """Names of the streams that wait for an event and then are waited for: they pass the dependency on."""
    streams = [
        a.stream for a, b in pairwise(chain[1:-1]) if a.stream == b.stream and a.label.startswith("wait(")
    ]
    names = list(dict.fromkeys(streams))
    return f"{' and '.join(names) or 'an event'} {'pass' if len(names) > 1 else 'passes'} it on"


def _hazard(earlier: Node, later: Node) -> str:
    part = [
        part
        for is_write, parts in ((False, later.reads), (True, later.writes))
        for part in parts
        if any(
            part.overlaps(other)
            for other in ((*earlier.reads, *earlier.writes) if is_write else earlier.writes)
        )
    ][-1]
    wrote = any(part.overlaps(accessed) for accessed in earlier.writes)
    if wrote and any(part.overlaps(accessed) for accessed in later.reads):
        return f"reads {part}, which is written there"
    return f"overwrites {part}, which is {'written' if wrote else 'still read'} there"


def instruction(node: Node) -> Instruction:
    """Link of a chain that stands for a node."""
    return Instruction(text=node.label, stream=node.stream, line=node.line, iteration=dict(node.iteration))


def _merged(by_rank: list[list[OrderEdge]]) -> list[OrderEdge]:
    """Edges that ranks share, once, with the ranks that have them."""
    edges_of: dict[tuple[str, ...], OrderEdge] = {}
    for edge in (edge for edges in by_rank for edge in edges):
        key = (edge.before, edge.after, edge.reason, *(link.text for link in edge.chain))
        merged = edges_of.get(key)
        ranks = edge.ranks if merged is None else [*merged.ranks, *edge.ranks]
        edges_of[key] = msgspec.structs.replace(edge, ranks=sorted(set(ranks)))
    return list(edges_of.values())
