"""Step records from kernel records. Times are worked out by hand."""

import pytest

from aorta.records.schema import StepRecord
from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.notes import CallSequence, LearnedCalls, Mark, RecordedStep, What
from aorta.steps.process import StepQueue
from tests.steps.kernel_rows import (
    ALONE,
    GATHER,
    GEMM,
    MS,
    ORIGIN_NS,
    REDUCE,
    SENDRECV,
    SETTINGS,
    call,
    chunk,
    kernel,
    mark,
    row,
    step,
)


def resolved(noted: RecordedStep, rows: list[dict], **fields) -> StepRecord:
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(rows, **fields))
    assert steps.is_complete(noted, [noted])
    return steps.resolve(noted)


ROWS = [
    mark(1, 0.0, 10),
    kernel(GATHER, 1.0, 5.0, 11),
    kernel(GEMM, 2.0, 4.0, 12),
    kernel(GEMM, 6.0, 8.0, 14),
    kernel(REDUCE, 7.0, 9.0, 16),
    mark(2, 9.0, 17),
    mark(3, 10.0, 18),
]
"""One step of 10 ms: comm 1-5 and 7-9, compute 2-4 and 6-8."""
CALLS = [call("all_gather"), call("reduce_scatter", 1)]


def test_a_step_is_what_its_kernels_did_between_its_marks():
    record = resolved(step(CALLS), ROWS)

    assert record.source == "kernels"
    assert record.step_ms == pytest.approx(10.0)
    assert record.between_steps_ms == pytest.approx(1.0)
    assert record.start_unix_ns == ORIGIN_NS + 10**18
    overlap = record.overlap
    assert overlap.comm_ms == pytest.approx(6.0)
    assert overlap.compute_ms == pytest.approx(4.0)
    assert overlap.hidden_ms == pytest.approx(3.0)  # 2-4 under the gather, 7-8 under the reduce-scatter
    assert overlap.exposed_ms == pytest.approx(3.0)
    assert overlap.idle_ms == pytest.approx(3.0)
    assert overlap.hidden_by_op == pytest.approx({"all_gather": 2.0, "reduce_scatter": 1.0})
    assert record.loss == 2.5


def test_collectives_have_the_times_of_their_kernels():
    record = resolved(step(CALLS), ROWS)

    gather, reduce = record.collectives
    assert (gather.start_ms, gather.end_ms) == pytest.approx((1.0, 5.0))
    assert (reduce.start_ms, reduce.end_ms) == pytest.approx((7.0, 9.0))
    assert gather.algbw_gb_s == pytest.approx(2.0)  # 8 MB in 4 ms
    assert gather.busbw_gb_s == pytest.approx(1.0)


def test_kernels_are_counted_by_class_and_by_name():
    copies = [row(What.COPY, 4.0, 4.5, 13), row(What.SET, 9.5, 9.6, 17)]
    kernels = resolved(step(CALLS), ROWS + copies).kernels

    assert kernels.num_kernels == 4
    assert kernels.classes["gemm"] == pytest.approx((4.0, 2))
    assert kernels.classes["communication"] == pytest.approx((6.0, 2))
    assert kernels.classes["copy"] == pytest.approx((0.6, 2))
    assert {name: (ms, num) for name, ms, num in kernels.top} == {
        1: (4.0, 2),
        2: (4.0, 1),
        3: (2.0, 1),
    }


def test_copies_are_told_by_the_memory_that_they_are_from_and_to():
    """1 is to the device, 2 from it, 8 within; memory 1 is pageable, 2 pinned, 3 the device's."""
    kinds = [0x030101, 0x030101, 0x030201, 0x010302, 0x030308, 0, 0x060505]
    copies = [
        row(What.COPY, 4.0 + place / 10, 4.1 + place / 10, 11, name=one) for place, one in enumerate(kinds)
    ]
    kernels = resolved(step(CALLS), ROWS + copies).kernels

    assert kernels.copies == pytest.approx(
        {
            "pageable_to_device": 0.2,
            "pinned_to_device": 0.1,
            "device_to_pageable": 0.1,
            "device_to_device": 0.1,
        }
    )
    assert kernels.classes["copy"] == pytest.approx((0.7, 7))
    assert resolved(step(CALLS, is_detailed=False), ROWS + copies).kernels.copies == {}


