"""Alarms of many ranks, by digests made of known numbers, a look every second of simulated time."""

from collections.abc import Callable

import numpy as np

from aorta.account.judge.late import LateRank, late_in_digests
from aorta.account.watch import Alarm, Watch, damage_of, newest_of
from aorta.records.digests import SLOT, Slots

STEP_MS, EXPOSED_MS, NUM = 300.0, 60.0, 256


def slots(number: int, exposed_ms: "float | np.ndarray" = EXPOSED_MS, step_ms: float = STEP_MS) -> Slots:
    made = np.zeros(NUM, SLOT)
    made["rank"], made["world_size"] = np.arange(NUM), NUM
    made["global_step"], made["num_steps"] = number, number + 1
    made["step_ms"] = made["median_step_ms"] = step_ms
    made["median_exposed_ms"] = made["exposed_ms"] = exposed_ms
    return made


def watched(look: Callable[[int], Slots], num_looks: int) -> list[tuple[int, Alarm]]:
    watch = Watch()
    return [(s, alarm) for s in range(num_looks) for alarm in watch.look(look(s), float(s), s)]


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.0, NUM)


def test_a_rank_that_waits_less_than_the_others_is_late() -> None:
    exposed_ms = EXPOSED_MS + noise(0)
    exposed_ms[77] = EXPOSED_MS - 30
    (late,) = late_in_digests(slots(3, exposed_ms))
    assert (late.rank, round(late.wait_ms)) == (77, 30)
    assert newest_of(slots(3, exposed_ms), 10).late == late
    assert 77 in [row.rank for row in newest_of(slots(3, exposed_ms), 10).ranks]


def test_parts_of_a_pipeline_are_no_stragglers() -> None:
    """A quarter of the ranks waits 40 ms less: they are made so."""
    assert late_in_digests(slots(3, np.where(np.arange(NUM) < NUM // 4, 20.0, 60.0) + noise(1))) == []


def test_a_straggler_is_named_within_seconds_of_its_onset_and_once() -> None:
    structure = np.where(np.arange(NUM) % 8 == 0, 20.0, 60.0)

    def look(second: int) -> Slots:
        exposed_ms = structure + noise(second)
        exposed_ms[np.arange(NUM) != 9] += 45.0 if second >= 60 else 0.0
        return slots(second, exposed_ms, STEP_MS + (45.0 if second >= 60 else 0.0))

    ((second, alarm),) = watched(look, 120)
    assert (alarm.kind, alarm.ranks) == ("straggler", [9])
    assert 60 <= second <= 63


def test_who_is_late_by_the_lines_of_few_ranks_has_to_be_seen_at_newer_steps() -> None:
    """Slots of two ranks cannot tell. Steps that stand still, or one look, are not enough."""
    watch = Watch()
    late = [LateRank(1, 6.0)]
    alarms = [watch.look(slots(step)[:2], float(s), s, late) for s, step in enumerate((1, 1, 1, 2, 3, 4))]
    assert [[alarm.text for alarm in of_look] for of_look in alarms] == [
        [], [], [], [], ["rank 1 is late: it costs 6.0 ms a step"], [],
    ]  # fmt: skip


def test_a_slow_down_of_all_is_told() -> None:
    ((second, alarm),) = watched(lambda s: slots(s, step_ms=STEP_MS if s < 80 else 400.0), 120)
    assert (alarm.kind, alarm.text, second) == ("slow-down", "steps take 400.0 ms, 300.0 before", 89)


def test_a_hang_is_told_with_the_rank_that_is_behind() -> None:
    def look(second: int) -> Slots:
        made = slots(min(second, 30))
        made["global_step"][5] = min(second, 29)
        return made

    ((second, alarm),) = watched(look, 200)
    assert (alarm.kind, alarm.ranks, second) == ("hang", [5], 90)


def test_an_ended_job_does_not_hang() -> None:
    def look(second: int) -> Slots:
        made = slots(min(second, 30))
        made["is_closed"] = second >= 30
        return made

    assert watched(look, 200) == []


def test_clean_looks_raise_nothing() -> None:
    assert watched(lambda s: slots(s, EXPOSED_MS + noise(s), STEP_MS + noise(s)[0]), 300) == []


def test_ranks_without_a_digest_are_told() -> None:
    assert damage_of(slots(3)[:-2]) == [f"2 of {NUM} ranks have no digest"]
