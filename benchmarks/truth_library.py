"""NCCL's own events beside kernel records of the same steps, and their cost: part library of truth.py.

Times: each collective's start and end by the plugin less those of its kernel, in steps that have both. Lines:
comm, hidden and exposed of steps timed by events alone, by events with the plugin, and by kernel records, one
recorder after the other. Cost: pairs of blocks of steps, the plugin's mask on and off between blocks. Needs
GPUs; 3 min with 2.
"""

import os
import random
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, process_group
from cost import interval, synchronise
from harness import arguments, need_gpus, write

import aorta
from aorta.device.collective_events import configure
from aorta.records.schema import RunRecord, StepRecord

WARM_STEPS = 6
SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)
OPERATIONS = "operations"
PARTS = ("step_ms", "comm_ms", "hidden_ms", "exposed_ms")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="+", default=["fsdp_short", "ddp", "tp"], choices=list(CASES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=160.0, help="no new part begins after this")
    options = parser.parse_args()
    need_gpus()
    log = Path(tempfile.gettempdir()) / f"nccl_{os.environ.get('RANK', '0')}.log"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=str(log))
    configure(os.environ)
    attempt = partial(tried, options.output)
    end_s = time.monotonic() + options.seconds
    parts: list[dict[str, Any]] = []
    with process_group() as device, tempfile.TemporaryDirectory() as of_this_rank:
        shared = [of_this_rank]
        dist.broadcast_object_list(shared, 0)
        folder = shared[0]
        attempt(parts, OPERATIONS, "times", lambda: operations(device, options.steps, Path(folder)))
        for name in options.cases:
            if not goes_on(end_s):
                break
            job = Job(config_of(CASES[name]), device)
            for _ in range(WARM_STEPS):
                job.step()
            attempt(parts, name, "lines", partial(lines, job, options.steps, Path(folder)))
            for kernels in ("on", "off"):
                if goes_on(end_s):
                    run = partial(cost, job, kernels, options.pairs, Path(folder))
                    attempt(parts, name, f"cost, kernels {kernels}", run)
            job.close()
        if dist.get_rank() == 0:
            text = log.read_text(errors="replace") if log.exists() else ""
            said = [line for line in text.splitlines() if "rofiler" in line or "PROFILER" in line][:10]
            print("\n".join(said[:4]))
        dist.barrier()  # the folder is rank 0's


def goes_on(end_s: float) -> bool:
    """True where another part may begin; rank 0 decides."""
    late = torch.tensor(
        [float(time.monotonic() > end_s)], device="cuda" if torch.cuda.is_available() else "cpu"
    )
    dist.broadcast(late, 0)
    return not late.item()


def tried(
    output: Path | None, parts: list[dict[str, Any]], case: str, what: str, run: Callable[[], dict[str, Any]]
) -> None:
    try:
        part = {"case": case, "what": what} | run()
    except Exception as error:
        traceback.print_exc()
        part = {"case": case, "what": what, "failed": f"{type(error).__name__}: {error}"}
    parts.append(part)
    if dist.get_rank() == 0:
        write(output, parts)  # the rest may never come
        show(part)
    sys.stdout.flush()


# -- times and coverage ----------------------------------------------------------------------------


