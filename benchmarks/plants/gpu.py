"""Train a decoder on GPUs (NCCL), with one loss of time planted, or without it.

    torchrun --nproc_per_node 2 benchmarks/plants/gpu.py NAME [--mended]
    torchrun --nproc_per_node 2 benchmarks/plants/gpu.py --truth NAME ...

--truth prints for each plant what a step takes with it and mended, turn about in one process.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH, LAYERS, LENGTH, VOCAB = (2048, 4, 512, 8192) if ON_GPU else (64, 2, 32, 128)
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
WARMUP, TRUTH_STEPS, TRUTH_ROUNDS = 8, 20, 3

# What differs between planted and mended. A setting that is not named has the value of `settings`.
PLANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loader": ({"data": "augmented"}, {}),
    "one_worker": ({"data": "augmented", "workers": 1}, {"data": "augmented", "workers": 6}),
    "pageable": ({"data": "images"}, {"data": "images", "pinned": True}),
    "item_per_gradient": ({"norms": "each"}, {"norms": "together"}),
    "optimizer_loop": ({"biases": 300, "optimizer": "loop"}, {"biases": 300}),
    "empty_cache": ({"empty_cache": True}, {}),
    "late_rank": ({"sort_on_rank": 1}, {}),
    "longer_batches": ({"longer_on_rank": 0}, {}),
    "tiny_buckets": ({"biases": 300, "bucket_mb": 0.001}, {"biases": 300}),
    "every_micro_batch": ({"micro": 4, "sync_each_micro": True}, {"micro": 4}),
    "recurrence": ({"recurrence": "loop"}, {"recurrence": "matrix"}),
    "checkpoint": ({"save": True}, {}),
    "collect": ({"objects": 10_000, "collect": True}, {"objects": 10_000}),
    "nap": ({"nap_ms": 20}, {}),
    "evaluate": ({"evaluate_every": 5}, {}),
    "gather_objects": ({"gather_objects": True}, {}),
    "no_overlap": ({"parallel": "by_hand"}, {}),
    "barrier": ({"barrier": True}, {}),
    "percentiles": ({"percentiles": True}, {}),
    "float32": ({"float32": True}, {}),
    # A second set, written when rules and intervals were fixed.
    "tokenise": ({"data": "words"}, {}),
    "norms_twice": ({"biases": 120, "norms": "twice"}, {"biases": 120, "norms": "together"}),
    "weights_to_host": ({"average": "host"}, {"average": "device"}),
    "average_loop": ({"biases": 300, "average": "loop"}, {"biases": 300, "average": "device"}),
    "flush": ({"flush_on_rank": 0}, {}),
    "lock": ({"lock_on_rank": 1}, {}),
    "save_eighth": ({"save": True, "save_every": 8}, {}),
    "collect_fourth": ({"objects": 60_000, "collect": True, "collect_every": 4}, {"objects": 60_000}),
    "features": ({"share_mb": 1024}, {}),
    "extra_layers": ({"extra_on_rank": 1}, {}),
    "reduce_each": ({"biases": 300, "parallel": "each"}, {"biases": 300}),
    "samples": ({"sample_every": 10}, {}),
    # A third set, written when the rules had been mended on the first two.
    "histograms": ({"histograms": True}, {}),
    "mask": ({"mask": "host"}, {"mask": "device"}),
    "summary": ({"summary": True}, {}),
    "lock_fifth": ({"lock_on_rank": 0, "lock_every": 5, "lock_ms": 60}, {}),
    "empty_on_rank": ({"empty_on_rank": 0}, {}),
    "reduced_twice": ({"reduced_twice": True}, {}),
    "buffers": ({"buffer_mb": 256}, {"buffer_mb": 256, "broadcast_buffers": False}),
    "chosen_rows": ({"choose": "index"}, {"choose": "where"}),
    "clean_workers": ({"data": "augmented", "workers": 6}, {"data": "augmented", "workers": 6}),
    "clean_average": ({"average": "device"}, {"average": "device"}),
    "clean_ddp": ({}, {}),
    "clean_fsdp": ({"parallel": "fsdp"}, {"parallel": "fsdp"}),
    "clean_accumulation": ({"micro": 2}, {"micro": 2}),
}


def settings(**changed: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "data": "made",
        "workers": 0,
        "pinned": False,
        "norms": None,
        "biases": 0,
        "optimizer": "fused",
        "empty_cache": False,
        "sort_on_rank": None,
        "longer_on_rank": None,
        "bucket_mb": 25,
        "micro": 1,
        "sync_each_micro": False,
        "recurrence": None,
        "save": False,
        "objects": 0,
        "collect": False,
        "nap_ms": 0,
        "evaluate_every": 0,
        "gather_objects": False,
        "parallel": "ddp",
        "barrier": False,
        "percentiles": False,
        "float32": False,
        "average": None,
        "flush_on_rank": None,
        "lock_on_rank": None,
        "lock_every": 1,
        "lock_ms": 12,
        "histograms": False,
        "mask": None,
        "summary": False,
        "empty_on_rank": None,
        "reduced_twice": False,
        "buffer_mb": 0,
        "broadcast_buffers": True,
        "choose": None,
        "save_every": 1,
        "collect_every": 1,
        "share_mb": 0,
        "extra_on_rank": None,
        "sample_every": 0,
    }
    return argparse.Namespace(**{**usual, **changed})


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 16, c // 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Decoder(nn.Module):
    def __init__(
        self, biases: int, recurrence: str | None, buffer_mb: int = 0, choose: str | None = None
    ) -> None:
        super().__init__()
        self.choose = choose
        self.register_buffer("table", torch.zeros(buffer_mb << (18 if ON_GPU else 8)) if buffer_mb else None)
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH)) for _ in range(biases))
        self.recurrence = recurrence

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids)
        if len(self.biases):
            x = x + torch.stack(list(self.biases)).sum(0)
        if self.recurrence:
            x = x + self.decayed(x)
        for block in self.blocks:
            x = block(x)
            if self.choose == "index":  # the number of rows is known to the device alone
                x = x + x[x.detach().abs().amax(-1) > 1e4].sum()
            elif self.choose == "where":
                x = x + torch.where(x.detach().abs().amax(-1, keepdim=True) > 1e4, x, 0.0).sum()
        loss: Tensor = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss

    def decayed(self, x: Tensor) -> Tensor:
        """A running mean over the places, place after place or as one product."""
        length = x.shape[1]
        if self.recurrence == "matrix":
            place = torch.arange(length, device=x.device)
            gap = place[:, None] - place[None]
            weights = torch.where(gap >= 0, 0.1 * torch.pow(0.9, gap.clamp(min=0)), 0.0)
            return weights.to(x.dtype) @ x
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(length):
            state = 0.9 * state + 0.1 * x[:, at]
            states.append(state)
        return torch.stack(states, 1)


class Samples(Dataset[Any]):
    """A whole batch an item: `made` is in memory, `augmented` is worked out in numpy, `words` in Python,
    `images` are large."""

    def __init__(self, kind: str, batch: int, pinned: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind = kind
        self.ids = torch.randint(VOCAB, (16, batch, LENGTH + 1), generator=generator)
        self.images = torch.rand(4, 32, 1024, 1024) if kind == "images" and ON_GPU else torch.rand(4, 8, 8, 8)
        if pinned and ON_GPU:
            self.ids, self.images = self.ids.pin_memory(), self.images.pin_memory()

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        ids = self.ids[index % 16]
        if self.kind == "augmented":  # shuffles words by their noisy weight, in the order of a whole document
            weights = np.random.default_rng(index).random(350_000)
            order = np.argsort(weights)
            ids = (ids + int(order[0])) % VOCAB
        if self.kind == "words":  # splits text and looks its words up, as a tokeniser of one's own does
            text = " ".join(str(number) for row in ids.tolist() for number in row)
            vocabulary = {str(number): number for number in range(VOCAB)}
            ids = torch.tensor([vocabulary[word] for word in text.split()]).view_as(ids)
        if self.kind == "images":
            return ids, self.images[index % 4]
        return ids, torch.empty(0)


class Job:
    """A training job with its model, data and optimizer; `step` is one iteration of its loop."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.rank = given, dist.get_rank()
        torch.manual_seed(0)
        model = Decoder(given.biases, given.recurrence, given.buffer_mb, given.choose)
        model = model.to(DEVICE, torch.float32 if given.float32 else DTYPE)
        self.inner, self.model = model, cast(Any, model)
        self.is_ddp = given.parallel == "ddp" and dist.get_world_size() > 1
        if self.is_ddp:
            self.model = DistributedDataParallel(
                model, bucket_cap_mb=given.bucket_mb, broadcast_buffers=given.broadcast_buffers
            )
        elif given.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        how: Any = {"foreach": False, "fused": False} if given.optimizer == "loop" else {"fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **how)
        batch = 16 if given.longer_on_rank == self.rank else 8
        samples = Samples(given.data, batch, given.pinned)
        self.batches: Iterator[Any] = iter(
            DataLoader(
                samples,
                batch_size=None,
                num_workers=given.workers,
                prefetch_factor=4 if given.workers else None,
            )
        )
        self.average = [parameter.detach().clone() for parameter in model.parameters()]
        if given.average == "host":
            self.average = [weights.cpu() for weights in self.average]
        self.shared = (
            torch.ones(given.share_mb << (18 if ON_GPU else 8), device=DEVICE) if given.share_mb else None
        )
        self.mask = torch.ones(2048, 2048, device=DEVICE).tril()
        self.objects = [[str(i), {"id": [i]}] for i in range(given.objects)]

    def step(self, number: int) -> None:
        given, model = self.given, self.model
        ids, images = next(self.batches)
        ids = ids.to(DEVICE, non_blocking=given.pinned)
        if images.numel():
            images = images.to(DEVICE, non_blocking=given.pinned)
            images.mean()
        if given.sort_on_rank == self.rank:
            np.sort(np.random.default_rng(number).random(300_000))
        if given.lock_on_rank == self.rank and number % given.lock_every == 0:
            time.sleep(given.lock_ms / 1000)  # another process of the machine holds the file
        if given.mask == "host":
            self.mask = torch.ones(2048, 2048).tril().to(DEVICE)
        for micro, part in enumerate(ids.chunk(given.micro)):
            last = micro == given.micro - 1
            silent = self.is_ddp and not last and not given.sync_each_micro
            with model.no_sync() if silent else nullcontext():
                loss = model(part[:, :-1], part[:, 1:])
                (loss / given.micro).backward()
        if given.parallel == "by_hand":
            gradients = [parameter.grad for parameter in model.parameters()]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            parts = (flat / dist.get_world_size()).split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        if given.parallel == "each":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if given.reduced_twice:
            gradients = [cast(Tensor, parameter.grad) for parameter in self.inner.blocks.parameters()]
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        if given.extra_on_rank == self.rank:
            with torch.no_grad():
                for block in self.inner.blocks:
                    block(torch.randn(8, LENGTH, WIDTH, device=DEVICE, dtype=DTYPE))
        if given.norms == "twice":
            largest = max(float(p.grad.norm()) for p in model.parameters())
            if not all(bool(p.grad.isfinite().all()) for p in model.parameters()) or largest > 100:
                self.optimizer.zero_grad()
        if given.norms == "each":
            norm = (
                sum(p.grad.norm().item() ** 2 + p.grad.abs().max().item() for p in model.parameters()) ** 0.5
            )
            if norm > 100:
                for parameter in model.parameters():
                    parameter.grad.mul_(100 / norm)
        elif given.norms == "together":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(number, loss)

    def after(self, number: int, loss: Tensor) -> None:
        """What the loop does behind the optimizer."""
        given, model = self.given, self.model
        if given.empty_cache:
            torch.cuda.empty_cache()
        if given.empty_on_rank == self.rank:
            torch.cuda.empty_cache()
        if given.histograms:
            for parameter in list(self.inner.parameters())[:40]:
                torch.histc(parameter.detach().float(), 64).tolist()
        if given.summary:
            text = json.dumps({f"weight.{i}": [i, i / 7, str(i)] for i in range(12_000)})
            json.loads(text)
        if given.average is not None:
            current = [parameter.detach() for parameter in model.parameters()]
            if given.average == "device":
                torch._foreach_lerp_(self.average, current, 0.01)
            else:
                for kept, new in zip(self.average, current, strict=True):
                    kept.mul_(0.99).add_(new.to(kept.device), alpha=0.01)
        if self.shared is not None:
            dist.all_reduce(self.shared)
            self.shared.fill_(1.0)
        if given.flush_on_rank == self.rank:
            with open("/tmp/gpu_plant.jsonl", "a") as file:
                for name, parameter in self.inner.named_parameters():
                    file.write(
                        json.dumps({"name": name, "mean": parameter.mean().item(), "step": number}) + "\n"
                    )
                    file.flush()
                    os.fsync(file.fileno())
        if given.sample_every and number % given.sample_every == 0:
            with torch.no_grad():
                ids = next(self.batches)[0][:1, :64].to(DEVICE)
                for _ in range(16):
                    ids = torch.cat([ids, ids[:, -1:]], 1)
                    float(self.inner(ids[:, :-1], ids[:, 1:]))
        if given.save and number % given.save_every == 0:
            torch.save(
                {"head": self.inner.head.state_dict(), "step": number}, f"/tmp/gpu_plant_{self.rank}.pt"
            )
        if given.collect and number % given.collect_every == 0:
            gc.collect()
        if given.nap_ms:
            time.sleep(given.nap_ms / 1000)
        if given.evaluate_every and number % given.evaluate_every == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(6):
                    ids = next(self.batches)[0].to(DEVICE)
                    float(model(ids[:, :-1], ids[:, 1:]))
            model.train()
        if given.gather_objects:
            seen: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(seen, {"rank": self.rank, "step": number, "loss": loss.item()})
        if given.barrier:  # "clean timings"
            dist.barrier()
            synchronise()
        if given.percentiles:
            weights = self.inner.head.weight.detach().float().cpu().numpy()
            np.percentile(weights[: max(1, VOCAB // 32)], [1, 50, 99])


def synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def step_ms(step: Callable[[int], None], numbers: range) -> float:
    """Mean milliseconds of these steps, from an idle device to an idle device."""
    synchronise()
    dist.barrier()
    started = time.perf_counter()
    for number in numbers:
        step(number)
    synchronise()
    return 1000 * (time.perf_counter() - started) / len(numbers)


def truth(name: str) -> dict[str, Any]:
    """Milliseconds a step with the plant and mended, in turn."""
    jobs = [Job(settings(**changed)) for changed in PLANTS[name]]
    for job in jobs:
        step_ms(job.step, range(WARMUP))
    rounds = [
        [step_ms(job.step, range(WARMUP + i * TRUTH_STEPS, WARMUP + (i + 1) * TRUTH_STEPS)) for job in jobs]
        for i in range(TRUTH_ROUNDS)
    ]
    return {"name": name, "planted_ms": [one[0] for one in rounds], "mended_ms": [one[1] for one in rounds]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(PLANTS))
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()

    local = int(os.environ["LOCAL_RANK"])
    if ON_GPU:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    if given.truth:
        for name in given.names:
            found = truth(name)
            gc.collect()
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    else:
        job = Job(settings(**PLANTS[given.names[0]][given.mended]))
        for number in range(WARMUP):
            job.step(number)
        ms = step_ms(job.step, range(WARMUP, given.steps))
        if dist.get_rank() == 0:
            print(f"{ms:.2f} ms a step")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
