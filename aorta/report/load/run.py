"""Loads a run into one table of numbers per source.

Files go by line by line and rank by rank; what stays is one float per rank, step and metric. Details of
single steps are read again when a picture or a page asks for them.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError, ReportError, TraceError
from aorta.parallel_map import parallel_map
from aorta.records.files import STEPS_FILE, unwritten_name
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import RunRecord, Source, StepRecord
from aorta.report.load.arrivals import RankWaits, arrivals
from aorta.report.load.attempts import history, one_size, story
from aorta.report.load.kernels import of_kernels
from aorta.report.load.measures import MEASURED, add_measures, of_record
from aorta.report.load.waits import (
    ANY_SIZE,
    MAX_CALLS,
    ROUNDING_MS,
    Calls,
    CallsBuilder,
    ImpossibleRecord,
    Kind,
    Matched,
    exposed_wait_ms,
    match,
    sums_by_op,
    totals_by_kind,
    totals_by_op,
)
from aorta.report.model import Arrivals, CollectiveKind, Run
from aorta.steps.unwritten import unwritten_steps
from aorta.timeline.intervals import pairs
from aorta.timeline.types import OWN_SOURCES
from aorta.traces.reading import Reading

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
PER_STEP = ("compute", "comm", "exposed", "idle")
"""Also given as a share of the step: <name>_per_step."""
METRICS = (*STEP_METRICS, *OVERLAP_METRICS)
"""Metrics of every record, in the order of reports. Per operation there is also comm_ms.<op> and
exposed_ms.<op> and OP_METRICS; where ranks were matched exposed_wait_ms, exposed_transfer_ms,
wait_ms.<op> and transfer_ms.<op>; kernel_ms.<class> and kernel_count.<class> of kernel records;
calibrated.<metric> where events were calibrated, compute_stream.<metric>
where kernels of the compute stream are told apart."""
OP_METRICS = ("duration_ms", "busbw_gb_s", "count", "bytes")
"""Per operation, over the collectives that a step issued: sums, and the bandwidth of them together."""

SOURCES: tuple[Source, ...] = ("kernels", "events", "host", "kineto", "rocprofv3", "nsys", "projected")
TOTAL_SUMS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
FEWEST_WITH_SEGMENTS = 0.5
"""Part of the steps with collectives that need segments too, if exposed communication is to be split into
waiting and transfer."""
FEWEST_BY_KERNELS = 8
"""Steps timed by kernel records from which on they speak for a run: its others are profiled or not timed."""
TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""
MAX_SIZES = 24
"""Kinds of one operation above which sizes share a row."""
ROUNDING = 1e-6
"""The part of a time by which sums of its parts may be off, beside ROUNDING_MS."""
MUCH_BYTES = 16 << 20
"""Reading less takes about as long as starting processes."""
LIMIT = 2**62
MOST_MS = 2.0**53

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]
"""Called with what is being read, how much of it is done, and of how much."""


def load_run(
    path: Path | str,
    label: str,
    *,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: Reading | None = None,
) -> Run:
    """The run at path; ReportError, RecordError or TraceError in one line where it cannot be used.

    jobs: processes that read ranks at the same time, None for as many as pay; dask: the address of a
    scheduler that does. reading: how traces are read; records know no such choice.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise ReportError(f"{label}: there is no folder or trace {path}")
        files = sorted(p for p in path.iterdir() if STEPS_FILE.fullmatch(p.name)) if path.is_dir() else []
        (path / "run.json").exists()  # raises in a folder whose names may be listed, and no more
    except OSError as error:
        raise ReportError(f"{label}: cannot read {path}: {error.strerror}") from error
    jobs = usual_jobs(files or [path]) if jobs is None else jobs
    if files:
        return _load_records(path, label, files, jobs, dask, progress)
    from aorta.report.load.traces import load_traces  # which assembles its runs with this module

    try:
        run = load_traces(path, label, jobs=jobs, dask=dask, progress=progress, reading=reading or Reading())
    except TraceError as error:
        raise TraceError(f"{label}: {error}") from error
    busbw_by_transfer(run.metrics)
    return run