def operations(device: torch.device, num_steps: int, folder: Path) -> dict[str, Any]:
    """Every operation at several sizes, some of them asynchronous, beside matrix multiplications."""
    rank, world = dist.get_rank(), dist.get_world_size()
    a = torch.randn(2048, 2048, device=device)
    side, exchange = (dist.new_group(list(range(world))) for _ in range(2))

    def body() -> None:
        for size in SIZES:
            x = torch.ones(size, device=device)
            gathered = torch.empty(size * world, device=device)
            work = dist.all_reduce(x, async_op=True)
            torch.mm(a, a)
            work.wait()
            dist.all_gather_into_tensor(gathered, x)
            dist.reduce_scatter_tensor(x, gathered)
            dist.all_reduce(x, group=side)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            # On a communicator of its own: times after a send to the own rank are not believed.
            dist.all_to_all_single(torch.empty_like(x), x, group=exchange)
            if device.type == "cuda":
                with dist._coalescing_manager(device=device, async_ops=False):  # type: ignore[attr-defined]
                    dist.all_reduce(x)
                    dist.all_reduce(gathered)
            sent, received = torch.ones(size, device=device), torch.empty(size, device=device)
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, (rank + 1) % world),
                    dist.P2POp(dist.irecv, received, (rank - 1) % world),
                ]
            ):
                work.wait()
        dist.barrier()
        torch.mm(a, a)

    for _ in range(2):
        body()
    with aorta.instrument(folder / OPERATIONS, kernels="auto", collectives="plugin") as recorder:
        for _ in range(num_steps):
            with recorder.step():
                body()
    return judged(folder / OPERATIONS)


def judged(folder: Path) -> dict[str, Any]:
    """Differences between plugin and kernel records, by operation; what was matched, on every rank."""
    dist.barrier()
    records = lines_of(folder)[2:]  # the first steps find the clocks
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    worst: list[dict[str, Any]] = []
    kinds: set[tuple[str, str | None, str | None, int]] = set()
    num = num_with = 0
    for record in records:
        for call in record.collectives or []:
            num += 1
            if call.library is None:
                continue
            num_with += 1
            kinds.add((call.op, call.library.algorithm, call.library.protocol, call.library.num_channels))
            by_library, by_kernel = call.library, call
            if record.source != "kernels" or by_library.start_ms is None or by_library.end_ms is None:
                continue
            if by_kernel.start_ms is not None and by_kernel.end_ms is not None:
                row = (
                    (by_library.start_ms - by_kernel.start_ms) * 1e3,
                    (by_library.end_ms - by_kernel.end_ms) * 1e3,
                    (by_kernel.end_ms - by_kernel.start_ms) * 1e3,
                )
                rows[call.op].append(row)
                worst.append(
                    {"op": call.op, "bytes": call.bytes, "step": record.global_step, "seq": call.seq}
                    | {"channels": by_library.num_channels, "start": row[0], "end": row[1], "kernel": row[2]}
                )
    everything = [row for of_op in rows.values() for row in of_op]
    coverage = msgspec.json.decode((folder / "run.json").read_bytes(), type=RunRecord).coverage
    return {
        "sources": sorted({record.source for record in records}),
        "num_collectives": num,
        "num_with_events": num_with,
        "num_with_times": sum(map(len, rows.values())),
        "worst": sorted(worst, key=lambda row: -max(abs(row["start"]), abs(row["end"])))[:20],
        "differences_us": {"all": spread(everything)} | {op: spread(rows[op]) for op in sorted(rows)},
        "kinds": sorted(map(list, kinds), key=str),
        "kernel_records": coverage["kernel_records"],
        "library_events": coverage["library_events"],
    }


def spread(rows: list[tuple[float, float, float]]) -> dict[str, Any]:
    if not rows:
        return {"num": 0}
    values = np.array(rows)
    result: dict[str, Any] = {"num": len(rows), "kernel_us": float(np.median(values[:, 2]))}
    for name, column in (("start", values[:, 0]), ("end", values[:, 1])):
        p1, median, p99 = np.percentile(column, [1, 50, 99]).tolist()
        result[name] = {
            "median": median,
            "p1": p1,
            "p99": p99,
            "p99_absolute": float(np.percentile(abs(column), 99)),
        }
    return result


def lines_of(folder: Path) -> list[StepRecord]:
    path = folder / f"rank_{dist.get_rank()}_metrics.jsonl"
    decoder = msgspec.json.Decoder(StepRecord)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


# -- lines -------------------------------------------------------------------------------------------


