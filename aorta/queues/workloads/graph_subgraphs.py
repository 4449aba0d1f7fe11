"""Independent branches of an inference graph, launched kernel by kernel or as captured graphs.

R rows, D width, B branches.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from aorta.queues.options import Help
from aorta.queues.workload import Amount, DeviceWork, WorkloadOptions
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow, capture, graphs_refusal

NUM_BRANCHES = 32
NUM_LAYERS = 3
ROWS = {"full": 1024, "small": 16}
WIDTH = {"full": 2048, "small": 32}


class SubgraphOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    graphs: Annotated[bool, Help("each branch as one captured CUDA or HIP graph")] = False


class GraphSubgraphs(CheckedWorkload):
    """outputs: y [R, D], from all branches."""

    name = "graph_subgraphs"
    priority = "P2"
    unit = "subgraphs"
    question = "Do independent branches of a graph run side by side, and does capturing them change it?"
    stream_meaning = (
        f"The same {NUM_BRANCHES} branches dealt to N streams; stream 0 also prepares their input and joins "
        "their results. With --graphs a branch is replayed on its stream."
    )
    max_streams = NUM_BRANCHES
    Options = SubgraphOptions
    options: SubgraphOptions

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        assert isinstance(options, SubgraphOptions)
        return graphs_refusal(options.graphs, device_type)

    def setup(self) -> None:
        inputs = Inputs(self.context)
        rows, width = ROWS[self.context.size], WIDTH[self.context.size]
        self.raw_RD = inputs.normal("raw", (rows, width), 2.0, rank=self.context.rank)
        self.x_RD = inputs.zeros((rows, width))
        self.weights = [
            [inputs.weight(f"branch {branch}, layer {layer}", width, width) for layer in range(NUM_LAYERS)]
            for branch in range(NUM_BRANCHES)
        ]
        self.layers = [[inputs.zeros((rows, width)) for _ in range(NUM_LAYERS)] for _ in range(NUM_BRANCHES)]
        self.joined = inputs.zeros((rows, width * NUM_BRANCHES))
        self.head = inputs.weight("head", width * NUM_BRANCHES, width)
        self.outputs = {"y": inputs.zeros((rows, width))}
        self.flow = Dataflow(self.context)
        branches = [partial(self._branch, number) for number in range(NUM_BRANCHES)]
        self.captured: list[Any] = []
        self.run: list[Callable[[], object]] = [*branches]
        if self.options.graphs:
            self._prepare()
            self.captured = [
                capture(self.context, number % self.context.num_streams, work)
                for number, work in enumerate(branches)
            ]
            self.run = [graph.replay for graph in self.captured]

    def iteration(self, index: int) -> None:
        self.flow.put(0, "prepare", self._prepare, writes=["x"])
        for number, run in enumerate(self.run):
            stream = number % self.context.num_streams
            self.flow.put(stream, "branch", run, reads=["x"], writes=[f"branch {number}"])
        self.flow.put(0, "join", self._join, reads=[f"branch {number}" for number in range(NUM_BRANCHES)])

    def _prepare(self) -> None:
        torch.mul(self.raw_RD, 0.5, out=self.x_RD)

    def _branch(self, number: int) -> None:
        x = self.x_RD
        for weight, out in zip(self.weights[number], self.layers[number], strict=True):
            torch.mm(x, weight, out=out)
            x = out.relu_()

    def _join(self) -> None:
        torch.cat([layers[-1] for layers in self.layers], dim=1, out=self.joined)
        torch.mm(self.joined, self.head, out=self.outputs["y"])

    def amount(self) -> Amount:
        num = 3 + NUM_BRANCHES * (1 if self.captured else 2 * NUM_LAYERS)
        return Amount(operations=num, samples=ROWS[self.context.size], units=NUM_BRANCHES)

    def device_work(self) -> DeviceWork:
        rows, width = self.x_RD.shape
        num_gemms = NUM_BRANCHES * (NUM_LAYERS + 1)  # the head has one for each branch
        return matrix_work(self.head.dtype, 2.0 * num_gemms * rows * width * width)

    def comparisons(self) -> Iterable[TensorComparison]:
        y: Tensor | float = 0.0
        for weights, head in zip(self.weights, self.head.split(WIDTH[self.context.size]), strict=True):
            x = self.raw_RD.double() / 2
            for weight in weights:
                x = (x @ weight.double()).relu()
            y = y + x @ head.double()
        assert isinstance(y, Tensor)
        yield TensorComparison("y", self.outputs["y"], y, tolerance_of(self.head.dtype))

    def teardown(self) -> None:
        self.run = []
        self.captured.clear()
