"""Batches of images on their way from pinned host memory through preparation into a network.

The images lie in pinned memory already: what a loader's processes do before that is not the device's affair.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import conv2d, unfold

from aorta.queues.workload import Amount
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    rate_alone_gb_s,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow, stage_stream

NUM_BATCHES = 16
NUM_STAGES = 3
IMAGES = {"full": 128, "small": 2}
PIXELS = {"full": 224, "small": 32}
CHANNELS = {"full": (64, 128), "small": (4, 8)}
NUM_CLASSES = 100
KERNELS_PER_BATCH = 12


class AsyncDataload(CheckedWorkload):
    """outputs: prepared [batch, image, 3, pixels, pixels], logits [batch, image, class]."""

    name = "async_dataload"
    priority = "P3"
    unit = "images"
    question = "Do transfers from pinned memory and the preparation of images hide under the network?"
    stream_meaning = (
        f"{NUM_STAGES} stages (copy, prepare, network) with N/{NUM_STAGES} streams each (below {NUM_STAGES}, "
        f"stages share streams); {NUM_BATCHES} batches are dealt to the streams of a stage."
    )
    max_streams = NUM_STAGES * NUM_BATCHES

    def setup(self) -> None:
        context, size = self.context, self.context.size
        inputs = Inputs(context)
        pixels, (first, second) = PIXELS[size], CHANNELS[size]
        shape = (NUM_BATCHES, IMAGES[size], 3, pixels, pixels)
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=context.device.type != "cpu")
        for number, batch in enumerate(self.host):
            batch.copy_(inputs.integers(f"batch {number}", shape[1:], 256, context.rank))
        self.raw = torch.empty(shape, dtype=torch.uint8, device=context.device)
        self.mean = torch.tensor([0.485, 0.456, 0.406], device=context.device).view(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225], device=context.device).view(3, 1, 1)
        self.conv1 = inputs.normal("conv1", (first, 3, 7, 7), (3 * 49) ** -0.5)
        self.conv2 = inputs.normal("conv2", (second, first, 3, 3), (first * 9) ** -0.5)
        self.head = inputs.weight("head", second, NUM_CLASSES)
        self.outputs = {
            "prepared": inputs.zeros(shape),
            "logits": inputs.zeros((NUM_BATCHES, IMAGES[size], NUM_CLASSES)),
        }
        self.flow = Dataflow(context)

    def iteration(self, index: int) -> None:
        for turn in range(NUM_BATCHES + NUM_STAGES - 1):
            self._put(0, turn, "copy", [], ["raw"])
            self._put(1, turn - 1, "prepare", ["raw"], ["prepared"])
            self._put(2, turn - 2, "network", ["prepared"], [])

    def _put(self, stage: int, batch: int, name: str, reads: list[str], writes: list[str]) -> None:
        if not 0 <= batch < NUM_BATCHES:
            return
        stream = stage_stream(stage, batch, NUM_STAGES, self.context.num_streams)
        work = partial((self._copy, self._prepare, self._network)[stage], batch)
        self.flow.put(
            stream, name, work, [(buffer, batch) for buffer in reads], [(buffer, batch) for buffer in writes]
        )

    def _copy(self, batch: int) -> None:
        self.raw[batch].copy_(self.host[batch], non_blocking=True)

    def _prepare(self, batch: int) -> None:
        """Every second batch is mirrored."""
        scaled = (self.raw[batch].float() / 255).sub_(self.mean).div_(self.std)
        self.outputs["prepared"][batch].copy_(scaled.flip(-1) if batch % 2 else scaled)

    def _network(self, batch: int) -> None:
        x = conv2d(self.outputs["prepared"][batch], self.conv1, stride=2, padding=3).relu_()
        x = conv2d(x, self.conv2, stride=2, padding=1).relu_()
        torch.mm(x.mean(dim=(2, 3)), self.head, out=self.outputs["logits"][batch])

    def amount(self) -> Amount:
        num_images = NUM_BATCHES * self.host.shape[1]
        return Amount(NUM_BATCHES * KERNELS_PER_BATCH, samples=num_images, units=num_images)

    def comparisons(self) -> Iterable[TensorComparison]:
        """Preparation by the host, convolutions as matrix multiplies of patches, in float64."""
        tolerance = tolerance_of(self.head.dtype)
        mean, std = self.mean.cpu().double(), self.std.cpu().double()
        for batch in range(NUM_BATCHES):
            expected = (self.host[batch].double() / 255 - mean) / std
            if batch % 2:
                expected = expected[..., range(expected.shape[-1] - 1, -1, -1)]
            expected = expected.to(self.context.device)
            actual = self.outputs["prepared"][batch]
            yield TensorComparison(f"prepared batch {batch}", actual, expected, tolerance)
            logits = torch.cat([self._expected_logits(images) for images in expected.split(16)])
            yield TensorComparison(
                f"logits of batch {batch}", self.outputs["logits"][batch], logits, tolerance
            )

    def _expected_logits(self, images: Tensor) -> Tensor:
        x = _convolution(images, self.conv1.double(), padding=3)
        x = _convolution(x, self.conv2.double(), padding=1)
        return x.flatten(2).mean(dim=2) @ self.head.double()

    def metrics(self) -> dict[str, float | None]:
        num_bytes = float(self.host.numel())
        return {
            "host_to_device_bytes": num_bytes,
            "host_to_device_alone_gb_s": rate_alone_gb_s(
                self.context.pieces, "copy", num_bytes / len(self.host)
            ),
        }


def _convolution(images: Tensor, weight: Tensor, padding: int) -> Tensor:
    """Stride 2, then relu; [image, channel, pixels, pixels]."""
    patches = unfold(images, weight.shape[2:], padding=padding, stride=2)
    pixels = (images.shape[-1] + 2 * padding - weight.shape[-1]) // 2 + 1
    return (weight.flatten(1) @ patches).relu().view(len(images), len(weight), pixels, pixels)
