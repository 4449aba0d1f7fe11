"""A fourth set of planted causes, on gloo or NCCL: written, with labels, before `aorta why` had seen one.

    python benchmarks/planted_fourth.py --output planted_causes_gloo_fourth.json
    python benchmarks/planted_fourth.py --device cuda --output planted_causes_2xh200_fourth.json

The same options and rows as benchmarks/planted_causes.py.
"""

import gc
import json
import tempfile
import time
from typing import Any

import planted_causes
import torch
import torch.distributed as dist
from planted_causes import PAUSE_S, Case, Rank, Samples, train
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

CUDA = ("cuda",)
FOURTH = {
    "late_every_fourth": Case("late_rank", who=0),
    "long_batches_all": Case("data_loading"),
    "parsing_rank": Case("data_loading", who=1),
    "broadcast_parameters": Case("small_messages"),
    "clip_by_parameter": Case("small_messages"),
    "gathered_activations": Case("transfer"),
    "skewed_experts": Case("imbalance", who=0),
    "single_microbatch": Case("bubble"),
    "sharded_checkpoint": Case("checkpoint"),
    "collection_each_step": Case("garbage_collection"),
    "evaluation_rarely": Case("between_steps"),
    "python_lamb": Case("optimizer"),
    "synchronize_each_layer": Case("synchronisation", on=CUDA),
    "nonzero_each_layer": Case("synchronisation", on=CUDA),
    "unrolled_cell": Case("launch_bound", on=CUDA),
    "weights_to_host": Case("copy", on=CUDA),
    "clean_static_graph": Case(None),
    "clean_varying": Case(None),
    "clean_short_evaluation": Case(None),
}


def fitted(
    rank: Rank, recorder: Any, num: int, *, rows: Any = None, before: Any = None, after: Any = None
) -> None:
    """DDP over four layers; hooks before the forward pass and after the step."""
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for step in range(num):
        with recorder.step(tokens=rank.batch):
            if before is not None:
                before(step)
            num_rows = (rows(step) if rows is not None else 32) * rank.batch
            model(torch.randn(num_rows, rank.width, device=rank.device)).square().mean().backward()
            update.step()
            update.zero_grad()
        if after is not None:
            after(step)


