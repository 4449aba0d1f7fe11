"""Matrix multiplies that fill the device, one beside the other."""

from collections.abc import Iterable
from functools import partial

import torch

from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    product_comparison,
)

NUM_GEMMS = 16
DIM = {"full": 8192, "small": 96}


class LargeGemmOnly(CheckedWorkload):
    """outputs: gemm0 … gemm15, the products."""

    name = "large_gemm_only"
    priority = "P0"
    unit = "TFLOP"
    question = "Does a second stream gain or cost anything where one GEMM already fills the device?"
    stream_meaning = f"The same {NUM_GEMMS} GEMMs dealt to N streams, ⌈{NUM_GEMMS}/N⌉ in a row on each."
    max_streams = NUM_GEMMS

    def setup(self) -> None:
        inputs = Inputs(self.context)
        dim = DIM[self.context.size]
        rank = self.context.rank
        self.a = inputs.normal("a", (dim, dim), rank=rank)
        self.b = [inputs.weight(f"b{index}", dim, dim) for index in range(NUM_GEMMS)]
        self.outputs = {f"gemm{index}": inputs.zeros((dim, dim)) for index in range(NUM_GEMMS)}

    def iteration(self, index: int) -> None:
        for number, out in enumerate(self.outputs.values()):
            stream = number % self.context.num_streams
            self.context.span(stream, "gemm", partial(torch.mm, self.a, self.b[number], out=out))

    def amount(self) -> Amount:
        tflop = 2.0 * DIM[self.context.size] ** 3 / 1e12
        return Amount(operations=NUM_GEMMS, samples=NUM_GEMMS, units=NUM_GEMMS * tflop)

    def device_work(self) -> DeviceWork:
        return matrix_work(self.a.dtype, NUM_GEMMS * 2.0 * DIM[self.context.size] ** 3)

    def comparisons(self) -> Iterable[TensorComparison]:
        for b, (name, out) in zip(self.b, self.outputs.items(), strict=True):
            yield product_comparison(name, self.a, b, out)
