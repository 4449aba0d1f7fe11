"""The seam between aorta and kinds of devices.

A `Backend` says what one kind of device can tell and do for the recorder: whether it is there, its streams,
events and memory, which process group goes with it, and which of torch's classes to watch. There are three:
`CpuBackend` here, `CudaBackend` and `HipBackend` (torch calls HIP "cuda" too) in cuda.py. Other code asks

    accelerator()         the devices that this torch is built for, present or not
    backend_of(device)    the accelerator where the device is one, else the CPU

and names neither `torch.cuda` nor "cuda" (tests/device/test_seam.py).

Another device is one file beside this one, named as torch names its type (xpu.py), with a function
`backend()` that returns a subclass of `Backend`; and its kind in DeviceKind, the words of run.json. Presence,
current device and synchronisation come from torch.accelerator; the subclass overrides what its devices can
do cheaper or better. tests/device/fake_device.py is such a file, for devices that are not there.

Functions that run once per collective (`record`, `current_stream`, ...) are attributes: callers bind them
once, so that a call through the seam costs no more than a direct one.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch

from aorta.device.event_clock import DeviceStream, EventClock
from aorta.device.kernel_records import KernelRecords, KernelRecordsUnavailable
from aorta.device.marks import HostClock, MarkClock
from aorta.errors import InstrumentError
from aorta.records.schema import DeviceKind

MemoryUse = tuple[int, int, int, int | None, int | None]
"""Allocated, reserved and peak allocated bytes of torch's allocator, how often it freed its cache to
allocate, and how many segments it has given back to the driver."""


class QueueLimit(NamedTuple):
    """The environment variable that limits how many hardware queues a process uses."""

    variable: str
    default: int
    most: int


class Backend:
    """One kind of device. The defaults are what torch.accelerator gives for any device."""

    kind: DeviceKind
    """Name in run.json."""
    torch_type: str
    """Type of the torch.device: "cuda" for HIP too."""
    dispatch_key: str
    """The dispatcher's name for tensors of these devices."""
    collectives: str
    """The process group's backend that communicates between these devices."""
    is_device = True
    """Work is queued on streams and timed by events; False: it is done when the call returns."""
    event_wait_module = ""
    """The module of torch's own `event_type.wait`; a function of another module is someone's replacement."""
    kernels_unasked: str | None = None
    """Why kernel records are read only where kernels='on'; None: wherever they can be had."""
    kernels_note: str | None = None
    """A caution about kernel records, for run.json."""
    queue_limit: QueueLimit | None = None
    memory: Any = torch.accelerator
    """The module with torch's functions memory_allocated, reset_peak_memory_stats, empty_cache, ..."""

    # Called once per collective, wait or step: attributes, so that callers can bind them.
    record: Callable[[Any, Any], None]
    """record(event, stream): the event passes when the stream comes to its present end."""
    wait_event: Callable[[Any, Any], None]
    """wait_event(event, stream): later work of the stream follows the event. Not seen by the recorder."""
    elapsed_ms: Callable[[Any, Any], float]
    """elapsed_ms(start, end) of two timing events that have passed."""
    handle_of: Callable[[Any], int]
    """The driver's handle of a stream of torch's."""
    current_raw_stream: Callable[[int], int]
    """The driver's handle of the caller's current stream on a device: equal for equal streams."""
    current_stream: Callable[[int], DeviceStream]
    """The caller's current stream on a device."""
    is_capturing: Callable[[], bool]
    """Returns True while the current stream is captured into a graph, which must not hold timing events."""
    holds: Callable[[Any], bool]
    """Returns True for tensors on such a device."""
    memory_of: Callable[[int], MemoryUse | None]
    """Memory of a device by index; None where torch's allocator is not in use."""
    current_index: Callable[[], int] = staticmethod(torch.accelerator.current_device_index)

    def memory_limit_bytes(self, index: int) -> int | None:
        """What this process may have of a device's memory; None where that is not known."""
        return None

    # -- which devices there are --------------------------------------------------------------------

    def is_available(self) -> bool:
        return torch.accelerator.is_available()

    def is_initialized(self) -> bool:
        """Return True where this process uses the devices already; asking does not start that."""
        raise NotImplementedError

    def count(self) -> int:
        return torch.accelerator.device_count()

    def device(self, index: int) -> torch.device:
        return torch.device(self.torch_type, index)

    def current_device(self) -> torch.device:
        return self.device(self.current_index())

    def device_in_use(self) -> torch.device | None:
        """The current device, in a process that uses one already."""
        return self.current_device() if self.is_available() and self.is_initialized() else None

    def set_device(self, device: torch.device) -> None:
        """Make it the current one of this thread."""
        torch.accelerator.set_device_index(device)

    def on_device(self, device: torch.device) -> AbstractContextManager[Any]:
        """Within it, the device is the current one of this thread."""
        return torch.accelerator.device_index(device.index)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait for all work of a device, by default of the current one."""
        torch.accelerator.synchronize(device)

    def index_of(self, tensor: torch.Tensor) -> int:
        """The index of the tensor's device, as `current_index` counts."""
        return tensor.get_device()

    def name(self, device: torch.device) -> str:
        raise NotImplementedError

    def properties(self, index: int) -> Any:
        """torch's properties of a device, with uuid and PCI address; asking initialises it."""
        raise NotImplementedError

    def describe(self, index: int) -> dict[str, Any]:
        """The device's entry in run.json; `kind`, `index` and `name` at least."""
        return {"kind": self.kind, "index": index, "name": self.name(self.device(index))}

    def reserved_bytes(self, index: int) -> int:
        """Bytes that torch's allocator holds on a device in this process."""
        raise NotImplementedError

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Memory of a device as its driver counts it, other processes' included."""
        return torch.accelerator.get_memory_info(device)

    # -- streams, events and time -------------------------------------------------------------------

    def clock(self, device: torch.device) -> MarkClock:
        return EventClock(device, self)

    def new_stream(self, device: torch.device, priority: int = 0) -> Any:
        """priority: lower runs first."""
        return torch.Stream(device, priority=priority)

    def stream_priorities(self) -> tuple[int, int]:
        """The least and the greatest priority of a stream: lower numbers run first."""
        return 0, 0

    def unpooled_stream(self, device: torch.device, priority: int) -> Any:
        """A stream that torch does not hand out to others, never destroyed. Raises InstrumentError."""
        raise InstrumentError(f"more streams than torch has cannot be made on {self.kind} devices; use fewer")

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which this thread's work is queued on the stream."""
        return stream  # type: ignore[no-any-return]

    def torch_stream(self, device: torch.device) -> Any:
        """torch's own object for the caller's current stream; begins to use the device."""
        return torch.accelerator.current_stream(device)

    def device_stream(self, stream: Any) -> DeviceStream:
        """A torch stream as the recorder uses it, with its handle looked up."""
        raise NotImplementedError

    def new_event(self, timing: bool = False) -> Any:
        """An event with torch's methods record, query, wait, synchronize and elapsed_time."""
        return torch.Event(self.torch_type, enable_timing=timing)

    def let_others_capture(self) -> None:
        """Let this thread ask about events while another captures a graph, whose capture that would end."""

    def capture(self, work: Callable[[], object], stream: Any) -> Any:
        """The work as a graph with a method `replay`, captured on the stream."""
        raise NotImplementedError

    def spin(self, cycles: int) -> None:
        """Keep the current stream busy for this many cycles of the device's clock, touching no memory."""
        raise NotImplementedError

    # -- what the recorder watches ------------------------------------------------------------------

    @property
    def event_type(self) -> Any:
        """The class whose `wait` makes a stream follow an event."""
        raise NotImplementedError

    @property
    def stream_type(self) -> Any:
        """The class whose `wait_event` makes a stream follow an event."""
        raise NotImplementedError

    @property
    def graph_type(self) -> Any | None:
        """The class whose capture_begin and capture_end bracket the capture of a graph."""
        return None

    def host_waits(self) -> Sequence[tuple[Any, str]]:
        """(owner, name) of the functions in which the host waits for the device."""
        return ()

    # -- other sources ------------------------------------------------------------------------------

    def kernel_records(self, device: torch.device) -> KernelRecords:
        """The driver's records of kernels, on and proved. Raises KernelRecordsUnavailable."""
        raise KernelRecordsUnavailable(f"kernel records of {self.kind} devices are not known")

    def profiler_activity(self) -> Any:
        """The activity by which torch.profiler traces the devices' kernels."""
        raise NotImplementedError

    def range_markers(self) -> Any:
        """An object with range_push(name) and range_pop(), which the vendor's profiler shows."""
        return None

    def rng_state(self) -> torch.Tensor:
        raise NotImplementedError

    def set_rng_state(self, state: torch.Tensor) -> None:
        raise NotImplementedError


