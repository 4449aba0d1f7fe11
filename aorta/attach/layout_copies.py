"""Copies into another layout, and out of fp64, that lines of the program ask for, counted in a single step.

While that step runs, Tensor.contiguous, reshape, flatten, to and float are replaced, and nothing is when it
has ended. What libraries ask for, and what operators copy by themselves, is not counted.
"""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch

from aorta.records.libraries import library_of
from aorta.records.stacks import StackFrame

NAMES = ("contiguous", "reshape", "flatten", "to", "float")
NARROW = (torch.float32, torch.bfloat16, torch.float16)


class LayoutCopies:
    """Of the step between begin() and end()."""

    def __init__(self) -> None:
        self.num_at: Counter[StackFrame] = Counter()
        """Copies by line; a tensor that lies as asked for is not copied."""
        self.num_bytes = 0
        self.wide_bytes_at: Counter[StackFrame] = Counter()
        """Bytes in fp64 that are cast to narrower types, by line."""
        self._put_on: dict[str, Any] = {}

    def begin(self) -> None:
        for name in NAMES:
            self._put_on[name] = counted = self._counted(name, getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, counted)

    def end(self) -> None:
        """Put everything back."""
        for name, counted in self._put_on.items():
            if vars(torch.Tensor).get(name) is counted:
                delattr(torch.Tensor, name)  # it is the base class's
        self._put_on.clear()

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: Any, *args: Any, **named: Any) -> Any:
            found = original(tensor, *args, **named)
            if torch.compiler.is_compiling() or found is tensor or type(tensor) not in PLAIN:
                return found
            if tensor.dtype == torch.float64 and found.dtype in NARROW:
                caller = sys._getframe(1)
                if not library_of(caller.f_code.co_filename):
                    self.wide_bytes_at[line_of(caller)] += tensor.nbytes
            elif name not in ("to", "float") or "memory_format" in named:
                caller = sys._getframe(1)
                with suppress(RuntimeError):  # tensors of torch.func have no memory to point at
                    if not library_of(caller.f_code.co_filename) and found.data_ptr() != tensor.data_ptr():
                        self.num_at[line_of(caller)] += 1
                        self.num_bytes += found.nbytes
            return found

        return method


PLAIN = (torch.Tensor, torch.nn.Parameter)


def line_of(frame: FrameType) -> StackFrame:
    """The line of the program that a frame of it is at."""
    return StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname, True)
