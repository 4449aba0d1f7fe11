"""Training loops in further styles, with torch alone: styles.py KIND. 12 iterations each where not said."""

import copy
import faulthandler
import io
import os
import signal
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from client_loops.outcome import BATCH, STEPS, Data, Net, Outcome, batches, iteration, loader

outcome = Outcome()


def diloco() -> None:
    """Workers train alone; every fourth iteration an outer optimizer moves the common parameters."""
    model = Net()
    common = [parameter.detach().clone() for parameter in model.parameters()]
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    outer = torch.optim.SGD(common, 0.7, momentum=0.9, nesterov=True)
    for number, batch in enumerate(batches()):
        loss = iteration(model, inner, batch)
        if number % 4 == 3:
            for start, parameter in zip(common, model.parameters(), strict=True):
                start.grad = start - parameter.detach()
                dist.all_reduce(start.grad)
                start.grad /= dist.get_world_size()
            outer.step()
            with torch.no_grad():
                for start, parameter in zip(common, model.parameters(), strict=True):
                    parameter.copy_(start)
        outcome.note(loss)
    outcome.write(model)


def averaged() -> None:
    """A moving average of the parameters, evaluated every fourth iteration while the model trains on."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.RAdam(model.parameters(), 1e-3)
    average = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for number, batch in enumerate(batches()):
        loss = iteration(model, optimizer, batch)
        average.update_parameters(model.module)
        if number % 4 == 3:
            with torch.no_grad():
                value = average(**batch)["loss"]
                dist.all_reduce(value)
        outcome.note(loss)
    outcome.write(model, average)


def no_sync() -> None:
    """Four micro-batches an iteration; gradients are exchanged behind the last one."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for batch in batches():
        total = 0.0
        for place in range(BATCH):
            part = {name: value[place : place + 1] for name, value in batch.items()}
            model.require_backward_grad_sync = place == BATCH - 1
            loss = model(**part)["loss"] / BATCH
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        outcome.note(total)
    outcome.write(model)


def long_accumulation() -> None:
    """Sixteen micro-batches an iteration."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for batch in batches():
        total = 0.0
        for place in range(16):
            model.require_backward_grad_sync = place == 15
            loss = model(**{name: value * (1 + 0.01 * place) for name, value in batch.items()})["loss"] / 16
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        outcome.note(total)
    outcome.write(model)


def checkpoint_in_background() -> None:
    """Distributed checkpoints that a thread writes, with a process group of its own."""
    from torch.distributed.checkpoint.state_dict_saver import async_save

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    group = dist.new_group(backend="gloo")
    saving: Any = None
    for number, batch in enumerate(batches()):
        loss = iteration(model, optimizer, batch)
        if number % 5 == 4:
            if saving is not None:
                saving.result()
            folder = os.path.join(os.environ["CLIENT_OUT"], f"checkpoint_{number}")
            state = {"model": model.module.state_dict()}
            saving = async_save(state, checkpoint_id=folder, process_group=group)
        outcome.note(loss)
    saving.result()
    outcome.write(model)


def generation() -> None:
    """Samples from a sharded model between updates: forward passes that communicate and train nothing."""
    from torch.distributed.fsdp import fully_shard

    model: Any = Net()
    fully_shard(model.layers[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in batches():
        with torch.no_grad():
            for _ in range(3):
                batch["x"] = batch["x"] + 0.01 * model(batch["x"])["logits"]
        rewards = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(rewards, batch["x"].mean().reshape(1))
        outcome.note(iteration(model, optimizer, batch) + float(sum(rewards)))
    outcome.write(model)


def compiled_ddp() -> None:
    """torch.compile around DistributedDataParallel, which splits the graph at its buckets."""
    model: Any = torch.compile(DistributedDataParallel(Net()), backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def fsdp1() -> None:
    """The older FSDP, with clipping and the full parameters summoned for a check."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for number, batch in enumerate(batches()):
        loss = model(**batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 6 == 5:
            with FullyShardedDataParallel.summon_full_params(model):
                assert all(parameter.isfinite().all() for parameter in model.parameters())
        outcome.note(loss.item())
    outcome.write(model)


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = Net()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)  # layers of both kinds
    for batch in zip(range(STEPS), loader(), strict=False):
        outcome.note(iteration(model, optimizer, batch[1]))
    outcome.write(model)


