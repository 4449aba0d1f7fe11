"""What does recording cost? In a step, measured in turn in one process, and on the host.

    torchrun --nproc_per_node 2 benchmarks/cost.py --pin --together --output cost.csv      # GPUs, 10 min
    python benchmarks/cost.py collective      # on a CPU: a collective of a group that does nothing, 1 min
    python benchmarks/cost.py attach          # `aorta run` on a process, 3 min
    python benchmarks/cost.py help            # `--help` of every command, 2 min
    python benchmarks/cost.py trees OLD NEW   # imports and a step in two trees of this project, 5 min

Steps: pairs of blocks, with and without, in an order that changes from pair to pair: the instrument (both
placements; it is paused for the blocks without), torch.profiler, and a device synchronisation per step.
A block is a number of steps between two device synchronisations, its time the slowest rank's. What
starting the instrument or the profiler costs (a process, a first sample of the device's sensors, the
making of events) is paid once in a run and comes before the first block. With --pin the two threads that
queue work for the device (the script's and the autograd engine's) have a core each to themselves, and the
process's other threads and its children share the rest: without it the scheduler moves them about, and steps
that are bound by the host scatter by 10 % over tenths of a second. Printed: the median over pairs of block
with / block without, with a bootstrap interval; peak memory likewise. With --together all variants of a case
take turns with two blocks without, whose mean is what each is compared with, and the ratio of the two is
printed too: what the method makes of nothing. Garbage is collected before the first block, and what is left
is frozen, so that a full collection, which takes as long as a step, falls into no block.
"""

import argparse
import gc
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, pin_threads, process_group
from harness import arguments, choose, median_interval, part_of, write
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.record import sending as numbers

CASE_NAMES = ("fsdp", "fsdp_short", "tp", "ddp")
WARM_STEPS = 6
SWITCH_STEPS = 2
EVENTS_POLL_S, NEVER_S = numbers.POLL_S, 3600.0
EVENTS = ("events", "events_dedicated")
"""Variants without kernel records."""
RECORDS = "records"
"""Kernel records alone: no step is entered, so no collective is noted and no line written."""
VARIANTS = ("native", "dedicated", RECORDS, *EVENTS, "profiler", "synchronise")
USUAL = ("native", "dedicated", "events", "profiler", "synchronise")


def steps() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASE_NAMES), choices=list(CASES))
    parser.add_argument("--variants", nargs="+", default=list(USUAL), choices=VARIANTS)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4, help="steps in a block")
    parser.add_argument("--settle", type=int, default=SWITCH_STEPS, help="steps before a block, of its kind")
    parser.add_argument("--together", action="store_true", help="all variants against the same blocks")
    parser.add_argument("--seconds", type=float, nargs="*", default=[], help="--together: per case, at most")
    parser.add_argument(
        "--one-thread",
        action="store_true",
        help="backward passes on the script's thread; its CPU time is compared",
    )
    parser.add_argument("--pin", action="store_true", help="give the threads that launch cores of their own")
    options = parser.parse_args()
    rows = step_cost(options)
    if rows is not None:
        write(options.output, rows)


def show(result: dict[str, Any]) -> None:
    ratio = result["step_ratio_to_without"]
    low, high = ratio["interval"]
    cpu = result.get("cpu_ratio_to_without")
    cpu_text = "  CPU {:.4f} [{:.4f}, {:.4f}]".format(cpu["median"], *cpu["interval"]) if cpu else ""
    print(
        f"{result['case']:11s} {result['variant']:11s} {np.median(result['step_ms_without']):7.2f} ms  "
        f"with/without {ratio['median']:.4f} [{low:.4f}, {high:.4f}]  "
        f"peak memory {result['peak_memory_ratio_to_without']:.4f}{cpu_text}",
        flush=True,
    )


