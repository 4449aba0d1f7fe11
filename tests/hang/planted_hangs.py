"""Runs that hang, on gloo ranks. Module-level: ranks import them by name."""

import time
from typing import Any

import torch
import torch.distributed as dist

import aorta
from aorta.config.structs import HangConfig
from aorta.hang.watchdog import Watchdog

HANGS_IN_STEP = 3


def steps_that_hang(output_dir: str, what: str, timeout_s: float) -> None:
    """Each step all-reduces and gathers; in step 3 rank 1 skips the all-reduce, or sleeps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store: Any = dist.PrefixStore("hang-test", dist.distributed_c10d._get_default_store())
    hang = HangConfig(timeout_s=timeout_s, action="abort")
    values, gathered = torch.ones(16), torch.zeros(2, 8)
    dist.barrier()  # a rank that starts late on a busy machine is no hang
    with (
        aorta.instrument(output_dir) as recorder,
        Watchdog(hang, output_dir, rank, world_size, recorder=recorder, store=store) as watchdog,
    ):
        for step in range(6):
            watchdog.beat(step)
            with recorder.step(global_step=step):
                planted = rank == 1 and step == HANGS_IN_STEP
                if planted and what == "sleeps":
                    time.sleep(60)
                if not (planted and what == "skips"):
                    dist.all_reduce(values)
                dist.all_gather_into_tensor(gathered.view(-1), values[:8])


def slow_but_alive(output_dir: str, timeout_s: float) -> list[int]:
    """Steps of a third of the limit, longer than it together."""
    exits: list[int] = []
    hang = HangConfig(timeout_s=timeout_s, action="abort")
    with Watchdog(hang, output_dir, 0, 1, exit_now=exits.append) as watchdog:
        for step in range(5):
            watchdog.beat(step)
            time.sleep(timeout_s / 3)
    return exits