def late_every_fourth(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 writes its metrics in every fourth step."""

    def before(step: int) -> None:
        if rank.rank == 0 and step % 4 == 1:
            time.sleep(4 * PAUSE_S)

    fitted(rank, recorder, num, before=before)


class Shards(Dataset[torch.Tensor]):
    """Every hundredth or so sample opens a new file."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % (6 * self.rank.batch) == 0:
            time.sleep(6 * PAUSE_S)
        return torch.ones(self.rank.width)


def loaded(rank: Rank, recorder: Any, num: int, loader: DataLoader[Any]) -> None:
    model = DistributedDataParallel(rank.model())
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, x in enumerate(loader):
        with recorder.step(tokens=rank.batch):
            model(x.to(rank.device)).square().mean().backward()
            update.step()
            update.zero_grad()
        if step + 1 == num:
            break


def long_batches_all(rank: Rank, recorder: Any, num: int) -> None:
    """One batch in six waits for a file, on all ranks; the loader is read between the steps."""
    loaded(rank, recorder, num, DataLoader(Shards(rank), batch_size=rank.batch))


def parsing_rank(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 1 parses text while it collates."""
    text = json.dumps([list(range(200))] * 300)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        for _ in range(20 if rank.rank == 1 else 0):
            json.loads(text)
        return torch.stack(samples)

    loaded(rank, recorder, num, DataLoader(Samples(rank, 0.0), batch_size=rank.batch, collate_fn=collate))


def broadcast_parameters(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 sends each of many parameters by itself in every step."""
    parameters = [torch.ones(64, device=rank.device) for _ in range(400 if rank.is_cuda else 100)]

    def before(step: int) -> None:
        for parameter in parameters:
            dist.broadcast(parameter, 0)

    fitted(rank, recorder, num, before=before)


def clip_by_parameter(rank: Rank, recorder: Any, num: int) -> None:
    """The norm of each parameter is summed over the ranks by itself."""
    norms = [torch.ones(1, device=rank.device) for _ in range(300 if rank.is_cuda else 80)]

    def hook(step: int, loss: torch.Tensor) -> None:
        for norm in norms:
            dist.all_reduce(norm)

    train(rank, recorder, num, in_step=hook)


def gathered_activations(rank: Rank, recorder: Any, num: int) -> None:
    """Large activations are gathered from all ranks before the forward pass."""
    part = torch.ones((64 << 20) if rank.is_cuda else (4 << 20), device=rank.device)
    whole = torch.empty(dist.get_world_size() * part.numel(), device=rank.device)

    def before(step: int) -> None:
        dist.all_gather_into_tensor(whole, part)

    fitted(rank, recorder, num, before=before)


def skewed_experts(rank: Rank, recorder: Any, num: int) -> None:
    """Rank 0 gets four tokens of five; the experts train."""
    rows = 160 * rank.batch
    many, few = rows * 4 // 5, rows - rows * 4 // 5
    expert = rank.model(2)
    update = torch.optim.SGD(expert.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            sent = [many, few]
            received = [many, many] if rank.rank == 0 else [few, few]
            tokens = torch.empty(sum(received), rank.width, device=rank.device)
            dist.all_to_all_single(tokens, x, received, sent)
            out = expert(tokens)
            out.square().mean().backward()
            update.step()
            update.zero_grad()
            back = torch.empty(rows, rank.width, device=rank.device)
            dist.all_to_all_single(back, out.detach(), sent, received)


def single_microbatch(rank: Rank, recorder: Any, num: int) -> None:
    """Two equal stages, one micro-batch: one stage always waits for the other."""
    stage = rank.model()
    rows = (256 if rank.is_cuda else 32) * rank.batch
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rows, rank.width, device=rank.device)
            if rank.rank == 0:
                out = stage(x)
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(x)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                dist.recv(x, 0)
                x.requires_grad_()
                stage(x).square().mean().backward()
                assert x.grad is not None
                dist.send(x.grad, 0)


def sharded_checkpoint(rank: Rank, recorder: Any, num: int) -> None:
    """torch.distributed.checkpoint writes every eight steps."""
    state = {f"layer.{i}": torch.ones(1 << 20) for i in range(12)}
    with tempfile.TemporaryDirectory() as folder:

        def before(step: int) -> None:
            if step % 8 == 5:
                save(state, checkpoint_id=f"{folder}/{rank.rank}_{step}", no_dist=True)

        fitted(rank, recorder, num, before=before)


def collection_each_step(rank: Rank, recorder: Any, num: int) -> None:
    """Every rank collects garbage by hand in every step, and holds many objects."""
    objects = [[{"a": [i]}] for i in range(150_000)]
    fitted(rank, recorder, num, before=lambda step: gc.collect())
    objects.clear()


def evaluation_rarely(rank: Rank, recorder: Any, num: int) -> None:
    """After every tenth step all ranks evaluate for as long as several steps take."""
    model = rank.model(2)

    def after(step: int) -> None:
        if step % 10 == 9:
            end = time.perf_counter() + 20 * PAUSE_S
            with torch.no_grad():
                while time.perf_counter() < end:
                    model(torch.ones(16 * rank.batch, rank.width, device=rank.device)).sum().item()

    fitted(rank, recorder, num, after=after)


class Lamb(torch.optim.Optimizer):
    """An optimizer as papers print it: each parameter by itself, with its norms read by the host."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for chunk, gradient in zip(parameter.split(4), parameter.grad.split(4), strict=True):
                    ratio = chunk.norm() / (gradient.norm() + 1e-6)
                    chunk.sub_(gradient * ratio, alpha=group["lr"])


def python_lamb(rank: Rank, recorder: Any, num: int) -> None:
    train(rank, recorder, num, optimizer=lambda model: Lamb(model.parameters()))


def _layer_by_layer(rank: Rank, recorder: Any, num: int, look: Any) -> None:
    layers = [nn.Linear(rank.width, rank.width, device=rank.device) for _ in range(40)]
    model = nn.ModuleList(layers)
    update = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = rank.batch_of()
            for layer in layers:
                x = torch.relu(layer(x))
                look(x)
            loss = x.square().mean()
            loss.backward()
            update.step()
            update.zero_grad()
            dist.all_reduce(loss.detach())


def synchronize_each_layer(rank: Rank, recorder: Any, num: int) -> None:
    _layer_by_layer(rank, recorder, num, lambda x: torch.cuda.synchronize())


def nonzero_each_layer(rank: Rank, recorder: Any, num: int) -> None:
    _layer_by_layer(rank, recorder, num, lambda x: x.nonzero())


def unrolled_cell(rank: Rank, recorder: Any, num: int) -> None:
    """A recurrent cell, a time step at a time."""
    cell = nn.GRUCell(64, 64).to(rank.device)
    model = DistributedDataParallel(cell)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            x = torch.randn(rank.batch, 64, device=rank.device)
            state = x
            for _ in range(100):
                state = cell(x, state)
            model(x, state).square().mean().backward()
            update.step()
            update.zero_grad()


def weights_to_host(rank: Rank, recorder: Any, num: int) -> None:
    """A copy of the weights goes to the host's memory in every step."""
    weights = torch.ones(192 << 20, device=rank.device)
    fitted(rank, recorder, num, before=lambda step: weights.cpu())


def clean_static_graph(rank: Rank, recorder: Any, num: int) -> None:
    model = DistributedDataParallel(rank.model(2), static_graph=True, gradient_as_bucket_view=True)
    update = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(num):
        with recorder.step(tokens=rank.batch):
            rows = torch.randn(96 * rank.batch, rank.width, device=rank.device)
            model(rows).square().mean().backward()
            update.step()
            update.zero_grad()


def clean_varying(rank: Rank, recorder: Any, num: int) -> None:
    """Batches of all ranks vary alike, by 20 %."""
    fitted(rank, recorder, num, rows=lambda step: 80 + (7 * step) % 17)


def clean_short_evaluation(rank: Rank, recorder: Any, num: int) -> None:
    """An evaluation of a millisecond after every tenth step."""
    model = rank.model(1)

    def after(step: int) -> None:
        if step % 10 == 9:
            with torch.no_grad():
                model(torch.ones(rank.batch, rank.width, device=rank.device))

    fitted(rank, recorder, num, rows=lambda step: 96, after=after)


def main() -> None:
    planted_causes.CASES.clear()
    planted_causes.CASES.update(FOURTH)
    planted_causes.BODIES.update({name: globals()[name] for name in FOURTH})
    planted_causes.main()


if __name__ == "__main__":
    main()
