"""A training step of a stack of blocks, sharded three ways.

L layers, M micro-batches, T rows of one, D model dim, F hidden dim. The ranks form a mesh replicate x shard x
tp: weights are split over tp (columns of the first, rows of the second), each tp part over shard; replicate
groups hold the same. A layer's weights are gathered over shard before its use, its gradient reduce-scattered
over shard and all-reduced over replicate; partial results are all-reduced over tp.
"""

from collections.abc import Iterable
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from aorta.queues.options import Help, at_least_one
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

NUM_MICRO_BATCHES = 16
NUM_LAYERS = {"full": 4, "small": 3}
ROWS = {"full": 4096, "small": 8}
DIM = {"full": 2048, "small": 16}
HIDDEN = {"full": 8192, "small": 32}
GATHER, REDUCE, TP = 0, 1, 2
FIRST_COMPUTE = 3
NUM_SLOTS = 2
"""Layers whose gathered weights, or whole gradients, exist at a time."""


class FsdpTpOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tp: Annotated[int | None, Help("ranks a layer is split over; default 2 of a multiple of 4")] = None
    replicate: Annotated[int | None, Help("copies of the sharded state; default 2 of a multiple of 8")] = None

    def __post_init__(self) -> None:
        at_least_one(self, "tp", "replicate")


