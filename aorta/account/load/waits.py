"""Collectives of a run: matched across ranks, their waiting and transfer as metrics and by kind."""

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.arrays import Arrays, derive
from aorta.account.load.rank.calls import (
    UNKNOWN_END,
    Floats,
    Ints,
    RecordedCalls,
    few_sizes,
    operations_of_many_sizes,
    shared_kind,
)
from aorta.account.load.rank.columns import CollectiveKey
from aorta.account.load.rank.host import BEHIND_EXPOSED, BEHIND_WAITS
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Arrivals, CallWaits, CollectiveKind
from aorta.account.numbers import number
from aorta.timeline.collective import POINT_TO_POINT, ROOTED
from aorta.timeline.common_clock import Clock, clock_of, why_vague
from aorta.timeline.intervals import Intervals, length_within, pairs, union
from aorta.timeline.matching import NumberedCalls, match_by_number
from aorta.timeline.waits import NOBODY, Waits, exposed_waiting, split_waits

FEWEST_WITH_SEGMENTS = 0.5
"""Part of the steps with collectives that need segments too, if exposed communication is to be split into
waiting and transfer."""
MOVED_MS = 1.0
"""Difference of the ranks' clocks above which a note tells it."""


class MatchedRanks(NamedTuple):
    """The collectives of records matched by number."""

    calls: list[RecordedCalls]
    """In the order of the ranks given."""
    waits: list[Waits]
    """The same."""
    clock: Clock
    num_matched: int
    notes: list[str]


def match_calls(ranks: list[int], calls: list[RecordedCalls], *, is_one_clock: bool = False) -> MatchedRanks:
    """Every collective with those of the other ranks of its group, on one clock, which is_one_clock says that
    they have."""
    numbered = [_numbered(rank_calls) for rank_calls in calls]
    groups = match_by_number(ranks, numbered)
    clock = clock_of(ranks, numbered, groups, is_one=is_one_clock)
    vague = why_vague(clock, numbered, groups)
    waits = split_waits(ranks, numbered, groups if vague is None else (), clock)
    num_between = sum(int(rank_calls.can_wait.sum()) for rank_calls in numbered)
    num_matched = sum(int((~np.isnan(rank_waits.wait_ms)).sum()) for rank_waits in waits)
    num_collectives = sum(len(group.call) for group in groups)
    notes = [vague] if vague else _notes(ranks, waits, clock, num_collectives, num_matched, num_between)
    return MatchedRanks(calls, waits, clock, num_matched, notes)


def _numbered(calls: RecordedCalls) -> NumberedCalls:
    """The calls as ranks are matched by."""
    is_collective = [op not in POINT_TO_POINT | ROOTED and num > 1 for op, _, _, num, _ in calls.kinds]
    can_wait = np.array(is_collective, dtype=bool)[calls.kind] & (calls.end_ns != UNKNOWN_END)
    return NumberedCalls(
        groups=calls.groups,
        group=calls.group,
        seq=calls.seq,
        ops=[kind[0] for kind in calls.kinds],
        sizes=np.array([kind[1] for kind in calls.kinds], dtype=np.int64),
        kind=calls.kind,
        can_wait=can_wait,
        start_ns=calls.start_ns,
        end_ns=calls.end_ns,
    )


class StepWaits(NamedTuple):
    """The waits of one rank's collectives, by step of the run."""

    op: NDArray[np.str_]
    """Operation of each call."""
    column: NDArray[np.integer[Any]]
    """Step that issued each call; -1 where it is none of the run."""
    waits: Waits


def add_waits(metrics: MutableMapping[str, Floats], ranks: Sequence[StepWaits], num_steps: int) -> None:
    """wait_ms.<op> and transfer_ms.<op>: per rank and step the sums over the collectives that it issued.

    NaN in steps without the operation, or with a collective of it that was not matched.
    """
    for op in dict.fromkeys(op for of_rank in ranks for op in dict.fromkeys(of_rank.op.tolist())):
        for name in ("wait_ms", "transfer_ms"):
            by_step = np.full((len(ranks), num_steps), np.nan)
            for row, (op_of_call, column, waits) in enumerate(ranks):
                chosen = np.flatnonzero((op_of_call == op) & (column >= 0))
                values = waits.wait_ms if name == "wait_ms" else waits.transfer_ms
                has_calls = np.bincount(column[chosen], minlength=num_steps) > 0
                total = np.bincount(column[chosen], weights=values[chosen], minlength=num_steps)
                by_step[row, has_calls] = total[has_calls]
            if np.isfinite(by_step).any():
                metrics[of_operation(name, op)] = by_step


