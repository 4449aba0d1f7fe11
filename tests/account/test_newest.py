"""The newest steps of a running job: what is averaged, who is waited for, and files that change meanwhile."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aorta.account.judge.late import LateRank
from aorta.account.newest import Newest, newest
from aorta.errors import RecordError
from aorta.records.files import state_name, steps_name
from aorta.records.newest import Follower
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.records.state import ProcessState, StateFile
from aorta.records.writer import LineWriter
from aorta.timeline.types import OverlapRecord, Segment
from aorta.why.causes.rank import late_rank
from tests.records.plain_records import step

START_NS = 10**18
STEP_MS = 20.0
SECOND_CALL_MS = 15.0
"""Start of a short collective in every step, to which all ranks come at once."""


def record(rank: int, number: int, arrives_ms: float, last_ms: float, **changes: Any) -> StepRecord:
    """A step of one of two ranks: 2 ms of transfer from last_ms on, when the other one has come too."""
    calls = [
        CollectiveRecord(
            op="all_reduce", stream="group", group="default", ranks=[0, 1], bytes=4096, dtype="float32",
            seq=2 * number + i, start_ms=start_ms, end_ms=end_ms, algbw_gb_s=None, busbw_gb_s=None,
        )
        for i, (start_ms, end_ms) in enumerate(
            [(arrives_ms, last_ms + 2), (SECOND_CALL_MS, SECOND_CALL_MS + 1)]
        )
    ]  # fmt: skip
    exposed_ms = last_ms + 2 - arrives_ms + 1
    overlap = msgspec.structs.replace(
        step().overlap,
        comm_ms=exposed_ms,
        exposed_ms=exposed_ms,
        compute_ms=STEP_MS - exposed_ms,
        idle_ms=0.0,
    )
    segments = [Segment(call.start_ms or 0, call.end_ms or 0, ["allreduce"], 1) for call in calls]
    fields = {
        "rank": rank, "world_size": 2, "start_unix_ns": START_NS + int(number * STEP_MS * 1e6),
        "step_ms": STEP_MS, "overlap": overlap, "collectives": calls, "num_collectives": 2,
        "active_segments": segments, "run_id": "run",
    }  # fmt: skip
    return step(number, **(fields | changes))


def written(folder: Path, records: list[StepRecord]) -> None:
    for rank in {each.rank for each in records}:
        with LineWriter.create(folder / steps_name(rank)) as writer:
            for each in records:
                if each.rank == rank:
                    writer.write(each)


def shown(folder: Path) -> Newest:
    follower = Follower(folder)
    follower.poll()
    return newest(follower.ranks.values(), late_rank)


def test_the_others_wait_for_the_rank_that_comes_last(tmp_path: Path) -> None:
    """Rank 1 comes at 10 ms, rank 0 at 4: 6 ms of rank 0's 9 exposed ones are waiting."""
    written(tmp_path, [record(rank, n, (4.0, 10.0)[rank], 10.0) for n in range(12) for rank in (0, 1)])
    ranks, late, _ = shown(tmp_path)
    assert late == LateRank(1, pytest.approx(6.0))
    assert [rank.exposed_ms for rank in ranks] == [9.0, 3.0]
    assert [rank.exposed_wait_ms for rank in ranks] == [pytest.approx(6.0), 0.0]
    assert [rank.caused_ms for rank in ranks] == [0.0, pytest.approx(6.0)]


def test_ranks_that_are_late_in_turn_are_no_straggler(tmp_path: Path) -> None:
    records = [record(rank, n, 4.0 if (rank + n) % 2 else 10.0, 10.0) for n in range(12) for rank in (0, 1)]
    written(tmp_path, records)
    ranks, late, _ = shown(tmp_path)
    # 11 steps are shown: the first one is left out.
    assert [rank.caused_ms for rank in ranks] == [pytest.approx(30 / 11), pytest.approx(36 / 11)]
    assert late is None


