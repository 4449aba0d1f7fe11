import gzip
import math
import re
from pathlib import Path
from statistics import median

import pytest

from aorta.errors import ConfigError, ProjectionError
from aorta.hardware.names import PARTS_DIR, hardware_names
from aorta.hardware.part import Hardware, load_hardware, numbers, sustained_flops
from aorta.projection.estimates import memory_bound
from tests.larger_data import TRACES, why_missing

GPUS = hardware_names()


def test_the_gpus_are_there():
    assert GPUS == [
        "a100",
        "a100-40gb",
        "a800",
        "b200",
        "b300",
        "gb200",
        "gb300",
        "gh200",
        "h100",
        "h100-500w",
        "h20",
        "h20-141gb",
        "h200",
        "h800",
        "mi300x",
        "mi325x",
        "mi350x",
        "mi355x",
    ]


def test_what_steps_told_about_a_part_is_in_its_file():
    """No constant of a part lives in code: Blackwell's FP8 factor has a source like every other number."""
    gpu = load_hardware("gb200")
    assert gpu.step.fp8_gemm > load_hardware("h100").step.fp8_gemm
    assert "GB200" in gpu.sources["step.fp8_gemm"].what
    assert load_hardware("h100").step.gemm != load_hardware("h200").step.gemm


def test_less_power_is_a_lower_clock_under_load_alone():
    full, limited = load_hardware("h100"), load_hardware("h100-500w")
    ratio = (500 / 700) ** 0.63
    assert sustained_flops(limited, "bf16") == pytest.approx(ratio * sustained_flops(full, "bf16"), rel=1e-3)
    assert limited.compute.peak_flops == full.compute.peak_flops


@pytest.mark.parametrize("name", GPUS)
def test_every_number_has_a_source_or_says_derived(name):
    gpu = load_hardware(name)
    told = dict(numbers(gpu))
    for key in (
        "memory.hbm_bytes_per_s",
        "compute.peak_flops.bf16",
        "efficiency.gemm.issue",
        "launch.host_s",
    ):
        assert key in told
    assert all(source.what and source.date for source in gpu.sources.values())


@pytest.mark.parametrize("name", GPUS)
def test_sustained_is_below_peak(name):
    gpu = load_hardware(name)
    assert gpu.compute.sustained_flops.keys() == gpu.compute.peak_flops.keys()
    for dtype, flops in gpu.compute.sustained_flops.items():
        assert flops < gpu.compute.peak_flops[dtype]
    assert gpu.memory.sustained_hbm_bytes_per_s < gpu.memory.hbm_bytes_per_s
    assert gpu.scale_up.sustained_gpu_bytes_per_s < gpu.scale_up.gpu_bytes_per_s
    assert gpu.scale_out.sustained_nic_bytes_per_s < gpu.scale_out.nic_bytes_per_s


@pytest.mark.parametrize("name", GPUS)
def test_derived_rates_follow_the_rule(name):
    """The plainer way: ratios of every file, median of those of the same vendor and data type."""
    # The limited part's rates follow from its power, see below; Ampere and H20 are not limited by it.
    others = {"h100-500w", "a100", "a100-40gb", "a800", "h20", "h20-141gb"}
    gpus = [load_hardware(other) for other in GPUS if other not in others]
    gpu = load_hardware(name)
    alike = [other for other in gpus if other.vendor == gpu.vendor]
    ratios: dict[str, list[float]] = {}
    for other in alike:
        for dtype, flops in other.compute.sustained_flops.items():
            if f"compute.sustained_flops.{dtype}" not in other.derived:
                ratios.setdefault(dtype, []).append(flops / other.compute.peak_flops[dtype])
    every = [ratio for of_dtype in ratios.values() for ratio in of_dtype]
    for dtype, flops in gpu.compute.sustained_flops.items():
        if f"compute.sustained_flops.{dtype}" in gpu.derived:
            rule = median(ratios.get(dtype, every))
            assert flops == pytest.approx(gpu.compute.peak_flops[dtype] * rule, rel=1e-3)
    if "memory.sustained_hbm_bytes_per_s" in gpu.derived:
        measured = [
            other.memory.sustained_hbm_bytes_per_s / other.memory.hbm_bytes_per_s
            for other in alike
            if "memory.sustained_hbm_bytes_per_s" not in other.derived
        ]
        assert gpu.memory.sustained_hbm_bytes_per_s == pytest.approx(
            gpu.memory.hbm_bytes_per_s * median(measured), rel=1e-3
        )


