"""Loads the folder of a run into one table of numbers per source.

Only sums are kept, one float per rank, step and metric; the detail lists go by line by line.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError, ReportError
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import RunRecord, Source, StepRecord

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
METRICS = (*STEP_METRICS, *OVERLAP_METRICS)
"""Metrics of every step, in the order of reports. Per operation there is also comm_ms.<op> and
exposed_ms.<op>, and calibrated.<metric> where the run was calibrated."""

SOURCES: tuple[Source, ...] = ("events", "host", "kineto", "rocprofv3", "nsys", "projected")
TOLERANCE_NS = 100_000
"""By which windows of neighbouring steps may overlap before it is said."""
RANK_FILE = re.compile(r"rank_(\d+)_metrics\.jsonl")


@dataclass(frozen=True, slots=True)
class Dataset:
    """The steps of one run that every rank recorded, by one source."""

    label: str
    folder: Path
    source: Source
    ranks: list[int]
    global_step: NDArray[np.int64]
    """Of the columns of every metric."""
    metrics: dict[str, NDArray[np.float64]]
    """[rank, step]; NaN where it was not measured."""
    num_collectives: NDArray[np.int64]
    """[rank, step]"""
    host_bound: NDArray[np.float64]
    """[rank, step]: 1, 0, or NaN where it is not known."""
    run: RunRecord | None
    not_measured: dict[str, str]
    notes: list[str]
    other_sources: dict[str, "Dataset"] = field(default_factory=dict)
    """The same run seen by another source, for other steps or the same; never mixed in."""

    @property
    def num_steps(self) -> int:
        return len(self.global_step)


def load_run(folder: Path | str, label: str) -> Dataset:
    """The records of a folder; ReportError or RecordError in one line where they cannot be used."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"{label}: there is no folder {folder}")
    paths = sorted(p for p in folder.iterdir() if RANK_FILE.fullmatch(p.name))
    if not paths:
        raise ReportError(f"{label}: {folder} holds no rank_<n>_metrics.jsonl")
    run = read_run(folder) if (folder / "run.json").exists() else None
    notes: list[str] = []
    if run is None:
        notes.append("run.json is missing: device and configuration are not known")

    files = [_RankFile(path, notes) for path in paths]
    _check_ranks(folder, label, files, run)
    files.sort(key=lambda file: file.rank)
    counts = Counter(source for file in files for source, rows in file.rows.items() for _ in rows)
    present = sorted(counts, key=lambda source: (-counts[source], SOURCES.index(source)))
    datasets = {source: _dataset(label, folder, source, files, run) for source in present}
    for source in [source for source in present if datasets[source] is None]:
        notes.append(f"lines of source {source} are left out: no step has them from every rank")
        del datasets[source]
    usable = [dataset for dataset in datasets.values() if dataset is not None]
    if not usable:
        counts_text = ", ".join(f"rank {f.rank} {sum(map(len, f.rows.values()))}" for f in files[:8])
        raise ReportError(
            f"{label}: {folder}: no step was recorded by every rank from one source ({counts_text} lines)"
        )
    main, *others = usable
    main.notes[:0] = notes
    main.other_sources.update({other.source: other for other in others})
    return main


class _RankFile:
    """The numbers of one file, by source and global step."""

    def __init__(self, path: Path, notes: list[str]) -> None:
        self.path = path
        self.rows: dict[Source, dict[int, _Row]] = {}
        self.rank = -1
        self.world_size = -1
        self.not_measured: dict[str, str] = {}
        for record in read_steps(path, notes):
            self._add(record)
        if not self.rows:
            raise ReportError(f"{path} holds no step")

    def _add(self, record: StepRecord) -> None:
        if not self.rows:
            self.rank, self.world_size = record.rank, record.world_size
        elif (record.rank, record.world_size) != (self.rank, self.world_size):
            raise RecordError(
                f"{self.path} mixes runs: rank {self.rank} of {self.world_size}"
                f" and rank {record.rank} of {record.world_size}"
            )
        rows = self.rows.setdefault(record.source, {})
        if record.global_step in rows:
            raise RecordError(
                f"{self.path} mixes runs: global step {record.global_step} by {record.source} is there twice"
            )
        rows[record.global_step] = _Row(record)
        for name, reason in record.not_measured.items():
            self.not_measured.setdefault(name.rpartition(".")[2], reason)


