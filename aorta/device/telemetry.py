"""Power, clocks, temperature and throttling of one device, sampled beside the training loop.

`TelemetrySampler` is the thread; it asks one source: NVML on NVIDIA's devices, the amdsmi module on AMD's.
"""

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from aorta.device.backend import accelerator
from aorta.device.cuda import device_uuid, pci_address
from aorta.device.environment import current_platform
from aorta.errors import AortaError
from aorta.records.schema import DeviceKind, DeviceRecord

log = logging.getLogger(__name__)

# Source: NVML API reference, nvmlClocksEventReasons. Idle (1) is no limit on a clock and left out.
_CLOCK_LIMITS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
_IDLE = 0x1

INSTALLS_AMDSMI = "pip install /opt/rocm/share/amd_smi"
"""ROCm brings the module as a folder."""
_UNSUPPORTED = {0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF}
"""Values by which amdsmi says that it has none."""


class NotMeasured(AortaError):
    """Raised where there is no sample; the message says why."""


@dataclass(frozen=True)
class DeviceIdentity:
    """A torch device as the vendor's tools know it, whatever *_VISIBLE_DEVICES says."""

    uuid: str | None
    pci_address: str | None
    """domain:bus:device, as in 0000:c1:00."""


class TelemetrySource(Protocol):
    def sample(self) -> DeviceRecord: ...

    def close(self) -> None: ...


class TelemetrySampler:
    """Samples a torch device every interval_s in a daemon thread, from start() to stop().

    latest() reads one attribute and never waits. No process is started.

    device_index: torch's index; None on CPU.
    """

    def __init__(
        self,
        device_index: int | None,
        interval_s: float,
        *,
        platform: DeviceKind | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.reason: str | None = "no sample yet"
        """Why latest() is None."""
        self._device_index = device_index
        self._platform = platform or ("cpu" if device_index is None else current_platform())
        self._latest: DeviceRecord | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def latest(self) -> DeviceRecord | None:
        return self._latest

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        if self._thread is not None:
            return
        if self._device_index is None or self._platform == "cpu":
            self.reason = "this process uses no GPU"
            return
        # torch is asked here and not in the thread: the first question initialises the device.
        identity = _identity(self._device_index)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(identity, self._stopping),
            name="aorta-telemetry",
            daemon=True,
        )
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Returns within timeout_s; a thread that hangs in a driver is left behind."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the telemetry thread does not end and is left behind")
        self._thread = None

    def _run(self, identity: DeviceIdentity, stopping: threading.Event) -> None:
        try:
            source = self._open(identity)
            if source is None:
                return
            while not stopping.is_set():
                self._sample(source)
                stopping.wait(self.interval_s)
            source.close()
        except Exception as error:  # a vendor's library may raise anything; training goes on without it
            self._latest = None
            self.reason = f"telemetry failed: {error!r}"
            log.warning("%s", self.reason)

    def _open(self, identity: DeviceIdentity) -> TelemetrySource | None:
        try:
            if self._platform == "cuda":
                return NvmlSource(identity)
            if self._platform == "hip":
                return AmdsmiSource(identity)
            raise NotMeasured(f"telemetry of {self._platform} devices is not known")
        except NotMeasured as why:
            self.reason = str(why)
            return None

    def _sample(self, source: TelemetrySource) -> None:
        try:
            self._latest, self.reason = source.sample(), None
        except NotMeasured as why:
            self._latest, self.reason = None, str(why)


def _identity(device_index: int) -> DeviceIdentity:
    properties = accelerator().properties(device_index)
    return DeviceIdentity(uuid=device_uuid(properties), pci_address=pci_address(properties))


