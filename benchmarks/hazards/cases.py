"""Planted hazards on two GPUs, each bad and mended, with delays that confirm them; CSAN on the same steps.

torchrun --nproc-per-node 2 benchmarks/hazards/cases.py OUT     one line a case; OUT/cases.csv
torchrun --nproc-per-node 2 benchmarks/hazards/cases.py OUT --csan

A case is a function that makes a step; tests/hazards/planted.py has the first twenty as logs of operations.
"""

import argparse
import contextlib
import csv
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SIZE = 1 << 22
STEPS = 20


def stream() -> Any:
    return torch.cuda.Stream()


def full(value: float, size: int = SIZE) -> Tensor:
    return torch.full((size,), float(value), device="cuda")


def collective_before_its_input(mended: bool) -> Any:
    x, side = full(0), stream()

    def step(n: int) -> None:
        x.fill_(n)
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_reduce(x)
        torch.cuda.current_stream().wait_stream(side)

    return step


def output_before_wait(mended: bool) -> Any:
    x, out = full(0), full(0, 2 * SIZE)

    def step(n: int) -> None:
        x.fill_(n)
        out.zero_()
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        if mended:
            work.wait()
        out.sum()
        work.wait()

    return step


def freed_under_copy(mended: bool) -> Any:
    side, pinned = stream(), torch.empty(SIZE, pin_memory=True)

    def step(n: int) -> None:
        x = full(n)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pinned.copy_(x, non_blocking=True)
        if mended:
            x.record_stream(side)
        del x
        y = full(-n)
        torch.cuda.current_stream().wait_stream(side)
        del y

    return step


def freed_under_copy_without_pressure(mended: bool) -> Any:
    side, pinned = stream(), torch.empty(SIZE, pin_memory=True)

    def step(n: int) -> None:
        x = full(n)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pinned.copy_(x, non_blocking=True)
        if mended:
            torch.cuda.current_stream().wait_stream(side)
        del x
        y = full(-n, 1024)
        torch.cuda.current_stream().wait_stream(side)
        del y

    return step


def bucket_refilled_while_reduced(mended: bool) -> Any:
    bucket, side = full(0), stream()

    def step(n: int) -> None:
        for micro in range(2):
            if mended:
                torch.cuda.current_stream().wait_stream(side)
            bucket.fill_(n + micro)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                bucket.mul_(0.5)
        torch.cuda.current_stream().wait_stream(side)

    return step


