"""Races that users of other projects reported, as training programs for `aorta check`, each with its mend.

torchrun --nproc-per-node 2 benchmarks/hazards/reported.py deepspeed_5606 [--mended]

A program is the reported order of streams in a loop of its own. Three take the released code that had the
race, or its mend, from --packages FOLDER: pip install --no-deps --target FOLDER/trl-1.7.0 trl==1.7.0, and so
for trl 1.16.0, torchtune 0.3.1 and 0.4.0. Nothing else of those packages is imported.
"""

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Tensor = Any
Step = Callable[[], Tensor]
WIDTH, DEPTH = 2048, 6


def current() -> Any:
    return torch.cuda.current_stream()


def on(stream: Any) -> Any:
    return torch.cuda.stream(stream)


class Training:
    """A model whose gradients go through `reduce`, one parameter after the other, as they are made."""

    def __init__(self, reduce: Callable[[int, Tensor], None], finish: Callable[[], None]) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).cuda()
        self.parameters: list[Any] = list(self.model.parameters())
        self.reduced = [torch.zeros_like(p) for p in self.parameters]
        self.finish = finish
        for number, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: reduce(number, p.grad))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> Tensor:
        x = torch.randn(512, WIDTH, device="cuda")
        loss = self.model(x).square().mean()
        loss.backward()
        self.finish()
        for parameter, reduced in zip(self.parameters, self.reduced, strict=True):
            parameter.grad.copy_(reduced)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def reducing(reduce: Callable[[Training, Any, int, Tensor], None]) -> Step:
    """Reduce on a stream of its own; the step waits for it in the end."""
    side = torch.cuda.Stream()
    training: list[Training] = []
    training.append(
        Training(
            lambda number, grad: reduce(training[0], side, number, grad),
            lambda: current().wait_stream(side),
        )
    )
    return training[0].step


def deepspeed_8061(mended: bool) -> Step:
    """Two streams fill the bucket, and the reduction waits for one of them."""
    bucket = torch.zeros(DEPTH, WIDTH, WIDTH, device="cuda")
    fill, side = [torch.cuda.Stream() for _ in range(2)], torch.cuda.Stream()
    training: list[Training] = []

    def reduce(number: int, grad: Tensor) -> None:
        stream = fill[number % 2]
        stream.wait_stream(current())
        with on(stream):
            bucket[number].copy_(grad)

    def finish() -> None:
        for stream in fill if mended else fill[:1]:
            side.wait_stream(stream)
        with on(side):
            dist.all_reduce(bucket)
            for number, reduced in enumerate(training[0].reduced):
                reduced.copy_(bucket[number])
        current().wait_stream(side)
        current().wait_stream(fill[1])

    training.append(Training(reduce, finish))
    return training[0].step


def deepspeed_5606(mended: bool) -> Step:
    """The bucket is filled again while it is reduced."""
    bucket = torch.zeros(WIDTH, WIDTH, device="cuda")

    def reduce(training: Training, side: Any, number: int, grad: Tensor) -> None:
        if mended:
            current().wait_stream(side)
        bucket.copy_(grad)
        side.wait_stream(current())
        with on(side):
            dist.all_reduce(bucket)
            training.reduced[number].copy_(bucket)

    return reducing(reduce)


def deepspeed_7965(mended: bool) -> Step:
    """The copy that is reduced goes back to its allocator while the reduction's stream uses it."""

    def reduce(training: Training, side: Any, number: int, grad: Tensor) -> None:
        copy = grad.clone()
        side.wait_stream(current())
        with on(side):
            dist.all_reduce(copy)
            training.reduced[number].copy_(copy)
        if mended:
            copy.record_stream(side)

    return reducing(reduce)


def deepspeed_7805(mended: bool) -> Step:
    """The index of two buffers is reset, so that the first is filled again before its reduction has ended."""
    buffers = [torch.zeros(WIDTH, WIDTH, device="cuda") for _ in range(2)]
    done = [torch.cuda.Event() for _ in range(2)]
    state = {"index": 0, "count": 0}

    def reduce(training: Training, side: Any, number: int, grad: Tensor) -> None:
        index, state["count"] = state["index"], state["count"] + 1
        current().wait_event(done[(state["count"] - 1) % 2])
        buffers[index].copy_(grad)
        side.wait_stream(current())
        with on(side):
            dist.all_reduce(buffers[index])
            training.reduced[number].copy_(buffers[index])
        done[index].record(side)
        state["index"] = 1 - index if mended else 0

    return reducing(reduce)


