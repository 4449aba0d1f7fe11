"""Operators of one forward pass that compute what one before them has computed: the same operator, on the
same values. A loop that calls an encoder in each round does so, and a model that asks one part twice.

Values have numbers: one for each tensor that is given, and one for what an operator makes of others, which is
the same wherever operator, arguments and numbers are. What draws at random makes a new one each time.
"""

import itertools
import re
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from aorta.attach.without_data import tensors_in

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

    def see(
        self,
        func: Any,
        args: Any,
        given: list[torch.Tensor],
        result: Any,
        work: tuple[int, int],
        is_of_model: bool,
    ) -> bool | None:
        """Whether it computes once more what one before it has; None where that tells nothing of what calls
        it. work: its FLOPs, and its bytes where it has none; both are 0 of views. is_of_model: it is computed
        from what the model holds, or what never changes, of which others tell."""
        made, written = tensors_in(result), _written(func, args)
        known = {id(one): self._value_of(one) for one in given}
        if not any(work) and not written and all(_key(one) in self._values for one in made):
            return None  # a view
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
        if not any(work) or not made or (is_of_model and not is_drawn):
            return None
        is_again = self._made.setdefault(value, _key(made[0])) != _key(made[0])
        is_plain = not TO_WRITE_TO.match(func._overloadpacket.__name__)
        return is_again if is_plain or not is_again else None

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
