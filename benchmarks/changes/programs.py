"""Training programs for the fourth set of what-ifs (sets.py): plain PyTorch, none of aorta's trainer.

Each has the interface of cases.Job: step(), close(), `run.optimizer`, `feed.take` and `losses`. On a CPU a
program takes the sizes of TINY, which only shows that it runs.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TINY = {
    "hidden": 64, "num_layers": 4, "num_heads": 4, "batch_size": 2, "seq_len": 16, "image_size": 32,
    "width": 8, "vocab_size": 128,
}  # fmt: skip
FORWARD_PREFETCH = 1
"""Units that `forward_prefetch` gathers ahead."""


class Attention(nn.Module):
    def __init__(self, hidden: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.head_dim, self.is_causal = hidden // num_heads, is_causal
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for part in (self.query, self.key, self.value))  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, hidden: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads, is_causal=is_causal)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return out


class LanguageModel(nn.Module):
    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = size["hidden"], size["num_heads"]
        self.embedding = nn.Embedding(size["vocab_size"], hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, is_causal=True) for _ in range(size["num_layers"]))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, size["vocab_size"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class ImageModel(nn.Module):
    """Patches through blocks, the mean of them into a class."""

    def __init__(self, size: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = size["hidden"], size["num_heads"]
        self.patches = nn.Conv2d(3, hidden, 16, 16)
        self.blocks = nn.Sequential(
            *(Block(hidden, heads, is_causal=False) for _ in range(size["num_layers"]))
        )
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.beside = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convolutions(x) + self.beside(x))


def convolutional_model(width: int, counts: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    inputs = width
    for stage, count in enumerate(counts):
        for i in range(count):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not i else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Feed:
    """Batches that lie on the device already."""

    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self.batch = batch

    def take(self) -> tuple[Tensor, Tensor]:
        return self.batch


class Program:
    """One training step at a time; `accumulate` passes in each, gradients reduced in the last."""

    optimizer: torch.optim.Optimizer

    def __init__(self, size: dict[str, Any], device: torch.device) -> None:
        self.size = size | (TINY if device.type == "cpu" else {})
        self.device, self.is_gpu = device, device.type == "cuda"
        self.next_step = 0
        self.losses: list[Tensor] = []
        self.run = self
        torch.manual_seed(dist.get_rank())
        self.group = self._group()
        self.model = self.build()
        self.feed = Feed(self.batch())
        for _ in range(3):
            self.step()
        synchronize()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def _group(self) -> dist.ProcessGroup | None:
        """A communicator of its own where the number of channels is limited."""
        return limited_group(self.size["channels"]) if "channels" in self.size else None

    def tokens(self) -> tuple[Tensor, Tensor]:
        shape = (self.size["batch_size"], self.size["seq_len"])
        tokens = torch.randint(self.size["vocab_size"], shape, device=self.device)
        return tokens, tokens

    def images(self) -> tuple[Tensor, Tensor]:
        count, side = self.size["batch_size"], self.size["image_size"]
        images = torch.randn(count, 3, side, side, device=self.device, dtype=self.dtype)
        return images.to(memory_format=torch.channels_last), torch.randint(1000, (count,), device=self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        return self.tokens()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def last_pass_alone(self, is_last: bool) -> Any:
        """A context in which gradients are reduced in the last pass."""
        return nullcontext()

    def step(self) -> int:
        number = self.next_step
        self.next_step += 1
        num_passes = self.size.get("accumulate", 1)
        for i in range(num_passes):
            inputs, target = self.feed.take()
            with self.last_pass_alone(i == num_passes - 1):
                loss = F.cross_entropy(self.model(inputs).flatten(0, -2).float(), target.flatten())
                (loss / num_passes).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[:] = [loss.detach()]
        return number

    def close(self) -> None:
        """Frees the device's memory for the next program."""
        self.losses.clear()
        self.__dict__.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class DataParallel(Program):
    """DistributedDataParallel in bf16."""

    def network(self) -> nn.Module:
        return LanguageModel(self.size)

    def build(self) -> nn.Module:
        network = self.network().to(self.device, self.dtype)
        if self.size.get("compile"):
            compile_blocks(network, self.is_gpu)
        self.optimizer = self.make_optimizer(network)
        return DistributedDataParallel(
            network, process_group=self.group, bucket_cap_mb=self.size.get("bucket_cap_mb"),
            gradient_as_bucket_view=True,
        )  # fmt: skip

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(network.parameters(), lr=1e-4)

    def last_pass_alone(self, is_last: bool) -> Any:
        return nullcontext() if is_last else self.model.no_sync()  # type: ignore[operator]


class Images(DataParallel):
    def network(self) -> nn.Module:
        return ImageModel(self.size)

    def batch(self) -> tuple[Tensor, Tensor]:
        return self.images()


