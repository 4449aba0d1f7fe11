"""Execution of a host program on real streams, in the order of its text.

On a device a stream of the program is a stream of the device and a lane is the stream that a process group
keeps for asynchronous collectives. On CPU a stream is a thread and a lane is one more thread that issues the
collectives of its group one after the other: gloo's own asynchronous collectives would run at once and in
any order, and waiting for one would stop the host instead of a stream.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from aorta.device.streams import MAIN, StreamEvent, Streams
from aorta.programs.execute import collectives
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import (
    Communicate,
    Gemm,
    Program,
    Record,
    Ref,
    Step,
    UserOp,
    Wait,
    WaitWork,
)

Tensors = Mapping[str, torch.Tensor]
"""Tensors by the buffer's name, each [*tiles, …]: a part of a buffer is the tensor at its index."""
Action = Callable[[], None]
"""One call that the host makes when the program runs."""


class Execution:
    """A program of this rank bound to streams, process groups and tensors; running it allocates nothing.

    The tensors must live until synchronize() after the last run(), which is why this object keeps them.
    """

    def __init__(
        self,
        program: Program,
        tensors: Tensors,
        streams: Streams,
        groups: Mapping[str, dist.ProcessGroup],
        *,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        """groups: one per lane of the program, the same lanes in the same order on every rank.

        Collective: the ranks compare the communications that they are going to issue, over control (a gloo
        group, say) or else the first lane's group.

        Raises HostProgramError, on every rank and before anything ran, where ranks disagree; on one rank
        where buffers, lanes or streams are missing.
        """
        self.program = program
        self.tensors = tensors
        self.streams = streams
        self.groups = dict(groups)
        any_group = next(iter(groups.values()))
        self.rank = dist.get_rank(any_group)
        problem, steps = self._unrolled()
        self._agree(problem, control or any_group)
        self.steps = steps
        self.stream_numbers = stream_numbers(program, self.rank)
        self.lane_numbers = lane_numbers(program, self.rank, len(streams))
        self._refuse_few_streams()
        self._events: dict[Ref, StreamEvent] = {}
        self._works: dict[Ref, Any] = {}
        self._actions = self._compiled(steps)

    def run(self) -> None:
        """Submit the whole program; the host does not wait.

        MAIN is the caller's stream: it waits for the streams that the program joins into it.
        """
        for action in self._actions:
            action()

    def poison(self) -> None:
        """Fill every buffer that is not an input with NaN, so that a tile left unwritten shows in a result.

        The caller orders this with other uses of the buffers.
        """
        inputs = {name for name, buffer in self.program.buffers().items() if buffer.role == "input"}
        for name, tensor in self.tensors.items():
            if name not in inputs:
                tensor.fill_(float("nan"))

    def part(self, ref: Ref) -> torch.Tensor:
        """The tensor of a part, as a matrix."""
        index = tuple(i for i in ref.index if isinstance(i, int))
        tensor = self.tensors[ref.name][index] if index else self.tensors[ref.name]
        return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor

    def _unrolled(self) -> tuple[str | None, tuple[Step, ...]]:
        """The steps, or the problem that they have: raised by all ranks together, in _agree()."""
        try:
            steps = self.program.unroll(self.rank)
        except HostProgramError as error:
            return str(error), ()
        for name, buffer in self.program.buffers().items():
            tensor = self.tensors.get(name)
            if tensor is None or tuple(tensor.shape[: len(buffer.tiles)]) != buffer.tiles:
                shape = "none" if tensor is None else str(list(tensor.shape))
                return f"buffer {name} has tiles {list(buffer.tiles)}, its tensor is {shape}", ()
        for step in steps:
            if isinstance(step.op, UserOp):
                return f"{step.op.name} is neither communication nor a multiply: it cannot be run", ()
            if isinstance(step.op, Communicate) and str(step.op.lane) not in self.groups:
                return f"no process group is given for lane {step.op.lane}", ()
        return None, steps

    def _agree(self, problem: str | None, group: dist.ProcessGroup) -> None:
        """Raise HostProgramError on all ranks where one has a problem, or where they would not meet."""
        communications: list[tuple[str, ...]] = []
        if problem is None:
            communications = collectives.communications(self.program, self.rank, self._tile_bytes())
        rows = collectives.gathered((problem, communications), group)
        for rank, (text, _) in enumerate(rows):
            if text is not None:
                raise HostProgramError(text if rank == self.rank else f"rank {rank}: {text}")
        collectives.refuse_mismatch([rank_rows for _, rank_rows in rows])

    def _tile_bytes(self) -> dict[str, int]:
        sizes = {}
        for name, buffer in self.program.buffers().items():
            tensor = self.tensors[name]
            sizes[name] = tensor.numel() * tensor.element_size() // math.prod(buffer.tiles)
        return sizes

    def _refuse_few_streams(self) -> None:
        workers = len(self.stream_numbers) - 1
        needed = workers + (len(self.lane_numbers) if self.streams.kind == "threads" else 0)
        if needed > len(self.streams):
            raise HostProgramError(f"the program needs {needed} streams, {len(self.streams)} are there")

    def _compiled(self, steps: Iterable[Step]) -> list[Action]:
        """Calls for the steps, in order; benchmarks make some of them for parts of a program."""
        return [action for step in steps if (action := self._action(step)) is not None]

    def _action(self, step: Step) -> Action | None:
        """Call that the host makes for one step; None where it makes none."""
        op, stream = step.op, self.stream_numbers[step.stream]
        match op:
            case Record(event=event, stream=named):
                recorded = stream if named is None else self.stream_numbers[str(named)]
                return lambda: self._events.__setitem__(event, self.streams.record(recorded))
            case Wait(event=event):
                return lambda: self.streams.wait(stream, self._events[event])
            case WaitWork(work=work):
                return lambda: self._wait_work(stream, self._works[work])
            case Communicate():
                return self._communicate(op, stream)
            case Gemm():
                multiply = self._gemm(op)
                return lambda: self.streams.submit(stream, multiply)
        return None

    def _gemm(self, op: Gemm) -> Action:
        a, b, out = self.part(op.a), self.part(op.b), self.part(op.out)
        if op.transposed:
            b = b.t()
        bias = None if op.bias is None else self.part(op.bias)

        def multiply() -> None:
            if bias is None:
                torch.mm(a, b, out=out)
            else:
                torch.addmm(bias, a, b, out=out)

        return multiply

    def _communicate(self, op: Communicate, stream: int) -> Action:
        launch = self._launch(op)
        if self.streams.kind == "threads":
            return self._on_lane_thread(op, stream, launch)
        work = op.work

        def issue() -> None:
            issued = launch(True) if work is not None else launch(False)
            if work is not None:
                self._works[work] = issued
            elif issued:
                wait_all(issued)  # point to point has no synchronous form that posts both sides

        return lambda: self.streams.submit(stream, issue)

    def _on_lane_thread(self, op: Communicate, stream: int, launch: Callable[[bool], Any]) -> Action:
        def issue() -> None:
            finished = self._run_on_lane(op.lane, stream, lambda: wait_all(launch(False)))
            if op.work is None:
                self.streams.wait(stream, finished)
            else:
                self._works[op.work] = finished

        return issue

    def _run_on_lane(self, lane: Ref, stream: int, run: Action) -> StreamEvent:
        """Submit run to a lane's thread; returns the event of its end."""
        number = self.lane_numbers[str(lane)]
        # The lane follows what the issuing stream holds now, as a process group's stream does.
        self.streams.wait(number, self.streams.record(stream))
        self.streams.submit(number, run)
        return self.streams.record(number)

    def _wait_work(self, stream: int, work: Any) -> None:
        if self.streams.kind == "threads":
            self.streams.wait(stream, work)
        else:  # wait() makes the current stream wait, so it is called with this one current
            self.streams.submit(stream, lambda: wait_all(work))

    def _launch(self, op: Communicate) -> Callable[[bool], Any]:
        """Function of async_op that issues the communication; its result goes to wait_all."""
        group = self.groups[str(op.lane)]
        source = None if op.source is None else self.part(op.source)
        out = None if op.out is None else self.part(op.out)
        to, by, root = (i if isinstance(i, int) else None for i in (op.to, op.by, op.root))
        match op.op:
            case "send" | "recv" | "send_recv":
                return lambda _: collectives.exchange(source, to, out, by, group)
        assert source is not None
        assert out is not None
        match op.op:
            case "all_gather":
                return lambda async_op: collectives.all_gather(out, source, group, async_op)
            case "reduce_scatter":
                return lambda async_op: collectives.reduce_scatter(out, source, group, async_op)
            case "all_to_all":
                return lambda async_op: dist.all_to_all_single(out, source, group=group, async_op=async_op)
            case "all_reduce":
                return lambda async_op: dist.all_reduce(
                    _in_place(out, source), group=group, async_op=async_op
                )
            case "broadcast":
                assert root is not None
                sender = dist.get_global_rank(group, root)
                is_sender = root == self.rank
                return lambda async_op: dist.broadcast(
                    _in_place(out, source) if is_sender else out, sender, group=group, async_op=async_op
                )
        raise HostProgramError(f"{op.op} cannot be run")


def stream_numbers(program: Program, rank: int = 0) -> dict[str, int]:
    """Numbers in Streams of the program's streams: the caller's is MAIN, the others in order of first use."""
    main = program.main_stream()
    numbers = {main: MAIN}
    for step in program.unroll(rank):
        numbers.setdefault(step.stream, len(numbers) - 1)
        if isinstance(step.op, Record) and step.op.stream is not None:
            numbers.setdefault(str(step.op.stream), len(numbers) - 1)
    return numbers


def lane_numbers(program: Program, rank: int, num_streams: int) -> dict[str, int]:
    """Numbers of the threads that play the lanes: the last ones, so that workers keep theirs."""
    lanes = lanes_of(program, rank)
    return {lane: num_streams - 1 - number for number, lane in enumerate(lanes)}


def lanes_of(program: Program, rank: int = 0) -> list[str]:
    """Process groups that a program names, in order of first use."""
    lanes = (str(step.op.lane) for step in program.unroll(rank) if isinstance(step.op, Communicate))
    return list(dict.fromkeys(lanes))


def streams_needed(program: Program) -> int:
    """Number of streams that a program needs beside the caller's and those of its lanes."""
    return len(stream_numbers(program)) - 1


def _in_place(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if out.data_ptr() != source.data_ptr():
        out.copy_(source)
    return out


def wait_all(works: Any) -> None:
    """Make the current stream wait for the works; with gloo the calling thread waits."""
    for work in works if isinstance(works, list) else [works]:
        if work is not None:
            work.wait()
