"""Takes programs apart to explain their times: slices of one kind alone, and the edges of captured graphs.

Slices: one kind of work alone, beside the other kind, and tile after tile; they calibrate the simulator.

Graphs: capture turns every record and wait into edges, so that what a program orders can be compared with
what lint says it orders, without any timing. Each operation's node is found by asking its stream, right after
the operation was submitted, what the stream's next node would depend on; a communication's, which is on
another stream, when it is waited for: the dependency that is new then, or where the stream had it already by
another way, the one among those that the call added to the graph.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from aorta.device.streams import MAIN, DeviceStreams, kept_streams, stream_apart
from aorta.programs.execute.executor import Action, Execution, Tensors, streams_needed, wait_all
from aorta.programs.execute.symmetric import driver
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Gemm, Program, Record, Ref, Step, Wait, WaitWork

MOST_REPEATS = 6


class Slices(Execution):
    """The program of another execution on its tensors, streams and groups. Construction is collective."""

    def __init__(self, execution: Execution, side: int, control: Any) -> None:
        """side: a stream that the program does not use."""
        super().__init__(
            execution.program, execution.tensors, execution.streams, execution.groups, control=control
        )
        self.side = side
        self._comm = self._compiled(self._without(Gemm))
        self._gemm_actions = self._compiled(self._without(Communicate, WaitWork))
        self._chain = list(self._chained())
        self._multiplies = [self._gemm(step.op) for step in self.steps if isinstance(step.op, Gemm)]

    def comm(self) -> None:
        """The program's communication and dependencies, without its multiplies."""
        for action in self._comm:
            action()

    def gemm(self) -> None:
        """The program's multiplies and dependencies, without its communication."""
        for action in self._gemm_actions:
            action()

    def chained(self) -> None:
        """The same work on the same streams, but tile after tile: each tile's stream waits for the one before
        it, by explicit events that pass through the side stream.

        Nothing can overlap, and there are as many edges between streams as with fork and join in the loop.
        Submitted behind MAIN and joined into it; the program's own records and waits are left out.
        """
        for action in self._chain:
            action()

    def beside_comm(self, times: int) -> None:
        """The multiplies on MAIN while all communication runs `times` times elsewhere."""
        self.streams.wait(self.side, self.streams.record(MAIN))
        for _ in range(times):
            self._communicate_on(self.side)
        for work in self._multiplies:
            self.streams.submit(MAIN, work)

    def beside_gemm(self, times: int) -> None:
        """The communication, awaited by MAIN, while the multiplies run `times` times elsewhere."""
        self.streams.wait(self.side, self.streams.record(MAIN))
        for work in self._multiplies * times:
            self.streams.submit(self.side, work)
        self._communicate_on(MAIN)

    def _without(self, *kinds: type) -> list[Step]:
        return [step for step in self.steps if not isinstance(step.op, kinds)]

    def _communicate_on(self, stream: int) -> None:
        """Issues every communication from one stream, which then waits for all of them."""
        issued = [self._issued_on(step.op, stream) for step in self.steps if isinstance(step.op, Communicate)]
        for work in issued:
            self._wait_work(stream, work)

    def _issued_on(self, op: Communicate, stream: int) -> Any:
        launch = self._launch(op)
        if self.streams.kind == "threads":
            return self._run_on_lane(op.lane, stream, lambda: wait_all(launch(False)))
        issued: list[Any] = []
        self.streams.submit(stream, lambda: issued.append(launch(True)))
        return issued[0]

    def _chained(self) -> Iterator[Action]:
        opens: type | None = None
        previous = MAIN
        for step in self._without(Record, Wait):
            action = self._action(step)
            if action is None:
                continue
            opens = opens or type(step.op)
            if isinstance(step.op, opens):
                stream = self.stream_numbers[step.stream]
                if previous != MAIN:
                    yield self._following(self.side, previous)
                    previous = self.side
                yield self._following(stream, previous)
                previous = stream
            yield action
        yield self._following(MAIN, previous)

    def _following(self, stream: int, leader: int) -> Action:
        return lambda: self.streams.wait(stream, self.streams.record(leader))


