"""What the resolver makes of marks. Times in ms; expected values are worked out by hand."""

import pytest

from aorta.recording.resolve import LAUNCH_TAIL_MS
from tests.recording import fakes


def test_synchronous_collective_on_the_compute_stream_is_exposed():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_reduce", 4, 6, blocks=True)
    overlap = fakes.resolver().resolve(step).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (2, 0, 2)
    assert (overlap.compute_ms, overlap.idle_ms, overlap.stalled_ms) == (8, 0, 2)


def test_collective_on_another_stream_is_hidden_where_compute_goes_on():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_gather", 2, 5)
    overlap = fakes.resolver().resolve(step).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (3, 3, 0)
    assert overlap.overlap_ratio == 1


def test_wait_for_an_asynchronous_call_stalls_until_its_end():
    step = fakes.step(0, 10, 10)
    call = fakes.call(step, "all_reduce", 2, 8, is_async=True)
    fakes.waits(step, 5, call)
    overlap = fakes.resolver().resolve(step).overlap
    assert (overlap.hidden_ms, overlap.exposed_ms, overlap.stalled_ms) == (3, 3, 3)
    assert overlap.compute_ms == 7


def test_wait_for_a_call_that_has_ended_costs_nothing():
    step = fakes.step(0, 10, 10)
    call = fakes.call(step, "all_reduce", 2, 4, is_async=True)
    fakes.waits(step, 5, call)
    assert fakes.resolver().resolve(step).overlap.stalled_ms == 0


def test_stall_without_communication_is_idle():
    step = fakes.step(0, 10, 10)
    fakes.stalls(step, 3, 7)
    overlap = fakes.resolver().resolve(step).overlap
    assert (overlap.comm_ms, overlap.compute_ms, overlap.idle_ms) == (0, 6, 4)
    assert overlap.overlap_ratio is None


def test_calls_of_one_group_run_one_after_the_other():
    # The second is queued at 3 while the first still runs: it begins when the first ends, at 6.
    step, group = fakes.step(0, 10, 10), fakes.group()
    fakes.call(step, "all_gather", 2, 6, in_group=group)
    fakes.call(step, "reduce_scatter", 3, 8, in_group=group)
    record = fakes.resolver().resolve(step)
    assert record.collectives is not None
    assert [(c.start_ms, c.end_ms) for c in record.collectives] == [(2, 6), (6, 8)]


def test_groups_run_beside_each_other():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_gather", 2, 6, in_group=fakes.group("dp"))
    fakes.call(step, "all_reduce", 3, 8, in_group=fakes.group("tp"))
    record = fakes.resolver().resolve(step)
    assert record.collectives is not None
    assert [(c.start_ms, c.end_ms) for c in record.collectives] == [(2, 6), (3, 8)]
    assert record.overlap.comm_ms == 6


def test_a_collective_is_not_older_than_its_launch():
    # The start mark passes at 2, but the host launches the kernel only at 3.
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_reduce", 2, 5, blocks=True, launched_ms=3)
    overlap = fakes.resolver().resolve(step).overlap
    assert overlap.comm_ms == pytest.approx(2 + LAUNCH_TAIL_MS)
    assert overlap.stalled_ms == 3


def test_communication_that_reaches_into_the_next_window_counts_there_too():
    resolver = fakes.resolver()
    first, second = fakes.step(0, 10, 10), fakes.step(10, 20, 20, number=1)
    call = fakes.call(first, "all_reduce", 8, 13, is_async=True)
    fakes.waits(second, 11, call)
    assert resolver.resolve(first).overlap.comm_ms == 2
    overlap = resolver.resolve(second).overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms) == (3, 1, 2)


def test_a_call_keeps_its_unclipped_times_in_the_step_that_issued_it():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_reduce", 8, 13, is_async=True)
    record = fakes.resolver().resolve(step)
    assert record.collectives is not None
    assert (record.collectives[0].start_ms, record.collectives[0].end_ms) == (8, 13)


def test_wait_in_cpp_lasts_until_the_last_bucket_and_no_longer_than_its_bracket():
    step = fakes.step(0, 10, 10)
    buckets = [fakes.call(step, "all_reduce", 2, end, is_async=True) for end in (4, 7)]
    fakes.final_wait(step, 5, 9, buckets)  # after 7 the reducer copies gradients: that is compute
    assert fakes.resolver().resolve(step).overlap.stalled_ms == 2


def test_one_rank_group_communicates_nothing():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_gather", 2, 5, in_group=fakes.group("tp", num_ranks=1))
    record = fakes.resolver().resolve(step)
    assert record.overlap.comm_ms == 0
    assert record.num_collectives == 1


def test_time_after_the_body_with_an_empty_queue_is_idle():
    # The host queued the next step's start when the device had long finished: data loading.
    step = fakes.step(0, 6, 10, window_end_queued=9.99)
    overlap = fakes.resolver().resolve(step).overlap
    assert (overlap.compute_ms, overlap.idle_ms) == (6, 4)


def test_a_mark_that_passes_as_it_is_queued_bounds_starvation():
    # Only the mark at 8 was queued late: what lies between it and the mark before is in doubt.
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_reduce", 4, 5, blocks=True)
    late = fakes.call(step, "all_reduce", 8, 9, blocks=True)
    late.start = fakes.at(8, queued_ms=7.99)
    overlap = fakes.resolver().resolve(step).overlap
    assert overlap.starved_bound_ms == pytest.approx(3)  # 5 to 8: the all-reduce itself is no compute
    assert overlap.host_bound is True


def test_an_untimed_collective_makes_the_sums_null_with_a_reason():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_gather", 2, 5).reason = "captured into a graph"
    record = fakes.resolver().resolve(step)
    overlap = record.overlap
    assert (overlap.comm_ms, overlap.hidden_ms, overlap.exposed_ms, overlap.idle_ms) == (None,) * 4
    assert "captured into a graph" in record.not_measured["overlap"]


def test_bandwidth_is_that_of_nccl_tests():
    step = fakes.step(0, 10, 10)
    fakes.call(step, "all_reduce", 2, 4, in_group=fakes.group(num_ranks=4), num_bytes=8_000_000)
    fakes.call(step, "barrier", 5, 6, num_bytes=0)
    record = fakes.resolver().resolve(step)
    assert record.collectives is not None
    assert record.collectives[0].algbw_gb_s == 4
    assert record.collectives[0].busbw_gb_s == 6
    assert record.collectives[1].busbw_gb_s is None


def test_compute_exposed_and_idle_make_the_step():
    step = fakes.step(0, 9, 10)
    fakes.call(step, "all_reduce", 4, 6, blocks=True)
    fakes.call(step, "all_gather", 5, 8, in_group=fakes.group("ep"))
    fakes.stalls(step, 7, 8.5)
    overlap = fakes.resolver().resolve(step).overlap
    assert overlap.compute_ms is not None
    assert overlap.exposed_ms is not None
    assert overlap.idle_ms is not None
    assert overlap.compute_ms + overlap.exposed_ms + overlap.idle_ms == pytest.approx(10)
