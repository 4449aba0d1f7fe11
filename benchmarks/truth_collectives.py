"""How long does a collective take to transfer, and who lengthens it? Part collectives of truth.py.

Four kinds of stretch take turns, in another order each round: `plain` (no tool), `recorded` (the instrument,
by kernel records), `traced` (torch.profiler alone), `both` (torch.profiler in a recorded run: what part
`kernels` compares with). In all four NCCL's own stream carries torch's timing events around every collective
(TORCH_NCCL_ENABLE_TIMING, read from the flight recorder): one witness that sees every kind, and each tool's
kernels beside it in the same steps.

Transfer is the least of the ranks, collective by collective, summed over a step. If a tool's kernels agree
with the witness in its own stretches, its clock is right; if the witness then says something else there than
in plain stretches, the tool changes the program. Skew is how far apart the ranks' kernels begin.

Writes OUTPUT (a folder): collectives.csv (a row for each collective of each rank), summary.csv, and of the
first round the recording and the traces.
"""

import csv
import gzip
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from cases import CASES, Job, config_of, process_group
from harness import arguments, median_interval, need_gpus, write
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.errors import InstrumentError
from aorta.records.reader import read_steps

KINDS = ("plain", "recorded", "traced", "both")
SETTLING, JUDGED = 5, 8
PAUSE_S = 0.3
WATCHDOG_S = 0.5
"""How long torch's watchdog is given to read the events of what has ended."""
NEAR_US = 20.0
"""Ranks that begin a collective within this come at once."""
Kernel = tuple[int, int]
"""Start and end in ns of the host's clocks; only differences are compared."""


class Row(NamedTuple):
    """A collective on a rank."""

    round: int
    kind: str
    step: int
    place: int
    """Of the collective in its step."""
    op: str
    bytes: int
    rank: int
    event_ms: float | None
    kernel_ms: float | None
    start_ns: int | None


def measure() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", default="ddp_long", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=75.0, help="no round begins later than this")
    options = parser.parse_args()
    need_gpus(2)
    os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "50000"
    with process_group() as device, tempfile.TemporaryDirectory() as own:
        job = Job(config_of(CASES[options.case]), device)
        for _ in range(4):
            job.step()
        began, stretches = time.monotonic(), []
        for number in range(options.rounds):
            kinds = order_of(number)
            for kind in kinds:
                folder = shared(Path(own) / f"{number}-{kind}")
                stretches.append((number, kind, *stretch(job, kind, folder)))
                if options.output is not None and number == 0:
                    keep(folder, options.output / kind)
            if shared(time.monotonic() - began > options.seconds):
                break
        time.sleep(WATCHDOG_S)
        rows = rows_of(stretches, entries_of_nccl(), dist.get_rank())
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, rows)
        if dist.get_rank() == 0:
            everything = [row for rows in of_ranks for row in rows]
            if options.output is not None:
                write_rows(options.output / "collectives.csv", everything)
            summary = judged(everything, len(of_ranks))
            write(options.output and options.output / "summary.csv", summary)
        job.close()


def order_of(number: int) -> list[str]:
    """Kinds of a round: each is first, second, third and last in turn, and so is each behind each other."""
    turned = number // 2 % len(KINDS)
    kinds = [*KINDS[turned:], *KINDS[:turned]]
    return kinds if number % 2 == 0 else kinds[::-1]


