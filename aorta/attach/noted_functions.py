"""Functions of a module, and methods of a class, whose calls are noted for a step.

What stands in for one is equal to it, so that tables by function find it, is pickled as what it stands for,
and does nothing but call that once the step has ended: a program may keep it. In the process and the thread
alone that began the step calls are noted, and none of what libraries trace, nor of subclasses and modes that
have torch's calls for themselves: for these the originals are put back while the call lasts.
"""

import os
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType, MethodType
from typing import Any

import torch
from torch.jit import _builtins

PLAIN = (torch.Tensor, torch.nn.Parameter)
_MISSING = object()
Note = Callable[[str, tuple[Any, ...], dict[str, Any], Any, int, FrameType], None]
"""Called behind a call, with its name, arguments, result, ns and caller."""


class _Noted:
    """Stands in for a function."""

    def __init__(self, functions: "NotedFunctions", name: str, original: Callable[..., Any]) -> None:
        self._functions, self._name, self._original = functions, name, original
        self.__wrapped__, self.__doc__ = original, original.__doc__
        self.__module__ = getattr(original, "__module__", "torch")
        self.__name__ = getattr(original, "__name__", name)
        self.__qualname__ = getattr(original, "__qualname__", name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self._functions.is_noting():
            return self._original(*args, **named)
        out = named.get("out")
        if not _is_plain(args[0] if args else named.get("input")) or not (out is None or _is_plain(out)):
            return self._functions.aside(self._original, args, named)
        began_ns = time.perf_counter_ns()
        found = self._original(*args, **named)
        ns = time.perf_counter_ns() - began_ns
        with suppress(Exception):  # nothing is said of it
            self._functions.note(self._name, args, named, found, ns, sys._getframe(1))
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._original, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        is_method = isinstance(self._functions.owner, type)
        return self if instance is None or not is_method else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(self._original == other)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> Any:
        owner = self._functions.owner
        place = (
            f"{owner.__module__}:{owner.__qualname__}." if isinstance(owner, type) else f"{owner.__name__}:"
        )
        return pkgutil.resolve_name, (f"{place}{self._name}",)

    def __repr__(self) -> str:
        return repr(self._original)


class NotedFunctions:
    """Of one owner, a module or a class."""

    def __init__(self, owner: Any, names: Iterable[str], note: Note) -> None:
        self.owner, self._names, self.note = owner, tuple(names), note
        self._put_on: dict[str, tuple[_Noted, Any]] = {}
        """With what the owner itself had by this name, while a step is noted."""
        self._thread = self._process = 0

    def begin(self) -> None:
        self._thread, self._process = threading.get_ident(), os.getpid()
        for name in self._names:
            # What a program kept of another step, and has put back since, is what it stands for.
            original = _original_of(getattr(self.owner, name))
            own = _original_of(vars(self.owner).get(name, _MISSING))
            noted = _Noted(self, name, original)
            self._put_on[name] = noted, own
            setattr(self.owner, name, noted)
            if operator := _builtins._find_builtin(original):  # what is scripted meanwhile
                _builtins._get_builtin_table()[id(noted)] = operator

    def end(self) -> bool:
        """Put everything back. True where a step was noted."""
        put_on, self._put_on = self._put_on, {}
        for name, (noted, own) in put_on.items():
            _put_back(self.owner, name, noted, own)
            _builtins._get_builtin_table().pop(id(noted), None)
        return bool(put_on)

    def is_noting(self) -> bool:
        return (
            bool(self._put_on)
            and threading.get_ident() == self._thread
            and os.getpid() == self._process
            and not torch.compiler.is_compiling()
            and not torch._C._is_tracing()
        )

    def aside(self, original: Callable[..., Any], args: Any, named: Any) -> Any:
        """Call it with the originals where torch looks for them."""
        for name, (noted, own) in self._put_on.items():
            _put_back(self.owner, name, noted, own)
        try:
            return original(*args, **named)
        finally:
            for name, (noted, own) in self._put_on.items():
                if vars(self.owner).get(name, _MISSING) is own:
                    setattr(self.owner, name, noted)


def _original_of(function: Any) -> Any:
    return function._original if isinstance(function, _Noted) else function


def _put_back(owner: Any, name: str, noted: _Noted, own: Any) -> None:
    """Not where the program has put its own there meanwhile."""
    if vars(owner).get(name) is not noted:
        return
    if own is _MISSING:
        delattr(owner, name)  # it is the base class's
    else:
        setattr(owner, name, own)


def _is_plain(first: Any) -> bool:
    """Whether torch has the call for itself: of strided tensors, with no mode around it."""
    is_plain = torch._C._len_torch_function_stack() == 0 and type(first) in PLAIN
    return is_plain and first.layout is torch.strided and not first.is_nested
