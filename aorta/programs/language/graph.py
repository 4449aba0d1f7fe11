"""Happens-before graph: which instruction must end before another may begin, and by which chain."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from aorta.hazards.order import Moment, Order, is_before
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import (
    Allocate,
    Communicate,
    Gemm,
    GetCurrentStream,
    Op,
    Program,
    Record,
    Ref,
    SetStream,
    Step,
    UserOp,
    Wait,
    WaitWork,
)
from aorta.programs.language.text import format_op

Why = Literal["stream", "lane", "issue", "work", "event"]
"""stream: order within a stream. lane: order within a process group. issue: an asynchronous communication
begins after what its issuing stream held. work: that stream waits for its own communication. event: any
other record and wait."""

BEGIN, END = "the caller's work before", "the caller's work after"


@dataclass(frozen=True, slots=True)
class Node:
    """An instruction that takes a place in a stream."""

    label: str
    stream: str
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    is_data: bool = False
    is_communication: bool = False
    line: int = 0
    iteration: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return f"{self.label}  on {self.stream}"


@dataclass(slots=True)
class Graph:
    """Nodes in an order in which every edge points forward."""

    nodes: list[Node] = field(default_factory=list)
    predecessors: list[list[tuple[int, Why]]] = field(default_factory=list)
    """Direct predecessors of each node, with the reason of the edge."""
    warnings: list[str] = field(default_factory=list)

    def add(self, node: Node, predecessors: Iterable[tuple[int, Why]]) -> int:
        self.nodes.append(node)
        self.predecessors.append(list(dict.fromkeys(predecessors)))
        return len(self.nodes) - 1

    def data(self) -> list[int]:
        return [index for index, node in enumerate(self.nodes) if node.is_data]

    def precedence(
        self, *, excluded: frozenset[Why] = frozenset(), extra: Iterable[tuple[int, int]] = ()
    ) -> "Precedence":
        """Which node is before which. Edges of excluded kinds are left out, extra ones added."""
        return Precedence(self, excluded, extra)

    def chain(self, first: int, last: int) -> list[int]:
        """Path from first to last with the fewest waits; of each stream only the two ends are kept."""
        hops: dict[int, tuple[int, Why]] = {}
        queue, visited = deque([last]), set[int]()
        while queue:
            v = queue.popleft()
            if v in visited:
                continue
            visited.add(v)
            if v == first:
                break
            for u, edge_reason in self.predecessors[v]:
                if u < first or u in visited:
                    continue
                if edge_reason == "stream":
                    hops[u] = (v, edge_reason)
                    queue.appendleft(u)
                elif u not in hops:
                    hops[u] = (v, edge_reason)
                    queue.append(u)
        path, reasons = [first], list[Why]()
        while path[-1] != last:
            following, reason = hops[path[-1]]
            path.append(following)
            reasons.append(reason)
        inner = (
            node
            for node, reason, following in zip(path[1:-1], reasons, reasons[1:], strict=False)
            if not reason == following == "stream"
        )
        return [first, *inner, last] if first != last else [first]


class Precedence:
    """Happens-before among the nodes of a graph, by the clocks of its chains (aorta/hazards/order.py).

    A chain is nodes in one stream or lane.
    """

    def __init__(self, graph: Graph, excluded: frozenset[Why], extra: Iterable[tuple[int, int]]) -> None:
        added: dict[int, list[int]] = {}
        for u, v in extra:
            added.setdefault(v, []).append(u)
        order = Order()
        tails: list[int] = []
        self.chain_of: list[int] = []
        self.counts: list[int] = []
        """Number of each node in its chain, ascending."""
        self.moments: list[Moment] = []
        for v, edges in enumerate(graph.predecessors):
            chain = self._chain(graph, v, edges, tails)
            if chain == len(tails):
                tails.append(order.add_stream())
            for u in (*(u for u, reason in edges if reason not in excluded), *added.get(v, ())):
                order.wait(chain, self.moments[u])
            tails[chain] = v
            self.chain_of.append(chain)
            self.counts.append(order.advance(chain))
            self.moments.append(order.now(chain))

    def _chain(self, graph: Graph, v: int, edges: list[tuple[int, Why]], tails: list[int]) -> int:
        for u, reason in edges:
            is_next = reason in ("stream", "lane") or graph.nodes[u].stream == graph.nodes[v].stream
            if is_next and tails[self.chain_of[u]] == u:
                return self.chain_of[u]
        return len(tails)

    def is_before(self, u: int, v: int) -> bool:
        """True if u must end before v may begin."""
        return u != v and is_before(self.chain_of[u], self.counts[u], self.moments[v])

    def among(self, nodes: Sequence[int]) -> "Among":
        """The order among some nodes, which ascend."""
        return Among(self, nodes)


class Among:
    """The order among some nodes of a graph."""

    def __init__(self, precedence: Precedence, nodes: Sequence[int]) -> None:
        self._all = precedence
        self._nodes = nodes
        self._of_chain: dict[int, list[int]] = {}
        for node in nodes:
            self._of_chain.setdefault(precedence.chain_of[node], []).append(node)
        self._counts = {
            chain: [precedence.counts[node] for node in of_chain]
            for chain, of_chain in self._of_chain.items()
        }

    def reduced(self) -> Iterator[tuple[int, int]]:
        """Transitive reduction: pairs (u, v) with none of the nodes between them; v ascends, u descends."""
        for v in self._nodes:
            candidates = sorted(self._latest_before(v), reverse=True)
            for u in candidates:
                if not any(self._all.is_before(u, w) for w in candidates if w > u):
                    yield u, v

    def _latest_before(self, v: int) -> Iterator[int]:
        """The last node before v of each chain, but for those that v's own chain was behind already."""
        chain, own, others = self._all.moments[v]
        place = bisect_right(self._counts.get(chain, ()), own - 1)
        known: Mapping[int, int] = {}
        if place:
            previous = self._of_chain[chain][place - 1]
            known = self._all.moments[previous][2]
            yield previous
        if known is others:
            return
        for other, limit in others.items():
            if limit > known.get(other, 0):
                place = bisect_right(self._counts.get(other, ()), limit)
                if place:
                    yield self._of_chain[other][place - 1]


