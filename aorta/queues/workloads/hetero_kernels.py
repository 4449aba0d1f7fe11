"""Tiny kernels beside very large ones: the convoy effect.

A convoy is what forms behind a slow truck: a 10 µs kernel whose stream shares a hardware queue with a 10 ms
kernel waits for it; one with a queue of its own waits for room on the device at most.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Annotated

import numpy as np
import torch

from aorta.device.backend import accelerator
from aorta.errors import ConfigError
from aorta.queues.catalogue import flag_of
from aorta.queues.options import Help
from aorta.queues.workload import ALONE, Amount, DeviceWork, Piece, WorkloadOptions
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    product_comparison,
)

LARGE_MS = {"full": 10.0, "small": 0.5}
MOST_DIM = {"full": 32768, "small": 1024}
BESIDE, TINY_ONLY = "beside_large", "tiny_only"


class HeteroOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    num_large: Annotated[int, Help("large GEMMs of an iteration, on as many streams at most")] = 2
    num_tiny: Annotated[int, Help("tiny GEMMs of an iteration, dealt to all other streams")] = 128
    large_ms: Annotated[float | None, Help("of a large GEMM; default 10, 0.5 where small")] = None
    tiny_us: Annotated[float, Help("of a tiny GEMM")] = 10.0
    large_dim: Annotated[int | None, Help("size of the large GEMM instead of calibrating it")] = None
    tiny_dim: Annotated[int | None, Help("size of the tiny GEMM instead of calibrating it")] = None

    def __post_init__(self) -> None:
        for name in ("num_large", "num_tiny", "large_ms", "tiny_us", "large_dim", "tiny_dim"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{flag_of(name)} must be above 0, got {value}")


class HeteroKernels(CheckedWorkload):
    """outputs: large0 …, and tiny [kernel, row, column], the products."""

    name = "hetero_kernels"
    priority = "P0"
    unit = "kernels"
    question = "How much longer does a 10 µs kernel wait for its start beside 10 ms kernels than alone?"
    stream_meaning = (
        "The large GEMMs on the first streams (at most N/2, at most --num-large), the tiny ones dealt to the "
        "others. Sizes are calibrated once per process; --large-dim and --tiny-dim fix them."
    )
    min_streams = 2
    max_streams = 64
    Options = HeteroOptions
    options: HeteroOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, HeteroOptions)
        num_for_tiny = num_streams - _num_large_streams(num_streams, options)
        if num_for_tiny > options.num_tiny:
            return (
                f"--num-tiny {options.num_tiny} leaves some of {num_for_tiny} streams without work; "
                f"ask for --num-tiny {num_for_tiny} or more"
            )
        return None

    def setup(self) -> None:
        options, context = self.options, self.context
        inputs = Inputs(context)
        largest_dim, large_ms = MOST_DIM[context.size], options.large_ms or LARGE_MS[context.size]
        self.large_dim = options.large_dim or _calibrated_dim(
            str(context.device), inputs.dtype, large_ms, 256 if context.size == "full" else 16, largest_dim
        )
        self.tiny_dim = options.tiny_dim or _calibrated_dim(
            str(context.device), inputs.dtype, options.tiny_us / 1e3, 16, largest_dim
        )
        large, tiny, rank = self.large_dim, self.tiny_dim, context.rank
        self.large_a = inputs.normal("large a", (large, large), rank=rank)
        self.large_b = [inputs.weight(f"large b{i}", large, large) for i in range(options.num_large)]
        self.tiny_a = inputs.normal("tiny a", (options.num_tiny, tiny, tiny), rank=rank)
        self.tiny_b = inputs.weight("tiny b", tiny, tiny)
        self.outputs = {f"large{i}": inputs.zeros((large, large)) for i in range(options.num_large)}
        self.outputs["tiny"] = inputs.zeros(self.tiny_a.shape)
        self.tiny = list(zip(self.tiny_a, self.outputs["tiny"], strict=True))
        self.num_large_streams = _num_large_streams(context.num_streams, options)

    def iteration(self, index: int) -> None:
        self._large()
        self._tiny()

    def _large(self) -> None:
        for number, b in enumerate(self.large_b):
            work = partial(torch.mm, self.large_a, b, out=self.outputs[f"large{number}"])
            self.context.span(number % self.num_large_streams, "large", work)

    def _tiny(self) -> None:
        first = self.num_large_streams
        for number, (a, out) in enumerate(self.tiny):
            stream = first + number % (self.context.num_streams - first)
            self.context.span(stream, "tiny", partial(torch.mm, a, self.tiny_b, out=out))

    def legs(self) -> Mapping[str, Callable[[int], None]]:
        return {BESIDE: self.iteration, TINY_ONLY: lambda index: self._tiny()}

    def amount(self) -> Amount:
        num = len(self.large_b) + len(self.tiny)
        return Amount(operations=num, samples=len(self.tiny), units=num)

    def device_work(self) -> DeviceWork:
        large = 2.0 * len(self.large_b) * self.large_dim**3
        return matrix_work(self.tiny_a.dtype, large + 2.0 * len(self.tiny) * self.tiny_dim**3)

    def comparisons(self) -> Iterable[TensorComparison]:
        for number, b in enumerate(self.large_b):
            name = f"large{number}"
            yield product_comparison(name, self.large_a, b, self.outputs[name])
        tolerance = 1e-5 if self.tiny_a.dtype == torch.float32 else 1e-2
        reference = self.tiny_a.double() @ self.tiny_b.double()
        yield TensorComparison("tiny", self.outputs["tiny"], reference, tolerance)

    def metrics(self) -> dict[str, float | None]:
        """Delays are from a tiny kernel's submission to its start, from the pieces of two legs: without large
        neighbours (alone) and with them (beside_large).

        A start is taken as the end less the kernel's median time alone: the event before a kernel passes when
        its queue reaches it, which may be long before the device has room for it. queue_delay is up to that
        event. Submission begins with the host's work for the launch, in both legs alike.
        """
        values: dict[str, float | None] = {
            "large_dim": float(self.large_dim),
            "tiny_dim": float(self.tiny_dim),
            "num_large_streams": float(self.num_large_streams),
        }
        legs = {leg: [p for p in self.context.pieces if p.leg == leg] for leg in (TINY_ONLY, BESIDE)}
        tiny = {leg: [p for p in pieces if p.name == "tiny"] for leg, pieces in legs.items()}
        large_ms = [p.duration_ms for p in legs[BESIDE] if p.name == "large"]
        # Where the host launches late, events around a kernel span the launch. Pieces in a row, which queue
        # behind each other, do not.
        in_a_row = [p for p in self.context.pieces if p.leg == ALONE and p.name == "tiny"] or tiny[TINY_ONLY]
        own_ms = float(np.median([p.duration_ms for p in in_a_row])) if in_a_row else None
        values["large_beside_tiny_p50_ms"] = float(np.median(large_ms)) if large_ms else None
        values["tiny_alone_p50_us"] = None if own_ms is None else own_ms * 1e3
        for leg, label in ((TINY_ONLY, "alone"), (BESIDE, BESIDE)):
            values |= _delays(tiny[leg], own_ms, label)
        for quantile in ("p50", "p99"):
            alone, delayed_us = (values[f"start_delay_{leg}_{quantile}_us"] for leg in ("alone", BESIDE))
            values[f"convoy_delay_{quantile}_us"] = (
                None if alone is None or delayed_us is None else delayed_us - alone
            )
        return values


def _delays(tiny: list[Piece], own_ms: float | None, label: str) -> dict[str, float | None]:
    start_us = [(p.end_ms - own_ms - p.submitted_ms) * 1e3 for p in tiny] if own_ms is not None else []
    queue_us = [p.start_delay_ms * 1e3 for p in tiny]
    quantiles = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    delays: dict[str, float | None] = {
        f"start_delay_{label}_{name}_us": float(np.percentile(start_us, share)) if start_us else None
        for name, share in quantiles.items()
    }
    for name in ("p50", "p99"):
        share = quantiles[name]
        delays[f"queue_delay_{label}_{name}_us"] = float(np.percentile(queue_us, share)) if queue_us else None
    return delays


def _num_large_streams(num_streams: int, options: HeteroOptions) -> int:
    return min(options.num_large, num_streams // 2)


@functools.cache
def _calibrated_dim(device_name: str, dtype: torch.dtype, aim_ms: float, step: int, largest: int) -> int:
    """Size of a square GEMM that takes about aim_ms, a multiple of `step`; measured once per process, so that
    all stream counts of a sweep compute the same."""
    device = torch.device(device_name)
    dim = step
    while dim < largest and _gemm_ms(device, dtype, dim) < aim_ms:
        dim *= 2
    for _ in range(3):
        ratio = float((aim_ms / _gemm_ms(device, dtype, dim)) ** (1 / 3))
        target = min(max(round(dim * ratio / step) * step, step), largest)
        if target == dim:
            break
        dim = target
    return dim


def _gemm_ms(device: torch.device, dtype: torch.dtype, dim: int) -> float:
    """The least time of a GEMM among a few, without the host's time to launch it."""
    a = torch.empty(dim, dim, dtype=dtype, device=device).normal_()  # a device is quicker at constants
    b, out = a.clone(), torch.empty_like(a)
    if device.type == "cpu":
        return min(_host_ms(partial(torch.mm, a, b, out=out)) for _ in range(4))
    gpu = accelerator()
    events = [(gpu.new_event(timing=True), gpu.new_event(timing=True)) for _ in range(4)]
    num = 1 if dim >= 2048 else 50
    wide = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    for start, end in events:
        for _ in range(8):
            wide.zero_()  # some 0.1 ms each: keeps the device busy while the host launches what is timed
        start.record()
        for _ in range(num):
            torch.mm(a, b, out=out)
        end.record()
    gpu.synchronize(device)
    least_ms: float = min(start.elapsed_time(end) for start, end in events)
    return least_ms / num


def _host_ms(work: Callable[[], object]) -> float:
    began_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began_ns) / 1e6
