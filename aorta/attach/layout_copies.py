"""Copies into another layout, and out of fp64, that lines of the program ask for, counted in a single step.

While that step runs, calls of Tensor.contiguous, reshape, flatten, to and float are noted. What libraries ask
for, and what operators copy by themselves, is not counted.
"""

from collections import Counter
from types import FrameType
from typing import Any

import torch

from aorta.attach.noted_functions import NotedFunctions
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
        self._noted = NotedFunctions(torch.Tensor, NAMES, self._note)

    def begin(self) -> None:
        self._noted.begin()

    def end(self) -> None:
        """Put everything back."""
        self._noted.end()

    def _note(self, name: str, args: Any, named: Any, found: Any, _: int, caller: FrameType) -> None:
        tensor = args[0]
        if found is tensor or library_of(caller.f_code.co_filename):
            return
        if tensor.dtype == torch.float64 and found.dtype in NARROW:
            self.wide_bytes_at[line_of(caller)] += tensor.nbytes
            return
        asks = name not in ("to", "float") or "memory_format" in named
        if asks and found.data_ptr() != tensor.data_ptr():  # tensors of torch.func have none, and raise
            self.num_at[line_of(caller)] += 1
            self.num_bytes += found.nbytes


def line_of(frame: FrameType) -> StackFrame:
    """The line of the program that a frame of it is at."""
    return StackFrame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname, True)
