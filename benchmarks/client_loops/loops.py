"""Loops written by hand with torch alone, in many styles: loops.py KIND. 12 iterations each."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from client_loops.outcome import STEPS, Net, Outcome, batches, iteration, loader

outcome = Outcome()


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), **options)


def ddp_plain() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model: Any = Net()
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def zero_redundancy() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def two_optimizers_accumulation() -> None:
    """Two models, each with an optimizer of its own and gradient accumulation over halves of the batch."""
    models = [ddp(), ddp()]
    optimizers = [torch.optim.SGD(models[0].parameters(), 0.1), torch.optim.Adam(models[1].parameters())]
    for batch in batches():
        total = 0.0
        for model, optimizer in zip(models, optimizers, strict=True):
            for half in (slice(0, 2), slice(2, 4)):
                loss = model(**{name: value[half] for name, value in batch.items()})["loss"] / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
        outcome.note(total)
    outcome.write(*models)


def gan() -> None:
    """The critic three times with a penalty on its gradient, then the generator; sums shared for the log."""
    critic, generator = ddp(), DistributedDataParallel(nn.Linear(16, 16))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.0, 0.9))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.0, 0.9))
    for number, batch in enumerate(batches(4 * STEPS)):
        real = batch["x"]
        if number % 4 < 3:
            of_critic.zero_grad()
            fake = generator(real.flip(0)).detach().requires_grad_()
            scores = critic(torch.cat([fake, real]))["logits"]
            (slope,) = torch.autograd.grad(scores[:4].sum(), fake, create_graph=True)
            loss = scores[:4].mean() - scores[4:].mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            of_critic.step()
            continue
        of_generator.zero_grad()
        loss = -critic(generator(real))["logits"].mean()
        loss.backward()
        of_generator.step()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        outcome.note(shared.item())
    outcome.write(critic, generator)


class Lion(torch.optim.Optimizer):
    """An optimizer of the script's own, derived from torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()
        return loss


def subclass_with_closure() -> None:
    model = ddp()
    optimizer = Lion(model.parameters(), 1e-3)
    for batch in batches():
        current = batch

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(**current)["loss"]  # noqa: B023
            loss.backward()
            return loss

        outcome.note(optimizer.step(closure).item())
    outcome.write(model)


def adam_then_lbfgs() -> None:
    """The first half with Adam, the second with LBFGS, whose closures run several backward passes."""
    model = ddp()
    first = torch.optim.Adam(model.parameters(), 1e-3)
    second = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for number, batch in enumerate(batches()):
        if number < STEPS // 2:
            outcome.note(iteration(model, first, batch))
            continue
        current = batch

        def closure() -> Any:
            second.zero_grad()
            loss = model(**current)["loss"]  # noqa: B023
            loss.backward()
            return loss

        outcome.note(float(second.step(closure)))
    outcome.write(model)


