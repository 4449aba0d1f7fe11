"""The collectives of a rank's step records: a few numbers for each, and where they were exposed.

Nothing else of a step is held, so that all ranks of a run fit in memory until they are matched (waits.py).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.errors import RecordError
from aorta.records.reader import OP_OF_STREAM
from aorta.records.table import NULL, StepTable, Texts
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.collective import GroupKey, busbw_factor
from aorta.timeline.intervals import of_run_lengths
from aorta.timeline.matching import UNKNOWN_END, UNKNOWN_SIZE, CollectiveKey, RankCalls
from aorta.timeline.types import COPY, Source

MAX_CALLS = 4_000_000
"""Collectives of all ranks together above which waits are left out: they are matched in memory."""
STREAMS = frozenset(("compute", COPY, *OP_OF_STREAM))
ROUNDING_MS = 1e-3
"""By which times of a record may contradict each other."""
MOST_MS = 2.0**40
"""Below it a time in ns is one that 64 bits hold, on any day."""
TOO_LARGE = "a time or a size that 64 bits cannot hold"


@dataclass(slots=True)
class CallsBuilder:
    """Collects RankCalls block by block."""

    kinds: dict[CollectiveKey, int] = field(default_factory=dict)
    groups: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """By name, size and attempt: within a rank these tell groups apart, and each attempt counts from 0."""
    keys: list[GroupKey] = field(default_factory=list)
    rows: list[tuple[NDArray[Any], ...]] = field(default_factory=list)
    """row, kind, group, seq, start_ns, end_ns and lead_ms of the calls of each block."""
    exposed: list[Ints] = field(default_factory=list)
    exposed_ns: list[Ints] = field(default_factory=list)
    """The same of records that keep stretches instead of segments."""

    def add(self, path: Path, first_row: int, block: StepTable) -> None:
        """Notes the collectives of neighbouring rows. path: of their lines, which a RecordError names."""
        try:
            self._add_calls(first_row, block)
            self._add_segments(block)
            self._add_run_lengths(block)
        except _Impossible as error:
            key = (block.source, int(block.integers("global_step")[error.row]))
            raise impossible_record(path, key, error.problem) from error

    def _add_calls(self, first_row: int, block: StepTable) -> None:
        items = block.items("collectives")
        row, calls = items.row, items.columns
        if not len(row):
            return
        size, start_ms, end_ms = calls["bytes"], calls["start_ms"], calls["end_ms"]
        ops: Texts = calls["op"]
        is_negative = (size < 0) & (size != NULL)
        _refuse(row, is_negative, lambda i: f"{ops.table[ops.places[i]]} of {size[i]} bytes")
        is_timed = ~(np.isnan(start_ms) | np.isnan(end_ms))
        with np.errstate(invalid="ignore"):
            ends_early = is_timed & (end_ms < start_ms - ROUNDING_MS)
            is_off = is_timed & ~((np.abs(start_ms) < MOST_MS) & (np.abs(end_ms) < MOST_MS))
        _refuse(row, ends_early, lambda i: f"{ops.table[ops.places[i]]} ends before it begins")
        _refuse(row, is_off, lambda _: TOO_LARGE)
        origin = block.integers("start_unix_ns")[row]
        times = [
            np.where(is_timed, origin + (np.where(is_timed, ms, 0.0) * 1e6).astype(np.int64), unknown)
            for ms, unknown in ((start_ms, 0), (end_ms, UNKNOWN_END))
        ]
        kind, group = self._kinds(calls), self._groups(block, row, calls)
        lead_ms = np.maximum(start_ms - calls["launch_ms"], 0.0)
        self.rows.append((row + first_row, kind, group, calls["seq"], *times, lead_ms))

    def _kinds(self, calls: dict[str, Any]) -> Ints:
        texts = [calls[name] for name in ("op", "dtype", "stream")]
        columns = [column.places for column in texts]
        size = np.where(calls["bytes"] == NULL, UNKNOWN_SIZE, calls["bytes"])
        keys, kinds = _distinct([*columns, size, calls["num_ranks"]])
        new = []
        for op, dtype, stream, num_bytes, num_ranks in keys:
            names = (texts[0].table[op], texts[1].table[dtype], texts[2].table[stream])
            key = (names[0], num_bytes, names[1], num_ranks, names[2])
            new.append(self.kinds.setdefault(key, len(self.kinds)))
        return np.array(new, dtype=np.int64)[kinds]

    def _groups(self, block: StepTable, row: Ints, calls: dict[str, Any]) -> Ints:
        names, ranks = calls["group"], calls["ranks"]
        attempt = block.integers("attempt")[row]
        told: dict[tuple[str, int, int], str] = {}
        for i in np.flatnonzero(ranks.places >= 0).tolist():
            key = (names.table[names.places[i]], int(calls["num_ranks"][i]), int(attempt[i]))
            told.setdefault(key, ranks.table[ranks.places[i]])
        keys, groups = _distinct([names.places, calls["num_ranks"], attempt])
        new = []
        for name, num_ranks, of_attempt in keys:
            key = (names.table[name], num_ranks, of_attempt)
            group = self.groups.get(key)
            if group is None:
                group = self.groups[key] = len(self.groups)
                label = f"{key[0]} of attempt {of_attempt}" if of_attempt else key[0]
                members = msgspec.json.decode(told[key], type=tuple[int, ...]) if key in told else None
                self.keys.append(GroupKey(members, label))
            new.append(group)
        return np.array(new, dtype=np.int64)[groups]

    def _add_segments(self, block: StepTable) -> None:
        """Where communication was exposed; refused where segments are not in order of time."""
        row, start_ms, end_ms, active, sets = block.segments()
        if not len(row):
            return
        earliest_ms = np.full(len(start_ms), -ROUNDING_MS)
        follows = row[1:] == row[:-1]
        earliest_ms[1:][follows] = end_ms[:-1][follows] - ROUNDING_MS
        in_order = (earliest_ms <= start_ms) & (start_ms <= end_ms + ROUNDING_MS)
        _refuse(row, ~in_order, lambda _: "active_segments are not in order of time")
        _refuse(row, end_ms >= MOST_MS, lambda _: TOO_LARGE)
        unknown = [next((name for name in names if name not in STREAMS), None) for names in sets]
        is_unknown = np.array([name is not None for name in unknown])[active]
        _refuse(
            row,
            is_unknown,
            lambda i: f"active_segments name the stream {unknown[active[i]]!r}, which no record has",
        )
        exposed = [any(name != COPY for name in names) and "compute" not in names for names in sets]
        is_exposed = np.array(exposed)[active]
        times_ms = np.stack((start_ms[is_exposed], end_ms[is_exposed]), axis=1)
        origin = block.integers("start_unix_ns")[row[is_exposed]]
        self.exposed.append((times_ms * 1e6).astype(np.int64) + origin[:, None])

    def _add_run_lengths(self, block: StepTable) -> None:
        """The same of lines without segments."""
        items = block.items("exposed_run_lengths_ns")
        ends = np.cumsum(np.maximum(items.num, 0))
        rows = np.flatnonzero((items.num > 0) & ~block.has("active_segments"))
        starts_ns = block.integers("start_unix_ns")
        for row in rows.tolist():
            lengths = items.columns["ns"][ends[row] - items.num[row] : ends[row]]
            try:
                self.exposed_ns.append(of_run_lengths(lengths) + starts_ns[row])
            except ValueError as error:
                raise _Impossible(row, f"exposed_run_lengths_ns: {error}") from None

    def finished(self, place: NDArray[np.int32]) -> RankCalls:
        """The calls of all rows. place: new ones of the rows, -1 of those that are left out."""
        none = (*(np.zeros(0, dtype=np.int64),) * 6, np.zeros(0))
        columns = [np.concatenate(parts) for parts in zip(none, *self.rows, strict=True)]
        row, kind, group = (column.astype(np.int32) for column in columns[:3])
        exposed = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self.exposed, *self.exposed_ns])
        seq, start, end, lead = columns[3:]
        calls = RankCalls(list(self.kinds), self.keys, row, kind, group, seq, start, end, lead, exposed)
        return calls.moved(place)


def impossible_record(path: Path, key: tuple[Source, int] | None, problem: str = TOO_LARGE) -> RecordError:
    """key: source and global step."""
    of_step = "" if key is None else f" of global step {key[1]}"
    return RecordError(f"{path}: impossible record{of_step}: {problem}")


class _Impossible(Exception):
    """Something of a row contradicts itself."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row, self.problem = row, problem


