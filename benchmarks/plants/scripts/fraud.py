"""Train a small classifier of card payments on two ranks (DDP, gloo)."""

import argparse
import gc
import json
import lzma
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

FEATURES, BATCH, WARMUP = 64, 2048, 5


class Lines(Dataset):
    """Payments as the lines of a CSV file; --parsed keeps them as arrays."""

    def __init__(self, count, parsed):
        numbers = np.random.default_rng(dist.get_rank()).normal(size=(count, FEATURES)).round(3)
        self.x = torch.tensor(numbers, dtype=torch.float32) if parsed else None
        self.lines = None if parsed else [",".join(map(str, row)) for row in numbers]
        self.y = torch.from_numpy((numbers[:, 0] > 0).astype(np.int64))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, chosen):
        if self.x is not None:
            return self.x[chosen], self.y[chosen]
        rows = [[float(word) for word in self.lines[i].split(",")] for i in chosen]
        return torch.tensor(rows), self.y[chosen]


class Archive(Dataset):
    """Payments in blocks of one batch; the blocks of a cold shard are still packed."""

    def __init__(self, blocks, packed):
        numbers = np.random.default_rng(dist.get_rank()).normal(size=(blocks, BATCH, FEATURES)).round(2)
        self.blocks = [block.astype(np.float32).tobytes() for block in numbers]
        self.packed = packed
        if packed:
            self.blocks = [lzma.compress(block, preset=0) for block in self.blocks]

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        block = self.blocks[index[0] % len(self.blocks)]
        x = np.frombuffer(lzma.decompress(block) if self.packed else block, dtype=np.float32)
        x = torch.from_numpy(x.reshape(BATCH, FEATURES).copy())
        return x, (x[:, 0] > 0).long()


class Model(nn.Module):
    def __init__(self, frozen_as_buffer):
        super().__init__()
        table = torch.randn(60_000, 32)
        if frozen_as_buffer:
            self.register_buffer("merchants", table)
        else:
            self.merchants = nn.Parameter(table, requires_grad=False)
        self.net = nn.Sequential(
            nn.Linear(FEATURES + 32, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 2)
        )

    def forward(self, x):
        merchant = self.merchants[(x[:, 1].abs() * 1000).long()]
        return self.net(torch.cat([x, merchant], dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--parsed", action="store_true")
    parser.add_argument("--archive", choices=["plain", "cold"])
    parser.add_argument("--metrics", choices=["single", "stacked"])
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--keep-rows", action="store_true", help="hold the raw rows as objects")
    parser.add_argument("--collect", action="store_true", help="call the garbage collector in every step")
    parser.add_argument("--pace-ms", type=float, default=0, help="leave the feature store some air")
    parser.add_argument("--histograms", action="store_true", help="rank 0 writes histograms of the weights")
    parser.add_argument("--frozen-as-buffer", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model(args.frozen_as_buffer)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    cold = args.archive == "cold" and rank == 1
    dataset = Archive(8, cold) if args.archive else Lines(20_000, args.parsed)
    sampler = BatchSampler(
        RandomSampler(dataset, num_samples=args.steps * BATCH, replacement=True), BATCH, True
    )
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    rows = [[str(i), {"id": [i]}] for i in range(40_000)] if args.keep_rows else []

    for step, (x, y) in enumerate(loader):
        if step == WARMUP:
            started = time.perf_counter()
        optimizer.zero_grad()
        logits = ddp(x)
        loss = nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        if args.metrics:
            hits = [((logits[:, 1] > i / 40) == y).float().mean() for i in range(40)]
            if args.metrics == "single":
                for hit in hits:
                    dist.all_reduce(hit)
            else:
                dist.all_reduce(torch.stack(hits))
        if args.save_every and step % args.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"/tmp/fraud_{rank}.pt")
        if args.collect:
            gc.collect()
        if args.pace_ms:
            time.sleep(args.pace_ms / 1000)
        if args.histograms and rank == 0:
            report = {
                str(i): {
                    key: np.percentile(value.numpy(), range(0, 101, 5)).tolist()
                    for key, value in state.items()
                }
                for i, state in enumerate(optimizer.state.values())
            }
            with open("/tmp/fraud_histograms.jsonl", "a" if step else "w") as file:
                file.write(json.dumps(report) + "\n")
    if rank == 0:
        ms = 1000 * (time.perf_counter() - started) / (args.steps - WARMUP)
        print(f"{ms:.2f} ms a step, {len(rows)} rows")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
