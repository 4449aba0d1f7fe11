"""The collectives of a rank's step records: a few numbers for each, and where they were exposed.

Nothing else of a step is held, so that all ranks of a run fit in memory until they are matched (waits.py).
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.impossible import TOO_LARGE, ImpossibleRecord, impossible_record
from aorta.records.columns.number_block import NumberBlock, SegmentArrays, StepDetails
from aorta.records.reader import OP_OF_STREAM
from aorta.timeline.collective import GroupKey
from aorta.timeline.intervals import of_run_lengths
from aorta.timeline.types import COPY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Kind = tuple[str, int, str, int, str]
"""op, bytes, dtype, num_ranks, stream. bytes is ANY_SIZE where sizes share a row or are not known."""
ANY_SIZE = -1

MAX_CALLS = 4_000_000
"""Collectives of all ranks together above which waits are left out: they are matched in memory."""
STREAMS = frozenset(("compute", COPY, *OP_OF_STREAM))
ROUNDING_MS = 1e-3
"""By which times of a record may contradict each other."""
MOST_MS = 2.0**40
"""Below it a time in ns is one that 64 bits hold, on any day."""
UNKNOWN_END = -1
"""end_ns of a collective whose times were not measured."""


@dataclass(slots=True)
class RecordedCalls:
    """The collectives of one rank, in order of the file."""

    kinds: list[Kind]
    groups: list[GroupKey]
    row: NDArray[np.int32]
    """Of the step that issued it."""
    kind: NDArray[np.int32]
    group: NDArray[np.int32]
    seq: Ints
    start_ns: Ints
    end_ns: Ints
    exposed_ns: Ints
    """[n, 2]: communication without compute."""

    def moved(self, place: NDArray[np.int32]) -> "RecordedCalls":
        """Calls with the rows' new places, without those of rows whose place is -1."""
        row = place[self.row]
        is_kept = row >= 0
        return replace(
            self,
            row=row[is_kept],
            kind=self.kind[is_kept],
            group=self.group[is_kept],
            seq=self.seq[is_kept],
            start_ns=self.start_ns[is_kept],
            end_ns=self.end_ns[is_kept],
        )

    @property
    def duration_ms(self) -> Floats:
        """NaN where it was not measured."""
        return np.where(self.end_ns == UNKNOWN_END, np.nan, (self.end_ns - self.start_ns) / 1e6)


