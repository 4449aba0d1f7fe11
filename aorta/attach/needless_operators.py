"""Operators of a counted call that training may do without, told by what they are called with alone.

Scores of attention that is not fused; what is computed from nothing that changes from step to step; rows of
a table that get a gradient and are not read; what torch.cat copies again in a loop; products with
rows of one 1.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from aorta.records.stacks import StackFrame

WHOLE = 0.8
"""Of what a function moves, from which on it does nothing else: what it allocates counts there alone."""
LOOKUPS = ("embedding", "_embedding_bag")
OF_SCORES = ("_softmax", "exp")
GROWS = 8
"""Times its largest result, that torch.cat in a line copies of what it gave before: less is not named."""
OF_FUSED_SCORES = "_safe_softmax"
"""What scaled_dot_product_attention is taken apart into where there is no data."""

Shape = tuple[int, frozenset[int]]
"""Entries of a tensor, and its last two dimensions in any order."""


class Table(NamedTuple):
    """Rows of a parameter that an index looks up."""

    num_rows: int
    row_bytes: int
    num_looked_up: int
    """At most: an index may name a row twice."""
    line: StackFrame | None


class NeedlessOperators:
    """Of one call of a model, forward and backward."""

    def __init__(self, constant: Iterable[torch.Tensor], is_fused: bool) -> None:
        """constant: what the model holds or is called with, and is the same in every step. is_fused: torch
        may take a fused kernel for scaled_dot_product_attention."""
        self._constant = {(storage := one.untyped_storage())._cdata: storage for one in constant}
        """Held, so that no other one gets its number."""
        self._is_fused = is_fused
        self._products: set[Shape] = set()
        self._softmax: dict[Shape, StackFrame | None] = {}
        self._scores: dict[Shape, StackFrame | None] = {}
        self._fused: set[Shape] = set()
        self._bytes, self._of_products = Counter[Shape](), Counter[Shape]()
        self._used_otherwise: set[int] = set()
        self._tables: dict[int, Table] = {}
        self.unchanged, self.unchanged_bytes = Counter[StackFrame | None](), Counter[StackFrame | None]()
        """FLOPs, and bytes of operators that have none, by line."""
        self._numbers: dict[int, torch.Tensor] = {}
        """Results of arange, by storage."""
        self._one_hot: dict[int, tuple[torch.Tensor, int]] = {}
        """Rows of one 1, by storage, and bytes moved to make them."""
        self._multiplied: dict[int, StackFrame | None] = {}
        self.one_hot, self.one_hot_bytes = Counter[StackFrame | None](), Counter[StackFrame | None]()
        """FLOPs of products that look rows of a matrix up, and bytes for their left operand, by line."""
        self._joined: dict[int, tuple[StackFrame | None, torch.Tensor]] = {}
        """Results of torch.cat that nothing has read yet, by storage, and their lines."""
        self._copied_again, self._largest = Counter[StackFrame | None](), Counter[StackFrame | None]()
        self._functions, self._unchanged = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        """Bytes of operators, by file and function: of all, and of those that compute from nothing new."""

    def see(
        self,
        func: Any,
        args: Any,
        given: list[torch.Tensor],
        result: Any,
        work: tuple[int, int],
        line: Callable[[], StackFrame | None],
    ) -> None:
        """An operator of the forward pass. given: the tensors that it was called with. work: its FLOPs, and
        its bytes where it has none; both are 0 of views."""
        self.see_bytes(given, result, work[1], work[0])
        at = line() if any(work) else None
        num_bytes = sum(one.nbytes for one in (*given, *_tensors(result)))
        if at is not None:
            self._functions[at.file, at.function] += num_bytes
        name = func._overloadpacket.__name__
        for shape in map(_shape, given):
            if work[0] and shape in self._softmax:
                self._scores.setdefault(shape, self._softmax[shape])
            elif name in OF_SCORES and shape in self._products:
                self._softmax.setdefault(shape, at)
            elif name == OF_FUSED_SCORES and self._is_fused:
                self._fused.add(shape)
            elif name == OF_FUSED_SCORES:
                self._softmax.setdefault(shape, at)
        if work[0]:
            self._products |= {_shape(one) for one in _tensors(result)}
        if any(work):
            self._see_joined(name, given, result, at)
            self._see_one_hot(name, given, result, work, at)
        self._see_constant(func, given, result, work, at, num_bytes)
        self._see_parameters(func, name, args, given, at)

    def see_bytes(self, given: list[torch.Tensor], result: Any, num_bytes: int, flops: int) -> None:
        """An operator of either pass."""
        moved = [*given, *_tensors(result)]
        if num_bytes:
            self._bytes[_shape(max(moved, key=torch.Tensor.numel))] += num_bytes
        elif flops:
            multiplied = [key for one in given if (key := one.untyped_storage()._cdata) in self._multiplied]
            if multiplied:
                self.one_hot[self._multiplied[multiplied[0]]] += flops
            for one in moved:
                self._of_products[_shape(one)] += one.numel() * one.element_size()

    @property
    def scores_bytes(self) -> Counter[StackFrame | None]:
        """That pass through memory for scores between two products, and in these, by the line that makes
        weights of them."""
        by_line = Counter[StackFrame | None]()
        for shape, line in self._scores.items():
            by_line[line] += self._bytes[shape] + self._of_products[shape]
        return by_line

    @property
    def bytes_left_out(self) -> int:
        """Of scores that a fused kernel keeps to itself."""
        return sum(self._bytes[shape] for shape in self._fused - set(self._scores))

    @property
    def tables(self) -> dict[int, Table]:
        """By id of the parameter: those with dense gradients that nothing but an index reads."""
        return {key: table for key, table in self._tables.items() if key not in self._used_otherwise}

    @property
    def grown_bytes(self) -> Counter[StackFrame | None]:
        """Read and written for results of torch.cat that nothing but the next one in the same line reads."""
        again = self._copied_again.items()
        return Counter({line: 2 * num for line, num in again if num > GROWS * self._largest[line]})

    def is_all(self, line: StackFrame | None) -> bool:
        """Whether its function computes next to nothing but what is the same in every step."""
        key = ("", "") if line is None else (line.file, line.function)
        return self._unchanged[key] > WHOLE * self._functions[key]

    def _see_joined(self, name: str, given: list[torch.Tensor], result: Any, at: StackFrame | None) -> None:
        for one in given:
            line, before = self._joined.pop(one.untyped_storage()._cdata, (None, one))
            if name == "cat" and at is not None and line == at:
                self._copied_again[at] += before.nbytes
        if name == "cat":
            self._joined[result.untyped_storage()._cdata] = at, result
            self._largest[at] = max(self._largest[at], result.nbytes)

    def _see_one_hot(
        self, name: str, given: list[torch.Tensor], result: Any, work: tuple[int, int], at: StackFrame | None
    ) -> None:
        """one_hot compares with arange where there is no data."""
        keys = [one.untyped_storage()._cdata for one in given]
        if name == "arange":
            self._numbers[result.untyped_storage()._cdata] = result
        is_one = name == "eq" and result.dim() > 1 and min(one.shape[-1] for one in given if one.dim()) == 1
        made_before = [key for key in keys if key in self._one_hot]
        if name == "eye" or (is_one and any(key in self._numbers for key in keys)):
            self._one_hot[result.untyped_storage()._cdata] = result, work[1]
        elif made_before and name in ("_to_copy", "clone", "index"):
            num_bytes = self._one_hot[made_before[0]][1] + work[1]
            self._one_hot[result.untyped_storage()._cdata] = result, num_bytes
        elif made_before and work[0]:
            made, num_bytes = self._one_hot[made_before[0]]
            left, right = given[-2:]
            if left.untyped_storage()._cdata == made_before[0] and left.shape[-1] == made.shape[-1]:
                self._multiplied.setdefault(made_before[0], at)
                self.one_hot[at] += work[0]
                self.one_hot_bytes[at] += num_bytes

    def _see_constant(
        self,
        func: Any,
        given: list[torch.Tensor],
        result: Any,
        work: tuple[int, int],
        at: StackFrame | None,
        num_bytes: int,
    ) -> None:
        is_constant = torch.Tag.nondeterministic_seeded not in func.tags and all(
            one.untyped_storage()._cdata in self._constant for one in given
        )
        made = _tensors(result)
        if func._schema.is_mutable and not is_constant:
            for one in (*given, *made):
                self._constant.pop(one.untyped_storage()._cdata, None)
        elif is_constant:
            self._constant |= {(storage := one.untyped_storage())._cdata: storage for one in made}
            if given and any(work):
                self.unchanged[at] += work[0]
                self.unchanged_bytes[at] += work[1]
                if at is not None:
                    self._unchanged[at.file, at.function] += num_bytes

    def _see_parameters(self, func: Any, name: str, args: Any, given: list[torch.Tensor], at: Any) -> None:
        of_model = [one for one in given if hasattr(one, "copy_of") and one.requires_grad]
        if not of_model:
            return
        if name not in LOOKUPS or args[0] is not of_model[0]:
            self._used_otherwise |= {one.copy_of for one in of_model}
            return
        place = next(place for place, one in enumerate(func._schema.arguments) if one.name == "sparse")
        if len(args) > place and args[place]:
            return
        table, key = args[0], args[0].copy_of
        before = self._tables.get(key)
        num = args[1].numel() + (before.num_looked_up if before else 0)
        self._tables[key] = Table(
            len(table), table.shape[1:].numel() * table.element_size(), num, before.line if before else at
        )


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _shape(tensor: torch.Tensor) -> Shape:
    return tensor.numel(), frozenset(tensor.shape[-2:])
