"""A set of streams to submit work to: the device's own, or worker threads where there is no device.

`make_streams` gives either. Both keep the rules that matter to a program over streams: work of one stream
runs in order, work of two streams in any order, and an event captures what a stream held *when it was
recorded*, so that a later wait on the event does not wait for what was submitted after the record.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aorta.device.backend import backend_of

MAIN = -1
"""Index of the stream that a program forks from and joins into: on a device the caller's current one."""
POOL_SIZE = 32
"""Streams that torch hands out in turn, for each priority."""
RESERVED = 8
"""Streams of torch's pool that kept_streams leaves to process groups."""


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

    kind: str
    """The device's kind, "threads" where there is none."""

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
        """Milliseconds between two timing events that have both passed."""
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
    return kept_streams(num, device)


class ThreadStreams:
    """One worker thread per stream, MAIN included: a stand-in whose orderings are real and whose speed says
    nothing about a GPU."""

    kind = "threads"

    def __init__(self, num: int) -> None:
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


class ThreadEvent:
    """Passes when its thread reaches it."""

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


class DeviceStreams:
    """Streams of a device, all different; MAIN is the stream current at construction."""

    def __init__(self, num: int, device: torch.device, priorities: Sequence[int] = ()) -> None:
        """`priorities`: one per stream, lower runs first; default 0."""
        self._backend = backend_of(device)
        self.kind: str = self._backend.kind
        self.device = device
        self.main = self._backend.torch_stream(device)
        self.streams: list[Any] = []
        handle_of = self._backend.handle_of
        in_use = {handle_of(self.main)}
        for index in range(num):
            stream = _distinct_stream(device, priorities[index] if priorities else 0, in_use)
            in_use.add(handle_of(stream))
            self.streams.append(stream)

    def __len__(self) -> int:
        return len(self.streams)

    def raw(self, stream: int) -> Any:
        """The torch stream itself."""
        return self.main if stream == MAIN else self.streams[stream]

    def submit(self, stream: int, work: Callable[[], object]) -> None:
        with self._backend.on_stream(self.raw(stream)):
            work()

    def record(self, stream: int, timing: bool = False) -> StreamEvent:
        event: Any = self._backend.new_event(timing)
        event.record(self.raw(stream))
        result: StreamEvent = event
        return result

    def wait(self, stream: int, event: StreamEvent) -> None:
        self.raw(stream).wait_event(event)

    def elapsed_ms(self, start: StreamEvent, end: StreamEvent) -> float:
        ms: float = start.elapsed_time(end)  # type: ignore[attr-defined]
        return ms

    def synchronize(self) -> None:
        self._backend.synchronize(self.device)

    def close(self) -> None:
        self.streams.clear()


_pooled: dict[torch.device, dict[int, Any]] = {}
"""Streams that kept_streams has made, by device, then by the driver's handle."""


def kept_streams(num: int, device: torch.device) -> DeviceStreams:
    """Streams of priority 0, made once per process and lent again and again; MAIN is the
    caller's current one.

    torch hands out 32 streams per priority in turn, to process groups as well. Whoever makes new ones for
    every measurement gets, after a while, the very stream that a process group communicates on, and what is
    put there can no longer overlap with that communication. The same streams for every caller, so that
    callers must take turns. More streams than torch has beside those of process groups are made by the
    runtime.
    """
    streams = DeviceStreams(0, device)
    avoid = {backend_of(device).handle_of(streams.main)}
    streams.streams += [_kept_stream(number, device, avoid) for number in range(num)]
    return streams


def _kept_stream(number: int, device: torch.device, avoid: set[int]) -> Any:
    """The stream of that number among those that are not to be avoided."""
    backend = backend_of(device)
    pool = _pooled.setdefault(device, {})
    usable = [stream for handle, stream in pool.items() if handle not in avoid]
    while len(usable) <= number:
        if len(pool) < POOL_SIZE - RESERVED:
            stream = _distinct_stream(device, 0, {*pool, *avoid})
        else:
            stream = backend.unpooled_stream(device, 0)
        pool[backend.handle_of(stream)] = stream
        usable.append(stream)
    return usable[number]


def _distinct_stream(device: torch.device, priority: int, in_use: Collection[int]) -> Any:
    """A stream whose handle is not in use: from torch's pool, else one made by the runtime itself.

    The pool hands its streams out in turn: after POOL_SIZE of them it would alias silently.
    """
    backend = backend_of(device)
    for _ in range(POOL_SIZE + 1):
        stream = backend.new_stream(device, priority)
        if backend.handle_of(stream) not in in_use:
            return stream
    return backend.unpooled_stream(device, priority)


@dataclass(frozen=True)
class Anchor:
    """An instant that the streams' events and the host's clock share."""

    event: StreamEvent
    """A timing event of MAIN."""
    host_ns: int
    """Time at which it passed, on time.perf_counter_ns."""
    error_ns: int
    """Largest error of host_ns."""


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
