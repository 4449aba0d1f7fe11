"""Ways of putting a collective beside a matrix multiply, with the same operands and outcome.

Serial is what every gain is measured against; Chunked runs a host program; the fused operators are PyTorch's
own, which a user would pick today.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aorta.device.backend import backend_of
from aorta.device.streams import MAIN, Streams, make_streams
from aorta.programs.execute.collectives import all_gather, reduce_scatter
from aorta.programs.execute.executor import Execution, streams_needed
from aorta.programs.execute.problem import Arena, Operands, Problem, bind, expected, in_order_of_ranks
from aorta.programs.language.emit import ORDERS, Comm, Shape, TileOrder, emit
from aorta.programs.language.expr import HostProgramError

MULTICAST_SWITCH = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""Environment variable that keeps torch's symmetric memory from using NVLink multicast."""
MULTICAST_ROWS = 2048
"""Rows up to which torch may multicast, unless it returns the gathered rows: it is asked for them."""


class StrategyUnavailable(Exception):
    """Raised where a strategy cannot run here; the message is the reason."""


@dataclass
class StrategyBench:
    """Operands, buffers and streams that strategies share, so that they are compared and not their memory.

    Make the streams with strategy_streams().
    """

    problem: Problem
    operands: Operands
    arena: Arena
    streams: Streams
    num_workers: int
    """Number of streams for tiles; they are numbered from 0."""
    device: torch.device
    rank: int
    group: dist.ProcessGroup
    """Process group of plain collectives: normal priority, default number of CTAs."""
    control: dist.ProcessGroup | None = None
    """Process group for agreements between hosts, which need no device."""

    def submit(self, work: Callable[[], object]) -> None:
        """Submit one call to MAIN."""
        self.streams.submit(MAIN, work)


def strategy_streams(num_workers: int, device: torch.device) -> Streams:
    """Streams of the workers; on threads one more plays the process group's lane."""
    return make_streams(num_workers + (device.type == "cpu"), device)


def need_symmetric_memory(device: torch.device) -> None:
    """Raise HostProgramError, with the reason, where symmetric memory cannot be used."""
    if not backend_of(device).is_device:
        raise HostProgramError("symmetric memory needs GPUs that reach each other's memory")
    if os.environ.get(MULTICAST_SWITCH) != "1" and not torch.version.hip:
        raise HostProgramError(f"{MULTICAST_SWITCH}=1 was not set before the start: multicast stays off")


class Strategy(ABC):
    """One way to compute C. Constructing it is collective: all ranks raise StrategyUnavailable, or none."""

    name: str
    note: str = ""

    def __init__(self, bench: StrategyBench, **settings: int | str) -> None:
        self.bench = bench
        self.settings: dict[str, int | str] = settings

    @property
    def label(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name} {details}".strip()

    @abstractmethod
    def submit(self) -> None:
        """Submit one computation of C to MAIN and the streams that it forks; they are joined into MAIN.

        The host does not wait. Allocates nothing, unless the operator under test does (its note says so).
        """

    @abstractmethod
    def result(self) -> torch.Tensor:
        """C of the last submit, in the form of expected(); valid until the next submit but one."""

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        """Part of reference()'s product that this rank holds."""
        return expected(self.bench.problem, product, self.bench.rank)

    @abstractmethod
    def poison(self) -> None:
        """Fill outputs and staging with NaN. Called while no rank runs anything."""


class Serial(Strategy):
    """Collective and multiply one after the other, in the order that the operation needs."""

    name = "serial"

    def __init__(self, bench: StrategyBench) -> None:
        super().__init__(bench)
        problem, arena = bench.problem, bench.arena
        self.out = arena.tensor("C", (problem.result_rows, problem.n))
        self.between = self.out
        if problem.gathers:
            self.between = arena.tensor("G", (problem.m, problem.k))
        elif problem.op == "gemm_rs":
            self.between = arena.tensor("P", (problem.m, problem.n))

    def submit(self) -> None:
        if self.bench.problem.gathers:
            self.communicate()
            self.multiply()
        else:
            self.multiply()
            self.communicate()

    def communicate(self) -> None:
        """Submit the collective alone."""
        operands, group = self.bench.operands, self.bench.group
        match self.bench.problem.op:
            case "ag_gemm":
                self.bench.submit(lambda: all_gather(self.between, operands.a, group))
            case "gemm_rs":
                self.bench.submit(lambda: reduce_scatter(self.out, self.between, group))
            case _:
                self.bench.submit(lambda: dist.all_reduce(self.out, group=group))

    def multiply(self) -> None:
        """Submit the multiply alone."""
        operands = self.bench.operands
        a, out = (self.between, self.out) if self.bench.problem.gathers else (operands.a, self.between)
        self.bench.submit(lambda: torch.mm(a, operands.w, out=out))

    def result(self) -> torch.Tensor:
        return self.out

    def poison(self) -> None:
        poison(self.out, self.between)


