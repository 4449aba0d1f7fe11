"""What EventSteps makes of marks. Times in ms; expected values are worked out by hand."""

import pytest

from aorta.steps.event_steps import LAUNCH_TAIL_MS
from tests.steps.event_marks import Made, event_steps


def test_synchronous_collective_on_the_compute_stream_is_exposed():
    step = Made(10, 10)
    step.call("all_reduce", 4, 6, blocks=True)
    overlap = event_steps().resolve(step.noted()).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (2, 0, 2)
    assert (overlap.compute_ms, overlap.idle_ms, overlap.stalled_ms) == (8, 0, 2)


def test_collective_on_another_stream_is_hidden_where_compute_goes_on():
    step = Made(10, 10)
    step.call("all_gather", 2, 5)
    overlap = event_steps().resolve(step.noted()).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (3, 3, 0)
    assert overlap.overlap_ratio == 1


def test_wait_for_an_asynchronous_call_stalls_until_its_end():
    step = Made(10, 10)
    call = step.call("all_reduce", 2, 8, is_async=True)
    step.wait(5, call)
    overlap = event_steps().resolve(step.noted()).overlap
    assert (overlap.hidden_ms, overlap.exposed_ms, overlap.stalled_ms) == (3, 3, 3)
    assert overlap.compute_ms == 7


def test_ends_of_calls_are_kept_for_the_latest_steps_alone():
    """As many, whatever the length of the run; a call of 60 steps ago can still be waited for."""
    steps, resolving = [], event_steps()
    for number in range(460):
        made = Made(10, 10, number=number, origin=10.0 * number)
        steps.append([made.call("all_reduce", 2, 8) for _ in range(5)])
        if number == 459:
            made.wait(0, steps[number - 60][0])
        resolving.resolve(made.noted())
    ends = resolving._run.ends_run_ms
    assert 60 * 5 <= len(ends) <= 2 * 1000 + 5
    assert set(steps[400]) <= set(ends)
    assert not set(steps[10]) & set(ends)


def test_wait_for_a_call_that_has_ended_costs_nothing():
    step = Made(10, 10)
    call = step.call("all_reduce", 2, 4, is_async=True)
    step.wait(5, call)
    assert event_steps().resolve(step.noted()).overlap.stalled_ms == 0


def test_stall_without_communication_is_idle():
    step = Made(10, 10)
    step.stall(3, 7)
    overlap = event_steps().resolve(step.noted()).overlap
    assert (overlap.comm_ms, overlap.compute_ms, overlap.idle_ms) == (0, 6, 4)
    assert overlap.overlap_ratio is None


def test_a_step_that_was_not_timed_has_its_length_and_reasons():
    step = Made(10, 12, untimed="left out")
    step.call("all_gather", 2, 6, reason="left out")
    record = event_steps().resolve(step.noted())
    assert (record.step_ms, record.between_steps_ms, record.host_ms) == (12, 2, 1)
    assert record.collectives is not None
    assert [(c.op, c.bytes, c.start_ms, c.end_ms) for c in record.collectives] == [
        ("all_gather", 1000, None, None)
    ]
    overlap = record.overlap
    assert [name for name in overlap.__struct_fields__ if getattr(overlap, name)] == []
    assert (record.streams, record.active_segments) == ({}, None)
    for name in ("overlap", "streams", "active_segments"):
        assert record.not_measured[name] == "left out"


def test_a_step_that_was_not_timed_is_none_without_collectives_either():
    overlap = event_steps().resolve(Made(10, 10, untimed="left out").noted()).overlap
    assert (overlap.comm_ms, overlap.compute_ms, overlap.idle_ms, overlap.host_bound) == (None,) * 4


def test_calls_of_one_group_run_one_after_the_other():
    # The second is queued at 3 while the first still runs: it begins when the first ends, at 6.
    step = Made(10, 10)
    step.call("all_gather", 2, 6)
    step.call("reduce_scatter", 3, 8)
    record = event_steps().resolve(step.noted())
    assert record.collectives is not None
    assert [(c.start_ms, c.end_ms) for c in record.collectives] == [(2, 6), (6, 8)]


def test_groups_run_beside_each_other():
    step = Made(10, 10)
    step.call("all_gather", 2, 6, group="dp")
    step.call("all_reduce", 3, 8, group="tp")
    record = event_steps().resolve(step.noted())
    assert record.collectives is not None
    assert [(c.start_ms, c.end_ms) for c in record.collectives] == [(2, 6), (3, 8)]
    assert record.overlap.comm_ms == 6


