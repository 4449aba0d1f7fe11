"""One rule for numbers, in tables, sentences, pictures and on the page."""

import pytest

from aorta.account.load.rank.kernels import kernel_name, kernel_rows
from aorta.account.numbers import byte_text, number, percent, quantity, times
from aorta.page.sections import kernels
from aorta.page.table import kernel_table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"), (float("nan"), "n/a"), (0.0, "0.00"), (2700.0, "2,700"), (1234567.0, "1,234,567"),
        (41.23, "41.2"), (412.3, "412.3"), (4.311, "4.31"), (0.0523, "0.052"), (8.3e-11, "<0.001"),
        (0.9998, "1.00"), (9.997, "10.0"), (999.97, "1,000"), (-8.3e-11, "0.000"), (-4.311, "-4.31"),
    ],
)  # fmt: skip
def test_a_number(value, text):
    assert number(value) == text


def test_signs_and_further_digits():
    assert number(1.5, sign=True) == "+1.50"
    assert number(12.04, extra_digits=1) == "12.04"
    assert number(-1.5, minus="\u2212") == "\u22121.50"
    assert number(1e-9, sign=True) == "0.000"


def test_quantities():
    assert quantity(2700.0, "ms") == "2,700 ms"
    assert quantity(0.412, "") == "0.412"
    assert quantity(3.0, "") == "3"
    assert quantity(0.4123, "%") == "41.2 %"
    assert quantity(3 << 30, "bytes") == "3.0 GiB"
    assert percent(-0.0001) == "0 %"
    assert byte_text(512) == "512 B"
    assert times(8.0) == "8 times"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, "
            "at::detail::Array<char*, 1> >(int, at::native::FillFunctor<float>)",
            "vectorized_elementwise_kernel (FillFunctor)",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, 8>(float*)", "softmax_warp_forward"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(cutlass_80_simt_sgemm_128x256_"
         "8x4_nt_align1::Params)",
         "Kernel2 (cutlass_80_simt_sgemm_128x256_8x4_nt_align1)"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
         "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}> >(int)",
         "elementwise_kernel (direct_copy_kernel_cuda)"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x64", "Cijk_Ailk_Bljk_BBS_BH_MT128x128x64"),
    ],
)  # fmt: skip
def test_a_kernels_name_is_told_without_its_templates(name, short):
    assert kernel_name(name) == short


def test_kernels_by_class_the_longest_first():
    rows = kernel_rows({"copy": (0.5, 2), "gemm": (20.0, 100), "attention": (0.0, 0)})
    assert [row.name for row in rows] == ["gemm", "copy"]
    lines = kernel_table(rows, 40.0)
    assert lines[0].split() == ["kernels", "time", "of", "step", "launches", "mean"]
    assert lines[1].split() == ["gemm", "20.0", "ms", "50", "%", "100", "200.0", "us"]


def test_the_pages_table_of_kernels():
    found = kernels({"a": (kernel_rows({"gemm": (20.0, 100), "copy": (0.5, 2)}), 40.0), "b": ([], 0.0)})
    assert found is not None
    assert found.index("gemm") < found.index("copy")
    assert "50 %" in found
    assert "200.0" in found
    assert "Kernels of b" not in found
    assert kernels({"b": ([], 0.0)}) is None
