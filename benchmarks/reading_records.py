"""Speed of reading step records, from lines and from columns. On a CPU; nothing else should run.

    python benchmarks/reading_records.py --ranks 64 --steps 1000 --runs 1           10 min
    python benchmarks/reading_records.py --columns --ranks 1024 --steps 10000 --runs 1
    python benchmarks/reading_records.py lines                                      a line's cost, 2 min

Runs are made in a folder, with their columns beside them as a recorder writes them, and removed at the end.
Every command runs in a process of its own: the floors, which read every line and decode it with msgspec
(plain; the fields that a summary is made of; the fewest), the reading alone, with and without the columns
beside the lines, and the report of either. CPU seconds are of all its processes, the peak memory is that of
the largest one.

`lines`: lines without columns are what a training process on a CPU writes, lines with them what the second
process of a rank on a GPU does. The floor is a plain decode of every line by msgspec. Microseconds a line by
the process's own clock, smallest and median of rounds in turn.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from harness import ROOT, arguments, choose, write

from aorta.account.load.rank.reduce import reduce_file
from aorta.records.blocks import StepNumbers
from aorta.records.columns import ArrowTable, ColumnsWriter, Stream, columns_of
from aorta.records.files import COLUMNS_FILES, STEPS_FILE, STEPS_FILES, columns_name, steps_name
from aorta.records.schema import CollectiveRecord, HostSpan, StepRecord
from aorta.records.seal import sealed
from aorta.records.writer import LineWriter
from aorta.timeline.overlap import active_segments, overlap, stream_uses
from aorta.timeline.types import Kind, Span, Timeline

SIZE = 1 << 26
GROUP_SIZE = 8
LEFT_OUT = {
    "active_segments": "kept in some steps",
    "collectives": "kept in some steps",
}
MEASURED = (
    "floor, plain", "floor, needed", "floor, fewest", "reading", "reading of lines", "report",
    "report of lines", "with steps.parquet",
)  # fmt: skip
NO_OUTPUTS = ("--no-page", "--no-perfetto", "--no-parquet")
WHAT = ("write", "write with columns", "plain decode", "reading of columns", "reading of lines alone")


def reports() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--collectives", type=int, default=8, help="of a step")
    parser.add_argument("--detail-every", type=int, default=1, metavar="N", help="1 step in N has details")
    parser.add_argument("--runs", type=int, default=2, help="2: they are compared")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=list(MEASURED), metavar="WHAT")
    parser.add_argument("--outputs", action="store_true", help="page, Perfetto, Parquet and pictures too")
    parser.add_argument("--columns", action="store_true", help="columns alone are written (one run)")
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary folder")
    parser.add_argument("--floor", choices=("plain", "needed", "fewest", "columns"), help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.files = [path for path in options.files if STEPS_FILE.fullmatch(path.name)]
    if options.floor == "columns":
        for path in options.files:
            reduce_file(path)
        return
    if options.floor:
        decode_all(options.files, options.floor)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        result = measure_columns(place, options) if options.columns else measure(place, options)
    about = {name: value for name, value in result.items() if name != "measured"}
    rows = [{"what": name, **row, **about} for name, row in result["measured"].items()]
    for row in rows:
        figures = f"{row['cpu_s']:8.1f} CPU s   {row['wall_s']:8.1f} s   {row['peak_mib']:7.0f} MiB"
        print(f"{row['what']:18} {figures}")
    write(options.output, rows)


def lines() -> None:
    parser = arguments("CPU time that a line takes its writer and its first reading.")
    parser.add_argument("--lines", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for detail_every in (1, 100):
        rng = np.random.default_rng(0)
        records = [step_of(i, 8, 8, rng, i % detail_every == 0) for i in range(options.lines)]
        rounds = [one_round(records) for _ in range(options.rounds)]
        for what, of_what in zip(WHAT, zip(*rounds, strict=True), strict=True):
            row = {"detail_every": detail_every, "what": what, "least_us": min(of_what)}
            rows.append(row | {"median_us": statistics.median(of_what)})
        ratios = [of_round[4] / of_round[2] for of_round in rounds]
        row = {"detail_every": detail_every, "what": "reading of lines / decode", "least_us": min(ratios)}
        rows.append(row | {"median_us": statistics.median(ratios)})
    for row in rows:
        print(
            f"1 in {row['detail_every']:3}  {row['what']:32} {row['least_us']:8.2f} {row['median_us']:8.2f}"
        )
    write(options.output, rows)


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    runs = [folder / name for name in "abcdefgh"[: args.runs]]
    for seed, run in enumerate(runs):
        write_run(run, args.ranks, args.steps, args.collectives, seed, args.detail_every)
    files = sorted(path for run in runs for path in run.glob(STEPS_FILES))
    num_bytes = sum(path.stat().st_size for path in files)
    beside_bytes = sum(path.stat().st_size for run in runs for path in run.glob(COLUMNS_FILES))
    print(f"{args.runs} x {args.ranks} ranks x {args.steps} steps, {num_bytes / 1e6:.0f} MB", flush=True)
    floor = [sys.executable, str(Path(__file__)), *map(str, files), "--floor"]
    bare = folder / "bare"
    bare.mkdir()
    for path in files:
        (bare / path.parent.name).mkdir(exist_ok=True)
        (bare / path.parent.name / path.name).symlink_to(path)
    of_lines = [str(bare / path.parent.name / path.name) for path in files]
    options = ["--jobs", str(args.jobs), *(() if args.outputs else NO_OUTPUTS)]
    options += ["--output", str(folder / "out")]
    aorta_report = [sys.executable, "-m", "aorta", "report"]
    report = [*aorta_report, *map(str, runs), *options]
    environment = os.environ | {"AORTA_CACHE_DIR": str(folder / "scratch"), "PYTHONPATH": str(ROOT)}
    measured = {}
    for name, command in (
        ("floor, plain", [*floor, "plain"]),
        ("floor, needed", [*floor, "needed"]),
        ("floor, fewest", [*floor, "fewest"]),
        ("reading", [*floor, "columns"]),
        ("reading of lines", [sys.executable, str(Path(__file__)), *of_lines, "--floor", "columns"]),
        ("report", report),
        ("report of lines", [*aorta_report, *(str(bare / run.name) for run in runs), *options]),
        ("with steps.parquet", [part for part in report if part != "--no-parquet"]),
    ):
        if name not in args.only:
            continue
        measured[name] = row = timed(command, environment)
        print(f"{name:16} {row}", flush=True)
    return {
        **setting(args),
        "lines_mb": num_bytes / 1e6,
        "columns_mb": beside_bytes / 1e6,
        "outputs_mb": num_bytes_below(folder / "out") / 1e6,
        "measured": measured,
        "over_plain": {
            name: row["cpu_s"] / measured["floor, plain"]["cpu_s"]
            for name, row in measured.items()
            if "floor, plain" in measured
        },
    }


def measure_columns(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The report alone, from columns that were written without the lines that they stand for."""
    run = folder / "a"
    environment = os.environ | {"AORTA_CACHE_DIR": str(folder / "scratch"), "PYTHONPATH": str(ROOT)}
    write_columns_of_run(run, args)
    print(f"{args.ranks} ranks x {args.steps} steps, columns alone", flush=True)
    report = [sys.executable, "-m", "aorta", "report", str(run), "--jobs", str(args.jobs), *NO_OUTPUTS]
    row = timed([*report, "--output", str(folder / "out")], environment)
    return {
        **setting(args),
        "columns_mb": sum(path.stat().st_size for path in run.glob(COLUMNS_FILES)) / 1e6,
        "measured": {"from columns": row},
    }


