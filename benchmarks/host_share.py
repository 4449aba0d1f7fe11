"""Host time per step that is spent in the instrument's own functions, by function.

    torchrun --nproc_per_node 2 benchmarks/host_share.py --cases fsdp_short tp --output host_share.json

Each function is timed where it runs, in the middle of training, so with the caches that the model leaves it.
A call of another listed function within it is in both. `launch` is the backend's own part of `observe`. What
the timing itself takes (about 0.2 us per call), what entering Python from the dispatcher takes, and what the
model's own code loses because the instrument's has displaced it from the caches, is in none of them:
benchmarks/overhead.py has the whole.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, environment, process_group

import aorta
from aorta.recording.handles import StepHandle

WARM_STEPS, STEPS = 8, 30


class Spent:
    """Time and number of calls by label."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.num: Counter[str] = Counter()

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            start_ns = time.perf_counter_ns()
            try:
                return function(*args, **named)
            finally:
                self.ns[label] += time.perf_counter_ns() - start_ns
                self.num[label] += 1

        return call

    def per_step(self, num_steps: int) -> dict[str, dict[str, float]]:
        return {
            label: {"us": ns / 1e3 / num_steps, "calls": self.num[label] / num_steps}
            for label, ns in self.ns.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["fsdp_short", "tp"], choices=list(CASES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("host_share.py: needs a GPU per rank")
    results = []
    with process_group() as device:
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            result = {"case": name, **measure(job)}
            results.append(result)
            if dist.get_rank() == 0:
                show(result)
            job.close()
        if dist.get_rank() == 0 and options.output is not None:
            document = environment() | {"world_size": dist.get_world_size(), "rank": 0, "results": results}
            options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def measure(job: Job) -> dict[str, Any]:
    spent = Spent()
    with tempfile.TemporaryDirectory() as folder:
        recorder: Any = aorta.instrument(folder)
        log = StepHandle.log
        with recorder:
            for _ in range(WARM_STEPS):
                job.step(recorder)
            recorder.pause()
            watch(recorder, spent)
            recorder.resume()
            originals = watch_waits(spent)
            for _ in range(WARM_STEPS):
                job.step(recorder)
            torch.cuda.synchronize()
            spent.ns.clear()
            spent.num.clear()
            start = time.perf_counter()
            for _ in range(STEPS):
                job.step(recorder)
            torch.cuda.synchronize()
            step_ms = (time.perf_counter() - start) / STEPS * 1e3
            torch.cuda.Event.wait, torch.cuda.Stream.wait_event = originals  # type: ignore[method-assign]
            StepHandle.log = log  # type: ignore[method-assign]
            time.sleep(0.3)  # the last steps are read meanwhile
    return {"step_ms": step_ms, "per_step": spent.per_step(STEPS)}


def watch(recorder: Any, spent: Spent) -> None:
    """Time the recorder's functions. While it is paused: what it installs refers to them."""
    observer = recorder._event_observer
    observe = spent.timed("observe", observer.observe)

    def with_launch(
        group: Any, op: str, tensors: Any, num_bytes: int, dtype: str, is_async: bool, launch: Any, *peer: Any
    ) -> Any:
        launch = spent.timed("launch", launch)
        return observe(group, op, tensors, num_bytes, dtype, is_async, launch, *peer)

    observer.observe = with_launch
    observer.wait = spent.timed("wait for a work", observer.wait)
    recorder._clock.mark = spent.timed("mark", recorder._clock.mark)
    recorder._open = spent.timed("step starts", recorder._open)
    recorder._end_body = spent.timed("step ends", recorder._end_body)
    recorder._keep = spent.timed("step is kept (in: step starts)", recorder._keep)
    recorder._kernels.mark = spent.timed("mark among kernels", recorder._kernels.mark)
    names = recorder._module_names
    names.begin_step = spent.timed("names (in: step starts)", names.begin_step)
    names.end_body = spent.timed("names (in: step ends)", names.end_body)
    recorder._memory_of = spent.timed("memory (in: step ends)", recorder._memory_of)
    StepHandle.log = spent.timed("log", StepHandle.log)  # type: ignore[method-assign]
    extractor = recorder._writer._extractor
    extractor.ready = spent.timed("ready (other thread)", extractor.ready)
    extractor.extract = spent.timed("extract (other thread)", extractor.extract)


def watch_waits(spent: Spent) -> tuple[Any, Any]:
    originals = torch.cuda.Event.wait, torch.cuda.Stream.wait_event
    torch.cuda.Event.wait = spent.timed("wait of a stream", originals[0])  # type: ignore[method-assign]
    torch.cuda.Stream.wait_event = spent.timed("wait of a stream", originals[1])  # type: ignore[method-assign]
    return originals


def show(result: dict[str, Any]) -> None:
    print(f"{result['case']}   step {result['step_ms']:.1f} ms", flush=True)
    for label, row in sorted(result["per_step"].items()):
        each = row["us"] / row["calls"] if row["calls"] else 0.0
        print(
            f"  {label:24s} {row['us']:8.1f} us   {row['calls']:6.1f} calls, {each:5.1f} us each", flush=True
        )


if __name__ == "__main__":
    main()
