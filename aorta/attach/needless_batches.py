"""Batches that a model works on without need, in steps that are noted: one that it has in the step anyway,
and tokens that only fill rows up.

Nothing of the tokens is kept but the part of them that is padding. It stays on their device until the end.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.nn import Module

from aorta.device.backend import backend_of
from aorta.records.schema import QuietCalls
from aorta.records.stacks import StackFrame

WRAPPERS = ("DistributedDataParallel", "DataParallel", "OptimizedModule")
MOST_ENTRIES = 1 << 26
"""Of a tensor that is compared with zero: that takes a byte each for a moment."""
MOSTLY = 0.5
"""Of the steps that were noted."""
FEW = 8
"""Parameters of a module whose values are looked at in each step that is noted."""
SEVERAL = 4
"""Calls without gradients, from which on a step evaluates, or makes what it trains on, one by one."""


@dataclass(slots=True, eq=False)
class _Call:
    module: int
    given: list[Any]
    """Of tensors, as held."""
    key: Any
    """Of its kind, with gradients in the first step."""
    is_quiet: bool
    """Without gradients."""
    columns: int
    """Of the first tensor that has some."""
    line: StackFrame | None
    ends: set[Any] = field(default_factory=set)
    """Operators that gave its results, while its step is open."""
    is_reached: bool = False
    """A backward pass came to them."""


class NeedlessBatches:
    """Of all steps that were noted."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        """Of the open step, and of the one before: a step may end with the optimizer."""
        self._before: list[_Call] = []
        self._num_steps = self._num_with_again = self._number = 0
        """Steps that can tell: those behind another one that was noted."""
        self._is_next = self._is_again = False
        self._pairs: list[tuple[_Call, _Call]] = []
        """Calls with gradients of the open step, and others with the same batch."""
        self._again = Counter[Any]()
        self._lines = Counter[StackFrame | None]()
        self._padding: list[torch.Tensor] = []
        self._quiet: list[QuietCalls | None] = []
        """Of each step."""

    def begin_step(self, number: int) -> None:
        self._is_next, self._number = number == self._number + 1, number
        if not self._is_next:
            self._before = []

    def called(
        self, module: Module, leaves: list[Any], key: Any, is_quiet: bool, line: StackFrame | None
    ) -> None:
        """key: of the kind of call, in the first step. is_quiet: without gradients."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        columns = next((one.shape[1] for one in given if one.dim() > 1), 0)
        call = _Call(id(unwrapped(module)), [held(one) for one in given], key, is_quiet, columns, line)
        for other in [*self._calls, *self._before]:
            is_one = other.module == call.module and len(other.given) == len(given) > 0
            if not is_one or not all(map(_is, other.given, given)):
                continue
            if not is_quiet and not other.is_quiet:
                self._pairs.append((call, other))
            elif other.is_quiet != is_quiet and (is_quiet or other not in self._before):
                self._is_once_more(call if is_quiet else other, key or other.key)
                break
        self._calls.append(call)

    def returned(self, outputs: list[torch.Tensor]) -> None:
        """What the last call gives."""
        if self._calls:
            self._calls[-1].ends = {one.grad_fn for one in outputs if one.grad_fn is not None}

    def _is_once_more(self, call: _Call, key: Any) -> None:
        self._is_again = True
        self._lines[call.line] += 1
        if key is not None:
            self._again[key] += 1

    def is_table(self, tokens: torch.Tensor) -> None:
        """Note how much of a table of tokens is padding.

        Of rows of vectors, such as frames of sound, those of zeros. Of a plain tensor alone: operators on a
        DTensor may be collectives, and the other ranks do not join. Nothing is launched into a graph that the
        program captures.
        """
        if type(tokens) is not torch.Tensor:
            return
        devices = backend_of(tokens.device)
        if devices.is_device and devices.is_capturing():
            return
        is_frames = tokens.dim() == 3 and tokens.is_floating_point() and tokens.numel() <= MOST_ENTRIES
        if is_frames:  # numbers of places for tokens
            places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
            tokens = (tokens != 0).any(-1) * places
            lengths = tokens.amax(1)  # where all are alike they are no padding, but places to be filled in
            tokens = torch.where(lengths.min() < lengths.max(), tokens, places)
        if tokens.dim() == 2 and min(tokens.shape) > 1:
            sides = torch.stack([_padding(tokens), _padding(tokens.flip(1))])
            self._padding.append(sides)

    def end_step(self, reached: Set[Any]) -> None:
        """reached: operators that backward passes of the step came to."""
        for call in self._calls:
            call.is_reached, call.ends = bool(call.ends & reached), set()
        for pair in self._pairs:
            if {one.is_reached for one in pair} == {True, False}:
                needless = min(pair, key=lambda one: one.is_reached)
                self._is_once_more(needless, pair[0].key or pair[1].key)
        self._pairs.clear()
        self._quiet.append(_quiet_of(self._calls))
        self._num_steps += self._is_next or self._is_again
        self._num_with_again += self._is_again
        self._is_again = False
        self._calls, self._before = [], self._calls

    def again(self) -> tuple[Counter[Any], StackFrame | None]:
        """Calls of a step by kind, and the line that makes most of them; none where few steps have some."""
        if self._num_with_again < MOSTLY * self._num_steps:
            return Counter(), None
        return self._again, max(self._lines, key=self._lines.__getitem__, default=None)

    def quiet(self) -> QuietCalls | None:
        """Of the last step, where each has some but the first two, which are cut where the loop is found."""
        return self._quiet[-1] if len(self._quiet) > 2 and all(self._quiet[2:]) else None

    def padding(self) -> tuple[float, float]:
        """Part of the tokens that is padding, and of the columns that are nothing else."""
        if not self._padding:
            return 0.0, 0.0
        mean = torch.stack([one.cpu() for one in self._padding]).mean(0)
        part, columns = mean[int(mean[:, 0].argmax())].tolist()
        return part, columns