def setting(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ranks", "steps", "runs", "collectives", "detail_every", "outputs", "jobs")
    return {
        **{name: getattr(args, name) for name in names},
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def num_bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def timed(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command below a process of its own, whose children's sums and peak can then be read."""
    script = (
        "import json, resource, subprocess, sys, time\n"
        "start = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps({'wall_s': time.perf_counter() - start, 'cpu_s': use.ru_utime + use.ru_stime,"
        " 'peak_mib': use.ru_maxrss / 1024}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        check=True,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
    )
    row: dict[str, float] = json.loads(done.stdout)
    return row


def decode_all(files: Sequence[Path], fields: str) -> None:
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
        {"plain": Any, "needed": StepNumbers, "fewest": FewestNumbers}[fields]
    )
    decode: Callable[[bytes], Any] = decoder.decode
    for path in files:
        with open(path, "rb") as file:
            for line in file:
                decode(line)


class FewestOverlap(msgspec.Struct, gc=False):
    """The numbers that a table of five rows shows."""

    comm_ms: float | None
    compute_ms: float | None
    hidden_ms: float | None
    exposed_ms: float | None
    idle_ms: float | None


class FewestNumbers(msgspec.Struct, gc=False):
    """The same of a step."""

    global_step: int
    step_ms: float | None
    overlap: FewestOverlap


def write_run(
    folder: Path,
    num_ranks: int,
    num_steps: int,
    num_collectives: int,
    seed: int,
    detail_every: int,
    ranks: Iterable[int] | None = None,
) -> None:
    """Every rank has the same times: what is measured does not depend on them. Groups have 8 ranks. ranks:
    those that are written, all by default."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    steps = [step_of(i, num_collectives, num_ranks, rng, i % detail_every == 0) for i in range(num_steps)]
    lines = [msgspec.json.encode(step) for step in steps]
    for rank in range(num_ranks) if ranks is None else ranks:
        group = msgspec.json.encode(group_of(rank, num_ranks))
        path = folder / steps_name(rank)
        columns = ColumnsWriter(path)
        with open(path, "wb", buffering=0) as file:
            for number, line in enumerate(lines):
                line = line.replace(b'"rank":0,', b'"rank":%d,' % rank, 1)
                columns.add(file.write(sealed(line.replace(b'"ranks":[]', b'"ranks":' + group), number)))
        columns.close()


def group_of(rank: int, num_ranks: int) -> list[int]:
    first = rank - rank % GROUP_SIZE
    return list(range(first, min(first + GROUP_SIZE, num_ranks)))


def write_columns_of_run(folder: Path, args: argparse.Namespace) -> None:
    """The columns of rank 0's lines for every rank, all times of a step up to some percent longer.

    The first and the last rank have lines, which causes look at. Instead of the others' there are empty files
    of their size.
    """
    real = {0, args.ranks - 1}
    write_run(folder, args.ranks, args.steps, args.collectives, 0, args.detail_every, real)
    first = columns_of(folder / steps_name(0))
    assert first is not None
    rng = np.random.default_rng(1)
    for rank in set(range(args.ranks)) - real:
        path = folder / steps_name(rank)
        with open(path, "wb") as file:
            file.truncate(first.seal.lines_bytes)
        stream = Stream(folder / columns_name(rank), 0, 0)
        num_lines = 0
        for batch in [*first.batches, first.batches[0].slice(0, 0)]:
            seal = msgspec.structs.replace(
                first.seal, rank=rank, tail="\0" * 32, num_lines=num_lines, file_bytes=stream.num_bytes,
                file_crc=stream.checksum,
            )  # fmt: skip
            stream.write(of_another_rank(batch, rank, args.ranks, rng), seal)
            num_lines += len(batch)
        stream.sync()
        stream.close()


def of_another_rank(batch: Any, rank: int, num_ranks: int, rng: np.random.Generator) -> ArrowTable:
    """A batch of rank 0's lines as another rank might have written them."""
    factor = pa.array(1 + np.abs(rng.normal(0, 0.01, len(batch))))
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if field.name == "rank":
            column = pa.array([rank] * len(batch), field.type)
        elif field.name in ("step_ms", "compute_ms", "comm_ms", "hidden_ms", "exposed_ms", "idle_ms"):
            column = pc.multiply(column, factor)
        elif field.name == "collectives" and len(batch):
            calls = column.flatten()
            names = [calls.type.field(i).name for i in range(calls.type.num_fields)]
            children = dict(zip(names, calls.flatten(), strict=True))
            group = msgspec.json.encode(group_of(rank, num_ranks)).decode()
            children["ranks"] = pc.if_else(pc.is_valid(children["ranks"]), group, children["ranks"])
            calls = pa.StructArray.from_arrays(list(children.values()), fields=list(calls.type))
            column = pa.ListArray.from_arrays(column.offsets, calls, type=field.type, mask=column.is_null())
        columns.append(column)
    return ArrowTable(pa.Table.from_batches([pa.RecordBatch.from_arrays(columns, schema=batch.schema)]))


def step_of(
    step: int, num_collectives: int, num_ranks: int, rng: np.random.Generator, has_details: bool = True
) -> StepRecord:
    compute_ms = round(34 * float(rng.normal(1, 0.01)), 3)
    edges = np.linspace(2.0, compute_ms + 3.0, num_collectives + 1).tolist()
    spans = [Span(0.0, compute_ms, Kind.COMPUTE)]
    spans += [Span(edge, edge + 2.0, Kind.COMM, "all_gather", "nccl") for edge in edges[:-1]]
    line = Timeline.from_spans(
        spans, (0.0, compute_ms + 6.0), step=step, origin_unix_ns=10**18 + step * 50_000_000
    )
    collectives = [
        CollectiveRecord(
            op="all_gather", stream="group", group="shard", ranks=[], bytes=SIZE, dtype="bfloat16",
            seq=step * num_collectives + i, start_ms=edge, end_ms=edge + 2.0, algbw_gb_s=None,
            busbw_gb_s=None,
        )
        for i, edge in enumerate(edges[:-1])
    ]  # fmt: skip
    return StepRecord(
        rank=0, world_size=num_ranks, epoch=0, step=step, global_step=step, loss=1.0, lr=None, grad_norm=None,
        tokens=1, source="events", start_unix_ns=line.origin_unix_ns, clock_error_us=2.0,
        step_ms=line.span_ms, between_steps_ms=0.5, host_ms=4.0,
        streams=stream_uses(line) if has_details else {},
        overlap=overlap(line), active_segments=active_segments(line) if has_details else None,
        collectives=collectives if has_details else None, num_collectives=num_collectives,
        host_spans=host_spans(line.span_ms),
        run_id="20261122T120000Z-scale", not_measured={} if has_details else LEFT_OUT,
    )  # fmt: skip


def host_spans(window_ms: float) -> list[HostSpan]:
    """The spans that a recorder notes in every line."""
    return [
        HostSpan("backward", 1.2, 2.9),
        HostSpan("optimizer", 3.0, 3.9, "AdamW (fused=True, capturable=False)", 1 << 30),
        HostSpan("data", window_ms - 0.4, window_ms),
    ]


def one_round(records: list[StepRecord]) -> list[float]:
    """Microseconds a line, in the order of WHAT."""
    with tempfile.TemporaryDirectory() as folder:
        alone, path = Path(folder, "alone", steps_name(0)), Path(folder, "columns", steps_name(0))
        return [
            1e6 * cpu_s / len(records)
            for cpu_s in (
                cpu_of(lambda: write_lines(alone, records, with_columns=False)),
                cpu_of(lambda: write_lines(path, records, with_columns=True)),
                cpu_of(lambda: decode_all([path], "plain")),
                cpu_of(lambda: reduce_file(path)),
                cpu_of(lambda: reduce_file(alone)),
            )
        ]


def cpu_of(function: Callable[[], object]) -> float:
    start_s = time.process_time()
    function()
    return time.process_time() - start_s


def write_lines(path: Path, records: list[StepRecord], with_columns: bool) -> None:
    path.parent.mkdir()
    LineWriter.create(path).close()
    with LineWriter.append(path, with_columns=with_columns) as writer:
        for record in records:
            writer.write(record)


if __name__ == "__main__":
    choose(__doc__, {"reports": reports, "lines": lines})
