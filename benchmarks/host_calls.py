"""What single calls of the instrument and of the driver cost the host, warm and after the caches were swept.

    python benchmarks/host_calls.py --output host_calls.json      # one GPU

Sweeping reads and writes 32 MB, about what a model does between two collectives. In a step of training the
truth lies between the two columns.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from cases import environment

from aorta.device.backend import accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("host_calls.py: needs a GPU")
    swept = torch.zeros(8 << 20)
    rows = {}
    for name, call in calls().items():
        rows[name] = {"warm_us": warm_us(call), "swept_us": swept_us(call, swept)}
        print(
            f"{name:24s} {rows[name]['warm_us']:6.2f} us   swept {rows[name]['swept_us']:6.2f} us", flush=True
        )
    if options.output is not None:
        document = environment() | {"calls": rows}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def calls() -> dict[str, Callable[[], Any]]:
    torch.cuda.init()
    index = torch.cuda.current_device()
    stream, event = torch.cuda.current_stream(), torch.cuda.Event(enable_timing=True)
    other = torch.cuda.Stream().record_event()
    event.record()
    torch.cuda.synchronize()
    devices = accelerator()
    clock, own = devices.clock(devices.current_device()), devices.current_stream(index).stream
    base: Any = torch._C._CudaEventBase
    small = torch.ones(8, device="cuda")

    def mark() -> None:
        clock.recycle([clock.mark(own)])

    return {
        "nothing": lambda: None,
        "event record": lambda: base.record(event, stream),
        "event query": lambda: base.query(event),
        "stream waits for event": lambda: base.wait(other, stream),
        "is capturing": devices.is_capturing,
        "current raw stream": lambda: devices.current_raw_stream(index),
        "mark, recycled": mark,
        "memory statistics": lambda: torch._C._cuda_memoryStats(index),
        "launch of a small kernel": lambda: small.add_(1),
    }


def warm_us(call: Callable[[], Any], num: int = 300) -> float:
    times = []
    for _ in range(5):
        call()
        torch.cuda.synchronize()
        start_ns = time.perf_counter_ns()
        for _ in range(num):
            call()
        times.append((time.perf_counter_ns() - start_ns) / num / 1e3)
    return median(times)


def swept_us(call: Callable[[], Any], swept: torch.Tensor, num: int = 25) -> float:
    times = []
    for _ in range(num):
        swept.add_(1)
        start_ns = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start_ns) / 1e3)
    torch.cuda.synchronize()
    return median(times)


if __name__ == "__main__":
    main()
