"""Loads a run into one table of numbers per source.

Files go by line by line and rank by rank; what stays is one float per rank, step and metric. Details of
single steps are read again when a picture or a page asks for them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError, ReportError
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import CollectiveRecord, RunRecord, Source, StepRecord
from aorta.report.model import CollectiveRow, Run
from aorta.timeline.collective import busbw_factor

STEP_METRICS = ("step_ms", "between_steps_ms", "host_ms")
OVERLAP_METRICS = (
    "comm_ms",
    "compute_ms",
    "hidden_ms",
    "exposed_ms",
    "idle_ms",
    "exposed_copy_ms",
    "overlap_ratio",
    "hidden_per_compute",
    "compute_allreduce_ms",
    "compute_reducescatter_ms",
    "stalled_ms",
    "starved_bound_ms",
    "starved_hidden_bound_ms",
)
CALIBRATED_METRICS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
COMPUTE_STREAM_METRICS = ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
METRICS = (*STEP_METRICS, *OVERLAP_METRICS)
"""Metrics of every step, in the order of reports. Per operation there is also comm_ms.<op> and
exposed_ms.<op> and OP_METRICS; calibrated.<metric> where events were calibrated, compute_stream.<metric>
where kernels of the compute stream are told apart."""
OP_METRICS = ("duration_ms", "busbw_gb_s", "count", "bytes")
"""Per operation, over the collectives that a step issued: sums, and the bandwidth of them together."""

SOURCES: tuple[Source, ...] = ("events", "host", "kineto", "rocprofv3", "nsys", "projected")
TOTAL_SUMS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""
MAX_SIZES = 24
"""Kinds of one operation above which sizes share a row."""
LIMIT = 2**62
RANK_FILE = re.compile(r"rank_(\d+)_metrics\.jsonl")

Item = TypeVar("Item")
Result = TypeVar("Result")
Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""Called with what is being read, how much of it is done, and of how much."""


def load_run(
    path: Path | str,
    label: str,
    *,
    jobs: int = 1,
    dask: str | None = None,
    progress: Progress | None = None,
) -> Run:
    """The run at path; ReportError, RecordError or TraceError in one line where it cannot be used.

    jobs: processes that read ranks at the same time; dask: the address of a scheduler that does.
    """
    path = Path(path)
    if not path.exists():
        raise ReportError(f"{label}: there is no folder or trace {path}")
    if not path.is_dir():
        raise ReportError(f"{label}: {path} is no folder of records")
    files = sorted(p for p in path.iterdir() if RANK_FILE.fullmatch(p.name))
    if not files:
        raise ReportError(f"{label}: {path} holds no rank_<n>_metrics.jsonl")
    return _load_records(path, label, files, jobs, dask, progress)


def _load_records(
    folder: Path, label: str, paths: list[Path], jobs: int, dask: str | None, progress: Progress | None
) -> Run:
    run = read_run(folder) if (folder / "run.json").exists() else None
    notes: list[str] = []
    if run is None:
        notes.append("run.json is missing: device and configuration are not known")
    ranks = list(spread(reduce_file, paths, jobs, dask, _say(progress, label, len(paths))))
    for rank in ranks:
        notes += rank.notes
    _check_ranks(folder, label, ranks, run)
    ranks.sort(key=lambda rank: rank.rank)
    files = {rank.rank: rank.path for rank in ranks}
    return assemble(folder, label, ranks, run, notes, lambda source: partial(_records_of, files, source))


def _records_of(files: dict[int, Path], source: Source, rank: int) -> Iterator[StepRecord]:
    return (record for record in read_steps(files[rank], []) if record.source == source)


def spread(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    dask: str | None,
    done: Callable[[int], None],
) -> Iterator[Result]:
    """function of every item in order, in this process, in jobs processes, or on a cluster."""
    if dask is not None:
        yield from _on_cluster(function, items, dask, done)
    elif jobs > 1 and len(items) > 1:
        yield from _in_processes(function, items, jobs, done)
    else:
        for number, item in enumerate(items, start=1):
            result = function(item)
            done(number)
            yield result


