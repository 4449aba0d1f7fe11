"""Replaces methods of a class, or functions of a module, for a while, and hides them from torch.compile."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

try:
    # The interface in C: torch.compile's own modules take a second to load, and most runs never need them.
    from torch._C._dynamo import eval_frame as _frames

    _SKIP: Any = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
except (ImportError, AttributeError):
    _SKIP = None


def uncompiled(function: F) -> F:
    """Return the function; torch.compile neither looks into it nor compiles it, nor anything that it calls.

    For functions that torch calls in the middle of a compiled one: where its graph breaks, the frames of
    whatever runs next are compiled too, and what the recorder does cannot be.
    """
    inner = getattr(function, "__func__", function)  # of a method
    if _SKIP is not None and isinstance(inner, FunctionType):
        _frames.set_code_exec_strategy(inner.__code__, _SKIP)
        inner._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class ReplacedMethods:
    """Methods of one owner that are replaced; `restore` puts back the very objects that were there."""

    def __init__(self, owner: Any) -> None:
        """owner: a class or a module."""
        self._owner = owner
        self._originals: dict[str, Any] = {}

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method. make: returns the replacement of the original, which takes the object first."""
        # From the class's dict: what getattr gives for a method of pybind11 would not bind when set again.
        self._originals[name] = vars(self._owner)[name]
        setattr(self._owner, name, uncompiled(make(getattr(self._owner, name))))

    def restore(self) -> None:
        for name, original in self._originals.items():
            setattr(self._owner, name, original)
        self._originals.clear()