def repeated(submit: Callable[[int], None], of_ms: float, other_ms: float) -> Callable[[], None]:
    """The other kind often enough to go on for as long as the measured one; the same count on all ranks
    that have the same times."""
    times = min(int(of_ms / max(other_ms, 1e-6)) + 2, MOST_REPEATS)
    return lambda: submit(times)


CAPTURING = 1
EDGE_DATA_BYTES = 8
OTHER = "other"


def captured_graph(
    program: Program,
    tensors: Tensors,
    groups: Mapping[str, dist.ProcessGroup],
    device: torch.device,
    control: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], torch.cuda.CUDAGraph]:
    """({"nodes": [{"name"}], "edges": [[from, to]]}, the graph itself, which can be replayed).

    Nodes: the communications in order of issue, the multiplies in order of issue, then whatever else was
    captured. NCCL only; collective. Raises HostProgramError where the driver does not tell.
    """
    if device not in _capturing:
        _capturing[device] = stream_apart(device)
    stream = _capturing[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        streams = kept_streams([0] * streams_needed(program, threads=False), device)
        finder = _Finder(program, streams, dist.get_rank(next(iter(groups.values()))))
        execution = _Observed(finder, program, tensors, streams, groups, control=control)
        finder.enabled = False
        execution.run()  # communicators and workspaces are made at a first call
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    finder.enabled = True
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        execution.run()
    return _described(graph.raw_cuda_graph(), finder), graph


_capturing: dict[torch.device, torch.cuda.Stream] = {}
"""The streams on which captures begin: not the default stream, and none that kept_streams lends."""


class _Observed(Execution):
    """Tells a finder of each step just after it was submitted."""

    def __init__(self, finder: "_Finder", *arguments: Any, **named: Any) -> None:
        self.finder = finder
        super().__init__(*arguments, **named)

    def _compiled(self, steps: Iterable[Step]) -> list[Action]:
        actions = []
        for step in steps:
            action = self._action(step)
            if action is not None:
                actions += [action, self._observed(step)]
        return actions

    def _observed(self, step: Step) -> Action:
        stream = self.stream_numbers[step.stream]
        return lambda: self.finder.observe(step, stream)


class _Finder:
    """Finds the node that each operation became."""

    def __init__(self, program: Program, streams: DeviceStreams, rank: int) -> None:
        self.streams = streams
        self.enabled = True
        steps = [step.op for step in program.unroll(rank)]
        self.comm_of: dict[Ref, int] = {}
        for op in steps:
            if isinstance(op, Communicate) and op.work is not None:
                self.comm_of[op.work] = len(self.comm_of)
        self.comm_nodes: dict[int, int] = {}
        """Number of the communication -> node."""
        self.gemm_nodes: list[int] = []
        self.last_nodes: dict[int, set[int]] = {}
        self.seen_nodes: set[int] = set()
        """Nodes that were there after the last step."""
        self.added_by: dict[Ref, set[int]] = {}
        self.ask = _capture_info()

    def observe(self, step: Step, stream: int) -> None:
        """Notes, after each step, the nodes that its stream now ends in."""
        if not self.enabled or isinstance(step.op, Record):  # its stream may not be in the capture yet
            return
        graph, current = self.ask(self.streams.raw(stream).cuda_stream)
        new = current - self.last_nodes.get(stream, set())
        self.last_nodes[stream] = current
        if isinstance(step.op, Gemm):
            if len(current) != 1:
                raise HostProgramError(f"a multiply left its stream with {len(current)} ends")
            self.gemm_nodes += current
        elif isinstance(step.op, WaitWork):
            node = communication_node(current, new, self.added_by.get(step.op.work, set()))
            self.comm_nodes[self.comm_of[step.op.work]] = node
        if isinstance(step.op, Gemm | Communicate):
            nodes = set(_nodes(graph))
            if isinstance(step.op, Communicate) and step.op.work is not None:
                self.added_by[step.op.work] = nodes - self.seen_nodes
            self.seen_nodes = nodes


def communication_node(current: set[int], new: set[int], added: set[int]) -> int:
    """The node of a communication that was just waited for.

    found: what the waiting stream's next node depends on; new: those that the wait brought; added: nodes
    that the call of the communication put into the graph. A stream may depend on the communication before
    it waits for it, through another stream that does. Raises HostProgramError where it cannot be told.
    """
    candidates = new if len(new) == 1 else current & added
    if len(candidates) != 1:
        raise HostProgramError(
            f"waiting for a communication added {len(new)} dependencies,"
            f" and {len(current & added)} are of its own nodes: its node cannot be told"
        )
    return next(iter(candidates))


def _capture_info() -> Callable[[int], tuple[int, set[int]]]:
    """A function from a stream to its graph so far and the nodes that its next one would depend on."""
    library = driver()
    with_edges = getattr(library, "cuStreamGetCaptureInfo_v3", None)
    plain = getattr(library, "cuStreamGetCaptureInfo_v2", None)
    if with_edges is None and plain is None:
        raise HostProgramError("the CUDA driver does not tell what a capture depends on")

    def ask(stream: int) -> tuple[int, set[int]]:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        graph, nodes = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
        edges, count = ctypes.c_void_p(), ctypes.c_size_t()
        common = [ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)]
        if with_edges is not None:
            outputs = [ctypes.byref(nodes), ctypes.byref(edges), ctypes.byref(count)]
            code = with_edges(*common, *outputs)
        else:
            assert plain is not None
            code = plain(*common, ctypes.byref(nodes), ctypes.byref(count))
        if code != 0 or status.value != CAPTURING:
            raise HostProgramError(f"the stream is not being captured (driver status {code})")
        return int(graph.value or 0), {int(nodes[i] or 0) for i in range(count.value)}

    return ask


