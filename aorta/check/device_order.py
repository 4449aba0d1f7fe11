"""Order and memory on a device, as torch's C++ tells of them: events, waits and synchronisations, also
those of NCCL, DDP's reducer and autograd, and the caching allocator's trace.

What is called here runs in the middle of torch's own calls, so it only appends to the log.
"""

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _gpu_trace as gpu_trace

from aorta.hazards.check import HOST
from aorta.record.interception.replaced import ReplacedMethods

LogEntry = Sequence[Any]
LOOK_AHEAD = 4096
"""Entries of the trace among which the next one of the log is looked for."""
HISTORY = 1_000_000
"""Entries of the allocator's trace that are kept; a window has tens of thousands."""

ROOM = 1 << 28
"""Bytes that must be free on a device before fingerprints take memory: twice what they need."""


class DeviceOrder:
    """Fills a log with what happens on this process's device while it listens."""

    def __init__(self, log: list[LogEntry], site: Callable[[str], int]) -> None:
        self._log = log
        self._site = site
        self.device = torch.cuda.current_device()
        self._callbacks: list[tuple[Any, Any]] = []
        self._our_history = False
        self._trace = trace_flag()
        self._was_traced = False
        self._queries = Queries(log)
        self.current = -1
        """Site of the operation in progress; -1 between operations."""
        self.is_in_collective = False
        """That operation is a collective."""
        self._aside = 0
        """Thread in which what happens is the check's own, not the program's."""
        self._pool = _own_pool(self.device)
        self._has_memory = False
        """The pool was used before, and keeps what it got."""
        self.is_listening = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within it this thread works for the check: nothing is logged, and memory is from a pool of the
        check's own. The allocator may then give the program what it would have given it."""
        self._aside, pool = threading.get_ident(), self._pool
        try:
            with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, self.device):
                yield
        finally:
            self._aside = 0

    @property
    def sees_memory(self) -> bool:
        """True if the allocator tells of its memory."""
        return self._pool is not None

    def has_room(self) -> bool:
        """True if fingerprints need not take memory that the program may want."""
        if self._pool is not None and not self._has_memory:
            self._has_memory = torch.cuda.mem_get_info(self.device)[0] >= ROOM
        return self._has_memory

    def stream(self) -> int:
        """Handle of the current stream; 0 is the default one."""
        handle: int = torch._C._cuda_getCurrentRawStream(self.device)
        return handle

    def listen(self) -> None:
        self._was_traced = self._trace.value
        torch._C._activate_gpu_trace()  # sets the flag once in a process
        self._trace.value = True
        log = self._log
        pairs: list[tuple[Any, Any]] = [
            (gpu_trace.EventRecordCallbacks, lambda e, s: log.append(("record", e, s, self.current))),
            (gpu_trace.EventWaitCallbacks, lambda e, s: log.append(("wait", s, e, self._place("wait")))),
            (gpu_trace.EventDeletionCallbacks, lambda e: log.append(("forget_event", e))),
            (gpu_trace.EventSynchronizationCallbacks, lambda e: log.append(("synchronize_event", e))),
            (gpu_trace.StreamSynchronizationCallbacks, self._synchronized),
            (gpu_trace.DeviceSynchronizationCallbacks, lambda: log.append(["synchronize_all"])),
            (gpu_trace.MemoryAllocationCallbacks, self._allocated),
            (gpu_trace.MemoryDeallocationCallbacks, self._freed),
        ]
        for registry, callback in pairs:
            registry.add_callback(callback)
            self._callbacks.append((registry, callback))
        is_recorded = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
        if self._pool is not None and not is_recorded():  # else it is the program's own, and read as it is
            torch.cuda.memory._record_memory_history(
                "all", context=None, stacks="python", max_entries=HISTORY, clear_history=True
            )
            self._our_history = True
        self._queries.listen()
        self.is_listening = True

    def stop(self) -> None:
        """Stop listening, and put sizes and deferred frees of the allocator's trace into the log."""
        self.is_listening = False
        self._trace.value = self._was_traced
        self._queries.stop()
        for registry, callback in self._callbacks:
            registry.callback_list.remove(callback)
        self._callbacks.clear()
        traces = [] if self._pool is None else torch.cuda.memory._snapshot()["device_traces"]
        if self._our_history:
            torch.cuda.memory._record_memory_history(None)
            self._our_history = False
        self._log[:] = completed(self._log, traces[self.device] if self.device < len(traces) else [])

    def _place(self, name: str) -> int:
        return self.current if self.current >= 0 else self._site(name)

    def _synchronized(self, stream: int) -> None:
        if self._aside != threading.get_ident():
            self._log.append(["synchronize", stream])

    def _allocated(self, address: int) -> None:
        if self._aside != threading.get_ident():
            site = self.current if self.current >= 0 else None
            self._log.append(("allocate", address, 0, None, site))

    def _freed(self, address: int) -> None:
        if self._aside != threading.get_ident():
            # In a collective's call c10d drops what earlier ones used: its watchdog has seen them end.
            self._log.append(("free", address, self._site("free"), None, self.is_in_collective))


