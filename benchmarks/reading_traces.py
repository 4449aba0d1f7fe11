"""Speed of reading traces, to totals and to a report. On a CPU.

    python benchmarks/reading_traces.py [--trace FILE] [--ranks 64]        without it: one of AORTA_DATA

The trace (Kineto, gzip) is written once per rank with the rank's number in it. Measured are the wall time to
every rank's totals and to everything that a report needs, the start of the processes included, and the memory
of each process; no cache is read or written. Takes 2 min.
"""

import argparse
import re
import resource
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from harness import arguments, data_folder, write

from aorta.account.load.traces.reduce import RankSummary, reduce_rank
from aorta.processes import no_garbage_collection
from aorta.timeline.overlap import total
from aorta.timeline.types import Total
from aorta.timeline.waits import match_ranks
from aorta.traces import files as inflate
from aorta.traces.files import read_bytes
from aorta.traces.sources import Source, map_ranks, open_source
from aorta.traces.steps import Reading

RANK = re.compile(rb'("distributedInfo"\s*:\s*\{[^{}]*?"rank"\s*:\s*)\d+')
WORLD = re.compile(rb'("distributedInfo"\s*:\s*\{[^{}]*?"world_size"\s*:\s*)\d+')
WORLD_AFTER = re.compile(rb'("world_size"\s*:\s*)\d+')
GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255))


def traces() -> None:
    options = options_of(__doc__)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        replicate(options.trace, Path(folder), options.ranks)
        for name, measure in (("totals", measure_totals), ("report", measure_report)):
            runs = [measure(Path(folder), options.jobs) for _ in range(options.repeats)]
            best = min(runs, key=lambda run: run["wall_s"])
            rows.append({"what": name, "ranks": options.ranks, **best})
            print(
                f"{name:8} {best['wall_s']:6.2f} s   {best['cpu_s_per_rank']:.3f} CPU s per rank"
                f"   {best['peak_gb']:.3f} GB per process"
            )
        floor = measure_floor(options.trace, options.repeats)
        alone = measure_alone(options.trace, options.repeats)
        rows.append({"what": "floor", **floor})
        over = {
            f"{name}_over_floor": alone[f"{name}_cpu_s"] / floor["cpu_s"] for name in ("totals", "report")
        }
        rows.append({"what": "alone", **alone, **over, "inflate": inflate.NAME})
        print(f"floor    {floor['cpu_s']:.3f} CPU s: Python's gunzip and a decode of the fewest fields")
        print(
            f"alone    {alone['totals_cpu_s']:.3f} and {alone['report_cpu_s']:.3f} CPU s in a warm process, "
            + " and ".join(f"{ratio:.2f}" for ratio in over.values())
            + f" of the floor, by {inflate.NAME}"
        )
    write(options.output, rows)


def options_of(doc: str | None) -> argparse.Namespace:
    parser = arguments(doc)
    parser.add_argument("--trace", type=Path, help="a Kineto trace that tells its rank")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.trace = options.trace or data_folder() / "traces" / "a100_rank3of8_kineto.json.gz"
    return options


class Measured(NamedTuple):
    rank: int
    sums: Total
    peak_bytes: int
    cpu_s: float


def replicate(trace: Path, folder: Path, num_ranks: int) -> None:
    """The trace once per rank. Only the part up to the rank is packed anew: the rest is appended as it
    was packed once."""
    data = read_bytes(trace)
    found = RANK.search(data)
    if found is None:
        raise SystemExit(f"{trace} does not tell its rank")
    head, rest = data[: found.end()], data[found.end() :]
    world = WORLD.search(data)
    if world is not None and world.end() > len(head):
        rest = WORLD_AFTER.sub(rb"\g<1>" + str(num_ranks).encode(), rest, count=1)
    else:
        head = WORLD.sub(rb"\g<1>" + str(num_ranks).encode(), head, count=1)
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    packed_rest = packer.compress(rest) + packer.flush()
    for rank in range(num_ranks):
        own = RANK.sub(rb"\g<1>" + str(rank).encode(), head)
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        packed = packer.compress(own) + packer.flush(zlib.Z_FULL_FLUSH)
        ending = struct.pack("<II", zlib.crc32(rest, zlib.crc32(own)), (len(own) + len(rest)) & 0xFFFFFFFF)
        (folder / f"rank{rank}.json.gz").write_bytes(GZIP_HEADER + packed + packed_rest + ending)


def measure_totals(folder: Path, jobs: int) -> dict[str, float]:
    start = time.perf_counter()
    rows = list(map_ranks(rank_total, open_source(folder), jobs=jobs))
    return measured(time.perf_counter() - start, rows)


def measure_report(folder: Path, jobs: int) -> dict[str, float]:
    """Totals, steps, collectives of all ranks, matched."""
    start = time.perf_counter()
    source = open_source(folder)
    rows, summaries = [], []
    for row, summary in map_ranks(partial(rank_report, len(source.ranks)), source, jobs=jobs):
        rows.append(row)
        summaries.append(summary)
    match_ranks([summary.rank for summary in summaries], [summary.calls for summary in summaries])
    return measured(time.perf_counter() - start, rows)


class _FewestArgs(msgspec.Struct, gc=False):
    correlation: int | str | None = None
    stream: int | str | None = None


class _FewestFields(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float | None = None
    args: _FewestArgs | None = None


class _FewestOfTrace(msgspec.Struct):
    events: list[_FewestFields] = msgspec.field(name="traceEvents")


def measure_floor(trace: Path, repeats: int) -> dict[str, float]:
    """The floor: no reader in Python that builds events can be much faster."""
    data = trace.read_bytes()
    decoder = msgspec.json.Decoder(_FewestOfTrace)

    def decode() -> object:
        with no_garbage_collection():
            return decoder.decode(zlib.decompress(data, 31))

    return {
        "cpu_s": least_cpu_s(decode, repeats),
        "gunzip_cpu_s": least_cpu_s(lambda: zlib.decompress(data, 31), repeats),
    }


def measure_alone(trace: Path, repeats: int) -> dict[str, float]:
    """One rank in this process, after a first time."""
    source = open_source(trace)
    (rank,) = source.ranks
    return {
        "totals_cpu_s": least_cpu_s(lambda: rank_total(source, rank), repeats + 1),
        "report_cpu_s": least_cpu_s(lambda: rank_report(8, source, rank), repeats + 1),
    }


def least_cpu_s(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def rank_total(source: Source, rank: int) -> Measured:
    start = time.process_time()
    sums = total(source.read(rank).timeline)
    return Measured(rank, sums, peak_bytes(), time.process_time() - start)


def rank_report(world_size: int, source: Source, rank: int) -> tuple[Measured, RankSummary]:
    start = time.process_time()
    summary = reduce_rank(source, rank, world_size=world_size, reading=Reading())
    return Measured(rank, summary.sums, peak_bytes(), time.process_time() - start), summary


def measured(wall_s: float, rows: list[Measured]) -> dict[str, float]:
    first = rows[0].sums
    assert all(row.sums == first for row in rows), "the same trace gives the same totals"
    return {
        "wall_s": wall_s,
        "cpu_s_per_rank": sum(row.cpu_s for row in rows) / len(rows),
        "peak_gb": max(row.peak_bytes for row in rows) / 1e9,
        "num_kernels": float(first.num_kernels or 0),
        "comm_ms": first.comm_ms,
    }


def peak_bytes() -> int:
    """Peak memory of this process; getrusage would also count the program that it was before."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    traces()
