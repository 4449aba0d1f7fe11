"""Events of the collective library, joined to the calls of steps. Times are worked out by hand."""

import numpy as np
import pytest

from aorta.records.schema import StepRecord
from aorta.steps.clocks import WINDOW_NS, DeviceTimer
from aorta.steps.event_steps import ExactCalls
from aorta.steps.process import StepQueue
from aorta.steps.raw import EVENT_DTYPE, CollectiveChunk, Flag, TimedBy
from tests.steps.kernel_rows import GATHER, MS, ORIGIN_NS, REDUCE, SETTINGS, call, chunk, kernel, mark, step
from tests.steps.raw_steps import Made

NAMES = ["", "AllGather", "ReduceScatter", "Send", "Recv", "RING", "NVLS", "LL", "SIMPLE", "ncclBfloat16"]
TIMER_NS = 1_764_000_000 * 10**9
"""What the device's timer shows at time 0 of these tests: Unix time, about."""
SEEN_LATE_NS = 1500


def event(func: str, start_ms: float, end_ms: float, plan: int, **fields) -> dict:
    start, end = (TIMER_NS + round(ms * MS) for ms in (start_ms, end_ms))
    return {
        "start": start,
        "end": end,
        "last_start": start,
        "first_end": end,
        "start_seen_ns": ORIGIN_NS + round(start_ms * MS) + SEEN_LATE_NS,
        "end_seen_ns": ORIGIN_NS + round(end_ms * MS) + SEEN_LATE_NS,
        "launched_ns": ORIGIN_NS + 1000 * plan,
        "communicator": 0xC0,
        "num_ranks": 2,
        "plan": plan,
        "sequence": plan,
        "peer": -1,
        "func": NAMES.index(func),
        "algorithm": NAMES.index("RING"),
        "protocol": NAMES.index("LL"),
        "num_channels": 4,
        "num_started": 4,
        "num_stopped": 4,
        "timed_by": TimedBy.DEVICE,
    } | fields


def events(*rows: dict, complete_ms: float = 1e6, num_lost: int = 0) -> CollectiveChunk:
    table = np.zeros(len(rows), EVENT_DTYPE)
    for i, values in enumerate(rows):
        table["number"][i] = i + 1
        for name, value in values.items():
            table[name][i] = value
    return CollectiveChunk(table.tobytes(), NAMES, ORIGIN_NS + round(complete_ms * MS), num_lost)


KERNELS = [
    mark(1, 0.0, 10),
    kernel(GATHER, 1.0, 5.0, 11),
    kernel(REDUCE, 7.0, 9.0, 16),
    mark(2, 9.0, 17),
    mark(3, 10.0, 18),
]
CALLS = [call("all_gather"), call("reduce_scatter", 1)]


def resolved(raw, *chunks: CollectiveChunk) -> tuple[StepRecord, StepQueue]:
    queue = StepQueue(SETTINGS)
    list(queue.add_kernels(chunk(KERNELS)))
    for one in chunks:
        list(queue.add_collectives(one))
    ((record, _),) = queue.put(raw, False)
    return record, queue


def test_calls_have_what_the_library_says_beside_their_kernels_times():
    gather = event("AllGather", 1.002, 4.999, 1)
    scatter = event("ReduceScatter", 7.001, 8.998, 2, algorithm=NAMES.index("NVLS"), num_channels=1)
    record, queue = resolved(step(CALLS, by_library=True), events(gather, scatter))

    first, second = record.collectives
    assert (first.start_ms, first.end_ms) == pytest.approx((1.0, 5.0))
    assert (first.library.algorithm, first.library.protocol, first.library.num_channels) == ("RING", "LL", 4)
    assert first.library.start_ms == pytest.approx(1.002 + 0.0015, abs=1e-5)  # seen 1.5 us late at best
    assert first.library.end_ms == pytest.approx(4.999 + 0.0015, abs=1e-5)
    assert (second.library.algorithm, second.library.communicator) == ("NVLS", "c0")
    coverage = queue.library_coverage()
    assert (coverage.num_matched, coverage.num_timed, coverage.num_calls_without_events) == (2, 2, 0)
    assert (coverage.tick_ns, coverage.leftovers) == (1, [])


def test_a_step_waits_for_the_events_of_its_launches():
    queue = StepQueue(SETTINGS)
    list(queue.add_kernels(chunk(KERNELS)))
    assert list(queue.put(step(CALLS, by_library=True), False)) == []
    assert list(queue.add_collectives(events(complete_ms=0.5))) == []
    assert len(list(queue.add_collectives(events(complete_ms=1.5)))) == 1


def test_a_step_without_the_librarys_events_waits_for_none():
    record, queue = resolved(step(CALLS))
    assert [c.library for c in record.collectives] == [None, None]
    assert queue.library_coverage() is None


