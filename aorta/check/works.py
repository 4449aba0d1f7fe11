"""Waits for asynchronous collectives on the CPU, whose order no device tells.

Each such collective is a stream of its own in the log, since gloo runs them in no order. The host follows it
from where somebody waits for its work, sees it completed or takes its future, which may be waited for unseen.
"""

import os
import sys
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import Work

from aorta.record.interception.replaced import ReplacedMethods
from aorta.record.interception.works import TimedWork

AUTOGRAD = os.path.join("torch", "autograd", "graph.py")
WAITS = ("wait", "synchronize", "block_current_stream")


class Works:
    """Works in flight, by their Python object."""

    def __init__(
        self,
        log: list[list[Any]] | None,
        waited: Callable[[Hashable], None],
        promised: Callable[[Hashable, bool], None],
    ) -> None:
        """log: gets the host's waits; None on a device, which tells of them itself.

        waited: told of each wait, with the collective's stream; promised: of each future that is taken, and
        whether it is C++ that took it.
        """
        self._promised = promised
        self._log = log
        self._waited = waited
        self._works: dict[int, tuple[Any, Hashable]] = {}
        self._of_tensor: dict[int, Hashable] = {}
        """Streams of functional collectives, whose output is waited for, by its address."""
        self._methods = [ReplacedMethods(Work), ReplacedMethods(TimedWork)]
        self._num = 0
        self._finished: list[Any] = []
        """Works of synchronous collectives, which their callers wait for once more."""

    def listen(self) -> None:
        for methods, owner in zip(self._methods, (Work, TimedWork), strict=True):
            makers = {"is_completed": self._asking, "get_future": self._promising}
            for name, make in (dict.fromkeys(WAITS, self._following) | makers).items():
                if name in vars(owner):
                    methods.replace(name, _named(name, make))

    def stop(self) -> None:
        for methods in self._methods:
            methods.restore()
        self._works.clear()
        self._finished.clear()
        self._of_tensor.clear()

    def stream(self) -> Hashable:
        """Stream of the collective that is about to be issued."""
        self._num += 1
        return f"collective {self._num}"

    def issued(self, stream: Hashable, result: Any, outputs: list[int], is_from_python: bool) -> bool:
        """Note what stands for the collective: its work, or the addresses of its outputs.

        False where waits for it cannot be seen: C++ issued it, and holds a work of its own.
        """
        boxed = result[-1] if isinstance(result, tuple) else result
        try:
            work = Work.unbox(boxed)
        except (TypeError, RuntimeError):
            self._of_tensor.update(dict.fromkeys(outputs, stream))
            return True
        if not is_from_python and not isinstance(work, TimedWork):
            return False
        self._works[id(work)] = (work, stream)
        return True

    def finish(self, result: Any) -> None:
        """Wait for what a synchronous collective returned: gloo returns before it has ended."""
        boxed = result[-1] if isinstance(result, tuple) else result
        try:
            work = Work.unbox(boxed)
        except (TypeError, RuntimeError):
            return  # of a functional one, which is waited for by its output
        self._finished.append(work)  # the caller gets it from C++, which keeps one half of it alone
        work.wait()

    def waited_for_tensor(self, address: int) -> None:
        stream = self._of_tensor.pop(address, None)
        if stream is not None:
            self._note(stream)

    def is_done(self, stream: Hashable) -> bool | None:
        """True if the collective has ended; None where its work is not known any more."""
        for work, of_work in self._works.values():
            if of_work == stream:
                return bool(getattr(work, "_inner", work).is_completed())
        return None

    def _follow(self, work: Any) -> None:
        known = self._works.pop(id(work), None)
        if known is not None:
            self._note(known[1])

    def _note(self, stream: Hashable) -> None:
        if self._log is not None:
            self._log.append(["synchronize", stream])
        self._waited(stream)

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            self._follow(work)
            return result

        return method

    def _promising(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            known = self._works.pop(id(work), None)
            if known is not None:
                self._promised(known[1], _is_cpp(sys._getframe().f_back))
                if self._log is not None:
                    self._log.append(["synchronize", known[1]])  # whoever waits for the future is not seen
            return original(work)

        return get_future

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def is_completed(work: Any) -> bool:
            done: bool = original(work)
            if done:
                self._follow(work)
            return done

        return is_completed


def _is_cpp(caller: FrameType | None) -> bool:
    """True for the frame in which C++ asks, in the middle of a backward pass: DDP's reducer does."""
    return caller is None or caller.f_code.co_filename.endswith(AUTOGRAD)


def _named(name: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make replacements whose code has the method's name.

    C++ asks a work that was made in Python for a method of this name in Python, unless that is what calls it,
    which pybind11 tells by the name of the caller's code. Else a call of the original would come back.
    """

    def make_named(original: Any) -> Any:
        replacement = make(original)
        replacement.__code__ = replacement.__code__.replace(co_name=name)
        return replacement

    return make_named
