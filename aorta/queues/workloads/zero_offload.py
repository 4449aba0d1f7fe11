"""Weights that live in pinned host memory: fetched before use, gradients sent back.

L blocks, M slices of a batch, T rows of one, D model dim, F hidden dim. A block's weights are fetched for its
forward and again for its backward. The host's optimizer step is left out: it would make the host wait.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads import block
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    rate_alone_gb_s,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow, deal_streams

NUM_SLICES = 4
NUM_SLOTS = 4
"""Blocks whose weights, or gradients, are on the device at a time."""
NUM_BLOCKS = {"full": 6, "small": 4}
ROWS = {"full": 2048, "small": 8}
DIM = {"full": 2048, "small": 16}
HIDDEN = {"full": 8192, "small": 32}


class ZeroOffload(CheckedWorkload):
    """outputs: y and dx [M, T, D], and grad0 … of each block (up, then down) in host memory."""

    name = "zero_offload"
    priority = "P3"
    unit = "samples"
    question = "Do transfers of weights and gradients in both directions hide under compute?"
    stream_meaning = (
        f"A third of N each computes ({NUM_SLICES} slices of the batch), fetches weights, and sends "
        "gradients back."
    )
    min_streams = 3
    max_streams = 3 * NUM_SLOTS

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.num_blocks, self.rows = NUM_BLOCKS[size], ROWS[size]
        self.dim, self.hidden = DIM[size], HIDDEN[size]
        self.compute_streams, self.fetch_streams, self.send_streams = deal_streams(
            context.num_streams, [NUM_SLICES, NUM_SLOTS, NUM_SLOTS]
        )
        inputs, num_elements = Inputs(context), 2 * self.dim * self.hidden
        self.host_weights = [self._host(num_elements, inputs.dtype) for _ in range(self.num_blocks)]
        for number, host in enumerate(self.host_weights):
            weights = inputs.up_and_down(number, self.dim, self.hidden)
            for place, weight in zip(self._split(host), weights, strict=True):
                place.copy_(weight)
        self.weights = [inputs.zeros((num_elements,)) for _ in range(NUM_SLOTS)]
        self.gradients = [inputs.zeros((num_elements,)) for _ in range(NUM_SLOTS)]
        shape, hidden_shape = (NUM_SLICES, self.rows, self.dim), (NUM_SLICES, self.rows, self.hidden)
        x = inputs.normal("x", shape, rank=context.rank)
        self.dy = inputs.normal("dy", shape, rank=context.rank)
        self.xs = [x] + [inputs.zeros(shape) for _ in range(self.num_blocks)]
        self.hs = [inputs.zeros(hidden_shape) for _ in range(self.num_blocks)]
        self.dh = inputs.zeros(hidden_shape)
        self.gradient_of_output = inputs.zeros(shape)
        self.outputs = {"y": self.xs[-1], "dx": inputs.zeros(shape)}
        for number in range(self.num_blocks):
            self.outputs[f"grad{number}"] = self._host(num_elements, inputs.dtype)
        self.flow = Dataflow(context)

    def _host(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num, dtype=dtype, pin_memory=self.context.device.type != "cpu")

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        return block.split(flat, self.dim, self.hidden)

    def iteration(self, index: int) -> None:
        blocks = [*range(self.num_blocks), *reversed(range(self.num_blocks))]
        for place in range(NUM_SLOTS - 1):
            self._fetch(place, blocks[place])
        for place, number in enumerate(blocks):
            ahead = place + NUM_SLOTS - 1  # into the slot that the block before this one used
            if ahead < len(blocks):
                self._fetch(ahead, blocks[ahead])
            if place < self.num_blocks:
                self._forward(place, number)
            else:
                self._backward(place, number)
                self._send(number)

    def _fetch(self, place: int, number: int) -> None:
        slot = place % NUM_SLOTS
        work = partial(self.weights[slot].copy_, self.host_weights[number], non_blocking=True)
        stream = self.fetch_streams[place % len(self.fetch_streams)]
        self.flow.put(stream, "fetch", work, writes=[("weights", slot)])

    def _compute_stream(self, m: int) -> int:
        return self.compute_streams[m % len(self.compute_streams)]

    def _forward(self, place: int, number: int) -> None:
        slot = place % NUM_SLOTS
        for m in range(NUM_SLICES):
            work = partial(self._forward_one, slot, number, m)
            self.flow.put(self._compute_stream(m), "forward", work, [("weights", slot)])

    def _forward_one(self, slot: int, number: int, m: int) -> None:
        up, down = self._split(self.weights[slot])
        block.forward(self.xs[number][m], up, down, self.hs[number][m], self.xs[number + 1][m])

    def _backward(self, place: int, number: int) -> None:
        slot, grad_slot = place % NUM_SLOTS, number % NUM_SLOTS
        for m in range(NUM_SLICES):
            stream, work = self._compute_stream(m), partial(self._backward_one, slot, number, m)
            self.flow.put(stream, "backward", work, [("weights", slot)])
            # One gradient for all slices: each adds to what the one before it left.
            work = partial(self._backward_weights, number, m)
            self.flow.put(stream, "backward weights", work, writes=[("gradient", grad_slot)])

    def _backward_one(self, slot: int, number: int, m: int) -> None:
        dy, dx = self.gradient_of_output[m], self.outputs["dx"][m]
        dy.copy_(self.dy[m] if number == self.num_blocks - 1 else dx)
        up, down = self._split(self.weights[slot])
        block.backward_hidden(dy, self.hs[number][m], down, self.dh[m])
        block.backward_input(dy, self.dh[m], up, dx)

    def _backward_weights(self, number: int, m: int) -> None:
        gradients = self._split(self.gradients[number % NUM_SLOTS])
        dy, x, h = self.gradient_of_output[m], self.xs[number][m], self.hs[number][m]
        block.backward_weights(dy, x, h, self.dh[m], gradients, accumulate=m > 0)

    def _send(self, number: int) -> None:
        slot = number % NUM_SLOTS
        work = partial(self.outputs[f"grad{number}"].copy_, self.gradients[slot], non_blocking=True)
        stream = self.send_streams[number % len(self.send_streams)]
        self.flow.put(stream, "send", work, reads=[("gradient", slot)])

    def amount(self) -> Amount:
        compute = NUM_SLICES * self.num_blocks * (block.KERNELS_FORWARD + block.KERNELS_BACKWARD)
        num_samples = NUM_SLICES * self.rows
        return Amount(compute + 3 * self.num_blocks, num_samples, num_samples)

    def device_work(self) -> DeviceWork:
        forward = block.gemm_flops(NUM_SLICES * self.rows, self.dim, self.hidden)
        return matrix_work(self.dy.dtype, self.num_blocks * 3 * forward)

    def comparisons(self) -> Iterable[TensorComparison]:
        device, tolerance = self.context.device, tolerance_of(self.dy.dtype)
        weights = [self._split(host.to(device)) for host in self.host_weights]
        y, dx, gradients = block.reference(self.xs[0].flatten(0, 1), weights, self.dy.flatten(0, 1))
        yield TensorComparison("y", self.outputs["y"], y.view(self.dy.shape), tolerance)
        yield TensorComparison("dx", self.outputs["dx"], dx.view(self.dy.shape), tolerance)
        for number, (dup, ddown) in enumerate(gradients):
            expected = torch.cat([dup.flatten(), ddown.flatten()])
            name = f"grad{number}"
            yield TensorComparison(name, self.outputs[name].to(device), expected, tolerance)

    def metrics(self) -> dict[str, float | None]:
        num_bytes = sum(host.numel() * host.element_size() for host in self.host_weights)
        block_bytes = num_bytes / self.num_blocks
        return {
            "host_to_device_bytes": 2.0 * num_bytes,
            "device_to_host_bytes": float(num_bytes),
            "host_to_device_alone_gb_s": rate_alone_gb_s(self.context.pieces, "fetch", block_bytes),
            "device_to_host_alone_gb_s": rate_alone_gb_s(self.context.pieces, "send", block_bytes),
        }

    def teardown(self) -> None:
        self.host_weights.clear()
        self.outputs.clear()
