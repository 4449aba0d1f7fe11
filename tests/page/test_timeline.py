"""What the page's timeline draws: ranks on one clock, and waiting told apart."""

import pytest

from aorta.page.timeline import WAITING, steps_to_show, timeline_data
from aorta.page.write import make_report
from aorta.records.schema import CollectiveRecord
from aorta.timeline.types import Kind, Span, Timeline
from tests.records.run_folders import run_record, step_record, write_run

HOURS_NS = 3_600_000_000_000
COMPUTE, HIDDEN, EXPOSED, IDLE = range(4)


def two_ranks(folder, *, skew_ns=0, num_steps=4, collectives=True, ends_apart_ms=0.0):
    """Steps of 12 ms. Rank 0 computes until 6 and gathers from 5 to 9, rank 1 until 7 and from 7 to 9:
    rank 0 waits from 5 to 7, and moves nothing under no compute from 6 to 7."""
    records = []
    for step in range(num_steps):
        for rank, compute, start in ((0, 6.0, 5.0), (1, 7.0, 7.0)):
            end = 9.0 + rank * ends_apart_ms * (step % 2)
            spans = [Span(0, compute, Kind.COMPUTE), Span(start, end, Kind.COMM, "all_gather", "nccl")]
            line = Timeline.from_spans(
                spans, (0.0, 12.0), rank=rank, step=step, source="events",
                origin_unix_ns=10**18 + step * 12_000_000 + rank * skew_ns,
            )  # fmt: skip
            row = CollectiveRecord(
                op="all_gather", stream="allgather", group="dp", ranks=[0, 1], bytes=4_000_000,
                dtype="bfloat16", seq=step, start_ms=start, end_ms=end, algbw_gb_s=1.0, busbw_gb_s=0.5,
            )  # fmt: skip
            records.append(step_record(line, 2, collectives=[row] if collectives else []))
    return write_run(folder, records, run_record(2))


def first_step(folder):
    shown = steps_to_show(make_report([folder], ["a"], warmup=0))
    run = timeline_data(shown)["runs"][0]
    return run, run["steps"]["0"]


@pytest.mark.parametrize("skew_ns", [0, 3 * HOURS_NS, -3 * HOURS_NS])
def test_ranks_are_drawn_on_one_clock_however_far_their_own_are_apart(tmp_path, skew_ns):
    run, step = first_step(two_ranks(tmp_path / "run", skew_ns=skew_ns))
    assert run["moved"] == (skew_ns != 0)
    assert not step["apart"]
    assert [rank["window"] for rank in step["ranks"]] == [[0, 12], [0, 12]]


def test_waiting_for_a_late_rank_is_told_apart_in_the_row_that_sums_up(tmp_path):
    _, step = first_step(two_ranks(tmp_path / "run", skew_ns=HOURS_NS))
    of_rank = [rank["states"] for rank in step["ranks"]]
    assert of_rank[0] == [[0, 5, COMPUTE], [5, 6, HIDDEN], [6, 7, WAITING], [7, 9, EXPOSED], [9, 12, IDLE]]
    assert of_rank[1] == [[0, 7, COMPUTE], [7, 9, EXPOSED], [9, 12, IDLE]]


def test_no_waiting_is_drawn_where_the_report_says_that_waits_are_not_told_apart(tmp_path):
    folder = two_ranks(tmp_path / "run", ends_apart_ms=8.0)
    report = make_report([folder], ["a"], warmup=0)
    assert any("clocks cannot tell who came when" in note for note in report.datasets["a"].first.notes)
    _, step = first_step(folder)
    assert WAITING not in {state for rank in step["ranks"] for *_, state in rank["states"]}


def test_ranks_whose_clocks_nothing_brings_together_are_drawn_from_their_own_start(tmp_path):
    _, step = first_step(two_ranks(tmp_path / "run", skew_ns=3 * HOURS_NS, collectives=False))
    assert step["apart"]
    assert [rank["window"] for rank in step["ranks"]] == [[0, 12], [0, 12]]