def test_a_collective_is_not_older_than_its_launch():
    # The start mark passes at 2, but the host launches the kernel only at 3.
    step = Made(10, 10)
    step.call("all_reduce", 2, 5, blocks=True, launched=3)
    overlap = event_steps().resolve(step.noted()).overlap
    assert overlap.comm_ms == pytest.approx(2 + LAUNCH_TAIL_MS)
    assert overlap.stalled_ms == 3


def test_communication_that_reaches_into_the_next_window_counts_there_too():
    both = event_steps()
    first, second = Made(10, 10), Made(10, 10, number=1, origin=10)
    call = first.call("all_reduce", 8, 13, is_async=True)
    second.wait(1, call)
    assert both.resolve(first.noted()).overlap.comm_ms == 2
    overlap = both.resolve(second.noted()).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (3, 1, 2)


def test_a_call_keeps_its_unclipped_times_in_the_step_that_issued_it():
    step = Made(10, 10)
    step.call("all_reduce", 8, 13, is_async=True)
    record = event_steps().resolve(step.noted())
    assert record.collectives is not None
    assert (record.collectives[0].start_ms, record.collectives[0].end_ms) == (8, 13)


def test_wait_in_cpp_lasts_until_the_last_bucket_and_no_longer_than_its_bracket():
    step = Made(10, 10)
    buckets = [step.call("all_reduce", 2, end, is_async=True) for end in (4, 7)]
    step.final_wait(5, 9, buckets)  # after 7 the reducer copies gradients: that is compute
    assert event_steps().resolve(step.noted()).overlap.stalled_ms == 2


def test_one_rank_group_communicates_nothing():
    step = Made(10, 10)
    step.call("all_gather", 2, 5, group="tp", num_ranks=1)
    record = event_steps().resolve(step.noted())
    assert record.overlap.comm_ms == 0
    assert record.num_collectives == 1


def test_time_after_the_body_with_an_empty_queue_is_idle():
    # The host queued the next step's start when the device had long finished: data loading.
    step = Made(6, 10, window_end_queued=9.99)
    overlap = event_steps().resolve(step.noted()).overlap
    assert (overlap.compute_ms, overlap.idle_ms) == (6, 4)


def test_a_mark_that_passes_as_it_is_queued_bounds_starvation():
    # Only the mark at 8 was queued late: what lies between it and the mark before is in doubt.
    step = Made(10, 10)
    step.call("all_reduce", 4, 5, blocks=True)
    step.call("all_reduce", 8, 9, blocks=True, queued=7.99)
    overlap = event_steps().resolve(step.noted()).overlap
    assert overlap.starved_bound_ms == pytest.approx(3)  # 5 to 8: the all-reduce itself is no compute
    assert overlap.host_bound is True


def test_an_untimed_collective_makes_the_sums_null_with_a_reason():
    step = Made(10, 10)
    step.call("all_gather", 2, 5, reason="captured into a graph")
    record = event_steps().resolve(step.noted())
    overlap = record.overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms, overlap.idle_ms) == (None,) * 4
    assert "captured into a graph" in record.not_measured["overlap"]


def test_bandwidth_is_that_of_nccl_tests():
    step = Made(10, 10)
    step.call("all_reduce", 2, 4, num_ranks=4, num_bytes=8_000_000)
    step.call("barrier", 5, 6, num_bytes=0)
    record = event_steps().resolve(step.noted())
    assert record.collectives is not None
    assert record.collectives[0].algbw_gb_s == 4
    assert record.collectives[0].busbw_gb_s == 6
    assert record.collectives[1].busbw_gb_s is None


def test_compute_exposed_and_idle_make_the_step():
    step = Made(9, 10)
    step.call("all_reduce", 4, 6, blocks=True)
    step.call("all_gather", 5, 8, group="ep")
    step.stall(7, 8.5)
    overlap = event_steps().resolve(step.noted()).overlap
    assert overlap.compute_ms is not None
    assert overlap.exposed_ms is not None
    assert overlap.idle_ms is not None
    assert overlap.compute_ms + overlap.exposed_ms + overlap.idle_ms == pytest.approx(10)
