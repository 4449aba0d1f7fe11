"""What a report gets once it is safe, for asking may block: the driver's numbers, PyTorch's own record."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C import _distributed_c10d as c10d

from aorta.device.backend import backend_of
from aorta.device.telemetry import TelemetrySampler
from aorta.files import write_whole
from aorta.records.schema import DeviceRecord

log = logging.getLogger(__name__)

SAMPLE_S = 2.0
FLIGHT_RECORDER_S = 3.0


def in_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Started; an end of the process does not wait for it."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # a vendor's library may raise anything
            log.info("%s: %r", name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def ask_once(device: torch.device | None) -> None:
    """While the device answers: torch keeps its properties, which the sampler asks for."""
    if device is not None and backend_of(device).is_device:
        backend_of(device).properties(device.index)


def sample(device: torch.device | None) -> tuple[DeviceRecord | None, str | None]:
    """Power, clocks and throttling of this moment, or why not. NVML and amdsmi do not wait for kernels."""
    if device is None or not backend_of(device).is_device:
        return None, "there is no device"
    with TelemetrySampler(device.index, SAMPLE_S / 4) as sampler:
        end_s = time.monotonic() + SAMPLE_S
        while sampler.latest() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        record = sampler.latest()
        return record, None if record is not None else sampler.reason or f"no sample within {SAMPLE_S:g} s"


def write_flight_recorder(path: Path) -> bytes:
    """PyTorch's own record of its calls, where this build has one; empty where not. Returns within
    FLIGHT_RECORDER_S unless it waits with the interpreter lock: for a lock of NCCL's threads, say. So it
    comes last."""
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return b""
    answers: list[bytes] = []

    def ask() -> None:
        data = dump()
        if data:
            answers.append(data)
            write_whole(path, data)

    in_thread(ask, "aorta-flight-recorder").join(FLIGHT_RECORDER_S)
    return answers[0] if answers else b""