def _refuse(row: Ints, is_wrong: Flags, describe: Callable[[int], str]) -> None:
    if is_wrong.any():
        first = int(np.argmax(is_wrong))
        raise _Impossible(int(row[first]), describe(first))


def _distinct(columns: Sequence[Ints]) -> tuple[list[tuple[int, ...]], Ints]:
    """The different rows of integer columns, as they come first, and the place of each row among them."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    varied = [column for column in columns if (column != column[0]).any()]
    if not varied:
        return [tuple(int(column[0]) for column in columns)], codes
    for column in varied:
        _, code = np.unique(column, return_inverse=True)
        _, codes = np.unique(codes * (int(code.max()) + 1) + code, return_inverse=True)
    _, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = firsts[order]
    return list(zip(*(np.asarray(column)[rows].tolist() for column in columns), strict=True)), place[codes]


# -- sums over the collectives of a rank ----------------------------------------------------------------

MAX_SIZES = 24
"""Kinds of one operation above which sizes share a row."""

_factor = cache(busbw_factor)


def totals_by_op(calls: RankCalls, duration_ms: Floats, num_rows: int) -> dict[str, dict[str, Floats]]:
    """Per operation count, bytes, duration_ms and busbw_gb_s of every step; NaN for steps without it.

    What carries no bytes, as a barrier, has no bandwidth."""
    totals = {}
    size = np.array(
        [kind[1] if kind[1] != UNKNOWN_SIZE else np.nan for kind in calls.kinds], dtype=np.float64
    )
    moved = size * [_factor(kind[0], max(kind[3], 1)) for kind in calls.kinds]
    for op in dict.fromkeys(kind[0] for kind in calls.kinds):
        of_op = np.array([kind[0] == op for kind in calls.kinds])[calls.kind]
        rows, kind = calls.row[of_op], calls.kind[of_op]
        count = np.bincount(rows, minlength=num_rows)

        def total(weights: Floats, rows: NDArray[np.int32] = rows, count: Ints = count) -> Floats:
            return np.where(count == 0, np.nan, np.bincount(rows, weights=weights, minlength=num_rows))

        took_ms, sent, size_bytes = total(duration_ms[of_op]), total(moved[kind]), total(size[kind])
        totals[op] = {
            "count": np.where(count == 0, np.nan, count),
            "bytes": size_bytes,
            "duration_ms": took_ms,
            "busbw_gb_s": np.divide(
                sent / 1e6, took_ms, out=np.full(num_rows, np.nan), where=(took_ms > 0) & (size_bytes > 0)
            ),
        }
    return totals


def totals_by_kind(
    calls: RankCalls, values: Floats, kinds: dict[CollectiveKey, list[int]], num_rows: int
) -> dict[CollectiveKey, tuple[Floats, Floats]]:
    """Number of calls in every step and the sum of their values. kinds: the members of each, by index."""
    totals = {}
    for kind, members in kinds.items():
        is_member = np.zeros(len(calls.kinds), dtype=bool)
        is_member[members] = True
        chosen = is_member[calls.kind]
        rows = calls.row[chosen]
        totals[kind] = (
            np.bincount(rows, minlength=num_rows).astype(np.float64),
            np.bincount(rows, weights=values[chosen], minlength=num_rows).astype(np.float64),
        )
    return totals


def few_sizes(kinds: list[CollectiveKey]) -> dict[CollectiveKey, list[int]]:
    """Kinds that share a row, by index: the sizes of an operation where there are more than MAX_SIZES."""
    many = operations_of_many_sizes(kinds)
    result: dict[CollectiveKey, list[int]] = {}
    for i, key in enumerate(kinds):
        result.setdefault(shared_kind(key, many), []).append(i)
    return result


def operations_of_many_sizes(kinds: Iterable[CollectiveKey]) -> set[str]:
    """Operations of which there are more than MAX_SIZES kinds."""
    return {op for op, num in Counter(kind[0] for kind in kinds).items() if num > MAX_SIZES}


def shared_kind(key: CollectiveKey, many: set[str]) -> CollectiveKey:
    """The kind that it is counted under: sizes of the operations in many are one."""
    return (key[0], UNKNOWN_SIZE, *key[2:]) if key[0] in many else key