def lines(job: Job, num_steps: int, folder: Path) -> dict[str, Any]:
    """The same job under each source of times."""
    result: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "kernels": {"kernels": "auto", "collectives": "plugin"},
        "events": {"kernels": "off", "collectives": "calls"},
        "events_plugin": {"kernels": "off", "collectives": "plugin"},
    }
    for round_number in range(2):
        for way, options in ways.items():
            place = folder / f"{way}_{round_number}"
            with aorta.instrument(place, **options) as recorder:
                for _ in range(num_steps // 2 + 2):
                    job.step(recorder)
            dist.barrier()
            records = lines_of(place)[2:]
            for part in PARTS:
                of_part = [r.step_ms if part == "step_ms" else getattr(r.overlap, part) for r in records]
                values = [value for value in of_part if value is not None]
                result.setdefault(way, {}).setdefault(part, []).extend(values)
            if way != "events":
                calls = [call for record in records for call in record.collectives or []]
                share = sum(call.start_by == "library" for call in calls) / max(1, len(calls))
                result[way].setdefault("share_of_calls_by_library", []).append(share)
    medians = {
        way: {part: float(np.median(values)) if values else None for part, values in parts.items()}
        for way, parts in result.items()
    }
    return {"medians": medians} | judged(folder / "kernels_1")


# -- cost --------------------------------------------------------------------------------------------


def cost(job: Job, kernels: Any, pairs: int, folder: Path) -> dict[str, Any]:
    """Blocks of four steps with the mask on and off; the recorder is on in both."""
    times: dict[bool, list[float]] = {False: [], True: []}
    order = random.Random(0)
    with aorta.instrument(folder / f"cost_{kernels}", kernels=kernels, collectives="plugin") as recorder:
        for _ in range(WARM_STEPS):
            job.step(recorder)
        for _ in range(pairs):
            for with_it in order.sample((False, True), 2):
                (recorder._sources.collectives.wake if with_it else recorder._sources.collectives.sleep)()
                times[with_it].append(block(job, recorder))
        reason = recorder._sources.kernels.reason
    off, on = np.array(times[False]), np.array(times[True])
    return {
        "kernels_reason": reason,
        "step_ms_without": off.tolist(),
        "step_ms_with": on.tolist(),
        "step_ratio_to_without": interval(on / off),
    }


def block(job: Job, recorder: Any, num_steps: int = 4) -> float:
    job.step(recorder)
    synchronise()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        job.step(recorder)
    synchronise()
    step_ms = (time.perf_counter() - start) * 1e3 / num_steps
    slowest = torch.tensor([step_ms], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def show(part: dict[str, Any]) -> None:
    print(f"-- {part['case']}: {part['what']}")
    if "failed" in part:
        print(f"   FAILED {part['failed']}")
        return
    if "medians" in part:
        for way, medians in part["medians"].items():
            print(f"   {way:14s} " + "  ".join(f"{n} {v:.3f}" for n, v in medians.items() if v is not None))
    if "differences_us" in part:
        events = part["library_events"]
        print(
            f"   sources {part['sources']}, {part['num_with_events']} of {part['num_collectives']} with them"
        )
        print(f"   {part['num_with_times']} with times of both")
        print(f"   interface {events.get('interface')}, reason {events['reason']}, {events['matched']}")
        for op, row in part["differences_us"].items():
            if row["num"]:
                start, end = row["start"], row["end"]
                print(
                    f"   {op:16s} n {row['num']:5d}  kernel {row['kernel_us']:8.1f} us  "
                    f"start {start['median']:+6.2f} [{start['p1']:+.2f}, {start['p99']:+.2f}]  "
                    f"end {end['median']:+6.2f} [{end['p1']:+.2f}, {end['p99']:+.2f}] us"
                )
    if "step_ratio_to_without" in part:
        ratio = part["step_ratio_to_without"]
        low, high = ratio["interval"]
        without = float(np.median(part["step_ms_without"]))
        print(f"   {without:.2f} ms  with/without {ratio['median']:.4f} [{low:.4f}, {high:.4f}]")