class FrozenModules:
    """Modules that train nothing, and rows that they are called with again: of all steps that were noted.

    Of a row a norm and some sums are kept, on its device until the end.
    """

    def __init__(self) -> None:
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._parameters: dict[int, list[tuple[Any, int]]] = {}
        """References, and their versions when the module was called first."""
        self._changed: set[int] = set()
        self._first: dict[int, list[torch.Tensor]] = {}
        self._last: dict[int, list[torch.Tensor]] = {}
        """Some values of a few parameters at the first call and behind the newest step, on their device until
        the end: by then the function that held the module may have returned."""
        self.lines: dict[int, StackFrame | None] = {}

    def called(self, module: Module, leaves: list[Any], line: StackFrame | None) -> bool:
        """Whether its calls are to be counted: it is called for the first time."""
        given = next((one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 1), None)
        is_plain = type(given) is torch.Tensor and given.is_floating_point()
        if given is None or not is_plain or module.training:
            return False
        devices, is_new = backend_of(given.device), id(module) not in self._rows
        if devices.is_device and devices.is_capturing():
            return False
        if is_new:
            parameters = [*module.parameters()]
            if not parameters or any(type(one.data) is not torch.Tensor for one in parameters):
                return False
            self._parameters[id(module)] = [(ref(one), one._version) for one in parameters]
            self._first[id(module)] = _some_of_few(parameters)
            self.lines[id(module)] = line
        rows, dims = given.detach(), tuple(range(1, given.dim()))  # reduced without a copy of it
        sums = [torch.linalg.vector_norm(rows, dim=dims, dtype=torch.float32)]
        for dim in dims:  # of a half: a row that is turned round is another one
            half = rows.narrow(dim, 0, (rows.shape[dim] + 1) // 2)
            sums.append(half.sum(dims, dtype=torch.float32))
        self._rows.setdefault(id(module), []).append(torch.stack(sums, 1))
        return is_new

    def end_step(self) -> None:
        """See whether modules are as they were at their first calls; nothing waits for a device."""
        for module, held in self._parameters.items():
            now = [reference() for reference, _ in held]
            if any(one is None or one._version != of[1] for one, of in zip(now, held, strict=True)):
                self._changed.add(module)
                continue
            devices = backend_of(now[0].device)
            if module not in self._changed and not (devices.is_device and devices.is_capturing()):
                self._last[module] = _some_of_few(now)

    def part_again(self, module: int) -> float:
        """Of its rows, that another call had before; 0 of a module that changed meanwhile."""
        last = self._last.get(module)
        if last is None or module in self._changed or not all(map(torch.equal, self._first[module], last)):
            return 0.0
        all_rows = torch.cat(self._rows.pop(module, [torch.zeros(1, 2)])).cpu()
        all_rows = all_rows[all_rows[:, 0] > 0]
        return 1 - len(all_rows.unique(dim=0)) / max(len(all_rows), 1)


def _quiet_of(calls: list[_Call]) -> QuietCalls | None:
    """Those of a step, before the last call that a backward pass comes to."""
    last = max((place for place, one in enumerate(calls) if one.is_reached), default=0)
    found = [one for one in calls[:last] if one.is_quiet and one.module == calls[last].module]
    lengths = [one.columns for one in found]
    first, num = lengths[0] if found else 0, len(found)
    of_caches = [first] + [1] * (num - 1)
    if num < SEVERAL or lengths not in ([first] * num, [*range(first, first + num)], of_caches):
        return None
    return QuietCalls(num=num, columns=(first, lengths[-1]), at=found[-1].line)


def some_of(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return local.detach().reshape(-1)[:8].clone()


def _some_of_few(parameters: list[Any]) -> list[torch.Tensor]:
    return [some_of(one) for one in parameters[:: max(len(parameters) // FEW, 1)]]


def plain_class(cls: type) -> type:
    """fully_shard puts a class of its own before the program's."""
    return cls.__mro__[2] if cls.__mro__[1].__name__ == "FSDPModule" else cls


def unwrapped(module: Module) -> Module:
    """What DDP and torch.compile wrap."""
    while (name := plain_class(type(module)).__name__) in WRAPPERS:
        module = module._orig_mod if name == "OptimizedModule" else module.module  # type: ignore[assignment]
    return module


def held(tensor: torch.Tensor) -> Any:
    """A reference to the tensor, or to what it is a view of, and which view, as often written to: a view goes
    when its call returns, and is made anew for the next one."""
    base = tensor._base
    version = None if tensor.is_inference() else tensor._version
    if base is None:
        return ref(tensor), version
    return ref(base), (tensor.storage_offset(), tensor.shape, tensor.stride(), version)


def _is(known: Any, tensor: torch.Tensor) -> bool:
    place, view = held(tensor)
    return known[0]() is place() and known[1] == view


def _padding(tokens: torch.Tensor) -> torch.Tensor:
    """Of rows that end in the value that most of them end in: the part that is this value from there on, but
    for one of each; and the part that all rows have. None of a table of one value."""
    last = tokens[:, -1]
    value = last.mode().values
    run = (tokens == value).flip(1).long().cumprod(1).sum(1)
    holds_some = run.min() < tokens.shape[1]
    fills = torch.where((last == value) & holds_some, run - 1, 0).float()
    return torch.stack([fills.mean(), fills.min()]) / tokens.shape[1]