class _Row:
    __slots__ = ("end_ns", "host_bound", "num_collectives", "start_ns", "tolerance_ns", "values")

    def __init__(self, record: StepRecord) -> None:
        overlap = record.overlap
        values: dict[str, float | None] = {name: getattr(record, name) for name in STEP_METRICS}
        values.update((name, getattr(overlap, name)) for name in OVERLAP_METRICS)
        for op, exposed_ms in overlap.exposed_by_op.items():
            values[f"exposed_ms.{op}"] = exposed_ms
            if op in overlap.hidden_by_op:
                values[f"comm_ms.{op}"] = overlap.hidden_by_op[op] + exposed_ms
        if overlap.calibrated is not None:
            for name in CALIBRATED_METRICS:
                values[f"calibrated.{name}"] = getattr(overlap.calibrated, name)
        self.values = values
        self.num_collectives = record.num_collectives
        self.host_bound = overlap.host_bound
        self.start_ns = record.start_unix_ns
        self.end_ns = record.start_unix_ns + (record.step_ms or 0.0) * 1e6
        self.tolerance_ns = 2000 * (record.clock_error_us or 0.0) + TOLERANCE_NS

    def value(self, name: str) -> float | None:
        """An operation that the step does not use took no time, where communication is known."""
        value = self.values.get(name)
        if value is None and name.startswith(("comm_ms.", "exposed_ms.")) and name not in self.values:
            return None if self.values["comm_ms"] is None else 0.0
        return value


def _check_ranks(folder: Path, label: str, files: list[_RankFile], run: RunRecord | None) -> None:
    sizes = sorted({file.world_size for file in files} | ({run.world_size} if run else set()))
    if len(sizes) > 1:
        raise ReportError(
            f"{label}: {folder} mixes runs of {' and '.join(map(str, sizes))} ranks; keep one run in a folder"
        )
    by_rank: dict[int, Path] = {}
    for file in files:
        named = RANK_FILE.fullmatch(file.path.name)
        if file.rank in by_rank:
            raise ReportError(
                f"{label}: rank {file.rank} is there twice, in {by_rank[file.rank]} and {file.path}"
            )
        if named is None or int(named[1]) != file.rank:
            raise ReportError(f"{label}: {file.path} holds records of rank {file.rank}")
        by_rank[file.rank] = file.path
    missing = [rank for rank in range(min(sizes[0], 1_000_000)) if rank not in by_rank]
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ReportError(f"{label}: {folder} lacks rank {some} of {sizes[0]}")
    if max(by_rank) >= sizes[0]:
        raise ReportError(f"{label}: {folder} holds rank {max(by_rank)} of a run of {sizes[0]} ranks")


def _dataset(
    label: str, folder: Path, source: Source, files: list[_RankFile], run: RunRecord | None
) -> Dataset | None:
    """None where no step has this source from every rank."""
    per_rank = [file.rows.get(source, {}) for file in files]
    common = set(per_rank[0]).intersection(*per_rank[1:])
    if not common:
        return None
    notes = []
    longest = max(len(rows) for rows in per_rank)
    if len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    steps = sorted(common)
    rows = [[by_step[step] for step in steps] for by_step in per_rank]
    overlapping = sum(_num_overlaps(line) for line in rows)
    if overlapping:
        notes.append(f"{overlapping} step windows overlap the next one: total counts that time twice")
    names = dict.fromkeys(METRICS)
    for name in sorted({name for line in rows for row in line for name in row.values}):
        names.setdefault(name)
    return Dataset(
        label=label,
        folder=folder,
        source=source,
        ranks=[file.rank for file in files],
        global_step=np.array(steps, dtype=np.int64),
        metrics={
            name: np.array([[row.value(name) for row in line] for line in rows], dtype=np.float64)
            for name in names
        },
        num_collectives=np.array([[row.num_collectives for row in line] for line in rows], dtype=np.int64),
        host_bound=np.array(
            [[np.nan if row.host_bound is None else float(row.host_bound) for row in line] for line in rows]
        ),
        run=run,
        not_measured={name: reason for file in reversed(files) for name, reason in file.not_measured.items()},
        notes=notes,
    )


def _num_overlaps(rows: list[_Row]) -> int:
    return sum(a.end_ns > b.start_ns + a.tolerance_ns for a, b in pairwise(rows))