def test_sends_of_one_launch_are_one_call():
    pair = [event(f, 1.0 + i, 2.0 + i, 1, peer=1 - i) for i, f in enumerate(("Send", "Recv"))]
    raw = step([call("all_to_all"), call("reduce_scatter", 1)], by_library=True)
    record, _ = resolved(raw, events(*pair, event("ReduceScatter", 7.0, 9.0, 2)))
    both = record.collectives[0].library
    assert both.num_events == 2
    assert both.start_ms == pytest.approx(1.0, abs=0.01)  # the first start
    assert both.end_ms is None  # NCCL's is when the first of the two was done


def test_what_has_no_partner_is_left_over_on_both_sides_and_counted():
    record, queue = resolved(
        step(CALLS, by_library=True), events(event("ReduceScatter", 1, 2, 1), event("Send", 3, 4, 2))
    )
    assert [c.library is None for c in record.collectives] == [True, False]
    coverage = queue.library_coverage()
    assert (coverage.num_matched, coverage.num_calls_without_events, coverage.num_plans_without_call) == (
        1,
        1,
        1,
    )
    assert coverage.leftovers == [
        "step 0: all_gather #0 of group default: no events",
        "step 0: 1 launches of the library: no call",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"num_ranks": 4}, id="of-another-size"),
        pytest.param({"communicator": 0xD0}, id="of-two-groups"),
    ],
)
def test_a_communicator_belongs_to_one_group(wrong):
    groups = [type(g)(key, key, [0, 1]) for key, g in zip("ab", step([]).groups, strict=False)]
    calls = [call("all_gather", group=0), call("reduce_scatter", 1, group=1)]
    first = event("AllGather", 1, 5, 1, communicator=0xD0)
    second = event("ReduceScatter", 7, 9, 2, **{"communicator": 0xE0} | wrong)
    record, queue = resolved(step(calls, groups=groups, by_library=True), events(first, second))
    assert [c.library is None for c in record.collectives] == [False, True]
    assert queue.library_coverage().num_plans_without_call == 1


@pytest.mark.parametrize(
    "lacking",
    [
        pytest.param({"num_stopped": 3}, id="a-channel-without-end"),
        pytest.param({"last_start": TIMER_NS + 6 * MS}, id="a-channel-of-another-launch"),
        pytest.param(
            {"num_channels": 1, "num_stopped": 1, "flags": Flag.AFTER_ONE_TO_ITSELF},
            id="one-channel-after-one-to-itself",
        ),
        pytest.param({"launched_ns": ORIGIN_NS + 3 * MS}, id="before-its-launch"),
        pytest.param({"timed_by": TimedBy.NOTHING, "num_stopped": 0, "start": 0, "end": 0}, id="no-times"),
    ],
)
def test_without_all_ends_there_are_no_times_and_the_rest_is_told(lacking):
    rows = [event("AllGather", 1, 5, 1, **lacking), event("ReduceScatter", 7, 9, 2)]
    raw = step(CALLS, by_library=True, window_end_ns=ORIGIN_NS + 10 * MS)
    record, queue = resolved(raw, events(*rows))
    library = next(call.library for call in record.collectives if call.op == "all_gather")
    assert (library.start_ms, library.end_ms, library.algorithm) == (None, None, "RING")
    assert queue.library_coverage().num_timed == 1


def test_times_of_the_hosts_clock_are_taken_as_they_are():
    rows = [
        event(func, 0, 0, plan, timed_by=TimedBy.HOST, start=ORIGIN_NS + a * MS, end=ORIGIN_NS + b * MS)
        for func, a, b, plan in (("AllGather", 1, 5, 1), ("ReduceScatter", 7, 9, 2))
    ]
    record, _ = resolved(step(CALLS, by_library=True), events(*rows))
    assert (record.collectives[0].library.start_ms, record.collectives[0].library.end_ms) == (1.0, 5.0)


# -- lines of events ---------------------------------------------------------------------------------


def test_lines_of_events_take_start_and_end_of_collectives_from_the_library():
    made = Made(body_ms=10, window_ms=12, window_end_queued=12.0)
    # The stream reaches the call at 1 and its end mark passes at 6.002; the kernel ran from 3 to 6.
    made.call("all_gather", 1, 6.002, launched=0.1)
    made.call("reduce_scatter", 7, 9.002, launched=0.2)
    raw = _by_library(made)
    gather, scatter = event("AllGather", 3, 6, 1), event("ReduceScatter", 7.5, 9, 2)
    for row, launched_ms in ((gather, 0.1), (scatter, 0.2)):
        row["launched_ns"] = round(launched_ms * MS)
    queue = StepQueue(SETTINGS)
    list(queue.add_collectives(events(gather, scatter)))
    ((record, _),) = queue.put(raw, False)

    assert record.source == "events"
    first, second = record.collectives
    assert (first.start_ms, first.end_ms) == pytest.approx((3.002, 6.002), abs=1e-4)
    assert (second.start_ms, second.end_ms) == pytest.approx((7.502, 9.002), abs=1e-4)
    assert first.start_by == second.start_by == "library"
    assert record.overlap.comm_ms == pytest.approx(3.0 + 1.5, abs=1e-3)
    assert (first.library.start_ms, first.library.end_ms) == (first.start_ms, first.end_ms)


