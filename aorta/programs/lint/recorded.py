"""Lint of a recording: a trace with synchronisation events, or a captured graph.

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
from aorta.programs.language.graph import Graph, bits_of, graph_of, only, reduced
from aorta.programs.language.ir import Communicate, Gemm, Program
from aorta.programs.lint.cuda_graph import read_graph
from aorta.programs.lint.one_rank import Instruction, instruction
from aorta.programs.lint.trace_sync import trace_graph
from aorta.traces.classify import COMM_RULES, CommRule

GEMM_KERNEL = re.compile(r"gemm|cutlass|nvjet|cijk|xmma|matmul", re.IGNORECASE)
"""Kernels that count as a program's matrix multiplies."""
MAX_SHOWN = 100
"""Most differences of a kind that are kept."""


class PinnedWait(msgspec.Struct, frozen=True, kw_only=True):
    """Order of two operations in the recording: `after` waits for `before`, by this chain."""

    before: str
    after: str
    chain: list[Instruction]


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A communication that no compute can overlap."""

    operation: str
    stream: str
    number: int
    """Place among the communications, in order of issue."""
    waits_for: PinnedWait | None
    """The last compute before it; None where none is."""
    holds_up: PinnedWait | None
    """The first compute after it."""


class OrderDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Order of two of the program's operations that only the recording or only the program has."""

    before: str
    after: str
    chain: list[Instruction]


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
    unexpected: list[OrderDifference]
    """Orders in the recording that the program does not cause."""
    absent: list[OrderDifference]
    """Orders of the program that the recording does not have."""
    warnings: list[str]

    @property
    def is_different(self) -> bool:
        return bool(self.unexpected or self.absent)


def lint_file(
    path: Path | str,
    program: Program | None = None,
    *,
    is_graph: bool,
    rank: int = 0,
    rules: Sequence[CommRule] = COMM_RULES,
) -> Recorded:
    """Lint of a trace or captured graph, compared with a program if there is one.

    Raises HostProgramError for a file that is not one, or that does not hold the program's operations.
    """
    graph = read_graph(path, rules) if is_graph else trace_graph(path, rules)
    return lint_graph(graph, str(path), program, rank)


def lint_graph(graph: Graph, source: str, program: Program | None = None, rank: int = 0) -> Recorded:
    """Lint of a recording's graph; lint_file reads one first."""
    data = graph.data()
    ancestors = graph.ancestors()
    data_ancestors = only(ancestors, data)
    cross = [
        (data[a], data[b])
        for a, b in reduced(data_ancestors)
        if graph.nodes[data[a]].stream != graph.nodes[data[b]].stream
    ]
    comparison = _Comparison(graph, ancestors, program, rank) if program is not None else None
    return Recorded(
        source=source,
        num_operations=len(data),
        num_communications=sum(graph.nodes[index].is_communication for index in data),
        num_cross_stream_waits=len(cross),
        pinned=list(_pinned(graph, data, data_ancestors)),
        program=None if program is None else program.name,
        num_repetitions=None if comparison is None else comparison.num_repetitions,
        unexpected=[] if comparison is None else comparison.unexpected,
        absent=[] if comparison is None else comparison.absent,
        warnings=graph.warnings,
    )


def _pinned(graph: Graph, data: list[int], data_ancestors: list[int]) -> Iterator[Pinned]:
    descendants = _descendants(data_ancestors)
    is_comm = [graph.nodes[index].is_communication for index in data]
    compute = sum(1 << index for index, comm in enumerate(is_comm) if not comm)
    number = -1
    for index, comm in enumerate(is_comm):
        number += comm
        if comm and compute and not compute & ~(data_ancestors[index] | descendants[index]):
            earlier, later = data_ancestors[index] & compute, descendants[index] & compute
            last = data[earlier.bit_length() - 1] if earlier else None
            first = data[next(bits_of(later))] if later else None
            yield Pinned(
                operation=graph.nodes[data[index]].label,
                stream=graph.nodes[data[index]].stream,
                number=number,
                waits_for=None if last is None else _wait(graph, last, data[index]),
                holds_up=None if first is None else _wait(graph, data[index], first),
            )


def _descendants(ancestors: list[int]) -> list[int]:
    masks = [0] * len(ancestors)
    for v, bits in enumerate(ancestors):
        for u in bits_of(bits):
            masks[u] |= 1 << v
    return masks


def _wait(graph: Graph, u: int, v: int) -> PinnedWait:
    chain = [instruction(graph.nodes[index]) for index in graph.chain(u, v)]
    return PinnedWait(before=graph.nodes[u].label, after=graph.nodes[v].label, chain=chain)


class _Comparison:
    """Orders among the operations of a program, as recorded and as the program predicts."""

    def __init__(self, graph: Graph, ancestors: list[int], program: Program, rank: int) -> None:
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
        order = only(self.predicted.ancestors(), predicted_nodes)
        self.unexpected: list[OrderDifference] = []
        self.absent: list[OrderDifference] = []
        for nodes in rows:
            self._compare(order, nodes, ancestors)

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
        if any(node.stream == "graph" for node in self.recorded.nodes):
            comm.sort(key=lambda index: self.recorded.nodes[index].line)
            gemm.sort(key=lambda index: self.recorded.nodes[index].line)
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

    def _compare(self, order: list[int], nodes: list[int], ancestors: list[int]) -> None:
        size = len(nodes)
        for b in range(size):
            for a in range(size):
                expected = bool(order[b] >> a & 1)
                is_ordered = bool(ancestors[nodes[b]] >> nodes[a] & 1)
                if is_ordered and not expected and not self._implied(a, b, nodes, ancestors):
                    chain = _wait(self.recorded, nodes[a], nodes[b]).chain
                    self._note(self.unexpected, a, b, chain)
                if expected and not is_ordered:
                    self._note(
                        self.absent,
                        a,
                        b,
                        _wait(self.predicted, self.predicted_nodes[a], self.predicted_nodes[b]).chain,
                    )

    def _implied(self, a: int, b: int, nodes: list[int], ancestors: list[int]) -> bool:
        """True if an operation between the two already orders them."""
        return any(
            ancestors[nodes[b]] >> nodes[m] & 1 and ancestors[nodes[m]] >> nodes[a] & 1
            for m in range(len(nodes))
            if m not in (a, b)
        )

    def _note(self, differences: list[OrderDifference], a: int, b: int, chain: list[Instruction]) -> None:
        earlier, later = (self.predicted.nodes[self.predicted_nodes[index]].label for index in (a, b))
        is_noted = any(
            (difference.before, difference.after) == (earlier, later) for difference in differences
        )
        if not is_noted and len(differences) < MAX_SHOWN:
            differences.append(OrderDifference(before=earlier, after=later, chain=chain))
