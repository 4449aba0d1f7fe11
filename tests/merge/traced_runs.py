"""A run's records beside a trace of its kernels, both made by hand."""

import json
from pathlib import Path
from typing import Any

import msgspec

from aorta.records.files import steps_name
from aorta.records.writer import LineWriter, write_json
from aorta.steps.event_steps import EventSteps
from aorta.steps.notes import ResolverSettings
from tests.records.plain_records import run as plain_run
from tests.steps.event_marks import Made

STEP_MS = 10
ROUNDED_MS = 1e-3
"""Kineto gives µs as floats, which are good to 0.25 µs in this century."""
EPOCH_NS = 1_800_000_000_000_000_000
"""Device ms 0, in Unix time."""


def write_records(folder: Path, num_steps: int, detail_every: int = 1) -> None:
    """Steps of 10 ms; each all-reduces from 2 to 6 (hidden to 4, then waited for)."""
    settings = ResolverSettings(
        rank=0,
        world_size=2,
        on_device=True,
        clock_lower_ns=0,
        clock_upper_ns=0,
        unix_minus_monotonic_ns=EPOCH_NS,
    )
    event_steps = EventSteps(settings)
    with LineWriter.create(folder / steps_name(0)) as writer:
        for number in range(num_steps):
            step = Made(STEP_MS, STEP_MS, number=number, origin=STEP_MS * number)
            call = step.call("all_reduce", 2, 6, is_async=True)
            step.wait(4, call)
            raw = msgspec.structs.replace(step.noted(), is_detailed=number % detail_every == 0)
            writer.write(event_steps.resolve(raw))
    write_json(folder / "run.json", plain_run(world_size=2))


def write_trace(path: Path, num_steps: int, extra_kernel: bool = False) -> Path:
    """The same steps as kernels: compute 0 to 4 and 6 to 10 on stream 7, NCCL 2.4 to 6 on stream 20."""
    events: list[dict[str, Any]] = []

    def at(ms: float) -> float:
        return EPOCH_NS / 1e3 + ms * 1e3

    def kernel(name: str, start: float, end: float, stream: int, launch: float) -> None:
        number = len(events)
        common = {"ph": "X", "pid": 1, "tid": 1}
        events.append(
            common
            | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at(launch), "dur": 5}
            | {"args": {"correlation": number}}
        )
        events.append(
            {"ph": "X", "pid": 0, "tid": stream, "cat": "kernel", "name": name, "ts": at(start)}
            | {"dur": (end - start) * 1e3, "args": {"correlation": number, "stream": stream, "device": 0}}
        )

    for step in range(num_steps):
        origin = STEP_MS * step
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"aorta.step#{step}", "pid": 1, "tid": 1}
            | {"ts": at(origin), "dur": 9900}
        )
        kernel("gemm", origin, origin + 4, 7, origin + 0.01)
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", origin + 2.4, origin + 6, 20, origin + 0.02)
        kernel("gemm", origin + 6, origin + 10, 7, origin + 0.03)
        if extra_kernel and step == 1:
            kernel("ncclDevKernel_AllGather_RING_LL", origin + 7, origin + 8, 21, origin + 0.04)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path
