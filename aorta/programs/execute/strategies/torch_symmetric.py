"""PyTorch's own operators on symmetric memory, without multicast: what a user would pick today."""

import torch

from aorta.programs.execute.binding import expected, in_order_of_ranks
from aorta.programs.execute.runtime.symmetric import need_symmetric_memory
from aorta.programs.execute.strategies.base import Strategy, StrategyBench, StrategyUnavailable
from aorta.programs.language.expr import HostProgramError

ALLOCATES = "the operator allocates its results itself"
MULTICAST_ROWS = 2048
"""Rows up to which torch may multicast. With return_A the gather never does."""


class TorchSymmetric(Strategy):
    """Base: results are whatever the operator returned last."""

    note = ALLOCATES
    transport = "copy engine"
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
        """The result of the last call is dropped; the operator's memory cannot be reached."""
        self.out = torch.full_like(self.out, float("nan"))


class FusedGather(TorchSymmetric):
    """fused_all_gather_matmul: copy engines pull, two streams multiply."""

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
    """fused_matmul_reduce_scatter."""

    name = "torch fused_matmul_reduce_scatter"
    op = "fused_matmul_reduce_scatter"

    def submit(self) -> None:
        operands = self.bench.operands
        self.out = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            operands.a, operands.w, "sum", 0, self.group_name
        )


class LowContentionGather(TorchSymmetric):
    """The gather by copy engines on torch's own stream, own rows multiplied meanwhile."""

    name = "torch low-contention all_gather"
    op = "_low_contention_all_gather"

    def submit(self) -> None:
        bench, problem = self.bench, self.bench.problem
        operands, rows = bench.operands, problem.shard_rows
        gathered = torch.ops.symm_mem._low_contention_all_gather(operands.a, self.group_name)
        out = self.bench.arena.tensor("C", (problem.m, problem.n))
        first, end = bench.rank * rows, (bench.rank + 1) * rows
        torch.mm(operands.a, operands.w, out=out[first:end])
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        for low, high in ((0, first), (end, problem.m)):
            if high > low:
                torch.mm(gathered[low:high], operands.w, out=out[low:high])
        self.out = out


class LowContentionScatter(TorchSymmetric):
    """Tiles multiplied one after the other, each scattered by copies while the next is multiplied."""

    name = "torch low-contention reduce_scatter"
    op = "_low_contention_reduce_scatter"

    def __init__(self, bench: StrategyBench, tiles: int) -> None:
        super().__init__(bench, tiles=tiles)
        if bench.problem.m % (tiles * bench.problem.num_ranks):
            raise StrategyUnavailable(
                f"m cannot be cut into {tiles} tiles of {bench.problem.num_ranks} ranks"
            )
        self.tiles = tiles
        # The operator reads its input on a stream that the allocator does not know of.
        rows = bench.problem.m // tiles
        self.partial = bench.arena.tensor("P", (tiles, rows, bench.problem.n))
        self.scattered: list[torch.Tensor] = []

    def submit(self) -> None:
        operands = self.bench.operands
        started = []
        for tile, partial in zip(operands.a.chunk(self.tiles), self.partial, strict=True):
            torch.mm(tile, operands.w, out=partial)
            started.append(torch.ops.symm_mem._low_contention_reduce_scatter(partial, "sum", self.group_name))
        self.scattered = [torch.ops._c10d_functional.wait_tensor(tile) for tile in started]

    def result(self) -> torch.Tensor:
        return in_order_of_ranks(self.bench.problem, torch.stack(self.scattered))

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        return expected(self.bench.problem, product, self.bench.rank, self.tiles)
