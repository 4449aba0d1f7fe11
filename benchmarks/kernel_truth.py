"""Lines of kernel records against torch.profiler in neighbouring steps, and against stamps of spin kernels.

    torchrun --nproc_per_node 2 benchmarks/kernel_truth.py --output kernel_truth.json

Rounds of recorded steps and of steps under torch.profiler (CUDA activities only) alternate in one process.
The profiler takes the driver's records and gives them back each time, so this tests the handing over too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, environment, process_group
from lines_beside_traces import judge, show
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.device.kernel_records import KernelRecords
from aorta.queues.probe.kernels import NEVER, NUM_SLOTS, open_kernels
from aorta.steps.kernel_chunk import RECORD_DTYPE, What

CASE_NAMES = ("fsdp", "fsdp_short", "ddp", "tp", "moe")
RECORDED_STEPS, TRACED_STEPS = 8, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASE_NAMES), choices=list(CASES))
    parser.add_argument("--placements", nargs="+", default=["native"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("kernel_truth.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as shared:
        folders: list[Any] = [shared]
        dist.broadcast_object_list(folders)
        stamps = compare_with_stamps(device)
        for name in options.cases:
            job = Job(config_of(CASES[name]), device)
            for _ in range(4):
                job.step()
            for placement in options.placements:
                folder = Path(folders[0]) / f"{name}-{placement}"
                run(job, folder, placement, options.rounds)
                dist.barrier()
                if dist.get_rank() == 0:
                    new = judge(folder)
                    coverage = json.loads((folder / "run.json").read_bytes())["coverage"]["kernel_records"]
                    for row in new:
                        row["kernel_records"] = coverage
                        show(row)
                    print("   ", json.dumps(coverage)[:300], flush=True)
                    rows += new
            job.close()
        if dist.get_rank() == 0:
            print("stamps:", json.dumps(stamps))
            about = environment() | {"world_size": dist.get_world_size(), "stamps": stamps, "results": rows}
            options.output.write_text(json.dumps(about, indent=1))


def run(job: Job, folder: Path, placement: Any, num_rounds: int) -> None:
    traces = folder / "torch_profiler" / f"rank{dist.get_rank()}"
    with aorta.instrument(folder, placement=placement, kernels="on") as recorder:
        traces.mkdir(parents=True)
        for _ in range(num_rounds):
            for _ in range(RECORDED_STEPS):
                job.step(recorder)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(TRACED_STEPS):
                    job.step(recorder)
                torch.cuda.synchronize()
            dist.barrier()
            profiler.export_chrome_trace(str(traces / f"{time.time_ns()}.pt.trace.json"))
            dist.barrier()


def compare_with_stamps(device: torch.device, num: int = 200) -> dict[str, Any]:
    """Kernels that read the device's clock at their own start and end, beside their records, in us."""
    buffer = torch.zeros(NUM_SLOTS, 2, dtype=torch.int64, device=device)
    kernels = open_kernels(device, buffer)
    buffer[:, 0], buffer[:, 1] = NEVER, 0
    torch.cuda.synchronize(device)
    records = KernelRecords.open(device)
    records.discard()
    stream = torch.cuda.current_stream(device)
    first = records.mark(stream.cuda_stream)
    for slot in range(num):
        kernels.spin(stream, slot, 20_000 + 1000 * slot, 1)
    last = records.mark(stream.cuda_stream)
    torch.cuda.synchronize(device)
    records.flush()
    rows = np.frombuffer(records.take().records, RECORD_DTYPE)
    records.stop()
    records.flush(forced=True)
    marks = {int(row["name"]): row for row in rows[rows["what"] == What.MARK]}
    spins = rows[rows["what"] == What.KERNEL]
    inside = (spins["start"] >= marks[first]["end"]) & (spins["end"] <= marks[last]["start"])
    spins = np.sort(spins[inside], order="start")
    stamps_ns = buffer[:num].cpu().numpy()
    start_us = (spins["start"] - stamps_ns[:, 0]) / 1e3
    end_us = (spins["end"] - stamps_ns[:, 1]) / 1e3
    clocks_us = np.median(start_us)  # the two clocks begin elsewhere
    return {
        "num": len(spins),
        "source": kernels.source,
        "start_us": np.percentile(start_us - clocks_us, (1, 50, 99)).tolist(),
        "end_us": np.percentile(end_us - clocks_us, (1, 50, 99)).tolist(),
    }


if __name__ == "__main__":
    main()
