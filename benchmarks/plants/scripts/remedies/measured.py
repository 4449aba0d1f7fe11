"""What the programs beside it share: the steps of their loop, timed, and a small model."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

torch.set_float32_matmul_precision("high")


def place():
    """The device of this process, whose ranks, if there are several, are connected. A CPU where there are no
    GPUs."""
    rank, has_gpu = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    return device


def steps(num=60, work=1):
    """Numbers of steps; prints what one takes, without the first quarter. work: of a step, in those of the
    program that it is compared with."""
    num = min(num, int(os.environ.get("PLANT_STEPS", num)))
    for step in range(num):
        if step == num // 4:
            began_s = now_s()
        yield step
    print(f"{1e3 * (now_s() - began_s) / (num - num // 4) / work:.2f} ms a step", flush=True)
    if "PLANT_TRACE" in os.environ:  # of a few more, which nothing records
        with torch.profiler.profile() as profiler:
            for step in range(num, num + 12):
                yield step
            now_s()
        profiler.export_chrome_trace(f"{os.environ['PLANT_TRACE']}/rank_{os.environ.get('RANK', 0)}.json.gz")


def now_s():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def network(width=512, layers=4, features=64, classes=10):
    hidden = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def batch(rows=256, features=64, classes=10):
    return torch.randn(rows, features), torch.randint(classes, (rows,))
