"""Backward with activation checkpointing: each segment's activations are computed again before its backward.

M slices of a batch, T rows of one, D model dim, F hidden dim. Only the input of each segment is kept. The
recomputation of segment s−1 needs nothing from the backward of segment s, so it may run beside it.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads import block
from aorta.queues.workloads.communication import make_lanes
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow, deal_streams

NUM_SLICES = 8
NUM_SEGMENTS = {"full": 4, "small": 3}
BLOCKS = 2
"""Blocks of a segment."""
ROWS = {"full": 1024, "small": 8}
DIM = {"full": 2048, "small": 16}
HIDDEN = {"full": 8192, "small": 32}
REDUCE = 0
NUM_SLOTS = 2
"""Segments of a slice whose activations exist at a time."""


class ActivationCkpt(CheckedWorkload):
    """outputs: y and dx [M, T, D]; of each block grad_up0, grad_down0, …, summed over slices and ranks."""

    name = "activation_ckpt"
    priority = "P2"
    unit = "samples"
    question = "Does recomputing the next segment hide beside the backward of this one?"
    stream_meaning = (
        f"Stream 0 reduces gradients; the others recompute or run forward and backward, half of them each; "
        f"{NUM_SLICES} slices of the batch are dealt to both."
    )
    min_streams = 3
    max_streams = 1 + 2 * NUM_SLICES
    uses_collectives = True

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.num_segments, self.num_blocks = NUM_SEGMENTS[size], NUM_SEGMENTS[size] * BLOCKS
        self.rows, self.dim, self.hidden = ROWS[size], DIM[size], HIDDEN[size]
        self.backward_streams, self.recompute_streams = deal_streams(
            context.num_streams, [NUM_SLICES, NUM_SLICES], first=1
        )
        (self.lane,) = make_lanes(context, 1)
        inputs = self.inputs = Inputs(context)
        self.weights = [
            inputs.up_and_down(number, self.dim, self.hidden) for number in range(self.num_blocks)
        ]
        x, self.dy = self._data(context.rank)
        shape, hidden_shape = x.shape, (NUM_SLICES, self.rows, self.hidden)
        # checkpoints[s]: input of segment s; the last is y.
        self.checkpoints = [x] + [inputs.zeros(shape) for _ in range(self.num_segments)]
        self.forward_x = inputs.zeros(shape)
        self.forward_h = inputs.zeros(hidden_shape)
        self.xs = [[inputs.zeros(shape) for _ in range(BLOCKS)] for _ in range(NUM_SLOTS)]
        self.hs = [[inputs.zeros(hidden_shape) for _ in range(BLOCKS)] for _ in range(NUM_SLOTS)]
        # gradients[p]: of the input of block p of the segment in hand, the last one of its output.
        self.gradients = [inputs.zeros(shape) for _ in range(BLOCKS + 1)]
        self.dhs = [inputs.zeros(hidden_shape) for _ in range(BLOCKS)]
        self.outputs = {"y": self.checkpoints[-1], "dx": self.gradients[0]}
        for number, (up, down) in enumerate(self.weights):
            self.outputs |= {f"grad_up{number}": torch.zeros_like(up)}
            self.outputs |= {f"grad_down{number}": torch.zeros_like(down)}
        self.flow = Dataflow(context)

    def _data(self, rank: int) -> tuple[Tensor, Tensor]:
        shape = (NUM_SLICES, self.rows, self.dim)
        return self.inputs.normal("x", shape, rank=rank), self.inputs.normal("dy", shape, rank=rank)

    def iteration(self, index: int) -> None:
        for segment in range(self.num_segments):
            for m in range(NUM_SLICES):
                work = partial(self._forward, segment, m)
                self.flow.put(
                    self._backward_stream(m), "forward", work, writes=[("checkpoint", segment + 1, m)]
                )
        last = self.num_segments - 1
        self._recompute(last)
        for segment in reversed(range(self.num_segments)):
            if segment:
                self._recompute(segment - 1)  # ahead of the backward that it may run beside
            self._backward(segment)
            self._reduce(segment)

    def _backward_stream(self, m: int) -> int:
        return self.backward_streams[m % len(self.backward_streams)]

    def _forward(self, segment: int, m: int) -> None:
        x, number = self.checkpoints[segment][m], segment * BLOCKS
        middle, y = self.forward_x[m], self.checkpoints[segment + 1][m]
        block.forward(x, *self.weights[number], self.forward_h[m], middle)
        block.forward(middle, *self.weights[number + 1], self.forward_h[m], y)

    def _recompute(self, segment: int) -> None:
        for m in range(NUM_SLICES):
            stream = self.recompute_streams[m % len(self.recompute_streams)]
            buffers = [("kept", segment % NUM_SLOTS, m)]
            # The first segment's input is the batch, which nobody writes.
            self.flow.put(
                stream,
                "recompute",
                partial(self._recompute_one, segment, m),
                [("checkpoint", segment, m)],
                buffers,
            )

    def _recompute_one(self, segment: int, m: int) -> None:
        number, slot = segment * BLOCKS, segment % NUM_SLOTS
        (x0, x1), (h0, h1) = ([pair[m] for pair in buffers[slot]] for buffers in (self.xs, self.hs))
        x0.copy_(self.checkpoints[segment][m])
        block.forward(x0, *self.weights[number], h0, x1)
        block.hidden(x1, self.weights[number + 1][0], h1)

    def _backward(self, segment: int) -> None:
        for m in range(NUM_SLICES):
            stream, buffers = self._backward_stream(m), [("kept", segment % NUM_SLOTS, m)]
            self.flow.put(stream, "backward", partial(self._backward_one, segment, m), buffers)
            # One gradient for all slices: each adds to what the one before it left.
            work = partial(self._backward_weights, segment, m)
            self.flow.put(stream, "backward weights", work, buffers, [("gradient", segment)])

    def _backward_one(self, segment: int, m: int) -> None:
        is_last = segment == self.num_segments - 1
        self.gradients[BLOCKS][m].copy_(self.dy[m] if is_last else self.gradients[0][m])
        for place in reversed(range(BLOCKS)):
            up, down = self.weights[segment * BLOCKS + place]
            dy, dh = self.gradients[place + 1][m], self.dhs[place][m]
            block.backward_hidden(dy, self.hs[segment % NUM_SLOTS][place][m], down, dh)
            block.backward_input(dy, dh, up, self.gradients[place][m])

    def _backward_weights(self, segment: int, m: int) -> None:
        slot = segment % NUM_SLOTS
        for place in range(BLOCKS):
            x, h = self.xs[slot][place][m], self.hs[slot][place][m]
            dy, gradients = self.gradients[place + 1][m], self._gradients(segment * BLOCKS + place)
            block.backward_weights(dy, x, h, self.dhs[place][m], gradients, accumulate=m > 0)

    def _gradients(self, number: int) -> tuple[Tensor, Tensor]:
        return self.outputs[f"grad_up{number}"], self.outputs[f"grad_down{number}"]

    def _reduce(self, segment: int) -> None:
        for number in range(segment * BLOCKS, (segment + 1) * BLOCKS):
            for gradient in self._gradients(number):
                work = partial(self.lane.all_reduce, gradient)
                self.flow.put(REDUCE, "comm all_reduce", work, writes=[("gradient", segment)])

    def amount(self) -> Amount:
        kernels = NUM_SLICES * self.num_blocks * (2 * block.KERNELS_FORWARD + block.KERNELS_BACKWARD)
        num_samples = NUM_SLICES * self.rows
        return Amount(kernels + 2 * self.num_blocks, num_samples, num_samples)

    def device_work(self) -> DeviceWork:
        forward = block.gemm_flops(NUM_SLICES * self.rows, self.dim, self.hidden)
        # Recomputing leaves out the last multiply of each segment.
        recompute = forward * (1 - 0.5 / BLOCKS)
        return matrix_work(self.dy.dtype, self.num_blocks * (3 * forward + recompute))

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance, shape = tolerance_of(self.dy.dtype), self.dy.shape
        totals: list[Tensor] = []
        for rank in range(self.lane.size):
            x, dy = (data.flatten(0, 1) for data in self._data(rank))
            y, dx, gradients = block.reference(x, self.weights, dy)
            flat = [gradient for pair in gradients for gradient in pair]
            totals = [a + b for a, b in zip(totals, flat, strict=True)] if totals else flat
            if rank == self.context.rank:
                yield TensorComparison("y", self.outputs["y"], y.view(shape), tolerance)
                yield TensorComparison("dx", self.outputs["dx"], dx.view(shape), tolerance)
        for (name, gradient), total in zip(list(self.outputs.items())[2:], totals, strict=True):
            yield TensorComparison(name, gradient, total, tolerance)
