"""Copies that lines of the program ask for with Tensor.contiguous, counted in a single step.

While that step runs Tensor.contiguous is replaced, and nothing is when it has ended. What libraries ask for,
and what operators copy by themselves, is not counted.
"""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch

from aorta.records.libraries import library_of
from aorta.records.stacks import StackFrame


class LayoutCopies:
    """Of the step between begin() and end()."""

    def __init__(self) -> None:
        self.num_at: Counter[StackFrame] = Counter()
        """Copies by line; a tensor that is laid out as asked for is not copied."""
        self._replacement: Any = None

    def begin(self) -> None:
        original, num_at = torch.Tensor.contiguous, self.num_at

        def contiguous(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
            found = original(tensor, *args, **named)
            if not torch.compiler.is_compiling() and found is not tensor:
                caller = sys._getframe(1)
                if not library_of(caller.f_code.co_filename):
                    num_at[line_of(caller)] += 1
            return found

        self._replacement = torch.Tensor.contiguous = contiguous  # type: ignore[assignment,method-assign]

    def end(self) -> None:
        """Put everything back."""
        if self._replacement is not None and vars(torch.Tensor).get("contiguous") is self._replacement:
            del torch.Tensor.contiguous  # it is the base class's
        self._replacement = None


def line_of(frame: FrameType) -> StackFrame:
    """The line of the program that a frame of it is at."""
    return StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname, True)
