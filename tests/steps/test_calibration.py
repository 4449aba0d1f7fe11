"""Records whose kernels a test writes down: what is learned from some must come out of others."""

import msgspec
import pytest

from aorta.records.schema import CollectiveRecord, ComputeSegment, SegmentState, StartBy, StepRecord
from aorta.steps.calibration import Calibrator, CallError, TracedStep, calibrate
from aorta.timeline.types import Kind, Span, Timeline
from tests.steps.raw_steps import Made, event_steps

Call = tuple[float, float, StartBy]
"""(start, end, what it began after)."""
Spans = list[tuple[float, float]]


def record(segments: list[tuple[float, SegmentState]], calls: list[Call]) -> StepRecord:
    step_ms = segments[-1][0]
    plain = event_steps().resolve(Made(step_ms, step_ms).raw())
    made = [
        CollectiveRecord(
            op="all_reduce", stream="group", group="dp", ranks=[0, 1], bytes=8, dtype="bfloat16", seq=seq,
            start_ms=start, start_by=by, end_ms=end, algbw_gb_s=None, busbw_gb_s=None,
        )
        for seq, (start, end, by) in enumerate(calls)
    ]  # fmt: skip
    return msgspec.structs.replace(
        plain, collectives=made, compute_segments=[ComputeSegment(*segment) for segment in segments]
    )


def traced(step: StepRecord, compute: Spans, comm: Spans) -> TracedStep:
    spans = [Span(start, end, Kind.COMPUTE, stream="compute") for start, end in compute]
    spans += [Span(start, end, Kind.COMM, "all_reduce", stream="nccl") for start, end in comm]
    kernels = Timeline.from_spans(spans, (0.0, step.step_ms or 0.0), rank=0, step=0, source="kineto")
    assert step.collectives is not None
    errors = [
        CallError(place, start - (call.start_ms or 0.0), end - (call.end_ms or 0.0))
        for place, (call, (start, end)) in enumerate(zip(step.collectives, comm, strict=True))
    ]
    return TracedStep(step, kernels, errors)


def corrected(window: list[TracedStep], step: StepRecord) -> dict[str, float]:
    calibration = calibrate(window)
    assert calibration is not None
    result = Calibrator(calibration).apply(step)
    assert result is not None
    return msgspec.structs.asdict(result)


def test_a_delay_of_the_kernel_is_taken_off_once_and_not_in_proportion():
    # The kernel begins 1 ms after its mark. Elsewhere the call takes 8 ms instead of 4: still 1 ms.
    window = [traced(record([(10, "queued")], [(2, 6, "stream")]), [(0, 10)], [(3, 6)])]
    other = corrected(window, record([(10, "queued")], [(1, 9, "stream")]))
    assert other == pytest.approx(
        {"comm_ms": 7, "compute_ms": 10, "hidden_ms": 7, "exposed_ms": 0, "idle_ms": 0}
    )


def test_calls_that_began_after_different_things_have_delays_of_their_own():
    window = [
        traced(record([(10, "queued")], [(2, 6, "stream")]), [(0, 10)], [(3, 6)]),
        traced(record([(10, "queued")], [(2, 6, "launch")]), [(0, 10)], [(2.25, 6)]),
    ]
    assert corrected(window, record([(10, "queued")], [(2, 6, "launch")]))["comm_ms"] == pytest.approx(3.75)
    assert corrected(window, record([(10, "queued")], [(2, 6, "stream")]))["comm_ms"] == pytest.approx(3)


def test_gaps_between_queued_kernels_are_a_share_of_the_time():
    window = [traced(record([(10, "queued")], [(0, 2, "stream")]), [(0, 4), (5, 10)], [(0, 2)])]
    assert corrected(window, record([(20, "queued")], [(0, 2, "stream")]))["compute_ms"] == pytest.approx(18)


@pytest.mark.parametrize(("length_ms", "kernels_ms"), [(5, 4.75), (10, 9.5), (12, 9.5), (16, 9.5)])
def test_stretches_are_taken_like_those_of_their_length(length_ms, kernels_ms):
    # One rank has work all along; its peer waits for its host somewhere within the same stretch.
    window = [traced(record([(10, "queued")], [(0, 1, "stream")]), [(0.5, 10)], [(0, 1)]) for _ in range(4)]
    window += [
        traced(record([(late, "queued")], [(0, 1, "stream")]), [(0.5, 4), (late - 6, late)], [(0, 1)])
        for late in (14, 16, 18, 20)
    ]
    other = corrected(window, record([(length_ms, "queued")], [(0, 1, "stream")]))
    assert other["compute_ms"] == pytest.approx(kernels_ms)


