"""Gradient accumulation over micro-batches, with reductions that start early.

M micro-batches, T rows of one, D model dim, F hidden dim.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from aorta.queues.options import Help
from aorta.queues.workload import Amount, DeviceWork, WorkloadOptions
from aorta.queues.workloads import block
from aorta.queues.workloads.communication import make_lanes
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow

NUM_MICRO_BATCHES = 15
NUM_BLOCKS = {"full": 3, "small": 2}
ROWS = {"full": 1024, "small": 8}
DIM = {"full": 2048, "small": 16}
HIDDEN = {"full": 8192, "small": 32}
REDUCE, FIRST_COMPUTE = 0, 1


class GradAccumOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    reduce: Annotated[
        Literal["each", "last"],
        Help("each: reduce every micro-batch's gradient once it is there; last: their sum, block by block"),
    ] = "each"


class GradAccum(CheckedWorkload):
    """outputs: dx [M, T, D]; total0 …, each block's gradient (up, then down) over micro-batches and ranks."""

    name = "grad_accum"
    priority = "P2"
    unit = "samples"
    question = "Do early reductions of accumulated gradients hide under the micro-batches that follow?"
    stream_meaning = (
        f"Stream 0 reduces and adds up gradients; {NUM_MICRO_BATCHES} micro-batches are dealt to the "
        "other N−1."
    )
    min_streams = FIRST_COMPUTE + 1
    max_streams = FIRST_COMPUTE + NUM_MICRO_BATCHES
    uses_collectives = True
    Options = GradAccumOptions
    options: GradAccumOptions

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.num_blocks, self.rows = NUM_BLOCKS[size], ROWS[size]
        self.dim, self.hidden = DIM[size], HIDDEN[size]
        (self.lane,) = make_lanes(context, 1)
        inputs = self.inputs = Inputs(context)
        self.weights = [
            inputs.up_and_down(number, self.dim, self.hidden) for number in range(self.num_blocks)
        ]
        x, self.dy = self._data(context.rank)
        hidden_shape = (NUM_MICRO_BATCHES, self.rows, self.hidden)
        self.xs = [x] + [inputs.zeros(x.shape) for _ in range(self.num_blocks)]
        self.hs = [inputs.zeros(hidden_shape) for _ in range(self.num_blocks)]
        self.dh = inputs.zeros(hidden_shape)
        num_elements = 2 * self.dim * self.hidden
        self.gradients = [
            [inputs.zeros((num_elements,)) for _ in range(NUM_MICRO_BATCHES)] for _ in range(self.num_blocks)
        ]
        # float32: the sum of micro-batches is rounded once each.
        totals = torch.zeros(self.num_blocks, num_elements, device=context.device)
        self.summed = torch.zeros_like(totals)
        self.outputs = {"dx": inputs.zeros(x.shape)}
        self.outputs |= {f"total{number}": totals[number] for number in range(self.num_blocks)}
        self.flow = Dataflow(context)

    def _data(self, rank: int) -> tuple[Tensor, Tensor]:
        shape = (NUM_MICRO_BATCHES, self.rows, self.dim)
        return self.inputs.normal("x", shape, rank=rank), self.inputs.normal("dy", shape, rank=rank)

    def iteration(self, index: int) -> None:
        for m in range(NUM_MICRO_BATCHES):
            stream = FIRST_COMPUTE + m % (self.context.num_streams - FIRST_COMPUTE)
            self.flow.put(stream, "forward", partial(self._forward, m))
            for number in reversed(range(self.num_blocks)):
                gradient = [("gradient", number, m)]
                self.flow.put(stream, "backward", partial(self._backward, number, m), writes=gradient)
                self._accumulate(number, m)

    def _forward(self, m: int) -> None:
        for number, weights in enumerate(self.weights):
            block.forward(self.xs[number][m], *weights, self.hs[number][m], self.xs[number + 1][m])
        self.outputs["dx"][m].copy_(self.dy[m])

    def _backward(self, number: int, m: int) -> None:
        up, down = self.weights[number]
        dx, dh = self.outputs["dx"][m], self.dh[m]
        x, h = self.xs[number][m], self.hs[number][m]
        block.backward_hidden(dx, h, down, dh)
        gradients = block.split(self.gradients[number][m], self.dim, self.hidden)
        block.backward_weights(dx, x, h, dh, gradients, accumulate=False)
        dx.addmm_(dh, up.t())

    def _accumulate(self, number: int, m: int) -> None:
        gradient, name = self.gradients[number][m], ("gradient", number, m)
        if self.options.reduce == "each":
            self.flow.put(REDUCE, "comm all_reduce", partial(self.lane.all_reduce, gradient), writes=[name])
            total = self.outputs[f"total{number}"]
            self.flow.put(REDUCE, "add", partial(_add, total, gradient, m == 0), [name])
            return
        self.flow.put(REDUCE, "add", partial(_add, self.summed[number], gradient, m == 0), [name])
        if m == NUM_MICRO_BATCHES - 1:
            self.flow.put(REDUCE, "comm all_reduce", partial(self._reduce_sum, number))

    def _reduce_sum(self, number: int) -> None:
        total = self.outputs[f"total{number}"]
        total.copy_(self.summed[number])
        self.lane.all_reduce(total)

    def amount(self) -> Amount:
        num_samples = NUM_MICRO_BATCHES * self.rows
        kernels_per_block = block.KERNELS_FORWARD + block.KERNELS_BACKWARD + 1
        num_reductions = NUM_MICRO_BATCHES if self.options.reduce == "each" else 1
        operations = (
            self.num_blocks * (NUM_MICRO_BATCHES * kernels_per_block + num_reductions) + NUM_MICRO_BATCHES
        )
        return Amount(operations, num_samples, num_samples)

    def device_work(self) -> DeviceWork:
        forward = block.gemm_flops(NUM_MICRO_BATCHES * self.rows, self.dim, self.hidden)
        return matrix_work(self.dy.dtype, self.num_blocks * 3 * forward)

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance = tolerance_of(self.dy.dtype)
        totals: list[Tensor] = []
        for rank in range(self.lane.size):
            x, dy = (data.flatten(0, 1) for data in self._data(rank))
            _, dx, gradients = block.reference(x, self.weights, dy)
            flat = [torch.cat([up.flatten(), down.flatten()]) for up, down in gradients]
            totals = [a + b for a, b in zip(totals, flat, strict=True)] if totals else flat
            if rank == self.context.rank:
                yield TensorComparison("dx", self.outputs["dx"], dx.view(self.dy.shape), tolerance)
        for number, total in enumerate(totals):
            name = f"total{number}"
            yield TensorComparison(name, self.outputs[name], total, tolerance)


def _add(total: Tensor, gradient: Tensor, is_first: bool) -> None:
    if is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
