"""Goodput, by hand: two attempts on a clock of whole seconds."""

from pathlib import Path

import msgspec
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import judge
from aorta.account.load.goodput import Goodput, goodput, goodput_text
from aorta.account.load.open import load_run
from aorta.records.files import steps_name
from aorta.records.schema import AttemptRecord, Ending, HostSpan
from tests.records.plain_records import run, step
from tests.records.run_folders import write_run

S = 1_000_000_000


def line(number: int, at_s: float, attempt: int = 0, seconds: float = 2.0, **changes: object):
    step_ms = seconds * 1e3
    overlap = msgspec.structs.replace(step().overlap, idle_ms=step_ms)
    fields = {"run_id": "r", "attempt": attempt, "start_unix_ns": int(at_s * S), "step_ms": step_ms}
    return step(number, overlap=overlap, **(fields | changes))


def written(folder: Path, hung: bool = False) -> list[Goodput]:
    """Two attempts.

    0: from 0 s, steps 0 to 3 from 3 s on, evaluation of 5 s before step 2, ends at 20 s.
    1: from 30 s, steps 2 to 4 from 34 s on, with a checkpoint of 0.5 s in step 3, finished at 40 s.
    """
    lines = [
        *(line(number, at_s) for number, at_s in enumerate((3, 5, 12, 14))),
        line(2, 34, 1),
        line(
            3,
            36,
            1,
            host_spans=[HostSpan("checkpoint", 100.0, 300.0), HostSpan("checkpoint", 1600.0, 1900.0)],
        ),
        line(4, 38, 1),
    ]
    endings = (
        Ending(kind="hung" if hung else "crashed", unix_ns=20 * S),
        Ending(kind="finished", unix_ns=40 * S),
    )
    attempts = [
        AttemptRecord(attempt=number, world_size=1, started_unix_ns=at_s * S, ending=ending)
        for number, (at_s, ending) in enumerate(zip((0, 30), endings, strict=True))
    ]
    record = run(run_id="r", attempts=attempts, finished_unix_ns=40 * S, world_size=1)
    write_run(folder, lines, record)
    return goodput(folder / steps_name(0), record, None)


def test_the_parts_of_each_attempt_are_those_of_the_clock(tmp_path: Path) -> None:
    whole, first, second = written(tmp_path)
    assert msgspec.structs.asdict(first) == pytest.approx(
        {
            "attempt": 0, "elapsed_s": 30, "counted_s": 4, "redone_s": 4, "start_up_s": 3, "checkpoint_s": 0,
            "evaluation_s": 5, "hang_s": 0, "restart_s": 10, "other_s": 4, "num_counted": 2, "num_redone": 2,
        }
    )  # fmt: skip
    assert msgspec.structs.asdict(second) == pytest.approx(
        {
            "attempt": 1, "elapsed_s": 10, "counted_s": 5.5, "redone_s": 0, "start_up_s": 4,
            "checkpoint_s": 0.5, "evaluation_s": 0, "hang_s": 0, "restart_s": 0, "other_s": 0,
            "num_counted": 3, "num_redone": 0,
        }
    )  # fmt: skip
    parts = ("counted", "redone", "start_up", "checkpoint", "evaluation", "hang", "restart", "other")
    assert sum(getattr(whole, f"{name}_s") for name in parts) == pytest.approx(whole.elapsed_s)
    text = goodput_text([whole, first, second])
    assert text.startswith("goodput 24 % of 40 s, 2 steps done again: restart 25 %, start-up 18 %")
    assert text.endswith("(attempt 0: 13 % of 30 s, 1: 55 % of 10 s)")


def test_the_end_of_an_attempt_that_hung_is_the_hangs(tmp_path: Path) -> None:
    _, first, _ = written(tmp_path, hung=True)
    assert (first.hang_s, first.other_s) == (pytest.approx(4), 0)


def test_the_report_says_it_of_a_run_of_several_attempts(tmp_path: Path) -> None:
    written(tmp_path)
    loaded = load_run(tmp_path, "run")
    assert any(text.startswith("goodput 24 % of 40 s") for text in loaded.story)
    assert loaded.story[0] == "attempt 0 (1 rank): crashed"
    assert loaded.goodput[0].num_counted == 5


def test_a_damaged_file_has_none(tmp_path: Path) -> None:
    record = run(run_id="r", attempts=[AttemptRecord(attempt=0, world_size=1, started_unix_ns=0)])
    (tmp_path / steps_name(0)).write_bytes(b"\xff\n{}\n")
    assert goodput(tmp_path / steps_name(0), record, None) == []


def test_the_time_between_two_attempts_is_no_gap_between_two_steps(tmp_path: Path) -> None:
    """Steps 0 and 1 are of the first attempt, 2 to 4 of the second one, 27 s later."""
    written(tmp_path)
    account = account_of(judge(load_run(tmp_path, "run"), 0))
    assert [gap if gap == gap else None for gap in account.gaps_ms.tolist()] == [0, None, 0, 0, None]