class CpuBackend(Backend):
    """Work is done when the call returns: no streams, and the host's clock."""

    kind = "cpu"
    torch_type = "cpu"
    dispatch_key = "CPU"
    collectives = "gloo"
    is_device = False

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: torch.device | None = None) -> None:
        pass

    def name(self, device: torch.device) -> str:
        return "cpu"

    def clock(self, device: torch.device) -> MarkClock:
        return HostClock()

    def new_stream(self, device: torch.device, priority: int = 0) -> NoReturn:
        raise RuntimeError("the CPU has no streams")


CPU = CpuBackend()
_accelerator: Backend | None = None


def accelerator() -> Backend:
    """The devices that this torch is built for, present or not: the same object each time."""
    global _accelerator
    if _accelerator is None:
        _accelerator = _of_this_torch()
    return _accelerator


def backend_of(device: torch.device) -> Backend:
    """The backend of a device: the accelerator's, or the CPU's."""
    chosen = accelerator()
    return chosen if device.type == chosen.torch_type else CPU


def use(backend: Backend | None) -> Backend | None:
    """Replace the accelerator's backend, before anything asks for it; returns the one before. For tests.

    None: find torch's own anew.
    """
    global _accelerator
    before, _accelerator = _accelerator, backend
    return before


def _of_this_torch() -> Backend:
    """The backend in the file named as torch's accelerator, else in cuda.py, which copes with no device."""
    module_name = "aorta.device.cuda"
    if torch.version.cuda is None and torch.version.hip is None:  # or asking may begin to use the driver
        built_for = torch.accelerator.current_accelerator()
        if built_for is not None and importlib.util.find_spec(f"aorta.device.{built_for.type}") is not None:
            module_name = f"aorta.device.{built_for.type}"
    backend: Backend = importlib.import_module(module_name).backend()
    return backend
