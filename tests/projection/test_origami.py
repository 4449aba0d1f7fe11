"""Against the real package; scripts/install_origami.sh builds it without a GPU."""

import pytest

from aorta.errors import ProjectionError
from aorta.hardware import load_hardware
from aorta.projection.prices import get_gemm_simulation_backend, get_sdpa_simulation_backend
from aorta.projection.sdpa import AttentionSize

pytest.importorskip("origami", reason="needs the package rocm-origami (scripts/install_origami.sh)")


def gemm(gpu, *size, **more):
    return get_gemm_simulation_backend("origami", load_hardware(gpu)).simulate(*size, **more)


def test_cycles_of_a_large_gemm_are_those_known_of_origami():
    """8192 cubed at the nameplate clock: 968 TFLOP/s on gfx942, as the package says when asked by hand."""
    done = gemm("mi300x", 8192, 8192, 8192, "bf16")
    assert 2 * 8192**3 / done.details["cycles"] * 2.1e9 == pytest.approx(968e12, rel=0.03)


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x", "mi350x", "mi355x"])
def test_fp8_is_not_bf16(gpu):
    bf16 = gemm(gpu, 8192, 8192, 8192, "bf16").time_s
    fp8 = gemm(gpu, 8192, 8192, 8192, "fp8").time_s
    assert 1.5 < bf16 / fp8 <= 2.05


def test_the_sustained_clock_turns_cycles_into_seconds():
    gpu = load_hardware("mi325x")
    done = gemm("mi325x", 8192, 8192, 8192, "bf16")
    clock = gpu.compute.sustained_clock_hz
    assert done.time_s == pytest.approx(done.details["cycles"] / clock + gpu.launch.kernel_s)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("size", [(16, 4096, 4096), (4097, 333, 1025), (1, 8192, 8192)], ids=str)
def test_small_and_odd_sizes_have_a_time(layout, size):
    for gpu in ("mi300x", "mi355x"):
        assert 0 < gemm(gpu, *size, "bf16", layout).time_s < 0.1


def test_what_the_package_has_no_tile_for_is_refused_in_one_line():
    """FP8 on gfx950 multiplies 128 deep, for which the package has no tile of one row."""
    with pytest.raises(ProjectionError, match="origami has no tile for 1 x 8192 x 8192 fp8"):
        gemm("mi355x", 1, 8192, 8192, "fp8")


def test_a_batch_takes_longer():
    one, four = (gemm("mi300x", 2048, 2048, 2048, "bf16", batch=batch).time_s for batch in (1, 4))
    assert one < four <= 4.2 * one


def test_attention_on_one_unit():
    backend = get_sdpa_simulation_backend("origami", load_hardware("mi300x"))
    size = AttentionSize(1, 8192, 8192, 32, 8, 128, 128)
    forward, backward = (backend.simulate(size, passed).time_s for passed in (False, True))
    assert 1.5 < backward / forward < 4
    full = AttentionSize(1, 8192, 8192, 32, 8, 128, 128, causal=False)
    assert backend.simulate(full, False).time_s == pytest.approx(2 * forward, rel=0.01)