def test_cells_are_means_over_the_same_steps_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 is two steps ahead: steps 5 to 24 are shown of both, and their mean length is 14.5."""
    records = [record(0, n, 4.0, 4.0, step_ms=float(n)) for n in range(27)]
    records += [record(1, n, 4.0, 4.0, step_ms=float(n)) for n in range(25)]
    written(tmp_path, records)
    ranks, _, _ = shown(tmp_path)
    assert [(rank.num_steps, rank.step_ms, rank.last.global_step) for rank in ranks] == [
        (20, np.mean(range(5, 25)), 26),
        (20, np.mean(range(5, 25)), 24),
    ]
    assert [rank.step_ms for rank in ranks] == [14.5, 14.5]


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    written(tmp_path, [record(rank, n, 4.0 + rank, 5.0) for n in range(30) for rank in (0, 1)])
    for rank in shown(tmp_path).ranks:
        assert rank.compute_ms is not None
        assert rank.exposed_ms is not None
        assert rank.idle_ms is not None
        assert rank.step_ms == pytest.approx(rank.compute_ms + rank.exposed_ms + rank.idle_ms)


def test_the_first_step_of_a_run_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, [step(n, step_ms=900.0 if n == 0 else 10.0) for n in range(9)])
    (rank,), late, _ = shown(tmp_path)
    assert (rank.step_ms, rank.num_steps, late) == (10.0, 8, None)


@pytest.mark.parametrize("lists", [{2}, set()], ids=["one-step-has-lists", "none-has"])
def test_steps_without_lists_of_collectives_have_the_groups_of_the_last_that_has(
    tmp_path: Path, lists
) -> None:
    """As in a report: the least exposed comes last where all ranks are in one group, which must be known."""
    bare = {"collectives": None, "active_segments": None}
    written(
        tmp_path,
        [
            record(r, n, (4.0, 10.0)[r], 10.0, **({} if n in lists else bare))
            for n in range(40)
            for r in (0, 1)
        ],
    )
    ranks, late, _ = shown(tmp_path)
    assert late == (LateRank(1, pytest.approx(6.0)) if lists else None)
    assert [rank.exposed_wait_ms for rank in ranks] == ([6.0, 0.0] if lists else [None, None])


def test_nobody_is_late_where_not_all_ranks_are_seen(tmp_path: Path) -> None:
    records = [record(r, n, (4.0, 10.0)[r], 10.0, world_size=4) for n in range(12) for r in (0, 1)]
    written(tmp_path, records)
    assert shown(tmp_path).late is None


def test_ranks_of_an_earlier_attempt_are_not_shown(tmp_path: Path) -> None:
    """The job went on with one rank from step 6."""
    written(tmp_path, [record(rank, n, 4.0, 4.0) for n in range(6) for rank in (0, 1)])
    with LineWriter.append(tmp_path / steps_name(0)) as writer:
        for n in range(6, 9):
            writer.write(record(0, n, 4.0, 4.0, world_size=1, attempt=1))
    assert [(rank.rank, rank.num_steps) for rank in shown(tmp_path).ranks] == [(0, 3)]


def test_steps_are_counted_once_where_the_file_is_made_smaller(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    with LineWriter.create(tmp_path / steps_name(0)) as writer:
        writer.max_bytes = 20_000
        for number in range(200):
            writer.write(step(number, run_id="run", num_collectives=3))
            follower.poll()
    state = follower.ranks[0]
    assert state.num_collectives == 600
    assert [each.global_step for each in state.recent] == list(range(176, 200))


def test_a_new_run_in_the_same_folder_is_shown_alone(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    written(tmp_path, [step(n, run_id="old") for n in range(50)])
    follower.poll()
    (tmp_path / steps_name(0)).rename(tmp_path / "aside")
    written(tmp_path, [step(n, run_id="new", num_collectives=1) for n in range(5)])
    follower.poll()
    state = follower.ranks[0]
    assert ([each.global_step for each in state.recent], state.num_collectives) == ([0, 1, 2, 3, 4], 5)


def test_a_line_that_was_changed_or_is_of_another_rank_is_not_shown(tmp_path: Path) -> None:
    written(tmp_path, [record(rank, n, 4.0, 4.0) for n in range(6) for rank in (0, 1)])
    path = tmp_path / steps_name(0)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-1] = lines[-1].replace(b'"step_ms":20.0', b'"step_ms":92.0')
    path.write_bytes(b"".join(lines) + (tmp_path / steps_name(1)).read_bytes())
    followed = Follower(tmp_path)
    followed.poll()
    assert [step.global_step for step in followed.ranks[0].recent] == [0, 1, 2, 3, 4]


def test_lines_of_a_newer_schema_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [msgspec.structs.replace(record(0, 0, 4.0, 4.0), schema=99)])
    with pytest.raises(RecordError, match="written with record schema 99"):
        shown(tmp_path)


def test_a_folder_without_steps_shows_nothing(tmp_path: Path) -> None:
    assert shown(tmp_path) == Newest([], None)


def test_overlap_of_no_communication_is_not_known(tmp_path: Path) -> None:
    overlap: OverlapRecord = msgspec.structs.replace(step().overlap, comm_ms=0.0, hidden_ms=0.0)
    written(tmp_path, [step(n, overlap=overlap) for n in range(4)])
    assert shown(tmp_path).ranks[0].overlap_ratio is None


NO_OVERLAP = OverlapRecord(
    comm_ms=None, compute_ms=None, hidden_ms=None, exposed_ms=None, idle_ms=None, exposed_copy_ms=None,
    overlap_ratio=None, hidden_per_compute=None, compute_allreduce_ms=None, compute_reducescatter_ms=None,
    hidden_by_op={}, exposed_by_op={},
)  # fmt: skip


def test_parts_are_of_the_newest_steps_that_were_recorded_and_the_step_is_of_all(tmp_path: Path) -> None:
    """Of 60 steps the last 50 were left out: shown are their length and the parts of the first ones."""

    def one(rank: int, number: int) -> StepRecord:
        if number < 10:
            return record(rank, number, 2.0, 10.0 if rank else 2.0)
        return record(
            rank, number, 2.0, 2.0, is_recorded=False, step_ms=15.0, overlap=NO_OVERLAP, collectives=None
        )

    written(tmp_path, [one(rank, number) for rank in (0, 1) for number in range(60)])
    found = shown(tmp_path)
    assert [rank.step_ms for rank in found.ranks] == [15.0, 15.0]
    assert all(rank.compute_ms is not None for rank in found.ranks)
    assert found.ranks[0].last.global_step == 59


def test_a_job_whose_steps_were_all_left_out_shows_their_length(tmp_path: Path) -> None:
    left_out = {"is_recorded": False, "overlap": NO_OVERLAP, "collectives": None}
    written(tmp_path, [record(rank, n, 2.0, 2.0, **left_out) for rank in (0, 1) for n in range(30)])
    found = shown(tmp_path)
    assert [(rank.step_ms, rank.compute_ms) for rank in found.ranks] == [(20.0, None)] * 2
    assert found.late is None


def test_what_is_damaged_is_told_beside_the_means(tmp_path: Path) -> None:
    written(tmp_path, [record(rank, i, 5, 5) for rank in range(2) for i in range(12)])
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.damage() == []
    path = tmp_path / steps_name(1)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[4].replace(b'"step_ms":20.0', b'"step_ms":90.0')
    path.write_bytes(b"".join([*lines[:4], changed, *lines[5:7], *lines[9:11], lines[11][:50]]))
    follower = Follower(tmp_path)
    follower.poll()
    # The changed line, and the two that are gone.
    assert follower.damage() == [
        "rank_1_metrics.jsonl ends within a line",
        "3 lines of rank_1_metrics.jsonl are damaged or missing",
    ]


def test_a_line_that_is_just_being_written_is_no_damage(tmp_path: Path) -> None:
    """By this very process, which is alive."""
    written(tmp_path, [record(0, i, 5, 5, world_size=1) for i in range(12)])
    path = tmp_path / steps_name(0)
    path.write_bytes(path.read_bytes()[:-20])
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.damage() == ["rank_0_metrics.jsonl ends within a line"]
    now_ns = time.time_ns()
    state = ProcessState(
        run_id="run", attempt=0, rank=0, world_size=1, host=socket.gethostname(), pid=os.getpid(),
        process_start=None, started_unix_ns=now_ns, written_unix_ns=now_ns,
    )  # fmt: skip
    StateFile(tmp_path / state_name(0), 0).write(state)
    assert follower.damage() == []


def test_a_rank_without_steps_and_one_that_ends_early_are_told(tmp_path: Path) -> None:
    written(tmp_path, [record(0, i, 5, 5) for i in range(12)] + [record(1, i, 5, 5) for i in range(3)])
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.damage() == ["rank 1 ends at step 2, rank 0 at 11"]
    path = tmp_path / steps_name(1)
    path.unlink()
    path.mkdir()
    follower = Follower(tmp_path)
    follower.poll()
    assert follower.damage()[0].startswith("rank_1_metrics.jsonl cannot be read: ")
    assert follower.damage()[1] == "1 of 2 ranks have no step here"