def test_work_of_other_steps_counts_where_it_runs_and_is_matched_where_it_was_launched():
    early = kernel(GATHER, -1.0, 0.5, 5)  # of the step before
    late = kernel(REDUCE, 10.5, 11.0, 15)  # of this step, in the next one's window
    calls = [*CALLS, call("reduce_scatter", 2)]
    record = resolved(step(calls), [early, *ROWS, late])

    assert record.overlap.comm_ms == pytest.approx(6.5)
    starts = [c.start_ms for c in record.collectives]
    assert starts == pytest.approx([1.0, 10.5, 7.0])  # in the order of their launches
    assert record.not_measured.get("collectives") is None


def test_numbers_of_launches_wrap_around():
    rows = [dict(r, correlation=(r["correlation"] + 2**32 - 15) % 2**32) for r in ROWS]
    record = resolved(step(CALLS), rows)

    assert [c.start_ms for c in record.collectives] == pytest.approx([1.0, 7.0])


def test_calls_that_run_no_kernel_of_their_own_are_not_expected_to():
    calls = [
        call("all_reduce", 0, stream="host", start=Mark(ORIGIN_NS), end=Mark(ORIGIN_NS + MS)),
        call("all_gather"),
        call("all_gather", 0, ALONE),
        call("reduce_scatter", 1),
        call("broadcast", 2, reason="captured into a graph"),
    ]
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(ROWS))
    record = steps.resolve(step(calls))

    assert [c.start_ms for c in record.collectives] == [0.0, 1.0, None, 7.0, None]
    assert steps.coverage().num_matched == 2
    assert steps.coverage().num_calls_without_kernel == 0


def test_an_unseen_step_has_its_learned_calls_where_the_kernels_are_theirs():
    queue = StepQueue(SETTINGS)
    queue.add_sequence(CallSequence(4, [call("all_gather", 7), call("reduce_scatter", 8, module="layers.3")]))
    list(queue.add_kernels(chunk(ROWS)))
    ((record, _),) = queue.put(step([], is_unseen=True, learned=LearnedCalls([], {"0": 20}, 4)), False)

    assert record.calls_learned
    gather, reduce = record.collectives
    assert (gather.seq, gather.start_ms, gather.end_ms) == pytest.approx((20, 1.0, 5.0))
    assert (reduce.seq, reduce.start_ms, reduce.end_ms) == pytest.approx((21, 7.0, 9.0))
    assert record.module_of(reduce) == "layers.3"
    assert (gather.launch_ms, gather.bytes) == (None, 8 * 10**6)
    assert queue.num_refuted == 0


@pytest.mark.parametrize(
    "learned",
    [
        pytest.param([call("all_gather")], id="one-less"),
        pytest.param([call("all_gather"), call("reduce_scatter", 1), call("all_gather", 2)], id="one-more"),
        pytest.param([call("reduce_scatter"), call("all_gather", 1)], id="another-order"),
        pytest.param([call("all_gather"), call("all_reduce", 1)], id="another-operation"),
    ],
)
def test_an_unseen_step_whose_kernels_are_others_has_no_list_of_collectives(learned):
    queue = StepQueue(SETTINGS)
    queue.add_sequence(CallSequence(1, learned))
    list(queue.add_kernels(chunk(ROWS)))
    ((record, _),) = queue.put(step([], is_unseen=True, learned=LearnedCalls([], {}, 1)), False)

    assert record.collectives is None
    assert "kernels" in record.not_measured["collectives"]
    assert (record.num_collectives, record.calls_learned) == (2, False)
    assert record.overlap.comm_ms == pytest.approx(6.0)  # the kernels ran, whosever they are
    assert queue.num_refuted == 1


