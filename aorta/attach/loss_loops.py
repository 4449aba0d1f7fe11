"""A loop over operators between a model and its loss, such as a penalty on each weight, and what it takes."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch

from aorta.records.schema import LossLoop

LOOP = 32
"""Operators of one name between a model and its loss, from which on a loop called them."""
MOST_NODES = 20_000
MOST_ENDS = 64
"""Outputs of a model that are held until a backward pass begins: each holds its graph."""


class LossLoops:
    """What a loop over operators takes between a model and its loss, forward and backward, by the host's
    clock: of a model on a CPU, in a few steps."""

    def __init__(self) -> None:
        self._ends = deque[Any](maxlen=MOST_ENDS)
        """Where gradients come to the model, in the open step."""
        self._left_ns = 0
        self._num = 0
        self._found_ms: list[float] = []

    def model_returns(self, outputs: Iterable[torch.Tensor]) -> None:
        self._ends += [one.grad_fn for one in outputs if one.grad_fn is not None and one.device.type == "cpu"]
        self._left_ns = time.monotonic_ns()

    def backward_begins(self, roots: Iterable[Any]) -> None:
        forward_ns, ends = time.monotonic_ns() - self._left_ns, [*self._ends]
        self._ends.clear()
        num = _num_between(roots, ends) if ends else 0
        if not num:
            return
        began_ns, handles = time.monotonic_ns(), list[Any]()

        def reached(_: Any) -> None:
            if handles:
                self._num = num
                self._found_ms.append((forward_ns + time.monotonic_ns() - began_ns) / 1e6)
            while handles:
                handles.pop().remove()

        handles += [end.register_prehook(reached) for end in ends]

    def end_step(self) -> None:
        """Let go of what no backward pass came to."""
        self._ends.clear()

    def found(self) -> LossLoop | None:
        if not self._found_ms:
            return None
        return LossLoop(operators=self._num, ms=median(self._found_ms))


def _num_between(roots: Iterable[Any], ends: list[Any]) -> int:
    """Operators of the graph before these ends are reached; 0 where no loop called them, or none is."""
    is_end, names = set(ends), Counter[str]()
    left = [one.grad_fn for one in roots if getattr(one, "grad_fn", None) is not None]
    seen, is_reached = set(left), False
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node in is_end:
            is_reached = True
            continue
        names[node.name()] += 1
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        left += new
    del names["torch::autograd::AccumulateGrad"]
    is_loop = is_reached and not left and max(names.values(), default=0) >= LOOP
    return names.total() if is_loop else 0
