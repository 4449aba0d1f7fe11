"""The newest steps of every rank of a running job: read on from its files, their means, who is waited for.

`aorta top` and the exporter of /metrics show the same numbers because both take them from here.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from aorta.errors import NOT_JSON
from aorta.files import open_regular
from aorta.records.files import STEPS_FILE, STEPS_FILES
from aorta.records.lines import LONGEST_LINE, fault_of
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.records.seal import seal_of
from aorta.timeline.collective import POINT_TO_POINT, ROOTED, GroupKey
from aorta.timeline.common_clock import clock_of, why_vague
from aorta.timeline.intervals import Intervals, concat, of_run_lengths, subtract_normalised, union
from aorta.timeline.matching import UNKNOWN_SIZE, NumberedCalls, RankCalls, match_by_number
from aorta.timeline.overlap import unions
from aorta.timeline.statistics import warmup_steps
from aorta.timeline.types import COPY, OWN_SOURCES
from aorta.timeline.waits import split_exposed, split_waits

FIRST_BYTES = 1 << 20
"""Read back from the end of a file that is there already."""
MOST_BYTES = 1 << 26
"""Read of one file at once; the rest is read by the next poll."""
SHOWN_STEPS = 20
"""The newest steps that all ranks have; the numbers shown are means over them."""
AHEAD_STEPS = 4
"""Steps that a rank's file may be ahead of another's: kept, so that SHOWN_STEPS are common to all."""
LATE_SHARE = 0.02
"""Least time that the others wait for a rank, as a part of the step, for which it is called late."""
LEAD = 0.5
"""Part of the time that the others wait for a late rank, by which it waits less itself."""
OFTEN_LAST = 0.8
"""Part of the steps in which a rank has the least exposed communication, if that alone makes it late."""

StepKey = tuple[int, int]
"""(rollbacks, global step): pairs that rise within an attempt."""


# ---- what is read --------------------------------------------------------------------------------


@dataclass
class FollowedRank:
    """The newest steps of one rank, and how far its file was read."""

    rank: int
    recent: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=SHOWN_STEPS + AHEAD_STEPS))
    """Those of the newest attempt, oldest first."""
    recorded: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=SHOWN_STEPS + AHEAD_STEPS))
    """The newest that the overhead did not leave out: the others have their length alone."""
    has_first: bool = True
    """True: recent begins with the first step of the attempt, which holds the program's start."""
    num_collectives: int = 0
    """Of all steps that were read."""
    offset: int = 0
    inode: int | None = None
    cut_line: bytes = b""

    @property
    def last(self) -> StepRecord | None:
        return self.recent[-1] if self.recent else None

    def add(self, record: StepRecord) -> None:
        """Take a line. One that was read already is left out: a file that is made smaller is read again."""
        last = self.last
        if last is None or attempt_of(record) != attempt_of(last):
            self.has_first = record.attempt == 0 and (last is not None or self.has_first)
            if last is not None and record.run_id != last.run_id:
                self.num_collectives = 0
            self.recent.clear()
            self.recorded.clear()
        elif key_of(record) <= key_of(last):
            return
        self.has_first = self.has_first and len(self.recent) < SHOWN_STEPS + AHEAD_STEPS
        self.num_collectives += record.num_collectives
        self.recent.append(record)
        if record.is_recorded:
            self.recorded.append(record)


def key_of(record: StepRecord) -> StepKey:
    return record.rollbacks, record.global_step


def attempt_of(record: StepRecord) -> tuple[str | None, int]:
    return record.run_id, record.attempt