def step_cost(options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Rows of all cases and variants on rank 0, None on the others."""
    results: list[dict[str, Any]] = []
    torch.autograd.set_multithreading_enabled(not options.one_thread)
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        for place, name in enumerate(options.cases):
            job = Job(config_of(CASES[name]), device)
            for _ in range(WARM_STEPS):
                job.step()
            if options.together:
                limit_s = options.seconds[place] if place < len(options.seconds) else 1e9
                found = compare_together(job, options, limit_s, Path(folder) / name)
                results += [{"case": name} | one for one in found]
                if dist.get_rank() == 0:
                    for one in results[-len(found) :]:
                        show(one)
            for name_of_variant in [] if options.together else options.variants:
                result = {"case": name, "variant": name_of_variant}
                result |= compare(job, name_of_variant, options, Path(folder))
                results.append(result)
                if dist.get_rank() == 0:
                    show(result)
            job.close()
        return results if dist.get_rank() == 0 else None


def compare(job: Job, variant: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Pairs of blocks of the job with and without the variant."""
    blocks: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    order = random.Random(0)
    with subject_of(job, variant, folder) as subject:
        settle(subject)
        if options.pin:
            pin_threads()
        gc.collect()
        gc.freeze()
        for _ in range(options.pairs):
            for with_it in order.sample((False, True), 2):
                subject.switch(with_it)
                blocks[with_it].append(block(subject, options.steps, options.settle))
        gc.unfreeze()
    off, on = np.array(blocks[False]), np.array(blocks[True])
    return {
        "step_ms_without": off[:, 0].tolist(),
        "step_ms_with": on[:, 0].tolist(),
        "step_ratio_to_without": interval(on[:, 0] / off[:, 0]),
        "peak_memory_ratio_to_without": float(np.median(on[:, 1] / off[:, 1])),
    }


def compare_together(
    job: Job, options: argparse.Namespace, limit_s: float, folder: Path
) -> list[dict[str, Any]]:
    """Rounds of one block of each variant and two without, in an order that changes from round to round."""
    kinds = ["without", "without again", *options.variants]
    blocks: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    order = random.Random(0)
    with ExitStack() as stack:
        subjects = {}
        for variant in options.variants:
            subjects[variant] = stack.enter_context(subject_of(job, variant, folder / variant))
            settle(subjects[variant])
            subjects[variant].switch(False)
        if options.pin:
            pin_threads()
        gc.collect()
        gc.freeze()
        idle, start = Subject(job), time.perf_counter()
        for _ in range(options.pairs):
            if not agreed(time.perf_counter() - start < limit_s):
                break
            for kind in order.sample(kinds, len(kinds)):
                subject = subjects.get(kind, idle)
                subject.switch(True)
                blocks[kind].append(block(subject, options.steps, options.settle))
                subject.switch(False)
        gc.unfreeze()
    without = [np.array(blocks[kind]) for kind in kinds[:2]]
    base = (without[0] + without[1]) / 2
    return [
        {
            "variant": kind,
            "step_ms_without": base[:, 0].tolist() if kind in subjects else without[0][:, 0].tolist(),
            "step_ms_with": np.array(blocks[kind])[:, 0].tolist(),
            "step_ratio_to_without": interval(
                np.array(blocks[kind])[:, 0] / (base if kind in subjects else without[0])[:, 0]
            ),
            "peak_memory_ratio_to_without": float(np.median(np.array(blocks[kind])[:, 1] / base[:, 1])),
            "cpu_ms_with": np.array(blocks[kind])[:, 2].tolist(),
            "cpu_ratio_to_without": interval(
                np.array(blocks[kind])[:, 2] / (base if kind in subjects else without[0])[:, 2]
            )
            if options.one_thread
            else None,
        }
        for kind in kinds[1:]
    ]


def agreed(go_on: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    answer = [go_on]
    dist.broadcast_object_list(answer)
    return answer[0]


def subject_of(job: Job, variant: str, folder: Path) -> "Subject":
    if variant == "profiler":
        return Profiler(job)
    if variant == "synchronise":
        return Synchronise(job)
    return Instrument(job, folder, variant)


class Subject:
    """A job that can be stepped with and without something. This one has nothing."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.on = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def switch(self, on: bool) -> None:
        """Turn it on or off for the steps from now on."""
        self.on = on

    def step(self) -> None:
        self.job.step()


class Instrument(Subject):
    def __init__(self, job: Job, folder: Path, variant: str) -> None:
        super().__init__(job)
        self.variant = variant
        self.opened = False
        placement: Any = "dedicated" if variant.endswith("dedicated") else "native"
        kernels: Any = "off" if variant in EVENTS else "on"
        self.recorder: Any = aorta.instrument(
            folder / "records", placement=placement, overhead="off", kernels=kernels
        )

    def __enter__(self) -> Self:
        self.recorder.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.switch(False)
        self.recorder.close()

    def switch(self, on: bool) -> None:
        super().switch(on)
        # A recorder that is paused goes on looking for records; here nobody is to be woken by it.
        numbers.POLL_S = EVENTS_POLL_S if on else NEVER_S
        if on:
            self.recorder.resume()
            if self.recorder._output is not None:
                self.recorder._output.wake()
        else:
            self.recorder.pause()

    def step(self) -> None:
        noted = self.on and not (self.variant == RECORDS and self.opened)
        self.opened = self.opened or self.on  # the device is found at the first step
        self.job.step(self.recorder if noted else None)


class Profiler(Subject):
    """torch.profiler with its defaults."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.on = False
        self.profiler: Any = None

    def __exit__(self, *_: object) -> None:
        self.switch(False)

    def switch(self, on: bool) -> None:
        super().switch(on)
        if on and self.profiler is None:
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.profiler.start()
        elif not on and self.profiler is not None:
            self.profiler.stop()
            self.profiler = None


class Synchronise(Subject):
    def step(self) -> None:
        self.job.step()
        if self.on:
            synchronise()


def settle(subject: Subject) -> None:
    subject.switch(True)
    for _ in range(WARM_STEPS):
        subject.step()
    synchronise()
    time.sleep(0.3)


def block(subject: Subject, num_steps: int, settling_steps: int) -> tuple[float, ...]:
    """(ms per step of the slowest rank, peak bytes, ms of CPU of this rank's script per step)."""
    for _ in range(settling_steps):  # of this kind: what the switch left cold
        subject.step()
    synchronise()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start, start_cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_steps):
        subject.step()
    cpu_ms = (time.thread_time() - start_cpu) * 1e3 / num_steps
    synchronise()
    step_ms = (time.perf_counter() - start) * 1e3 / num_steps
    peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 1
    slowest = torch.tensor([step_ms], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest), float(peak_bytes), cpu_ms


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interval(values: Any) -> dict[str, Any]:
    """Median and its 95 % bootstrap interval."""
    median, low, high = median_interval(values)
    return {"median": median, "interval": [low, high]}


if __name__ == "__main__":
    parts = {
        "steps": steps,
        "collective": part_of("cost_host", "collective"),
        "attach": part_of("cost_host", "attach"),
        "help": part_of("cost_host", "help_of_commands"),
        "trees": part_of("cost_host", "trees"),
    }
    raise SystemExit(choose(__doc__, parts))
