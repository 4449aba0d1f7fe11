"""A set of streams to submit work to: the device's own, or worker threads where there is no device.

`make_streams` gives either, for queues and host programs. Both keep the rules that matter to a program over
streams: work of one stream runs in order, work of two streams in any order, and an event captures what a
stream held *when it was recorded*, so that a later wait on the event does not wait for what was submitted
after the record.
"""

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from aorta.errors import InstrumentError

MAIN = -1
"""Index of the stream that a program forks from and joins into: on a device the caller's current one."""

_POOL_SIZE = 32
"""Streams per priority in torch's pool."""
_RESERVED = 8
"""Streams of the pool left to process groups."""

_pooled: dict[tuple[torch.device, int], dict[int, Any]] = {}
"""(device, priority) -> handle -> stream that `kept_streams` lends."""
_handles_apart: set[int] = set()
"""Handles of the streams that `stream_apart` has given away."""


class StreamEvent(Protocol):
    """A point in a stream: passes when the work before it is done."""

    def query(self) -> bool:
        """Return True once the work before it is done."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for it."""
        ...


class Streams(Protocol):
    """`len(streams)` streams, numbered from 0, and MAIN."""

    kind: Literal["cuda", "hip", "threads"]

    def __len__(self) -> int: ...

    def submit(self, stream: int, work: Callable[[], object]) -> None:
        """Appends `work` to the stream. On a device `work` is called at once, to launch, with the stream
        current; on threads it runs when the stream reaches it, and what it raises comes out of synchronize.
        """
        ...

    def record(self, stream: int, timing: bool = False) -> StreamEvent:
        """An event at the stream's present end."""
        ...

    def wait(self, stream: int, event: StreamEvent) -> None:
        """Make later work of the stream follow the event. The host does not wait."""
        ...

    def elapsed_ms(self, start: StreamEvent, end: StreamEvent) -> float:
        """Time between two timing events that have both passed."""
        ...

    def synchronize(self) -> None:
        """Wait for everything submitted; raises what failed."""
        ...

    def close(self) -> None:
        """Ends threads; a device's streams live as long as something names them."""
        ...


def make_streams(num: int, device: torch.device) -> Streams:
    """Streams of the device, lent as kept_streams does; threads where it is the CPU."""
    if device.type == "cpu":
        return ThreadStreams(num)
    return kept_streams([0] * num, device)


def kept_streams(priorities: Sequence[int], device: torch.device) -> "DeviceStreams":
    """One stream per priority, lower runs first, made once per process and lent again and again; MAIN is the
    caller's current one.

    torch hands out 32 streams per priority in turn, to process groups as well. Whoever makes new ones for
    every measurement gets, after a while, the very stream that a process group communicates on, and what is
    put there can no longer overlap with that communication. The same streams for every caller, so that
    callers must take turns. More streams than torch has beside those of process groups are made by the
    runtime.
    """
    streams = DeviceStreams(0, device)
    lent: dict[int, int] = {}
    for priority in priorities:
        number = lent.get(priority, 0)
        avoid = {streams.main.cuda_stream, *_handles_apart}
        streams.streams.append(_kept_stream(number, priority, device, avoid))
        lent[priority] = number + 1
    return streams


def stream_apart(device: torch.device) -> torch.cuda.Stream:
    """A stream that kept_streams neither lends nor has lent; for a caller that keeps it."""
    in_use = {handle: None for streams in _pooled.values() for handle in streams} | dict.fromkeys(
        _handles_apart
    )
    stream: torch.cuda.Stream = _distinct_stream(device, 0, in_use, 0)
    _handles_apart.add(stream.cuda_stream)
    return stream


def _kept_stream(number: int, priority: int, device: torch.device, avoid: set[int]) -> Any:
    pool = _pooled.setdefault((device, priority), {})
    usable = [stream for handle, stream in pool.items() if handle not in avoid]
    while len(usable) <= number:
        if len(pool) < _POOL_SIZE - _RESERVED:
            stream = _distinct_stream(device, priority, {**pool, **dict.fromkeys(avoid)}, 0)
        else:
            stream = _created_stream(device, priority)
        pool[stream.cuda_stream] = stream
        usable.append(stream)
    return usable[number]


