"""Collectives and matrix multiplies that have nothing to do with each other, at the same time."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from aorta.errors import ConfigError
from aorta.queues.options import Bytes, Dims, Dtype, Groups, Help, at_least_one, check_groups, torch_dtype
from aorta.queues.workload import ITERATION, Amount, DeviceWork, WorkloadOptions
from aorta.queues.workloads.communication import Lane, make_lanes
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    product_comparison,
    tolerance_of,
)
from aorta.timeline.collective import busbw_factor

Mode = Literal["comms_compute", "compute_only", "comms_only"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
MAX_STREAMS = 32
DIM = {"full": 4096, "small": 64}
COMM_BYTES = {"full": 128 * 2**20, "small": 64 * 2**10}


class OverlapOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Annotated[Mode, Help("which sides there are")] = "comms_compute"
    collective: Annotated[Collective, Help("which collective")] = "all_reduce"
    num_coll: Annotated[int, Help("collectives of an iteration")] = 1
    comm_size: Annotated[Bytes | None, Help("whole buffer of a collective on one rank; default 128M")] = None
    num_compute: Annotated[int, Help("GEMMs of an iteration, over all compute streams")] = MAX_STREAMS
    mm_dim: Annotated[Dims | None, Help("M,N,K of the GEMMs; default 4096")] = None
    comp_dtype: Annotated[Dtype, Help("of the GEMMs")] = "bfloat16"
    comm_dtype: Annotated[Dtype, Help("of the collectives")] = "bfloat16"
    compute_streams: Annotated[int | None, Help("streams for GEMMs; default all but one")] = None
    real_collectives: Annotated[
        bool | None, Help("refuse to simulate collectives; no-: refuse real ones")
    ] = None
    async_op: Annotated[bool, Help("collectives on the process group's own stream")] = False
    process_groups: Annotated[Groups | None, Help("ranks of each group; default one of all")] = None

    def __post_init__(self) -> None:
        at_least_one(self, "num_coll", "num_compute", "compute_streams")


class CommsComputeOverlap(CheckedWorkload):
    """outputs: gemm0 …, the products; coll0 …, what each collective left."""

    name = "comms_compute_overlap"
    priority = "P1"
    unit = "GEMMs and collectives"
    question = "How much of a collective hides under independent GEMMs, and what does each side pay for it?"
    stream_meaning = (
        "Communication streams first, then compute streams (--compute-streams, default N−1). The same GEMMs "
        "and collectives are dealt to them; each communication stream has a communicator of its own."
    )
    min_streams = 2
    max_streams = MAX_STREAMS
    uses_collectives = True
    Options = OverlapOptions
    options: OverlapOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, OverlapOptions)
        if options.process_groups is not None:
            check_groups(options.process_groups, world_size)
        least_bytes = torch_dtype(options.comm_dtype).itemsize * world_size
        if options.comm_size is not None and options.comm_size < least_bytes:
            return (
                f"--comm-size {options.comm_size} is less than an element for each rank, {least_bytes} bytes"
            )
        largest, compute_streams = _most_compute_streams(num_streams, options), options.compute_streams
        if compute_streams is not None and compute_streams > largest:
            return (
                f"--compute-streams {compute_streams}: {options.mode} with --streams {num_streams} has room"
                f" for {largest} at most"
            )
        if compute_streams is None and largest > options.num_compute:
            fewer = num_streams - largest + options.num_compute
            return (
                f"{largest} compute streams and only {options.num_compute} GEMMs; ask for --streams {fewer}"
                f" or fewer, or --num-compute {largest} or more"
            )
        return None

    def setup(self) -> None:
        options, context = self.options, self.context
        if options.real_collectives and context.group is None:
            raise ConfigError("--real-collectives needs a process group; start it with torchrun")
        if options.real_collectives is False and context.group is not None:
            raise ConfigError("--no-real-collectives needs no process group; start it without torchrun")
        if options.async_op and context.group is None:
            raise ConfigError("--async-op needs a process group; start it with torchrun")
        num_compute = options.compute_streams or _most_compute_streams(context.num_streams, options)
        first = context.num_streams - num_compute
        self.comm_streams = list(range(first))[: options.num_coll]
        self.compute_streams = list(range(first, context.num_streams))[: options.num_compute]
        self.unused = context.num_streams - len(self.comm_streams) - len(self.compute_streams)
        self.outputs = {}
        self.gemms: list[tuple[Tensor, Tensor]] = []
        if self.compute_streams:
            self._set_up_compute()
        self.collectives: list[_Collective] = []
        if self.comm_streams:
            self._set_up_collectives()

    def _set_up_compute(self) -> None:
        dim = DIM[self.context.size]
        m, n, k = self.options.mm_dim or (dim, dim, dim)
        inputs = Inputs(self.context, torch_dtype(self.options.comp_dtype))
        self.a = inputs.normal("a", (m, k), rank=self.context.rank)
        for number in range(self.options.num_compute):
            out = inputs.zeros((m, n))
            self.gemms.append((inputs.weight(f"b{number}", k, n), out))
            self.outputs[f"gemm{number}"] = out

    def _set_up_collectives(self) -> None:
        options, context = self.options, self.context
        lanes = make_lanes(context, len(self.comm_streams), options.process_groups, options.async_op)
        groups = options.process_groups or (tuple(range(context.world_size)),)
        ranks = next(group for group in groups if context.rank in group)
        dtype = torch_dtype(options.comm_dtype)
        num_bytes = options.comm_size or COMM_BYTES[context.size]
        for number in range(options.num_coll):
            lane = lanes[number % len(lanes)]
            collective = _Collective(options.collective, number, lane, ranks, context.rank)
            collective.allocate(num_bytes, dtype, context.device)
            self.collectives.append(collective)
            self.outputs[f"coll{number}"] = collective.result

    def iteration(self, index: int) -> None:
        self._communicate()
        self._compute()

    def _communicate(self) -> None:
        for number, collective in enumerate(self.collectives):
            stream = self.comm_streams[number % len(self.comm_streams)]
            if collective.starts_over:  # a copy, no part of the communication that is timed
                self.context.streams.submit(stream, collective.start_over)
            self.context.span(stream, f"comm {self.options.collective}", collective.next())

    def _compute(self) -> None:
        for number, (b, out) in enumerate(self.gemms):
            stream = self.compute_streams[number % len(self.compute_streams)]
            self.context.span(stream, "gemm", partial(torch.mm, self.a, b, out=out))

    def legs(self) -> Mapping[str, Callable[[int], None]]:
        if self.options.mode != "comms_compute":
            return {}
        return {
            "compute": lambda index: self._compute(),
            "comm": lambda index: self._communicate(),
            "serial": lambda index: self._serial(),
        }

    def _serial(self) -> None:
        self._communicate()
        for stream in self.compute_streams:
            self.context.after(stream, *self.comm_streams)
        self._compute()

    def amount(self) -> Amount:
        num = len(self.gemms) + len(self.collectives)
        return Amount(operations=num, samples=num, units=num)

    def device_work(self) -> DeviceWork:
        flops = sum(2.0 * self.a.shape[0] * b.numel() for b, _ in self.gemms)
        return matrix_work(torch_dtype(self.options.comp_dtype), flops)

    def comparisons(self) -> Iterable[TensorComparison]:
        for number, (b, out) in enumerate(self.gemms):
            yield product_comparison(f"gemm{number}", self.a, b, out)
        for number, collective in enumerate(self.collectives):
            reference = collective.reference()
            yield TensorComparison(f"coll{number}", collective.result, reference, collective.tolerance)

    def notes(self) -> list[str]:
        if not self.unused:
            return []
        return [
            f"{self.unused} of {self.context.num_streams} streams had no work: {len(self.collectives)} "
            f"collectives on {len(self.comm_streams)} streams, {len(self.gemms)} GEMMs on "
            f"{len(self.compute_streams)}"
        ]

    def metrics(self) -> dict[str, float | None]:
        values: dict[str, float | None] = {
            "num_comm_streams": float(len(self.comm_streams)),
            "num_compute_streams": float(len(self.compute_streams)),
            "num_unused_streams": float(self.unused),
        }
        if self.gemms:
            (m, k), n = self.a.shape, self.gemms[0][0].shape[1]
            values["compute_tflop"] = 2.0 * m * n * k * len(self.gemms) / 1e12
        if self.collectives:
            collective = self.collectives[0]
            values["comm_bytes"] = float(collective.num_bytes * len(self.collectives))
            values["comm_alone_busbw_gb_s"] = self._busbw_gb_s(collective)
        return values

    def _busbw_gb_s(self, collective: "_Collective") -> float | None:
        """Busbw at a collective's median time without GEMMs, as in nccl-tests; None where it is a copy
        or its group has one rank, which sends nothing."""
        leg = "comm" if self.options.mode == "comms_compute" else ITERATION
        ms = [p.duration_ms for p in self.context.pieces if p.leg == leg and p.name.startswith("comm")]
        if not ms or self.context.group is None or collective.num_ranks == 1:
            return None
        factor = busbw_factor(self.options.collective, collective.num_ranks)
        return collective.num_bytes * factor / (float(np.median(ms)) * 1e6)


def _most_compute_streams(num_streams: int, options: OverlapOptions) -> int:
    return {"comms_compute": num_streams - 1, "compute_only": num_streams, "comms_only": 0}[options.mode]


class _Collective:
    """One collective of an iteration with its buffers. Inputs are small whole numbers that differ by rank.

    An all-reduce works in place, and its sum grows with every one: the buffer starts over from its input
    every `most_sums` times, before numbers leave the dtype's range or roundings add up.
    """

    def __init__(self, kind: Collective, number: int, lane: Lane, ranks: Sequence[int], rank: int) -> None:
        self.kind, self.number, self.lane, self.ranks, self.rank = kind, number, lane, tuple(ranks), rank
        self.num_ranks = len(ranks)
        self.num_sums = 0

    def allocate(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        """Buffers of at most num_bytes: the larger side is the same number of elements for every rank."""
        self.dtype, self.device = dtype, device
        self.share = num_bytes // (dtype.itemsize * self.num_ranks)
        full_size = self.share * self.num_ranks
        self.num_bytes = full_size * dtype.itemsize
        self.source = self._input(self.rank)
        self.result = torch.zeros(
            self.share if self.kind == "reduce_scatter" else full_size, dtype=dtype, device=device
        )
        is_half = dtype.itemsize == 2
        range_bits = 13 if dtype == torch.float16 else 60
        fitting = int(range_bits / math.log2(self.num_ranks)) if self.num_ranks > 1 else 60
        self.most_sums = max(1, min(fitting, 8 if is_half else 60))
        self.tolerance = tolerance_of(dtype) if self.kind in ("all_reduce", "reduce_scatter") else 0.0

    def _input(self, rank: int) -> Tensor:
        num = self.share if self.kind == "all_gather" else self.share * self.num_ranks
        values = torch.arange(num, device=self.device).add_(self.number + rank).remainder_(4).add_(1)
        return values.to(self.dtype)

    @property
    def starts_over(self) -> bool:
        """True if the buffer must be refilled before the next one."""
        return self.kind == "all_reduce" and self.num_sums % self.most_sums == 0

    def start_over(self) -> None:
        self.result.copy_(self.source)

    def next(self) -> Callable[[], None]:
        """The work of one more of them."""
        if self.kind == "all_reduce":
            self.num_sums = 1 if self.starts_over else self.num_sums + 1
            return partial(self.lane.all_reduce, self.result)
        call = {
            "all_gather": self.lane.all_gather,
            "reduce_scatter": self.lane.reduce_scatter,
            "all_to_all": self.lane.all_to_all,
        }[self.kind]
        return partial(call, self.result, self.source)

    def reference(self) -> Tensor:
        """The result, by adding or cutting up the inputs of all ranks."""
        inputs = [self._input(rank) for rank in self.ranks]
        position = self.ranks.index(self.rank)
        if self.kind == "all_gather":
            return torch.cat(inputs)
        if self.kind == "all_to_all":
            return torch.cat([values.view(self.num_ranks, -1)[position] for values in inputs])
        total = sum(inputs[1:], inputs[0].float())
        if self.kind == "reduce_scatter":
            return total.view(self.num_ranks, -1)[position]
        return total * float(self.num_ranks) ** (self.num_sums - 1)
