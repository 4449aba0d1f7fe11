"""The Work that an intercepted collective returns: tells the observer who waits for it, or for its future.

TimedWork stands for one asynchronous call. C++ (DDP, torch's registry of works) may hold it, too, which
decides how long it has to live. DoneWork is the answer to all synchronous calls. FutureMethods follows the
futures that Python gets from a work, through `then` and `collect_all`.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import repeat
from typing import Any, Protocol
from weakref import ref

import msgspec
import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.record.interception.replaced import ReplacedMethods, left_uncompiled, uncompiled
from aorta.steps.notes import CollectiveCall

_Method = Callable[..., Any]
MANY_WORKS = 256
"""Number of works that nobody has asked yet from which on they are looked through."""
_keeps_works = c10d._allow_inflight_collective_as_graph_input
_registry_size: Callable[[], int] = getattr(c10d, "_get_work_registry_size", lambda: 1)
"""Returns the number of works that functional collectives started and nobody has waited for."""


Launch = Callable[[], Any]
"""Starts the call on the backend; returns its Work, or None where it ran on the caller's stream."""


class WorkListener(Protocol):
    """Is told of waits for works and for futures of works: an observer."""

    def wait(self, call: CollectiveCall, wait: _Method, *timeout: timedelta) -> Any:
        """Carry out `wait`, by which the caller's stream (CUDA) or thread (CPU) follows the call; note it."""

    def wait_beyond(self, calls: Sequence[CollectiveCall], wait: _Method) -> Any:
        """Carry out `wait` for what follows these calls, so that it may end later than they; note it."""

    def lost(self, calls: Sequence[CollectiveCall]) -> None:
        """Note calls that nobody in Python can wait for any more, and nobody was seen to."""


class Observer(Protocol):
    """Is told of every collective on one kind of device, and launches it."""

    def observe(
        self,
        group: ProcessGroup,
        op: str,
        tensors: Any,
        num_bytes: int,
        dtype: str,
        is_async: bool,
        launch: Launch,
        peer: int | None = None,
    ) -> Work:
        """Launch the call and return a work that behaves as the launched one."""

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        """Note that the backend numbered num_calls calls of its own, within a call of the program."""

    def coalescing_started(self, group: ProcessGroup) -> None:
        """Note that the calls from here on are members of one coalesced group."""

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        """Launch the coalesced group, as one call."""


class Kept(msgspec.Struct, eq=False, gc=False):
    """Holds the tensors of a call that the device may still read or write.

    Apart from the work, which may be dropped earlier, and whose results are dropped with it.
    """

    call: CollectiveCall
    tensors: Any


class TimedWork(Work):
    """A work in flight. Behaves as the work it wraps."""

    __slots__ = ("_inner", "_listener", "call", "in_flight", "stays_in_python")

    # C++ holds only the C++ half of this object. Were the Python half collected, a wait from
    # C++ would fall through to the base class, which nobody ever completes. So each object
    # keeps itself alive until it has been waited for, or asked anything from Python (whose
    # reference then does the keeping), or asked for its future, which is all that C++ keeps then.
    _alive: "set[TimedWork]" = set()
    _settle_at = MANY_WORKS
    """Number of works from which on they are looked through: twice as many as the last look left."""
    _shells: "set[TimedWork]" = set()
    """Works that ended, that nobody ever asked, and that C++ may still hold. Never looked through."""

    def __init__(self, inner: Work, call: CollectiveCall, listener: WorkListener, tensors: Any) -> None:
        Work.__init__(self)
        self._inner: Work | None = inner
        self.call = call
        self._listener: WorkListener | None = listener
        # Waiting from the probe stream made the inner work drop the tensors that it had stashed
        # for the allocator's sake. They must live until the caller's stream waits, as without us.
        self.in_flight = Kept(call, tensors)
        self.stays_in_python = False
        """True: only Python was given it, and C++ has it only if Python entered it in torch's registry."""
        TimedWork._alive.add(self)
        if len(TimedWork._alive) >= TimedWork._settle_at:
            TimedWork.settle_forgotten()

    @uncompiled
    def wait(self, *timeout: timedelta) -> bool:
        inner = self._inner
        if inner is None:
            TimedWork._shells.discard(self)
            return True  # settled: it had ended, and only C++ could still ask
        listener = self._listener
        if listener is None:
            return inner.wait(*timeout)
        result: bool = listener.wait(self.call, inner.wait, *timeout)
        self.in_flight.tensors = None
        TimedWork._alive.discard(self)
        return result

    @uncompiled
    def get_future(self) -> Any:
        assert self._inner is not None
        future = self._inner.get_future()
        listener = self._listener
        if listener is not None:
            self.call.future_taken = True
            promise(future, (self.call,), listener, itself=True)
        if not _keeps_works():  # else torch's registry has it too, for a wait that is still to come
            TimedWork._alive.discard(self)
        return future

    @classmethod
    def settle_forgotten(cls) -> None:
        """Drop the real works of those that have ended and that nobody in Python holds any more.

        Otherwise a script that never waits would keep the buffers of all its collectives.
        """
        registry_is_empty = _registry_size() == 0
        for work in list(cls._alive):
            inner = work._inner
            # Four references are ours: the set, the list, `work`, and getrefcount's argument.
            if inner is not None and sys.getrefcount(work) <= 4 and inner.is_completed():
                work._inner = work._listener = None
                work.in_flight.tensors = None
                cls._alive.discard(work)
                if not (work.stays_in_python and registry_is_empty):
                    cls._shells.add(work)
        cls._settle_at = max(MANY_WORKS, 2 * len(cls._alive))

    def stop_listening(self) -> None:
        """Only delegate from now on: the recorder is closing."""
        self._listener = None
        self.in_flight.tensors = None


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the real work's method of this name."""

    def method(self: TimedWork, *args: Any, **kwargs: Any) -> Any:
        TimedWork._alive.discard(self)
        return getattr(self._inner, name)(*args, **kwargs)

    method.__name__ = name
    return uncompiled(method)


