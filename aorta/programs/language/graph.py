"""Happens-before graph: which instruction must end before another may begin, and by which chain."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

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

    def ancestors(
        self, *, excluded: frozenset[Why] = frozenset(), extra: Iterable[tuple[int, int]] = ()
    ) -> list[int]:
        """For each node the nodes before it, as a set of bits.

        Edges of excluded kinds are left out, extra ones added.
        """
        added: dict[int, list[int]] = {}
        for u, v in extra:
            added.setdefault(v, []).append(u)
        masks: list[int] = []
        for v, edges in enumerate(self.predecessors):
            bits = 0
            for u in (*(u for u, reason in edges if reason not in excluded), *added.get(v, ())):
                bits |= masks[u] | 1 << u
            masks.append(bits)
        return masks

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


def reduced(ancestors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Transitive reduction of a closed order: the pairs (u, v) with nothing between them."""
    for v, bits in enumerate(ancestors):
        remaining = bits
        while remaining:
            u = remaining.bit_length() - 1
            yield u, v
            remaining &= ~(ancestors[u] | 1 << u)


def only(ancestors: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Order among some nodes alone, renumbered 0 .. len - 1."""
    place = {node: index for index, node in enumerate(nodes)}
    mask = sum(1 << node for node in nodes)
    return [sum(1 << place[u] for u in bits_of(ancestors[node] & mask)) for node in nodes]


def bits_of(bits: int) -> Iterator[int]:
    """Members of a set of bits, ascending."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


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
                self.append(self.node(step, step.stream), self.event_edge(event))
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

    def event_edge(self, event: Ref) -> list[tuple[int, Why]]:
        return [(self.events[event], "event")] if event in self.events else []

    def append(self, node: Node, edges: Iterable[tuple[int, Why]] = (), order: Why = "stream") -> int:
        last = self.tail.get(node.stream)
        predecessors: list[tuple[int, Why]] = [*edges] if last is None else [(last, order), *edges]
        self.tail[node.stream] = self.graph.add(node, predecessors)
        return self.tail[node.stream]
