"""Power, clocks, temperature and throttling of one device, sampled beside the training loop.

`TelemetrySampler` is the thread; it asks one source: NVML on NVIDIA's devices; on AMD's the amdsmi module,
or else the amd-smi command.
"""

import json
import logging
import re
import shutil
import subprocess
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

_MIN_COMMAND_INTERVAL_S = 1.0
"""Shortest interval of a source that starts a program for each sample."""

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

    latest() reads one attribute and never waits. NVML and amdsmi are asked in the process; where only the
    amd-smi command is there, one process runs per interval, of at least a second.

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
        self._command = Command()

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
        self._command = Command()
        self._thread = threading.Thread(
            target=self._run,
            args=(identity, self._stopping, self._command),
            name="aorta-telemetry",
            daemon=True,
        )
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Returns within timeout_s; a thread that hangs in a driver is left behind."""
        if self._thread is None:
            return
        self._stopping.set()
        self._command.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("the telemetry thread does not end and is left behind")
        self._thread = None

    def _run(self, identity: DeviceIdentity, stopping: threading.Event, command: "Command") -> None:
        try:
            source = self._open(identity, command)
            if source is None:
                return
            interval_s = self.interval_s
            if isinstance(source, AmdSmiCommandSource):
                interval_s = max(interval_s, _MIN_COMMAND_INTERVAL_S)
            while not stopping.is_set():
                self._sample(source)
                stopping.wait(interval_s)
            source.close()
        except Exception as error:  # a vendor's library may raise anything; training goes on without it
            self._latest = None
            self.reason = f"telemetry failed: {error!r}"
            log.warning("%s", self.reason)

    def _open(self, identity: DeviceIdentity, command: "Command") -> TelemetrySource | None:
        try:
            if self._platform == "cuda":
                return NvmlSource(identity)
            if self._platform == "hip":
                return _open_amd(identity, command)
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


def _open_amd(identity: DeviceIdentity, command: "Command") -> TelemetrySource:
    """The first of AMD's sources that answers; NotMeasured with the reasons of both."""
    try:
        return AmdsmiSource(identity)
    except NotMeasured as why:
        of_module = why
    try:
        return AmdSmiCommandSource(command, identity)
    except NotMeasured as why:
        raise NotMeasured(f"{of_module}; {why}") from None


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
            raise NotMeasured("the Python module amdsmi is not installed") from None
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


# -- a source that starts a program for each sample ------------------------------------------------------


class Command:
    """Runs one program at a time, and can be stopped from another thread."""

    timeout_s = 20.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def output(self, *command: str) -> str:
        """Standard output of a command, whatever its exit status. Raises NotMeasured where there is none."""
        name = command[0]
        path = shutil.which(name)
        if path is None:
            raise NotMeasured(f"{name} is not on PATH")
        with self._lock:
            if self._stopped:
                raise NotMeasured("telemetry is stopped")
            process = self._process = subprocess.Popen(
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        try:
            output, errors = process.communicate(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise NotMeasured(f"{name} did not answer within {self.timeout_s:g} s") from None
        finally:
            with self._lock:
                self._process = None
        if not output.strip():
            last_line = (errors.strip().splitlines() or ["no output"])[-1]
            raise NotMeasured(f"{name} exited {process.returncode}: {last_line}")
        return output

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()


class AmdSmiCommandSource:
    """Starts amd-smi for each sample, for this GPU only."""

    def __init__(self, command: Command, identity: DeviceIdentity) -> None:
        self._command = command
        for gpu in self._gpus("list"):
            if _same_device(_get(gpu, "bdf"), identity):
                self._gpu = str(gpu["gpu"])
                return
        raise NotMeasured(f"amd-smi does not list the device {identity.pci_address}")

    def _gpus(self, *arguments: str) -> list[Any]:
        answer = _parse_json(self._command.output("amd-smi", *arguments, "--json"), "amd-smi")
        gpus = _get(answer, "gpu_data") or answer  # a bare list before amd-smi 25.4
        return gpus if isinstance(gpus, list) else []

    def sample(self) -> DeviceRecord:
        gpus = self._gpus("metric", "--gpu", self._gpu)
        if not gpus:
            raise NotMeasured("amd-smi metric lists no GPU")
        gpu = gpus[0]
        temperature = _get(gpu, "temperature")
        return DeviceRecord(
            sample_unix_ns=time.time_ns(),
            power_w=_first_number(_get(gpu, "power"), "socket_power", "current_socket_power"),
            sm_clock_mhz=_first_number(_get(gpu, "clock", "gfx_0"), "clk"),
            memory_clock_mhz=_first_number(_get(gpu, "clock", "mem_0"), "clk"),
            temperature_c=_first_number(temperature, "hotspot", "edge"),
            throttling=_throttling(_get(gpu, "power", "throttle_status")),
            utilization_percent=_first_number(_get(gpu, "usage"), "gfx_activity"),
        )

    def close(self) -> None:
        pass


def _parse_json(text: str, name: str) -> Any:
    start = re.search(r"^[\[{]", text, re.MULTILINE)  # warnings may come first
    try:
        return json.loads(text[start.start() if start else 0 :])
    except ValueError as error:
        raise NotMeasured(f"{name} printed no JSON: {error}") from error


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