def _described(raw: int, finder: _Finder) -> dict[str, Any]:
    nodes, edges = _nodes(raw), _edges(raw)
    comm = [finder.comm_nodes[number] for number in sorted(finder.comm_nodes)]
    labels = dict.fromkeys([*comm, *finder.gemm_nodes])
    if len(labels) != len(comm) + len(finder.gemm_nodes):
        raise HostProgramError("two operations of the program ended in the same node")
    order = [*labels, *(node for node in nodes if node not in labels)]
    place = {node: number for number, node in enumerate(order)}
    names = ["ncclDevKernel"] * len(comm) + ["gemm"] * len(finder.gemm_nodes)
    names += [OTHER] * (len(order) - len(names))
    return {
        "nodes": [{"name": name} for name in names],
        "edges": [[place[source], place[target]] for source, target in edges],
    }


def _nodes(raw: int) -> list[int]:
    library, count = driver(), ctypes.c_size_t()
    _check(library.cuGraphGetNodes(ctypes.c_void_p(raw), None, ctypes.byref(count)), "counting nodes")
    nodes = (ctypes.c_void_p * count.value)()
    _check(library.cuGraphGetNodes(ctypes.c_void_p(raw), nodes, ctypes.byref(count)), "reading nodes")
    return [int(node or 0) for node in nodes]


def _edges(raw: int) -> list[tuple[int, int]]:
    library, count = driver(), ctypes.c_size_t()
    newer = getattr(library, "cuGraphGetEdges_v2", None)
    function = newer or library.cuGraphGetEdges
    empty = [None, None, None] if newer is not None else [None, None]
    _check(function(ctypes.c_void_p(raw), *empty, ctypes.byref(count)), "counting edges")
    sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (ctypes.c_byte * (EDGE_DATA_BYTES * count.value))()
    arrays = [sources, targets, data] if newer is not None else [sources, targets]
    _check(function(ctypes.c_void_p(raw), *arrays, ctypes.byref(count)), "reading edges")
    return [(int(a or 0), int(b or 0)) for a, b in zip(sources, targets, strict=True)]


def _check(status: int, call: str) -> None:
    if status != 0:
        raise HostProgramError(f"{call} of the graph failed with CUDA driver status {status}")