def _exposed_wait_ms(calls: RecordedCalls, waits: Waits, window_ns: Intervals) -> Floats:
    """Exposed time in which nothing moves because a rank has not arrived, per window [step, 2] in ns."""
    is_matched = ~np.isnan(waits.wait_ms)
    if len(calls.exposed_ns) == 0 or not is_matched.any() or len(window_ns) == 0:
        return np.zeros(len(window_ns))
    origin = int(calls.exposed_ns.min())
    start = (calls.start_ns[is_matched] - origin) / 1e6
    end = (calls.end_ns[is_matched] - origin) / 1e6
    exposed = union((calls.exposed_ns - origin) / 1e6)
    waiting = exposed_waiting(start, start + waits.wait_ms[is_matched], end, exposed)
    edges = (window_ns - origin) / 1e6
    return length_within(waiting, *edges.T)


def behind_ms(calls: RecordedCalls, lost_ms: Floats, num_steps: int) -> Floats:
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


def _exposed_of_calls(calls: RecordedCalls, waits: Waits) -> Floats:
    """Of each call what nothing hides, its wait at least where that is known: of a broadcast it is not."""
    if not len(calls.exposed_ns):
        return waits.wait_ms
    origin = int(calls.exposed_ns.min())
    exposed = union((calls.exposed_ns - origin) / 1e6)
    start, end = ((ns - origin) / 1e6 for ns in (calls.start_ns, calls.end_ns))
    bare = np.where(np.isnan(calls.duration_ms), np.nan, length_within(exposed, start, end))
    result: Floats = np.fmax(bare, waits.wait_ms)
    return result


def _notes(
    ranks: list[int], waits: Sequence[Waits], clock: Clock, num_groups: int, matched: int, between: int
) -> list[str]:
    """num_groups: collectives, each of which counts once per rank in matched and in between."""
    notes = list(clock.notes)
    if matched < between:
        notes.append(
            f"{between - matched} of {between} records of collectives were not matched on all ranks:"
            " their waits are unknown"
        )
    if clock.residual_us is not None and matched:
        apart_ms = float(np.ptp(clock.offset_ns)) / 1e6
        moved = f", after an offset of {number(apart_ms)} ms was corrected" if apart_ms > MOVED_MS else ""
        notes.append(
            f"{num_groups} collectives were matched across ranks, which see their ends within"
            f" {clock.residual_us:.0f} µs of each other{moved}"
        )
    if last := last_to_arrive(ranks, waits):
        notes.append(last)
    return notes


def last_to_arrive(ranks: Sequence[int], waits: Sequence[Waits]) -> str:
    """'rank 1 arrived last in 12 of 14 collectives'; '' where nobody did so for certain."""
    late: Counter[int] = Counter()
    num = 0
    for rank, rank_waits in zip(ranks, waits, strict=True):
        judged = rank_waits.late_rank[~np.isnan(rank_waits.wait_ms)]
        num = max(num, len(judged))
        late[rank] = int((judged == rank).sum())
    rank, count = max(late.items(), key=lambda item: item[1], default=(NOBODY, 0))
    return f"rank {rank} arrived last in {count} of {num} collectives" if count and len(ranks) > 1 else ""


def split_waits_of_records(
    metrics: Arrays,
    host_parts: Arrays,
    start_ns: Ints,
    matched: MatchedRanks,
    collectives_kept: NDArray[np.bool_],
    knows_waits: NDArray[np.bool_],
) -> None:
    """Adds wait_ms.<op>, transfer_ms.<op>, busbw by transfer, and exposed communication split.

    [rank, step]: start_ns of the step; collectives_kept, and knows_waits: with where they were exposed.
    """
    step_waits = []
    num_split = 0
    step_ms, exposed_ms = metrics["step_ms"], metrics["exposed_ms"]
    for i, (columns, waits) in enumerate(zip(matched.calls, matched.waits, strict=True)):
        ops = np.array([kind[0] for kind in columns.kinds], dtype=str)
        step_waits.append(StepWaits(ops[columns.kind], columns.row, waits))
        start = start_ns[i].astype(np.float64)
        window_ns = pairs(start, start + np.nan_to_num(step_ms[i], nan=0.0) * 1e6)
        wait_ms = _exposed_wait_ms(columns, waits, window_ns)
        exposed_wait = np.where(knows_waits[i], wait_ms, np.nan)
        num_split += int(np.isfinite(exposed_wait).sum())
        metrics.set_row("exposed_wait_ms", i, np.minimum(exposed_wait, exposed_ms[i]))
        if len(host_parts):
            num_steps = metrics.shape[1]
            host_parts.set_row(BEHIND_WAITS, i, behind_ms(columns, waits.wait_ms, num_steps))
            behind = behind_ms(columns, _exposed_of_calls(columns, waits), num_steps)
            host_parts.set_row(BEHIND_EXPOSED, i, np.where(knows_waits[i], behind, np.nan))
    # Lines of kernel records have segments in few steps: a split of those is none of all steps.
    is_split = num_split >= FEWEST_WITH_SEGMENTS * collectives_kept.sum()
    if not is_split:
        del metrics["exposed_wait_ms"]
    del step_ms, exposed_ms  # of a large run 80 MB each
    add_waits(metrics, step_waits, metrics.shape[1])
    if is_split:
        metrics.derive("exposed_transfer_ms", np.subtract, "exposed_ms", "exposed_wait_ms")
    busbw_by_transfer(metrics)


