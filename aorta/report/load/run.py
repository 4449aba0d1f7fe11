"""Puts the columns of all ranks side by side: one table of numbers per source.

Files go by line by line and rank by rank; what stays is one float per rank, step and metric. Details of
single steps are read again when a picture or a page asks for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.errors import ReportError
from aorta.records.schema import RunRecord, Source, StepRecord
from aorta.report.load.arrays import MOST_IN_MEMORY, ArrayFile, derive
from aorta.report.load.arrivals import RankWaits, arrivals
from aorta.report.load.measures import add_measures
from aorta.report.load.rank.columns import (
    CollectiveKey,
    Floats,
    RankFile,
    SourceColumns,
    few_sizes,
    operations_of_many_sizes,
    shared_kind,
)
from aorta.report.load.sides import Sides, side_by_side
from aorta.report.load.waits import (
    MatchedRanks,
    StepWaits,
    add_waits,
    add_waits_of_kinds,
    exposed_wait_ms,
    match_calls,
)
from aorta.report.metrics import METRIC_SOURCES, PER_STEP, of_operation, of_source, operations
from aorta.report.model import Arrivals, CollectiveKind, Run
from aorta.timeline.intervals import pairs
from aorta.timeline.types import OWN_SOURCES

SOURCES: tuple[Source, ...] = ("kernels", "events", "host", "kineto", "rocprofv3", "nsys", "projected")
TOTAL_SUMS = ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
FEWEST_WITH_SEGMENTS = 0.5
"""Part of the steps with collectives that need segments too, if exposed communication is to be split into
waiting and transfer."""
FEWEST_BY_KERNELS = 8
"""Steps timed by kernel records from which on they speak for a run: its others are profiled or not timed."""


def _place(source: Source, counts: dict[Source, int]) -> int:
    """Sort key of a source within a run: most steps first, kernel records before events."""
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
    *,
    file: ArrayFile | None = None,
    matches: bool = True,
) -> Run:
    """The Run of the source with the most lines, the others beside it. ranks are in order.

    file: keeps arrays of more than MOST_IN_MEMORY numbers. matches: ranks are matched by their collectives.
    """
    counts: Counter[Source] = Counter()
    for rank in ranks:
        counts.update({source: len(columns.global_step) for source, columns in rank.columns.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
        source_run = _one_source(path, label, source, ranks, run, records(source), totals, file, matches)
        if source_run is None:
            notes.append(f"lines of source {source} are left out: no step has them from every rank")
        else:
            runs.append(source_run)
    if not runs:
        lines = ", ".join(
            f"rank {rank.rank} {sum(len(c.global_step) for c in rank.columns.values())}" for rank in ranks[:8]
        )
        raise ReportError(
            f"{label}: {path}: no step was recorded by every rank from one source ({lines} lines)"
        )
    main, *other_runs = runs
    main.notes[:0] = notes
    main.other_sources.update({other_run.source: other_run for other_run in other_runs})
    return main


def _undisturbed(steps: NDArray[np.int64], run: RunRecord | None) -> tuple[NDArray[np.int64], list[str]]:
    """Steps without those in which torch's profiler worked, and a note of how many those were."""
    profiled = [] if run is None else run.coverage.get("profiled_steps", [])
    unprofiled = steps[~np.isin(steps, profiled)]
    if not 0 < len(unprofiled) < len(steps):
        return steps, []  # all of them: slow numbers are better than none
    return unprofiled, [f"{len(steps) - len(unprofiled)} steps are left out: torch's profiler worked in them"]


