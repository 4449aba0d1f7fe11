"""The account of a running job's newest steps: means of every rank, and who is waited for.

`aorta top` and the exporter of /metrics show the same numbers because both take them from here, and those of
a report because both are of one account.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from aorta.account.judge.cells import exposed_of
from aorta.account.judge.judged import judge, looked_at
from aorta.account.judge.late import LateRank
from aorta.account.load.assemble import RunFiles, assemble
from aorta.account.load.rank.reduce import reduce_records
from aorta.account.model import Run
from aorta.errors import AortaError
from aorta.records.newest import SHOWN_STEPS, FollowedRank, StepKey, attempt_of, key_of
from aorta.records.schema import StepRecord
from aorta.timeline.arrays import Floats
from aorta.timeline.statistics import warmup_steps
from aorta.timeline.types import PARTS_MS


@dataclass(frozen=True, slots=True)
class LastStep:
    """The newest step of a rank."""

    global_step: int
    world_size: int
    end_unix_ns: int
    step_ms: float | None
    loss: float | None
    used_bytes: float | None
    sm_clock_mhz: float | None
    power_w: float | None

    @classmethod
    def of(cls, rank: FollowedRank) -> "LastStep":
        record, memory, device = rank.last, rank.memory, rank.device
        assert record is not None
        return cls(
            record.global_step,
            record.world_size,
            record.end_unix_ns,
            record.step_ms,
            record.loss,
            None if memory is None else memory.reserved_bytes,
            None if device is None else device.sm_clock_mhz,
            None if device is None else device.power_w,
        )


@dataclass(frozen=True, slots=True)
class RankMeans:
    """Means of a rank: step_ms over the newest steps, the others over the newest that were recorded.

    None: not measured.
    """

    rank: int
    last: LastStep
    num_steps: int
    num_recorded: int
    step_ms: float | None
    recorded_step_ms: float | None
    """What compute, exposed and idle add up to: recording a step may lengthen it."""
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


class Newest(NamedTuple):
    """The ranks of the newest attempt, in order, the one that is late, and how many are not listed."""

    ranks: list[RankMeans]
    late: LateRank | None
    num_unlisted: int = 0
    """Further ranks, which are not in the list."""


def newest(
    followed: Iterable[FollowedRank], late_rank: Callable[[Run], LateRank | None] = lambda judged: None
) -> Newest:
    """Means over the newest steps that all ranks have; over each rank's own where they share none. late_rank:
    who is late in these steps (aorta.why.causes.rank); nobody where not all ranks are seen."""
    states = _of_one_attempt(followed)
    shown = _shown(states, [state.recent for state in states])
    recorded = _shown(states, [state.recorded for state in states])
    judged = (
        _judged(states, [_both(*of) for of in zip(recorded, shown, strict=True)]) if all(recorded) else None
    )
    late = None
    if judged is not None and len(states) == max(records[-1].world_size for records in recorded):
        late = late_rank(judged)
    waits, caused = _waits(judged)
    ranks = []
    for place, (state, newest_records, records) in enumerate(zip(states, shown, recorded, strict=True)):
        ranks.append(
            RankMeans(
                rank=state.rank,
                last=LastStep.of(state),
                num_steps=len(newest_records),
                num_recorded=len(records),
                step_ms=_mean(record.step_ms for record in newest_records),
                recorded_step_ms=_mean(record.step_ms for record in records),
                **{name: _mean(getattr(record.overlap, name) for record in records) for name in PARTS_MS},
                exposed_wait_ms=None if waits is None else float(waits[place]),
                caused_ms=None if caused is None else float(caused[place]),
            )
        )
    return Newest(ranks, late)


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
    common = _common(of_ranks)
    if not common:
        return [list(of_rank)[-SHOWN_STEPS:] for of_rank in records]
    if all(state.has_first for state in states):
        step_ms = [[steps[key].step_ms for key in common] for steps in of_ranks]
        common = common[warmup_steps(np.array(step_ms, dtype=float)) :]
    return [[steps[key] for key in common[-SHOWN_STEPS:]] for steps in of_ranks]


def _common(of_ranks: Sequence[dict[StepKey, StepRecord]]) -> list[StepKey]:
    return sorted(set.intersection(*(set(steps) for steps in of_ranks)))


def _mean(values: Iterable[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _both(recorded: list[StepRecord], shown: list[StepRecord]) -> list[StepRecord]:
    """The shown steps among the recorded ones, in order."""
    return [one for _, one in sorted({key_of(record): record for record in [*recorded, *shown]}.items())]


def _judged(states: Sequence[FollowedRank], shown: Sequence[Sequence[StepRecord]]) -> Run | None:
    """The shown steps as a run; None where ranks share none, and where a line contradicts itself: a report
    says so. Where none of them lists its collectives, the last one that did goes before them as warm-up."""
    if len(states) < 2 or len({tuple(map(key_of, records)) for records in shown}) > 1 or not shown[0]:
        return None
    detailed = [state.detailed for state in states]
    records_of = [list(records) for records in shown]
    num_before = 0
    if not any(record.collectives is not None for record in records_of[0]):
        before = [record for record in detailed if record is not None]
        if len(before) == len(states) and len({key_of(record) for record in before}) == 1:
            records_of = [[first, *records] for first, records in zip(before, records_of, strict=True)]
            num_before = 1
    try:
        files = [
            reduce_records(Path(f"rank {state.rank}"), records)
            for state, records in zip(states, records_of, strict=True)
        ]
        rows = {state.rank: records for state, records in zip(states, records_of, strict=True)}
        run = assemble(
            RunFiles(
                Path("newest"),
                "newest",
                files,
                None,
                records=lambda source, rank: (one for one in rows[rank] if one.source == source),
            ),
            [],
        )
        return judge(run, num_before)
    except (AortaError, OverflowError, KeyError, ValueError):
        return None


def _waits(
    judged: Run | None,
) -> tuple[Floats | None, Floats | None]:
    """By rank, what it waits in a step and what it makes each other one wait; None where nobody knows."""
    exposed = None if judged is None else exposed_of(looked_at(judged))
    if exposed is None or not exposed.is_split:
        return None, None
    return exposed.wait_ms.mean(axis=1), exposed.caused_ms.mean(axis=1)
