import math

import pytest

from aorta.errors import ProjectionError
from aorta.hardware import load_hardware
from aorta.projection.estimates import RatioInterval, estimate
from aorta.projection.gemm import TileGemm
from aorta.projection.prices import get_gemm_simulation_backend

GPU = load_hardware("h200")
SIZES = [(m, n, 4096) for m in (1024, 2048, 4096, 8192) for n in (2048, 4096, 8192)]


@pytest.fixture
def table(tmp_path):
    """A GPU that takes 1.5 times what the model says."""
    path = tmp_path / "gemm.csv"
    model = TileGemm(GPU, warm=True)
    rows = [
        f"fwd_TN,bfloat16,1,{m},{n},{k},{1.5e3 * model.simulate(m, n, k, 'bf16').time_s},9"
        for m, n, k in SIZES
    ]
    path.write_text("\n".join(["op,dtype,batch,m,n,k,median_ms,iters", *rows]))
    return get_gemm_simulation_backend("table", GPU, path=path)


def test_a_measured_size_comes_back(table):
    done = table.simulate(2048, 4096, 4096, "bf16")
    assert done.time_s == pytest.approx(
        1.5 * TileGemm(GPU, warm=True).simulate(2048, 4096, 4096, "bf16").time_s
    )
    assert done.details["inside"] == 1


def test_between_measurements_the_model_carries_the_size(table):
    done = table.simulate(3000, 3000, 4096, "bf16")
    assert done.time_s == pytest.approx(
        1.5 * TileGemm(GPU, warm=True).simulate(3000, 3000, 4096, "bf16").time_s
    )
    assert done.source == "gemm table"
    assert done.high_s / done.time_s < 1.01


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((64, 4096, 4096, "bf16", "TN"), id="too-small"),
        pytest.param((2048, 4096, 8192, "bf16", "TN"), id="other-k"),
        pytest.param((2048, 4096, 4096, "bf16", "NT"), id="other-layout"),
        pytest.param((2048, 4096, 4096, "fp8", "TN"), id="other-dtype"),
    ],
)
def test_outside_it_is_the_model_with_a_wide_interval(table, size):
    done = table.simulate(*size)
    assert done.time_s == TileGemm(GPU, warm=True).simulate(*size).time_s
    assert (done.low_s, done.high_s) == (pytest.approx(done.time_s / 2), pytest.approx(done.time_s * 2))
    assert "outside" in done.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("op,dtype,m,n,k,median_ms\n", "has no measured GEMM", id="empty"),
        pytest.param("op,dtype,m,n,k\n", "lacks the column 'median_ms'", id="column"),
        pytest.param("op,dtype,m,n,k,median_ms\nfwd_TN,bf16,a,1,1,1\n", "invalid literal", id="text"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "gemm.csv"
    path.write_text(text)
    with pytest.raises(ProjectionError, match=message):
        get_gemm_simulation_backend("table", GPU, path=path)


def test_an_absent_table_is_named(tmp_path):
    with pytest.raises(ProjectionError, match=r"none\.csv: cannot be read"):
        get_gemm_simulation_backend("table", GPU, path=tmp_path / "none.csv")


def test_a_table_needs_its_file():
    with pytest.raises(ProjectionError, match="needs path=FILE"):
        get_gemm_simulation_backend("table", GPU)


@pytest.mark.parametrize("time_s", [math.inf, math.nan])
def test_a_time_that_is_no_number_is_refused(time_s):
    with pytest.raises(ProjectionError, match="out of range"):
        estimate(time_s, "compute", "gemm tile", RatioInterval(low=0.9, high=1.1))
