"""Sees who waits for the futures of collectives.

`work.get_future()` gives a future of torch's C++, whose Python methods are replaced here as those of process
groups are. A future made from one of a collective (`then`, `collect_all`) stands for the same collectives.
C++ code that takes a future (DDP's reducer, a communication hook's result) waits unseen: where Python lets
go of a future that nobody waited for, the journal is told, and the step says that it does not know, unless
the end of backward accounts for it (aorta.recording.interception.stalls).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch

from aorta.recording.calls import CollectiveCall
from aorta.recording.interception.replaced import ReplacedMethods
from aorta.recording.interception.uncompiled import uncompiled

_Method = Callable[..., Any]


class FutureListener(Protocol):
    def wait(self, call: CollectiveCall, wait: _Method) -> Any:
        """Let `wait` make the caller's stream (CUDA) or thread (CPU) follow the call, and note it."""

    def wait_beyond(self, calls: Sequence[CollectiveCall], wait: _Method) -> Any:
        """The same of what follows these calls, and ends when `wait` has been carried out."""

    def lost(self, calls: Sequence[CollectiveCall]) -> None:
        """Nobody in Python can wait for these any more, and nobody was seen to."""


class _Promise:
    """What a future that Python holds stands for."""

    __slots__ = ("calls", "future", "is_settled", "itself", "listener")

    def __init__(
        self, future: "ref[Any]", calls: Sequence[CollectiveCall], listener: FutureListener, itself: bool
    ) -> None:
        self.future = future
        self.calls = calls
        self.listener = listener
        self.itself = itself
        """It ends with its one call, and not after something that follows."""
        self.is_settled = False
        """Somebody waited for it, or another future stands for the same calls."""


_promises: dict[int, _Promise] = {}
"""By the id of the future's Python object, as long as that lives: it has no attributes of its own."""


def promise(
    future: Any, calls: Sequence[CollectiveCall], listener: FutureListener, itself: bool = False
) -> None:
    """From now on waits for this future are waits for these calls."""
    key = id(future)

    def dropped(_: Any) -> None:
        lost_promise = _promises.pop(key, None)
        if lost_promise is not None and not lost_promise.is_settled:
            lost_promise.listener.lost(lost_promise.calls)

    _promises[key] = _Promise(ref(future, dropped), calls, listener, itself)


class FutureMethods:
    """Replaces methods of torch's futures; `uninstall` puts the originals back."""

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


uncompiled(promise)
