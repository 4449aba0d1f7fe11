import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from aorta.device import telemetry
from aorta.device.telemetry import DeviceIdentity, TelemetrySampler, clock_limit_names
from aorta.records.schema import DeviceRecord
from tests.limits import LIMIT_S

MINE = DeviceIdentity(uuid="aaaa", pci_address="0000:c1:00")


@pytest.fixture
def my_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_identity", lambda index: MINE)


@pytest.fixture
def path_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def no_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)


def wait_for(condition: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def first_sample(sampler: TelemetrySampler) -> DeviceRecord:
    with sampler:
        wait_for(sampler.latest)
    sample = sampler.latest()
    assert sample is not None
    assert sampler.reason is None
    assert abs(sample.sample_unix_ns - time.time_ns()) < 20e9
    return sample


@pytest.mark.usefixtures("my_device", "no_amdsmi")
def test_rocm_without_the_module_says_what_is_missing() -> None:
    sampler = TelemetrySampler(0, 0.01, platform="hip")
    with sampler:
        wait_for(lambda: sampler.reason != "no sample yet")
    assert sampler.latest() is None
    fix = "pip install /opt/rocm/share/amd_smi"
    assert sampler.reason == f"the Python module amdsmi is not installed: {fix}"


@pytest.mark.usefixtures("my_device", "path_folder")
def test_the_amdsmi_module_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class AmdSmiError(Exception):
        pass

    def unsupported(handle: object) -> object:
        raise AmdSmiError

    fake = ModuleType("amdsmi")
    fake.__dict__.update(
        AmdSmiException=AmdSmiError,
        AmdSmiClkType=SimpleNamespace(GFX="gfx", MEM="mem"),
        AmdSmiTemperatureType=SimpleNamespace(HOTSPOT="hotspot"),
        AmdSmiTemperatureMetric=SimpleNamespace(CURRENT="current"),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["other", "mine"],
        amdsmi_get_gpu_device_bdf={"other": "0000:01:00.0", "mine": "0000:C1:00.0"}.__getitem__,
        amdsmi_get_power_info=lambda handle: {"current_socket_power": "N/A", "average_socket_power": 450},
        amdsmi_get_clock_info=lambda handle, kind: {"clk": 2000 if kind == "gfx" else 0xFFFFFFFF},
        amdsmi_get_temp_metric=lambda handle, sensor, metric: 60,
        amdsmi_get_gpu_activity=unsupported,
        amdsmi_get_gpu_metrics_info=lambda handle: {"throttle_status": False},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    sample = first_sample(TelemetrySampler(0, 0.01, platform="hip"))
    assert (sample.power_w, sample.sm_clock_mhz, sample.memory_clock_mhz) == (450.0, 2000.0, None)
    assert (sample.temperature_c, sample.utilization_percent, sample.throttling) == (60.0, None, [])


class FakeNvml(ModuleType):
    """One GPU, that nvmlDeviceGetHandleByUUID knows as GPU-aaaa."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.num_open = 0

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-aaaa":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        if address != "0000:c1:00.0":
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 701_500

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=139 << 30, total=140 << 30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x4 | 0x40


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.usefixtures("my_device")
def test_nvml_gives_watts_megahertz_and_named_throttling(nvml: FakeNvml) -> None:
    sample = first_sample(TelemetrySampler(0, 0.01, platform="cuda"))
    assert sample.power_w == 701.5
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 3201)
    assert sample.temperature_c is None
    assert sample.throttling == ["sw_power_cap", "hw_thermal_slowdown"]
    assert sample.utilization_percent == 97
    assert sample.memory_used_bytes == 139 << 30
    assert nvml.num_open == 0


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("identity", "found"),
    [
        (DeviceIdentity(uuid="aaaa", pci_address=None), True),
        (DeviceIdentity(uuid="bbbb", pci_address="0000:c1:00"), True),
        (DeviceIdentity(uuid="bbbb", pci_address="0000:01:00"), False),
        (DeviceIdentity(uuid=None, pci_address=None), False),
    ],
)
def test_nvml_devices_are_found_by_who_they_are(
    identity: DeviceIdentity, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_identity", lambda index: identity)
    sampler = TelemetrySampler(3, 0.01, platform="cuda")
    with sampler:
        wait_for(lambda: sampler.reason != "no sample yet")
    assert (sampler.latest() is not None) == found
    assert ("NVML does not know" in (sampler.reason or "")) == (not found)


@pytest.mark.usefixtures("my_device")
def test_without_pynvml_the_reason_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = TelemetrySampler(0, 0.01, platform="cuda")
    with sampler:
        wait_for(lambda: sampler.reason != "no sample yet")
    assert sampler.reason == "pynvml (package nvidia-ml-py) is not installed"


@pytest.mark.usefixtures("my_device")
def test_a_library_that_raises_anything_ends_the_samples_and_nothing_else(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(handle: str) -> int:
        raise OSError("driver gone")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", crash, raising=False)
    sampler = TelemetrySampler(0, 0.01, platform="cuda")
    with sampler:
        wait_for(lambda: sampler.reason != "no sample yet")
    assert sampler.latest() is None
    assert "driver gone" in (sampler.reason or "")
    assert len(caplog.records) == 1


def test_reasons_that_nobody_has_named_are_kept() -> None:
    assert clock_limit_names(0x1) == []
    assert clock_limit_names(0x4 | 0x1000) == ["sw_power_cap", "unknown_0x1000"]


def test_on_cpu_it_says_so_and_starts_no_thread() -> None:
    sampler = TelemetrySampler(None, 0.01)
    with sampler:
        assert sampler._thread is None
    assert sampler.latest() is None
    assert sampler.reason == "this process uses no GPU"


@pytest.mark.usefixtures("my_device", "nvml")
def test_start_and_stop_twice_do_no_harm() -> None:
    sampler = TelemetrySampler(0, 0.01, platform="cuda")
    sampler.stop()
    sampler.start()
    thread = sampler._thread
    sampler.start()
    assert sampler._thread is thread
    sampler.stop()
    sampler.stop()
    assert first_sample(sampler).power_w == 701.5


@pytest.mark.gpu(1)
def test_a_gpu_says_what_it_draws() -> None:
    sample = first_sample(TelemetrySampler(torch.cuda.current_device(), 0.05))
    assert sample.power_w is not None
    assert sample.power_w > 10