def _one_source(
    path: Path,
    label: str,
    source: Source,
    ranks: list[RankFile],
    run: RunRecord | None,
    records: Callable[[int], Iterator[StepRecord]],
    totals: dict[int, dict[str, float | int | None]] | None,
    file: ArrayFile | None,
    matches: bool,
) -> Run | None:
    """The run by one source; None where no step has it from every rank."""
    per_rank = [rank.columns[source] for rank in ranks if source in rank.columns]
    if len(per_rank) < len(ranks):
        return None
    notes: list[str] = []
    common = _common_steps(per_rank, notes)
    if len(common) == 0:
        return None
    if source in OWN_SOURCES:
        common, note = _undisturbed(common, run)
        notes += note
    own_file = file if len(per_rank) * len(common) > MOST_IN_MEMORY else None
    sides = side_by_side(per_rank, common, own_file, matches and len(ranks) > 1 and source in OWN_SOURCES)
    if sides.num_overlapping:
        notes.append(
            f"{sides.num_overlapping} step windows overlap the next one: total counts that time twice"
        )
    metrics = sides.metrics
    for source_of_metric in METRIC_SOURCES:
        for name in PER_STEP:
            part = of_source(source_of_metric, f"{name}_ms")
            if part in metrics:
                metrics.derive(of_source(source_of_metric, f"{name}_per_step"), _shares, part, "step_ms")
    not_measured = sides.not_measured
    not_measured |= add_measures(metrics, run, not_measured)
    matched = None if sides.calls is None else match_calls([rank.rank for rank in ranks], sides.calls)
    if matched is not None:
        notes += matched.notes
        if matched.num_matched:
            _add_waits(sides, matched)
    return Run(
        label=label,
        path=path,
        source=source,
        ranks=[rank.rank for rank in ranks],
        global_step=common,
        start_unix_ns=sides.integers["start_unix_ns"],
        metrics=metrics,
        num_collectives=sides.integers["num_collectives"],
        host_bound=sides.flags["host_bound"],
        has_details=sides.has_details,
        has_collectives=sides.has_collectives,
        totals=_totals(metrics, sides.integers["num_collectives"], ranks) if totals is None else totals,
        collectives=_collectives(sides, matched),
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
        arrivals=_arrivals([rank.rank for rank in ranks], sides, matched),
        host_parts=sides.host_parts,
    )


def _common_steps(per_rank: list[SourceColumns], notes: list[str]) -> NDArray[np.int64]:
    """Steps that every rank did, and did together; what is left out is noted."""
    common = per_rank[0].global_step
    for columns in per_rank[1:]:
        if columns.global_step is not common:
            common = common[np.isin(common, columns.global_step, assume_unique=True)]
    together = _done_together(per_rank, common)
    if not together.all():
        notes.append(
            f"{int((~together).sum())} steps are left out: the ranks' last records of them are of different "
            "attempts"
        )
        common = common[together]
    longest = max(len(columns.global_step) for columns in per_rank)
    if 0 < len(common) < longest:
        notes.append(f"{longest - len(common)} of {longest} steps are left out: not every rank recorded them")
    return common