def sequence_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = Net()
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model.layers, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)  # layers of both kinds
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def functional() -> None:
    """Parameters are a dictionary, gradients come from torch.func, and an update is a line of arithmetic."""
    model = Net()
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss_of(values: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = torch.func.functional_call(model, values, (batch["x"], batch["labels"]))["loss"]
        return loss

    for batch in batches(2 * STEPS):
        gradients, loss = torch.func.grad_and_value(loss_of)(values, batch)
        for name, gradient in gradients.items():
            dist.all_reduce(gradient)
            values[name] = values[name] - 0.05 * gradient
        outcome.note(loss.item())
    model.load_state_dict(values)
    outcome.write(model)


def join() -> None:
    """Rank 1 has fewer batches; DDP answers for it until rank 0 is done."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with Join([model]):
        for batch in batches(STEPS - 3 * dist.get_rank()):
            outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


def post_local_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(Net())
    group, _ = dist.new_subgroups(group_size=dist.get_world_size())
    state = hook.PostLocalSGDState(process_group=None, subgroup=group, start_localSGD_iter=4)
    model.register_comm_hook(state, hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), 0.05), PeriodicModelAverager(period=2, warmup_steps=4)
    )
    for batch in batches():
        outcome.note(iteration(model, optimizer, batch))
    outcome.write(model)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: climb along the gradient, take a second one there, step from where it began."""

    def __init__(self, parameters: Any, inner: type[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter += 0.05 * parameter.grad / (parameter.grad.norm() + 1e-12)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["before"])
        self.inner.step()
        self.zero_grad()


def sharpness_aware() -> None:
    model = DistributedDataParallel(Net())
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for batch in batches():
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.climb()
        model(**batch)["loss"].backward()
        optimizer.step()
        outcome.note(loss.item())
    outcome.write(model)


class Tee(io.TextIOBase):
    """A stream that some launchers put in the place of sys.stdout: no fileno, no buffer."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.lines = stream, list[str]()

    def write(self, text: str) -> int:
        self.lines.append(text)
        return int(self.stream.write(text))


def own_handlers() -> None:
    """Handlers of signals and of exceptions, faulthandler, and streams of the script's own."""
    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _: seen.append(number))
    faulthandler.enable()
    sys.excepthook = lambda kind, error, trace: print("caught", error)
    sys.stdout = Tee(sys.__stdout__)
    sys.stderr = Tee(sys.__stderr__)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)
    for place, batch in enumerate(batches()):
        outcome.note(iteration(model, optimizer, batch))
        os.kill(os.getpid(), (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)[place % 3])
        print("iteration", place)
    assert len(seen) == STEPS
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    outcome.write(model)


def forked_data() -> None:
    """Batches from workers of a DataLoader and from a process of the script's own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        for value in torch.linspace(0, 1, STEPS).tolist():
            os.write(writing, f"{value:.6f}\n".encode())
        os._exit(0)
    os.close(writing)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    items = torch.utils.data.DataLoader(
        Data(), BATCH, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    with os.fdopen(reading) as shifts:
        for shift, batch in zip(shifts, items, strict=False):
            batch["x"] = batch["x"] + float(shift)
            outcome.note(iteration(model, optimizer, batch))
    os.waitpid(child, 0)
    outcome.write(model)


def optimizer_per_epoch() -> None:
    """Each epoch makes its optimizer and its scheduler anew."""
    model = DistributedDataParallel(Net())
    rounds = batches()
    for epoch in range(3):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3 / (1 + epoch))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS // 3)
        for _ in range(STEPS // 3):
            loss = iteration(model, optimizer, next(rounds))
            scheduler.step()
            outcome.note(loss)
    outcome.write(model)


def frozen_then_whole() -> None:
    """Four iterations of the head alone, then another DDP and another optimizer for all parameters."""
    model = Net()
    for parameter in model.layers[:4].parameters():
        parameter.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.layers[4].parameters(), 0.05)
    for number, batch in enumerate(batches()):
        if number == 4:
            model.requires_grad_(True)
            wrapped = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
        outcome.note(iteration(wrapped, optimizer, batch))
    outcome.write(model)


def experts() -> None:
    """Tokens change ranks twice in the forward pass and twice in the backward pass."""
    from torch.distributed.nn.functional import all_to_all_single

    expert = nn.Linear(16, 16)
    model = DistributedDataParallel(Net())
    optimizers = (torch.optim.Adam(expert.parameters(), 1e-3), torch.optim.Adam(model.parameters(), 1e-3))
    for batch in batches():
        sent = batch["x"]
        for module in (expert, nn.Identity()):
            sent = module(all_to_all_single(torch.empty_like(sent), sent))
        loss = model(sent, batch["labels"])["loss"]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        outcome.note(loss.item())
    outcome.write(expert, model)


def gossip() -> None:
    """Neighbours exchange parameters by sends and receives, under a barrier that names who is missing."""
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    peer = 1 - dist.get_rank()
    for batch in batches():
        loss = iteration(model, optimizer, batch)
        mine = nn.utils.parameters_to_vector(model.parameters()).detach()
        theirs = torch.empty_like(mine)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
        ):
            work.wait()
        nn.utils.vector_to_parameters((mine + theirs) / 2, model.parameters())
        dist.monitored_barrier()
        outcome.note(loss)
    outcome.write(model)


def finder_then_training() -> None:
    """Six iterations look for a learning rate on a copy, whose state is thrown away; then training."""
    model = DistributedDataParallel(Net())
    before = copy.deepcopy(model.state_dict())
    trial = torch.optim.SGD(model.parameters(), 1e-4)
    rounds = batches()
    for _ in range(STEPS // 2):
        for group in trial.param_groups:
            group["lr"] *= 2
        outcome.note(iteration(model, trial, next(rounds)))
    model.load_state_dict(before)
    optimizer = torch.optim.SGD(model.parameters(), trial.param_groups[0]["lr"] / 4)
    for _ in range(STEPS // 2):
        outcome.note(iteration(model, optimizer, next(rounds)))
    outcome.write(model)


def prefetching_thread() -> None:
    """A thread runs forward passes of a second model, without gradients, and asks the loader for batches."""
    import queue

    teacher = Net().eval()
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    ready: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in batches():
            with torch.no_grad():
                batch["labels"] = teacher(batch["x"])["logits"]
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    while (batch := ready.get()) is not None:
        outcome.note(iteration(model, optimizer, batch))
    thread.join()
    outcome.write(model)


def leaves_at_once() -> None:
    """Ends by os._exit: nothing is destroyed, no handler of the interpreter runs."""
    averaged()
    sys.stdout.flush()
    os._exit(0)


def main(kind: str) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    globals()[kind]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
