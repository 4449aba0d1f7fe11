import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from aorta.errors import ConfigError
from aorta.projection.pipeline import Chunk, duration_s, in_flight, simulate
from aorta.projection.plan import split_layers

seconds = st.floats(0.1, 10)


def closed_form_s(schedule, num_ranks, num_micro_batches, stage, num_chunks=1):
    """Equal stages, transfers that take no time. stage: all chunks of one rank.

    Sources: Narayanan et al. 2021 (1F1B, interleaved); Qi et al., Zero Bubble Pipeline Parallelism, 2023
    (ZB-H1, for weight_s no longer than forward_s and backward_s).
    """
    if schedule == "zero-bubble":
        bubble = stage.forward_s + stage.backward_s - stage.weight_s
        return num_micro_batches * stage.total_s + (num_ranks - 1) * bubble
    return (num_micro_batches + (num_ranks - 1) / num_chunks) * stage.total_s


@given(p=st.integers(1, 6), m=st.integers(1, 14), f=seconds, b=seconds)
def test_1f1b_is_its_closed_form(p, m, f, b):
    stage = Chunk(f, b)
    assert duration_s([[stage]] * p, m) == pytest.approx(closed_form_s("1f1b", p, m, stage))


@pytest.mark.heavy
@given(p=st.integers(2, 5), rounds=st.integers(1, 4), v=st.integers(2, 4), f=seconds, b=seconds)
def test_interleaved_is_its_closed_form(p, rounds, v, f, b):
    stage = Chunk(f * v, b * v)
    found = duration_s([[Chunk(f, b)] * v] * p, rounds * p)
    assert found == pytest.approx(closed_form_s("interleaved", p, rounds * p, stage, v))


@pytest.mark.heavy
@given(p=st.integers(2, 6), extra=st.integers(0, 8), f=seconds)
def test_zero_bubble_is_its_closed_form_when_all_parts_are_equal(p, extra, f):
    stage = Chunk(f, f, f)
    m = 2 * p + extra
    found = duration_s([[stage]] * p, m, zero_bubble=True)
    assert found == pytest.approx(closed_form_s("zero-bubble", p, m, stage))


@pytest.mark.heavy
@given(p=st.integers(2, 5), m=st.integers(2, 12), f=seconds, b=seconds, w=seconds)
@example(p=2, m=12, f=2.358140385948348, b=4.0, w=3.0271193996402626)  # its period is longer than a round
def test_zero_bubble_is_between_the_work_and_1f1b(p, m, f, b, w):
    found = duration_s([[Chunk(f, b, w)]] * p, m, zero_bubble=True)
    assert found >= m * (f + b + w) - 1e-9
    assert found <= closed_form_s("1f1b", p, m, Chunk(f, b, w)) + 1e-9


@pytest.mark.heavy
@given(st.integers(2, 4), st.integers(1, 3), st.integers(6, 10), st.data())
def test_long_uneven_schedule_is_extrapolated_within_a_percent(p, v, rounds, data):
    part = st.floats(0.8, 1.6)
    chunks = [[Chunk(data.draw(part), 2 * data.draw(part)) for _ in range(v)] for _ in range(p)]
    full = max(slot.end_s for slot in simulate(chunks, rounds * p, 0.05))
    assert duration_s(chunks, rounds * p, 0.05) == pytest.approx(full, rel=0.015)


def test_long_schedule_is_extrapolated():
    chunks = [[Chunk(1.0, 2.1), Chunk(1.2, 2.0)], [Chunk(0.9, 2.2), Chunk(1.4, 2.6)]]
    full = max(slot.end_s for slot in simulate(chunks, 64, 0.05))
    assert duration_s(chunks, 64, 0.05) == pytest.approx(full)


def test_transfers_are_not_free():
    chunks = [[Chunk(1.0, 2.0)]] * 4
    assert duration_s(chunks, 8, p2p_s=0.1) > duration_s(chunks, 8) + 2 * 3 * 0.1 - 1e-9


def test_slowest_stage_sets_the_pace():
    chunks = [[Chunk(1.0, 2.0)], [Chunk(2.0, 4.0)], [Chunk(1.0, 2.0)]]
    assert duration_s(chunks, 41) - duration_s(chunks, 40) == pytest.approx(6.0)


def test_a_rank_runs_one_thing_at_a_time():
    slots = simulate([[Chunk(1, 2)] * 2] * 3, 6, 0.01)
    for rank in range(3):
        mine = sorted((s for s in slots if s.rank == rank), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(mine, mine[1:], strict=False))
        assert len(mine) == 2 * 2 * 6


@pytest.mark.parametrize(
    ("rank", "chunks", "expected"),
    [
        pytest.param(0, 1, 4, id="first-rank-keeps-one-per-rank"),
        pytest.param(3, 1, 1, id="last-rank-keeps-one"),
        pytest.param(0, 2, 5.5, id="interleaved-keeps-more"),  # (2*3 + 4 + 1) chunks of half a rank
    ],
)
def test_in_flight_micro_batches(rank, chunks, expected):
    assert in_flight(rank, 4, chunks, 100) == expected


def test_layers_are_spread():
    assert split_layers(32, 4) == [8, 8, 8, 8]
    assert split_layers(61, 4) == [16, 15, 15, 15]
    assert split_layers(126, 64, ends=2) == [1, *([2] * 62), 1]
    assert split_layers(61, 4, first=14, last=15) == [14, 16, 16, 15]
    assert split_layers(61, 32, first=1, last=0) == [1, *([2] * 30), 0]
    assert split_layers(32, 2, first=14, last=18) == [14, 18]


@pytest.mark.heavy
@given(
    st.integers(1, 64), st.integers(2, 16), st.none() | st.integers(-2, 70), st.none() | st.integers(-2, 70)
)
def test_a_split_holds_every_layer_once_or_is_refused(num_layers, num_stages, first, last):
    assume(num_stages <= num_layers + 2)
    try:
        counts = split_layers(num_layers, num_stages, first, last, ends=2)
    except ConfigError:
        assert first is not None or last is not None
        return
    assert sum(counts) == num_layers
    assert min(counts) >= 0
    assert 0 not in counts[1:-1]
    assert first in (None, counts[0])
    assert last in (None, counts[-1])
