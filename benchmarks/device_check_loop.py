"""A data-parallel loop as users write it, without a word of aorta.

    torchrun --nproc_per_node 2 device_check_loop.py [--trace FOLDER]

Large products, so that the device is the bound; with --trace the last steps are torch.profiler's.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

STEPS, WAIT, WARMUP, ACTIVE = 60, 44, 4, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace")
    folder = parser.parse_args().trace
    has_gpu = torch.cuda.is_available()
    rank = int(os.environ["LOCAL_RANK"])
    if has_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    width, batch = (4096, 8192) if has_gpu else (64, 32)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(batch, width, device=device)
    activities = [ProfilerActivity.CUDA] if has_gpu else [ProfilerActivity.CPU]
    profiler = (
        profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE),
            on_trace_ready=lambda done: done.export_chrome_trace(f"{folder}/rank{dist.get_rank()}.json"),
        )
        if folder
        else nullcontext()
    )
    with profiler as running:
        for step in range(STEPS):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(data).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if running is not None:
                if has_gpu and step + 1 == WAIT + WARMUP:
                    # The host is ahead: the profiler would see the end of a step that it does not count.
                    torch.cuda.synchronize()
                running.step()
    if has_gpu:
        torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
