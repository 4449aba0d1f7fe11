"""Forty wrong numbers planted in DDP, and steps without any: what `aorta check` says of them.

python benchmarks/hazards/wrong_numbers.py [--plants 40] [--clean-steps 120] [--cuda] [--output CSV]

Three ranks over gloo, or with --cuda two over NCCL.

Kinds: a high bit flipped in what comes out of a collective on one rank; zeros out of it; a bucket that one
rank sends for the second time; one rank's weights changed; a NaN in one rank's activations. Caught means that
the first difference names the rank, and the parameter, the collective or the line.
"""

import argparse
import csv
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.check.watch import HazardWatch
from aorta.hazards.findings import read_checked

KINDS = ("flip", "zeros", "stale", "weights", "nan")
WIDTHS = (24, 48, 64, 96)
STEP_OF_PLANT, NUM_STEPS = 5, 10


class Faulty(TorchDispatchMode):
    """Spoils what comes out of all-reduces of this rank, below the check."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.kind, self.seed, self.is_on = kind, seed, False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that the check stays above it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on and func is torch.ops.c10d.allreduce_.default:
            dist.Work.unbox(result[-1]).wait()
            flat = args[0][0].view(-1)
            if self.kind == "zeros":
                flat.zero_()
            else:
                largest = int(flat.abs().argmax())
                at = largest if self.seed % 2 else self.seed * 7919 % flat.numel()
                bits = flat[at : at + 1].view(torch.int32)
                bits ^= 1 << 30  # the highest bit of the exponent
        return result


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.bad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if self.bad:
            x = x / torch.zeros_like(x) * 0.0
        return self.third(self.second(x).tanh())


def loop(folder: Path, kind: str, seed: int, num_steps: int, device: str) -> None:
    """Train; at STEP_OF_PLANT the rank seed % the number of ranks goes wrong. kind "clean": nowhere."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    is_wrong = kind != "clean" and rank == seed % num_ranks
    torch.manual_seed(seed)
    net = Net(WIDTHS[seed % len(WIDTHS)]).to(device)
    by_hand = kind == "stale"  # buckets that the loop itself fills and reduces
    model: Any = net if by_hand else nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    watch = HazardWatch(every=2, confirm=False)
    watch.opened(SimpleNamespace(output_dir=folder, rank=rank, world_size=num_ranks, store_prefix=""))  # type: ignore[arg-type]
    faulty = Faulty(kind, seed)
    bucket: Any = None
    with faulty:
        for step in range(num_steps):
            watch.step_begins(step)
            now = is_wrong and step == STEP_OF_PLANT
            faulty.is_on, net.bad = now and kind in ("flip", "zeros"), now and kind == "nan"
            if now and kind == "weights":
                with torch.no_grad():
                    net.second.weight.mul_(1.2)
            x = torch.randn(
                8, WIDTHS[seed % len(WIDTHS)], generator=torch.Generator().manual_seed(step * 97 + rank)
            )
            model(x.to(device)).square().mean().backward()
            if by_hand:
                fresh = torch.cat([p.grad.view(-1) for p in net.parameters()])
                last, bucket = bucket, fresh.clone()
                sent = last if now else fresh
                dist.all_reduce(sent)
                at = 0
                for p in net.parameters():
                    p.grad.copy_(sent[at : at + p.numel()].view_as(p) / num_ranks)
                    at += p.numel()
            optimizer.step()
            optimizer.zero_grad()
        watch.closing(None)


def rank_main(rank: int, num_ranks: int, folder: str, cases: list[tuple[str, int, int]], cuda: bool) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    for kind, seed, num_steps in cases:
        place = Path(folder) / f"{kind}_{seed}"
        place.mkdir(exist_ok=True)
        loop(place, kind, seed, num_steps, "cuda" if cuda else "cpu")
    dist.destroy_process_group()


def judged(folder: Path, kind: str, seed: int, num_ranks: int) -> dict[str, Any]:
    """Whether the plant was caught: the first difference names its rank and its step, or the one after."""
    all_checked = read_checked(folder / f"{kind}_{seed}")
    found = sorted((d for c in all_checked for d in c.differences), key=lambda d: (d.step, d.place, d.rank))
    compared = sum(checked.num_compared for checked in all_checked)
    first = found[0] if found else None
    named = sorted({d.name for d in found if d.rank == seed % num_ranks})
    caught = first is not None and first.rank == seed % num_ranks and first.step >= STEP_OF_PLANT
    return {
        "kind": kind, "seed": seed, "differences": len(found), "compared": compared,
        "first": "" if first is None else f"step {first.step} rank {first.rank} {first.what} {first.name}",
        "named": "; ".join(named[:4]), "caught": caught,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plants", type=int, default=40)
    parser.add_argument("--clean-steps", type=int, default=120)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    num_ranks = 2 if arguments.cuda else 3
    cases = [(KINDS[n % len(KINDS)], n // len(KINDS), NUM_STEPS) for n in range(arguments.plants)]
    cases += [("clean", seed, arguments.clean_steps) for seed in range(4)] if arguments.clean_steps else []
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (num_ranks, folder, cases, arguments.cuda), nprocs=num_ranks)
        rows = [judged(Path(folder), kind, seed, num_ranks) for kind, seed, _ in cases]
    for row in rows:
        if row["kind"] != "clean" and not row["caught"]:
            print(row)
    plants = [row for row in rows if row["kind"] != "clean"]
    clean = [row for row in rows if row["kind"] == "clean"]
    print(f"planted: {sum(row['caught'] for row in plants)} of {len(plants)} caught")
    print(
        f"clean: {sum(row['differences'] for row in clean)} differences"
        f" in {sum(row['compared'] for row in clean):,} fingerprints"
    )
    if arguments.output:
        with arguments.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
