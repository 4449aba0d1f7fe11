"""A loop of two gloo ranks with DDP, and two collectives of its own that it does not wait for in time: one is
used in the same step, one in the next."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.attach.instrument import instrument
from aorta.check.numbering import Numbering
from aorta.check.sites import Sites
from aorta.check.watch import HazardWatch
from aorta.hazards.findings import Site
from tests.check import streams_on_a_cpu


def checked_loop(folder: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total, across = torch.ones(1 << 16), torch.ones(1 << 16)
    pending = dist.all_reduce(across, async_op=True)
    recorder = instrument(Path(folder))
    recorder.companions.add(HazardWatch(every=100))
    with recorder:
        for number in range(13):
            with recorder.step(global_step=number):
                across.add_(1)
                pending.wait()
                model(torch.ones(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(torch.ones(64))  # its work is waited for by us, and then by torch
                total.fill_(dist.get_rank() + 1)
                work = dist.all_reduce(total, async_op=True)
                total.mul_(0.5)
                work.wait()
                pending = dist.all_reduce(across, async_op=True)


def bucket_loops(folder: str) -> None:
    """DDP whose buckets are filled twice a step, and whose gradients, views of them, are clipped."""
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = instrument(Path(folder))
    recorder.companions.add(HazardWatch(every=2, confirm=False))
    with recorder:
        for number in range(6):
            with recorder.step(global_step=number):
                for micro in range(2):
                    model(
                        torch.full((4, 64), 1.0 + number + micro + dist.get_rank())
                    ).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()


def spoilt_loops(folder: str) -> None:
    """Loops of DDP in which rank 1 goes wrong in step 3, which is checked, one kind each."""
    rank = dist.get_rank()
    for kind in ("zeros", "weights", "nan", "clean"):
        torch.manual_seed(0)
        place = Path(folder) / kind
        place.mkdir(exist_ok=True)
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        watch = HazardWatch(every=2, confirm=False)
        watch.opened(SimpleNamespace(output_dir=place, rank=rank, world_size=2, store_prefix=""))  # type: ignore[arg-type]
        with Zeros() as zeros:
            for step in range(6):
                watch.step_begins(step)
                is_wrong = step == 3 and rank == 1
                zeros.is_on = is_wrong and kind == "zeros"
                if is_wrong and kind == "weights":
                    net[1].weight.data.mul_(1.5)
                x = torch.full((4, 32), float("nan") if is_wrong and kind == "nan" else 1.0 + rank + step)
                net(x).square().mean().backward()
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
            watch.closing(None)


class Zeros(TorchDispatchMode):
    """Lets all-reduces of this rank bring zeros, below the check."""

    is_on = False

    @classmethod
    def is_infra_mode(cls):
        return True  # so that the check stays above it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if self.is_on and func is torch.ops.c10d.allreduce_.default:
            dist.Work.unbox(result[-1]).wait()
            args[0][0].zero_()
        return result


def reducer_on_a_device(folder: str) -> None:
    """DDP whose reducer's collectives are issued where no Python is on the stack, as on a device; rank 1 gets
    zeros in step 3. A loader's stream, which waits for nothing, has the first operation behind a backward
    pass."""
    streams_on_a_cpu.install()
    number = Sites.number

    def number_of(sites, operation, tensor=None, is_collective=False):
        if operation != "c10d::allreduce_":
            return number(sites, operation, tensor, is_collective)
        sites.sites.append(Site(operation=operation, is_collective=True))
        return len(sites.sites) - 1

    Sites.number = number_of  # type: ignore[method-assign]
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = HazardWatch(every=2, confirm=False)
    rank, loader, caller = dist.get_rank(), streams_on_a_cpu.Stream(), streams_on_a_cpu.Stream.current
    looked_on = set()
    look = Numbering._print

    def print_on(numbering, pending):
        looked_on.add(streams_on_a_cpu.Stream.current)
        look(numbering, pending)

    Numbering._print = print_on  # type: ignore[method-assign]
    watch.opened(SimpleNamespace(output_dir=Path(folder), rank=rank, world_size=2, store_prefix=""))  # type: ignore[arg-type]
    with Zeros() as zeros:
        for step in range(6):
            watch.step_begins(step)
            zeros.is_on = step == 3 and rank == 1
            model(torch.ones(4, 64)).sum().backward()
            with loader:
                torch.ones(4).add_(1)
            optimizer.step()
            optimizer.zero_grad()
    watch.closing(None)
    assert looked_on == {caller}
