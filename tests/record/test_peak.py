"""The rate that MFU is a share of: never that of a namesake."""

import pytest

from aorta.hardware.part import load_hardware
from aorta.record.description import UnknownPeak, peak_record, precision_of


def gpu(name):
    return {"kind": "cuda", "name": name}


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("AMD Instinct MI300X OAM", "mi300x")],
)
def test_the_peak_is_the_hardware_files(name, hardware):
    found = peak_record([gpu(name)] * 2, "bf16")
    assert found.flops_per_s == load_hardware(hardware).compute.peak_flops["bf16"]
    assert found.hardware == load_hardware(hardware).title
    assert found.origin


@pytest.mark.parametrize(
    ("devices", "precision", "reason"),
    [
        ([gpu("NVIDIA GB10")], "bf16", "rate of NVIDIA GB10 is not known"),
        ([gpu("NVIDIA H100 PCIe")], "bf16", "rate of NVIDIA H100 PCIe is not known"),
        ([gpu("NVIDIA H200"), gpu("NVIDIA H100 80GB HBM3")], "bf16", "the devices differ"),
        ([gpu("NVIDIA H200")], None, "the precision is not known"),
        ([gpu("NVIDIA H200")], "int4", "not for int4"),
        ([{"kind": "cpu", "name": "a CPU"}], "fp32", "no GPU was used"),
    ],
)
def test_what_is_not_known_has_a_reason(devices, precision, reason):
    with pytest.raises(UnknownPeak, match=reason):
        peak_record(devices, precision)


def test_the_precision_is_that_of_the_configuration():
    assert precision_of({"training": {"precision": "bf16"}}) == "bf16"
    assert precision_of(None) is None
    assert precision_of({"training": 3}) is None
