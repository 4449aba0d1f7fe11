from functools import cache

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aorta.errors import ProjectionError
from aorta.hardware.names import hardware_names
from aorta.hardware.part import Hardware, load_hardware, sustained_flops
from aorta.projection.gemm import GemmSize, TileGemm, power_flops

GPUS = st.sampled_from(hardware_names())
DIMS = st.integers(min_value=1, max_value=40_000)
ROUNDING = 1 + 1e-9


@cache
def tile_model(gpu: str) -> TileGemm:
    return TileGemm(load_hardware(gpu))


def with_memory(gpu: Hardware, factor: float) -> Hardware:
    memory = msgspec.structs.replace(
        gpu.memory,
        hbm_bytes_per_s=gpu.memory.hbm_bytes_per_s * factor,
        sustained_hbm_bytes_per_s=gpu.memory.sustained_hbm_bytes_per_s * factor,
        l2_bytes_per_s=gpu.memory.l2_bytes_per_s * factor,
    )
    return msgspec.structs.replace(gpu, memory=memory)


@pytest.mark.heavy
@given(GPUS, DIMS, DIMS, DIMS, st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(gpu, m, n, k, factor):
    faster = TileGemm(with_memory(load_hardware(gpu), factor))
    before = tile_model(gpu).simulate(m, n, k, "bf16").time_s
    assert faster.simulate(m, n, k, "bf16").time_s <= before * ROUNDING


@pytest.mark.heavy
@given(GPUS, st.tuples(DIMS, DIMS, DIMS), st.sampled_from([0, 1, 2]), st.integers(1, 9000))
def test_a_larger_problem_is_never_faster(gpu, size, axis, more):
    """Exactly, not up to quantisation: a candidate's tiles, waves and bytes grow with each dimension, and
    the fastest of growing candidates grows."""
    larger = list(size)
    larger[axis] += more
    simulate = tile_model(gpu).simulate
    assert simulate(*size, "bf16").time_s <= simulate(*larger, "bf16").time_s * ROUNDING


@pytest.mark.heavy
@given(GPUS, DIMS, DIMS, DIMS)
def test_fp8_is_between_its_memory_floor_and_bf16(gpu, m, n, k):
    size = GemmSize(m, n, k, "fp8")
    assume("fp8" in load_hardware(gpu).compute.peak_flops)  # not on Ampere
    fp8 = tile_model(gpu).simulate(m, n, k, "fp8").time_s
    floor_s = (size.bytes_read + size.bytes_written) / load_hardware(gpu).memory.hbm_bytes_per_s
    assert floor_s <= fp8 <= tile_model(gpu).simulate(m, n, k, "bf16").time_s * ROUNDING


@pytest.mark.heavy
@given(GPUS, DIMS, DIMS, DIMS, st.sampled_from(["bf16", "fp8", "fp16"]))
def test_no_tile_beats_the_data_sheet(gpu, m, n, k, dtype):
    compute = load_hardware(gpu).compute
    assume(dtype in compute.peak_flops)
    flops = 2.0 * m * n * k / tile_model(gpu).simulate(m, n, k, dtype).time_s
    assert flops <= compute.peak_flops[dtype] * compute.boost_clock_hz / compute.clock_hz


@pytest.mark.parametrize(
    ("gpu", "dtype"),
    [
        (name, dtype)
        for name in hardware_names()
        for dtype in ("bf16", "fp8")
        if dtype in load_hardware(name).compute.peak_flops
    ],
)
def test_large_gemms_end_near_the_sustained_rate(gpu, dtype):
    done = tile_model(gpu).simulate(16384, 16384, 16384, dtype)
    assert 2 * 16384**3 / done.time_s == pytest.approx(sustained_flops(load_hardware(gpu), dtype), rel=0.08)
    assert done.bound == "compute"


def test_fp8_is_not_priced_as_bf16():
    tile = tile_model("mi300x")
    ratio = tile.simulate(8192, 8192, 8192, "bf16").time_s / tile.simulate(8192, 8192, 8192, "fp8").time_s
    assert ratio == pytest.approx(1273 / 708, rel=0.05)


def test_published_gemm_of_mi300x():
    """8192^3 bf16 measured at 724 (node smoke) and 765 TFLOP/s (preflight): Primus documents, 2026."""
    done = tile_model("mi300x").simulate(8192, 8192, 8192, "bf16")
    assert 2 * 8192**3 / done.time_s == pytest.approx(744e12, rel=0.08)


def test_a_tile_too_many_costs_a_wave():
    """132 tiles of 128 x 256 are one wave on 132 SMs; one more row of tiles starts another."""
    tile = tile_model("h200")
    one = tile.simulate(128 * 12, 256 * 11, 4096, "bf16")
    more = tile.simulate(128 * 13, 256 * 11, 4096, "bf16")
    assert more.time_s > one.time_s * 1.15


def test_a_short_result_splits_k():
    """Unsplit, at most 16 of the SMs had a tile."""
    of_one = load_hardware("h200").compute.peak_flops["bf16"] / load_hardware("h200").compute.num_cus
    time_s = tile_model("h200").simulate(256, 256, 65536, "bf16").time_s
    assert time_s < 2 * 256 * 256 * 65536 / (16 * of_one)


def test_small_m_reads_the_weight():
    """m = 16 against an 8192 x 28672 weight: the weight's bytes at the HBM rate, and little more."""
    done = tile_model("h200").simulate(16, 28672, 8192, "bf16")
    assert done.bound == "memory"
    assert done.time_s == pytest.approx(28672 * 8192 * 2 / 4.1e12, rel=0.06)


def test_warm_operands_are_faster():
    gpu = load_hardware("h200")
    assert TileGemm(gpu, warm=True).simulate(64, 4096, 4096, "bf16").time_s < (
        TileGemm(gpu).simulate(64, 4096, 4096, "bf16").time_s
    )


def test_a_batch_is_one_launch():
    tile = tile_model("h200")
    assert tile.simulate(256, 512, 512, "bf16", batch=64).time_s < (
        64 * tile.simulate(256, 512, 512, "bf16").time_s
    )


def test_the_power_limit_closes_the_gap_to_the_sustained_rate():
    gpu = load_hardware("h200")
    knee, issue = gpu.efficiency.gemm.power_knee, gpu.efficiency.gemm.issue
    boost = 989.4e12 * 1.98 / 1.83 * issue
    joined = (boost**-knee + power_flops(gpu, "bf16") ** -knee) ** (-1 / knee)
    assert joined == pytest.approx(700e12)


def test_the_interval_of_a_derived_rate_is_wider():
    measured = tile_model("h200").simulate(4096, 4096, 4096, "bf16")
    derived = tile_model("h100").simulate(4096, 4096, 4096, "bf16")
    assert derived.high_s / derived.time_s > measured.high_s / measured.time_s
    assert derived.low_s / derived.time_s < measured.low_s / measured.time_s


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((0, 1, 1, "bf16"), "m of at least 1", id="empty"),
        pytest.param((1, 1, 1, "bf61"), "did you mean 'bf16'", id="dtype"),
        pytest.param((1, 1, 1, "bf16", "TT"), "layout 'TT'", id="layout"),
        pytest.param((1, 1, 1, "fp4"), "no matrix rate for 'fp4'", id="not-on-this-gpu"),
    ],
)
def test_what_cannot_be_priced_is_refused(arguments, message):
    with pytest.raises(ProjectionError, match=message):
        tile_model("h200").simulate(*arguments)
