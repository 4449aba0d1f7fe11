"""Simulation of a host program's time, from the cost of its slices: streams on finite hardware queues.

The host issues instructions one by one. Each becomes packets of its stream, and streams share queues: the
k-th stream that is used belongs to queue k mod Q. A queue looks at its first packet only, so a packet that
has to wait holds up strangers behind it. Two models of what it does next:

start-order   a kernel that has started makes room for the next packet (CUDA work queues)
aql-barrier   the next packet waits until the kernel has ended (AQL with the barrier bit)

A lane is a stream too. Records never block, waits do. Compute kernels run one after another, in the order in
which they become ready; communications that run at the same time share the link. One rank is simulated; the
others are taken to be as far as this one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

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
from aorta.timeline.types import Kind, Span, Timeline

QueueModel = Literal["start-order", "aql-barrier"]
QUEUE_MODELS: tuple[str, ...] = get_args(QueueModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times of slices alone, and their effect on each other. An operation's own cost_us= goes before them."""

    comm_us: float
    gemm_us: float
    host_us: float = 0.0
    """Host time per instruction that reaches the device."""
    comm_slowdown: float = 1.0
    """Factor on the time of a communication while compute runs."""
    compute_slowdown: float = 1.0
    """Factor on the time of compute while a communication runs."""

    def __post_init__(self) -> None:
        for name in ("comm_us", "gemm_us", "host_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise HostProgramError(f"{name} must be a time, got {getattr(self, name)}")
        for name in ("comm_slowdown", "compute_slowdown"):
            if not 1 <= getattr(self, name) < math.inf:
                raise HostProgramError(f"{name} is a factor of at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware that the streams run on."""

    num_queues: int | None = None
    """Number of hardware queues; None: one for every stream."""
    model: QueueModel = "start-order"
    in_issue_order: bool = False
    """True: compute kernels start in order of issue, on different queues too; False: as they are ready."""

    wait_us: float = 0.0
    """Delay from the end of an awaited packet until the stream goes on."""
    comm_entry: float = 0.0
    """Share of a compute kernel's time after which a communication that comes later finds room beside it.
    1: not before the kernel ends, which is what a kernel does whose blocks fill the device until they end."""

    def __post_init__(self) -> None:
        if not 0 <= self.wait_us < math.inf:
            raise HostProgramError(f"wait_us must be a time, got {self.wait_us}")
        if not 0 <= self.comm_entry <= 1:
            raise HostProgramError(f"comm_entry is a share from 0 to 1, got {self.comm_entry}")
        if self.num_queues is not None and self.num_queues < 1:
            raise HostProgramError(f"queues must be at least 1, got {self.num_queues}")


@dataclass(frozen=True, slots=True)
class Ran:
    """One kernel of the simulated rank."""

    op: Op
    stream: str
    start_us: float
    end_us: float
    alone_us: float
    """Time with the device to itself."""

    @property
    def is_comm(self) -> bool:
        return isinstance(self.op, Communicate)


def simulate(program: Program, costs: Costs, machine: Machine | None = None, rank: int = 0) -> list[Ran]:
    """Kernels of one rank with their times, in order of start; the first instruction is issued at 0.

    Raises HostProgramError for a rank that does not exist and a wait on a work that nothing produced.
    """
    machine = machine or Machine()
    packets = _Packets(costs).build(program.unroll(rank))
    _Device(packets, costs, machine).run()
    kernels = sorted((p for p in packets if p.kernel is not None), key=lambda p: (p.start_us, p.number))
    return [Ran(p.kernel, p.stream, p.start_us, p.end_us, p.work_us) for p in kernels if p.kernel is not None]


def duration_us(ran: list[Ran]) -> float:
    """Time from the first instruction to the end of the last kernel."""
    return max((kernel.end_us for kernel in ran), default=0.0)


def timeline(ran: list[Ran]) -> Timeline:
    """Timeline of these kernels, beginning with the first instruction."""
    spans = [
        Span(
            kernel.start_us / 1e3,
            kernel.end_us / 1e3,
            Kind.COMM if kernel.is_comm else Kind.COMPUTE,
            kernel.op.op if isinstance(kernel.op, Communicate) else "",
            kernel.stream,
            kernel_name(kernel.op),
        )
        for kernel in ran
    ]
    compute = sorted({kernel.stream for kernel in ran if not kernel.is_comm})
    window_ms = (0.0, duration_us(ran) / 1e3)
    return Timeline.from_spans(spans, window_ms, source="kernels", compute_streams=compute)


def kernel_name(op: Op) -> str:
    """Name of an operation with the part that it fills, such as `gemm C[3]`."""
    match op:
        case Communicate(op=kind, source=source, out=out):
            return f"{kind} {out if out is not None else source}"
        case Gemm(out=out):
            return f"gemm {out}"
        case UserOp(name=name):
            return name
    return format_op(op)


@dataclass(slots=True)
class _Packet:
    """An entry of a hardware queue: a kernel, a wait for another packet, or a record."""

    number: int
    stream: str
    issued_us: float
    kernel: Op | None = None
    work_us: float = 0.0
    waits_for: "_Packet | None" = None
    before: "_Packet | None" = None
    """The packet before this one in the stream."""
    ready_us: float | None = None
    """Time at which nothing before it was left."""
    is_done: bool = False
    start_us: float = 0.0
    end_us: float = 0.0

    @property
    def is_comm(self) -> bool:
        return isinstance(self.kernel, Communicate)

    @property
    def is_compute(self) -> bool:
        return self.kernel is not None and not self.is_comm


class _Packets:
    """Packets that the host puts into the streams, with the times at which it issues them."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.packets: list[_Packet] = []
        self.tail: dict[str, _Packet] = {}
        self.marks: dict[Ref, _Packet] = {}
        self.host_us = 0.0

    def build(self, steps: tuple[Step, ...]) -> list[_Packet]:
        for step in steps:
            if not isinstance(step.op, GetCurrentStream | SetStream | Allocate):
                self.issue(step.op, step.stream)
                self.host_us += self.costs.host_us
        return self.packets

    def issue(self, op: Op, stream: str) -> None:
        match op:
            case Record(event=event, stream=target):
                self.marks[event] = self.put(stream if target is None else str(target))
            case Wait(event=mark) | WaitWork(work=mark):
                if mark in self.marks:
                    self.put(stream, waits_for=self.marks[mark])
                elif isinstance(op, WaitWork):
                    raise HostProgramError(f"line {op.line}: {format_op(op)}: no communication has this work")
            case Communicate(work=work, lane=lane) if work is not None:
                # As a process group does: its stream waits for everything that the issuing stream holds now.
                self.put(str(lane), waits_for=self.put(stream))
                self.put(str(lane), kernel=op)
                self.marks[work] = self.put(str(lane))  # whose passing is the communication's end
            case Communicate():
                self.put(stream, kernel=op)
                self.put(stream)
            case _:
                self.put(stream, kernel=op)

    def put(self, stream: str, kernel: Op | None = None, waits_for: _Packet | None = None) -> _Packet:
        work_us = 0.0 if kernel is None else self.cost_us(kernel)
        packet = _Packet(
            len(self.packets), stream, self.host_us, kernel, work_us, waits_for, self.tail.get(stream)
        )
        self.packets.append(packet)
        self.tail[stream] = packet
        return packet

    def cost_us(self, op: Op) -> float:
        match op:
            case Communicate(cost_us=own):
                return self.costs.comm_us if own is None else own
            case Gemm(cost_us=own):
                return self.costs.gemm_us if own is None else own
            case UserOp(cost_us=own):
                return own or 0.0
        raise AssertionError(type(op))


@dataclass(slots=True)
class _Queue:
    """A hardware queue with its first packet that has not gone."""

    packets: list[_Packet] = field(default_factory=list)
    first: int = 0

    @property
    def head(self) -> _Packet | None:
        return self.packets[self.first] if self.first < len(self.packets) else None

    @property
    def previous(self) -> _Packet | None:
        return self.packets[self.first - 1] if self.first else None


class _Device:
    """State of the device while it works: queues, running kernels, and the time."""

    def __init__(self, packets: list[_Packet], costs: Costs, machine: Machine) -> None:
        self.packets, self.costs, self.machine = packets, costs, machine
        streams = list(dict.fromkeys(packet.stream for packet in packets))
        num_queues = max(1, min(machine.num_queues or len(streams), len(streams)))  # more stay empty
        self.queues = [_Queue() for _ in range(num_queues)]
        queue_of = {stream: place % num_queues for place, stream in enumerate(streams)}
        for packet in packets:
            self.queues[queue_of[packet.stream]].packets.append(packet)
        self.compute = [packet for packet in packets if packet.is_compute]
        self.num_started = 0
        """Number of compute kernels that have started."""
        self.running: list[tuple[_Packet, float]] = []
        """Running kernels, each with the work that is left, µs alone."""
        self.open: list[_Packet] = []
        """Records that were reached before the work ahead of them in their streams had ended."""
        self.now_us = 0.0

    def run(self) -> None:
        while True:
            self.advance()
            if all(queue.head is None for queue in self.queues) and not self.running:
                return
            self.pass_time()

    def advance(self) -> None:
        """Let everything happen that can happen now."""
        moved = True
        while moved:
            moved = self.close_records()
            candidates = [
                (head, queue) for queue in self.queues if (head := queue.head) and self.is_ready(queue, head)
            ]
            # The packet that has been ready for longest goes first; of equals, the one issued first.
            for head, queue in sorted(candidates, key=lambda pair: (pair[0].ready_us, pair[0].number)):
                if self.finds_room(head):
                    self.go(head)
                    queue.first += 1
                    moved = True
                    break

    def close_records(self) -> bool:
        closed = [packet for packet in self.open if packet.before is None or packet.before.is_done]
        for packet in closed:
            packet.is_done, packet.end_us = True, self.now_us
            self.open.remove(packet)
        return bool(closed)

    def is_ready(self, queue: _Queue, head: _Packet) -> bool:
        """True if the queue's first packet lacks nothing but room on the device."""
        if head.ready_us is None:
            if head.issued_us > self.now_us:
                return False
            barrier = self.machine.model == "aql-barrier"
            if barrier and queue.previous is not None and not queue.previous.is_done:
                return False
            if head.waits_for is not None and not self.has_passed(head.waits_for):
                return False
            if (head.waits_for is not None or head.kernel is not None) and not _stream_is_at(head):
                return False
            head.ready_us = self.now_us
        return True

    def has_passed(self, awaited: _Packet) -> bool:
        return awaited.is_done and awaited.end_us + self.machine.wait_us <= self.now_us

    def finds_room(self, head: _Packet) -> bool:
        """True if the device has room: compute kernels fill it; communication enters where one lets it."""
        if head.kernel is None:
            return True
        compute = [(packet, left) for packet, left in self.running if packet.is_compute]
        # Communication enters when comm_entry of the compute kernel's work is done.
        if head.is_comm:
            return all(left <= self.held_us(packet) for packet, left in compute)
        return not compute and (not self.machine.in_issue_order or self.compute[self.num_started] is head)

    def held_us(self, packet: _Packet) -> float:
        """Work that a compute kernel has left, µs, when it begins to make room for communication."""
        return packet.work_us * (1 - self.machine.comm_entry)

    def go(self, head: _Packet) -> None:
        head.start_us = self.now_us
        if head.kernel is not None:
            self.num_started += head.is_compute
            self.running.append((head, head.work_us))
        elif head.waits_for is not None or _stream_is_at(head):
            # A record of work that ended long ago passed at that time, not now.
            ended = head.before.end_us if head.waits_for is None and head.before is not None else self.now_us
            head.is_done, head.end_us = True, ended
        else:
            self.open.append(head)

    def pass_time(self) -> None:
        """Advance to the next end of a kernel, instruction of the host, or awaited moment."""
        rate = self.rates()
        ends = [left_us / rate[packet.is_comm] for packet, left_us in self.running]
        gaps_us = [*self.moments(), *self.room(rate[False])]
        # Waits are for packets issued before, so the earliest packet of all can always go.
        assert ends or gaps_us, "every queue waits"
        step_us = min(ends + gaps_us)
        self.now_us += step_us
        unfinished: list[tuple[_Packet, float]] = []
        for (packet, left_us), end in zip(self.running, ends, strict=True):
            if end <= step_us:
                packet.is_done, packet.end_us = True, self.now_us
            else:
                unfinished.append((packet, left_us - step_us * rate[packet.is_comm]))
        self.running = unfinished

    def moments(self) -> Iterator[float]:
        """Times left, µs, until the host issues an instruction or a wait passes."""
        for queue in self.queues:
            head = queue.head
            if head is None:
                continue
            passes_us = head.issued_us
            if head.waits_for is not None and head.waits_for.is_done:
                passes_us = max(passes_us, head.waits_for.end_us + self.machine.wait_us)
            if passes_us > self.now_us:
                yield passes_us - self.now_us

    def room(self, rate: float) -> Iterator[float]:
        """Times left, µs, until compute kernels begin to make room."""
        for packet, left_us in self.running:
            if packet.is_compute and 0 < self.held_us(packet) < left_us:
                yield (left_us - self.held_us(packet)) / rate

    def rates(self) -> dict[bool, float]:
        """Speed of communication (True) and of compute (False), relative to alone."""
        num_comm = sum(packet.is_comm for packet, _ in self.running)
        is_shared = 0 < num_comm < len(self.running)
        comm, compute = 1 / max(num_comm, 1), 1.0
        if is_shared:
            comm, compute = comm / self.costs.comm_slowdown, 1 / self.costs.compute_slowdown
        return {True: comm, False: compute}


def _stream_is_at(packet: _Packet) -> bool:
    """True if everything before the packet in its stream is done."""
    return packet.before is None or packet.before.is_done
