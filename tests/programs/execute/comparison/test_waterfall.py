"""Where the time goes: models worked out by hand, rows that sum."""

import pytest

from aorta.programs.execute.comparison.waterfall import Measured, pipeline_bound_ms, waterfall
from aorta.programs.execute.critical_path import critical_path_ms
from aorta.programs.language.emit import emit_named


@pytest.mark.parametrize(
    ("order", "required_only", "took_ms"),
    [
        # Eight slices of 1 ms to gather and 1 ms to multiply. Fork and join in the loop: one after the other.
        pytest.param("factorized", False, 16.0, id="false edges"),
        pytest.param("factorized", True, 9.0, id="without them"),
        pytest.param("developed", False, 9.0, id="fork hoisted"),
        pytest.param("join_hoisted", False, 9.0, id="join hoisted"),
    ],
)
def test_the_critical_path_of_a_balanced_gather(order, required_only, took_ms):
    program = emit_named(order, num_tiles=8, num_streams=4)
    assert critical_path_ms(program, 0, 8.0, 8.0, required_only) == pytest.approx(took_ms)


def test_one_multiply_at_a_time():
    program = emit_named("both_hoisted", num_tiles=4, num_streams=4)
    # Gathers end at 1, 2, 3, 4; each multiply takes 3 and waits for the one before: 1 + 4 x 3.
    assert critical_path_ms(program, 0, 4.0, 12.0) == pytest.approx(13.0)


def test_two_streams_gate_the_third_gather():
    program = emit_named("both_hoisted", num_tiles=4, num_streams=1)
    # One worker: a gather is issued behind the multiply before it, so nothing overlaps.
    assert critical_path_ms(program, 0, 4.0, 12.0) == pytest.approx(16.0)


def test_rows_name_each_loss_and_sum_to_the_time():
    program = emit_named("factorized", num_tiles=8, num_streams=4)
    measured = Measured(
        time=19.0,
        time_host_ahead=18.5,
        comm=7.0,
        gemm=6.0,
        comm_slices=8.0,
        gemm_slices=8.0,
        comm_beside=9.0,
        gemm_beside=8.8,
        exposed_comm=1 / 8,
        exposed_gemm=1 / 8,
    )
    rows = waterfall(
        measured, lambda comm, gemm, required: critical_path_ms(program, 0, comm, gemm, required)
    )
    assert rows == pytest.approx(
        {
            "bound": 7.0,
            "fill": 6.0 / 8,
            "decomposition": 9.0 - 7.75,
            "dependency_waste": 16.0 - 9.0,
            "interference": 17.8 - 16.0,
            "scheduling_gap": 18.5 - 17.8,
            "host_gap": 0.5,
        }
    )
    assert sum(rows.values()) == pytest.approx(19.0)


def test_the_pipeline_bound_of_a_balanced_shape_leaves_an_eighth_exposed():
    assert pipeline_bound_ms(1.0, 1.0, 1 / 8, 1 / 8) == pytest.approx(1.125)


@pytest.mark.parametrize(
    ("comm", "gemm", "bound"),
    [
        pytest.param(4.0, 8.0, 9.0, id="the first slice of communication"),
        pytest.param(8.0, 4.0, 9.0, id="the last slice of the multiply"),
    ],
)
def test_one_slice_of_the_shorter_kind_stays_exposed(comm, gemm, bound):
    assert pipeline_bound_ms(comm, gemm, 1 / 4, 1 / 4) == pytest.approx(bound)


def test_a_multiply_that_begins_without_communication_exposes_none_of_it():
    assert pipeline_bound_ms(4.0, 8.0, 0.0, 1 / 4) == pytest.approx(8.0)
    assert pipeline_bound_ms(8.0, 4.0, 0.0, 1 / 4) == pytest.approx(9.0)
