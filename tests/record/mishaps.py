"""Programs of the ranks of test_mishaps.py: scripts that go wrong somewhere and carry on."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aorta
from aorta.record import Recorder
from tests.record.rank_programs import records


def all_of_them(folder: str) -> dict[str, Any]:
    scripts = (coalescing_that_fails, a_launch_that_raises, a_send_nobody_waits_for, groups_alike)
    return {script.__name__: script(os.path.join(folder, script.__name__)) for script in scripts}


def _sum() -> None:
    dist.all_reduce(torch.ones(4))


def coalescing_that_fails(folder: str) -> list[int]:
    """gloo cannot coalesce. Collectives recorded per step."""
    with aorta.instrument(folder) as recorder:
        with recorder.step():
            _sum()
            # Not by torch's context manager, which after this holds all later collectives back.
            with contextlib.suppress(RuntimeError):
                dist.group.WORLD._start_coalescing(torch.device("cpu"))
            _sum()
        with recorder.step():
            _sum()
    return [line["num_collectives"] for line in records(folder, dist.get_rank())]


def a_launch_that_raises(folder: str) -> tuple[list[list[int]], dict[str, int], int]:
    """On rank 0 alone. Sequence numbers per step, collectives seen, and lines there before the end."""
    rank = dist.get_rank()

    def launch() -> None:
        if rank == 0:
            with contextlib.suppress(ValueError, RuntimeError):
                torch.distributed.group.WORLD.broadcast(torch.ones(4), 99)

    with aorta.instrument(folder) as recorder:
        num_before = _lines_after_four_steps(recorder, launch)
    numbers = [[call["seq"] for call in line["collectives"]] for line in records(folder, rank)]
    return numbers, dict(recorder.journal.num_seen), num_before


def a_send_nobody_waits_for(folder: str) -> tuple[int, int | None, float | None, float | None]:
    """Rank 0 sends in step 1 and waits after the last step. Lines before that; comm of steps 1 and 2."""
    rank = dist.get_rank()
    tensor = torch.ones(4)
    works: list[Any] = []

    def send() -> None:
        if rank == 0:
            works.append(dist.isend(tensor, 1))
        else:
            dist.recv(tensor, 0)

    with aorta.instrument(folder) as recorder:
        num_before = _lines_after_four_steps(recorder, send)
        for work in works:
            work.wait()
    lines = records(folder, rank)
    sends = [call for call in lines[1]["collectives"] if call["op"] == "send"]
    end_ms = sends[0]["end_ms"] if sends else None
    return num_before, len(lines), end_ms, lines[2]["overlap"]["comm_ms"]


def groups_alike(folder: str) -> list[tuple[str, int]]:
    """Two groups of the same ranks and description. (group, sequence number) of every collective."""
    groups = [dist.new_group([0, 1], group_desc="dp") for _ in range(2)]
    with aorta.instrument(folder) as recorder, recorder.step():
        for group in groups * 2:
            dist.all_reduce(torch.ones(4), group=group)
    (line,) = records(folder, dist.get_rank())
    return [(call["group"], call["seq"]) for call in line["collectives"]]


def groups_made_anew(folder: str) -> list[tuple[str, list[int], int]]:
    """After everything was destroyed. (group, ranks, sequence number) of every all-reduce."""
    rank = dist.get_rank()

    def call(ranks: list[int], description: str) -> None:
        group = dist.new_group(ranks, group_desc=description)
        if rank in ranks:
            dist.all_reduce(torch.ones(4), group=group)

    with aorta.instrument(folder) as recorder:
        with recorder.step():
            call([0, 1], "first")
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(folder).parent / "again"), 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        with recorder.step():
            call([0, 2], "second")
    calls = [call for line in records(folder, rank) for call in line["collectives"]]
    return [(c["group"], c["ranks"], c["seq"]) for c in calls if c["op"] == "all_reduce"]


def _lines_after_four_steps(recorder: Recorder, in_second: Callable[[], None]) -> int:
    """Records that have come by then, or in ten seconds; the last step's waits for a next one or the end."""
    seen: list[Any] = []
    recorder.on_record(seen.append)
    for step in range(4):
        with recorder.step():
            if step == 1:
                in_second()
            _sum()
    end_s = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < end_s:
        time.sleep(0.01)
    return len(seen)
