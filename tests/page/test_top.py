"""The screen of `aorta top`: the means of the newest steps, and the rank that is late."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from aorta.account.judge.late import LateRank
from aorta.account.model import Goodput
from aorta.account.newest import LastStep, Newest, RankMeans
from aorta.page.top import top_table
from aorta.records.newest import FollowedRank
from tests.records.plain_records import step

NOW_NS = 10**18 + 3_010_000_000
"""Three seconds after the end of the last step."""
FOLLOWED = FollowedRank(0)
FOLLOWED.add(step(7, world_size=2))
RANK = RankMeans(
    rank=0, last=LastStep.of(FOLLOWED), num_steps=5, num_recorded=5, step_ms=20.0,
    recorded_step_ms=20.0, compute_ms=12.0, exposed_ms=7.0,
    idle_ms=1.0, comm_ms=9.0, hidden_ms=2.0, exposed_wait_ms=6.0, caused_ms=0.25,
)  # fmt: skip
LATE = replace(RANK, rank=1, compute_ms=18.0, exposed_ms=1.0, exposed_wait_ms=0.25, caused_ms=6.0)


def lines(shown: Newest, height: int = 40, parts: Sequence[Goodput] = ()) -> list[str]:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(top_table(None, shown, NOW_NS, height, goodput=parts))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_row_has_the_cells_of_the_step() -> None:
    assert lines(Newest([RANK, LATE], LateRank(1, 6.0))) == [
        "step 7   2 ranks   means of last 5 steps   last record 3 s ago",
        "rank 1 is late: it costs 6.0 ms a step",
        "rank  step  step  compute  exposed  idle  waits    loss",
        "              ms       ms       ms    ms     ms",
        "   0     7  20.0     12.0      7.0   1.0    6.0  1.5000",
        "   1     7  20.0     18.0      1.0   1.0    0.2  1.5000",
    ]


def test_what_was_not_measured_is_no_number() -> None:
    bare = replace(RANK, compute_ms=None, exposed_ms=None, idle_ms=None, exposed_wait_ms=None)
    assert lines(Newest([bare], None))[0].startswith("step 7   1 of 2 ranks")
    assert lines(Newest([bare], None))[-1].split() == ["0", "7", "20.0", "-", "-", "-", "1.5000"]


def test_the_late_rank_stays_on_a_small_screen() -> None:
    ranks = [replace(RANK, rank=rank, exposed_ms=7.0 + rank) for rank in range(20)]
    ranks[3] = replace(LATE, rank=3)
    text = lines(Newest(ranks, LateRank(3, 6.0)), height=10)
    assert [line.split()[0] for line in text[4:-1]] == ["3", "17", "18", "19"]
    assert text[1] == "rank 3 is late: it costs 6.0 ms a step"
    assert text[-1] == "and 16 more ranks"


def test_steps_that_a_row_is_not_of_are_told_apart() -> None:
    """20 recorded ones take 1187 ms each, the last 20 of all 584.9 ms: a run of one rank."""
    alone = FollowedRank(0)
    alone.add(step(49, world_size=1))
    rank = replace(RANK, last=LastStep.of(alone), num_steps=20, num_recorded=20, step_ms=584.9)
    first = lines(Newest([replace(rank, recorded_step_ms=1187.0)], None))[0]
    assert first.startswith(
        "step 49   1 rank   rows: last 20 recorded steps   last 20 steps: 584.90 ms   last"
    )


def test_no_step_is_said() -> None:
    assert lines(Newest([], None)) == ["no step yet"]


def test_what_counted_of_several_attempts_is_a_line() -> None:
    none = {name: 0.0 for name in Goodput.__struct_fields__}
    parts = [
        Goodput(**none | {"attempt": None, "elapsed_s": 40.0, "counted_s": 10.0, "restart_s": 30.0}),
        Goodput(**none | {"attempt": 0, "elapsed_s": 35.0, "counted_s": 7.0}),
        Goodput(**none | {"attempt": 1, "elapsed_s": 5.0, "counted_s": 3.0}),
    ]
    text = lines(Newest([RANK, LATE], None), parts=parts)
    assert text[1] == "goodput 25 % of 40 s: restart 75 % (attempt 0: 20 % of 35 s, 1: 60 % of 5 s)"