@dataclass(slots=True)
class CallsBuilder:
    """Collects RecordedCalls record by record."""

    kinds: dict[Kind, int] = field(default_factory=dict)
    groups: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """By name, size and attempt: within a rank these tell groups apart, and each attempt counts from 0."""
    keys: list[GroupKey] = field(default_factory=list)
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    exposed: list[Ints] = field(default_factory=list)
    exposed_ns: list[Ints] = field(default_factory=list)
    """The same of records that keep stretches instead of segments."""

    def add(self, path: Path, first_row: int, block: NumberBlock) -> None:
        """Notes the collectives of neighbouring rows. path: of their lines, which a RecordError names."""
        segments = block.segments
        is_plain = _are_plain(segments)
        if is_plain and len(segments.row):
            is_exposed = np.array([_is_exposed(active) for active in segments.sets])[segments.active]
            times_ms = np.stack((segments.start_ms[is_exposed], segments.end_ms[is_exposed]), axis=1)
            origin = block.integers("start_unix_ns")[segments.row[is_exposed]]
            self.exposed.append((times_ms * 1e6).astype(np.int64) + origin[:, None])
        for row, record in block.details():
            try:
                self._add(first_row + row, record)
                if not is_plain:
                    self._add_segments(record)
            except (ImpossibleRecord, OverflowError, ValueError) as error:
                problem = str(error) if isinstance(error, ImpossibleRecord) else TOO_LARGE
                raise impossible_record(path, (record.source, record.global_step), problem) from error

    def _add(self, row: int, record: StepDetails) -> None:
        """ImpossibleRecord for what contradicts itself; OverflowError or ValueError for times that no
        clock gives, here or when finished."""
        origin, rows, kinds, groups = record.start_unix_ns, self.rows, self.kinds, self.groups
        for call in record.collectives or ():
            num_ranks = len(call.ranks)
            size = ANY_SIZE if call.bytes is None else call.bytes
            kind = kinds.setdefault((call.op, size, call.dtype, num_ranks, call.stream), len(kinds))
            group = groups.get((call.group, num_ranks, record.attempt))
            if group is None:
                group = groups[call.group, num_ranks, record.attempt] = len(groups)
                name = f"{call.group} of attempt {record.attempt}" if record.attempt else call.group
                self.keys.append(GroupKey(tuple(call.ranks), name))
            start_ms, end_ms = call.start_ms, call.end_ms
            if size < ANY_SIZE or (size == ANY_SIZE and call.bytes is not None):
                raise ImpossibleRecord(f"{call.op} of {size} bytes")
            if start_ms is None or end_ms is None:
                rows.append((row, kind, group, call.seq, 0, UNKNOWN_END))
            else:
                if end_ms < start_ms - ROUNDING_MS:
                    raise ImpossibleRecord(f"{call.op} ends before it begins")
                rows.append(
                    (row, kind, group, call.seq, origin + int(start_ms * 1e6), origin + int(end_ms * 1e6))
                )
        if record.active_segments is None and record.exposed_run_lengths_ns:
            try:
                self.exposed_ns.append(of_run_lengths(record.exposed_run_lengths_ns) + origin)
            except ValueError as error:
                raise ImpossibleRecord(f"exposed_run_lengths_ns: {error}") from None

    def _add_segments(self, record: StepDetails) -> None:
        """One by one, as some are not as a run writes them. Raises as _add."""
        origin = record.start_unix_ns
        exposed: list[tuple[int, int]] = []
        earliest_ms = -ROUNDING_MS
        for segment in record.active_segments or ():
            start_ms, end_ms = segment.start_ms, segment.end_ms
            if not earliest_ms <= start_ms <= end_ms + ROUNDING_MS:
                raise ImpossibleRecord("active_segments are not in order of time")
            earliest_ms = end_ms - ROUNDING_MS
            if _is_exposed(tuple(segment.active_streams)):
                exposed.append((origin + int(start_ms * 1e6), origin + int(end_ms * 1e6)))
        self.exposed.append(np.array(exposed, dtype=np.int64).reshape(-1, 2))

    def finished(self, place: NDArray[np.int32]) -> RecordedCalls:
        """The calls of all rows. place: new ones of the rows, -1 of those that are left out."""
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 6)
        row, kind, group = (column.astype(np.int32) for column in table.T[:3])
        seq, start, end = (np.ascontiguousarray(column) for column in table.T[3:])
        exposed = np.concatenate([np.zeros((0, 2), dtype=np.int64), *self.exposed, *self.exposed_ns])
        calls = RecordedCalls(list(self.kinds), self.keys, row, kind, group, seq, start, end, exposed)
        return calls.moved(place)


def _are_plain(segments: SegmentArrays) -> bool:
    """Returns True where segments of a line are in order of time, on streams that there are."""
    start_ms, end_ms = segments.start_ms, segments.end_ms
    earliest_ms = np.full(len(start_ms), -ROUNDING_MS)
    follows = segments.row[1:] == segments.row[:-1]
    earliest_ms[1:][follows] = end_ms[:-1][follows] - ROUNDING_MS
    return bool(
        all(STREAMS.issuperset(active) for active in segments.sets)
        and ((earliest_ms <= start_ms) & (start_ms <= end_ms + ROUNDING_MS) & (end_ms < MOST_MS)).all()
    )


@cache
def _is_exposed(active: tuple[str, ...]) -> bool:
    unknown = [name for name in active if name not in STREAMS]
    if unknown:
        raise ImpossibleRecord(f"active_segments name the stream {unknown[0]!r}, which no record has")
    return "compute" not in active and any(name != COPY for name in active)