def graph_of(program: Program, rank: int = 0) -> Graph:
    """Graph of one rank's instructions, between nodes for the caller's work before and after them.

    Raises HostProgramError for a wait on a work that nothing produced.
    """
    return _Builder(program).build(program.unroll(rank))


class _Builder:
    def __init__(self, program: Program) -> None:
        self.graph = Graph()
        self.main = program.main_stream()
        buffers = program.buffers().values()
        self.inputs = tuple(Ref(b.name) for b in buffers if b.role == "input")
        self.outputs = tuple(
            Ref(b.name, tile) for b in buffers if b.role == "output" for tile in product(*map(range, b.tiles))
        )
        self.tail: dict[str, int] = {}
        self.events: dict[Ref, int] = {}
        self.works: dict[Ref, tuple[int, str]] = {}

    def build(self, steps: Iterable[Step]) -> Graph:
        self.append(Node(BEGIN, self.main, writes=self.inputs, is_data=True))
        for step in steps:
            self.step(step)
        self.append(Node(END, self.main, reads=self.outputs, is_data=True))
        return self.graph

    def step(self, step: Step) -> None:
        op = step.op
        match op:
            case GetCurrentStream() | SetStream() | Allocate():
                pass
            case Record(event=event, stream=stream):
                stream_name = step.stream if stream is None else str(stream)
                self.events[event] = self.append(self.node(step, stream_name))
            case Wait(event=event):
                if event not in self.events:
                    line_prefix = f"line {op.line}: " if op.line else ""
                    self.graph.warnings.append(
                        f"{line_prefix}{format_op(op)} waits for nothing: {event} was not recorded before"
                    )
                recorded: list[tuple[int, Why]] = (
                    [(self.events[event], "event")] if event in self.events else []
                )
                self.append(self.node(step, step.stream), recorded)
            case WaitWork(work=work):
                if work not in self.works:
                    line_prefix = f"line {op.line}: " if op.line else ""
                    raise HostProgramError(
                        f"{line_prefix}{format_op(op)}: no communication before it has this work"
                    )
                node, issuer = self.works[work]
                reason: Why = "work" if issuer == step.stream else "event"
                self.append(self.node(step, step.stream), [(node, reason)])
            case Communicate(work=work, lane=lane) if work is not None:
                issued = self.tail.get(step.stream)
                edges: list[tuple[int, Why]] = [] if issued is None else [(issued, "issue")]
                self.works[work] = (self.append(self.node(step, str(lane)), edges, "lane"), step.stream)
            case Communicate() | Gemm() | UserOp():
                self.append(self.node(step, step.stream))
            case _:
                raise AssertionError(type(op))

    def node(self, step: Step, stream: str) -> Node:
        op: Op = step.op
        is_data = isinstance(op, Communicate | Gemm | UserOp)
        is_comm = isinstance(op, Communicate)
        return Node(format_op(op), stream, op.reads, op.writes, is_data, is_comm, op.line, step.iteration)

    def append(self, node: Node, edges: Iterable[tuple[int, Why]] = (), order: Why = "stream") -> int:
        last = self.tail.get(node.stream)
        predecessors: list[tuple[int, Why]] = [*edges] if last is None else [(last, order), *edges]
        self.tail[node.stream] = self.graph.add(node, predecessors)
        return self.tail[node.stream]
