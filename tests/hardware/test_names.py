from pathlib import Path

import pytest

from aorta.hardware import hardware_name_of, load_hardware
from aorta.projection.model import load_model
from aorta.queues.harness.bound import device_bound_ms
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
    work = DeviceWork(flops={"bf16": 1e12}, bytes=0.0)
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
