"""CUDA and HIP devices: torch presents HIP under torch.cuda, so one file serves both.

The attributes that run once per collective are torch's C functions themselves. A torch without CUDA lacks
them, and nothing here calls them there.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from aorta.device.backend import Backend, MemoryUse, QueueLimit
from aorta.device.event_clock import DeviceStream
from aorta.device.kernel_records import KernelRecords, is_tool_named, mapped_files
from aorta.errors import InstrumentError
from aorta.records.schema import DeviceKind

current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]
"""Handle of the current stream of a device; cheap, unlike making a Stream object."""

_streams: dict[tuple[int, int], DeviceStream] = {}
"""(device index, driver's handle) -> stream, since making a Stream object is expensive."""


def device_stream(stream: Any) -> DeviceStream:
    make_current = partial(
        torch._C._cuda_setStream, stream.stream_id, stream.device_index, stream.device_type
    )
    return DeviceStream(stream, stream.cuda_stream, make_current)


def current_stream(device_index: int) -> DeviceStream:
    """The caller's current stream, without making a new object for a stream seen before."""
    key = (device_index, current_raw_stream(device_index))
    stream = _streams.get(key)
    if stream is None:
        stream_id, index, device_type = torch._C._cuda_getCurrentStream(device_index)
        stream = _streams[key] = device_stream(
            torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=device_type)
        )
    return stream


def memory_of(index: int) -> MemoryUse | None:
    try:
        stats = torch._C._cuda_memoryStats(index)
    except RuntimeError:  # another allocator is in the place of torch's
        return None
    allocated = stats["allocated_bytes"]["all"]
    reserved = stats["reserved_bytes"]["all"]["current"]
    num_retries, num_frees = stats.get("num_alloc_retries"), stats.get("num_device_free")
    return allocated["current"], reserved, allocated["peak"], num_retries, num_frees