def test_one_odd_stretch_of_a_length_does_not_count():
    window = [traced(record([(10, "queued")], [(0, 1, "stream")]), [(0.5, 10)], [(0, 1)]) for _ in range(5)]
    window += [traced(record([(10, "queued")], [(0, 1, "stream")]), [(8, 10)], [(0, 1)])]
    other = corrected(window, record([(10, "queued")], [(0, 1, "stream")]))
    assert other["compute_ms"] == pytest.approx(9.5)


def test_a_stream_that_runs_dry_runs_the_same_kernels_however_late_the_host_is():
    segments: list[tuple[float, SegmentState]] = [(4, "queued"), (10, "starved")]
    window = [traced(record(segments, [(4, 5, "launch")]), [(0, 4), (6, 8)], [(4, 5)])]
    late = corrected(window, record([(4, "queued"), (30, "starved")], [(4, 5, "launch")]))
    assert late["compute_ms"] == pytest.approx(4 + 2)
    assert late["idle_ms"] == pytest.approx(30 - 6 - 1)


def test_what_is_hidden_in_a_dry_stream_depends_on_what_the_call_began_after():
    # Launched late: the queue is empty, nothing runs beside it. Queued in time: kernels run all along.
    calls: list[Call] = [(1, 2, "stream"), (5, 6, "launch")]
    window = [traced(record([(10, "starved")], calls), [(0, 3), (7, 9)], [(1, 2), (5, 6)])]
    hidden = corrected(window, record([(10, "starved")], [(1, 2, "launch"), (5, 6, "launch")]))["hidden_ms"]
    assert hidden == pytest.approx(0)
    assert corrected(window, record([(10, "starved")], calls))["hidden_ms"] == pytest.approx(1)


def test_communication_beside_a_stalled_stream_is_exposed():
    segments: list[tuple[float, SegmentState]] = [(4, "queued"), (8, "stalled"), (10, "queued")]
    window = [traced(record(segments, [(2, 8, "stream")]), [(0, 4), (8, 10)], [(2, 8)])]
    result = corrected(window, record(segments, [(2, 8, "stream")]))
    assert (result["hidden_ms"], result["exposed_ms"]) == pytest.approx((2, 4))


def test_a_step_in_a_state_that_the_window_did_not_show_is_left_as_it_is():
    calibration = calibrate([traced(record([(10, "queued")], [(2, 6, "stream")]), [(0, 10)], [(3, 6)])])
    assert calibration is not None
    dry = record([(4, "queued"), (30, "starved"), (34, "queued")], [(2, 6, "stream")])
    assert Calibrator(calibration).apply(dry) is None


def test_places_do_not_count_in_a_step_of_another_shape():
    window = [
        traced(record([(10, "queued")], [(2, 4, "stream"), (6, 8, "stream")]), [(0, 10)], [(2, 4), (7, 8)])
    ]
    # One call, so neither is known to be its twin: the mean delay of this kind, half a millisecond.
    assert corrected(window, record([(10, "queued")], [(2, 6, "stream")]))["comm_ms"] == pytest.approx(3.5)


def test_the_steps_of_the_window_come_out_as_their_kernels_say():
    segments: list[tuple[float, SegmentState]] = [(3, "queued"), (5, "stalled"), (12, "starved")]
    calls: list[Call] = [(1, 5, "stream"), (6, 8, "launch")]
    step = record(segments, calls)
    result = corrected([traced(step, [(0, 3), (5, 7), (9, 10)], [(1.5, 5), (6.25, 8)])], step)
    assert result == pytest.approx(
        {
            "comm_ms": 3.5 + 1.75,
            "compute_ms": 6,
            "hidden_ms": 1.5 + 0.75,
            "exposed_ms": 2 + 1,
            "idle_ms": 3,
        }
    )


def test_delays_of_the_rank_itself_count_first():
    def of_rank(rank: int, kernel_start: float) -> TracedStep:
        step = record([(10, "queued")], [(2, 6, "stream")])
        return traced(msgspec.structs.replace(step, rank=rank), [(0, 10)], [(kernel_start, 6)])

    both = [of_rank(0, 2.5), of_rank(1, 3.0)]
    found = {
        rank: {c.start_ms for c in calibration.calls}
        for rank in (0, 1, None)
        if (calibration := calibrate(both, rank)) is not None
    }
    assert found == {0: {0.5}, 1: {1.0}, None: {0.75}}


def test_no_kernel_steps_no_calibration():
    assert calibrate([]) is None


def test_a_record_without_its_details_teaches_nothing():
    step = msgspec.structs.replace(record([(10, "queued")], []), compute_segments=None, collectives=None)
    assert calibrate([traced(msgspec.structs.replace(step, collectives=[]), [], [])]) is None