class DeviceStreams:
    """Streams of a CUDA or HIP device; MAIN is the stream current at construction."""

    def __init__(self, num: int, device: torch.device, priorities: Sequence[int] = ()) -> None:
        """`priorities`: one per stream, lower runs first, as torch.cuda.Stream takes them; default 0."""
        self.kind: Literal["cuda", "hip", "threads"] = "hip" if torch.version.hip else "cuda"
        self.device = device
        self.main = torch.cuda.current_stream(device)
        # torch's pool hands the same 32 streams out in turn: more than that would alias silently.
        distinct: dict[int, Any] = {}
        self.streams: list[Any] = []
        for index in range(num):
            priority = priorities[index] if priorities else 0
            stream = _distinct_stream(device, priority, distinct, self.main.cuda_stream)
            distinct[stream.cuda_stream] = stream
            self.streams.append(stream)

    def __len__(self) -> int:
        return len(self.streams)

    def raw(self, stream: int) -> torch.cuda.Stream:
        """The torch stream itself."""
        result: torch.cuda.Stream = self.main if stream == MAIN else self.streams[stream]
        return result

    def submit(self, stream: int, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self.raw(stream)):
            work()

    def record(self, stream: int, timing: bool = False) -> StreamEvent:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(self.raw(stream))
        return event

    def wait(self, stream: int, event: StreamEvent) -> None:
        self.raw(stream).wait_event(event)  # type: ignore[arg-type]

    def elapsed_ms(self, start: StreamEvent, end: StreamEvent) -> float:
        ms: float = start.elapsed_time(end)  # type: ignore[attr-defined]
        return ms

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.streams.clear()


def _distinct_stream(device: torch.device, priority: int, in_use: dict[int, Any], main: int) -> Any:
    """A stream that is not in use: from torch's pool, else made by the runtime."""
    for _ in range(33):
        stream = torch.cuda.Stream(device, priority=priority)
        if stream.cuda_stream not in in_use and stream.cuda_stream != main:
            return stream
    return _created_stream(device, priority)


def _created_stream(device: torch.device, priority: int) -> Any:
    """A stream made by the runtime, outside of torch's pool.

    It is never destroyed: the allocator may remember it.
    """
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


class ThreadEvent:
    """An event of ThreadStreams: passes when its thread reaches it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.passed_ns = 0

    def reach(self) -> None:
        self.passed_ns = time.perf_counter_ns()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


class ThreadStreams:
    """One worker thread per stream, MAIN included, in place of a device.

    Orderings are real; speed says nothing about a GPU.
    """

    def __init__(self, num: int) -> None:
        self.kind: Literal["cuda", "hip", "threads"] = "threads"
        self._num = num
        self._errors: list[BaseException] = []
        self._queues: dict[int, queue.SimpleQueue[Callable[[], object] | None]] = {
            index: queue.SimpleQueue() for index in (MAIN, *range(num))
        }
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True, name=f"stream {index}")
            for index, work in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return self._num

    def _run(self, pending: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
        while (work := pending.get()) is not None:
            try:
                work()
            except BaseException as error:  # events must still pass, or everybody would hang
                self._errors.append(error)

    def submit(self, stream: int, work: Callable[[], object]) -> None:
        self._queues[stream].put(work)

    def record(self, stream: int, timing: bool = False) -> StreamEvent:
        event = ThreadEvent()
        self._queues[stream].put(event.reach)
        return event

    def wait(self, stream: int, event: StreamEvent) -> None:
        self._queues[stream].put(event.synchronize)

    def elapsed_ms(self, start: StreamEvent, end: StreamEvent) -> float:
        ns: int = end.passed_ns - start.passed_ns  # type: ignore[attr-defined]
        return ns / 1e6

    def synchronize(self) -> None:
        for event in [self.record(index) for index in self._queues]:
            event.synchronize()
        if self._errors:
            error, self._errors = self._errors[0], []
            raise error

    def close(self) -> None:
        for pending in self._queues.values():
            pending.put(None)
        for thread in self._threads:
            thread.join(timeout=10)


@dataclass(frozen=True)
class Anchor:
    """An instant known on both the streams' events and the host's clock."""

    event: StreamEvent
    """A timing event of MAIN."""
    host_ns: int
    """time.perf_counter_ns when it passed."""
    error_ns: int
    """How far that may be off."""


def anchor(streams: Streams) -> Anchor:
    """The tightest of some tries; the host waits. The streams must be idle.

    A device's event passes between its record and the moment the host sees it passed.
    """
    best: Anchor | None = None
    for _ in range(5):
        before_ns = time.perf_counter_ns()
        event = streams.record(MAIN, timing=True)
        if isinstance(event, ThreadEvent):
            event.synchronize()
            return Anchor(event, event.passed_ns, 0)
        while not event.query():
            pass
        after_ns = time.perf_counter_ns()
        if best is None or after_ns - before_ns < 2 * best.error_ns:
            best = Anchor(event, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
    assert best is not None
    return best


# -- functions of the runtime that torch has loaded ----------------------------------------------------


def runtime() -> tuple[str, str]:
    """(library, prefix of its functions' names) of the runtime that torch is built for."""
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
        with contextlib.suppress(OSError):
            function = getattr(ctypes.CDLL(path), name, None)
            if function is not None:
                return function
    return None


def mapped_files() -> list[str]:
    """Shared libraries that the process has loaded; opening one again gives the same copy."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if ".so" in line))
