"""A training script that does not know of aorta: loop.py KIND [STEPS]. Prints losses, counts collectives."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Trainer:
    """A loop whose step() holds the forward pass, the backward pass and the optimizer."""

    def __init__(self, model, optimizer, accumulate=1):
        self.model, self.optimizer, self.accumulate, self.micro = model, optimizer, accumulate, 0

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.micro += 1
        if self.micro % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


class Sgd:
    """An optimizer that is not one of torch.optim."""

    def __init__(self, parameters, lr=0.1):
        self.parameters, self.lr = list(parameters), lr

    def update(self):
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= self.lr * parameter.grad
                parameter.grad = None


class Container:
    """Steps several optimizers, and communicates after them."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
        dist.all_reduce(torch.ones(1))  # work after the inner optimizers


def ddp():
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))


def batches(n, seed=0):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(n):
        yield torch.randn(4, 8, generator=generator)


def plain(losses):
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def accumulation(losses):
    model = ddp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=3)
    for batch in batches(3 * STEPS):
        losses.append(trainer.step(batch).item())


def two_optimizers(losses):
    first, second = ddp(), ddp()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    for batch in batches(STEPS):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            for part in batch.split(2):  # accumulation too
                loss = model(part).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())


def critic_first(losses):
    """The critic three times, then the generator."""
    critic, generator = ddp(), ddp()
    of_critic, of_generator = (torch.optim.Adam(model.parameters()) for model in (critic, generator))
    for number, batch in enumerate(batches(4 * STEPS)):
        model, optimizer = (generator, of_generator) if number % 4 == 3 else (critic, of_critic)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            losses.append(loss.item())


def other_threads(losses):
    """Train on three threads in turn, beside a thread that trains something else all the time."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    begun, done = threading.Event(), threading.Event()

    def beside():
        weight = torch.ones(4, requires_grad=True)
        other = torch.optim.Adam([weight])
        while not done.wait(0.001):
            weight.square().sum().backward()
            other.step()
            begun.set()

    def train(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    other = threading.Thread(target=beside)
    threads = [ThreadPoolExecutor(1) for _ in range(3)]
    for place, batch in enumerate(batches(STEPS)):
        threads[place % 3].submit(train, batch).result()
        if place == 0:
            other.start()
            begun.wait()  # an optimizer that was never called may be part of an iteration, for six of them
    done.set()
    other.join()
    for thread in threads:
        thread.shutdown()


def in_backward(losses):
    """An optimizer per parameter, called within the backward pass."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = {parameter: torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()}

    def update(parameter):
        dist.all_reduce(parameter.grad)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.item())


def in_backward_and_behind(losses):
    """Optimizers called in the backward pass, in the first one in another order, and one more behind it."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    inner, last = model[:-1], torch.optim.SGD(model[-1].parameters(), 0.1)
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in inner.parameters()]
    ready = []

    def update(_):
        ready.append(len(ready))
        if len(ready) % len(optimizers) == 0:
            is_first = len(ready) == len(optimizers)
            for optimizer in optimizers if is_first else reversed(optimizers):
                optimizer.step()

    for parameter in inner.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(torch.zeros(8))
        last.step()
        model.zero_grad()
        losses.append(loss.item())


def container(losses):
    model = ddp()
    parameters = list(model.parameters())
    optimizer = Container([torch.optim.SGD(parameters[:2], 0.1), torch.optim.Adam(parameters[2:])])
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def sharded(losses):
    """An optimizer of torch.optim that holds another one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def skipping_scaler(losses):
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    for number, batch in enumerate(batches(STEPS)):
        loss = model(batch).square().mean()
        if number == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())


def lbfgs(losses):
    model = ddp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for batch in batches(STEPS):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))


def own_optimizer(losses):
    model = ddp()
    optimizer = Sgd(model.parameters())
    for number, batch in enumerate(batches(2 * STEPS)):
        if number % 2 == 0:
            with model.no_sync():
                model(batch).square().mean().backward()
            continue
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.update()
        losses.append(loss.item())


def many_micro_batches(losses):
    """Accumulation over more backward passes than a pattern of collectives would need."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(batches(16 * STEPS)):
        model.require_backward_grad_sync = number % 16 == 15
        loss = model(batch).square().mean()
        loss.backward()
        if number % 16 == 15:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


class SignDescent(torch.optim.Optimizer):
    """One of the script's own, which torch.compile can take whole."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


def compiled_optimizer(losses):
    model = ddp()
    optimizer = SignDescent(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    for batch in batches(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item())


def one_iteration(losses):
    """Ends after the first call of its two optimizers."""
    model = ddp()
    optimizers = [torch.optim.SGD([parameter], 0.1) for parameter in model.parameters()]
    loss = model(next(iter(batches(1)))).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())


def graphed(losses):
    """Captures its third step in a CUDA graph that holds the optimizer too, and replays that from then on."""
    model, graph = ddp(), torch.cuda.CUDAGraph()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for place, batch in enumerate(batches(STEPS)):
        if place > 2:
            graph.replay()
            continue
        if place == 2:
            graph.capture_begin()
        model(batch).square().mean().backward()
        optimizer.step()
        if place == 2:
            graph.capture_end()