def deepspeed_7898(mended: bool) -> Step:
    """Gradients come from a stream of the program, and the reduction waits for the default one."""
    side, main_stream = torch.cuda.Stream(), torch.cuda.Stream()
    model = blocks()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def step() -> Tensor:
        main_stream.wait_stream(current())
        with on(main_stream):
            loss = model(torch.randn(512, WIDTH, device="cuda")).square().mean()
            loss.backward()
            side.wait_stream(current() if mended else torch.cuda.default_stream())
            with on(side):
                for parameter in parameters:
                    dist.all_reduce(parameter.grad)
            current().wait_stream(side)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        current().wait_stream(main_stream)
        return loss

    return step


def pytorch_180889(mended: bool) -> Step:
    """The reduced shard is freed on its stream while another one all-reduces it; the next layer gets it."""
    replicate, group = torch.cuda.Stream(), dist.new_group()
    size = dist.get_world_size()

    def reduce(training: Training, side: Any, number: int, grad: Tensor) -> None:
        side.wait_stream(current())
        with on(side):
            shard = torch.empty(WIDTH // size, WIDTH, device="cuda")
            dist.reduce_scatter_tensor(shard, grad)
        replicate.wait_stream(side)
        with on(replicate):
            dist.all_reduce(shard, group=group)
            training.reduced[number][: WIDTH // size].copy_(shard)
        if mended:
            side.wait_stream(replicate)

    step = reducing(reduce)

    def awaited() -> Tensor:
        loss = step()
        current().wait_stream(replicate)
        return loss

    return awaited


def pytorch_180665(mended: bool) -> Step:
    """The reduced gradient is freed while another stream copies it to the host."""
    offload, size = torch.cuda.Stream(), dist.get_world_size()
    host = [torch.zeros(WIDTH // size, WIDTH, pin_memory=True) for _ in range(DEPTH)]

    def reduce(training: Training, side: Any, number: int, grad: Tensor) -> None:
        side.wait_stream(current())
        with on(side):
            shard = torch.empty(WIDTH // size, WIDTH, device="cuda")
            dist.reduce_scatter_tensor(shard, grad)
        offload.wait_stream(side)
        with on(offload):
            host[number].copy_(shard, non_blocking=True)
        if mended:
            shard.record_stream(offload)

    step = reducing(reduce)

    def awaited() -> Tensor:
        loss = step()
        current().wait_stream(offload)
        return loss

    return awaited


def blocks() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers).cuda()


def alone(around: Callable[[Tensor], Tensor]) -> Step:
    """A loop that puts its activation through `around`, with no reduction."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        loss = model(around(torch.randn(1024, WIDTH, device="cuda"))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def torchtitan_2581(mended: bool) -> Step:
    """The stream that offloads waits for itself, and overwrites the pool while it is read."""
    to_device, to_host = torch.cuda.Stream(), torch.cuda.Stream()
    pool, fetched = torch.zeros(1024, WIDTH, pin_memory=True), torch.zeros(1024, WIDTH, device="cuda")

    def around(x: Tensor) -> Tensor:
        to_device.wait_stream(current())
        with on(to_device):
            fetched.copy_(pool, non_blocking=True)
        with on(to_host):
            to_host.wait_stream(to_device if mended else to_host)
            pool.copy_(x, non_blocking=True)
        y = x.clone()
        current().wait_stream(to_device)
        current().wait_stream(to_host)
        return y + 0.1 * fetched

    def first(x: Tensor) -> Tensor:
        to_host.wait_stream(current())
        return around(x)

    return alone(first)


def torchrec_4191(mended: bool) -> Step:
    """The stream that distributes data uses the cache beside the one that prefetches into it."""
    prefetch, data_dist = torch.cuda.Stream(), torch.cuda.Stream()
    cache = torch.zeros(1024, WIDTH, device="cuda")

    def around(x: Tensor) -> Tensor:
        prefetch.wait_stream(current())
        data_dist.wait_stream(current())
        with on(prefetch):
            cache.copy_(x)
        if mended:
            data_dist.wait_stream(prefetch)
        with on(data_dist):
            cache.mul_(0.5)
        current().wait_stream(prefetch)
        current().wait_stream(data_dist)
        return x + cache

    return alone(around)


def megatron_7398(mended: bool) -> Step:
    """A reload does not wait for the copy that fills its buffer."""
    to_host = torch.cuda.Stream()
    buffer = torch.zeros(1024, WIDTH, pin_memory=True)

    def around(x: Tensor) -> Tensor:
        to_host.wait_stream(current())
        with on(to_host):
            buffer.copy_(x, non_blocking=True)
        if mended:
            current().wait_stream(to_host)
        reloaded = torch.empty_like(x)
        reloaded.copy_(buffer, non_blocking=True)
        current().wait_stream(to_host)
        return reloaded

    return alone(around)


# -- released code -------------------------------------------------------------------------------------------


def released(path: Path) -> Any:
    """OffloadActivations of a released version. What its file imports besides torch is a stand-in."""
    names: dict[str, dict[str, Any]] = {
        "accelerate": {}, "accelerate.utils": {}, "accelerate.logging": {"get_logger": logging.getLogger},
        "accelerate.utils.versions": {"is_torch_version": lambda *_: True},
        "transformers": {"is_torch_npu_available": lambda: False},
        "torchao": {"__version__": "1.0"}, "torchao.dtypes": {},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": type("NF4Tensor", (), {})}, "torchtune": {},
        "torchtune.modules": {"TiedLinear": nn.Linear},
        "torchtune.utils": {"get_logger": lambda *_: logging.getLogger()},
    }  # fmt: skip
    for name, values in names.items():
        stand_in = sys.modules.setdefault(name, ModuleType(name))
        vars(stand_in).update(values)
    spec = importlib.util.spec_from_file_location("activation_offloading", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OffloadActivations


def trl(mended: bool, packages: Path) -> Any:
    folder = packages / ("trl-1.16.0" if mended else "trl-1.7.0")
    return released(folder / "trl" / "models" / "activation_offloading.py")


def offloading(context: Any, forward: Callable[[nn.Module, Tensor], Tensor], model: nn.Module) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        x = torch.randn(1024, WIDTH, device="cuda")
        with context:
            loss = forward(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def trl_7195_clone(mended: bool, packages: Path) -> Step:
    """A saved view with an offset is cloned into memory of the copy's stream, and used beside it."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y[1:] * y[:-1].sigmoid()).mean()  # the product is the first that backward needs

    return offloading(trl(mended, packages)(), forward, blocks())


def trl_7195_stream(mended: bool, packages: Path) -> Step:
    """The compute stream was taken once, at construction; the forward pass runs on another."""
    stream = torch.cuda.Stream()
    context = trl(mended, packages)()
    step = offloading(context, lambda model, x: model(x).square().mean(), blocks())

    def elsewhere() -> Tensor:
        stream.wait_stream(current())
        with on(stream):
            loss = step()
        current().wait_stream(stream)
        return loss

    return elsewhere


class Passed(torch.autograd.Function):
    """Its backward pass gives on a view of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (scale,) = ctx.saved_tensors
        return scale.view(grads[0].shape), None


passed: Any = Passed.apply


def torchtune_1867(mended: bool, packages: Path) -> Step:
    """A restored tensor whose view the backward pass goes on with is freed when its node is done."""
    folder = packages / ("torchtune-0.4.0" if mended else "torchtune-0.3.1")
    context = released(folder / "torchtune" / "training" / "_activation_offloading.py")(use_streams=True)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)).cuda()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        for layer in layers:
            x = passed(layer(x).tanh(), torch.rand_like(x))
        return x.square().mean()

    return offloading(context, forward, layers)


PROGRAMS = [
    deepspeed_8061, deepspeed_5606, deepspeed_7965, deepspeed_7805, deepspeed_7898, pytorch_180889,
    pytorch_180665, torchtitan_2581, torchrec_4191, megatron_7398,
]  # fmt: skip
RELEASED = [trl_7195_clone, trl_7195_stream, torchtune_1867]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[program.__name__ for program in (*PROGRAMS, *RELEASED)])
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--packages", type=Path)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(0)  # all ranks begin with the same weights
    by_name = {program.__name__: program for program in PROGRAMS}
    if arguments.name in by_name:
        step = by_name[arguments.name](arguments.mended)
    else:
        real: Any = next(program for program in RELEASED if program.__name__ == arguments.name)
        step = real(arguments.mended, arguments.packages)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(arguments.steps):
        step()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