def _in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, done: Callable[[int], None]
) -> Iterator[Result]:
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    chunk = max(1, len(items) // (8 * jobs))
    try:
        with ProcessPoolExecutor(min(jobs, len(items)), mp_context=get_context("spawn")) as pool:
            for number, result in enumerate(pool.map(function, items, chunksize=chunk), start=1):
                done(number)
                yield result
    except BrokenProcessPool as error:
        raise ReportError(f"a process of --jobs {jobs} was killed; is there memory for them?") from error


def _on_cluster(
    function: Callable[[Item], Result], items: Sequence[Item], address: str, done: Callable[[int], None]
) -> Iterator[Result]:
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise ReportError("--dask needs dask.distributed: install aorta[dask]") from error
    try:
        client = Client(address, timeout=20)
    except (OSError, ValueError) as error:
        raise ReportError(f"--dask {address}: no scheduler answers there") from error
    with client:
        for number, future in enumerate(client.map(function, items, pure=False), start=1):
            result = future.result()
            done(number)
            yield result


def _say(progress: Progress | None, label: str, total: int) -> Callable[[int], None]:
    return (lambda number: None) if progress is None else (lambda number: progress(label, number, total))


# ---- one rank ----------------------------------------------------------------------------------


@dataclass(slots=True)
class RankColumns:
    """The numbers of one rank by one source, a column per metric, one row per step in order of steps."""

    global_step: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: Floats
    tolerance_ns: Floats
    metrics: dict[str, Floats]
    num_collectives: NDArray[np.int64]
    host_bound: Floats
    has_details: NDArray[np.bool_]
    collectives: dict["CollectiveKey", tuple[Floats, Floats]]
    """Per kind and step: how many, and the sum of their durations in ms."""


CollectiveKey = tuple[str, int, str, int, str]
"""op, bytes (ANY_SIZE where sizes share a row), dtype, num_ranks (0 where it is not known), stream."""
ANY_SIZE = -1


@dataclass(slots=True)
class RankFile:
    """What is kept of the file of a rank."""

    path: Path
    rank: int
    world_size: int
    columns: dict[Source, RankColumns]
    not_measured: dict[str, str]
    notes: list[str] = field(default_factory=list)


def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    reduced = reduce_records(path, read_steps(path, notes))
    reduced.notes = notes
    return reduced


def reduce_records(path: Path, records: Iterable[StepRecord]) -> RankFile:
    """The numbers of the records of one rank."""
    building: dict[Source, _Building] = {}
    not_measured: dict[str, str] = {}
    first: StepRecord | None = None
    for record in records:
        first = first or record
        if (record.rank, record.world_size) != (first.rank, first.world_size):
            raise RecordError(
                f"{path} mixes runs: rank {first.rank} of {first.world_size}"
                f" and rank {record.rank} of {record.world_size}"
            )
        if not _sizes_are_possible(record):
            raise RecordError(f"{path}: impossible record: a number of global step {record.global_step}")
        rows = building.setdefault(record.source, _Building())
        if record.global_step in rows.row_of_step:
            raise RecordError(
                f"{path} mixes runs: global step {record.global_step} by {record.source} is there twice"
            )
        rows.add(record)
        for name, reason in record.not_measured.items():
            not_measured.setdefault(name.rpartition(".")[2], reason)
    if first is None:
        raise ReportError(f"{path} holds no step")
    columns = {source: rows.finished() for source, rows in building.items()}
    return RankFile(path, first.rank, first.world_size, columns, not_measured)


def _sizes_are_possible(record: StepRecord) -> bool:
    """No run writes integers that 64 bits cannot hold."""
    numbers: list[int | None] = [record.start_unix_ns, record.epoch, record.step, record.tokens]
    if record.memory is not None:
        numbers += msgspec.structs.astuple(record.memory)
    if record.device is not None:
        numbers.append(record.device.sample_unix_ns)
    numbers.append(max((one.bytes for one in record.collectives or ()), default=0))
    return all(one is None or abs(one) < LIMIT for one in numbers)


class _Building:
    """Rows as they come; columns that appear late have no value in earlier rows."""

    def __init__(self) -> None:
        self.row_of_step: dict[int, int] = {}
        self.rows: list[tuple[int, float, float, int, float, bool]] = []
        self.columns: dict[str, dict[int, float]] = {name: {} for name in METRICS}
        self.collectives: dict[CollectiveKey, dict[int, tuple[int, float]]] = {}

    def add(self, record: StepRecord) -> None:
        row = len(self.rows)
        self.row_of_step[record.global_step] = row
        overlap = record.overlap
        for name in STEP_METRICS:
            self._set(name, row, getattr(record, name))
        for name in OVERLAP_METRICS:
            self._set(name, row, getattr(overlap, name))
        for op, exposed_ms in overlap.exposed_by_op.items():
            self._set(f"exposed_ms.{op}", row, exposed_ms)
            if op in overlap.hidden_by_op:
                self._set(f"comm_ms.{op}", row, overlap.hidden_by_op[op] + exposed_ms)
        if overlap.calibrated is not None:
            for name in CALIBRATED_METRICS:
                self._set(f"calibrated.{name}", row, getattr(overlap.calibrated, name))
            if overlap.calibrated.comm_ms > 0:
                ratio = overlap.calibrated.hidden_ms / overlap.calibrated.comm_ms
                self._set("calibrated.overlap_ratio", row, ratio)
        if overlap.compute_stream is not None:
            for name in COMPUTE_STREAM_METRICS:
                self._set(f"compute_stream.{name}", row, getattr(overlap.compute_stream, name))
            if overlap.comm_ms:
                ratio = overlap.compute_stream.hidden_ms / overlap.comm_ms
                self._set("compute_stream.overlap_ratio", row, ratio)
        if record.collectives is not None:
            self._add_collectives(row, record.collectives)
        self.rows.append(
            (
                record.start_unix_ns,
                record.start_unix_ns + (record.step_ms or 0.0) * 1e6,
                2000 * (record.clock_error_us or 0.0) + TOLERANCE_NS,
                record.num_collectives,
                np.nan if overlap.host_bound is None else float(overlap.host_bound),
                record.collectives is not None and record.active_segments is not None,
            )
        )

    def _set(self, name: str, row: int, value: float | None) -> None:
        if value is not None:
            self.columns.setdefault(name, {})[row] = value

    def _add_collectives(self, row: int, collectives: list[CollectiveRecord]) -> None:
        of_step: dict[CollectiveKey, list[float]] = {}  # how many, ms
        for one in collectives:
            key = (one.op, one.bytes, one.dtype, len(one.ranks), one.stream)
            sums = of_step.get(key)
            if sums is None:
                sums = of_step[key] = [0, 0.0]
            sums[0] += 1
            start_ms, end_ms = one.start_ms, one.end_ms
            sums[1] += end_ms - start_ms if start_ms is not None and end_ms is not None else np.nan
        totals: dict[str, list[float]] = {}
        for key, (num, duration_ms) in of_step.items():
            self.collectives.setdefault(key, {})[row] = (int(num), duration_ms)
            op, size, _, num_ranks, _ = key
            total = totals.setdefault(op, [0, 0.0, 0.0, 0.0])
            total[0] += num
            total[1] += num * size
            total[2] += duration_ms
            total[3] += num * size * busbw_factor(op, max(num_ranks, 1))
        for op, (num, sent, duration_ms, moved) in totals.items():
            self._set(f"count.{op}", row, num)
            self._set(f"bytes.{op}", row, sent)
            self._set(f"duration_ms.{op}", row, duration_ms)
            if duration_ms > 0:
                self._set(f"busbw_gb_s.{op}", row, moved / duration_ms / 1e6)

    def finished(self) -> RankColumns:
        steps = np.array(list(self.row_of_step), dtype=np.int64)
        order = np.argsort(steps, kind="stable")
        start, end, tolerance, num, host_bound, details = zip(*self.rows, strict=True)
        num_rows = len(steps)
        return RankColumns(
            global_step=steps[order],
            start_ns=np.array(start, dtype=np.int64)[order],
            end_ns=np.array(end, dtype=np.float64)[order],
            tolerance_ns=np.array(tolerance, dtype=np.float64)[order],
            metrics={name: _column(values, num_rows)[order] for name, values in self.columns.items()},
            num_collectives=np.array(num, dtype=np.int64)[order],
            host_bound=np.array(host_bound, dtype=np.float64)[order],
            has_details=np.array(details, dtype=bool)[order],
            collectives={
                key: (
                    _column({row: n for row, (n, _) in values.items()}, num_rows, 0.0)[order],
                    _column({row: ms for row, (_, ms) in values.items()}, num_rows, 0.0)[order],
                )
                for key, values in few_sizes(self.collectives).items()
            },
        )


def few_sizes(kinds: dict[CollectiveKey, dict[int, tuple[int, float]]]) -> dict[CollectiveKey, Any]:
    """The same with the sizes of an operation together where there are more than MAX_SIZES."""
    many = {op for op, num in Counter(key[0] for key in kinds).items() if num > MAX_SIZES}
    if not many:
        return kinds
    result: dict[CollectiveKey, dict[int, tuple[int, float]]] = {}
    for key, rows in kinds.items():
        into = result.setdefault((key[0], ANY_SIZE, *key[2:]) if key[0] in many else key, {})
        for row, (num, sum_ms) in rows.items():
            before, before_ms = into.get(row, (0, 0.0))
            into[row] = (before + num, before_ms + sum_ms)
    return result


def _column(values: dict[int, float], num_rows: int, missing: float = np.nan) -> Floats:
    column = np.full(num_rows, missing)
    if values:
        column[list(values)] = list(values.values())
    return column


# ---- all ranks ---------------------------------------------------------------------------------


def assemble(
    path: Path,
    label: str,
    ranks: list[RankFile],
    run: RunRecord | None,
    notes: list[str],
    records: Callable[[Source], Callable[[int], Iterator[StepRecord]]],
    totals: dict[int, dict[str, float | int | None]] | None = None,
) -> Run:
    """The Run of the source with the most lines, the others beside it. ranks are in order."""
    counts: Counter[Source] = Counter()
    for rank in ranks:
        counts.update({source: len(columns.global_step) for source, columns in rank.columns.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (-counts[source], SOURCES.index(source))):
        found = _one_source(path, label, source, ranks, run, records(source), totals)
        if found is None:
            notes.append(f"lines of source {source} are left out: no step has them from every rank")
        else:
            runs.append(found)
    if not runs:
        lines = ", ".join(
            f"rank {rank.rank} {sum(len(c.global_step) for c in rank.columns.values())}" for rank in ranks[:8]
        )
        raise ReportError(
            f"{label}: {path}: no step was recorded by every rank from one source ({lines} lines)"
        )
    main, *others = runs
    main.notes[:0] = notes
    main.other_sources.update({other.source: other for other in others})
    return main


def _check_ranks(folder: Path, label: str, ranks: list[RankFile], run: RunRecord | None) -> None:
    sizes = sorted({rank.world_size for rank in ranks} | ({run.world_size} if run else set()))
    if len(sizes) > 1:
        raise ReportError(
            f"{label}: {folder} mixes runs of {' and '.join(map(str, sizes))} ranks; keep one run in a folder"
        )
    by_rank: dict[int, Path] = {}
    for one in ranks:
        named = RANK_FILE.fullmatch(one.path.name)
        if one.rank in by_rank:
            raise ReportError(
                f"{label}: rank {one.rank} is there twice, in {by_rank[one.rank]} and {one.path}"
            )
        if named is None or int(named[1]) != one.rank:
            raise ReportError(f"{label}: {one.path} holds records of rank {one.rank}")
        by_rank[one.rank] = one.path
    missing = [rank for rank in range(min(sizes[0], 1_000_000)) if rank not in by_rank]
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ReportError(f"{label}: {folder} lacks rank {some} of {sizes[0]}")
    if max(by_rank) >= sizes[0]:
        raise ReportError(f"{label}: {folder} holds rank {max(by_rank)} of a run of {sizes[0]} ranks")


def _one_source(
    path: Path,
    label: str,
    source: Source,
    ranks: list[RankFile],
    run: RunRecord | None,
    records: Callable[[int], Iterator[StepRecord]],
    totals: dict[int, dict[str, float | int | None]] | None,
) -> Run | None:
    """None where no step has this source from every rank."""
    per_rank = [rank.columns[source] for rank in ranks if source in rank.columns]
    if len(per_rank) < len(ranks):
        return None
    common = per_rank[0].global_step
    for columns in per_rank[1:]:
        common = common[np.isin(common, columns.global_step, assume_unique=True)]
    if len(common) == 0:
        return None
    notes = []
    longest = max(len(columns.global_step) for columns in per_rank)
    if len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    at = [np.searchsorted(columns.global_step, common) for columns in per_rank]
    overlapping = sum(_num_overlaps(columns, rows) for columns, rows in zip(per_rank, at, strict=True))
    if overlapping:
        notes.append(f"{overlapping} step windows overlap the next one: total counts that time twice")
    has_details = np.array([columns.has_details[rows] for columns, rows in zip(per_rank, at, strict=True)])
    every_rank: NDArray[np.bool_] = np.logical_and.reduce(has_details)
    metrics = _metrics(per_rank, at, has_details)
    num_collectives = np.array([c.num_collectives[rows] for c, rows in zip(per_rank, at, strict=True)])
    return Run(
        label=label,
        path=path,
        source=source,
        ranks=[rank.rank for rank in ranks],
        global_step=common,
        start_unix_ns=np.array([c.start_ns[rows] for c, rows in zip(per_rank, at, strict=True)]),
        metrics=metrics,
        num_collectives=num_collectives,
        host_bound=np.array([c.host_bound[rows] for c, rows in zip(per_rank, at, strict=True)]),
        has_details=every_rank,
        totals={
            rank.rank: _total(metrics, num_collectives, i) if totals is None else totals[rank.rank]
            for i, rank in enumerate(ranks)
        },
        collectives=_collectives(per_rank, at, every_rank),
        records=records,
        run=run,
        not_measured={name: why for rank in reversed(ranks) for name, why in rank.not_measured.items()},
        notes=notes,
    )


def _metrics(
    per_rank: list[RankColumns], at: list[NDArray[np.intp]], has_details: NDArray[np.bool_]
) -> dict[str, Floats]:
    """[rank, step]. An operation that a step does not use took no time, where communication is known."""
    names = dict.fromkeys(METRICS)
    for name in sorted({name for columns in per_rank for name in columns.metrics}):
        names.setdefault(name)
    metrics: dict[str, Floats] = {}
    for name in names:
        values = np.full(has_details.shape, np.nan)
        for i, (columns, rows) in enumerate(zip(per_rank, at, strict=True)):
            if name in columns.metrics:
                values[i] = columns.metrics[name][rows]
        if name.startswith(("comm_ms.", "exposed_ms.")):
            values[np.isnan(values) & ~np.isnan(metrics["comm_ms"])] = 0.0
        elif name.startswith(("count.", "bytes.")):
            values[np.isnan(values) & has_details] = 0.0
        metrics[name] = values
    return metrics


def _num_overlaps(columns: RankColumns, rows: NDArray[np.intp]) -> int:
    before, after = rows[:-1], rows[1:]
    limit = columns.start_ns[after] + columns.tolerance_ns[before]
    return int(np.count_nonzero(columns.end_ns[before] > limit))


def _collectives(
    per_rank: list[RankColumns], at: list[NDArray[np.intp]], has_details: NDArray[np.bool_]
) -> list[CollectiveRow]:
    """Without the first step with details, where there are others: its collectives set up connections."""
    known = np.flatnonzero(has_details)
    known = known[1:] if len(known) > 2 else known
    if len(known) == 0:
        return []
    keys = dict.fromkeys(key for columns in per_rank for key in columns.collectives)
    many = {op for op, num in Counter(key[0] for key in keys).items() if num > MAX_SIZES}
    merged = dict.fromkeys((key[0], ANY_SIZE, *key[2:]) if key[0] in many else key for key in keys)
    rows = []
    for key in merged:
        counts, medians = [], []
        for columns, at_rank in zip(per_rank, at, strict=True):
            chosen = at_rank[known]
            parts = [
                (num[chosen], sum_ms[chosen])
                for other, (num, sum_ms) in columns.collectives.items()
                if other == key or (key[0] in many and (other[0], *other[2:]) == (key[0], *key[2:]))
            ]
            if not parts:
                continue
            num, sum_ms = np.sum([part[0] for part in parts], axis=0), np.sum([p[1] for p in parts], axis=0)
            counts.append(float(np.mean(num)))
            used = num > 0
            if used.any() and not np.isnan(sum_ms[used]).all():
                medians.append(float(np.nanmedian(sum_ms[used] / num[used])))
        rows.append(_collective_row(key, counts, medians))
    return sorted(rows, key=lambda row: -(row.count_per_step * (row.duration_ms or 0.0)))


def _collective_row(key: CollectiveKey, counts: list[float], medians: list[float]) -> CollectiveRow:
    op, size, dtype, num_ranks, stream = key
    duration = float(np.median(medians)) if medians else None
    busbw = None
    if size >= 0 and num_ranks and duration:
        busbw = size / duration / 1e6 * busbw_factor(op, num_ranks)
    return CollectiveRow(
        op=op,
        bytes=size if size >= 0 else None,
        dtype=dtype,
        num_ranks=num_ranks or None,
        stream=stream,
        count_per_step=float(np.mean(counts)),
        duration_ms=duration,
        duration_min_ms=min(medians, default=None),
        duration_max_ms=max(medians, default=None),
        wait_ms=None,
        transfer_ms=None,
        busbw_gb_s=busbw,
    )


def _total(
    metrics: dict[str, Floats], num_collectives: NDArray[np.int64], row: int
) -> dict[str, float | int | None]:
    """Over every step read, warm-up included.

    Step windows meet and do not overlap, and a step's numbers are clipped to its window, so that
    their sum is the set arithmetic over all windows together.
    """
    sums = {name: number(metrics[name][row].sum()) for name in TOTAL_SUMS}
    return {
        "span_ms": number(metrics["step_ms"][row].sum()),
        **sums,
        "num_kernels": None,  # records do not count kernels
        "num_collectives": int(num_collectives[row].sum()),
    }


def number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
