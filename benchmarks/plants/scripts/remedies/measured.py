"""What the programs beside it share: the steps of their loop, timed, and a small model."""

import os
import time

import torch
from torch import nn

torch.set_float32_matmul_precision("high")


def steps(num=60):
    """Numbers of steps; prints what one takes, without the first quarter."""
    num = min(num, int(os.environ.get("PLANT_STEPS", num)))
    for step in range(num):
        if step == num // 4:
            began_s = time.perf_counter()
        yield step
    print(f"{1e3 * (time.perf_counter() - began_s) / (num - num // 4):.2f} ms a step", flush=True)


def network(width=512, layers=4, features=64, classes=10):
    hidden = [one for _ in range(layers) for one in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), *hidden, nn.Linear(width, classes))


def batch(rows=256, features=64, classes=10):
    return torch.randn(rows, features), torch.randint(classes, (rows,))