def test_a_seen_step_that_kernels_do_not_confirm_keeps_those_like_it_from_being_unseen():
    """A library that launches a coalesced group in parts: matched all the same."""
    members = [call("all_gather"), call("all_gather")]
    queue = StepQueue(SETTINGS)
    list(queue.add_kernels(chunk([*ROWS[:2], kernel(GATHER, 5.0, 5.5, 12), *ROWS[2:]])))
    ((record, _),) = queue.put(step([call("all_gather", members=members), call("reduce_scatter", 1)]), False)

    assert [c.start_ms for c in record.collectives] == pytest.approx([1.0, 7.0])
    assert queue.num_refuted == 1


def test_an_unseen_step_of_another_number_says_so():
    record = resolved(step([], is_unseen=True, num_calls=0), ROWS)
    assert "number" in record.not_measured["collectives"]
    assert record.num_collectives == 2


def test_what_cannot_be_told_apart_is_left_over_on_both_sides():
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(ROWS))
    record = steps.resolve(step([call("all_gather"), call("all_gather", 1), call("reduce_scatter", 2)]))

    assert [c.start_ms for c in record.collectives] == [None, None, pytest.approx(7.0)]
    assert "2 of 3" in record.not_measured["collectives"]
    assert record.overlap.comm_ms == pytest.approx(6.0)  # the kernels ran, whosever they are
    coverage = steps.coverage()
    assert (coverage.num_calls_without_kernel, coverage.num_kernels_without_call) == (2, 1)
    assert "all_gather #0" in coverage.leftovers[0]


def test_a_kernel_of_sends_has_the_operation_of_its_call():
    rows = [mark(1, 0.0, 10), kernel(SENDRECV, 1.0, 3.0, 11), mark(2, 4.0, 12), mark(3, 4.0, 13)]
    record = resolved(step([call("all_to_all")]), rows)

    assert record.overlap.exposed_by_op == pytest.approx({"all_to_all": 2.0})
    assert record.streams["alltoall"].busy_ms == pytest.approx(2.0)


def test_a_coalesced_call_that_was_launched_in_parts_has_them_all():
    members = [call("all_gather")] * 2
    rows = [
        mark(1, 0.0, 10), kernel(GATHER, 1.0, 2.0, 11), kernel(GATHER, 2.0, 3.0, 12), mark(2, 4.0, 13),
        mark(3, 4.0, 14),
    ]  # fmt: skip
    record = resolved(step([call("all_gather", members=members)]), rows)

    assert (record.collectives[0].start_ms, record.collectives[0].end_ms) == pytest.approx((1.0, 3.0))


def test_communication_in_graphs_counts_and_has_no_call():
    rows = [*ROWS[:-2], kernel(GATHER, 8.0, 9.0, 16, in_graph=1), *ROWS[-2:]]
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(rows))
    record = steps.resolve(step(CALLS))

    assert steps.coverage().num_graph_kernels_of_communication == 1
    assert steps.coverage().num_matched == 2
    assert record.kernels.num_graph_nodes == 1


def test_other_devices_of_the_process_do_not_count():
    record = resolved(step(CALLS), [*ROWS, kernel(GEMM, 0.0, 10.0, 11, device=1)])

    assert record.overlap.compute_ms == pytest.approx(4.0)


def test_a_step_without_marks_has_no_times():
    record = resolved(step(CALLS), ROWS[:-1])

    assert record.step_ms is None
    assert record.overlap.comm_ms is None
    assert record.not_measured["overlap"] == "its marks have no records"
    assert record.loss == 2.5


@pytest.mark.parametrize(("lost_ms", "is_whole"), [((3.0, 4.0), False), ((20.0, 30.0), True)])
def test_lost_records_take_the_numbers_of_the_steps_they_were_of(lost_ms, is_whole):
    low, high = (ORIGIN_NS + round(ms * MS) for ms in lost_ms)
    record = resolved(step(CALLS), ROWS, num_lost=9, lost_ns=(low, high))

    assert (record.overlap.comm_ms is not None) is is_whole
    if not is_whole:
        assert "ring of kernel records was full" in record.not_measured["overlap"]


