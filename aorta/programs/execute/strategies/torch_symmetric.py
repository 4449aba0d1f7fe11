"""PyTorch's own operators on symmetric memory, without multicast: what a user would pick today."""

import torch

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
