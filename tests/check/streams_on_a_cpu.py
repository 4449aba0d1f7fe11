"""Streams, events and an allocator for a CPU. FSDP2 asks torch.cpu for streams, and gets some here that tell
the check what they are asked for: what it orders, and what it does not, is then known without a device."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.check import watch as watch_module
from aorta.check.watch import HazardWatch
from aorta.hazards.findings import Checked, read_checked

PLAIN = (torch.Tensor, torch.nn.Parameter)


class Order:
    """In the place of DeviceOrder: it logs what streams and events are asked for, and memory by its life."""

    last: "Order | None" = None

    def __init__(self, log: list[Any], site: Callable[[str], int]) -> None:
        self._log, self.site = log, site
        self.current, self.is_in_collective, self.is_listening = -1, False, False
        Order.last = self

    def stream(self) -> int:
        return Stream.current.handle

    sees_memory = True

    def has_room(self) -> bool:
        return True

    def aside(self) -> nullcontext[None]:
        return nullcontext()

    def listen(self) -> None:
        self.is_listening = True
        self._memory = Memory(self)
        self._memory.__enter__()

    def stop(self) -> None:
        self._memory.__exit__(None, None, None)
        self.is_listening = False

    @staticmethod
    def tell(*entry: Any) -> None:
        order = Order.last
        if order is not None and order.is_listening:
            order._log.append(list(entry))


class Event:
    numbers = count(1)

    def __init__(self) -> None:
        self.number = next(Event.numbers)

    def record(self, stream: "Stream | None" = None) -> None:
        Order.tell("record", self.number, (stream or Stream.current).handle)

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or Stream.current).wait_event(self)

    def synchronize(self) -> None:
        Order.tell("synchronize_event", self.number)


class Stream:
    handles = count()
    current: "Stream"

    def __init__(self, priority: int = 0) -> None:
        self.handle = next(Stream.handles)
        self._outer: list[Stream] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if Order.last is not None:
            Order.tell("wait", self.handle, event.number, Order.last.site("wait"))

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> None:
        self._outer.append(Stream.current)
        Stream.current = self

    def __exit__(self, *_: object) -> None:
        Stream.current = self._outer.pop()


Stream.current = Stream()


class Memory(TorchDispatchMode):
    """Tells of each storage when it first appears, and when it is gone or empty, of the stream it is from."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented
        self._look()
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor.untyped_storage())
        return result

    def _look(self) -> None:
        for key, (reference, address, stream) in list(self._live.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None or storage.data_ptr() != address:
                del self._live[key]
                self._order._log.append(["free", address, self._order.site("free"), stream, False])

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live and storage.nbytes():
            stream = self._order.stream()
            self._live[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), stream
            entry = ["allocate", storage.data_ptr(), storage.nbytes(), stream, self._order.current]
            self._order._log.append(entry)


def install() -> None:
    """Give this process streams, for good."""
    torch.cpu.Stream, torch.cpu.Event, torch.cpu.stream = Stream, Event, lambda stream: stream
    torch.cpu.current_stream = lambda device=None: Stream.current
    torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = lambda: True, lambda: False
    torch.cuda.current_stream, torch.cuda.stream = lambda: Stream.current, lambda stream: stream
    torch.Tensor.is_cuda = True
    watch_module.DeviceOrder = Order


def watched(step: Callable[[], None], folder: Path, rank: int, num_steps: int = 4) -> Checked:
    """What the check finds in steps 2 and 3."""
    watch = HazardWatch(every=100, confirm=False)
    watch.opened(SimpleNamespace(output_dir=folder, rank=rank, world_size=2, store_prefix=""))
    for number in range(num_steps):
        watch.step_begins(number)
        step()
    watch.closing(None)
    return next(checked for checked in read_checked(folder) if checked.rank == rank)