def test_published_sustained_rates_are_kept():
    assert sustained_flops(load_hardware("mi300x"), "bf16") == 708e12
    assert sustained_flops(load_hardware("mi325x"), "fp8") == 1519e12


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("h200", "h200_fsdp4_rank0.json.gz"),
        ("mi300x", "mi300x_resnet_ddp_rank0of8_kineto.json.gz"),
        ("mi350x", "mi350x_single_nocomm_kineto.json"),
    ],
)
def test_memory_is_what_the_device_reports(name, trace):
    path = TRACES / trace
    if not path.exists():
        pytest.skip(why_missing(path))
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    reported = {int(size) for size in re.findall(rb'"totalGlobalMem": ?(\d+)', text)}
    assert reported == {load_hardware(name).memory.hbm_bytes}


@pytest.mark.parametrize("name", [name for name in GPUS if name != "h100-500w"])
def test_memory_is_not_the_round_number_of_the_data_sheet(name):
    gpu = load_hardware(name)
    assert "data sheet" not in gpu.sources["memory.hbm_bytes"].what
    assert gpu.memory.hbm_bytes % 1e9


def test_parts_of_one_chip_are_not_alike_in_memory():
    """MI300X and MI325X differ in HBM: a tool that gives both 6 TB/s is wrong about one."""
    assert load_hardware("mi300x").memory.hbm_bytes_per_s == 5.3e12
    assert load_hardware("mi325x").memory.hbm_bytes_per_s == 6.0e12


def test_the_clock_scales_compute_and_nothing_else():
    gpu = load_hardware("mi300x")
    slow = load_hardware("mi300x", gpu_clock_mhz=gpu.compute.sustained_clock_hz / 1e6 / 2)
    assert sustained_flops(slow, "bf16") == pytest.approx(sustained_flops(gpu, "bf16") / 2)
    assert slow.memory.hbm_bytes_per_s == gpu.memory.hbm_bytes_per_s
    assert slow.memory.sustained_hbm_bytes_per_s == gpu.memory.sustained_hbm_bytes_per_s
    assert slow.launch == gpu.launch
    assert slow.scale_up == gpu.scale_up
    assert memory_bound(slow, 1e9, 1e9).time_s == memory_bound(gpu, 1e9, 1e9).time_s


def test_a_clock_of_zero_is_refused():
    with pytest.raises(ProjectionError, match="--gpu-clock-mhz must be between 198 and"):
        load_hardware("h200", gpu_clock_mhz=0)


def test_memory_bound_by_hand():
    gpu = load_hardware("h200")
    # 4.3 GB at 4.3 TB/s is 1 ms; kernel_s and ramp_s are 3 us
    done = memory_bound(gpu, 4.3e9 / 2, 4.3e9 / 2)
    assert done.time_s == pytest.approx(1.003e-3)
    assert done.bound == "memory"
    assert memory_bound(gpu, 4, 4).bound == "latency"
    assert memory_bound(gpu, 4, 4, flops=66.9e12).time_s == pytest.approx(1.0, rel=1e-3)


def test_unknown_gpu_names_the_near_one():
    with pytest.raises(ProjectionError, match="did you mean 'mi300x'"):
        load_hardware("mi300")


def _edited(tmp_path: Path, old: str, new: str) -> Path:
    path = tmp_path / "gpu.yaml"
    text = (PARTS_DIR / "h200.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("num_cus: [132, datasheet]", "num_cus: 132", "has no source", id="no-source"),
        pytest.param(
            "num_cus: [132, datasheet]", "num_cus: [132, hearsay]", "'hearsay'", id="unknown-source"
        ),
        pytest.param("num_cus:", "num_cu:", "did you mean 'num_cus'", id="unknown-key"),
        pytest.param("num_cus: [132,", "num_cus: [-1,", "above 0", id="negative"),
        pytest.param("num_cus: [132,", "num_cus: [many,", "must be a number", id="text"),
        pytest.param("vendor: nvidia", "vendor: acme", "vendor must be amd or nvidia", id="vendor"),
        pytest.param("vendor: nvidia", "vendor: ../h100", "vendor must be", id="vendor-elsewhere"),
        pytest.param("\nsources:\n", "\nsources: data sheets\nold:\n", "sources must hold", id="sources"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, message):
    with pytest.raises((ProjectionError, ConfigError), match=message):
        load_hardware(_edited(tmp_path, old, new))


def test_a_file_of_ones_own_loads(tmp_path):
    gpu = load_hardware(_edited(tmp_path, "name: h200", "name: mine"))
    assert isinstance(gpu, Hardware)
    assert gpu.name == "mine"
    assert math.isclose(gpu.memory.hbm_bytes, 150109880320)