for _name in dir(Work):
    if not _name.startswith("__") and _name not in {
        "boxed",
        "unbox",
        "wait",
        "get_future",
        "_pybind11_conduit_v1_",
    }:
        setattr(TimedWork, _name, _delegate(_name))


def _order(name: str) -> Callable[..., Any]:
    """Return a method that orders the caller's stream after the work, as wait() does on CUDA."""

    def method(self: TimedWork) -> None:
        assert self._inner is not None
        wait = getattr(self._inner, name)
        if self._listener is None:
            wait()
        else:
            self._listener.wait(self.call, wait)
        self.in_flight.tensors = None
        TimedWork._alive.discard(self)

    method.__name__ = name
    return uncompiled(method)


for _name in ("block_current_stream", "synchronize"):
    if hasattr(Work, _name):
        setattr(TimedWork, _name, _order(_name))


class DoneWork(Work):
    """The work of a synchronous collective: the caller's stream already follows it.

    Since torch 2.8 the backend returns no work there, but the dispatcher's schema wants one: always this
    one, and in the same box.
    """

    def __init__(self) -> None:
        super().__init__()
        self.boxed = repeat(super().boxed()).__next__  # type: ignore[method-assign]

    def wait(self, *timeout: timedelta) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None

    def exception(self) -> Any:
        return None


class FutureMethods:
    """Sees who waits for futures, by replacing their methods; `uninstall` puts the originals back."""

    def __init__(self) -> None:
        self._methods = ReplacedMethods(torch._C.Future)
        self._functions = ReplacedMethods(torch._C)

    def install(self) -> None:
        self._methods.replace("wait", self._wait)
        self._methods.replace("then", self._patched_then)
        self._functions.replace("_collect_all", self._collect_all)

    def uninstall(self) -> None:
        self._methods.restore()
        self._functions.restore()
        _promises.clear()

    def _wait(self, original: _Method) -> _Method:
        def wait(future: Any) -> Any:
            promised = _promises.get(id(future))
            if promised is None:
                return original(future)

            def follow() -> Any:
                return original(future)

            if promised.itself:
                result = promised.listener.wait(promised.calls[0], follow)
            else:
                result = promised.listener.wait_beyond(promised.calls, follow)
            promised.is_settled = True
            return result

        return wait

    def _patched_then(self, original: _Method) -> _Method:
        def then_kept(future: Any, callback: Callable[..., Any]) -> Any:
            following = original(future, callback)
            promised = _promises.get(id(future))
            if promised is not None:
                promised.is_settled = True
                promise(following, promised.calls, promised.listener)
            return following

        return then_kept

    def _collect_all(self, original: _Method) -> _Method:
        def collect_all(futures: Any) -> Any:
            futures = list(futures)
            together = original(futures)
            promises = [promised for future in futures if (promised := _promises.get(id(future))) is not None]
            for promised in promises:
                promised.is_settled = True
            if promises:
                calls = [call for promised in promises for call in promised.calls]
                promise(together, calls, promises[0].listener)
            return together

        return collect_all


class _Promise:
    """The calls that a future which Python holds stands for."""

    __slots__ = ("calls", "future", "is_settled", "itself", "listener")

    def __init__(
        self, future: "ref[Any]", calls: Sequence[CollectiveCall], listener: WorkListener, itself: bool
    ) -> None:
        self.future = future
        self.calls = calls
        self.listener = listener
        self.itself = itself
        """True: the future ends with its one call, and not after a callback that follows."""
        self.is_settled = False
        """True: somebody waited for it, or another future stands for the same calls."""


_promises: dict[int, _Promise] = {}
"""Promises by the id of the future's Python object, while that lives: it takes no attributes."""


@uncompiled
def promise(
    future: Any, calls: Sequence[CollectiveCall], listener: WorkListener, itself: bool = False
) -> None:
    """Take waits for this future as waits for these calls from now on."""
    key = id(future)
    _promises[key] = _Promise(ref(future, partial(_dropped, key)), calls, listener, itself)


@left_uncompiled  # Python calls it amid compiled code, too
def _dropped(key: int, _: Any) -> None:
    lost_promise = _promises.pop(key, None)
    if lost_promise is not None and not lost_promise.is_settled:
        lost_promise.listener.lost(lost_promise.calls)