@lru_cache
def _own_pool(device: int) -> Any:
    """The check's pool of memory on a device; None where the allocator has neither pools nor a trace, as
    cudaMallocAsync.

    It is never given back: torch ends the process where one is dropped while another is in use, or while a
    graph is captured. A program that runs out of memory gets what is free in it, if this torch can do that.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    can_share = "use_on_oom" in inspect.signature(torch.cuda.MemPool).parameters
    pool = torch.cuda.MemPool(use_on_oom=True) if can_share else torch.cuda.MemPool()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


def trace_flag() -> Any:
    """torch's own flag of whether it calls Python for each event, allocation and free.

    torch switches it on for good. Without a listener each of them still takes the GIL and comes to Python, so
    the flag is put back behind a window. A stand-in where this torch has none: it then stays on.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_bool.in_dll(library, "_ZN3c104impl8GPUTrace9haveStateE")
    except (OSError, ValueError):
        return ctypes.c_bool(True)


class Queries:
    """Logs queries that say done: the host then follows an event, or a stream, without a wait."""

    def __init__(self, log: list[LogEntry]) -> None:
        self._log = log
        self._methods = [ReplacedMethods(torch.cuda.Event), ReplacedMethods(torch.cuda.Stream)]

    def listen(self) -> None:
        events, streams = self._methods
        events.replace("query", self._asking("synchronize_event", "cuda_event"))
        streams.replace("query", self._asking("synchronize", "cuda_stream"))

    def stop(self) -> None:
        for methods in self._methods:
            methods.restore()

    def _asking(self, name: str, handle: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def query(asked: Any) -> bool:
                is_done: bool = original(asked)
                if is_done:
                    self._log.append([name, getattr(asked, handle)])
                return is_done

            return query

        return make


def completed(log: list[LogEntry], trace: list[dict[str, Any]]) -> list[LogEntry]:
    """The log with sizes of allocations, and of frees the stream and whether the allocator waits for users of
    the memory, from the allocator's trace: both have them in the same order.

    Allocations that the trace does not have are left out.
    """
    whole: list[LogEntry] = []
    at = 0
    told = [(event["action"], event["addr"]) for event in trace]
    for entry in log:
        if entry[0] in ("allocate", "free") and entry[3] != HOST:
            wanted = "alloc" if entry[0] == "allocate" else "free_requested", entry[1]
            try:
                found = told.index(wanted, at, at + LOOK_AHEAD)
            except ValueError:
                if entry[0] != "free":
                    continue
            else:
                at = found + 1
                event = trace[found]
                if entry[0] == "allocate":
                    entry = ["allocate", entry[1], event["size"], event["stream"], entry[4]]
                else:  # freed as soon as it was asked for, or there are streams to wait for
                    waits = entry[4] or told[at : at + 1] != [("free_completed", entry[1])]
                    entry = ["free", entry[1], entry[2], event["stream"], waits]
        whole.append(entry)
    return whole