def _by_library(made: Made):
    raw = made.raw()
    return type(raw)(**{name: getattr(raw, name) for name in raw.__struct_fields__} | {"by_library": True})


def test_times_of_other_launches_move_no_others_and_their_calls_keep_their_marks():
    exact = ExactCalls()
    marks = [(10.0 * i, 10.0 * i + 5.002) for i in range(8)]
    spans = [(TIMER_NS + round(10 * i * MS) + MS, TIMER_NS + round((10 * i + 5) * MS)) for i in range(8)]
    spans[2], spans[5] = spans[7], spans[1]  # one too late, one too early
    times = exact.run_ms(spans, marks)
    assert [at is None for at in times] == [i in (2, 5) for i in range(8)]
    assert times[0] == pytest.approx((1.002, 5.002), abs=1e-6)


def test_times_that_agree_with_no_marks_are_not_used():
    spans = [(TIMER_NS + i**3 * 10 * MS, TIMER_NS + (i**3 * 10 + 5) * MS) for i in range(2, 10)]
    assert ExactCalls().run_ms(spans, [(10.0 * i, 10.0 * i + 5) for i in range(8)]) == [None] * 8


def test_times_outside_of_their_own_kernel_are_left_out_and_counted():
    late = event("AllGather", 5.5, 6.5, 1)  # its kernel ran from 1 to 5
    record, queue = resolved(step(CALLS, by_library=True), events(late, event("ReduceScatter", 7, 9, 2)))
    assert record.collectives[0].library.start_ms is None
    assert record.collectives[1].library.start_ms is not None
    coverage = queue.library_coverage()
    assert (coverage.num_timed, coverage.num_contradicted) == (1, 1)


# -- the timer ---------------------------------------------------------------------------------------


def readings(device_ns: np.ndarray, drift: float, tick_ns: int = 1, late_ns: float = 0.0) -> tuple:
    ticks = (TIMER_NS + device_ns) // tick_ns
    seen = ORIGIN_NS + device_ns * (1 + drift) + late_ns
    return ticks.astype(np.uint64), np.round(seen).astype(np.int64)


@pytest.mark.parametrize("tick_ns", [1, 10])
def test_a_timer_that_drifts_is_followed(tick_ns):
    timer, random = DeviceTimer(), np.random.default_rng(0)
    device_ns = np.arange(0, 20 * WINDOW_NS, WINDOW_NS // 50, dtype=np.int64)
    late_ns = random.exponential(5000.0, len(device_ns))
    timer.add(*readings(device_ns, 20e-6, tick_ns, late_ns))
    assert timer.unit_ns == tick_ns
    ticks, truth = readings(device_ns, 20e-6, tick_ns)
    error_ns = timer.monotonic_ns(ticks) - truth
    # 20 ppm over these five seconds are 100 us; what is left is how late the least late readings were.
    assert np.abs(error_ns).max() < 2000


def test_a_timer_of_unknown_rate_converts_nothing():
    timer = DeviceTimer()
    device_ns = np.arange(0, 10 * MS, MS, dtype=np.int64)
    timer.add(*readings(device_ns, 0.0, 3))
    assert timer.unit_ns is None
    assert timer.monotonic_ns(np.array([TIMER_NS], np.uint64)) is None


def test_the_rate_is_asked_for_again_until_it_is_known():
    timer = DeviceTimer()
    for start in range(0, 10):
        timer.add(*readings(np.array([start * MS // 4], dtype=np.int64), 0.0))
        assert (timer.unit_ns is None) == (start < 4)


def test_a_few_readings_of_other_launches_do_not_hide_the_rate():
    timer = DeviceTimer()
    device_ns = np.arange(0, 40 * MS, MS, dtype=np.int64)
    ticks, seen_ns = readings(device_ns, 0.0)
    ticks[[3, 20, 38]] -= np.uint64(5 * 10**9)
    timer.add(ticks, seen_ns)
    assert timer.unit_ns == 1


def test_readings_before_the_first_are_converted_too():
    timer = DeviceTimer()
    timer.add(*readings(np.array([5 * MS, 0, 9 * MS], dtype=np.int64), 0.0))
    ticks, truth = readings(np.array([-MS, 2 * MS], dtype=np.int64), 0.0)
    assert timer.monotonic_ns(ticks).tolist() == truth.tolist()
