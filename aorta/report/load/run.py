"""Puts the columns of all ranks side by side: one table of numbers per source.

Files go by line by line and rank by rank; what stays is one float per rank, step and metric. Details of
single steps are read again when a picture or a page asks for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.errors import ReportError
from aorta.records.schema import RunRecord, Source, StepRecord
from aorta.report.load.arrivals import RankWaits, arrivals
from aorta.report.load.columns import (
    CollectiveKey,
    Floats,
    RankColumns,
    RankFile,
    few_sizes,
    operations_of_many_sizes,
    shared_kind,
)
from aorta.report.load.host import PREFIX as HOST
from aorta.report.load.measures import add_measures
from aorta.report.load.waits import (
    MatchedRanks,
    StepWaits,
    add_waits,
    add_waits_of_kinds,
    exposed_wait_ms,
    match_calls,
)
from aorta.report.metrics import (
    METRIC_SOURCES,
    METRICS,
    PER_STEP,
    metric_key,
    of_operation,
    of_source,
    operations,
)
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
) -> Run:
    """The Run of the source with the most lines, the others beside it. ranks are in order."""
    counts: Counter[Source] = Counter()
    for rank in ranks:
        counts.update({source: len(columns.global_step) for source, columns in rank.columns.items()})
    runs: list[Run] = []
    for source in sorted(counts, key=lambda source: (_place(source, counts), SOURCES.index(source))):
        source_run = _one_source(path, label, source, ranks, run, records(source), totals)
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
) -> Run | None:
    """The run by one source; None where no step has it from every rank."""
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
    rows_of_steps = [np.searchsorted(columns.global_step, common) for columns in per_rank]
    overlapping = sum(
        _num_overlaps(columns, rows) for columns, rows in zip(per_rank, rows_of_steps, strict=True)
    )
    if overlapping:
        notes.append(f"{overlapping} step windows overlap the next one: total counts that time twice")
    has_details = np.array(
        [columns.has_details[rows] for columns, rows in zip(per_rank, rows_of_steps, strict=True)]
    )
    every_rank: NDArray[np.bool_] = np.logical_and.reduce(has_details)
    collectives_kept = np.array(
        [columns.has_collectives[rows] for columns, rows in zip(per_rank, rows_of_steps, strict=True)]
    )
    all_kept: NDArray[np.bool_] = np.logical_and.reduce(collectives_kept)
    metrics = _metrics(per_rank, rows_of_steps)
    for source_of_metric in METRIC_SOURCES:
        for name in PER_STEP:
            part = of_source(source_of_metric, f"{name}_ms")
            if part in metrics:
                shares = _shares(metrics[part], metrics["step_ms"])
                metrics[of_source(source_of_metric, f"{name}_per_step")] = shares
    host_parts = {name: metrics.pop(name) for name in [name for name in metrics if name.startswith(HOST)]}
    not_measured = {
        name: reason
        for rank_columns in reversed(per_rank)
        for name, reason in rank_columns.not_measured.items()
    }
    not_measured |= add_measures(metrics, run, not_measured)
    matched = _match([rank.rank for rank in ranks], per_rank, source)
    if matched is not None:
        notes += matched.notes
        if matched.num_matched:
            _add_waits(metrics, per_rank, rows_of_steps, matched)
    num_collectives = np.array(
        [c.num_collectives[rows] for c, rows in zip(per_rank, rows_of_steps, strict=True)]
    )
    return Run(
        label=label,
        path=path,
        source=source,
        ranks=[rank.rank for rank in ranks],
        global_step=common,
        start_unix_ns=np.array([c.start_ns[rows] for c, rows in zip(per_rank, rows_of_steps, strict=True)]),
        metrics=metrics,
        num_collectives=num_collectives,
        host_bound=np.array([c.host_bound[rows] for c, rows in zip(per_rank, rows_of_steps, strict=True)]),
        has_details=every_rank,
        has_collectives=all_kept,
        totals={
            rank.rank: _total(metrics, num_collectives, i) if totals is None else totals[rank.rank]
            for i, rank in enumerate(ranks)
        },
        collectives=_collectives(per_rank, rows_of_steps, all_kept, matched),
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
        arrivals=_arrivals([rank.rank for rank in ranks], per_rank, rows_of_steps, matched),
        host_parts=host_parts,
    )


def _done_together(per_rank: list[RankColumns], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[step]: the ranks' numbers are of the same attempt, after as many rollbacks."""
    rows_of_steps = [np.searchsorted(columns.global_step, steps) for columns in per_rank]
    attempts, rollbacks = (
        np.array([getattr(c.passes, name)[rows] for c, rows in zip(per_rank, rows_of_steps, strict=True)])
        for name in ("attempt", "rollbacks")
    )
    alike: NDArray[np.bool_] = (attempts == attempts[0]).all(axis=0) & (rollbacks == rollbacks[0]).all(axis=0)
    return alike


