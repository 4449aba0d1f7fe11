"""No overlap: one collective and one multiply on one stream. What every gain is measured against."""

import torch

from aorta.programs.execute.runtime.collectives import all_gather, all_reduce, reduce_scatter
from aorta.programs.execute.strategies.base import Strategy, StrategyBench, poison


class Serial(Strategy):
    """all_gather then multiply, or multiply then reduce."""

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
        """The collective alone."""
        operands, group = self.bench.operands, self.bench.group
        match self.bench.problem.op:
            case "ag_gemm":
                self.bench.submit(lambda: all_gather(self.between, operands.a, group))
            case "gemm_rs":
                self.bench.submit(lambda: reduce_scatter(self.out, self.between, group))
            case _:
                self.bench.submit(lambda: all_reduce(self.out, group))

    def multiply(self) -> None:
        """The multiply alone."""
        operands = self.bench.operands
        a, out = (self.between, self.out) if self.bench.problem.gathers else (operands.a, self.between)
        self.bench.submit(lambda: torch.mm(a, operands.w, out=out))

    def result(self) -> torch.Tensor:
        return self.out

    def poison(self) -> None:
        poison(self.out, self.between)