def usual_jobs(paths: Iterable[Path]) -> int:
    """One process per core that this one may use; 1 where there is less to read than starting them takes."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = 0
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else (path,):
            with suppress(OSError):
                size += file.stat().st_size
            if size >= MUCH_BYTES:
                return num_cores
    return 1


def _load_records(
    folder: Path, label: str, paths: list[Path], jobs: int, dask: str | None, progress: Progress | None
) -> Run:
    run = read_run(folder) if (folder / "run.json").exists() else None
    notes: list[str] = []
    if run is None:
        notes.append("run.json is missing: device and configuration are not known")
    ranks: list[RankFile] = []
    num_calls = 0
    results = parallel_map(reduce_file, paths, jobs=jobs, dask=dask, error=ReportError)
    for num_read, rank in enumerate(results, start=1):
        if progress is not None:
            progress(label, num_read, len(paths))
        ranks.append(rank)
        notes += rank.notes
        num_calls += sum(len(columns.calls) for columns in rank.columns.values() if columns.calls is not None)
        if num_calls > MAX_CALLS:
            _forget_calls(ranks)
    if num_calls > MAX_CALLS:
        notes.append(f"{num_calls} collectives are too many to match ranks: waits are not told apart")
    ranks.sort(key=lambda rank: rank.rank)
    ranks = one_size(ranks, notes)
    _check_ranks(folder, label, ranks, run)
    notes += history(ranks)
    files = {rank.rank: rank for rank in ranks}
    loaded = assemble(folder, label, ranks, run, notes, lambda source: partial(_records_of, files, source))
    loaded.story[:] = story(folder, run, ranks)
    return loaded


def _forget_calls(ranks: list["RankFile"]) -> None:
    for rank in ranks:
        for columns in rank.columns.values():
            columns.calls = None


def _records_of(files: dict[int, "RankFile"], source: Source, rank: int) -> Iterator[StepRecord]:
    """Those that count, of steps that were done more than once."""
    columns = files[rank].columns[source]
    passes = dict(
        zip(
            columns.global_step.tolist(),
            zip(columns.passes.attempt.tolist(), columns.passes.rollbacks.tolist(), strict=True),
            strict=True,
        )
    )
    return (
        record
        for record in _with_unwritten(files[rank].path, [])
        if record.source == source and passes.get(record.global_step) == (record.attempt, record.rollbacks)
    )


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
    has_collectives: NDArray[np.bool_]
    """Collectives were kept: with their times, or noted alone in a step that was not timed."""
    collectives: dict["CollectiveKey", tuple[Floats, Floats]]
    """Per kind and step: how many, and the sum of their durations in ms."""
    calls: Calls | None
    """None where ranks are not to be matched."""
    not_measured: dict[str, str]
    """The first reason of each name."""
    passes: "Passes"
    """When each step was done, of a run that did some twice."""


@dataclass(slots=True)
class Passes:
    """Per step: which of the times that it was done counts, which is the last."""

    attempt: NDArray[np.int64]
    rollbacks: NDArray[np.int64]
    world_size: NDArray[np.int64]
    repeated: dict[int, list[tuple[int, int]]]
    """Global steps that were done before: attempt and rollbacks of those times."""
    gaps: list[tuple[int, str]]
    """Global step, and why it does not follow the one before it in the file."""


CollectiveKey = Kind
"""num_ranks is 0 where it is not known."""


@dataclass(slots=True)
class RankFile:
    """What is kept of the file of a rank."""

    path: Path
    rank: int
    world_size: int
    columns: dict[Source, RankColumns]
    run_id: str | None = None
    notes: list[str] = field(default_factory=list)


def reduce_file(path: Path) -> RankFile:
    """The numbers of one rank_<n>_metrics.jsonl."""
    notes: list[str] = []
    reduced = reduce_records(path, _with_unwritten(path, notes))
    reduced.notes = notes
    return reduced


def _with_unwritten(path: Path, notes: list[str]) -> Iterator[StepRecord]:
    """The records of a file, and the steps that a killed process had closed and not written."""
    last: StepRecord | None = None
    for record in read_steps(path, notes):
        last = record
        yield record
    named = STEPS_FILE.fullmatch(path.name)
    if named is not None:
        kept = path.with_name(unwritten_name(int(named[1])))
        if last is None:
            yield from unwritten_steps(kept, None, None)
        else:
            of, after = (last.run_id, last.attempt), (last.rollbacks, last.global_step)
            yield from unwritten_steps(kept, of, after)


def reduce_records(path: Path, records: Iterable[StepRecord]) -> RankFile:
    """The numbers of the records of one rank."""
    building: dict[Source, _Building] = {}
    first: StepRecord | None = None
    sizes: dict[int, int] = {}
    for record in records:
        first = first or record
        size = sizes.setdefault(record.attempt, record.world_size)
        if (record.rank, record.world_size) != (first.rank, size):
            raise RecordError(
                f"{path} mixes runs: rank {first.rank} of {size}"
                f" and rank {record.rank} of {record.world_size}"
            )
        key = (record.source, record.global_step)
        if not _sizes_are_possible(record):
            raise _impossible(path, key)
        if not 0 <= (record.clock_error_us or 0.0) < MOST_MS:
            raise _impossible(path, key, f"clock_error_us of {record.clock_error_us:g}")
        rows = building.setdefault(record.source, _Building())
        if not rows.may_follow(record):
            raise RecordError(
                f"{path} mixes runs: global step {record.global_step} by {record.source} is there twice"
            )
        try:
            rows.add(record)
        except ImpossibleRecord as error:
            raise _impossible(path, key, str(error)) from error
        except (OverflowError, ValueError) as error:
            raise _impossible(path, key) from error
    if first is None:
        raise ReportError(f"{path} holds no step")
    try:
        columns = {source: rows.finished() for source, rows in building.items()}
    except OverflowError as error:
        raise _impossible(path, None) from error
    for source, of_source in columns.items():
        for wrong, what in _contradictions(of_source.metrics):
            if wrong.any():
                row = int(np.argmax(wrong))
                raise _impossible(path, (source, int(of_source.global_step[row])), what(row))
    return RankFile(path, first.rank, sizes[max(sizes)], columns, first.run_id)


Contradiction = tuple[NDArray[np.bool_], Callable[[int], str]]
"""Which rows, and what is wrong with one."""


def _contradictions(metrics: dict[str, Floats]) -> Iterator[Contradiction]:
    """Numbers that no run writes are refused: they would make every statistic of the run nonsense."""

    def of(name: str, wrong: NDArray[np.bool_], why: str) -> Contradiction:
        return wrong, lambda row: f"{name} of {metrics[name][row]:g} {why}"

    for name, values in metrics.items():
        if not name.startswith(("count.", "bytes.", "busbw_gb_s.", "kernel_count.")):
            yield of(name, np.abs(values) >= MOST_MS, "is no time of a run")
    for name in OVERLAP_METRICS:
        yield of(name, metrics[name] < -ROUNDING_MS, "is less than nothing")
    yield of("overlap_ratio", metrics["overlap_ratio"] > 1 + ROUNDING_MS, "is more than all of comm_ms")
    for name in (name for name in MEASURED if name in metrics):
        yield of(name, metrics[name] < 0, "is less than nothing")
    for name in (f"calibrated.{name}" for name in CALIBRATED_METRICS if f"calibrated.{name}" in metrics):
        yield of(name, metrics[name] < -ROUNDING_MS, "is less than nothing")
    for kind in ("", "calibrated."):
        if f"{kind}comm_ms" in metrics:
            hidden_ms, comm_ms = metrics[f"{kind}hidden_ms"], metrics[f"{kind}comm_ms"]
            yield of(f"{kind}hidden_ms", _is_more(hidden_ms, comm_ms), f"is more than {kind}comm_ms")
    yield from _broken_sums(metrics)
    for kind in ("comm", "exposed"):
        for name in [name for name in metrics if name.startswith(f"{kind}_ms.")]:
            yield of(name, _is_more(metrics[name], metrics[f"{kind}_ms"]), f"is more than all of {kind}_ms")


def _broken_sums(metrics: dict[str, Floats]) -> Iterator[Contradiction]:
    """comm = hidden + exposed, step = compute + exposed + idle, where all of it is known."""

    def of(parts: Sequence[str], whole: str) -> Contradiction:
        sums, names = np.sum([metrics[part] for part in parts], axis=0), " + ".join(parts)
        wrong = _is_more(sums, metrics[whole]) | _is_more(metrics[whole], sums)
        return wrong, lambda row: f"{names} of {sums[row]:.9g} is not {whole} of {metrics[whole][row]:.9g}"

    yield of(("hidden_ms", "exposed_ms"), "comm_ms")
    yield of(("compute_ms", "exposed_ms", "idle_ms"), "step_ms")
    is_more = _is_more(metrics["compute_ms"], metrics["step_ms"])
    yield is_more, lambda row: f"compute_ms of {metrics['compute_ms'][row]:g} is more than step_ms"
    if "compute_stream.compute_ms" in metrics:
        yield of(("compute_stream.hidden_ms", "compute_stream.exposed_ms"), "comm_ms")
        yield of([f"compute_stream.{part}_ms" for part in ("compute", "exposed", "idle")], "step_ms")
    if "calibrated.comm_ms" in metrics:
        yield of(("calibrated.hidden_ms", "calibrated.exposed_ms"), "calibrated.comm_ms")
        yield _wrong_rest(metrics)


def _wrong_rest(metrics: dict[str, Floats]) -> Contradiction:
    """Calibrated compute and exposed are estimates, each by itself, and may be more than the step."""
    idle_ms, step_ms = metrics["calibrated.idle_ms"], metrics["step_ms"]
    busy_ms = metrics["calibrated.compute_ms"] + metrics["calibrated.exposed_ms"]
    rest_ms = np.maximum(step_ms - busy_ms, 0.0)
    wrong = np.abs(idle_ms - rest_ms) > ROUNDING_MS + ROUNDING * np.maximum(step_ms, busy_ms)

    def what(row: int) -> str:
        parts = f"calibrated.compute_ms + calibrated.exposed_ms of {busy_ms[row]:.9g}"
        left = f"the {rest_ms[row]:.9g} that {parts} leave of step_ms of {step_ms[row]:.9g}"
        return f"calibrated.idle_ms of {idle_ms[row]:.9g} is not {left}"

    return wrong, what


def _is_more(one: Floats, other: Floats) -> NDArray[np.bool_]:
    """By more than rounding. Not where one of them is not known."""
    more: NDArray[np.bool_] = one - other > ROUNDING_MS + ROUNDING * np.maximum(one, other)
    return more


def _impossible(
    path: Path, key: tuple[Source, int] | None, what: str = "a time or a size that 64 bits cannot hold"
) -> RecordError:
    """key: source and global step."""
    if key is None:
        return RecordError(f"{path}: impossible record: {what}")
    line = _line_of(path, key)
    where = path if line is None else f"{path}:{line}"
    return RecordError(f"{where}: impossible record of global step {key[1]}: {what}")


class _Key(msgspec.Struct):
    source: str
    global_step: int


def _line_of(path: Path, key: tuple[Source, int]) -> int | None:
    """Looked for only where it is to be named; None where records are not lines of a file, but of a trace."""
    if STEPS_FILE.fullmatch(path.name) is None:
        return None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found = msgspec.json.decode(line, type=_Key)
                    if (found.source, found.global_step) == key:
                        return number
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        pass
    return None


def _sizes_are_possible(record: StepRecord) -> bool:
    """No run writes integers that 64 bits cannot hold."""
    numbers: list[int | None] = [record.start_unix_ns, record.epoch, record.step, record.tokens]
    if record.memory is not None:
        numbers += msgspec.structs.astuple(record.memory)
    if record.device is not None:
        numbers.append(record.device.sample_unix_ns)
    numbers.append(max((one.bytes or 0 for one in record.collectives or ()), default=0))
    return all(one is None or abs(one) < LIMIT for one in numbers)


_of_step = attrgetter(*STEP_METRICS)
_of_overlap = attrgetter(*OVERLAP_METRICS)


class _Building:
    """Rows as they come; columns that appear late have no value in earlier rows."""

    def __init__(self) -> None:
        self.row_of_step: dict[int, int] = {}
        self.rows: list[tuple[int, float, float, int, float, bool, bool]] = []
        self.always: list[tuple[float | None, ...]] = []
        """METRICS of every row."""
        self.columns: dict[str, dict[int, float]] = {}
        """The other metrics, by row."""
        self.calls = CallsBuilder()
        self.not_measured: dict[str, str] = {}
        self.passes: list[tuple[int, int, int]] = []
        self.repeated: dict[int, list[tuple[int, int]]] = {}
        self.gaps: list[tuple[int, str]] = []

    def may_follow(self, record: StepRecord) -> bool:
        """Whether the step was not there before, or is done again: by a later attempt, after a rollback."""
        row = self.row_of_step.get(record.global_step)
        return row is None or (record.attempt, record.rollbacks) > self.passes[row][:2]

    def add(self, record: StepRecord) -> None:
        row = len(self.rows)
        before = self.row_of_step.get(record.global_step)
        if before is not None:
            self.repeated.setdefault(record.global_step, []).append(self.passes[before][:2])
        if record.gap is not None:
            self.gaps.append((record.global_step, record.gap))
        self.row_of_step[record.global_step] = row
        self.passes.append((record.attempt, record.rollbacks, record.world_size))
        overlap = record.overlap
        self.always.append(_of_step(record) + _of_overlap(overlap))
        for op, exposed_ms in overlap.exposed_by_op.items():
            self._set(f"exposed_ms.{op}", row, exposed_ms)
            if op in overlap.hidden_by_op:
                self._set(f"comm_ms.{op}", row, overlap.hidden_by_op[op] + exposed_ms)
        if overlap.calibrated is not None:
            numbers = {name: getattr(overlap.calibrated, name) for name in CALIBRATED_METRICS}
            self._set_of("calibrated", row, _without_rounding(numbers), numbers["comm_ms"])
        if overlap.compute_stream is not None:
            numbers = {name: getattr(overlap.compute_stream, name) for name in COMPUTE_STREAM_METRICS}
            self._set_of("compute_stream", row, numbers, overlap.comm_ms)
        for name, value in of_record(record):
            self._set(name, row, value)
        for name, value in of_kernels(record):
            self._set(name, row, value)
        self.calls.add(row, record)
        for name, reason in record.not_measured.items():
            self.not_measured.setdefault(name.rpartition(".")[2], reason)
        self.rows.append(
            (
                record.start_unix_ns,
                record.start_unix_ns + (record.step_ms or 0.0) * 1e6,
                2000 * (record.clock_error_us or 0.0) + TOLERANCE_NS,
                record.num_collectives,
                np.nan if overlap.host_bound is None else float(overlap.host_bound),
                record.collectives is not None and record.active_segments is not None,
                record.collectives is not None,
            )
        )

    def _set(self, name: str, row: int, value: float | None) -> None:
        if value is not None:
            self.columns.setdefault(name, {})[row] = value

    def _set_of(self, kind: str, row: int, numbers: dict[str, float], comm_ms: float | None) -> None:
        """Numbers beside those of METRICS, with the ratios that are made of them."""
        for name, value in numbers.items():
            self._set(f"{kind}.{name}", row, value)
        for name, whole in (("overlap_ratio", comm_ms), ("hidden_per_compute", numbers["compute_ms"])):
            if whole is not None and whole > 0:
                self._set(f"{kind}.{name}", row, numbers["hidden_ms"] / whole)

    def finished(self) -> RankColumns:
        steps = np.array(list(self.row_of_step), dtype=np.int64)
        by_step = np.argsort(steps, kind="stable")
        # Rows of steps that were done again later are left out here.
        order = np.array(list(self.row_of_step.values()), dtype=np.int64)[by_step]
        attempt, rollbacks, world_size = np.array(self.passes, dtype=np.int64)[order].T
        start, end, tolerance, num, host_bound, details, kept = zip(*self.rows, strict=True)
        num_rows = len(steps)
        place = np.full(len(self.rows), -1, dtype=np.int32)
        place[order] = np.arange(num_rows, dtype=np.int32)
        calls = self.calls.finished().moved(place)
        metrics = dict(zip(METRICS, np.array(self.always, dtype=np.float64)[order].T, strict=True))
        metrics |= {name: _column(values, len(self.rows))[order] for name, values in self.columns.items()}
        for op, totals in totals_by_op(calls, num_rows).items():
            metrics |= {f"{name}.{op}": values for name, values in totals.items()}
        return RankColumns(
            global_step=steps[by_step],
            start_ns=np.array(start, dtype=np.int64)[order],
            end_ns=np.array(end, dtype=np.float64)[order],
            tolerance_ns=np.array(tolerance, dtype=np.float64)[order],
            metrics=metrics,
            num_collectives=np.array(num, dtype=np.int64)[order],
            host_bound=np.array(host_bound, dtype=np.float64)[order],
            has_details=np.array(details, dtype=bool)[order],
            has_collectives=np.array(kept, dtype=bool)[order],
            collectives=totals_by_kind(calls, calls.duration_ms, few_sizes(calls.kinds), num_rows),
            calls=calls,
            not_measured=self.not_measured,
            passes=Passes(attempt, rollbacks, world_size, self.repeated, self.gaps),
        )


def _without_rounding(numbers: dict[str, float]) -> dict[str, float]:
    """Sums of many pieces: what is below 0, or hidden above comm, by rounding alone is neither."""
    kept = {name: 0.0 if -ROUNDING_MS < value < 0 else value for name, value in numbers.items()}
    if kept["comm_ms"] < kept["hidden_ms"] < kept["comm_ms"] + ROUNDING_MS:
        kept["hidden_ms"] = kept["comm_ms"]
    return kept


def few_sizes(kinds: list[CollectiveKey]) -> dict[CollectiveKey, list[int]]:
    """What shares a row, by index: the sizes of an operation where there are more than MAX_SIZES."""
    many = _of_many_sizes(kinds)
    result: dict[CollectiveKey, list[int]] = {}
    for i, key in enumerate(kinds):
        result.setdefault(_of_any(key, many), []).append(i)
    return result


def _column(values: dict[int, float], num_rows: int) -> Floats:
    column = np.full(num_rows, np.nan)
    column[list(values)] = list(values.values())
    return column


# ---- all ranks ---------------------------------------------------------------------------------


def _place(source: Source, counts: dict[Source, int]) -> int:
    """Of a source among those of a run: the one with most steps comes first, kernel records before events."""
    if source == "kernels" and counts[source] >= FEWEST_BY_KERNELS:
        return -sum(counts.values())
    return -counts[source]


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
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
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


def _undisturbed(steps: NDArray[np.int64], run: RunRecord | None) -> tuple[NDArray[np.int64], list[str]]:
    """Without the steps in which torch's profiler worked, and a note of how many those were."""
    profiled = [] if run is None else run.coverage.get("profiled_steps", [])
    kept = steps[~np.isin(steps, profiled)]
    if not 0 < len(kept) < len(steps):
        return steps, []  # all of them: slow numbers are better than none
    return kept, [f"{len(steps) - len(kept)} steps are left out: torch's profiler worked in them"]