def pipeline(schedule_class: Any) -> None:
    from torch.distributed.pipelining import PipelineStage

    rank = dist.get_rank()
    layers = Net().layers
    part = layers[:2] if rank == 0 else layers[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    for _, batch in zip(range(STEPS), loader(), strict=False):
        losses: list[Any] = []
        if rank == 0:
            schedule.step(batch["x"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        outcome.note(sum(loss.item() for loss in losses))
    outcome.write(part)


def pipeline_gpipe() -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    pipeline(ScheduleGPipe)


def pipeline_1f1b() -> None:
    from torch.distributed.pipelining import Schedule1F1B

    pipeline(Schedule1F1B)


def futures_on_a_thread() -> None:
    """Asynchronous all-reduces; divided in `.then`, and waited for on a thread of the script's own."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        loss = model(**batch)["loss"]
        loss.backward()
        pending = []
        for parameter in model.parameters():
            work = dist.all_reduce(parameter.grad, async_op=True)
            assert work is not None

            def divide(future: Any) -> Any:
                return future.value()[0] / dist.get_world_size()

            pending.append((parameter, work.get_future().then(divide)))
        averages: list[Any] = []

        def collect(pending: Any = pending, averages: Any = averages) -> None:
            averages.extend((parameter, future.wait()) for parameter, future in pending)

        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
        for parameter, average in averages:
            parameter.grad = average
        optimizer.step()
        optimizer.zero_grad()
        outcome.note(loss.item())
    outcome.write(model)


def loop_on_a_thread() -> None:
    """Process group and optimizer are made by the main thread, and trained on another one."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        for batch in batches():
            outcome.note(iteration(model, optimizer, batch))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    outcome.write(model)


def coroutine() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())

    async def fetch(queue: "asyncio.Queue[Any]") -> None:
        for batch in batches():
            await queue.put(batch)
            await asyncio.sleep(0)
        await queue.put(None)

    async def train() -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue(2)
        task = asyncio.create_task(fetch(queue))
        while (batch := await queue.get()) is not None:
            outcome.note(iteration(model, optimizer, batch))
            await asyncio.sleep(0)
        await task

    asyncio.run(train())
    outcome.write(model)


def compiled_model() -> None:
    model = DistributedDataParallel(torch.compile(Net(), backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def compiled_iteration() -> None:
    """Forward pass, backward pass and optimizer in one compiled function."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @torch.compile(backend="aot_eager")
    def iteration(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for batch in batches(2 * STEPS):
        outcome.note(iteration(**batch).item())
    outcome.write(model)


def compiled_optimizer() -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step: Callable[[], None] = torch.compile(optimizer.step, backend="aot_eager")
    for batch in batches(2 * STEPS):
        loss = model(**batch)["loss"]
        loss.backward()
        step()
        optimizer.zero_grad()
        outcome.note(loss.item())
    outcome.write(model)


def optimizer_in_backward() -> None:
    """An optimizer per parameter, called as soon as its gradient is there."""
    model = Net()
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for batch in batches():
        loss = model(**batch)["loss"]
        loss.backward()
        outcome.note(loss.item())
    outcome.write(model)


def communication_hook() -> None:
    """DDP with compression to half precision, whose hook chains futures."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def local_sgd() -> None:
    """Parameters averaged every third step, losses gathered as objects, a group of its own for barriers."""
    model = Net()
    control = dist.new_group([0, 1], backend="gloo")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(batches()):
        loss = iteration(model, optimizer, batch)
        if number % 3 == 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, loss)
        dist.barrier(group=control)
        outcome.note(sum(gathered))
    outcome.write(model)


def policy_gradient() -> None:
    """Rollouts without gradients between the updates, then three passes over what they gave."""
    model = ddp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rounds = batches()
    for _ in range(STEPS // 3):
        model.eval()
        with torch.no_grad():
            batch = next(rounds)
            reward = model.module(**batch)["logits"].mean()
            dist.all_reduce(reward)
        model.train()
        for _ in range(3):
            outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def checkpointed() -> None:
    """Activations computed again within the backward pass, by the reentrant form, clipped, guarded."""
    from torch.utils.checkpoint import checkpoint

    model = Net()
    wrapped = DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    layers = list(model.layers)
    model.layers = nn.Sequential(*layers[:2], Checkpointed(layers[2], checkpoint), *layers[3:])
    for batch in batches():
        loss = wrapped(**batch)["loss"]
        loss.backward()
        norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        outcome.note(loss.item())
    outcome.write(wrapped)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, checkpoint: Any) -> None:
        super().__init__()
        self.inner, self._checkpoint = inner, checkpoint

    def forward(self, x: torch.Tensor) -> Any:
        return self._checkpoint(self.inner, x, use_reentrant=True)


def main(rank: int | None, kind: str) -> None:
    torch.manual_seed(0)
    if rank is None:
        dist.init_process_group("gloo")
    else:
        os.environ |= {"RANK": str(rank)}
        store = f"file://{os.environ['CLIENT_OUT']}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    globals()[kind]()
    dist.destroy_process_group()


def forked() -> int:
    """The parent imports torch, and the ranks are forked from it."""
    children = []
    for rank in (0, 1):
        if (child := os.fork()) == 0:
            main(rank, "ddp_plain")
            return 0
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    if sys.argv[1] == "forked":
        sys.exit(forked())
    elif sys.argv[1] == "spawned":
        from torch.multiprocessing.spawn import spawn

        spawn(main, args=("ddp_plain",), nprocs=2)
    else:
        main(None, sys.argv[1])