def saved_in_background(losses):
    """A thread saves checkpoints beside the training, over a process group of its own."""
    from concurrent.futures import ThreadPoolExecutor

    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    group = dist.new_group([0])
    with ThreadPoolExecutor(1, thread_name_prefix="AsyncCheckpointExecutor") as executor:  # torch's name
        for batch in batches(STEPS):
            loss = model(batch).square().mean()
            executor.submit(dist.barrier, group).result()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


class Remote:
    """As torch.distributed.optim.DistributedOptimizer: nothing of it is a torch.optim.Optimizer."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def step(self, context):
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, context, strict=True):
                parameter -= 0.1 * gradient


def remote(losses):
    """Gradients that no backward pass of torch.autograd makes."""
    model = nn.Linear(8, 1)
    optimizer = Remote(model.parameters())
    for batch in batches(STEPS):
        losses.append(model(batch).square().mean().item())
        gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
        dist.all_reduce(gradients[0])
        optimizer.step(gradients)


def outer_optimizer(losses):
    """Training alone; every second iteration an optimizer of differences, behind no backward pass."""
    model = nn.Linear(8, 1)
    common = [parameter.detach().clone() for parameter in model.parameters()]
    inner, outer = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(common, 0.5)
    for number, batch in enumerate(batches(STEPS)):
        loss = model(batch).square().mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        dist.all_reduce(torch.ones(1))
        if number % 2 == 1:
            for mine, parameter in zip(common, model.parameters(), strict=True):
                mine.grad = mine - parameter.detach()
            outer.step()
        losses.append(loss.item())


def fetched_ahead(losses):
    """Another thread asks for batches, also while this one is in a backward pass."""
    loader = iter(torch.utils.data.DataLoader(Batches(2 * STEPS), batch_size=None))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def fetch(gradient):
        thread = threading.Thread(target=next, args=(loader,))
        thread.start()
        thread.join()
        return gradient

    next(model.parameters()).register_hook(fetch)
    for batch in batches(STEPS):
        fetch(None)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def functional(losses):
    """No optimizer at all: gradients from torch.func, an update by hand, one all-reduce an iteration."""
    model = nn.Linear(8, 1)
    weight = model.weight.detach().clone()

    def loss_of(weight, batch):
        return (batch @ weight.T).square().mean()

    for number, batch in enumerate(batches(2 * STEPS)):
        if number == 2 * STEPS - 2:
            model.eval()
            model.train()
        gradient, loss = torch.func.grad_and_value(loss_of)(weight, batch)
        dist.all_reduce(gradient)
        weight = weight - 0.1 * gradient
        losses.append(loss.item())


def evaluating(losses):
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch in enumerate(batches(STEPS)):
        model.train()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            model.eval()
            with torch.no_grad():
                for other in batches(3, seed=7):
                    value = model(other).square().mean()
                    dist.all_reduce(value)
        losses.append(loss.item())


class Batches(torch.utils.data.Dataset):
    """The same batches, for a DataLoader."""

    def __init__(self, n, seed=0):
        self.items = list(batches(n, seed))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def loading(losses):
    """Communicates after the optimizer in some steps, and evaluates after that in some."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(Batches(STEPS), batch_size=None)
    for number, batch in enumerate(loader):
        model.train()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 2 == 1:
            dist.all_reduce(torch.ones(1))  # logging
        if number == 3:
            model.eval()
            for other in torch.utils.data.DataLoader(Batches(3, seed=7), batch_size=None):
                with torch.no_grad():
                    dist.all_reduce(model(other).square().mean())
        losses.append(loss.item())


def without_gradients(losses):
    """Evaluates with the data set of training after every third batch; nothing is told of it but no_grad."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    data = Batches(STEPS)
    for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=None)):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            with torch.no_grad():
                for other in torch.utils.data.DataLoader(data, batch_size=None):
                    model.module(other).sum().item()
        losses.append(loss.item())


def evaluated_each_time(losses):
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(STEPS):
        model.train()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model.module(batch).sum().item()
        losses.append(loss.item())


def frozen(losses):
    """Two parts stay as in evaluation while the rest trains."""
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in torch.utils.data.DataLoader(Batches(2 * STEPS), batch_size=None):
        model.train()
        model.module[0].eval()
        model.module[1].eval()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


def raising(losses):
    plain(losses)
    raise RuntimeError("the script's own")


def one_rank_only(losses):
    """No process group."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def train_step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.update()
    return loss.item()


def named_step(losses):
    """An optimizer that is not one of torch.optim, in a function that --step-at names."""
    model = ddp()
    optimizer = Sgd(model.parameters())
    for batch in batches(STEPS):
        losses.append(train_step(model, optimizer, batch))


def own_aorta(losses):
    import aorta

    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with aorta.instrument(os.environ["OWN_OUTPUT"]) as recorder:
        for batch in batches(STEPS):
            with recorder.step() as step:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
            losses.append(loss.item())


def main(rank=None, kind="plain", steps=STEPS):
    global STEPS
    STEPS = steps
    torch.manual_seed(0)
    losses = []
    if kind != "one_rank_only":
        if rank is None:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=2)
    try:
        globals()["plain" if kind in ("spawned", "undestroyed") else kind](losses)
    finally:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first:
            print("losses", json.dumps(losses), flush=True)
    if dist.is_initialized() and kind != "undestroyed":
        print("counted", dist.get_rank(), dist.group.WORLD._get_sequence_number_for_group(), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    kind, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    if kind == "spawned":
        torch.multiprocessing.spawn(main, args=(kind, steps), nprocs=2)
    else:
        main(kind=kind, steps=steps)
