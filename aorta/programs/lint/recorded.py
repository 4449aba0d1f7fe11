"""Lint of a recording: a trace with synchronisation events.

A recording does not say which data an operation needs, so no order in it is missing or false by itself. Two
things can be said: which communication can never overlap with compute, whatever the device does, because
waits lead from compute to it and from it to all other compute; and how the order among the operations differs
from the one that a program would cause.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.graph import Graph, Precedence, graph_of
from aorta.programs.language.ir import Communicate, Gemm, Program
from aorta.programs.lint.one_rank import Instruction, instruction
from aorta.programs.lint.trace_sync import trace_graph
from aorta.traces.classify import COMM_RULES, CommRule

GEMM_KERNEL = re.compile(r"gemm|cutlass|nvjet|cijk|xmma|matmul", re.IGNORECASE)
"""Kernels that count as a program's matrix multiplies."""
MAX_SHOWN = 100
"""Most differences of a kind that are kept."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order of two operations: `after` waits for `before`, by this chain."""

    before: str
    after: str
    chain: list[Instruction]


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A communication that no compute can overlap."""

    operation: str
    stream: str
    number: int
    """Place among the communications, in order of issue."""
    waits_for: Order | None
    """The last compute before it; None where none is."""
    holds_up: Order | None
    """The first compute after it."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """Findings for a recording."""

    source: str
    num_operations: int
    num_communications: int
    num_cross_stream_waits: int
    """Pairs of operations on two streams with a wait between them that nothing else implies."""
    pinned: list[Pinned]
    program: str | None
    num_repetitions: int | None
    """Number of times that the recording runs the program; null without one."""
    unexpected: list[Order]
    """Orders in the recording that the program does not cause."""
    absent: list[Order]
    """Orders of the program that the recording does not have."""
    warnings: list[str]

    @property
    def is_different(self) -> bool:
        return bool(self.unexpected or self.absent)


def lint_file(
    path: Path | str, program: Program | None = None, rank: int = 0, rules: Sequence[CommRule] = COMM_RULES
) -> Recorded:
    """Lint of a trace, compared with a program if there is one.

    Raises HostProgramError for a file that is not one, or that does not hold the program's operations.
    """
    graph = trace_graph(path, rules)
    data = graph.data()
    precedence = graph.precedence()
    num_cross = sum(
        graph.nodes[u].stream != graph.nodes[v].stream for u, v in precedence.among(data).reduced()
    )
    comparison = _Comparison(graph, precedence, program, rank) if program is not None else None
    return Recorded(
        source=str(path),
        num_operations=len(data),
        num_communications=sum(graph.nodes[index].is_communication for index in data),
        num_cross_stream_waits=num_cross,
        pinned=list(_pinned(graph, data, precedence)),
        program=None if program is None else program.name,
        num_repetitions=None if comparison is None else comparison.num_repetitions,
        unexpected=[] if comparison is None else comparison.unexpected,
        absent=[] if comparison is None else comparison.absent,
        warnings=graph.warnings,
    )


def _pinned(graph: Graph, data: list[int], precedence: Precedence) -> Iterator[Pinned]:
    compute = [index for index in data if not graph.nodes[index].is_communication]
    among = precedence.among(compute)
    comm = [index for index in data if graph.nodes[index].is_communication]
    for number, index in enumerate(comm):
        (num_before, last), (num_after, first) = among.before(index), among.after(index)
        if compute and num_before + num_after == len(compute):
            yield Pinned(
                operation=graph.nodes[index].label,
                stream=graph.nodes[index].stream,
                number=number,
                waits_for=None if last is None else _wait(graph, last, index),
                holds_up=None if first is None else _wait(graph, index, first),
            )


def _wait(graph: Graph, u: int, v: int) -> Order:
    chain = [instruction(graph.nodes[index]) for index in graph.chain(u, v)]
    return Order(before=graph.nodes[u].label, after=graph.nodes[v].label, chain=chain)


class _Comparison:
    """Orders among the operations of a program, as recorded and as the program predicts."""

    def __init__(self, graph: Graph, recorded_order: Precedence, program: Program, rank: int) -> None:
        self.recorded, self.predicted = graph, graph_of(program, rank)
        steps = [step.op for step in program.unroll(rank)]
        if not any(isinstance(op, Communicate | Gemm) for op in steps):
            raise HostProgramError(f"{program.name} has no communication and no gemm to compare")
        predicted_nodes = [
            index for index in self.predicted.data()[1:-1] if self._is_compared(self.predicted, index)
        ]
        self.predicted_nodes = predicted_nodes
        rows = self._matched(predicted_nodes)
        self.num_repetitions = len(rows)
        self.recorded_order, self.predicted_order = recorded_order, self.predicted.precedence()
        self.unexpected: list[Order] = []
        self.absent: list[Order] = []
        for nodes in rows:
            self._compare(nodes)

    def _is_compared(self, graph: Graph, index: int) -> bool:
        node = graph.nodes[index]
        return node.is_communication or node.label.startswith(("gemm(", "linear("))

    def _matched(self, predicted_nodes: list[int]) -> list[list[int]]:
        """Recorded nodes of the program's operations, in order of issue, for each repetition."""
        comm, gemm = [], []
        for index in self.recorded.data():
            node = self.recorded.nodes[index]
            if node.is_communication:
                comm.append(index)
            elif GEMM_KERNEL.search(node.label):
                gemm.append(index)
        is_comm = [self.predicted.nodes[index].is_communication for index in predicted_nodes]
        num_comm, num_gemm = sum(is_comm), len(is_comm) - sum(is_comm)
        times = len(comm) // num_comm if num_comm else len(gemm) // num_gemm
        if not times or len(comm) != times * num_comm or len(gemm) != times * num_gemm:
            raise HostProgramError(
                f"the recording has {len(comm)} communications and {len(gemm)} matrix multiplies, "
                f"the program {num_comm} and {num_gemm}: not a whole number of runs"
            )
        rows = []
        for time in range(times):
            comms = iter(comm[time * num_comm : (time + 1) * num_comm])
            gemms = iter(gemm[time * num_gemm : (time + 1) * num_gemm])
            rows.append([next(comms if kind else gemms) for kind in is_comm])
        return rows

    def _compare(self, nodes: list[int]) -> None:
        size = len(nodes)
        for b in range(size):
            for a in range(size):
                expected = self.predicted_order.is_before(self.predicted_nodes[a], self.predicted_nodes[b])
                is_ordered = self.recorded_order.is_before(nodes[a], nodes[b])
                if is_ordered and not expected and not self._implied(a, b, nodes):
                    chain = _wait(self.recorded, nodes[a], nodes[b]).chain
                    self._note(self.unexpected, a, b, chain)
                if expected and not is_ordered:
                    self._note(
                        self.absent,
                        a,
                        b,
                        _wait(self.predicted, self.predicted_nodes[a], self.predicted_nodes[b]).chain,
                    )

    def _implied(self, a: int, b: int, nodes: list[int]) -> bool:
        """True if an operation between the two already orders them."""
        is_before = self.recorded_order.is_before
        return any(
            is_before(nodes[a], nodes[m]) and is_before(nodes[m], nodes[b])
            for m in range(len(nodes))
            if m not in (a, b)
        )

    def _note(self, differences: list[Order], a: int, b: int, chain: list[Instruction]) -> None:
        earlier, later = (self.predicted.nodes[self.predicted_nodes[index]].label for index in (a, b))
        is_noted = any(
            (difference.before, difference.after) == (earlier, later) for difference in differences
        )
        if not is_noted and len(differences) < MAX_SHOWN:
            differences.append(Order(before=earlier, after=later, chain=chain))