def _metrics(per_rank: list[RankColumns], rows_of_steps: list[NDArray[np.intp]]) -> dict[str, Floats]:
    """[rank, step]. An operation that a step does not use took no time, where communication is known, and has
    no calls, where collectives were kept: in steps that were not timed too."""
    collectives_kept = np.array(
        [columns.has_collectives[rows] for columns, rows in zip(per_rank, rows_of_steps, strict=True)]
    )
    names = dict.fromkeys(METRICS)
    for name in sorted({name for columns in per_rank for name in columns.metrics}):
        names.setdefault(name)
    metrics: dict[str, Floats] = {}
    for name in names:
        values = np.full(collectives_kept.shape, np.nan)
        for i, (columns, rows) in enumerate(zip(per_rank, rows_of_steps, strict=True)):
            if name in columns.metrics:
                values[i] = columns.metrics[name][rows]
        key = metric_key(name)
        if key.operation and key.name in ("comm_ms", "exposed_ms"):
            values[np.isnan(values) & ~np.isnan(metrics["comm_ms"])] = 0.0
        metrics[name] = values
    for op in operations(names, "count"):
        count, size = metrics[of_operation("count", op)], metrics[of_operation("bytes", op)]
        is_absent = np.isnan(count) & collectives_kept
        count[is_absent] = size[is_absent] = 0.0
    return metrics


def _shares(part_ms: Floats, step_ms: Floats) -> Floats:
    shares = np.full(part_ms.shape, np.nan)
    np.divide(part_ms, step_ms, out=shares, where=step_ms > 0)
    return shares


def _match(ranks: list[int], per_rank: list[RankColumns], source: Source) -> MatchedRanks | None:
    """Matched ranks; None where there is nothing to match. Records of one run number their collectives alike;
    traces start anywhere, and their readers match them."""
    calls = [columns.calls for columns in per_rank if columns.calls is not None]
    if len(ranks) < 2 or len(calls) < len(ranks) or source not in OWN_SOURCES:
        return None
    return match_calls(ranks, calls)


def _add_waits(
    metrics: dict[str, Floats],
    per_rank: list[RankColumns],
    rows_of_steps: list[NDArray[np.intp]],
    matched: MatchedRanks,
) -> None:
    """wait_ms.<op>, transfer_ms.<op>, busbw by transfer, and exposed communication split."""
    shape = metrics["comm_ms"].shape
    metrics["exposed_wait_ms"] = np.full(shape, np.nan)
    step_waits = []
    for i, (columns, rows, waits) in enumerate(zip(per_rank, rows_of_steps, matched.waits, strict=True)):
        calls = columns.calls
        assert calls is not None
        ops = np.array([kind[0] for kind in calls.kinds], dtype=str)
        step_waits.append(StepWaits(ops[calls.kind], _columns_of_rows(columns, rows)[calls.row], waits))
        window_ns = pairs(columns.start_ns[rows].astype(np.float64), columns.end_ns[rows])
        wait_ms = exposed_wait_ms(calls, waits, window_ns)
        is_known = columns.has_collectives[rows] & columns.has_exposed[rows]
        metrics["exposed_wait_ms"][i] = np.where(is_known, wait_ms, np.nan)
    add_waits(metrics, step_waits, shape[1])
    num_split = np.isfinite(metrics["exposed_wait_ms"]).sum()
    num_kept = sum(
        int(columns.has_collectives[rows].sum())
        for columns, rows in zip(per_rank, rows_of_steps, strict=True)
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
    ranks: list[int],
    per_rank: list[RankColumns],
    rows_of_steps: list[NDArray[np.intp]],
    matched: MatchedRanks | None,
) -> Arrivals | None:
    if matched is None or not matched.num_matched:
        return None
    of_ranks = []
    for columns, rows, waits in zip(per_rank, rows_of_steps, matched.waits, strict=True):
        calls = columns.calls
        assert calls is not None
        column = _columns_of_rows(columns, rows)
        sizes = np.array([len(group.ranks or ()) for group in calls.groups], dtype=np.int64)
        num_ranks = sizes[calls.group] if len(sizes) else np.zeros(0, dtype=np.int64)
        of_ranks.append(
            RankWaits(calls.start_ns, column[calls.row], num_ranks, waits.wait_ms, waits.late_rank)
        )
    return arrivals(ranks, of_ranks, len(rows_of_steps[0]), matched.clock.residual_us)