class FsdpTp(CheckedWorkload):
    """outputs: y and dx [M, T, D], and grad0 …, this rank's shard of each layer's gradient."""

    name = "fsdp_tp"
    priority = "P1"
    unit = "samples"
    question = "Do gathers, reductions and tensor-parallel sums of a sharded step hide under its compute?"
    stream_meaning = (
        "Stream 0 gathers weights, 1 reduces gradients, 2 sums over tp; micro-batches are dealt to the other "
        "N−3, so that one computes while another's sum is under way. With several ranks and one of tp there "
        "are no sums, and stream 2 computes."
    )
    min_streams = FIRST_COMPUTE + 1
    max_streams = FIRST_COMPUTE + NUM_MICRO_BATCHES
    uses_collectives = True
    Options = FsdpTpOptions
    options: FsdpTpOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, FsdpTpOptions)
        replicate, shard, tp = _mesh_sizes(world_size, options)
        if replicate * shard * tp != world_size:
            return f"--replicate {replicate} x --tp {tp} does not divide {world_size} ranks"
        if any(HIDDEN["small"] % size or DIM["small"] % size for size in (shard, tp)):
            return f"shards of {shard} and tp of {tp} ranks must be powers of two up to {DIM['small']}"
        largest = _first_compute(world_size, tp) + NUM_MICRO_BATCHES
        if num_streams > largest:
            return f"with tp of one rank only {largest} streams have work, not {num_streams}"
        return None

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.num_layers, self.rows, self.dim = NUM_LAYERS[size], ROWS[size], DIM[size]
        self.sizes = _mesh_sizes(context.world_size, self.options)
        self.first_compute = _first_compute(context.world_size, self.sizes[2])
        self._make_lanes()
        self.hidden = HIDDEN[size] // self.sizes[2]
        inputs = self.inputs = Inputs(context)
        coordinates = self._coordinates(context.rank)
        self.x_MTD = self._data("x", coordinates[0] * self.sizes[1] + coordinates[1])
        self.dy_MTD = self._data("dy", coordinates[0] * self.sizes[1] + coordinates[1])
        num_elements = 2 * self.dim * self.hidden
        self.shards = [self._shard_of(layer) for layer in range(self.num_layers)]
        self.full = [inputs.zeros((num_elements,)) for _ in range(NUM_SLOTS)]
        self.grads = [inputs.zeros((num_elements,)) for _ in range(NUM_SLOTS)]
        rows = (NUM_MICRO_BATCHES, self.rows)
        self.xs = [self.x_MTD] + [inputs.zeros(self.x_MTD.shape) for _ in range(self.num_layers)]
        self.hs = [inputs.zeros((*rows, self.hidden)) for _ in range(self.num_layers)]
        self.dh_MTF = inputs.zeros((*rows, self.hidden))
        self.partial_MTD = inputs.zeros(self.x_MTD.shape)
        self.outputs = {"y": self.xs[-1], "dx": inputs.zeros(self.x_MTD.shape)}
        for layer, shard in enumerate(self.shards):
            self.outputs[f"grad{layer}"] = torch.zeros_like(shard)
        self.flow = Dataflow(context)

    def _make_lanes(self) -> None:
        context = self.context
        replicate, shard, tp = self.sizes
        ranks = torch.arange(context.world_size).view(replicate, shard, tp)
        by_shard = ranks.permute(0, 2, 1).reshape(-1, shard).tolist()
        by_replicate = ranks.permute(1, 2, 0).reshape(-1, replicate).tolist()
        (self.gather_lane,) = make_lanes(context, 1, by_shard, first=0)
        (self.reduce_lane,) = make_lanes(context, 1, by_shard, first=1)
        (self.replicate_lane,) = make_lanes(context, 1, by_replicate, first=2)
        (self.tp_lane,) = make_lanes(context, 1, ranks.view(-1, tp).tolist(), first=3)

    def _coordinates(self, rank: int) -> tuple[int, int, int]:
        """Coordinates in the mesh: (replicate, shard, tp)."""
        _, shard, tp = self.sizes
        return rank // (shard * tp), rank // tp % shard, rank % tp

    def _data(self, name: str, data_rank: int) -> Tensor:
        """Ranks of one tp group have the same data."""
        shape = (NUM_MICRO_BATCHES, self.rows, self.dim)
        return self.inputs.normal(name, shape, rank=data_rank)

    def _weights(self, layer: int) -> tuple[Tensor, Tensor]:
        """Weights of the whole layer: [D, F] and [F, D]."""
        return self.inputs.up_and_down(layer, self.dim, HIDDEN[self.context.size])

    def _flat_part(self, up_DF: Tensor, down_FD: Tensor) -> Tensor:
        """Part of a layer in this rank's shard group: its tp part of both, in one row."""
        tp = self._coordinates(self.context.rank)[2]
        parts = up_DF.chunk(self.sizes[2], dim=1)[tp], down_FD.chunk(self.sizes[2], dim=0)[tp]
        return torch.cat([part.flatten() for part in parts])

    def _shard_of(self, layer: int) -> Tensor:
        shard = self._coordinates(self.context.rank)[1]
        return self._flat_part(*self._weights(layer)).chunk(self.sizes[1])[shard].clone()

    def _split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Views [D, F / tp] and [F / tp, D] of a flat part."""
        return block.split(flat, self.dim, self.hidden)

    def iteration(self, index: int) -> None:
        last = self.num_layers - 1
        self._gather(0)
        for layer in range(self.num_layers):
            if layer < last:
                self._gather(layer + 1)  # ahead of the compute that it hides under
            self._forward(layer)
        self._finish_forward()
        for layer in reversed(range(self.num_layers)):
            if layer < last and layer - 1 >= 0:
                self._gather(layer - 1)
            self._backward(layer)
            self._reduce(layer)
        self._finish_backward()

    def _compute_stream(self, micro_batch: int) -> int:
        return self.first_compute + micro_batch % (self.context.num_streams - self.first_compute)

    def _gather(self, layer: int) -> None:
        slot = layer % NUM_SLOTS
        work = partial(self.gather_lane.all_gather, self.full[slot], self.shards[layer])
        self.flow.put(GATHER, "comm all_gather", work, writes=[("full", slot)])

    def _forward(self, layer: int) -> None:
        slot = layer % NUM_SLOTS
        for m in range(NUM_MICRO_BATCHES):
            work = partial(self._forward_one, layer, m)
            self.flow.put(self._compute_stream(m), "forward", work, [("full", slot)], [("partial", m)])
            self._sum_over_tp(m)

    def _forward_one(self, layer: int, m: int) -> None:
        if layer:
            torch.add(self.xs[layer - 1][m], self.partial_MTD[m], out=self.xs[layer][m])
        up, down = self._split(self.full[layer % NUM_SLOTS])
        block.hidden(self.xs[layer][m], up, self.hs[layer][m])
        torch.mm(self.hs[layer][m], down, out=self.partial_MTD[m])

    def _sum_over_tp(self, m: int) -> None:
        if self._is_alone(self.sizes[2]):
            return
        work = partial(self.tp_lane.all_reduce, self.partial_MTD[m])
        self.flow.put(TP, "comm all_reduce", work, writes=[("partial", m)])

    def _finish_forward(self) -> None:
        for m in range(NUM_MICRO_BATCHES):
            self.flow.put(self._compute_stream(m), "loss", partial(self._loss, m), reads=[("partial", m)])

    def _loss(self, m: int) -> None:
        torch.add(self.xs[-2][m], self.partial_MTD[m], out=self.xs[-1][m])
        self.outputs["dx"][m].copy_(self.dy_MTD[m])

    def _backward(self, layer: int) -> None:
        slot = layer % NUM_SLOTS
        for m in range(NUM_MICRO_BATCHES):
            stream = self._compute_stream(m)
            work = partial(self._backward_one, layer, m)
            self.flow.put(stream, "backward", work, [("full", slot)], [("partial", m)])
            self._sum_over_tp(m)
            # One gradient for all micro-batches: each adds to what the one before it left.
            weights = partial(self._backward_weights, layer, m)
            self.flow.put(stream, "backward weights", weights, writes=[("grad", slot)])

    def _backward_one(self, layer: int, m: int) -> None:
        dx = self.outputs["dx"][m]
        if layer < self.num_layers - 1:
            dx.add_(self.partial_MTD[m])
        up, down = self._split(self.full[layer % NUM_SLOTS])
        block.backward_hidden(dx, self.hs[layer][m], down, self.dh_MTF[m])
        torch.mm(self.dh_MTF[m], up.t(), out=self.partial_MTD[m])

    def _backward_weights(self, layer: int, m: int) -> None:
        dy, gradients = self.outputs["dx"][m], self._split(self.grads[layer % NUM_SLOTS])
        x, h, dh = self.xs[layer][m], self.hs[layer][m], self.dh_MTF[m]
        block.backward_weights(dy, x, h, dh, gradients, accumulate=m > 0)

    def _reduce(self, layer: int) -> None:
        slot, grad = layer % NUM_SLOTS, self.outputs[f"grad{layer}"]
        scatter = partial(self.reduce_lane.reduce_scatter, grad, self.grads[slot])
        self.flow.put(REDUCE, "comm reduce_scatter", scatter, reads=[("grad", slot)])
        if not self._is_alone(self.sizes[0]):
            self.flow.put(REDUCE, "comm all_reduce shard", partial(self.replicate_lane.all_reduce, grad))

    def _is_alone(self, num_ranks: int) -> bool:
        """Among several ranks, an axis of one has nobody to talk to."""
        return _is_alone(self.context.world_size, num_ranks)

    def _finish_backward(self) -> None:
        for m in range(NUM_MICRO_BATCHES):
            work = partial(self._last_sum, m)
            self.flow.put(self._compute_stream(m), "backward end", work, reads=[("partial", m)])

    def _last_sum(self, m: int) -> None:
        self.outputs["dx"][m].add_(self.partial_MTD[m])

    def amount(self) -> Amount:
        num_samples = NUM_MICRO_BATCHES * self.rows
        compute = NUM_MICRO_BATCHES * (3 + self.num_layers * (block.KERNELS_FORWARD + block.KERNELS_BACKWARD))
        sums = 0 if self._is_alone(self.sizes[2]) else 2 * NUM_MICRO_BATCHES
        reductions = 1 if self._is_alone(self.sizes[0]) else 2
        collectives = self.num_layers * (1 + reductions + sums) + max(self.num_layers - 2, 0)
        return Amount(operations=compute + collectives, samples=num_samples, units=num_samples)

    def device_work(self) -> DeviceWork:
        forward = block.gemm_flops(NUM_MICRO_BATCHES * self.rows, self.dim, self.hidden)
        return matrix_work(self.x_MTD.dtype, self.num_layers * 3 * forward)

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance = tolerance_of(self.x_MTD.dtype)
        replicate, shard, _ = self.sizes
        weights = [self._weights(layer) for layer in range(self.num_layers)]
        coordinates = self._coordinates(self.context.rank)
        totals: list[Tensor] = []
        for data_rank in range(replicate * shard):
            x, dy = (self._data(name, data_rank).flatten(0, 1) for name in ("x", "dy"))
            y, dx, gradients = block.reference(x, weights, dy)
            parts = [self._flat_part(*pair) for pair in gradients]
            totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
            if data_rank == coordinates[0] * shard + coordinates[1]:
                yield TensorComparison("y", self.outputs["y"], y.view_as(self.x_MTD), tolerance)
                yield TensorComparison("dx", self.outputs["dx"], dx.view_as(self.x_MTD), tolerance)
        for layer, total in enumerate(totals):
            name = f"grad{layer}"
            yield TensorComparison(name, self.outputs[name], total.chunk(shard)[coordinates[1]], tolerance)

    def notes(self) -> list[str]:
        axes = {"tp": self.sizes[2], "replicate": self.sizes[0]}
        names = [name for name, num_ranks in axes.items() if self._is_alone(num_ranks)]
        return [f"no all-reduce over {' and '.join(names)}: one rank each"] if names else []

    def metrics(self) -> dict[str, float | None]:
        replicate, shard, tp = self.sizes
        return {"replicate_ranks": float(replicate), "shard_ranks": float(shard), "tp_ranks": float(tp)}


def _is_alone(world_size: int, num_ranks: int) -> bool:
    return world_size > 1 and num_ranks == 1


def _first_compute(world_size: int, tp: int) -> int:
    """The first stream that computes."""
    return TP if _is_alone(world_size, tp) else FIRST_COMPUTE


def _mesh_sizes(world_size: int, options: FsdpTpOptions) -> tuple[int, int, int]:
    """(replicate, shard, tp), which multiply to world_size unless the options do not divide it."""
    tp = options.tp or (2 if world_size % 4 == 0 else 1)
    replicate = options.replicate or (2 if world_size % 8 == 0 else 1)
    return replicate, max(world_size // (replicate * tp), 1), tp
