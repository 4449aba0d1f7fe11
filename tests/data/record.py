"""Training loop of two gloo ranks that the recordings in this folder were made with; commands: README.md."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

NUM_BLOCKS, WIDTH, BATCH = 3, 128, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fsdp", action="store_true", help="shard the blocks; else DDP")
    parser.add_argument(
        "--late-ms", type=float, default=0.0, help="rank 1 sleeps so long before each backward pass"
    )
    parser.add_argument("--traces", type=Path, help="folder for a trace of steps 2 and 3 of each rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = decoder(options.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=2, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule) if options.traces else None
    if profiler is not None:
        profiler.start()
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = model(torch.randn(BATCH, WIDTH)).square().mean()
        if rank == 1:
            time.sleep(options.late_ms / 1000)
        loss.backward()
        optimizer.step()
        if profiler is not None:
            profiler.step()
    if profiler is not None:
        profiler.stop()
        profiler.export_chrome_trace(str(options.traces / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


def decoder(is_sharded: bool) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(NUM_BLOCKS)
    ]
    model = nn.Sequential(*blocks)
    if not is_sharded:
        return DistributedDataParallel(model, bucket_cap_mb=1)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


if __name__ == "__main__":
    main()