class Follower:
    """Reads what was added to the files of a folder since the last `poll`."""

    def __init__(self, folder: Path, wanted: Callable[[int], bool] = lambda rank: True) -> None:
        """wanted: True for the ranks whose files are read."""
        self.folder = folder
        self.ranks: dict[int, FollowedRank] = {}
        self._wanted = wanted
        self._decoder = msgspec.json.Decoder(StepRecord)

    def poll(self) -> bool:
        """Read on; True where anything was added. A file that was replaced is read afresh."""
        changed = False
        for path in sorted(self.folder.glob(STEPS_FILES)):
            match = STEPS_FILE.fullmatch(path.name)
            if match is not None and self._wanted(int(match[1])):
                state = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
                changed |= self._read_on(path, state)
        return changed

    def _read_on(self, path: Path, state: FollowedRank) -> bool:
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                if state.inode != status.st_ino or state.offset > status.st_size:
                    if state.last is not None and state.last.run_id is None:  # nothing tells which run it is
                        self.ranks[state.rank] = state = FollowedRank(state.rank)
                    state.inode, state.cut_line = status.st_ino, b""
                    state.offset = max(0, status.st_size - FIRST_BYTES)
                    state.has_first = state.has_first and state.offset == 0
                file.seek(state.offset)
                data = file.read(MOST_BYTES)
                state.offset = file.tell()
        except OSError:
            return False
        *lines, state.cut_line = (state.cut_line + data).split(b"\n")
        if len(state.cut_line) >= LONGEST_LINE:
            state.cut_line = b""  # no run writes such a line
        for line in lines:
            record = self._whole(line, state.rank)
            if record is not None:
                state.add(record)
        return bool(lines)

    def _whole(self, line: bytes, rank: int) -> StepRecord | None:
        """The record of a line of the run's own; None for one that is cut, damaged or another rank's:
        a number that is not the run's would be believed."""
        seal = seal_of(line)
        try:
            record = self._decoder.decode(line)
        except NOT_JSON:
            return None  # the first one may be cut
        is_whole = seal.is_whole if seal is not None else record.run_id is None
        is_ours = record.rank == rank and record.source in OWN_SOURCES
        return record if is_whole and is_ours and fault_of(record) is None else None


# ---- what is shown -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankMeans:
    """Means of a rank: step_ms over the newest steps, the others over the newest that were recorded.

    None: not measured.
    """

    rank: int
    last: StepRecord
    num_steps: int
    step_ms: float | None
    compute_ms: float | None
    exposed_ms: float | None
    idle_ms: float | None
    comm_ms: float | None
    hidden_ms: float | None
    exposed_wait_ms: float | None
    """Part of exposed_ms in which nothing moved because another rank had not come."""
    caused_ms: float | None
    """Exposed time in which the other ranks waited for this one: their mean."""

    @property
    def overlap_ratio(self) -> float | None:
        return self.hidden_ms / self.comm_ms if self.hidden_ms is not None and self.comm_ms else None


@dataclass(frozen=True, slots=True)
class LateRank:
    """The rank that the others wait for."""

    rank: int
    wait_ms: float
    """Exposed time of the others' step in which they wait for it; where arrivals are not known, the time by
    which its exposed communication is shorter than the median rank's."""


class Newest(NamedTuple):
    """The ranks of the newest attempt, in order, and the one that is late."""

    ranks: list[RankMeans]
    late: LateRank | None


def newest(followed: Iterable[FollowedRank]) -> Newest:
    """Means over the newest steps that all ranks have; over each rank's own where they share none."""
    states = _of_one_attempt(followed)
    shown = _shown(states, [state.recent for state in states])
    recorded = _shown(states, [state.recorded for state in states])
    waits = exposed_waits(recorded) if any(recorded) else {}
    ranks = []
    for state, newest_records, records in zip(states, shown, recorded, strict=True):
        last = state.last
        assert last is not None
        wait = waits.get(state.rank)
        ranks.append(
            RankMeans(
                rank=state.rank,
                last=last,
                num_steps=len(newest_records),
                step_ms=_mean(record.step_ms for record in newest_records),
                compute_ms=_mean(record.overlap.compute_ms for record in records),
                exposed_ms=_mean(record.overlap.exposed_ms for record in records),
                idle_ms=_mean(record.overlap.idle_ms for record in records),
                comm_ms=_mean(record.overlap.comm_ms for record in records),
                hidden_ms=_mean(record.overlap.hidden_ms for record in records),
                exposed_wait_ms=None if wait is None else wait.exposed_ms,
                caused_ms=None if wait is None else wait.caused_ms,
            )
        )
    return Newest(ranks, _late_rank(ranks, recorded) if all(recorded) else None)


