from pathlib import Path

import pytest

from aorta.errors import ProjectionError
from aorta.hardware.names import hardware_name_of
from aorta.hardware.part import load_hardware
from aorta.projection.model import load_model
from aorta.queues.harness.metrics import device_bound_ms
from aorta.queues.workload import DeviceWork


@pytest.mark.parametrize(
    ("device", "part"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),  # holds "h200" and was priced as one
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI355X VF", "mi355x"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_device_is_looked_up_by_whole_words(device, part):
    assert hardware_name_of(device) == part


def test_the_queue_probe_asks_the_same_look_up():
    work = DeviceWork(flops={"bf16": 1e12})
    assert device_bound_ms(work, "NVIDIA H100 PCIe").value is None
    assert device_bound_ms(work, "NVIDIA H200").value == pytest.approx(1e15 / 9.894e14)


def test_documented_paths_hold_wherever_the_command_runs(tmp_path, monkeypatch):
    """An installed aorta has no config folder, and its documents name the files by it."""
    monkeypatch.chdir(tmp_path)
    assert load_hardware("config/hardware/h100.yaml") == load_hardware("h100")
    assert load_model("config/models/llama3-8b.yaml") == load_model("llama3-8b")
    own = Path("config/models/llama3-8b.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("name: mine\n")
    with pytest.raises(Exception, match="source"):
        load_model(str(own))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("H100 SXM", "h100"),
        ("H100-SXM5-80GB", "h100"),
        ("h100_sxm", "h100"),
        ("HGX H100", "h100"),
        ("8xH100", "h100"),
        ("8 x H100", "h100"),
        ("H100 x8", "h100"),
        ("H200 SXM", "h200"),
        ("H20", "h20"),
        ("H20-3e", "h20-141gb"),
        ("H20 141GB", "h20-141gb"),
        ("H800", "h800"),
        ("A100-80GB", "a100"),
        ("A100 SXM4 40GB", "a100-40gb"),
        ("A800-80GB", "a800"),
        ("GH200 96GB", "gh200"),
        ("DGX B200", "b200"),
        ("B300_SXM", "b300"),
        ("GB200 NVL72", "gb200"),
        ("GB300-NVL72", "gb300"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI300X 192GB", "mi300x"),
        ("MI325X OAM", "mi325x"),
        ("MI350X", "mi350x"),
        ("Instinct MI355X", "mi355x"),
    ],
)
def test_parts_as_tables_write_them(text, part):
    assert load_hardware(text) == load_hardware(part)


@pytest.mark.parametrize("text", ["H100 PCIe", "H100 NVL", "MI300A", "TPU v5p", "V100", "Gaudi3", "", "x8"])
def test_a_part_without_a_file_is_refused(text):
    with pytest.raises(ProjectionError, match="is not a GPU"):
        load_hardware(text)
