"""Collectives of a run: matched across ranks, their waiting and transfer as metrics and by kind."""

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace

import numpy as np

from aorta.account.load.arrays import Arrays, derive
from aorta.account.load.rank.calls import few_sizes, operations_of_many_sizes, shared_kind
from aorta.account.load.rank.host import BEHIND_EXPOSED, BEHIND_WAITS
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Arrivals, CallWaits, CollectiveKind
from aorta.account.numbers import number
from aorta.account.rows import ratio, row_blocks
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.intervals import length_within, union
from aorta.timeline.matching import CollectiveKey, RankCalls
from aorta.timeline.types import OWN_SOURCES, Source
from aorta.timeline.waits import NOBODY, RankView, Waits, exposed_wait_ms, match_numbered

FEWEST_WITH_SEGMENTS = 0.5
"""Part of the steps with collectives that need segments too, if exposed communication is to be split into
waiting and transfer."""
MOVED_MS = 1.0
"""Difference of the ranks' clocks above which a note tells it."""


def match_records(
    source: Source, ranks: Sequence[int], calls: Sequence[RankCalls], *, on_one_host: bool = False
) -> RankView | None:
    """Their collectives matched by number, with notes for a reader; None of lines made of a trace."""
    if source not in OWN_SOURCES:
        return None
    view = match_numbered(ranks, calls, is_one_clock=source == "host" and on_one_host)
    notes, clock = list(view.notes), view.clock
    num_matched, num_left = sum(view.num_matched), sum(view.num_left)
    if num_left:
        notes.append(
            f"{num_left} of {num_left + num_matched} records of collectives were not matched on all ranks:"
            " their waits are unknown"
        )
    if clock.residual_us is not None and num_matched:
        apart_ms = float(np.ptp(clock.offset_ns)) / 1e6
        moved = f", after an offset of {number(apart_ms)} ms was corrected" if apart_ms > MOVED_MS else ""
        notes.append(
            f"{sum(len(group.call) for group in view.groups)} collectives were matched across ranks, which"
            f" see their ends within {clock.residual_us:.0f} µs of each other{moved}"
        )
    if last := last_to_arrive(view):
        notes.append(last)
    return replace(view, notes=notes)


def last_to_arrive(view: RankView) -> str:
    """'rank 1 arrived last in 12 of 14 collectives'; '' where nobody did so for certain."""
    late: Counter[int] = Counter()
    num = 0
    for rank, rank_waits in zip(view.ranks, view.waits, strict=True):
        judged = rank_waits.late_rank[~np.isnan(rank_waits.wait_ms)]
        num = max(num, len(judged))
        late[rank] = int((judged == rank).sum())
    rank, count = max(late.items(), key=lambda item: item[1], default=(NOBODY, 0))
    return f"rank {rank} arrived last in {count} of {num} collectives" if count and len(late) > 1 else ""


# -- waits of a step ------------------------------------------------------------------------------------


def _sums(view: RankView, op: str, name: str, num_steps: int) -> Floats:
    """[rank, step]: wait_ms or transfer_ms over the collectives that a step issued; NaN without the
    operation, or with a collective of it that was not matched."""
    by_step = np.full((len(view.ranks), num_steps), np.nan)
    for row, (calls, waits) in enumerate(zip(view.calls, view.waits, strict=True)):
        chosen = np.flatnonzero(calls.of_kinds(lambda kind: kind[0] == op) & (calls.row >= 0))
        column, values = calls.row[chosen], getattr(waits, name)[chosen]
        has_calls = np.bincount(column, minlength=num_steps) > 0
        by_step[row, has_calls] = np.bincount(column, weights=values, minlength=num_steps)[has_calls]
    return by_step


def behind_ms(calls: RankCalls, lost_ms: Floats, num_steps: int) -> Floats:
    """[step]: by how much earlier a rank would have come to the end of its last collective, had each of them
    been shorter by lost_ms, as had no rank been late; NaN where that is not known.

    A device that does not wait goes on as far as work is queued: it begins no collective before the host has
    launched that. So what waits before a collective have cost it is at most the host's lead there. The
    least over a step's collectives is what is left at its end.
    """
    chosen = np.flatnonzero((calls.row >= 0) & ~np.isnan(lost_ms) & ~np.isnan(calls.lead_ms))
    order = chosen[np.lexsort((calls.start_ns[chosen], calls.row[chosen]))]
    row = calls.row[order]
    result = np.full(num_steps, np.nan)
    if not len(order):
        return result
    firsts = np.flatnonzero(np.r_[True, np.diff(row) > 0])
    total = np.add.reduceat(lost_ms[order], firsts)
    before = np.cumsum(lost_ms[order]) - lost_ms[order]
    before -= np.repeat(before[firsts], np.diff(np.r_[firsts, len(order)]))
    left = np.minimum.reduceat(calls.lead_ms[order] - before, firsts) + total
    result[row[firsts]] = np.minimum(left, total)
    return result


