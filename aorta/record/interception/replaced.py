"""Replaces methods of a class, or functions of a module, for a while, and hides them from torch.compile."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

try:
    # The interface in C: torch.compile's own modules take a second to load, and most runs never need them.
    from torch._C._dynamo import eval_frame as _frames

    _SKIP, _DEFAULT = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
except (ImportError, AttributeError):
    _frames = None  # type: ignore[assignment]


def left_uncompiled(function: F, with_called: bool = True) -> F:
    """Return the function; torch.compile does not compile it where it runs behind a break of a graph, as what
    runs in the backward pass of a compiled step; nor what it calls, if with_called. A graph may hold it."""
    inner = getattr(function, "__func__", function)  # of a method
    if _frames is not None and isinstance(inner, FunctionType):
        strategy = _frames._FrameExecStrategy(_SKIP, _SKIP if with_called else _DEFAULT)
        _frames.set_code_exec_strategy(inner.__code__, strategy)
    return function


def uncompiled(function: F, with_called: bool = True) -> F:
    """Return the function; torch.compile neither looks into it nor compiles it, nor what it calls, if
    with_called.

    For functions that torch calls in the middle of a compiled one: where its graph breaks, the frames of
    whatever runs next are compiled too, and what the recorder does cannot be.
    """
    inner = getattr(function, "__func__", function)
    if isinstance(inner, FunctionType):
        inner._torchdynamo_disable = True  # type: ignore[attr-defined]
        inner._torchdynamo_disable_msg = "aorta notes its calls"  # type: ignore[attr-defined]
    return left_uncompiled(function, with_called)


def unless_compiling(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook as one that does nothing while torch.compile traces it.

    Not `uncompiled`: a function that must not be traced is an error in a step compiled with fullgraph=True.
    """
    left_uncompiled(hook)

    def call(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return left_uncompiled(call)


class ReplacedMethods:
    """Methods of one owner that are replaced; `restore` puts back the very objects that were there."""

    def __init__(self, owner: Any) -> None:
        """owner: a class or a module."""
        self._owner = owner
        self._originals: dict[str, Any] = {}

    def replace(
        self,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        hide: Callable[[Callable[..., Any]], Callable[..., Any]] = uncompiled,
    ) -> None:
        """Replace a method. make: returns the replacement of the original, which takes the object first.

        hide: marks the replacement for torch.compile.
        """
        # From the class's dict: what getattr gives for a method of pybind11 would not bind when set again.
        self._originals[name] = vars(self._owner)[name]
        setattr(self._owner, name, hide(make(getattr(self._owner, name))))

    def restore(self) -> None:
        for name, original in self._originals.items():
            setattr(self._owner, name, original)
        self._originals.clear()