class Convolutions(DataParallel):
    def network(self) -> nn.Module:
        return convolutional_model(self.size["width"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def batch(self) -> tuple[Tensor, Tensor]:
        return self.images()

    def make_optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)


class Sharded(Program):
    """FSDP2, parameters in fp32, computing in bf16."""

    def mesh(self) -> DeviceMesh:
        if self.group is not None:
            return DeviceMesh.from_group(self.group, self.device.type)
        return init_device_mesh(self.device.type, (dist.get_world_size(),))

    def build(self) -> nn.Module:
        size, network = self.size, LanguageModel(self.size).to(self.device)
        if size.get("compile"):
            compile_blocks(network, self.is_gpu)
        options: dict[str, Any] = {
            "mesh": self.mesh(), "reshard_after_forward": size.get("reshard", True),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32),
        }  # fmt: skip
        blocks: list[Any] = list(network.blocks)
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(network, **options)
        if size.get("forward_prefetch"):
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + FORWARD_PREFETCH])
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        return network

    @contextmanager
    def last_pass_alone(self, is_last: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        yield


class TwoDimensional(Program):
    """FSDP2 x TP on one mesh of (1, ranks): every block's projections over the ranks of `tp`."""

    def batch(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # all ranks of tp have the same samples
        return self.tokens()

    def build(self) -> nn.Module:
        network = LanguageModel(self.size).to(self.device, self.dtype)
        mesh = init_device_mesh(self.device.type, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
        by_column, by_row = ColwiseParallel, RowwiseParallel
        for block in network.blocks:
            plan: dict[str, Any] = {
                "attention.query": by_column(), "attention.key": by_column(), "attention.value": by_column(),
                "attention.out": by_row(), "up": by_column(), "down": by_row(),
            }  # fmt: skip
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(network, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        return network


class Stages(Program):
    """Two stages on every rank, micro-batches interleaved."""

    def build(self) -> nn.Module:
        size, rank, num_ranks = self.size, dist.get_rank(), dist.get_world_size()
        places = [rank, rank + num_ranks]
        per_stage = max(1, size["num_layers"] // (2 * num_ranks))
        hidden, heads = size["hidden"], size["num_heads"]
        parts = [
            nn.Sequential(*(Block(hidden, heads, is_causal=True) for _ in range(per_stage))) for _ in places
        ]
        network = nn.ModuleList(parts).to(self.device, self.dtype)
        stages: list[Any] = [
            PipelineStage(part, place, 2 * num_ranks, self.device)
            for part, place in zip(network, places, strict=True)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, size["micro_batches"], loss_fn=F.mse_loss)
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
        return network

    def batch(self) -> tuple[Tensor, Tensor]:
        shape = (
            self.size["batch_size"] * self.size["micro_batches"],
            self.size["seq_len"],
            self.size["hidden"],
        )
        x = torch.randn(*shape, device=self.device, dtype=self.dtype)
        return x, x

    def step(self) -> int:
        number = self.next_step
        self.next_step += 1
        inputs, target = self.feed.take()
        losses: list[Tensor] = []
        options: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        if self.is_first:
            self.schedule.step(inputs, **options)
        else:
            self.schedule.step(**options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[:] = losses[-1:] or [inputs.new_zeros(())]
        return number


class Flat(Program):
    """Gradients in one buffer that is reduced by hand: a step that a graph can hold whole."""

    def build(self) -> nn.Module:
        network = LanguageModel(self.size).to(self.device, self.dtype)
        parameters = list(network.parameters())
        self.gradients = torch.zeros(sum(p.numel() for p in parameters), device=self.device, dtype=self.dtype)
        parts = self.gradients.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, capturable=self.is_gpu)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.loss = torch.zeros((), device=self.device)
        return network

    def _whole(self) -> None:
        inputs, target = self.feed.take()
        self.gradients.zero_()
        loss = F.cross_entropy(self.model(inputs).flatten(0, -2).float(), target.flatten())
        loss.backward()
        dist.all_reduce(self.gradients)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def step(self) -> int:
        number = self.next_step
        self.next_step += 1
        if self.size.get("graph") and self.is_gpu and number == 0:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    self._whole()
            torch.cuda.current_stream().wait_stream(beside)
            torch.cuda.synchronize()
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured, capture_error_mode="thread_local"):
                self._whole()
        if self.captured is not None:
            self.captured.replay()
        else:
            self._whole()
        self.losses[:] = [self.loss]
        return number


PROGRAMS: dict[str, Callable[[dict[str, Any], torch.device], Program]] = {
    "images": Images, "convolutions": Convolutions, "language_ddp": DataParallel, "sharded": Sharded,
    "two_dimensional": TwoDimensional, "stages": Stages, "flat": Flat,
}  # fmt: skip


def compile_blocks(network: nn.Module, is_gpu: bool) -> None:
    torch._dynamo.config.recompile_limit = 64
    for block in network.blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False, backend="inductor" if is_gpu else "aot_eager")


def limited_group(channels: int) -> dist.ProcessGroup:
    """All ranks, in a communicator of at most this many channels."""
    if not torch.cuda.is_available():
        return dist.new_group()  # type: ignore[no-any-return]
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    options.config.min_ctas = 1
    return dist.new_group(backend="nccl", pg_options=options)  # type: ignore[no-any-return]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
