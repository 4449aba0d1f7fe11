"""Training loops that are as users write them, for `aorta check`: clean ones, and mutants that lack one
order.

torchrun --nproc-per-node 2 benchmarks/hazards/programs.py fsdp2 --steps 24
torchrun --nproc-per-node 2 benchmarks/hazards/programs.py fsdp2 --mutant reduce_scatter_before_its_input

Prints the losses' bits in the end, so that a run with the check can be compared with one without.
"""

import argparse
import hashlib
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

import mutants
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

Tensor = Any
"""Of torch, which annotates them; what a parameter's gradient is, a reader of these loops knows."""
WIDTH = 1024
WARM_UP_STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Made on the device: a copy from pageable memory waits for the stream, and would order what lacks an
    order."""
    generator = torch.Generator("cuda").manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(512, width, generator=generator, device="cuda")
    return x, torch.randint(0, 64, (512,), generator=generator, device="cuda")


# -- clean forms: each returns a step ------------------------------------------------------------------------


def ddp(arguments: Any) -> Callable[[int], Tensor]:
    net, options = Net().cuda(), {}
    if arguments.kind == "ddp_mixed":
        from torch.nn.parallel.distributed import _MixedPrecision

        options["mixed_precision"] = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    if arguments.kind == "ddp_overlapped":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 1e-3})
    model = nn.parallel.DistributedDataParallel(net, device_ids=[torch.cuda.current_device()], **options)
    if arguments.kind == "ddp_hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = HOOKS[arguments.mutant] if arguments.mutant else default_hooks.bf16_compress_hook
        model.register_comm_hook(None, hook)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arguments.kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
    if arguments.kind == "ddp_overlapped":
        optimizer = _Stepper([nn.Parameter(torch.zeros(1))], lr=0.0)
    forward: Any = torch.compile(model) if arguments.kind == "compile" else model

    def step(n: int) -> Tensor:
        x, y = batch(n)
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fsdp2(arguments: Any) -> Callable[[int], Tensor]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    is_offloaded = arguments.kind.startswith("fsdp2_offload")
    model = Net() if is_offloaded else Net().cuda()
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if is_offloaded:
        options["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if arguments.kind == "fsdp2_hook":  # gradients are averaged once more, as over the replicas of HSDP
        hook_stream, size = torch.cuda.Stream(), dist.get_world_size()
        for module in (*model.blocks, model):
            module.set_all_reduce_hook(lambda grad: dist.all_reduce(grad.div_(size)), stream=hook_stream)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_passes = 1 if arguments.kind == "fsdp2_offload_once" else 2

    def step(n: int) -> Tensor:
        x, y = batch(n)
        for micro in range(num_passes):
            loss = F.cross_entropy(model(x + micro).float(), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def tp(arguments: Any) -> Callable[[int], Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Net().cuda()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(n: int) -> Tensor:
        torch.manual_seed(n)
        x, y = torch.randn(512, WIDTH, device="cuda"), torch.randint(0, 64, (512,), device="cuda")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def graphs(arguments: Any) -> Callable[[int], Tensor]:
    """Forward and backward in one graph; gradients are reduced and applied outside of it."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    static_x, static_y = batch(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            F.cross_entropy(model(static_x), static_y).backward()
            for parameter in model.parameters():
                parameter.grad.zero_()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = F.cross_entropy(model(static_x), static_y)
        loss.backward()

    def step(n: int) -> Tensor:
        x, y = batch(n)
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.clone()

    return step


