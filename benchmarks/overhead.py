"""What the instrument costs, interleaved in one process.

    torchrun --nproc_per_node 2 benchmarks/overhead.py --output overhead.json
    python benchmarks/overhead.py --host-cost                 # no GPU: a fake process group

Rounds of blocks: without, with the instrument (both placements), with torch.profiler, and with a
device synchronisation per step, in an order that changes every round. A block is a number of
steps between two device synchronisations, its time the slowest rank's. Every block begins with
untimed steps and a pause: what starting the instrument or the profiler costs (a process, a first
sample of the device's sensors, the making of events) is paid once in a run, not in every step.
Printed: the median over rounds of block / block without of the same round, with a bootstrap
interval; peak memory likewise.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, environment, process_group
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.recording import Recorder

CASE_NAMES = ("fsdp", "fsdp_short", "tp", "ddp")
WARM_STEPS = 6
VARIANTS = ("off", "native", "dedicated", "profiler", "synchronise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASE_NAMES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help="steps in a block")
    parser.add_argument("--host-cost", action="store_true", help="cost of a collective with a fake group")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result = host_cost() if options.host_cost else step_cost(options)
    if result is not None and options.output is not None:
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(environment() | result), indent=1))


def step_cost(options: argparse.Namespace) -> dict[str, Any] | None:
    results = []
    with process_group() as device, tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            block(job, "off", 5, Path(folder))
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            memory: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            shuffle = random.Random(0)
            for _ in range(options.rounds):
                for variant in shuffle.sample(VARIANTS, len(VARIANTS)):
                    step_ms, peak_bytes = block(job, variant, options.steps, Path(folder))
                    times[variant].append(step_ms)
                    memory[variant].append(peak_bytes)
            job.close()
            result = {"case": name, "step_ms": times, "peak_bytes": memory, "ratio_to_off": {}}
            for variant in VARIANTS[1:]:
                ratio = np.array(times[variant]) / np.array(times["off"])
                peak = np.array(memory[variant]) / np.array(memory["off"])
                result["ratio_to_off"][variant] = interval(ratio) | {"peak_memory": float(np.median(peak))}
            results.append(result)
            if dist.get_rank() == 0:
                show(result)
        return {"world_size": dist.get_world_size(), "results": results} if dist.get_rank() == 0 else None


def block(job: Job, variant: str, num_steps: int, folder: Path) -> tuple[float, float]:
    """(ms per step of the slowest rank, peak bytes of this rank)."""
    on_cuda = torch.cuda.is_available()

    def settle(recorder: Recorder | None = None) -> None:
        for _ in range(WARM_STEPS):
            job.step(recorder)
        synchronise()
        time.sleep(0.3)

    def timed(body: Callable[[], None]) -> float:
        synchronise()
        dist.barrier()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        body()
        synchronise()
        return (time.perf_counter() - start) * 1e3 / num_steps

    def plain() -> None:
        for _ in range(num_steps):
            job.step()
            if variant == "synchronise":
                synchronise()

    if variant in ("native", "dedicated"):
        with aorta.instrument(folder / "records", placement=variant) as recorder:  # type: ignore[arg-type]
            settle(recorder)

            def recorded() -> None:
                for _ in range(num_steps):
                    job.step(recorder)

            step_ms = timed(recorded)
            peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else 0
    elif variant == "profiler":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            settle()
            step_ms = timed(plain)
            peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else 0
    else:
        settle()
        step_ms = timed(plain)
        peak_bytes = torch.cuda.max_memory_allocated() if on_cuda else 0
    slowest = torch.tensor([step_ms], device="cuda" if on_cuda else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest), float(peak_bytes or 1)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interval(values: Any) -> dict[str, Any]:
    """Median and its 95 % bootstrap interval."""
    draws = np.random.default_rng(0).choice(values, (4000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "interval": [float(low), float(high)]}


def show(result: dict[str, Any]) -> None:
    print(f"{result['case']}: off {np.median(result['step_ms']['off']):.2f} ms per step", flush=True)
    for variant, ratio in result["ratio_to_off"].items():
        low, high = ratio["interval"]
        print(
            f"  {variant:11s} {ratio['median']:.4f} of off  [{low:.4f}, {high:.4f}]   "
            f"peak memory {ratio['peak_memory']:.4f} of off",
            flush=True,
        )


def host_cost() -> dict[str, Any]:
    """Host microseconds that a collective costs more with the instrument, on a group that does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", WORLD_SIZE="2")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor, gathered = torch.ones(1024), torch.ones(2048)
    # torch 2.13 renamed it; the old name warns there.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce async": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "all_gather_into_tensor": lambda: all_gather(gathered, tensor),
    }

    def us_per_call(call: Callable[[], Any], num: int = 200) -> float:
        start = time.perf_counter()
        for _ in range(num):
            call()
        return (time.perf_counter() - start) / num * 1e6

    costs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, call in calls.items():
            us_per_call(call, 2000)
            added = []
            for _ in range(40):
                off = us_per_call(call)
                with aorta.instrument(folder) as recorder, recorder.step():
                    us_per_call(call, 20)
                    added.append(us_per_call(call) - off)
            costs[name] = interval(np.array(added))
            low, high = costs[name]["interval"]
            print(f"{name:24s} +{costs[name]['median']:.1f} us per call [{low:.1f}, {high:.1f}]")
    dist.destroy_process_group()
    return {"added_host_us_per_collective": costs}


if __name__ == "__main__":
    main()