def _exposed_of_calls(calls: RankCalls, waits: Waits) -> Floats:
    """Of each call what nothing hides, its wait at least where that is known: of a broadcast it is not."""
    if not len(calls.exposed_ns):
        return waits.wait_ms
    origin = int(calls.exposed_ns.min())
    exposed = union((calls.exposed_ns - origin) / 1e6)
    start, end = ((ns - origin) / 1e6 for ns in (calls.start_ns, calls.end_ns))
    bare = np.where(np.isnan(calls.duration_ms), np.nan, length_within(exposed, start, end))
    return np.fmax(bare, waits.wait_ms)


def split_waits_by_step(
    metrics: Arrays,
    host_parts: Arrays,
    start_ns: Ints,
    view: RankView,
    collectives_kept: Flags,
    knows_waits: Flags,
) -> Floats:
    """Adds wait_ms.<op>, transfer_ms.<op>, and busbw by transfer. Returns the waits that nothing hides, NaN
    where they are not known.

    All are [rank, step]. start_ns: of the step; knows_waits: its collectives, and where these were exposed.
    """
    num_steps = metrics.shape[1]
    exposed_wait = np.full(metrics.shape, np.nan)
    step_ms = metrics["step_ms"]
    for i, (calls, waits) in enumerate(zip(view.calls, view.waits, strict=True)):
        end_ns = start_ns[i] + np.rint(1e6 * np.nan_to_num(step_ms[i])).astype(np.int64)
        wait_ms = exposed_wait_ms(calls, waits, np.stack((start_ns[i], end_ns), axis=1))
        exposed_wait[i] = np.where(knows_waits[i], wait_ms, np.nan)
        if len(host_parts):
            host_parts.set_row(BEHIND_WAITS, i, behind_ms(calls, waits.wait_ms, num_steps))
            behind = behind_ms(calls, _exposed_of_calls(calls, waits), num_steps)
            host_parts.set_row(BEHIND_EXPOSED, i, np.where(knows_waits[i], behind, np.nan))
    del step_ms  # of a large run 80 MB
    for op in dict.fromkeys(kind[0] for calls in view.calls for kind in calls.kinds):
        for name in ("wait_ms", "transfer_ms"):
            by_step = _sums(view, op, name, num_steps)
            if np.isfinite(by_step).any():
                metrics[of_operation(name, op)] = by_step
    busbw_by_transfer(metrics)
    if np.isfinite(exposed_wait).sum() < FEWEST_WITH_SEGMENTS * collectives_kept.sum():
        exposed_wait[:] = np.nan  # lines of kernel records have segments in few steps: a split of all is none
    return exposed_wait


def all_matched(start_ns: Ints, step_ms: Floats, view: RankView) -> Flags:
    """[rank, step]: the wait of every collective that runs in the step's window is known."""
    result = np.ones(start_ns.shape, dtype=bool)
    for row, (calls, waits) in enumerate(zip(view.calls, view.waits, strict=True)):
        starts, ends = (np.sort(ns[np.isnan(waits.wait_ms)]) for ns in (calls.start_ns, calls.end_ns))
        end_ns = start_ns[row] + np.rint(1e6 * np.nan_to_num(step_ms[row])).astype(np.int64)
        num_begun, num_over = np.searchsorted(starts, end_ns), np.searchsorted(ends, start_ns[row], "right")
        result[row] = num_begun == num_over
    return result


def is_one_group(kinds: Iterable[CollectiveKind], num_ranks: int) -> bool:
    """Every rank takes part in every collective."""
    return {1 if kind.op in POINT_TO_POINT else kind.num_ranks for kind in kinds} == {num_ranks} != {1}


def split_exposed(metrics: Arrays, matched_ms: Floats | None, is_one_group: bool) -> None:
    """Adds exposed_wait_ms and exposed_transfer_ms. matched_ms: of split_waits_by_step.

    Where all ranks communicate in the same groups, they leave together, and the last to come waits least:
    what another rank is exposed beyond that is waiting, even while other calls move. That needs no common
    clock. Elsewhere it is what matched collectives tell.
    """
    exposed_ms = metrics["exposed_ms"]
    least = np.full(metrics.shape[1], np.inf if is_one_group else np.nan)
    for rows in row_blocks(metrics.shape) if is_one_group else ():
        least = np.minimum(least, exposed_ms[rows].min(axis=0))
    if matched_ms is None and not np.isfinite(least).any():
        return
    for row, exposed in enumerate(exposed_ms):
        wait = exposed - least
        if matched_ms is not None:
            wait = np.fmax(wait, np.minimum(matched_ms[row], exposed))
        metrics.set_row("exposed_wait_ms", row, wait)
    del exposed_ms  # of a large run 80 MB
    metrics.derive("exposed_transfer_ms", np.subtract, "exposed_ms", "exposed_wait_ms")