def offload(arguments: Any) -> Callable[[int], Tensor]:
    """Activations saved in pinned memory."""
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(n: int) -> Tensor:
        x, y = batch(n)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def checkpoint(arguments: Any) -> Callable[[int], Tensor]:
    """Asynchronous checkpoints: a copy to pinned memory on a stream of its own, beside the next step."""
    inner = ddp(argparse.Namespace(kind="ddp", mutant=None))
    model = inspect.getclosurevars(inner).nonlocals["forward"]
    side = torch.cuda.Stream()
    pinned = [torch.empty_like(p, device="cpu", pin_memory=True) for p in model.parameters()]

    def step(n: int) -> Tensor:
        if n % 3 == 0:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for target, parameter in zip(pinned, model.parameters(), strict=True):
                    target.copy_(parameter.detach(), non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
        return inner(n)

    return step


def cp(arguments: Any) -> Callable[[int], Tensor]:
    """Context parallel by hand: keys and values gathered, asynchronously, behind the queries' projection."""
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "o")}).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(n: int) -> Tensor:
        x, _ = batch(n)
        kv = torch.cat([model["k"](x), model["v"](x)], dim=-1)
        whole = torch.empty(2 * 512, 2 * WIDTH, device="cuda")
        work = dist.all_gather_into_tensor(whole, kv.detach().contiguous(), async_op=True)
        q = model["q"](x)
        work.wait()
        k, v = whole.chunk(2, dim=-1)
        heads = [t.reshape(1, -1, 8, WIDTH // 8).transpose(1, 2) for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(512, WIDTH)
        loss = model["o"](out).square().mean() + kv.square().mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def pp(arguments: Any) -> Callable[[int], Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    stage_model = nn.Sequential(*(Block(WIDTH) for _ in range(2))).cuda()
    device = torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(stage_model, rank, size, device)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.AdamW(stage_model.parameters(), lr=1e-3)

    def step(n: int) -> Tensor:
        torch.manual_seed(n)
        x, losses = torch.randn(64, WIDTH, device="cuda"), list[Tensor]()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return losses[-1] if losses else torch.zeros((), device="cuda")

    return step


def accelerated(arguments: Any) -> Callable[[int], Tensor]:
    """What Hugging Face's accelerate makes of a model, an optimizer and a loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    data = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH), torch.randint(0, 64, (4096,)))
    model, optimizer, loader = accelerator.prepare(
        net := Net(),
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        torch.utils.data.DataLoader(data, batch_size=64, pin_memory=True),
    )
    batches = iter(loader)

    def step(n: int) -> Tensor:
        nonlocal batches
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


# -- loaders and optimizers with streams of their own, whole or without one order ----------------------------


def loader(arguments: Any) -> Callable[[int], Tensor]:
    """Batches are copied ahead on a stream of their own."""
    model = nn.parallel.DistributedDataParallel(Net().cuda(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    side = torch.cuda.Stream()
    source = [torch.randn(8192, WIDTH).pin_memory() for _ in range(3)]  # unlike the two buffers, three
    ahead: list[Tensor] = []

    def fetch(n: int) -> None:
        with torch.cuda.stream(side):
            ahead.append(source[n % 3].to("cuda", non_blocking=True))

    def step(n: int) -> Tensor:
        if not ahead:
            fetch(n)
        if arguments.mutant != "loader_without_wait":
            torch.cuda.current_stream().wait_stream(side)
        x = ahead.pop()
        if arguments.mutant != "loader_without_record_stream":
            x.record_stream(torch.cuda.current_stream())
        loss = model(x).square().mean()
        loss.backward()
        del x
        fetch(n + 1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def host_optimizer(arguments: Any) -> Callable[[int], Tensor]:
    """Gradients go to pinned memory on a stream, the update is on the host, parameters come back."""
    model, mutant = Net().cuda(), arguments.mutant
    parameters = list(model.parameters())
    side, stepper = torch.cuda.Stream(), _Stepper([nn.Parameter(torch.zeros(1))], lr=0.0)
    grads = [torch.empty_like(p, device="cpu", pin_memory=True) for p in parameters]
    weights = [p.detach().cpu().pin_memory() for p in parameters]

    def step(n: int) -> Tensor:
        x, y = batch(n)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if mutant != "host_optimizer_copies_before_backward":
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for target, parameter in zip(grads, parameters, strict=True):
                target.copy_(parameter.grad, non_blocking=True)
        if mutant != "host_optimizer_reads_before_the_copy":
            side.synchronize()
        for weight, grad in zip(weights, grads, strict=True):
            weight.sub_(grad, alpha=0.01)
        with torch.no_grad(), torch.cuda.stream(side):
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight, non_blocking=True)
        if mutant != "host_optimizer_parameters_not_awaited":
            torch.cuda.current_stream().wait_stream(side)
        for parameter in parameters:
            parameter.grad.zero_()
        stepper.step()
        return loss

    return step


class _Stepper(torch.optim.SGD):
    """Stands for the library's optimizer, at whose step an iteration ends."""


HOOK_STREAM: Any = None


def _hook_without_fork(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduces on a stream of its own that does not wait for the gradients."""
    future: Any = torch.futures.Future(devices=[torch.cuda.current_device()])
    with torch.cuda.stream(HOOK_STREAM):
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size())
        dist.all_reduce(buffer)
        future.set_result(buffer)
    return future


def _hook_without_wait(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Says that it is done while the reduction runs."""
    future: Any = torch.futures.Future(devices=[torch.cuda.current_device()])
    buffer = bucket.buffer()
    LEFT.append(dist.all_reduce(buffer, async_op=True))
    future.set_result(buffer)
    return future


def _hook_decompresses_early(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Copies the reduced half-precision bucket back before the reduction has ended."""
    future: Any = torch.futures.Future(devices=[torch.cuda.current_device()])
    half = bucket.buffer().to(torch.bfloat16)
    LEFT.append(dist.all_reduce(half, async_op=True))
    bucket.buffer().copy_(half)
    future.set_result(bucket.buffer())
    return future


LEFT: list[Any] = []
HOOKS: dict[str, Any] = {
    "hook_without_fork": _hook_without_fork,
    "hook_without_wait": _hook_without_wait,
    "hook_decompresses_early": _hook_decompresses_early,
}


KINDS: dict[str, Callable[[Any], Callable[[int], Tensor]]] = {
    "ddp": ddp, "ddp_hook": ddp, "ddp_mixed": ddp, "ddp_overlapped": ddp, "zero": ddp, "compile": ddp,
    "fsdp2": fsdp2, "fsdp2_hook": fsdp2, "fsdp2_offload": fsdp2, "fsdp2_offload_once": fsdp2,
    "tp": tp, "cp": cp, "pp": pp,
    "graphs": graphs, "offload": offload, "checkpoint": checkpoint, "loader": loader,
    "host_optimizer": host_optimizer, "accelerate": accelerated,
}  # fmt: skip


def main() -> None:
    global HOOK_STREAM
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--mutant")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--csan", action="store_true", help="torch's sanitizer from half of the steps on.")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.manual_seed(0)
    HOOK_STREAM = torch.cuda.Stream()
    if arguments.mutant in mutants.MUTANTS:
        mutants.leave_out(arguments.mutant)
    step = KINDS[arguments.kind](arguments)
    csan_from = arguments.steps // 2 if arguments.csan else arguments.steps
    losses, alarms, times = [], 0, dict[int, float]()
    for n in range(arguments.steps):
        if n in (WARM_UP_STEPS, csan_from, csan_from + 1):
            torch.cuda.synchronize()
            times[n] = time.perf_counter()
        if n == csan_from:
            from torch.cuda import _sanitizer

            _sanitizer.enable_cuda_sanitizer()
        try:
            losses.append(step(n).detach())
        except Exception as error:
            if type(error).__name__ != "CUDASanitizerErrors":
                raise
            alarms += 1
    torch.cuda.synchronize()
    times[arguments.steps] = time.perf_counter()

    def step_ms(first: int, last: int) -> float:
        return 1e3 * (times[last] - times[first]) / (last - first)

    if dist.get_rank() == 0:
        bits = b"".join(loss.float().cpu().numpy().tobytes() for loss in losses)
        digest = hashlib.sha256(bits).hexdigest()[:16]
        print(f"losses {digest} step_ms {step_ms(WARM_UP_STEPS, csan_from):.3f}")
        if arguments.csan:
            csan_ms = step_ms(csan_from + 1, arguments.steps)
            print(f"csan_ms {csan_ms:.3f} alarms {alarms} in {arguments.steps - csan_from} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