class NvmlSource:
    """Reads NVML through pynvml."""

    def __init__(self, identity: DeviceIdentity) -> None:
        try:
            import pynvml
        except ImportError:
            raise NotMeasured("pynvml (package nvidia-ml-py) is not installed") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NotMeasured(f"NVML does not start: {error}") from error
        self._handle = self._find(identity)

    def _find(self, identity: DeviceIdentity) -> Any:
        nvml = self._nvml
        attempts: list[tuple[Callable[[str], Any], str]] = []
        if identity.uuid:
            attempts += [
                (nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{identity.uuid}") for kind in ("GPU", "MIG")
            ]
        if identity.pci_address:
            attempts.append((nvml.nvmlDeviceGetHandleByPciBusId, f"{identity.pci_address}.0"))
        for find, name in attempts:
            try:
                return find(name)
            except nvml.NVMLError:
                continue
        self.close()
        raise NotMeasured(f"NVML does not know the device {identity.uuid or identity.pci_address}")

    def sample(self) -> DeviceRecord:
        nvml, handle = self._nvml, self._handle
        power_mw = self._read(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        utilization = self._read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        reasons = self._read(lambda: self._clock_event_reasons()(handle))
        used_bytes = self._read(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return DeviceRecord(
            sample_unix_ns=time.time_ns(),
            power_w=None if power_mw is None else power_mw / 1000,
            sm_clock_mhz=self._read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=self._read(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            temperature_c=self._read(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            throttling=None if reasons is None else clock_limit_names(int(reasons)),
            utilization_percent=utilization,
            memory_used_bytes=None if used_bytes is None else int(used_bytes),
        )

    def _clock_event_reasons(self) -> Callable[[Any], int]:
        name = "nvmlDeviceGetCurrentClocksEventReasons"
        if not hasattr(self._nvml, name):  # its name before driver 535
            name = "nvmlDeviceGetCurrentClocksThrottleReasons"
        reader: Callable[[Any], int] = getattr(self._nvml, name)
        return reader

    def _read(self, read: Callable[[], float]) -> float | None:
        try:
            return read()
        except self._nvml.NVMLError:  # not supported on this device, or not permitted
            return None

    def close(self) -> None:
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


def clock_limit_names(reasons: int) -> list[str]:
    names = [name for bit, name in _CLOCK_LIMITS.items() if reasons & bit]
    unknown = reasons & ~(_IDLE | sum(_CLOCK_LIMITS))
    return [*names, f"unknown_{unknown:#x}"] if unknown else names


class AmdsmiSource:
    """Reads amdsmi, the Python module that ROCm installs; no subprocess."""

    def __init__(self, identity: DeviceIdentity) -> None:
        try:
            import amdsmi
        except ImportError:
            raise NotMeasured(f"the Python module amdsmi is not installed: {INSTALLS_AMDSMI}") from None
        self._smi: Any = amdsmi
        try:
            amdsmi.amdsmi_init()
        except amdsmi.AmdSmiException as error:
            raise NotMeasured(f"amdsmi does not start: {error}") from error
        self._handle = self._find(identity)

    def _find(self, identity: DeviceIdentity) -> Any:
        for handle in self._smi.amdsmi_get_processor_handles():
            if _same_device(self._smi.amdsmi_get_gpu_device_bdf(handle), identity):
                return handle
        self.close()
        raise NotMeasured(f"amdsmi does not know the device {identity.pci_address}")

    def sample(self) -> DeviceRecord:
        smi, handle = self._smi, self._handle
        power = self._read(lambda: smi.amdsmi_get_power_info(handle))
        activity = self._read(lambda: smi.amdsmi_get_gpu_activity(handle))
        metrics = self._read(lambda: smi.amdsmi_get_gpu_metrics_info(handle))
        sensors, current = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
        return DeviceRecord(
            sample_unix_ns=time.time_ns(),
            power_w=_first_number(power, "current_socket_power", "average_socket_power"),
            sm_clock_mhz=self._clock_mhz("GFX"),
            memory_clock_mhz=self._clock_mhz("MEM"),
            temperature_c=_number(
                self._read(lambda: smi.amdsmi_get_temp_metric(handle, sensors.HOTSPOT, current))
            ),
            throttling=_throttling(_get(metrics, "throttle_status")),
            utilization_percent=_first_number(activity, "gfx_activity"),
        )

    def _clock_mhz(self, kind: str) -> float | None:
        smi = self._smi
        clock = self._read(lambda: smi.amdsmi_get_clock_info(self._handle, getattr(smi.AmdSmiClkType, kind)))
        return _first_number(clock, "clk", "cur_clk")

    def _read(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._smi.AmdSmiException:  # not supported on this device, or not permitted
            return None

    def close(self) -> None:
        try:
            self._smi.amdsmi_shut_down()
        except self._smi.AmdSmiException:
            return


# -- values in the answers of the vendors' tools -------------------------------------------------------


def _same_device(address: Any, identity: DeviceIdentity) -> bool:
    """Return True where a PCI address (0000:c1:00.0, upper or lower case) is the device's."""
    if not isinstance(address, str) or identity.pci_address is None:
        return False
    return address.strip().lower().partition(".")[0] == identity.pci_address


def _get(tree: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    return tree


def _first_number(tree: Any, *keys: str) -> float | None:
    """The number under the first key that holds one."""
    return next((number for key in keys if (number := _number(_get(tree, key))) is not None), None)


def _number(value: Any) -> float | None:
    """The number in 135, "135.0", "(135Mhz)" or {"value": 135}; None for "N/A" and _UNSUPPORTED."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, str):
        match = re.search(r"\d+(\.\d+)?", value)
        value = float(match.group()) if match else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value in _UNSUPPORTED:
        return None
    return float(value)


def _throttling(status: Any) -> list[str] | None:
    """amd-smi's throttle status as a list; it gives no reasons."""
    if status in (True, "THROTTLED"):
        return ["throttled"]
    if status in (False, "UNTHROTTLED"):
        return []
    return None