def _check_ranks(folder: Path, label: str, ranks: list[RankFile], run: RunRecord | None) -> None:
    names = sorted({rank.run_id for rank in ranks if rank.run_id is not None})
    if run is not None and run.run_id is not None and names and run.run_id not in names:
        names.append(run.run_id)
    if len(names) > 1:
        raise ReportError(f"{label}: {folder} mixes runs {' and '.join(names[:4])}; keep one run in a folder")
    is_other_attempt = run is not None and len(run.attempts) > 1
    sizes = sorted(
        {rank.world_size for rank in ranks} | ({run.world_size} if run and not is_other_attempt else set())
    )
    if len(sizes) > 1:
        raise ReportError(
            f"{label}: {folder} mixes runs of {' and '.join(map(str, sizes))} ranks; keep one run in a folder"
        )
    by_rank: dict[int, Path] = {}
    for one in ranks:
        named = STEPS_FILE.fullmatch(one.path.name)
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
    notes = []
    together = _done_together(per_rank, common)
    if not together.all():
        notes.append(
            f"{int((~together).sum())} steps are left out: the ranks' last records of them are of different "
            "attempts"
        )
        common = common[together]
    if len(common) == 0:
        return None
    longest = max(len(columns.global_step) for columns in per_rank)
    if len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    if source in OWN_SOURCES:
        common, note = _undisturbed(common, run)
        notes += note
    at = [np.searchsorted(columns.global_step, common) for columns in per_rank]
    overlapping = sum(_num_overlaps(columns, rows) for columns, rows in zip(per_rank, at, strict=True))
    if overlapping:
        notes.append(f"{overlapping} step windows overlap the next one: total counts that time twice")
    has_details = np.array([columns.has_details[rows] for columns, rows in zip(per_rank, at, strict=True)])
    every_rank: NDArray[np.bool_] = np.logical_and.reduce(has_details)
    kept = np.array([columns.has_collectives[rows] for columns, rows in zip(per_rank, at, strict=True)])
    all_kept: NDArray[np.bool_] = np.logical_and.reduce(kept)
    metrics = _metrics(per_rank, at)
    for kind in ("", "calibrated.", "compute_stream."):
        for name in PER_STEP:
            if f"{kind}{name}_ms" in metrics:
                shares = _shares(metrics[f"{kind}{name}_ms"], metrics["step_ms"])
                metrics[f"{kind}{name}_per_step"] = shares
    not_measured = {name: why for one in reversed(per_rank) for name, why in one.not_measured.items()}
    not_measured |= add_measures(metrics, run, not_measured)
    matched = _match([rank.rank for rank in ranks], per_rank, source)
    if matched is not None:
        notes += matched.notes
        if matched.num_matched:
            _add_waits(metrics, per_rank, at, matched)
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
        has_collectives=all_kept,
        totals={
            rank.rank: _total(metrics, num_collectives, i) if totals is None else totals[rank.rank]
            for i, rank in enumerate(ranks)
        },
        collectives=_collectives(per_rank, at, all_kept, matched),
        records=records,
        run=run,
        not_measured=not_measured,
        notes=notes,
        clock_offset_ns={}
        if matched is None
        else {
            rank.rank: round(ns)
            for rank, ns in zip(ranks, matched.clock.offset_ns.tolist(), strict=True)
            if ns
        },
        arrivals=_arrivals([rank.rank for rank in ranks], per_rank, at, matched),
    )