class Chunked(Strategy):
    """Host program of aorta.programs.language.emit for an order and numbers of tiles and streams.

    Rows of C lie by tiles, not by ranks, as in nvFuser: tiles are contiguous and need no extra copy.
    """

    name = "chunked"

    def __init__(
        self,
        bench: StrategyBench,
        order: str,
        tiles: int,
        streams: int,
        *,
        tile_order: TileOrder = "depth",
        comm: Comm = "collective",
    ) -> None:
        chunk_settings: dict[str, int | str] = {"order": order, "tiles": tiles, "streams": streams}
        if tile_order != "depth":
            chunk_settings["tile_order"] = tile_order
        super().__init__(bench, **chunk_settings)
        self.name = order if comm == "collective" else f"{comm} send_recv"
        fork, join = ORDERS[order]
        problem = bench.problem
        try:
            self.program = emit(
                Shape(
                    op=problem.op,  # type: ignore[arg-type]  # Problem checked it
                    fork=fork,
                    join=join,
                    tile_order=tile_order,
                    comm=comm,
                    num_tiles=tiles,
                    num_streams=streams,
                    num_ranks=problem.num_ranks,
                )
            )
            tensors = bind(self.program, bench.operands, bench.arena)
        except HostProgramError as error:
            raise StrategyUnavailable(str(error)) from None
        if streams_needed(self.program) > bench.num_workers:
            raise StrategyUnavailable(f"{streams} streams: only {bench.num_workers} were made")
        lanes = {"comm": bench.group}
        self.execution = Execution(self.program, tensors, bench.streams, lanes, control=bench.control)

    def submit(self) -> None:
        self.execution.run()

    def result(self) -> torch.Tensor:
        return in_order_of_ranks(self.bench.problem, self.execution.tensors["C"])

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        return expected(self.bench.problem, product, self.bench.rank, self.execution.tensors["C"].shape[0])

    def poison(self) -> None:
        self.execution.poison()


class TorchSymmetric(Strategy):
    """Base of torch's fused operators, whose result is a tensor of their own."""

    note = "the operator allocates its results itself"
    op: str

    def __init__(self, bench: StrategyBench, **settings: int | str) -> None:
        super().__init__(bench, **settings)
        try:
            need_symmetric_memory(bench.device)
        except HostProgramError as error:
            raise StrategyUnavailable(str(error)) from None
        import torch.distributed._symmetric_memory  # registers the operators

        if not hasattr(torch.ops.symm_mem, self.op):
            raise StrategyUnavailable(f"this torch has no {self.op}")
        self.group_name = bench.group.group_name
        self.out = torch.empty(0, device=bench.device)

    def result(self) -> torch.Tensor:
        return self.out

    def poison(self) -> None:
        """Drop the result of the last call; the operator's own memory cannot be reached."""
        self.out = torch.full_like(self.out, float("nan"))


class FusedGather(TorchSymmetric):
    """torch's fused_all_gather_matmul: copy engines pull, two streams multiply."""

    name = "torch fused_all_gather_matmul"
    op = "fused_all_gather_matmul"

    def submit(self) -> None:
        operands = self.bench.operands
        keeps_gathered = self.bench.problem.m <= MULTICAST_ROWS
        _, outputs = torch.ops.symm_mem.fused_all_gather_matmul(
            operands.a, [operands.w], 0, self.group_name, return_A=keeps_gathered
        )
        self.out = outputs[0]


class FusedScatter(TorchSymmetric):
    """torch's fused_matmul_reduce_scatter."""

    name = "torch fused_matmul_reduce_scatter"
    op = "fused_matmul_reduce_scatter"

    def submit(self) -> None:
        operands = self.bench.operands
        self.out = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            operands.a, operands.w, "sum", 0, self.group_name
        )


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))