def _done_together(per_rank: list[SourceColumns], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[step]: the ranks' numbers are of the same attempt, after as many rollbacks."""
    alike = np.ones(len(steps), dtype=bool)
    first = [column[np.searchsorted(per_rank[0].global_step, steps)] for column in _passes(per_rank[0])]
    for columns in per_rank[1:]:
        rows = np.searchsorted(columns.global_step, steps)
        for column, of_first in zip(_passes(columns), first, strict=True):
            alike &= column[rows] == of_first
    return alike


def _passes(columns: SourceColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return columns.passes.attempt, columns.passes.rollbacks


def _shares(part_ms: Floats, step_ms: Floats) -> Floats:
    shares = np.full(part_ms.shape, np.nan)
    np.divide(part_ms, step_ms, out=shares, where=step_ms > 0)
    return shares


def _add_waits(sides: Sides, matched: MatchedRanks) -> None:
    """wait_ms.<op>, transfer_ms.<op>, busbw by transfer, and exposed communication split."""
    metrics = sides.metrics
    step_waits = []
    num_split = 0
    start_ns, step_ms, exposed_ms = sides.integers["start_unix_ns"], metrics["step_ms"], metrics["exposed_ms"]
    for i, (columns, waits) in enumerate(zip(sides.calls or (), matched.waits, strict=True)):
        ops = np.array([kind[0] for kind in columns.kinds], dtype=str)
        step_waits.append(StepWaits(ops[columns.kind], columns.row, waits))
        start = start_ns[i].astype(np.float64)
        window_ns = pairs(start, start + np.nan_to_num(step_ms[i], nan=0.0) * 1e6)
        wait_ms = exposed_wait_ms(columns, waits, window_ns)
        exposed_wait = np.where(sides.knows_waits[i], wait_ms, np.nan)
        num_split += int(np.isfinite(exposed_wait).sum())
        metrics.set_row("exposed_wait_ms", i, np.minimum(exposed_wait, exposed_ms[i]))
    # Lines of kernel records have segments in few steps: a split of those is none of all steps.
    is_split = num_split >= FEWEST_WITH_SEGMENTS * sides.collectives_kept.sum()
    if not is_split:
        del metrics["exposed_wait_ms"]
    del start_ns, step_ms, exposed_ms  # of a large run 80 MB each
    add_waits(metrics, step_waits, metrics.shape[1])
    if is_split:
        metrics.derive("exposed_transfer_ms", np.subtract, "exposed_ms", "exposed_wait_ms")
    busbw_by_transfer(metrics)


def _arrivals(ranks: list[int], sides: Sides, matched: MatchedRanks | None) -> Arrivals | None:
    if matched is None or not matched.num_matched:
        return None
    of_ranks = []
    for calls, waits in zip(sides.calls or (), matched.waits, strict=True):
        sizes = np.array([len(group.ranks or ()) for group in calls.groups], dtype=np.int64)
        num_ranks = sizes[calls.group] if len(sizes) else np.zeros(0, dtype=np.int64)
        of_ranks.append(RankWaits(calls.start_ns, calls.row, num_ranks, waits.wait_ms, waits.late_rank))
    return arrivals(ranks, of_ranks, sides.metrics.shape[1], matched.clock.residual_us)


def busbw_by_transfer(metrics: MutableMapping[str, Floats]) -> None:
    """Bandwidth without the wait for late ranks, for operations whose transfer is known. Then steps whose
    transfer is not known have none: a column has one meaning."""
    for op in operations(metrics, "busbw_gb_s"):
        if not is_of_transfer(metrics, op):
            continue
        busbw, transfer, duration = (
            of_operation(name, op) for name in ("busbw_gb_s", "transfer_ms", "duration_ms")
        )
        derive(metrics, busbw, _of_transfer, busbw, transfer, duration)


def _of_transfer(busbw_gb_s: Floats, transfer_ms: Floats, duration_ms: Floats) -> Floats:
    longer = np.full(transfer_ms.shape, np.nan)
    np.divide(duration_ms, transfer_ms, out=longer, where=transfer_ms > 0)
    of_transfer: Floats = busbw_gb_s * longer
    return of_transfer


def is_of_transfer(metrics: Mapping[str, Floats], op: str) -> bool:
    """Returns True where busbw_gb_s.<op> is over the transfer: where that is known in at least half of the
    ranks' steps. Otherwise it is over the whole duration, which holds the wait for late ranks."""
    transfer_ms = metrics.get(of_operation("transfer_ms", op))
    if transfer_ms is None:
        return False
    num_known = (transfer_ms > 0).sum()
    del transfer_ms  # of a large run 80 MB
    num_timed = np.isfinite(metrics[of_operation("duration_ms", op)]).sum()
    return bool(0 < num_timed <= 2 * num_known)


def _collectives(sides: Sides, matched: MatchedRanks | None) -> list[CollectiveKind]:
    detailed = np.flatnonzero(sides.has_collectives)
    if len(detailed) == 0:
        return []
    keys = dict.fromkeys(key for kinds in sides.kinds for key in kinds)
    many = operations_of_many_sizes(keys)
    shape = (len(sides.kinds), len(detailed))
    kinds_by_key = {
        key: _no_collectives(key, shape) for key in dict.fromkeys(shared_kind(key, many) for key in keys)
    }
    place = np.full(sides.metrics.shape[1], -1, dtype=np.int64)
    place[detailed] = np.arange(len(detailed))
    for i, of_rank in enumerate(sides.kinds):
        sums: dict[CollectiveKey, list[tuple[Floats, Floats]]] = {}
        for key, parts_of_kind in of_rank.items():
            sums.setdefault(shared_kind(key, many), []).append(parts_of_kind)
        for key, parts in sums.items():
            num, sum_ms = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            kinds_by_key[key].count[i] = num
            kinds_by_key[key].duration_ms[i] = _means(sum_ms, num)
        if matched is not None and sides.calls is not None:
            calls = sides.calls[i]
            members: dict[CollectiveKey, list[int]] = {}
            for key, places in few_sizes(calls.kinds).items():
                members.setdefault(shared_kind(key, many), []).extend(places)
            kinds = [(kinds_by_key[key], np.isin(calls.kind, places)) for key, places in members.items()]
            column = np.where(calls.row >= 0, place[calls.row], -1)
            add_waits_of_kinds(kinds, i, column, matched.waits[i])
    return list(kinds_by_key.values())


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


def _totals(
    metrics: Mapping[str, Floats], num_collectives: NDArray[np.int64], ranks: list[RankFile]
) -> dict[int, dict[str, float | int | None]]:
    """Over every step read, warm-up included.

    Step windows meet and do not overlap, and a step's numbers are clipped to its window, so that
    their sum is the set arithmetic over all windows together.
    """
    sums = {
        name: [number(row.sum()) for row in metrics["step_ms" if name == "span_ms" else name]]
        for name in ("span_ms", *TOTAL_SUMS)
    }
    return {
        rank.rank: {
            **{name: of_ranks[i] for name, of_ranks in sums.items()},
            "num_kernels": None,  # records do not count kernels
            "num_collectives": int(num_collectives[i].sum()),
        }
        for i, rank in enumerate(ranks)
    }


def number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