# -- who came last --------------------------------------------------------------------------------------


class RankWaits(NamedTuple):
    """The collectives of one rank, matched with those of the others."""

    start_ns: Ints
    """On the rank's own clock."""
    column: NDArray[np.integer[Any]]
    """Of the step that issued each; -1 for none of those that are shown."""
    num_ranks: Ints
    """Of its group."""
    wait_ms: Floats
    """NaN where it was not matched on all ranks, is rooted or point to point."""
    late_rank: Ints
    """Who came last, by more than the clocks may be off; another number where that is not known."""


def arrivals_of_records(
    ranks: Sequence[int], matched: MatchedRanks | None, num_steps: int
) -> Arrivals | None:
    """None where no collective was matched."""
    if matched is None or not matched.num_matched:
        return None
    of_ranks = []
    for calls, waits in zip(matched.calls, matched.waits, strict=True):
        sizes = np.array([len(group.ranks or ()) for group in calls.groups], dtype=np.int64)
        num_ranks = sizes[calls.group] if len(sizes) else np.zeros(0, dtype=np.int64)
        of_ranks.append(RankWaits(calls.start_ns, calls.row, num_ranks, waits.wait_ms, waits.late_rank))
    return arrivals(ranks, of_ranks, num_steps)


def arrivals(ranks: Sequence[int], of_ranks: Sequence[RankWaits], num_steps: int) -> Arrivals:
    """ranks in increasing order, of_ranks in the same one."""
    shape = (len(ranks), num_steps)
    num_last, num_judged = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    caused_ms = np.zeros(shape)
    known_ranks = np.array(ranks, dtype=np.int64)
    waits = {}
    for row, (rank, calls) in enumerate(zip(ranks, of_ranks, strict=True)):
        is_matched = np.isfinite(calls.wait_ms)
        order = np.argsort(calls.start_ns[is_matched], kind="stable")
        waits[rank] = CallWaits(calls.start_ns[is_matched][order], calls.wait_ms[is_matched][order])
        is_shown = is_matched & (calls.column >= 0)
        column, late = calls.column[is_shown], calls.late_rank[is_shown]
        np.add.at(num_judged[row], column, 1)
        np.add.at(num_last[row], column[late == rank], 1)
        blamed = np.searchsorted(known_ranks, late).clip(max=len(ranks) - 1)
        is_victim = (known_ranks[blamed] == late) & (late != rank)
        num_others = np.maximum(calls.num_ranks[is_shown] - 1, 1)[is_victim]
        shares_ms = calls.wait_ms[is_shown][is_victim] / num_others
        np.add.at(caused_ms, (blamed[is_victim], column[is_victim]), shares_ms)
    return Arrivals(num_last, num_judged, caused_ms, waits)


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


# -- collectives by kind -------------------------------------------------------------------------------------


def collectives(
    of_ranks: Sequence[dict[CollectiveKey, tuple[Floats, Floats]]],
    has_collectives: NDArray[np.bool_],
    matched: MatchedRanks | None,
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
            kinds_by_key[key].duration_ms[i] = _means(sum_ms, num)
    pairs = () if matched is None else zip(matched.calls, matched.waits, strict=True)
    for i, (of_calls, of_waits) in enumerate(pairs):
        members: dict[CollectiveKey, list[int]] = {}
        for key, places in few_sizes(of_calls.kinds).items():
            members.setdefault(shared_kind(key, many), []).extend(places)
        kinds = [(kinds_by_key[key], np.isin(of_calls.kind, places)) for key, places in members.items()]
        column = np.where(of_calls.row >= 0, place[of_calls.row], -1)
        add_waits_of_kinds(kinds, i, column, of_waits)
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


def add_waits_of_kinds(
    kinds: Iterable[tuple[CollectiveKind, NDArray[np.bool_]]], row: int, column: Ints, waits: Waits
) -> None:
    """Writes into each kind the mean wait and transfer of a rank's collectives of it, in every step.

    kinds: each with the calls that belong to it. row: of the rank. column: the step of the kinds' arrays that
    issued each call, -1 for none of them.
    """
    for kind, belongs in kinds:
        chosen = belongs & (column >= 0)
        num = np.bincount(column[chosen], minlength=kind.wait_ms.shape[1])
        for by_step, values in ((kind.wait_ms, waits.wait_ms), (kind.transfer_ms, waits.transfer_ms)):
            total = np.bincount(column[chosen], weights=values[chosen], minlength=kind.wait_ms.shape[1])
            by_step[row, num > 0] = total[num > 0] / num[num > 0]
