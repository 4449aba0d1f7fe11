"""Power, clocks, temperature and throttling of one device, sampled beside the training loop."""

import contextlib
import logging
import threading
from typing import Self

from aorta.device.backend import accelerator
from aorta.device.cuda import device_uuid, pci_address
from aorta.device.environment import current_platform
from aorta.device.telemetry_sources import (
    AmdSmiCommandSource,
    AmdsmiSource,
    Command,
    DeviceIdentity,
    NotMeasured,
    NvmlSource,
    RocmSmiSource,
    TelemetrySource,
)
from aorta.records.schema import DeviceKind, DeviceRecord

log = logging.getLogger(__name__)

_MIN_COMMAND_INTERVAL_S = 1.0


class TelemetrySampler:
    """Samples a torch device every interval_s in a daemon thread, from start() to stop().

    latest() and rocm_smi_output() read one attribute and never wait. NVML and amdsmi are
    asked in the process; where only the rocm-smi or amd-smi command is there, or rocm_text
    asks for rocm-smi's output, one process runs per interval, of at least a second.

    device_index: torch's index; None on CPU, where only rocm_text can give something.
    """

    def __init__(
        self,
        device_index: int | None,
        interval_s: float,
        rocm_text: bool = False,
        *,
        platform: DeviceKind | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.reason: str | None = "no sample yet"
        """Why latest() is None."""
        self.rocm_smi_reason: str | None = "no sample yet" if rocm_text else "not asked for"
        """Why rocm_smi_output() is None."""
        self._device_index = device_index
        self._rocm_text = rocm_text
        self._platform = platform or ("cpu" if device_index is None else current_platform())
        self._latest: DeviceRecord | None = None
        self._text: str | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._command = Command()

    def latest(self) -> DeviceRecord | None:
        return self._latest

    def rocm_smi_output(self) -> str | None:
        return self._text

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        if self._thread is not None:
            return
        if self._platform == "cpu" and not self._rocm_text:
            self.reason = "this process uses no GPU"
            return
        # torch is asked here and not in the thread: the first question initialises the device.
        identity = None if self._device_index is None else _identity(self._device_index)
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

    def _run(self, identity: DeviceIdentity | None, stopping: threading.Event, command: Command) -> None:
        try:
            source, rocm_smi = self._open(identity, command)
            interval_s = self.interval_s
            if rocm_smi or isinstance(source, AmdSmiCommandSource):
                interval_s = max(interval_s, _MIN_COMMAND_INTERVAL_S)
            while not stopping.is_set():
                self._sample(source, rocm_smi)
                stopping.wait(interval_s)
            if source is not None:
                source.close()
        except Exception as error:  # a vendor's library may raise anything; training goes on without it
            self._latest = None
            self.reason = f"telemetry failed: {error!r}"
            log.warning("%s", self.reason)

    def _open(
        self, identity: DeviceIdentity | None, command: Command
    ) -> tuple[TelemetrySource | None, RocmSmiSource | None]:
        """What gives the samples, and what gives the text; the same where the text has the numbers too."""
        rocm_smi = RocmSmiSource(command, identity) if self._rocm_text else None
        if identity is None or self._platform == "cpu":
            self.reason = "this process uses no GPU"
            return None, rocm_smi
        try:
            if self._platform == "cuda":
                return NvmlSource(identity), rocm_smi
            if self._platform == "hip":
                return _open_amd(identity, command, rocm_smi), rocm_smi
            raise NotMeasured(f"telemetry of {self._platform} devices is not known")
        except NotMeasured as why:
            self.reason = str(why)
            return None, rocm_smi

    def _sample(self, source: TelemetrySource | None, rocm_smi: RocmSmiSource | None) -> None:
        if source is not None:
            try:
                self._latest, self.reason = source.sample(), None
            except NotMeasured as why:
                self._latest, self.reason = None, str(why)
        if rocm_smi is not None:
            if rocm_smi is not source:
                with contextlib.suppress(NotMeasured):  # only its text is asked for
                    rocm_smi.sample()
            self._text, self.rocm_smi_reason = rocm_smi.text, rocm_smi.reason


def _open_amd(identity: DeviceIdentity, command: Command, rocm_smi: RocmSmiSource | None) -> TelemetrySource:
    reasons = []
    try:
        return AmdsmiSource(identity)
    except NotMeasured as why:
        reasons.append(str(why))
    by_command = rocm_smi or RocmSmiSource(command, identity)
    try:
        by_command.sample()
    except NotMeasured as why:
        reasons.append(str(why))
    else:
        return by_command
    try:
        return AmdSmiCommandSource(command, identity)
    except NotMeasured as why:
        reasons.append(str(why))
    raise NotMeasured("; ".join(reasons))


def _identity(device_index: int) -> DeviceIdentity:
    properties = accelerator().properties(device_index)
    return DeviceIdentity(uuid=device_uuid(properties), pci_address=pci_address(properties))