def _columns_of_rows(columns: RankColumns, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Column of the run of each row of a rank; -1 of those that are left out."""
    column = np.full(len(columns.global_step), -1, dtype=np.int64)
    column[rows] = np.arange(len(rows))
    return column


def busbw_by_transfer(metrics: dict[str, Floats]) -> None:
    """Bandwidth without the wait for late ranks, for operations whose transfer is known. Then steps whose
    transfer is not known have none: a column has one meaning."""
    for op in operations(metrics, "busbw_gb_s"):
        if not is_of_transfer(metrics, op):
            continue
        transfer_ms, duration_ms = (
            metrics[of_operation(name, op)] for name in ("transfer_ms", "duration_ms")
        )
        longer = np.full(transfer_ms.shape, np.nan)
        np.divide(duration_ms, transfer_ms, out=longer, where=transfer_ms > 0)
        metrics[of_operation("busbw_gb_s", op)] = metrics[of_operation("busbw_gb_s", op)] * longer


def is_of_transfer(metrics: dict[str, Floats], op: str) -> bool:
    """Returns True where busbw_gb_s.<op> is over the transfer: where that is known in at least half of the
    ranks' steps. Otherwise it is over the whole duration, which holds the wait for late ranks."""
    transfer_ms = metrics.get(of_operation("transfer_ms", op))
    if transfer_ms is None:
        return False
    num_known, num_timed = (
        (transfer_ms > 0).sum(),
        np.isfinite(metrics[of_operation("duration_ms", op)]).sum(),
    )
    return bool(0 < num_timed <= 2 * num_known)


def _num_overlaps(columns: RankColumns, rows: NDArray[np.intp]) -> int:
    rows_before, next_rows = rows[:-1], rows[1:]
    limit = columns.start_ns[next_rows] + columns.tolerance_ns[rows_before]
    return int(np.count_nonzero(columns.end_ns[rows_before] > limit))


def _collectives(
    per_rank: list[RankColumns],
    rows_of_steps: list[NDArray[np.intp]],
    has_collectives: NDArray[np.bool_],
    matched: MatchedRanks | None,
) -> list[CollectiveKind]:
    detailed = np.flatnonzero(has_collectives)
    if len(detailed) == 0:
        return []
    keys = dict.fromkeys(key for columns in per_rank for key in columns.collectives)
    many = operations_of_many_sizes(keys)
    shape = (len(per_rank), len(detailed))
    kinds_by_key = {
        key: _no_collectives(key, shape) for key in dict.fromkeys(shared_kind(key, many) for key in keys)
    }
    for i, (columns, rows) in enumerate(zip(per_rank, rows_of_steps, strict=True)):
        chosen = rows[detailed]
        sums: dict[CollectiveKey, list[tuple[Floats, Floats]]] = {}
        for key, (num, sum_ms) in columns.collectives.items():
            sums.setdefault(shared_kind(key, many), []).append((num[chosen], sum_ms[chosen]))
        for key, parts in sums.items():
            num, sum_ms = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            kinds_by_key[key].count[i] = num
            kinds_by_key[key].duration_ms[i] = _means(sum_ms, num)
        if matched is not None:
            assert columns.calls is not None
            members: dict[CollectiveKey, list[int]] = {}
            for key, places in few_sizes(columns.calls.kinds).items():
                members.setdefault(shared_kind(key, many), []).extend(places)
            kinds = [
                (kinds_by_key[key], np.isin(columns.calls.kind, places)) for key, places in members.items()
            ]
            column = _columns_of_rows(columns, chosen)[columns.calls.row]
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