def arrivals(view: RankView, matched_ms: Floats) -> Arrivals:
    """matched_ms: of split_waits_by_step."""
    ranks = np.array(view.ranks, dtype=np.int64)
    shape = matched_ms.shape
    num_last, num_judged = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    caused_ms = np.zeros(shape)
    call_waits = {}
    for row, (rank, calls, waits) in enumerate(zip(view.ranks, view.calls, view.waits, strict=True)):
        is_matched = np.isfinite(waits.wait_ms)
        order = np.argsort(calls.start_ns[is_matched], kind="stable")
        call_waits[rank] = CallWaits(calls.start_ns[is_matched][order], waits.wait_ms[is_matched][order])
        is_shown = is_matched & (calls.row >= 0)
        column, late = calls.row[is_shown], waits.late_rank[is_shown]
        np.add.at(num_judged[row], column, 1)
        np.add.at(num_last[row], column[late == rank], 1)
        blamed = np.searchsorted(ranks, late).clip(max=len(ranks) - 1)
        is_victim = (ranks[blamed] == late) & (late != rank)
        num_ranks = np.array([len(key.ranks or ()) or len(ranks) for key in calls.groups], dtype=np.int64)
        num_others = np.maximum(num_ranks[calls.group[is_shown]] - 1, 1)[is_victim]
        shares_ms = waits.wait_ms[is_shown][is_victim] / num_others
        np.add.at(caused_ms, (blamed[is_victim], column[is_victim]), shares_ms)
    return Arrivals(num_last, num_judged, caused_ms, matched_ms, call_waits)


# -- bandwidth over the transfer ------------------------------------------------------------------------


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
    return busbw_gb_s * ratio(duration_ms, transfer_ms)


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


# -- collectives by kind -------------------------------------------------------------------------------------


def collectives(
    of_ranks: Sequence[dict[CollectiveKey, tuple[Floats, Floats]]],
    has_collectives: Flags,
    view: RankView | None,
) -> list[CollectiveKind]:
    """The kinds that any rank issued, over the steps whose collectives all ranks kept.

    of_ranks: per rank and kind, the number of collectives and their time in these steps.
    """
    detailed = np.flatnonzero(has_collectives)
    if len(detailed) == 0:
        return []
    keys = dict.fromkeys(key for kinds in of_ranks for key in kinds)
    many = operations_of_many_sizes(keys)
    shape = (len(of_ranks), len(detailed))
    kinds_by_key = {
        key: _no_collectives(key, shape) for key in dict.fromkeys(shared_kind(key, many) for key in keys)
    }
    place = np.full(len(has_collectives), -1, dtype=np.int64)
    place[detailed] = np.arange(len(detailed))
    for i, of_rank in enumerate(of_ranks):
        sums: dict[CollectiveKey, list[tuple[Floats, Floats]]] = {}
        for key, parts_of_kind in of_rank.items():
            sums.setdefault(shared_kind(key, many), []).append(parts_of_kind)
        for key, parts in sums.items():
            num, sum_ms = (np.sum(part, axis=0) for part in zip(*parts, strict=True))
            kinds_by_key[key].count[i] = num
            kinds_by_key[key].duration_ms[i] = ratio(sum_ms, num)
    for i, (calls, waits) in enumerate(() if view is None else zip(view.calls, view.waits, strict=True)):
        column = np.where(calls.row >= 0, place[calls.row], -1)
        members: dict[CollectiveKey, list[int]] = {}
        for key, places in few_sizes(calls.kinds).items():
            members.setdefault(shared_kind(key, many), []).extend(places)
        for key, places in members.items():
            if key in kinds_by_key:  # else these are of no step
                _add_waits(kinds_by_key[key], i, column, np.isin(calls.kind, places), waits)
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


def _add_waits(kind: CollectiveKind, row: int, column: Ints, belongs: Flags, waits: Waits) -> None:
    """Writes into a kind the mean wait and transfer of a rank's collectives of it, in every step.

    belongs: the calls of this kind. row: of the rank. column: the step of the kind's arrays that issued each
    call, -1 for none of them.
    """
    chosen = belongs & (column >= 0)
    num = np.bincount(column[chosen], minlength=kind.wait_ms.shape[1])
    for by_step, values in ((kind.wait_ms, waits.wait_ms), (kind.transfer_ms, waits.transfer_ms)):
        total = np.bincount(column[chosen], weights=values[chosen], minlength=kind.wait_ms.shape[1])
        by_step[row, num > 0] = total[num > 0] / num[num > 0]