def test_a_step_waits_until_all_that_was_launched_in_its_window_has_come():
    """The next step's mark was launched at 8 ms, while the device was in this step until 10."""
    steps = KernelSteps(SETTINGS)
    first = step(CALLS, queued_ms=(0, 1, 8))
    after = step([], 1, (3, 4, 5), queued_ms=(8, 9, 11))
    steps.add(chunk(ROWS, complete_ms=-5000, settled=1))
    assert not steps.is_complete(first, [first, after])
    steps.add(chunk([mark(4, 12.0, 20), mark(5, 14.0, 21, buffer=3)], complete_ms=-5000, settled=2, names=[]))
    # Mark 5, launched at 11 ms, is in a buffer that is not settled.
    assert not steps.is_complete(first, [first, after])
    steps.add(chunk([], complete_ms=-5000, settled=4, names=[]))
    assert steps.is_complete(first, [first, after])


def test_lines_come_in_the_order_of_their_steps():
    queue = StepQueue(SETTINGS)
    assert list(queue.put(step(CALLS), False)) == []
    lost = step([], 1, (3, 4, 5), kernels_lost="torch.profiler took the driver's records in this step")
    assert list(queue.put(lost, True)) == []

    records = list(queue.add_kernels(chunk(ROWS)))

    assert [(record.global_step, reply) for record, reply in records] == [(0, False), (1, True)]
    assert "torch.profiler" in records[1][0].not_measured["overlap"]


def test_what_never_came_is_said_when_the_process_ends():
    queue = StepQueue(SETTINGS)
    list(queue.put(step(CALLS), False))

    ((record, _),) = queue.finish()

    assert record.overlap.comm_ms is None
    assert record.loss == 2.5


def test_records_that_come_after_the_line_of_their_step_are_counted():
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(ROWS))
    steps.resolve(step(CALLS))
    assert steps.coverage().num_late == 0

    steps.add(chunk([kernel(GEMM, 8.5, 9.5, 15), kernel(GEMM, 11.0, 12.0, 20)], names=[]))

    assert steps.coverage().num_late == 1


def test_every_line_says_where_communication_was_exposed():
    record = resolved(step(CALLS, number=1), ROWS)  # segments are kept in step 0 and not in this one

    assert record.active_segments is None
    # 1-2 and 4-5 of the gather, 8-9 of the reduce-scatter: distances and lengths
    assert record.exposed_run_lengths_ns == [MS, MS, 2 * MS, MS, 3 * MS, MS]
    assert [call.exposed_ms for call in record.collectives] == pytest.approx([2.0, 1.0])


def test_a_collective_is_exposed_within_the_window_alone():
    early = kernel(GATHER, -1.0, 0.5, 11)
    rows = [mark(1, 0.0, 10), early, kernel(GEMM, 0.25, 0.5, 12), mark(2, 1.0, 13), mark(3, 1.0, 14)]
    record = resolved(step([call("all_gather")]), rows)

    assert record.collectives[0].start_ms == pytest.approx(-1.0)
    assert record.collectives[0].exposed_ms == pytest.approx(0.25)
    assert record.exposed_run_lengths_ns == [0, MS // 4]


def test_without_communication_nothing_is_exposed():
    rows = [mark(1, 0.0, 10), kernel(GEMM, 0.25, 0.5, 12), mark(2, 1.0, 13), mark(3, 1.0, 14)]
    assert resolved(step([]), rows).exposed_run_lengths_ns == []


def test_names_of_earlier_attempts_keep_their_places():
    steps = KernelSteps(SETTINGS, names=["", REDUCE, "other", GEMM])
    steps.add(chunk(ROWS))
    record = steps.resolve(step(CALLS))

    assert list(steps.names) == ["", REDUCE, "other", GEMM, GATHER, SENDRECV]
    assert {place: num for place, _, num in record.kernels.top} == {3: 2, 4: 1, 1: 1}
    assert [span.name for span in record.kernels.spans] == [4, 3, 3, 1]


def test_records_without_times_are_counted():
    steps = KernelSteps(SETTINGS)
    steps.add(chunk(ROWS, num_no_time=3))
    steps.resolve(step(CALLS))
    assert steps.coverage().num_no_time == 3