def shared(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


Stretch = tuple[list[Kernel], list[Kernel] | dict[int, list[Kernel]]]
"""Host times of the steps, and their communication kernels: of all steps in order, or by step."""


def stretch(job: Job, kind: str, folder: Path) -> Stretch:
    torch.cuda.synchronize()
    dist.barrier()
    time.sleep(PAUSE_S)
    times: list[Kernel] = []
    profiler = recorder = None
    with ExitStack() as tools:
        if kind in ("recorded", "both"):
            try:
                recorder = tools.enter_context(aorta.instrument(folder, kernels="on", overhead="off"))
            except InstrumentError as error:
                print(f"{kind}: {error}", file=sys.stderr)
        job.step(recorder)  # the records are the recorder's when a profiler comes, as in a run
        first = job.next_step
        if kind in ("traced", "both"):
            profiler = tools.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        for _ in range(SETTLING + JUDGED + 1):  # of a recording the last step may have no end
            start = time.time_ns()
            job.step(recorder)
            times.append((start, time.time_ns()))
        torch.cuda.synchronize()
    dist.barrier()
    if profiler is not None:
        path = folder / f"trace_{dist.get_rank()}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return times, kernels_of_trace(path)
    if recorder is not None:
        return times, kernels_of_lines(folder / f"rank_{dist.get_rank()}_metrics.jsonl", first)
    return times, []


def kernels_of_trace(path: Path) -> list[Kernel]:
    """NCCL's kernels of a trace by torch.profiler, read without aorta."""
    trace = json.loads(path.read_bytes())
    return sorted(
        (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel" and "nccl" in event["name"].lower()
    )


def kernels_of_lines(path: Path, first: int) -> dict[int, list[Kernel]]:
    """Kernels of a recording, by step of the stretch."""
    return {
        line.global_step - first: sorted(
            (line.start_unix_ns + round(call.start_ms * 1e6), line.start_unix_ns + round(call.end_ms * 1e6))
            for call in line.collectives or ()
            if call.start_ms is not None and call.end_ms is not None
        )
        for line in read_steps(path, [])
        if line.source == "kernels"
    }


def entries_of_nccl() -> list[dict[str, Any]]:
    """Torch's own account of every collective; without durations where it has none."""
    module = torch._C._distributed_c10d
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        if hasattr(module, name):
            dump = getattr(module, name)(includeStackTraces=False)
            entries: list[dict[str, Any]] = pickle.loads(dump).get("entries", [])
            return [one for one in entries if not one.get("is_p2p")]
    return []


def rows_of(
    stretches: Iterable[tuple[int, str, list[Kernel], list[Kernel] | dict[int, list[Kernel]]]],
    entries: Sequence[dict[str, Any]],
    rank: int,
) -> list[Row]:
    """Collectives of the steps that are judged: the witness's by when they were called, kernels by order."""
    created = np.array([entry["time_created_ns"] for entry in entries], np.int64)
    rows = []
    for number, kind, times, kernels in stretches:
        called = [np.flatnonzero((created >= start) & (created < end)) for start, end in times]
        of_steps = kernels if isinstance(kernels, dict) else cut(kernels, [len(one) for one in called])
        for step in range(SETTLING, SETTLING + JUDGED):
            own = of_steps.get(step)
            if own is not None and len(own) != len(called[step]):
                print(
                    f"round {number} {kind} step {step}: {len(own)} kernels, {len(called[step])} calls",
                    file=sys.stderr,
                )
                own = None
            for index, place in enumerate(called[step]):
                entry, kernel = entries[int(place)], own[index] if own else None
                rows.append(
                    Row(
                        number,
                        kind,
                        step,
                        index,
                        entry["profiling_name"].partition(":")[2],
                        bytes_of(entry),
                        rank,
                        entry.get("duration_ms"),
                        (kernel[1] - kernel[0]) / 1e6 if kernel else None,
                        kernel[0] if kernel else None,
                    )
                )
    return rows


def cut(kernels: list[Kernel], counts: Sequence[int]) -> dict[int, list[Kernel]]:
    """Kernels of all steps by step; none where they are not as many as the calls."""
    if not kernels:
        return {}
    ends = np.cumsum([0, *counts])
    if len(kernels) != ends[-1]:
        print(f"{len(kernels)} kernels in a trace, {ends[-1]} calls", file=sys.stderr)
        return {}
    return {step: kernels[ends[step] : ends[step + 1]] for step in range(len(counts))}


SIZES = {"Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1}


def bytes_of(entry: dict[str, Any]) -> int:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return sum(int(np.prod(size)) * SIZES.get(dtype, 4) for size, dtype in zip(sizes, dtypes, strict=False))


# -- what they say -----------------------------------------------------------------------------------


class Collective(NamedTuple):
    """A collective over its ranks."""

    bytes: int
    event_ms: float | None
    """Least of the ranks, as the kernel's."""
    kernel_ms: float | None
    gap_us: float | None
    """Events longer than the kernel, median of the ranks."""
    skew_us: float | None


def judged(rows: Sequence[Row], num_ranks: int) -> list[dict[str, Any]]:
    """Print, and return as rows, each kind's transfer beside the plain one's, in sum and by size."""
    of_one: dict[tuple[int, str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        of_one[row[:4]].append(row)
    merged = {key: over_ranks(found) for key, found in of_one.items() if len(found) == num_ranks}
    sizes = sorted({one.bytes for one in merged.values()})
    summary = []
    for size in [None, *sizes]:
        events, kernels, of_kind = {}, {}, {}
        for kind in KINDS:
            own = {
                key: one
                for key, one in merged.items()
                if key[1] == kind and (size is None or one.bytes == size)
            }
            events[kind] = by_round(own, lambda one: one.event_ms)
            kernels[kind] = by_round(own, lambda one: one.kernel_ms)
            of_kind[kind] = own
        for kind in KINDS:
            found = [*of_kind[kind].values()]
            skews = [one.skew_us for one in found if one.skew_us is not None]
            gaps = [one.gap_us for one in found if one.gap_us is not None]
            summary.append(
                {
                    "bytes": "all" if size is None else size,
                    "kind": kind,
                    "num": len(found),
                    "event_ms": middle([*events[kind].values()]),
                    "kernel_ms": middle([*kernels[kind].values()]),
                    "event_beside_plain_percent": ratio(events[kind], events["plain"]),
                    "kernel_beside_traced_percent": ratio(kernels[kind], kernels["traced"]),
                    "event_less_kernel_us": middle(gaps),
                    "skew_us": middle(skews),
                    "at_once": None if not skews else float(np.mean(np.array(skews) < NEAR_US)),
                    "at_once_kernel_ms": middle(near(found, True)),
                    "apart_kernel_ms": middle(near(found, False)),
                }
            )
    for told in summary:
        print("  ".join(f"{name} {in_words(value)}" for name, value in told.items()), flush=True)
    return summary


def over_ranks(rows: Sequence[Row]) -> Collective:
    events = [row.event_ms for row in rows if row.event_ms is not None]
    kernels = [row.kernel_ms for row in rows if row.kernel_ms is not None]
    starts = [row.start_ns for row in rows if row.start_ns is not None]
    has_both = len(events) == len(kernels) == len(rows)
    gaps = [(event - kernel) * 1e3 for event, kernel in zip(events, kernels, strict=True)] if has_both else []
    return Collective(
        rows[0].bytes,
        min(events) if len(events) == len(rows) else None,
        min(kernels) if len(kernels) == len(rows) else None,
        middle(gaps),
        (max(starts) - min(starts)) / 1e3 if len(starts) == len(rows) else None,
    )


def by_round(
    found: dict[tuple[int, str, int, int], Collective], value: Callable[[Collective], float | None]
) -> dict[int, float]:
    """Round -> ms a step, the median of its steps; a step in which a value is missing does not count."""
    steps: dict[tuple[int, int], float] = defaultdict(float)
    for (number, _, step, _), one in found.items():
        ms = value(one)
        steps[number, step] += float("nan") if ms is None else ms
    rounds: dict[int, list[float]] = defaultdict(list)
    for (number, _), ms in steps.items():
        if ms == ms:
            rounds[number].append(ms)
    return {number: float(np.median(values)) for number, values in rounds.items()}


def ratio(ones: dict[int, float], others: dict[int, float]) -> tuple[float, ...] | None:
    both = sorted(ones.keys() & others.keys())
    if len(both) < 3 or any(others[one] == 0 for one in both):
        return None
    return tuple((value - 1) * 100 for value in median_interval([ones[one] / others[one] for one in both]))


def near(found: Sequence[Collective], wanted: bool) -> list[float]:
    return [
        one.kernel_ms
        for one in found
        if one.kernel_ms is not None and one.skew_us is not None and (one.skew_us < NEAR_US) == wanted
    ]


def middle(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- files -------------------------------------------------------------------------------------------


def keep(folder: Path, target: Path) -> None:
    """Keep what a stretch left, traces compressed. On every rank of one machine: each keeps its own trace."""
    rank = dist.get_rank()
    if not folder.exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name == f"trace_{rank}.json":
            (target / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 6))
        elif path.is_file() and f"_{rank}_" in path.name or path.name == "run.json" and rank == 0:
            shutil.copy(path, target)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
