"""Kernels that do next to nothing, as many as the host can launch."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from aorta.queues.options import Help, at_least_one
from aorta.queues.workload import Amount, WorkloadOptions
from aorta.queues.workloads.inputs_and_checks import CheckedWorkload, Inputs, TensorComparison
from aorta.queues.workloads.ordering import capture, graphs_refusal

NUM_CHAINS = 64
KERNELS_PER_CHAIN = {"full": 32, "small": 4}
NUM_ELEMENTS = 256


class TinyOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    burst: Annotated[int, Help("kernels of a chain launched in a row before the next chain's turn")] = 4
    graphs: Annotated[bool, Help("all kernels of a stream as one captured graph")] = False

    def __post_init__(self) -> None:
        at_least_one(self, "burst")


class TinyKernelStress(CheckedWorkload):
    """outputs: chains [chain, element], each its input plus 1 for every kernel of the chain."""

    name = "tiny_kernel_stress"
    priority = "P0"
    unit = "kernels"
    question = "How many tiny kernels per second get through, and does another stream add any?"
    stream_meaning = (
        f"The same {NUM_CHAINS} chains of dependent tiny kernels dealt to N streams. Launched one by "
        "one the host sets the pace; with --graphs, one launch per stream, the device does."
    )
    max_streams = NUM_CHAINS
    Options = TinyOptions
    options: TinyOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, TinyOptions)
        return graphs_refusal(options.graphs, device_type)

    def setup(self) -> None:
        self.length = KERNELS_PER_CHAIN[self.context.size]
        inputs = Inputs(self.context, torch.float32)
        shape, rank = (NUM_CHAINS, NUM_ELEMENTS), self.context.rank
        # Whole numbers: adding 1 is exact, so that a kernel too few or too many is one off, not a rounding.
        self.start = inputs.integers("start", shape, 1000, rank).float()
        self.outputs = {"chains": torch.zeros_like(self.start)}
        self.rows = list(zip(self.start, self.outputs["chains"], strict=True))
        self.captured: list[Any] = []
        if self.options.graphs:
            self.captured = [
                capture(self.context, stream, partial(self._all_of, stream))
                for stream in range(self.context.num_streams)
            ]

    def iteration(self, index: int) -> None:
        if self.captured:
            for stream, graph in enumerate(self.captured):
                self.context.span(stream, "graph", graph.replay)
            return
        for stream, work in self._bursts():
            self.context.span(stream, "tiny", work)

    def _bursts(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Bursts of all chains, in the order of submission, each with its stream."""
        for first in range(0, self.length, self.options.burst):
            num = min(self.options.burst, self.length - first)
            for chain, (start, row) in enumerate(self.rows):
                yield chain % self.context.num_streams, partial(_add_ones, start, row, first == 0, num)

    def _all_of(self, stream: int) -> None:
        for stream_index, work in self._bursts():
            if stream_index == stream:
                work()

    def amount(self) -> Amount:
        num = NUM_CHAINS * self.length
        return Amount(operations=num, samples=NUM_CHAINS, units=num)

    def comparisons(self) -> Iterable[TensorComparison]:
        yield TensorComparison("chains", self.outputs["chains"], self.start + self.length, 0.0)

    def teardown(self) -> None:
        self.captured.clear()


def _add_ones(start: Tensor, row: Tensor, is_first: bool, num: int) -> None:
    if is_first:
        torch.add(start, 1.0, out=row)
        num -= 1
    for _ in range(num):
        row.add_(1.0)