class CudaBackend(Backend):
    """NVIDIA's devices."""

    kind: DeviceKind = "cuda"
    torch_type = "cuda"
    dispatch_key = "CUDA"
    collectives = "nccl"
    event_wait_module = torch.cuda.streams.__name__
    queue_limit = QueueLimit("CUDA_DEVICE_MAX_CONNECTIONS", default=8, most=32)
    """Source: CUDA programming guide, environment variables."""
    memory = torch.cuda

    def __init__(self) -> None:
        # Past torch.cuda.Event's own Python methods, which the recorder watches: these waits are its own.
        events: Any = torch._C._CudaEventBase
        self.record = getattr(events, "record", None)  # type: ignore[assignment]
        self.wait_event = getattr(events, "wait", None)  # type: ignore[assignment]
        self.elapsed_ms = getattr(events, "elapsed_time", None)  # type: ignore[assignment]
        self.handle_of = attrgetter("cuda_stream")
        self.current_raw_stream = current_raw_stream
        self.current_stream = current_stream
        self.is_capturing = getattr(
            torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
        )
        self.holds = attrgetter("is_cuda")
        self.memory_of = memory_of
        self.current_index = torch.cuda.current_device

    # From torch.cuda and not torch.accelerator, which means another device where the process has registered
    # one, and none where this torch is built for none. The recorder also watches torch.cuda.synchronize.

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_initialized(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def count(self) -> int:
        return torch.cuda.device_count()

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.cuda.device(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        torch.cuda.synchronize(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def properties(self, index: int) -> Any:
        return torch.cuda.get_device_properties(index)

    def describe(self, index: int) -> dict[str, Any]:
        properties = self.properties(index)
        return {
            "kind": self.kind,
            "index": index,
            "name": properties.name,
            "architecture": self.architecture(properties),
            "num_compute_units": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            # torch gives kHz; some versions have neither.
            "max_clock_mhz": _thousandth(getattr(properties, "clock_rate", None)),
            "max_memory_clock_mhz": _thousandth(getattr(properties, "memory_clock_rate", None)),
            "pci_address": pci_address(properties),
            "uuid": device_uuid(properties),
        }

    def architecture(self, properties: Any) -> str:
        return f"sm_{properties.major}{properties.minor}"

    def memory_limit_bytes(self, index: int) -> int | None:
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 1.0)
        return int(self.properties(index).total_memory * share(index))

    def reserved_bytes(self, index: int) -> int:
        try:
            return torch.cuda.memory_reserved(index)
        except RuntimeError:  # another allocator, which does not tell, is in the place of torch's: it is used
            return 1

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.mem_get_info(device)

    def new_stream(self, device: torch.device, priority: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(device, priority=priority)

    def stream_priorities(self) -> tuple[int, int]:
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static
        return int(least), int(greatest)

    def unpooled_stream(self, device: torch.device, priority: int) -> torch.cuda.ExternalStream:
        """Made by the runtime itself, and not destroyed because torch's allocator may remember it."""
        library, prefix = runtime()
        name = f"{prefix}StreamCreateWithPriority"
        create = loaded_function(name, library)
        if create is None:
            raise InstrumentError(
                f"more than 32 streams need {name} of {library}, which is not loaded; use fewer"
            )
        handle = ctypes.c_void_p()
        non_blocking = 1
        with torch.cuda.device(device):
            status = create(ctypes.byref(handle), ctypes.c_uint(non_blocking), ctypes.c_int(priority))
        if status != 0:
            raise InstrumentError(f"{name} failed with status {status}; use at most 32 streams")
        return torch.cuda.ExternalStream(handle.value, device=device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def torch_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def device_stream(self, stream: Any) -> DeviceStream:
        return device_stream(stream)

    def new_event(self, timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing)

    def let_others_capture(self) -> None:
        """Relax this thread's capture mode, where the runtime's function can be reached."""
        library, prefix = runtime()
        exchange = loaded_function(f"{prefix}ThreadExchangeStreamCaptureMode", library)
        if exchange is not None:
            relaxed = 2  # cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed
            exchange(ctypes.byref(ctypes.c_int(relaxed)))

    def capture(self, work: Callable[[], object], stream: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may query events meanwhile: that must not end the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph

    def spin(self, cycles: int) -> None:
        torch.cuda._sleep(cycles)

    @property
    def event_type(self) -> type[torch.cuda.Event]:
        return torch.cuda.Event

    @property
    def stream_type(self) -> type[torch.cuda.Stream]:
        return torch.cuda.Stream

    @property
    def graph_type(self) -> Any:
        return torch.cuda.CUDAGraph

    def host_waits(self) -> Sequence[tuple[Any, str]]:
        return (
            (torch.cuda, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda.Event, "synchronize"),
        )

    def kernel_records(self, device: torch.device) -> KernelRecords:
        return KernelRecords.open(device)

    def profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CUDA  # ROCm too

    def range_markers(self) -> Any:
        return torch.cuda.nvtx  # ROCTx on ROCm

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)


class HipBackend(CudaBackend):
    """AMD's devices, where they differ from NVIDIA's."""

    kind = "hip"
    kernels_note = (
        "read through rocprofiler-sdk, a path that has not been run on a device: compare with kernels='off'"
    )
    queue_limit = QueueLimit("GPU_MAX_HW_QUEUES", default=4, most=128)

    @property
    def kernels_unasked(self) -> str | None:  # type: ignore[override]  # settled by the environment here
        """Why kernel records are not read unless asked for; None where HIP registered their tool."""
        if is_tool_named(os.environ):
            return None
        return "kernel records of ROCm have not been run on a device: ask for them with --kernels on"

    def architecture(self, properties: Any) -> str:
        architecture: str = properties.gcnArchName
        return architecture


def backend() -> Backend:
    """The backend of this torch's build; the seam calls it."""
    return CudaBackend() if torch.version.hip is None else HipBackend()


def runtime() -> tuple[str, str]:
    """The runtime's library, and what the names of its functions begin with."""
    return ("libamdhip64", "hip") if torch.version.hip else ("libcudart", "cuda")


def loaded_function(name: str, library: str) -> Any | None:
    """A C function of a library that this process has loaded already; None where it has not.

    It must be the very library that torch uses: a second copy of the runtime would have streams of its own.
    torch loads it for all to see, or for itself alone (a wheel's private copy), hence two ways to find it.
    """
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        return function
    for path in mapped_files():
        if not Path(path).name.startswith(library):
            continue
        with contextlib.suppress(OSError):  # opening a mapped file again gives the same copy
            function = getattr(ctypes.CDLL(path), name, None)
            if function is not None:
                return function
    return None


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000


def pci_address(properties: Any) -> str | None:
    """domain:bus:device as in 0000:c1:00; None where torch does not say."""
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    except AttributeError:
        return None


def device_uuid(properties: Any) -> str | None:
    """The device's UUID without the GPU- in front; None where torch does not say."""
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)