def _of_one_attempt(followed: Iterable[FollowedRank]) -> list[FollowedRank]:
    """The ranks that have steps of the newest attempt, in order: others are left from before a restart."""
    states = sorted((state for state in followed if state.last is not None), key=lambda state: state.rank)
    if not states:
        return []
    latest = max((state.last for state in states if state.last), key=lambda record: record.end_unix_ns)
    return [state for state in states if state.last and attempt_of(state.last) == attempt_of(latest)]


def _shown(states: Sequence[FollowedRank], records: Sequence["deque[StepRecord]"]) -> list[list[StepRecord]]:
    """The newest of each rank's records, without the warm-up where the run has only just begun."""
    if not states:
        return []
    of_ranks = [{key_of(record): record for record in of_rank} for of_rank in records]
    common = sorted(set.intersection(*(set(steps) for steps in of_ranks)))
    if not common:
        return [list(of_rank)[-SHOWN_STEPS:] for of_rank in records]
    if all(state.has_first for state in states):
        step_ms = [[steps[key].step_ms for key in common] for steps in of_ranks]
        common = common[warmup_steps(np.array(step_ms, dtype=float)) :]
    return [[steps[key] for key in common[-SHOWN_STEPS:]] for steps in of_ranks]


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _late_rank(ranks: Sequence[RankMeans], shown: Sequence[Sequence[StepRecord]]) -> LateRank | None:
    """None where no rank is late by LATE_SHARE of the step, and where that is not known.

    A rank is late by what the others wait for it, less what it waits for them: ranks that are late in turn
    make each other wait, and none of them is the straggler.
    """
    step_ms = _mean(rank.step_ms for rank in ranks)
    if step_ms is None or len(ranks) < 2 or len(ranks) < max(rank.last.world_size for rank in ranks):
        return None
    caused = [
        (rank.caused_ms - rank.exposed_wait_ms, -rank.rank, rank.caused_ms)
        for rank in ranks
        if rank.caused_ms is not None and rank.exposed_wait_ms is not None
    ]
    if not caused:
        late = _least_exposed(shown)
        return late if late is not None and late.wait_ms >= LATE_SHARE * step_ms else None
    lead_ms, negative, wait_ms = max(caused)
    is_late = lead_ms >= max(LATE_SHARE * step_ms, LEAD * wait_ms)
    return LateRank(-negative, wait_ms) if is_late else None


