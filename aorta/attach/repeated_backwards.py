"""Backward passes of a step that go through operators which an earlier one of the step went through: as one
pass of the sum of their losses they would not.

Not where gradients were set back or an optimizer stepped in between, or a pass keeps its own graph: these
differ from what the sum gives.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from aorta.attach.layout_copies import line_of
from aorta.attach.program import program_frame
from aorta.device.backend import backend_of
from aorta.records.stacks import StackFrame

MOST_NODES = 20_000
PRODUCTS = ("mm", "conv", "attention", "lstm", "gru", "rnn")
"""Parts of names of operators that take most of a backward pass."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
LOOKED_AT = 8
"""Parameters, whose gradients tell whether they were set back."""


class RepeatedBackwards:
    """Of a few steps."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        """Operators, in the open step; their graph is held as long."""
        self._written: list[tuple[Any, int]] = []
        """Parameters that an earlier pass of it gave gradients, and their versions."""
        self._again = self._num = 0
        self._at = Counter[StackFrame | None]()

    def backward_begins(self, roots: Iterable[Any]) -> None:
        """One that adds to the gradients of parameters, and of which no graph is made."""
        operators, leaves = _operators_of(roots)
        if self._written and not all(map(_is_kept, self._written)):
            self.end_step()
        again = _num_products(operators & self._seen)
        self._again, self._num = self._again + again, self._num + _num_products(operators - self._seen)
        if again:
            frame = program_frame()
            self._at[None if frame is None else line_of(frame)] += again
        self._seen |= operators
        self._written += [(one, one._version) for one in leaves[:LOOKED_AT]]

    def end_step(self) -> None:
        self._seen, self._written = set(), []

    def found(self) -> tuple[float, StackFrame | None]:
        """How often more the operators of a step are gone through than once, and the line of most of it."""
        return self._again / max(self._num, 1), max(self._at, key=self._at.__getitem__, default=None)


def _is_kept(written: tuple[Any, int]) -> bool:
    parameter, version = written
    grad = parameter.grad
    if grad is None or parameter._version != version:
        return False
    # A device is not waited for, and of a DTensor it would be a collective.
    return type(grad) is not torch.Tensor or backend_of(grad.device).is_device or bool(grad.any())


def _num_products(operators: set[Any]) -> int:
    return sum(any(part in one.name().lower() for part in PRODUCTS) for one in operators)


def _operators_of(roots: Iterable[Any]) -> tuple[set[Any], list[Any]]:
    """Of the graph, and the parameters that it ends at; none of a graph that is too large."""
    left = [one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None]
    seen, leaves = set(left), []
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node.name() == ACCUMULATE:
            leaves.append(node.variable)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        left += new
    return (set(), []) if left else ({one for one in seen if one.name() != ACCUMULATE}, leaves)
