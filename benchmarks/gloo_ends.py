"""What seeing the ends of asynchronous gloo calls costs the launching thread, and how exact the ends are.

    torchrun --standalone --nproc_per_node 2 benchmarks/gloo_ends.py --output gloo_ends.json

Cost: blocks of collectives with the recorder on and paused take turns, in one process per rank. `functional`:
reduce-scatter and all-gather, each waited for by what uses it; `overlapped`: all-reduces, a matrix product
after each, then the waits. Exactness: all-reduces that end while the step's thread computes; the end in the
record less the time at which a callback on the work's future was called, which is late itself where the
interpreter lock is held. Set PYTHONPATH to the code to be measured.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import aorta

BLOCK = 20
REST_S = 0.05
"""After each block: the thread that makes lines of the steps is done with them."""
TENSOR = torch.ones(256, 16)
MATRIX = torch.ones(160, 160)


def functional_calls() -> int:
    for _ in range(BLOCK // 2):
        part = functional.reduce_scatter_tensor(TENSOR, "sum", 0, dist.group.WORLD)
        functional.all_gather_tensor(part, 0, dist.group.WORLD) + 1
    return BLOCK


def overlapped_calls() -> int:
    works: list[Any] = []
    for _ in range(BLOCK):
        works.append(dist.all_reduce(TENSOR.clone(), async_op=True))
        MATRIX @ MATRIX
    for work in works:
        work.wait()
    return BLOCK


def cost(recorder: Any, calls: Callable[[], int], blocks: int) -> dict[str, float]:
    """Microseconds per collective: of the launching thread's time the lower quartile over the blocks, which
    other jobs of the machine disturb least; of CPU time the median, of this thread and of all others."""
    times: dict[str, dict[str, list[float]]] = {
        kind: {"wall": [], "launching": [], "others": []} for kind in ("recorded", "paused")
    }
    for block in range(2 * blocks):
        kind = "paused" if block % 2 else "recorded"
        if kind == "paused":
            recorder.pause()
        dist.barrier()
        with recorder.step() if kind == "recorded" else contextlib.nullcontext():
            start, process_start, thread_start = time.perf_counter(), time.process_time(), time.thread_time()
            num = calls()
            wall = time.perf_counter() - start
            launching = time.thread_time() - thread_start
            others = time.process_time() - process_start - launching
        for name, seconds in (("wall", wall), ("launching", launching), ("others", others)):
            times[kind][name].append(seconds / num * 1e6)
        if kind == "paused":
            recorder.resume()
        time.sleep(REST_S)
    recorded, paused = times["recorded"], times["paused"]
    quarter = {kind: sorted(times[kind]["wall"])[blocks // 4] for kind in times}
    return {
        "recorded_us": quarter["recorded"],
        "paused_us": quarter["paused"],
        "added_us": quarter["recorded"] - quarter["paused"],
        "added_cpu_us": statistics.median(recorded["launching"]) - statistics.median(paused["launching"]),
        "added_cpu_of_others_us": statistics.median(recorded["others"]) - statistics.median(paused["others"]),
    }


def exactness(recorder: Any, calls: int) -> dict[str, float]:
    differences_us: list[float] = []
    large = torch.ones(1 << 20)
    for _ in range(calls):
        called: list[int] = []
        with recorder.step():
            work = dist.all_reduce(large, async_op=True)
            work._inner.get_future().add_done_callback(
                lambda _, called=called: called.append(time.monotonic_ns())
            )
            until = time.perf_counter() + 0.02
            while time.perf_counter() < until:
                MATRIX @ MATRIX
            call = work.call
            work.wait()
        if called and call.end is not None:
            differences_us.append((call.end.host_ns - called[0]) / 1e3)
    differences_us.sort()
    ordered = sorted(map(abs, differences_us))
    return {
        "calls": len(differences_us),
        "median_us": statistics.median(differences_us),
        "median_distance_us": statistics.median(ordered),
        "p90_distance_us": ordered[len(ordered) * 9 // 10],
        "largest_distance_us": ordered[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        aorta.instrument(f"{folder}/records") as recorder,
    ):
        result = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "ranks": dist.get_world_size(),
            "functional": cost(recorder, functional_calls, options.blocks),
            "overlapped": cost(recorder, overlapped_calls, options.blocks),
            "exactness": exactness(recorder, options.calls),
        }
    if dist.get_rank() == 0:
        print(json.dumps(result))
        if options.output is not None:
            options.output.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