def _least_exposed(shown: Sequence[Sequence[StepRecord]]) -> LateRank | None:
    """The rank with the least exposed communication in most steps, which comes last."""
    ranks = [records[0].rank for records in shown]
    rows = [[record.overlap.exposed_ms for record in row] for row in zip(*shown, strict=False)]
    exposed_ms = np.array(rows, dtype=float)
    exposed_ms = exposed_ms[np.isfinite(exposed_ms).all(axis=1)]
    if not len(exposed_ms):
        return None
    place = int(np.argmin(exposed_ms.mean(axis=0)))
    if np.mean(exposed_ms.argmin(axis=1) == place) < OFTEN_LAST:
        return None
    mean_ms = np.sort(exposed_ms.mean(axis=0))
    return LateRank(ranks[place], float(mean_ms[len(mean_ms) // 2] - mean_ms[0]))


# ---- waits ---------------------------------------------------------------------------------------


class RankWaits(NamedTuple):
    exposed_ms: float
    """Per step, for any other rank."""
    caused_ms: float
    """Per step, mean of the other ranks."""


def exposed_waits(of_ranks: Sequence[Sequence[StepRecord]]) -> dict[int, RankWaits]:
    """Waits by rank; empty where arrivals are not known. of_ranks: the same steps of each."""
    rows = [row for row in zip(*of_ranks, strict=False) if all(map(_tells_waits, row))]
    if len(of_ranks) < 2 or not rows or len({key_of(record) for record in rows[0]}) > 1:
        return {}
    ranks = [record.rank for record in rows[0]]
    if len(set(ranks)) < len(ranks):
        return {}
    numbered, timed = [], []
    try:
        for place, rank in enumerate(ranks):
            records = [row[place] for row in rows]
            numbered.append(_numbered(records))
            timed.append(_timed(rank, records, numbered[-1]))
    except (KeyError, ValueError, OverflowError):
        return {}  # a line that contradicts itself: the report says so
    groups = match_by_number(ranks, numbered)
    clock = clock_of(ranks, numbered, groups)
    if not groups or why_vague(clock, numbered, groups) is not None:
        return {}
    waits = split_waits(ranks, numbered, groups, clock)
    if not any(np.isfinite(of_rank.wait_ms).any() for of_rank in waits):
        return {}
    split = [split_exposed(*pair).wait_ms for pair in zip(timed, waits, strict=True)]
    return {
        rank: RankWaits(
            sum(split[place].values()) / len(rows),
            sum(other.get(rank, 0.0) for other in split) / (len(ranks) - 1) / len(rows),
        )
        for place, rank in enumerate(ranks)
    }


def _tells_waits(record: StepRecord) -> bool:
    """True where the line has its collectives and says where communication was exposed."""
    return record.collectives is not None and (
        record.active_segments is not None or record.exposed_run_lengths_ns is not None
    )


def _calls(records: Iterable[StepRecord]) -> list[tuple[int, CollectiveRecord]]:
    """The timed collectives, each with the start of its step."""
    return [
        (record.start_unix_ns, call)
        for record in records
        for call in record.collectives or ()
        if call.start_ms is not None and call.end_ms is not None
    ]


def _numbered(records: Sequence[StepRecord]) -> NumberedCalls:
    """The collectives as ranks are matched by. Raises OverflowError for times that no clock gives."""
    calls = _calls(records)
    groups: dict[GroupKey, int] = {}
    kinds: dict[tuple[str, int, bool], int] = {}
    group, kind = np.zeros(len(calls), np.int32), np.zeros(len(calls), np.int32)
    for i, (_, call) in enumerate(calls):
        key = GroupKey(tuple(call.ranks), call.group)
        group[i] = groups.setdefault(key, len(groups))
        can_wait = call.op not in POINT_TO_POINT | ROOTED and len(call.ranks) > 1
        size = UNKNOWN_SIZE if call.bytes is None else call.bytes
        kind[i] = kinds.setdefault((call.op, size, can_wait), len(kinds))
    can_wait_of = np.array([can_wait for _, _, can_wait in kinds], dtype=bool)
    return NumberedCalls(
        groups=list(groups),
        group=group,
        seq=np.array([call.seq for _, call in calls], dtype=np.int64),
        ops=[op for op, _, _ in kinds],
        sizes=np.array([size for _, size, _ in kinds], dtype=np.int64),
        kind=kind,
        can_wait=can_wait_of[kind],
        start_ns=np.array([start + int((call.start_ms or 0) * 1e6) for start, call in calls], dtype=np.int64),
        end_ns=np.array([start + int((call.end_ms or 0) * 1e6) for start, call in calls], dtype=np.int64),
    )


def _timed(rank: int, records: Sequence[StepRecord], numbered: NumberedCalls) -> RankCalls:
    """The same collectives, with the exposed time of their steps. Raises KeyError for unknown streams."""
    origin_ns = records[0].start_unix_ns
    exposed = [_exposed_ms(record) + (record.start_unix_ns - origin_ns) / 1e6 for record in records]
    return RankCalls(
        rank=rank,
        op=[numbered.ops[kind] for kind in numbered.kind.tolist()],
        group=[numbered.groups[group] for group in numbered.group.tolist()],
        size_bytes=[None] * len(numbered.kind),
        start_ns=numbered.start_ns,
        end_ns=numbered.end_ns,
        exposed=union(concat(*exposed)),
        origin_ns=origin_ns,
    )


def _exposed_ms(record: StepRecord) -> Intervals:
    """Communication without compute, in ms of the window."""
    if record.active_segments is None:
        return of_run_lengths(record.exposed_run_lengths_ns or []) / 1e6
    named = unions(record.active_segments)
    comm = [spans for name, spans in named.items() if name not in ("compute", COPY)]
    return subtract_normalised(union(concat(*comm)), named["compute"])
