"""Device activities of a torch.profiler window, each with the host time of the call that launched it."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from aorta.errors import AortaError, TraceError
from aorta.traces.files.inflate import read_bytes
from aorta.traces.kineto.file import decode, nanoseconds
from aorta.traces.kineto.reader import CATEGORIES, LAUNCH_CATEGORIES

EXPORT_TIMEOUT_S = 60.0
MOST_UNLINKED = 0.02
"""Share of activities."""


class Kernel(NamedTuple):
    """A kernel, copy or fill, in ns on the Unix clock."""

    launch_ns: int
    start_ns: int
    end_ns: int


class Traced(NamedTuple):
    kernels: list[Kernel]
    reason: str | None
    """Reason for the absence of kernels."""


def traced(device: torch.device, work: Callable[[], object]) -> Traced:
    """Calls work, under the profiler where there is one: device activities and runtime calls alone, which
    slows the host less than its operators.

    work is called whatever becomes of the profiler, because other ranks may wait for this one in it.
    """
    if device.type == "cpu":
        work()
        return Traced([], "needs a GPU")
    profiler = profile(activities=[ProfilerActivity.CUDA])
    failure = ""
    try:
        profiler.start()
    except RuntimeError as error:
        failure = f"the profiler did not start: {error}"
    try:
        work()
        torch.cuda.synchronize(device)
    finally:
        if not failure:
            profiler.stop()
    if failure:
        return Traced([], failure.splitlines()[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.pt.trace.json"
        try:
            _export(profiler, path)
            trace = read_kernels(path)
        except (AortaError, OSError, RuntimeError) as error:
            return Traced([], f"the trace cannot be used: {error}".splitlines()[0])
    return Traced(trace, None if trace else "the profiler saw no kernels")


def _export(profiler: profile, path: Path) -> None:
    if torch.version.hip is None:
        profiler.export_chrome_trace(str(path))
        return
    from aorta.profiling.export import in_child

    # On ROCm the export has crashed: a child that does so costs the calibration and not the run.
    in_child(lambda: profiler.export_chrome_trace(str(path)), EXPORT_TIMEOUT_S, path)


def read_kernels(path: Path) -> list[Kernel]:
    """Kernels in order of launch. TraceError where many lack theirs: they would belong to no piece."""
    trace = decode(read_bytes(path), str(path))
    base_ns = trace.base_ns or 0
    calls = {
        e.args.correlation: e
        for e in trace.events
        if e.cat in LAUNCH_CATEGORIES and e.args is not None and e.args.correlation is not None
    }
    activities = [e for e in trace.events if e.cat in CATEGORIES]
    linked = [
        (calls[e.args.correlation], e)
        for e in activities
        if e.args is not None and e.args.correlation in calls
    ]
    if len(activities) - len(linked) > MOST_UNLINKED * len(activities):
        num = len(activities) - len(linked)
        raise TraceError(f"{num} of {len(activities)} device activities have no launch")
    launch_ns = nanoseconds([call.ts for call, _ in linked], str(path)) + base_ns
    start_ns = nanoseconds([e.ts for _, e in linked], str(path)) + base_ns
    length_ns = nanoseconds([e.dur or 0 for _, e in linked], str(path))
    rows = zip(launch_ns.tolist(), start_ns.tolist(), (start_ns + length_ns).tolist(), strict=True)
    return sorted(Kernel(*row) for row in rows)
