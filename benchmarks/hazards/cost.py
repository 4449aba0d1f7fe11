"""What `aorta check` costs a training loop, in one process and in turn: a block of steps without it, one
between windows, and a window of two checked steps.

python benchmarks/hazards/cost.py ddp:64x32                                         one process, on the CPU
torchrun --nproc-per-node 2 benchmarks/hazards/cost.py --cuda fsdp2:64x32 fsdp2:1024x16384      on GPUs

A loop is KIND:WIDTHxROWS; narrow, the host is its bound, wide the device. The recorder is not in it: `aorta
run` has it alone. Rank 0 prints. Times on the CPU are of its thread, so that other programs do not count; on
GPUs they are of the clock, with the device awaited at the ends of what is timed.
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
from typing import Any, NamedTuple

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


class Round(NamedTuple):
    """Milliseconds."""

    plain: float
    """A step without the check."""
    between: float
    """A step between windows."""
    begin: float
    checked: float
    """A step of the window."""
    end: float

    @property
    def always_on(self) -> float:
        return self.between / self.plain

    @property
    def of_plain(self) -> float:
        return self.checked / self.plain

    @property
    def whole_of_plain(self) -> float:
        """The same with its share of the window's begin and end."""
        return (self.checked + (self.begin + self.end) / 2) / self.plain

    @property
    def two_of_200(self) -> float:
        return 1 + (self.begin + 2 * (self.checked - self.plain) + self.end) / (200 * self.plain)


class Loop:
    """A training loop whose steps are checked, or not."""

    def __init__(self, loop: str, num_steps: int, device: str, folder: Path, has_numbers: bool) -> None:
        kind, size = loop.split(":")
        width, rows = map(int, size.split("x"))
        self.step = step_of(kind, width, rows, device)
        self.device, self.num_steps = device, num_steps
        for _ in range(20):
            self.step()
        self.watch = HazardWatch(num_steps + 2, confirm=False)
        self.watch.opened(Recorder(folder))
        if not has_numbers:
            numbering: Any = self.watch._numbering
            numbering.called = numbering._print_parameters = lambda *_: None
        self.profile: cProfile.Profile | None = None
        self._num_calls = 0
        for _ in range(2):
            self.step_begins()
            self.step()
        self.step_begins()
        self.window()

    def now_ms(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter() * 1e3
        return time.thread_time() * 1e3

    def step_begins(self) -> None:
        self.watch.step_begins(self._num_calls)
        self._num_calls += 1

    def hook(self, is_on: bool) -> None:
        """Put on what stays on between two windows, or take it off."""
        numbering, graphs = self.watch._numbering, self.watch._graphs
        if not is_on:
            numbering.unhook()
            graphs.uninstall()
            return
        numbering.is_hooked = False
        numbering.hook_optimizers()
        if self.device == "cuda":
            graphs.install()

    def plain(self) -> float:
        self.hook(False)
        at = self.now_ms()
        for _ in range(self.num_steps):
            self.step()
        taken = self.now_ms() - at
        self.hook(True)
        return taken / self.num_steps

    def between(self) -> float:
        at = self.now_ms()
        self.step()  # the call before it ended the window
        for _ in range(self.num_steps - 1):
            self.step_begins()
            self.step()
        return (self.now_ms() - at) / self.num_steps

    def window(self) -> tuple[float, float]:
        """Two checked steps; milliseconds of one, and of the window's end."""
        assert self.watch._first_of_window is not None
        if self.profile is not None:
            self.profile.enable()
        at = self.now_ms()
        self.step()
        self.step_begins()
        self.step()
        checked = self.now_ms()
        self.step_begins()
        ended = self.now_ms()
        if self.profile is not None:
            self.profile.disable()
        return (checked - at) / 2, ended - checked

    def round(self, is_plain_first: bool) -> Round:
        parts = [self.plain, self.between]
        times = {part: part() for part in (parts if is_plain_first else reversed(parts))}
        at = self.now_ms()
        self.step_begins()
        begun = self.now_ms() - at
        return Round(times[parts[0]], times[parts[1]], begun, *self.window())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("loops", nargs="+", metavar="KIND:WIDTHxROWS", help="KIND: plain, ddp or fsdp2.")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--seconds", type=float, default=15, help="Of each loop; at least four rounds.")
    parser.add_argument("--steps", type=int, default=12, help="Steps of a block.")
    parser.add_argument("--no-numbers", action="store_true", help="Leave wrong numbers out of the check.")
    parser.add_argument("--profile", action="store_true", help="Print where windows spend their time.")
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
    for name in arguments.loops:
        loop = Loop(name, arguments.steps, device, folder, not arguments.no_numbers)
        loop.round(True)
        loop.profile = cProfile.Profile() if arguments.profile else None
        until = time.monotonic() + arguments.seconds
        rounds: list[Round] = []
        is_over = torch.zeros(1, device=device)
        while len(rounds) < 4 or not is_over.item():
            rounds.append(loop.round(len(rounds) % 2 == 0))
            is_over.fill_(time.monotonic() > until)
            dist.broadcast(is_over, 0)  # all ranks train as many steps
        loop.watch.closing(None)
        if dist.get_rank() == 0:
            checked = loop.watch.checked
            num_operations = checked.num_operations / len(checked.steps)
            left_out = ", without wrong numbers" if arguments.no_numbers else ""
            print(text(f"{name} on {device}{left_out}, {num_operations:.0f} operations", rounds), flush=True)
            if loop.profile is not None:
                pstats.Stats(loop.profile).sort_stats("tottime").print_stats(32)
    dist.destroy_process_group()


def text(name: str, rounds: list[Round]) -> str:
    def middle(attribute: str) -> str:
        values = sorted(getattr(one, attribute) for one in rounds)
        return (
            f"{statistics.median(values):.3f} [{values[0]:.3f}, {values[-1]:.3f}], "
            f"mean {statistics.fmean(values):.4f}"
        )

    return "\n".join(
        (
            f"{name}, {len(rounds)} rounds: median [least, most], mean",
            f"  a step without the check, ms      {middle('plain')}",
            f"  between windows, of plain         {middle('always_on')}",
            f"  a checked step, of plain          {middle('of_plain')}",
            f"  with its window's begin and end   {middle('whole_of_plain')}",
            f"  a window's begin, ms              {middle('begin')}",
            f"  a window's end, ms                {middle('end')}",
            f"  two of 200, of plain              {middle('two_of_200')}",
        )
    )


if __name__ == "__main__":
    main()
