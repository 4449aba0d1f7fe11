"""What `aorta check` costs a training loop, in one process: steps before any window, checked ones, and those
between windows, in turn.

python benchmarks/hazards/cost.py ddp                                    one process, on the CPU
torchrun --nproc-per-node 2 benchmarks/hazards/cost.py fsdp2 --cuda      on GPUs

The recorder is not in it: `aorta run` has it alone. Rank 0 prints medians. Times on the CPU are of its
thread, so that other programs do not count; on GPUs they are of the clock, with the device awaited at each
edge that is timed.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from aorta.check.watch import HazardWatch


class Recorder:
    """As much of one as the watch asks for."""

    def __init__(self, folder: Path) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.output_dir, self.store_prefix = folder, ""

    def on_record(self, callback: Callable[[Any], None]) -> None: ...


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def step_of(kind: str, width: int, num_rows: int, device: str) -> Callable[[], None]:
    """A training step; narrow, the host is the bound, wide the device."""
    net: Any = nn.Sequential(*(Block(width) for _ in range(4)), nn.Linear(width, 64)).to(device)
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in net[:4]:
            fully_shard(block)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)
    x, y = torch.randn(num_rows, width, device=device), torch.randint(0, 64, (num_rows,), device=device)

    def step() -> None:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("plain", "ddp", "fsdp2"))
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--between", type=int, default=10, help="Steps between two windows.")
    parser.add_argument("--profile", action="store_true", help="Print where checked steps spend their time.")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    device, backend = ("cuda", "nccl") if arguments.cuda else ("cpu", "gloo")
    if arguments.cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)

    def now_ms() -> float:
        if arguments.cuda:
            torch.cuda.synchronize()
            return time.perf_counter() * 1e3
        return time.thread_time() * 1e3

    step = step_of(arguments.kind, arguments.width, arguments.rows, device)
    every = arguments.between + 2
    watch = HazardWatch(every, confirm=False)
    profile = cProfile.Profile()
    before, between, checked, begins, ends = (list[float]() for _ in range(5))
    for _ in range(60):
        at = now_ms()
        step()
        before.append(now_ms() - at)
    watch.opened(Recorder(folder))
    for number in range(2 + arguments.windows * every):
        was_checked = watch.is_in_window
        is_profiled = arguments.profile and number > 3 * every
        at = now_ms()
        if is_profiled and was_checked:
            profile.enable()
        watch.step_begins(number)
        profile.disable()
        began = now_ms()
        is_checked = watch.is_in_window
        if is_profiled and is_checked:
            profile.enable()
        step()
        profile.disable()
        ended = now_ms()
        if number > 2 * every:
            (checked if is_checked else between).append(ended - began)
            if is_checked and not was_checked:
                begins.append(began - at)
            elif was_checked and not is_checked:
                ends.append(began - at)
    watch.closing(None)
    if dist.get_rank() == 0:
        middle = statistics.median
        plain, one, begin, end = middle(before[20:]), middle(checked), middle(begins), middle(ends)
        per_window = 2 * (one - plain) + begin + end
        num_operations = watch.checked.num_operations / len(watch.checked.steps)
        each_us = 1e3 * (one - plain) / num_operations
        share = (plain + per_window / 2) / plain
        print(
            f"{arguments.kind} on {device}, {num_operations:.0f} operations a step, {plain:.3f} ms\n"
            f"  between windows {middle(between):.3f} ({middle(between) / plain:.3f} x)\n"
            f"  checked {one:.3f} ({one / plain:.2f} x, {each_us:.1f} us an operation)\n"
            f"  a window begins in {begin:.3f} and ends in {end:.3f} ms; with it {share:.2f} x\n"
            f"  two of 200: {1 + per_window / (200 * plain):.4f} x",
            flush=True,
        )
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(32)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
