"""torch.profiler over a few further iterations of a workload."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from aorta.errors import RecordError
from aorta.queues.harness.iterations.bench import WorkloadBench

PROFILED_ITERATIONS = 5


def trace_name(workload: str, streams: int, rank: int) -> str:
    """File name of a rank's trace: the readers of aorta.traces find the rank in it."""
    return f"{workload}_streams{streams}_rank{rank}.pt.trace.json"


def check_folder(folder: Path, name: str, overwrite: bool) -> None:
    """RecordError where a trace would be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"--profile-dir {folder} is a file; name a folder")
    if (folder / name).exists() and not overwrite:
        raise RecordError(f"{folder / name} already exists; give another --profile-dir or --overwrite")


def profiled(ready: WorkloadBench, iterations: int = PROFILED_ITERATIONS) -> list[Path]:
    """Runs iterations under the profiler in the plan's sync mode; the trace that was written.

    The profiler slows the host: numbers come from other iterations.
    """
    plan, folder = ready.plan, ready.plan.profile_dir
    assert folder is not None
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    path = folder / trace_name(plan.workload.name, plan.streams, ready.ranks.rank)
    ready.ranks.barrier()
    label = record_function(f"{plan.workload.name}::{plan.sync_mode}")
    with profile(activities=activities) as profiler, label:
        ready.run(iterations)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    if not path.exists():  # a write that fails in Kineto is not raised
        raise RecordError(f"{path}: the profiler could not write it")
    return [path]
