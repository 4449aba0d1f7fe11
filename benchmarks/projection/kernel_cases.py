"""Timing of single kernels, and the loop over cases that every sheet of them shares."""

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from harness import write

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
Case = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""What a row says of itself, and what measures the rest of it."""


def median_ms(call: Callable[[], Any], at_most_s: float = 0.25) -> tuple[float, int]:
    """Median of three batches, each event-timed over as many calls as fit."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    one = time.perf_counter() - begin
    iters = max(3, min(50, int(at_most_s / 3 / max(one, 1e-5))))
    return statistics.median(batch_ms(call, iters) for _ in range(3)), iters


def batch_ms(call: Callable[[], Any], iters: int) -> float:
    """Time of one call by the device's clock, from a batch of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(iters):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / iters


def host_us(call: Callable[[], Any], iters: int = 20) -> float:
    """Host time of one call, the device far behind."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(iters):
        call()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    return seconds / iters * 1e6


def measure(cases: Iterable[Case], output: Path | None, seconds: float, speaks: bool = True) -> None:
    """Run the cases in order, print a line a case, and write the table; no case begins after `seconds`.

    A case that fails says how in its row and spares the others. speaks: False for all ranks but one.
    """
    began_s = time.monotonic()
    rows: list[dict[str, Any]] = []
    for case, run in cases:
        if time.monotonic() - began_s > seconds:
            rows.append(case | {"not_run": f"{seconds:g} s were over"})
            continue
        try:
            rows.append(case | run())
        except Exception as error:
            rows.append(case | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
        rows[-1]["gpu"] = torch.cuda.get_device_name()
        torch.cuda.empty_cache()
        if speaks:
            shown = (f"{name}={_shown(value)}" for name, value in rows[-1].items() if name != "gpu")
            print(*shown, flush=True)
    if speaks:
        write(output, rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
