"""Overlap worked out by hand, and by counting ticks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.timeline.intervals import length_ms
from aorta.timeline.overlap import (
    SEGMENT_NAMES,
    active_segments,
    named_unions,
    overlap,
    stream_uses,
    total,
    unions,
)
from aorta.timeline.types import STREAM_NAMES, Kind, Span, Timeline

OPS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]


def compute(start, end, stream="compute"):
    return Span(start, end, Kind.COMPUTE, stream=stream)


def comm(start, end, op="all_gather", stream="nccl"):
    return Span(start, end, Kind.COMM, op, stream)


def copy(start, end):
    return Span(start, end, Kind.COPY, "memcpy", "copies")


def step(*spans, window=(0.0, 10.0), source="events"):
    return Timeline.from_spans(spans, window, source=source)


@pytest.mark.parametrize(
    ("spans", "comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms"),
    [
        pytest.param([comm(0, 4), compute(0, 9)], 4, 9, 4, 0, 1, id="hidden"),
        pytest.param([comm(0, 4), compute(4, 9)], 4, 5, 0, 4, 1, id="back-to-back"),
        pytest.param([comm(0, 4), comm(0, 4)], 4, 0, 0, 4, 6, id="two-gathers-count-once"),
        pytest.param([comm(0, 4), comm(2, 6), compute(3, 10)], 6, 7, 3, 3, 0, id="concurrent-collectives"),
        pytest.param(
            [comm(2, 5, stream="compute"), compute(0, 2)], 3, 2, 0, 3, 5, id="on-the-compute-stream"
        ),
        pytest.param([compute(0, 5), compute(3, 6, "side")], 0, 6, 0, 0, 4, id="any-stream-computes"),
        pytest.param([comm(-5, 2), compute(8, 30)], 2, 2, 0, 2, 6, id="clipped-to-the-window"),
        pytest.param([copy(0, 3), compute(2, 4)], 0, 2, 0, 0, 8, id="copies-are-idle-time"),
        pytest.param([], 0, 0, 0, 0, 10, id="nothing"),
    ],
)
def test_overlap_by_hand(spans, comm_ms, compute_ms, hidden_ms, exposed_ms, idle_ms):
    result = overlap(step(*spans))
    assert result.comm_ms == pytest.approx(comm_ms)
    assert result.compute_ms == pytest.approx(compute_ms)
    assert result.hidden_ms == pytest.approx(hidden_ms)
    assert result.exposed_ms == pytest.approx(exposed_ms)
    assert result.idle_ms == pytest.approx(idle_ms)


def test_ratios_name_their_denominators():
    result = overlap(step(comm(0, 4), compute(1, 9)))
    assert result.overlap_ratio == pytest.approx(3 / 4)
    assert result.hidden_per_compute == pytest.approx(3 / 8)


def test_no_communication_has_no_ratio():
    result = overlap(step(compute(0, 4)))
    assert result.overlap_ratio is None
    assert result.hidden_per_compute == 0.0


def test_no_compute_has_no_hidden_per_compute():
    result = overlap(step(comm(0, 4)))
    assert result.overlap_ratio == 0.0
    assert result.hidden_per_compute is None


def test_concurrent_operations_each_count():
    result = overlap(step(comm(0, 4), comm(2, 6, "reduce_scatter"), compute(3, 10)))
    assert result.hidden_by_op == pytest.approx({"all_gather": 1, "reduce_scatter": 3})
    assert result.exposed_by_op == pytest.approx({"all_gather": 3, "reduce_scatter": 1})
    assert result.exposed_ms == pytest.approx(3)


def test_hidden_all_reduce_and_reduce_scatter_have_their_own_numbers():
    result = overlap(step(comm(0, 4, "all_reduce"), comm(6, 8, "reduce_scatter"), compute(3, 7)))
    assert result.compute_allreduce_ms == pytest.approx(1)
    assert result.compute_reducescatter_ms == pytest.approx(1)


def test_copies_alone_are_a_named_part_of_idle_where_they_are_seen():
    spans = [copy(0, 5), compute(1, 2), comm(4, 6)]
    assert overlap(step(*spans, source="kineto")).exposed_copy_ms == pytest.approx(3)
    assert overlap(step(*spans, source="events")).exposed_copy_ms is None
    assert overlap(step(compute(1, 2), source="kineto")).exposed_copy_ms == 0.0


def test_total_counts_kernels_only_where_they_are_seen():
    spans = [compute(0, 3), comm(1, 5), copy(8, 9)]
    seen = total(step(*spans, source="kineto"))
    assert (seen.num_kernels, seen.num_collectives) == (2, 1)
    assert (seen.span_ms, seen.idle_ms) == (10, 5)
    assert total(step(*spans)).num_kernels is None


def test_aux_holds_other_collectives_and_copies():
    uses = stream_uses(step(comm(0, 2, "broadcast"), copy(1, 4), compute(0, 5)))
    assert tuple(uses) == STREAM_NAMES
    assert uses["aux"].busy_ms == pytest.approx(4)
    assert uses["compute"].utilization == pytest.approx(0.5)
    assert uses["allreduce"].busy_ms == 0.0


def test_segments_by_hand():
    result = active_segments(step(compute(0, 3), comm(2, 5), comm(7, 8, "all_reduce")))
    assert [(s.start_ms, s.end_ms, s.active_streams, s.concurrency) for s in result] == [
        (0, 2, ["compute"], 1),
        (2, 3, ["compute", "allgather"], 2),
        (3, 5, ["allgather"], 1),
        (7, 8, ["allreduce"], 1),
    ]


def test_nothing_active_has_no_segments():
    assert active_segments(step()) == []


@st.composite
def timelines(draw):
    time = st.integers(-3, 33)
    rows = draw(
        st.lists(
            st.tuples(time, time, st.sampled_from(Kind), st.sampled_from(OPS), st.sampled_from("abc")),
            max_size=14,
        )
    )
    spans = [Span(min(s, e), max(s, e), kind, op, stream) for s, e, kind, op, stream in rows]
    return Timeline.from_spans(spans, (0.0, 30.0), source="kineto", compute_streams=("a",))


def ticks(timeline, kind):
    return {
        tick
        for start, end, k in zip(timeline.start_ms, timeline.end_ms, timeline.kind, strict=True)
        if k == kind
        for tick in range(int(start), int(end))
        if 0 <= tick < 30
    }


@pytest.mark.heavy
@given(timelines())
def test_overlap_equals_the_count_of_ticks(timeline):
    comm, compute, copies = (ticks(timeline, k) for k in (Kind.COMM, Kind.COMPUTE, Kind.COPY))
    result = overlap(timeline)
    assert result.comm_ms == len(comm)
    assert result.compute_ms == len(compute)
    assert result.hidden_ms == len(comm & compute)
    assert result.exposed_ms == len(comm - compute)
    assert result.idle_ms == 30 - len(comm | compute)
    assert result.exposed_copy_ms == len(copies - comm - compute)


@pytest.mark.heavy
@given(timelines(), st.floats(0.001, 7))
def test_the_parts_add_up(timeline, scale):
    scaled = Timeline.from_spans(
        [
            Span(s * scale, e * scale, Kind(k), timeline.ops[o])
            for s, e, k, o in zip(timeline.start_ms, timeline.end_ms, timeline.kind, timeline.op, strict=True)
        ],
        (0.0, 30 * scale),
    )
    for result in (overlap(scaled), total(scaled)):
        assert result.comm_ms == pytest.approx(result.hidden_ms + result.exposed_ms, abs=1e-9)
        assert scaled.span_ms == pytest.approx(
            result.compute_ms + result.exposed_ms + result.idle_ms, abs=1e-9
        )


@pytest.mark.heavy
@given(timelines())
def test_segments_rebuild_every_union(timeline):
    before, after = named_unions(timeline), unions(active_segments(timeline))
    assert set(after) == set(SEGMENT_NAMES)
    for name in SEGMENT_NAMES:
        assert after[name].tolist() == before[name].tolist()
        assert length_ms(after[name]) == length_ms(before[name])


@pytest.mark.heavy
@given(timelines())
def test_neighbouring_segments_differ(timeline):
    segments = active_segments(timeline)
    for a, b in zip(segments, segments[1:], strict=False):
        assert a.end_ms <= b.start_ms
        assert a.end_ms < b.start_ms or a.active_streams != b.active_streams


@pytest.mark.heavy
@given(timelines(), st.integers(0, 30), st.integers(0, 30))
def test_two_windows_that_meet_add_up_to_the_whole(timeline, a, b):
    lo, hi = min(a, b), max(a, b)
    parts = [overlap(timeline.clipped(*window)) for window in ((0, lo), (lo, hi), (hi, 30))]
    whole = overlap(timeline)
    for name in ("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms", "exposed_copy_ms"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