def bucket_of_two_streams(mended: bool) -> Any:
    bucket, first, second = full(0), stream(), stream()

    def step(n: int) -> None:
        for side in (first, second):
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first):
            bucket[: SIZE // 2].fill_(n)
        with torch.cuda.stream(second):
            bucket[SIZE // 2 :].fill_(n)
        torch.cuda.current_stream().wait_stream(first)
        if mended:
            torch.cuda.current_stream().wait_stream(second)
        dist.all_reduce(bucket)
        torch.cuda.current_stream().wait_stream(second)

    return step


def hybrid_output_freed_on_its_stream(mended: bool) -> Any:
    scatter, reduce = stream(), stream()

    def step(n: int) -> None:
        scatter.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(scatter):
            x = full(n)
        reduce.wait_stream(scatter)
        with torch.cuda.stream(reduce):
            dist.all_reduce(x)
        if mended:
            scatter.wait_stream(reduce)
        with torch.cuda.stream(scatter):
            del x
            y = full(-n)
        torch.cuda.current_stream().wait_stream(scatter)
        torch.cuda.current_stream().wait_stream(reduce)
        with torch.cuda.stream(scatter):
            del y

    return step


def waits_for_itself(mended: bool) -> Any:
    buffer, out, load, store = full(0), full(0), stream(), stream()

    def step(n: int) -> None:
        for side in (load, store):
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(load):
            out.copy_(buffer)
        with torch.cuda.stream(store):
            torch.cuda.current_stream().wait_stream(load if mended else torch.cuda.current_stream())
            buffer.fill_(n)
        for side in (load, store):
            torch.cuda.current_stream().wait_stream(side)

    return step


def clone_after_the_snapshot(mended: bool) -> Any:
    source, copy, side, out = full(0), full(0), stream(), full(0)

    def step(n: int) -> None:
        source.fill_(n)
        if not mended:
            side.wait_stream(torch.cuda.current_stream())
        copy.copy_(source)
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.copy_(copy)
        torch.cuda.current_stream().wait_stream(side)

    return step


def freed_after_another_streams_wait(mended: bool) -> Any:
    side, lane = stream(), stream()

    def step(n: int) -> None:
        x = full(n)
        side.wait_stream(torch.cuda.current_stream())
        lane.wait_stream(side)
        with torch.cuda.stream(lane):
            x.mul_(3)
        side.wait_stream(lane)
        if mended:
            torch.cuda.current_stream().wait_stream(side)
        del x
        y = full(-n)
        torch.cuda.current_stream().wait_stream(lane)
        del y

    return step


def event_recorded_too_early(mended: bool) -> Any:
    x, out, side, event = full(0), full(0), stream(), torch.cuda.Event()

    def step(n: int) -> None:
        if not mended:
            event.record()
        x.fill_(n)
        if mended:
            event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            out.copy_(x)
        torch.cuda.current_stream().wait_stream(side)

    return step


def pinned_buffer_refilled(mended: bool) -> Any:
    pinned, out, side = torch.empty(SIZE, pin_memory=True), full(0), stream()
    batches = [torch.full((SIZE,), float(i)) for i in range(2)]

    def step(n: int) -> None:
        for batch in batches:
            pinned.copy_(batch)
            with torch.cuda.stream(side):
                out.copy_(pinned, non_blocking=True)
            if mended:
                side.synchronize()
        side.synchronize()

    return step


def pinned_buffer_refilled_unless_an_event_says_done(mended: bool) -> Any:
    pinned, out, side, done = torch.empty(SIZE, pin_memory=True), full(0), stream(), torch.cuda.Event()
    batches = [torch.full((SIZE,), float(i)) for i in range(2)]

    def step(n: int) -> None:
        for batch in batches:
            pinned.copy_(batch)
            with torch.cuda.stream(side):
                out.copy_(pinned, non_blocking=True)
                done.record()
            while mended and not done.query():
                pass
        side.synchronize()

    return step


def optimizer_against_the_next_gather(mended: bool) -> Any:
    shard, whole, side = full(1), full(0, 2 * SIZE), stream()

    def step(n: int) -> None:
        shard.mul_(1.5)
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            dist.all_gather_into_tensor(whole, shard)
        torch.cuda.current_stream().wait_stream(side)

    return step


def slice_by_another_pointer(mended: bool) -> Any:
    whole, side, out = full(0), stream(), full(0, 1024)

    def step(n: int) -> None:
        whole.fill_(n)
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out.copy_(whole[4096 : 4096 + 1024])
        torch.cuda.current_stream().wait_stream(side)

    return step


def captured_graph_against_an_eager_writer(mended: bool) -> Any:
    static, side = full(0), stream()
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.mul(2)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = static.mul(2)
    keep = [result]

    def step(n: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            static.fill_(n)
        if mended:
            torch.cuda.current_stream().wait_stream(side)
        graph.replay()
        torch.cuda.current_stream().wait_stream(side)
        keep[0] = result

    return step


def kernel_on_a_side_stream(mended: bool) -> Any:
    import triton_kernels

    x, side = full(0), stream()

    def step(n: int) -> None:
        x.fill_(n)
        if mended:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            triton_kernels.doubled(x)
        torch.cuda.current_stream().wait_stream(side)

    return step


def checkpoint_against_the_optimizer(mended: bool) -> Any:
    weight, side, pinned = full(1), stream(), torch.empty(SIZE, pin_memory=True)

    def step(n: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            pinned.copy_(weight, non_blocking=True)
        if mended:
            torch.cuda.current_stream().wait_stream(side)
        weight.mul_(1.5)
        torch.cuda.current_stream().wait_stream(side)

    return step


def loader_without_record_stream(mended: bool) -> Any:
    side, pinned = stream(), torch.ones(SIZE, pin_memory=True)

    def batch() -> Tensor:
        with torch.cuda.stream(side):
            return pinned.to("cuda", non_blocking=True)

    def step(n: int) -> None:
        for _ in range(2):
            x = batch()
            torch.cuda.current_stream().wait_stream(side)
            x.mul_(2).sum()
            if mended:
                x.record_stream(torch.cuda.current_stream())
            del x
        side.wait_stream(torch.cuda.current_stream())

    return step


def work_dropped(mended: bool) -> Any:
    x = full(1)

    def step(n: int) -> None:
        x.fill_(n)
        work = dist.all_reduce(x, async_op=True)
        if mended:
            work.wait()
        x.mul_(0.5)
        work.wait()

    return step


def stream_cached_at_construction(mended: bool) -> Any:
    cached, user, lane, x = torch.cuda.current_stream(), stream(), stream(), full(0)

    def step(n: int) -> None:
        user.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(user):
            x.fill_(n)
            lane.wait_stream(torch.cuda.current_stream() if mended else cached)
            with torch.cuda.stream(lane):
                dist.all_reduce(x)
        torch.cuda.current_stream().wait_stream(user)
        torch.cuda.current_stream().wait_stream(lane)

    return step


def batched_receive_read_before_its_wait(mended: bool) -> Any:
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    x, out = full(0), full(0)

    def step(n: int) -> None:
        x.fill_(n)
        out.zero_()
        operations = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]
        works = dist.batch_isend_irecv(operations)
        if mended:
            for work in works:
                work.wait()
        out.sum()
        for work in works:
            work.wait()

    return step


CASES = [
    collective_before_its_input, output_before_wait, freed_under_copy, freed_under_copy_without_pressure,
    bucket_refilled_while_reduced, bucket_of_two_streams, hybrid_output_freed_on_its_stream, waits_for_itself,
    clone_after_the_snapshot, freed_after_another_streams_wait, event_recorded_too_early,
    pinned_buffer_refilled, optimizer_against_the_next_gather, slice_by_another_pointer,
    captured_graph_against_an_eager_writer, kernel_on_a_side_stream, checkpoint_against_the_optimizer,
    loader_without_record_stream, work_dropped, stream_cached_at_construction,
    batched_receive_read_before_its_wait, pinned_buffer_refilled_unless_an_event_says_done,
]  # fmt: skip


class Folder:
    """The part of a recorder that the check needs."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir, self.rank, self.world_size = output_dir, dist.get_rank(), dist.get_world_size()


def ours(case: Any, is_mended: bool, folder: Path) -> Any:
    """Findings of the check for some steps of a case."""
    from aorta.check.watch import HazardWatch

    watch = HazardWatch(every=1000)
    watch.opened(Folder(folder))  # type: ignore[arg-type]
    step = case(is_mended)
    for n in range(STEPS):
        watch.step_begins(n)
        step(n + 1)
    watch.closing(None)
    torch.cuda.synchronize()
    return watch.checked.findings


def of_csan(step: Any) -> int:
    """Findings of torch's own sanitizer for the same steps; it raises at the first one."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    num = 0
    with contextlib.redirect_stderr(io.StringIO()), CUDASanitizerDispatchMode():
        for n in range(4):
            try:
                step(n + 1)
            except Exception:
                num += 1
    torch.cuda.synchronize()
    return num


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--csan", action="store_true")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in CASES:
        if arguments.only and arguments.only not in case.__name__:
            continue
        row: dict[str, Any] = {"case": case.__name__}
        for form in ("bad", "mended"):
            began = time.perf_counter()
            try:
                dist.barrier()
                if arguments.csan:
                    row[form] = of_csan(case(form == "mended"))
                else:
                    folder = arguments.output / case.__name__ / form
                    folder.mkdir(parents=True, exist_ok=True)
                    found = ours(case, form == "mended", folder)
                    row[form] = "; ".join(
                        f"{f.kind} {f.status} x{f.count} {f.later.stream}<-{f.earlier.stream}" for f in found
                    )
                    row[f"{form}_reason"] = "; ".join(f.reason for f in found)
            except Exception as error:
                row[form] = f"failed: {type(error).__name__}: {error}"
            row[f"{form}_s"] = round(time.perf_counter() - began, 2)
        rows.append(row)
        if dist.get_rank() == 0:
            print(
                f"{row['case']:45} bad: {row['bad'] or 'MISSED'} | mended: {row['mended'] or 'clean'}",
                flush=True,
            )
    if dist.get_rank() == 0:
        name = "cases_csan.csv" if arguments.csan else "cases.csv"
        with (arguments.output / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