def _done_together(per_rank: list[RankColumns], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[step]: the ranks' numbers are of the same attempt, after as many rollbacks."""
    at = [np.searchsorted(columns.global_step, steps) for columns in per_rank]
    attempts, rollbacks = (
        np.array([getattr(c.passes, name)[rows] for c, rows in zip(per_rank, at, strict=True)])
        for name in ("attempt", "rollbacks")
    )
    alike: NDArray[np.bool_] = (attempts == attempts[0]).all(axis=0) & (rollbacks == rollbacks[0]).all(axis=0)
    return alike


def _metrics(per_rank: list[RankColumns], at: list[NDArray[np.intp]]) -> dict[str, Floats]:
    """[rank, step]. An operation that a step does not use took no time, where communication is known, and has
    no calls, where collectives were kept: in steps that were not timed too."""
    kept = np.array([columns.has_collectives[rows] for columns, rows in zip(per_rank, at, strict=True)])
    names = dict.fromkeys(METRICS)
    for name in sorted({name for columns in per_rank for name in columns.metrics}):
        names.setdefault(name)
    metrics: dict[str, Floats] = {}
    for name in names:
        values = np.full(kept.shape, np.nan)
        for i, (columns, rows) in enumerate(zip(per_rank, at, strict=True)):
            if name in columns.metrics:
                values[i] = columns.metrics[name][rows]
        if name.startswith(("comm_ms.", "exposed_ms.")):
            values[np.isnan(values) & ~np.isnan(metrics["comm_ms"])] = 0.0
        metrics[name] = values
    for name in [name for name in names if name.startswith("count.")]:
        is_absent = np.isnan(metrics[name]) & kept
        metrics[name][is_absent] = metrics[name.replace("count.", "bytes.", 1)][is_absent] = 0.0
    return metrics


def _shares(part_ms: Floats, step_ms: Floats) -> Floats:
    shares = np.full(part_ms.shape, np.nan)
    np.divide(part_ms, step_ms, out=shares, where=step_ms > 0)
    return shares


def _match(ranks: list[int], per_rank: list[RankColumns], source: Source) -> Matched | None:
    """None where there is nothing to match. Records of one run number their collectives alike; traces
    start anywhere, and their readers match them."""
    calls = [columns.calls for columns in per_rank if columns.calls is not None]
    if len(ranks) < 2 or len(calls) < len(ranks) or source not in OWN_SOURCES:
        return None
    return match(ranks, calls)


def _add_waits(
    metrics: dict[str, Floats], per_rank: list[RankColumns], at: list[NDArray[np.intp]], matched: Matched
) -> None:
    """wait_ms.<op>, transfer_ms.<op>, busbw by transfer, and exposed communication split."""
    shape = metrics["comm_ms"].shape
    metrics["exposed_wait_ms"] = np.full(shape, np.nan)
    for i, (columns, rows, waits) in enumerate(zip(per_rank, at, matched.waits, strict=True)):
        calls = columns.calls
        assert calls is not None
        for op, sums in sums_by_op(calls, waits, len(columns.global_step)).items():
            for name, values in zip(("wait_ms", "transfer_ms"), sums, strict=True):
                metrics.setdefault(f"{name}.{op}", np.full(shape, np.nan))[i] = values[rows]
        window_ns = pairs(columns.start_ns[rows].astype(np.float64), columns.end_ns[rows])
        wait_ms = exposed_wait_ms(calls, waits, window_ns)
        metrics["exposed_wait_ms"][i] = np.where(columns.has_details[rows], wait_ms, np.nan)
    num_split = np.isfinite(metrics["exposed_wait_ms"]).sum()
    num_kept = sum(
        int(columns.has_collectives[rows].sum()) for columns, rows in zip(per_rank, at, strict=True)
    )
    if num_split < FEWEST_WITH_SEGMENTS * num_kept:
        # Lines of kernel records have segments in few steps: a split of those is none of all steps.
        del metrics["exposed_wait_ms"]
        busbw_by_transfer(metrics)
        return
    metrics["exposed_wait_ms"] = np.minimum(metrics["exposed_wait_ms"], metrics["exposed_ms"])
    metrics["exposed_transfer_ms"] = metrics["exposed_ms"] - metrics["exposed_wait_ms"]
    busbw_by_transfer(metrics)


def _arrivals(
    ranks: list[int], per_rank: list[RankColumns], at: list[NDArray[np.intp]], matched: Matched | None
) -> Arrivals | None:
    if matched is None or not matched.num_matched:
        return None
    of_ranks = []
    for columns, rows, waits in zip(per_rank, at, matched.waits, strict=True):
        calls = columns.calls
        assert calls is not None
        column = np.full(len(columns.global_step), -1, dtype=np.int64)
        column[rows] = np.arange(len(rows))
        sizes = np.array([len(group[1]) for group in calls.groups], dtype=np.int64)
        num_ranks = sizes[calls.group] if len(sizes) else np.zeros(0, dtype=np.int64)
        of_ranks.append(
            RankWaits(calls.start_ns, column[calls.row], num_ranks, waits.wait_ms, waits.late_rank)
        )
    return arrivals(ranks, of_ranks, len(at[0]), matched.clock.residual_us)


def busbw_by_transfer(metrics: dict[str, Floats]) -> None:
    """Bandwidth without the wait for late ranks, for operations whose transfer is known. Then steps whose
    transfer is not known have none: a column has one meaning."""
    for name in [name for name in metrics if name.startswith("busbw_gb_s.")]:
        op = name.partition(".")[2]
        if not is_of_transfer(metrics, op):
            continue
        transfer_ms, duration_ms = metrics[f"transfer_ms.{op}"], metrics[f"duration_ms.{op}"]
        longer = np.full(transfer_ms.shape, np.nan)
        np.divide(duration_ms, transfer_ms, out=longer, where=transfer_ms > 0)
        metrics[name] = metrics[name] * longer


def is_of_transfer(metrics: dict[str, Floats], op: str) -> bool:
    """Whether busbw_gb_s.<op> is over the transfer, as where that is known in at least half of the ranks'
    steps. Otherwise it is over the whole duration, which holds the wait for late ranks."""
    transfer_ms = metrics.get(f"transfer_ms.{op}")
    if transfer_ms is None:
        return False
    num_known, num_timed = (transfer_ms > 0).sum(), np.isfinite(metrics[f"duration_ms.{op}"]).sum()
    return bool(0 < num_timed <= 2 * num_known)


def _num_overlaps(columns: RankColumns, rows: NDArray[np.intp]) -> int:
    before, after = rows[:-1], rows[1:]
    limit = columns.start_ns[after] + columns.tolerance_ns[before]
    return int(np.count_nonzero(columns.end_ns[before] > limit))


def _collectives(
    per_rank: list[RankColumns],
    at: list[NDArray[np.intp]],
    has_collectives: NDArray[np.bool_],
    matched: Matched | None,
) -> list[CollectiveKind]:
    known = np.flatnonzero(has_collectives)
    if len(known) == 0:
        return []
    keys = dict.fromkeys(key for columns in per_rank for key in columns.collectives)
    many = _of_many_sizes(keys)
    shape = (len(per_rank), len(known))
    found = {key: _no_collectives(key, shape) for key in dict.fromkeys(_of_any(key, many) for key in keys)}
    for i, (columns, rows) in enumerate(zip(per_rank, at, strict=True)):
        chosen = rows[known]
        sums: dict[CollectiveKey, list[tuple[Floats, Floats]]] = {}
        for key, (num, sum_ms) in columns.collectives.items():
            sums.setdefault(_of_any(key, many), []).append((num[chosen], sum_ms[chosen]))
        for key, parts in sums.items():
            num, sum_ms = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            found[key].count[i] = num
            found[key].duration_ms[i] = _means(sum_ms, num)
        if matched is not None:
            assert columns.calls is not None
            members: dict[CollectiveKey, list[int]] = {}
            for key, places in few_sizes(columns.calls.kinds).items():
                members.setdefault(_of_any(key, many), []).extend(places)
            waits = matched.waits[i]
            for name, values in (("wait_ms", waits.wait_ms), ("transfer_ms", waits.transfer_ms)):
                totals = totals_by_kind(columns.calls, values, members, len(columns.global_step))
                for key, (num, sum_ms) in totals.items():
                    getattr(found[key], name)[i] = _means(sum_ms[chosen], num[chosen])
    return list(found.values())


def _of_many_sizes(kinds: Iterable[CollectiveKey]) -> set[str]:
    """Operations of which there are more than MAX_SIZES kinds."""
    return {op for op, num in Counter(kind[0] for kind in kinds).items() if num > MAX_SIZES}


def _of_any(key: CollectiveKey, many: set[str]) -> CollectiveKey:
    """The kind that it is counted under: sizes of the operations in many are one."""
    return (key[0], ANY_SIZE, *key[2:]) if key[0] in many else key


def _no_collectives(key: CollectiveKey, shape: tuple[int, int]) -> CollectiveKind:
    op, size, dtype, num_ranks, stream = key
    return CollectiveKind(
        op=op,
        bytes=size if size >= 0 else None,
        dtype=dtype,
        num_ranks=num_ranks or None,
        stream=stream,
        count=np.full(shape, np.nan),
        duration_ms=np.full(shape, np.nan),
        wait_ms=np.full(shape, np.nan),
        transfer_ms=np.full(shape, np.nan),
    )


def _means(sums: Floats, num: Floats) -> Floats:
    """NaN of none."""
    means = np.full(num.shape, np.nan)
    np.divide(sums, num, out=means, where=num > 0)
    return means


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
