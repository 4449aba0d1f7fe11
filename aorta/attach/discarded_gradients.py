"""Gradients that a backward pass gives to parameters of several optimizers, of which one steps, while those
of another are set back before it does: a discriminator's from the generator's loss, or a critic's from the
actor's.

Of the passes of the first step that is noted: by the next one it is known what became of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch

from aorta.device.backend import backend_of
from aorta.records.stacks import StackFrame

FEW = 8
"""Parameters of an optimizer that are looked at."""


@dataclass(slots=True, eq=False)
class _Given:
    """Gradients of one pass, to parameters of one optimizer."""

    optimizer: int
    parameters: list[Any]
    is_taken: bool = False
    """The optimizer has stepped since."""
    is_set_back: bool = False
    """Before it did."""


class Call(NamedTuple):
    """Of a model."""

    number: int
    kind: Any


class Discarded(NamedTuple):
    optimizer: int
    """Whose parameters get these gradients."""
    calls: list[Call]
    """That its passes go through."""
    line: StackFrame | None
    """Of the passes."""
    is_alone: dict[int, bool]
    """By number of a call: no other pass goes through it."""


class DiscardedGradients:
    def __init__(self) -> None:
        self._passes: list[tuple[list[_Given], list[Call], StackFrame | None]] = []
        self._waiting: list[_Given] = []
        self._is_first = True

    def backward_begins(
        self,
        leaves: Iterable[Any],
        optimizer_of: Mapping[int, int],
        calls: list[Call],
        line: StackFrame | None,
    ) -> None:
        """leaves: that get gradients. optimizer_of: id, by that of a parameter."""
        self._look()
        if not self._is_first:
            return
        by_optimizer: dict[int, list[Any]] = {}
        for leaf in leaves:
            if (optimizer := optimizer_of.get(id(leaf))) is not None:
                by_optimizer.setdefault(optimizer, []).append(leaf)
        given = [
            _Given(optimizer, [ref(one) for one in owned[:: -(-len(owned) // FEW)]])
            for optimizer, owned in by_optimizer.items()
        ]
        self._passes.append((given, calls, line))
        self._waiting += given

    def optimizer_stepped(self, optimizer: int | None) -> None:
        """None: it is not known which."""
        self._look()
        for given in self._waiting:
            given.is_taken = optimizer in (None, given.optimizer)
        self._waiting = [given for given in self._waiting if not given.is_taken]

    def end_step(self) -> None:
        self._is_first = False

    def _look(self) -> None:
        for given in self._waiting:
            parameters = [one() for one in given.parameters]
            given.is_set_back = all(one is not None and is_set_back(one) for one in parameters)
        self._waiting = [given for given in self._waiting if not given.is_set_back]

    def found(self) -> list[Discarded]:
        """Of optimizers that take what other passes give; a pass of which none is taken was not one that
        trains, or its gradients were put together from several."""
        taken = {given.optimizer for all_given, *_ in self._passes for given in all_given if given.is_taken}
        times = Counter(call.number for _, calls, _ in self._passes for call in calls)
        found: dict[tuple[int, StackFrame | None], Discarded] = {}
        for all_given, calls, line in self._passes:
            for given in all_given:
                if given.is_set_back and given.optimizer in taken and any(one.is_taken for one in all_given):
                    # A line may have many of a step's passes, as a critic's that learns five times.
                    one = found.setdefault((given.optimizer, line), Discarded(given.optimizer, [], line, {}))
                    one.calls.extend(calls)
                    one.is_alone.update({call.number: times[call.number] == 1 for call in calls})
        return list(found.values())


def is_set_back(parameter: Any) -> bool:
    """Whether its gradient is gone, or nothing but zeros, as far as that is known without a wait."""
    grad = parameter.grad
    if grad is None:
        return True
    # A device is not waited for, and of a DTensor it would be a collective.
    is_plain = type(grad) is torch.Tensor and not backend_of(grad.device).is_device
    return is_plain and not grad.any()
