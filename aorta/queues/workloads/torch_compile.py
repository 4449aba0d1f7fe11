"""Regions that torch.compile has compiled, on different streams.

T rows, D model dim, F hidden dim. All regions run the same code on weights of their own.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

from aorta.errors import AortaError
from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow

NUM_REGIONS = 16
ROWS = {"full": 4096, "small": 32}
DIM = {"full": 2048, "small": 32}
HIDDEN = {"full": 8192, "small": 64}
EPS = 1e-6
KERNELS_PER_REGION = 6


class TorchCompile(CheckedWorkload):
    """outputs: regions [region, T, D], and total [T, D], their sum."""

    name = "torch_compile"
    priority = "P3"
    unit = "regions"
    question = "Do compiled regions without dependencies run beside each other?"
    stream_meaning = (
        f"The same {NUM_REGIONS} compiled regions dealt to N streams; stream 0 also adds up their results. "
        "Compiled once per process, in setup."
    )
    max_streams = NUM_REGIONS

    def setup(self) -> None:
        context, size = self.context, self.context.size
        inputs, dim, hidden = Inputs(context), DIM[size], HIDDEN[size]
        self.x_TD = inputs.normal("x", (ROWS[size], dim), rank=context.rank)
        self.weights = [inputs.up_and_down(region, dim, hidden) for region in range(NUM_REGIONS)]
        self.outputs = {
            "regions": inputs.zeros((NUM_REGIONS, *self.x_TD.shape)),
            "total": inputs.zeros(self.x_TD.shape),
        }
        self.flow = Dataflow(context)
        self._compile()
        self.num_compiled = num_graphs()

    def _compile(self) -> None:
        """Compiles by way of a stream, as in iterations: compiled code depends on a thread's own settings.

        Twice, so that what the first run still adjusts is done.
        """
        try:
            for _ in range(2):
                self.context.streams.submit(0, partial(self._region, 0))
                self.context.streams.synchronize()
        except Exception as error:  # whatever a missing compiler or an old driver makes of it
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[0] if lines else type(error).__name__
            raise AortaError(
                f"torch.compile does not work here ({reason}); it needs a C++ compiler, or Triton on a GPU"
            ) from error

    def iteration(self, index: int) -> None:
        for region in range(NUM_REGIONS):
            stream = region % self.context.num_streams
            self.flow.put(stream, "region", partial(self._region, region), writes=[region])
        self.flow.put(0, "total", self._total, reads=range(NUM_REGIONS))

    def _region(self, region: int) -> None:
        self.outputs["regions"][region].copy_(compiled()(self.x_TD, *self.weights[region]))

    def _total(self) -> None:
        torch.sum(self.outputs["regions"], dim=0, out=self.outputs["total"])

    def amount(self) -> Amount:
        return Amount(NUM_REGIONS * KERNELS_PER_REGION + 1, samples=self.x_TD.shape[0], units=NUM_REGIONS)

    def device_work(self) -> DeviceWork:
        rows, dim = self.x_TD.shape
        flops = 4.0 * rows * dim * HIDDEN[self.context.size]
        return matrix_work(self.x_TD.dtype, NUM_REGIONS * flops)

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance, x = tolerance_of(self.x_TD.dtype), self.x_TD.double()
        normed = x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
        total = torch.zeros_like(x)
        for region, (up, down) in enumerate(self.weights):
            h = normed @ up.double()
            y = x + (h * 0.5 * (1 + torch.erf(h / 2**0.5))) @ down.double()
            yield TensorComparison(f"region {region}", self.outputs["regions"][region], y, tolerance)
            total += y
        yield TensorComparison("total", self.outputs["total"], total, tolerance)

    def metrics(self) -> dict[str, float | None]:
        """compiled_graphs of this process; one more in the iterations would have been timed with them."""
        return {
            "compiled_graphs": float(self.num_compiled),
            "compiled_graphs_in_iterations": float(num_graphs() - self.num_compiled),
        }


def region(x_TD: Tensor, up_DF: Tensor, down_FD: Tensor) -> Tensor:
    return x_TD + gelu(rms_norm(x_TD, x_TD.shape[-1:], eps=EPS) @ up_DF) @ down_FD


@functools.cache
def compiled() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """fullgraph: an error instead of falling back to uncompiled code."""
    function: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.compile(
        region, fullgraph=True, dynamic=False
    )
    return function


def num_graphs() -> int:
    """Graphs that the compiler has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
