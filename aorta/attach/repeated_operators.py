"""Operators of one forward pass that compute what one before them has computed: the same operator, on the
same values. A loop that calls an encoder in each round does so, and a model that asks one part twice.

Values have numbers: one for each tensor that is given, and one for what an operator makes of others, which is
the same wherever operator, arguments and numbers are. What draws at random makes a new one each time.
"""

import itertools
import re
from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from aorta.attach.without_data import num_passes, tensors_in
from aorta.records.stacks import StackFrame

TO_WRITE_TO = re.compile("(new_)?(zeros|ones|full|empty)(_like|_strided)?$|clone$|arange$")
"""Operators that make a tensor of its own, each time, for what may be written there."""


class RepeatedOperators:
    """Of one call of a model."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, int]] = {}
        """By storage, which is held, so that no other one gets its number."""
        self._made: dict[int, int] = {}
        """By value, the storage that has it first."""
        self._new = itertools.count()
        self.flops, self.bytes = Counter[StackFrame | None](), Counter[StackFrame | None]()
        """Of both passes, and of operators without FLOPs, by line."""

    def see(
        self,
        func: Any,
        args: Any,
        given: list[torch.Tensor],
        result: Any,
        work: tuple[int, int],
        line: StackFrame | None,
        is_counted: bool,
    ) -> None:
        """work: its FLOPs, and its bytes where it has none; both are 0 of views. is_counted: it is computed
        from what the model is called with: others tell of what it holds, and of what never changes."""
        made, written = tensors_in(result), _written(func, args)
        known = {id(one): self._value_of(one) for one in given}
        if not any(work) and not written and all(_key(one) in self._values for one in made):
            return  # a view
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        # Running statistics are written, and not read.
        read = [one for one in given if id(one) not in written or any(one is other for other in made)]
        plain = [one for one in tree_leaves(args) if not isinstance(one, torch.Tensor)]
        places = [(one.storage_offset(), one.shape, one.stride(), known[id(one)]) for one in read]
        value = next(self._new) if is_drawn else hash((str(func), str(plain), *places))
        for place, one in enumerate(made):
            self._values[_key(one)] = one.untyped_storage(), hash((value, place))
        for one in given:
            if id(one) in written and not any(one is other for other in made):
                self._values[_key(one)] = one.untyped_storage(), hash((value, known[id(one)]))
        if is_drawn or not any(work) or not made or TO_WRITE_TO.match(func._overloadpacket.__name__):
            return
        if self._made.setdefault(value, _key(made[0])) != _key(made[0]) and is_counted:
            passes = num_passes(given)
            self.flops[line] += passes * work[0]
            self.bytes[line] += (2 if passes > 1 else 1) * work[1]

    def _value_of(self, tensor: torch.Tensor) -> int:
        return self._values.setdefault(_key(tensor), (tensor.untyped_storage(), -1 - next(self._new)))[1]


def _key(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _written(func: Any, args: Any) -> set[int]:
    """Tensors that it writes to, by id."""
    return {
        id(one)
        for of_schema, one in zip(func._schema.arguments, args, strict=False)
        if of_schema.alias_info is not None and of_schema.alias_info.is_write
        for one in tensors_in(one)
    }
