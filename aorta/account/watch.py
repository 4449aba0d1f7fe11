"""Alarms of a running job by its ranks' digests: who is late, whether all got slower or stand still.

What is late is what waits less than the others: its communication is exposed for less time. Where ranks
differ by their part of the model they differ from the first look on, so changes count, once there is
something to compare with.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from aorta.account.judge.late import NODE_RANKS, NOISE_SCALES, LateRank, late_in_digests, late_ms_of
from aorta.account.newest import LastStep, Newest, RankMeans
from aorta.records.digests import PARTS, Slots
from aorta.timeline.arrays import Floats

MOST_FOLLOWED = 64
"""Ranks up to which their lines are read, which tell more; of more, their digests are."""
SLOWER = 1.2
"""Ratio of step times that is a slow-down."""
CONFIRMED_BY, SLOWER_FOR = 3, 10
"""Looks in a row, each at newer steps, that have to see a rank late, and steps slower."""
SETTLED_S = 20.0
"""Age from which a look counts as the usual state; kept for USUAL_S, one every KEPT_EVERY_S."""
USUAL_S = 600.0
KEPT_EVERY_S = 5.0
FEWEST_USUAL = 4
STILL_S = 60.0
"""Least time without a step that is a hang, and in STILL_STEPS steps, and in longest pauses so far."""
STILL_STEPS = 20.0
STILL_PAUSES = 3.0

AlarmKind = Literal["straggler", "slow-down", "hang"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    kind: AlarmKind
    text: str
    unix_ns: int
    global_step: int
    ranks: list[int] = []


@dataclass(frozen=True, slots=True)
class Usual:
    """What one look saw."""

    seen_s: float
    late_ms: Floats
    """By rank of the world: how much less than the median its communication is exposed; NaN: not known."""
    step_ms: float


class Watch:
    """Looks at a job again and again, and raises each alarm once, until it is over."""

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, run: tuple[int, int] | None) -> None:
        """Forget what was of another attempt."""
        self._run = run
        self._usual: deque[Usual] = deque()
        self._late_looks: dict[int, int] = {}
        """Looks in a row that saw a rank late."""
        self._raised: set[int] = set()
        self._num_slow = 0
        self._num_steps = -1
        self._moved_s: float | None = None
        self._longest_pause_s = 0.0
        self._is_still = False

    def look(
        self, slots: Slots, now_s: float, unix_ns: int, late: list[LateRank] | None = None
    ) -> list[Alarm]:
        """Alarms that begin with this look. now_s: of a clock that only goes forwards. late: who is, where
        the ranks' lines were read, which tell it better; None: the slots tell."""
        if not len(slots):
            return []
        run = (int(slots["run"][0]), int(slots["attempt"][0]))
        if run != self._run:
            self._begin(run)
        step_ms = float(np.nanmedian(slots["median_step_ms"]))
        num_steps = int(slots["num_steps"].sum())
        said: list[tuple[AlarmKind, str, list[int]]] = []
        if num_steps == self._num_steps:
            said += self._of_a_stop(slots, step_ms, now_s)
        else:
            if self._moved_s is not None:
                self._longest_pause_s = max(self._longest_pause_s, now_s - self._moved_s)
            self._num_steps, self._moved_s, self._is_still = num_steps, now_s, False
            usual = [one for one in self._usual if one.seen_s <= now_s - SETTLED_S]
            said += self._of_late_ranks(self._late_by_change(slots, usual) if late is None else late)
            said += self._of_slow_steps(step_ms, usual)
            self._keep(Usual(now_s, late_ms_of(slots), step_ms))
        step = int(slots["global_step"].max())
        return [
            Alarm(kind=kind, text=text, unix_ns=unix_ns, global_step=step, ranks=ranks)
            for kind, text, ranks in said
        ]

    def _late_by_change(self, slots: Slots, usual: list[Usual]) -> list[LateRank]:
        if len(usual) < FEWEST_USUAL:
            return late_in_digests(slots)
        with np.errstate(all="ignore"):
            usual_ms = np.median([one.late_ms for one in usual], axis=0)
        late = late_in_digests(slots, usual_ms)
        # What is late from the first look on is no change, and late all the same.
        return late + [
            one for one in late_in_digests(slots) if one.rank in self._raised - {o.rank for o in late}
        ]

    def _of_late_ranks(self, ranks: list[LateRank]) -> list[tuple[AlarmKind, str, list[int]]]:
        late = {one.rank: one.wait_ms for one in ranks}
        self._late_looks = {rank: self._late_looks.get(rank, 0) + 1 for rank in late}
        self._raised &= late.keys()
        new = [r for r, looks in self._late_looks.items() if looks >= CONFIRMED_BY and r not in self._raised]
        self._raised |= set(new)
        if not new:
            return []
        more = f" and {len(new) - 1} more" if len(new) > 1 else ""
        return [("straggler", f"rank {new[0]}{more} is late: it costs {late[new[0]]:.1f} ms a step", new)]

    def _of_slow_steps(self, step_ms: float, usual: list[Usual]) -> list[tuple[AlarmKind, str, list[int]]]:
        if len(usual) < FEWEST_USUAL:
            return []
        before_ms = [one.step_ms for one in usual]
        usual_ms = float(np.median(before_ms))
        scale_ms = 1.4826 * float(np.median(np.abs(np.array(before_ms) - usual_ms)))
        is_slow = step_ms > max(SLOWER * usual_ms, usual_ms + NOISE_SCALES * scale_ms)
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if self._num_slow != SLOWER_FOR:
            return []
        return [("slow-down", f"steps take {step_ms:.1f} ms, {usual_ms:.1f} before", [])]

    def _of_a_stop(
        self, slots: Slots, step_ms: float, now_s: float
    ) -> list[tuple[AlarmKind, str, list[int]]]:
        assert self._moved_s is not None
        still_s = now_s - self._moved_s
        least_s = max(STILL_S, STILL_STEPS * step_ms / 1e3, STILL_PAUSES * self._longest_pause_s)
        if self._is_still or still_s < least_s or slots["is_closed"].all():
            return []
        self._is_still = True
        steps = slots["global_step"]
        behind = slots["rank"][steps == steps.min()].tolist()
        text = f"no rank has ended a step for {still_s:.0f} s, a step takes {step_ms:.1f} ms"
        if len(behind) > min(NODE_RANKS, len(slots) // 2):
            return [("hang", text, [])]
        names = ", ".join(map(str, behind))
        return [("hang", f"{text}; rank {names} ended step {steps.min()}, others {steps.max()}", behind)]

    def _keep(self, usual: Usual) -> None:
        kept = self._usual
        if kept and usual.seen_s - kept[-1].seen_s < KEPT_EVERY_S:
            return
        kept.append(usual)
        while usual.seen_s - kept[0].seen_s > USUAL_S:
            kept.popleft()


# ---- many ranks on one screen --------------------------------------------------------------------


def newest_of(slots: Slots, most_rows: int | None) -> Newest:
    """The late rank, and the rows that tell most: the late rank's, and most exposed communication. most_rows
    None: all."""
    late = next(iter(late_in_digests(slots)), None)
    order = np.argsort(-np.nan_to_num(slots["exposed_ms"]), kind="stable")
    if late is not None:
        order = np.concatenate([np.flatnonzero(slots["rank"] == late.rank), order])
    chosen = sorted(list(dict.fromkeys(order.tolist()))[:most_rows])
    return Newest([_means(slots[place]) for place in chosen], late, len(slots) - len(chosen))


def damage_of(slots: Slots) -> list[str]:
    size = int(slots["world_size"][0])
    return [f"{size - len(slots)} of {size} ranks have no digest"] if len(slots) < size else []


def _means(slot: np.void) -> RankMeans:
    def number(name: str) -> float | None:
        value = float(slot[name])
        return value if np.isfinite(value) else None

    last = LastStep(
        global_step=int(slot["global_step"]),
        world_size=int(slot["world_size"]),
        end_unix_ns=int(slot["end_unix_ns"]),
        **{name: number(name) for name in ("step_ms", "loss", "used_bytes", "sm_clock_mhz", "power_w")},
    )
    parts = {name: number(name) for name in PARTS}
    return RankMeans(
        rank=int(slot["rank"]),
        last=last,
        num_steps=int(slot["num_shown"]),
        num_recorded=int(slot["num_recorded"]),
        step_ms=number("step_ms"),
        recorded_step_ms=number("recorded_step_ms"),
        exposed_wait_ms=None,
        caused_ms=None,
        **parts,
    )
