"""Operators of a counted call that training may do without, told by what they are called with alone.

Scores of attention that is not fused; what is computed from nothing that changes from step to step; rows of
a table that get a gradient and are not read; what torch.cat copies again in a loop; products with
rows of one 1, with matrices of zeros, and those of which a part is read.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from aorta.attach.product_order import ProductOrder
from aorta.attach.repeated_operators import RepeatedOperators
from aorta.attach.repeated_rows import RepeatedRows
from aorta.attach.without_data import num_passes, tensors_in
from aorta.records.stacks import StackFrame

WHOLE = 0.8
"""Of what a function moves, from which on it does nothing else: what it allocates counts there alone."""
LOOKUPS = ("embedding", "_embedding_bag")
OF_BATCHES = ("bmm", "baddbmm")
"""Products of queries and keys, and of weights and values: a layer's own matrix makes no scores."""
OF_SCORES = ("_softmax", "exp")
GROWS = 8
"""Times its largest result, that torch.cat in a line copies of what it gave before: less is not named."""
PICKS = ("index", "index_select", "gather")
"""Operators that read as much of their first tensor as they give."""
NOTHING = (0, 0, 0, 0, 0)
OF_EACH_CALL = ("torch/nn/utils/parametrize.py", "torch/nn/utils/weight_norm.py")
PREDICTS = "argmax"
OTHERS = 0
"""In place of a storage: what else reads predictions."""
HANDS_ON = ("add", "add_", "_to_copy", "clone", "_log_softmax")
LOSS = "nll_loss_forward"
KEEPS_ZEROS = ("_to_copy", "clone", "mul", "div")
MOST_FULL = 0.01
"""Part of a matrix that is not zero, up to which a sparse product takes less: each entry takes about
PER_ENTRY times as long as one of a dense product."""
PER_ENTRY = 10
MERGED = 4
"""Times what trains of a matrix, from which on it is made of small factors."""
OF_FUSED_SCORES = "_safe_softmax"
"""What scaled_dot_product_attention is taken apart into where there is no data."""

FILLED = re.compile("(new_)?(zeros|ones|full)(_like)?$")
SOLVES = re.compile(
    "_?linalg_(?!vector|matrix_norm|cross|check)|.*(cholesky|triangular_solve|geqrf|ormqr|orgqr)|lu_"
)
"""Operators of linear algebra, whose FLOPs nobody counts: factorizations, and what is solved with them."""
CHECK = "_linalg_check_errors"
KEEPS_CAUSAL = re.compile("(where|eq|ne|logical_not|bitwise_not|masked_fill|_to_copy|mul|clone|rsub)$")
"""Operators on one mask."""
Shape = tuple[int, frozenset[int]]
"""Entries of a tensor, and its last two dimensions in any order."""


class Table(NamedTuple):
    """Rows of a parameter that an index looks up."""

    num_rows: int
    row_bytes: int
    num_looked_up: int
    """At most: an index may name a row twice."""
    line: StackFrame | None


class _Product:
    """A product's result, and what of it is read."""

    def __init__(self, result: torch.Tensor, flops: int, passes: int, line: StackFrame | None) -> None:
        self.result, self.flops, self.passes, self.line = result, flops, passes, line
        self.handed_on: list[torch.Tensor] = []
        """Held, so that no other tensor gets their storages' numbers."""
        self._read: dict[Any, float] = {}
        """Entries, by place and shape."""
        self.targets: set[int] = set()
        """Of losses that read it, by storage."""
        self.predicted: dict[int, set[int]] = {}
        """Storages of the classes that are largest in it, with what these are compared with."""

    def read(self, one: torch.Tensor, picked: torch.Tensor | None = None, part: float = 1.0) -> None:
        """picked: of it, by numbers that nobody knows here."""
        place: Any = (one.storage_offset(), one.shape, one.stride()) if picked is None else len(self._read)
        if picked is None and one.numel() == self.result.numel():
            place = ()  # all of it, whatever its shape is: a loss takes the rows that it took before
        num = part * (one if picked is None else picked).numel()
        self._read[place] = max(num, self._read.get(place, 0.0))

    @property
    def part_read(self) -> float:
        """Of its entries. 1 where nothing was seen to read it: what does may not pass here. To compare its
        largest classes with the targets of a loss tells nothing where the loss ignores these."""
        if any(not others or others - self.targets for others in self.predicted.values()):
            return 1.0
        return min(sum(self._read.values()) / self.result.numel(), 1.0) if self._read else 1.0


class _OfWeights(NamedTuple):
    """What is computed from what the model holds alone."""

    tensor: torch.Tensor
    """Held, so that no other one gets its storage's number."""
    value: int
    """The same for what is computed alike from the same, whatever was written to that since."""
    sources: dict[int, tuple[int, bool]]
    """Parameters by id: their entries, and whether they train."""


def _is_half_full(one: torch.Tensor) -> bool:
    """As a mask is that leaves out what comes later, with the diagonal or without."""
    num = one.shape[-1] if one.dim() > 1 and one.shape[-1] == one.shape[-2] > 1 else 0
    part = getattr(one, "part_full", 1.0)
    return num > 0 and any(abs(2 * num * part - num - beside) < 1e-6 * num for beside in (-1, 1))


class NeedlessOperators:
    """Of one call of a model, forward and backward."""

    def __init__(
        self,
        constant: Iterable[torch.Tensor],
        is_fused: bool,
        parts_counted: Mapping[torch.Size, float] = MappingProxyType({}),
        is_told_causal: Callable[[], bool] = lambda: False,
    ) -> None:
        """constant: what the model holds or is called with, and is the same in every step. is_fused: torch
        may take a fused kernel for scaled_dot_product_attention. parts_counted: of the targets of losses, by
        the shape of what they are given. is_told_causal: so was the call of attention that is seen."""
        self._is_told_causal = is_told_causal
        self._parts_counted = parts_counted
        self._normalized: set[int] = set()
        """Storages whose rows add up to 1: all of a product is read, but by a loss that leaves rows out."""
        self._constant = {(storage := one.untyped_storage())._cdata: storage for one in constant}
        """Held, so that no other one gets its number."""
        self._is_fused = is_fused
        self._products: set[Shape] = set()
        self._softmax: dict[Shape, StackFrame | None] = {}
        self._num_softmax = Counter[Shape]()
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
        self._products_read: dict[int, _Product] = {}
        """By storage."""
        self._predictions: dict[int, tuple[torch.Tensor, _Product]] = {}
        """Their largest classes, by storage."""
        self._filled: dict[int, torch.Tensor] = {}
        """Of one value, by storage."""
        self._causal = {one.untyped_storage()._cdata: one for one in constant if _is_half_full(one)}
        """Masks that leave out what comes later, by storage, and scores that they were added to."""
        self.attention, self.causal = Counter[StackFrame | None](), Counter[StackFrame | None]()
        """Calls of scaled_dot_product_attention, and those with such a mask, by line."""
        self._full: dict[int, tuple[torch.Tensor, float]] = {}
        """Matrices of nearly nothing but zeros, by storage, and the part that is not."""
        self._zeros_at: dict[int, StackFrame | None] = {}
        self.zeros = Counter[StackFrame | None]()
        """FLOPs of products with these zeros, by line."""
        self._of_weights: dict[int, _OfWeights] = {}
        """By storage."""
        self._used: dict[tuple[StackFrame | None, int], set[int]] = {}
        """By line and value, those that something else is computed with."""
        self._line_of: dict[int, StackFrame | None] = {}
        """That made it, by storage."""
        self._of_line: dict[StackFrame | None, list[int]] = {}
        """Of what makes them: operators, FLOPs, bytes, operators of linear algebra, reads of error codes."""
        self._num_operators = Counter[StackFrame | None]()
        self.num_solves = self.num_checks = 0
        self.num_calls = 1
        """That go through one graph."""
        self._of_each_call: dict[StackFrame | None, list[int]] = {}
        """As _of_line, of weights that torch computes in each call."""
        self._columns: dict[int, tuple[torch.Tensor, int]] = {}
        """Results of unfold(), by storage, and bytes moved to make them."""
        self.unfolded, self.unfolded_bytes = Counter[StackFrame | None](), Counter[StackFrame | None]()
        """FLOPs of their products with weights, forward and backward, and bytes for these, by line."""
        self._repeated, self._repeated_rows = RepeatedOperators(), RepeatedRows()
        self._product_order = ProductOrder()
        self.is_repeated: bool | None = None
        """Of the newest operator of the forward pass, as RepeatedOperators.see."""
        self.merged = Counter[StackFrame | None]()
        """FLOPs for gradients of whole matrices of which small factors train, by line."""
        self._copied_again, self._largest = Counter[StackFrame | None](), Counter[StackFrame | None]()
        self._functions, self._unchanged = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        """Bytes of operators, by file and function: of all, and of those that compute from nothing new."""

    def stands_for(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """other has no data, and is what tensor is."""
        if tensor.untyped_storage()._cdata in self._constant:
            storage = other.untyped_storage()
            self._constant[storage._cdata] = storage

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
        at = line() if any(work) else None
        name = func._overloadpacket.__name__
        self._see_zeros(name, given, result, work[0], at)
        self._see_causal(name, given, result, line)
        self.see_bytes(given, result, work[1], work[0])
        self._see_read(name, given, result, work, at)
        num_bytes = sum(one.nbytes for one in (*given, *tensors_in(result)))
        if at is not None:
            self._functions[at.file, at.function] += num_bytes
        for shape in map(_shape, given):
            if name in OF_BATCHES and shape in self._softmax:
                self._scores.setdefault(shape, self._softmax[shape])
            elif name == OF_FUSED_SCORES and self._is_fused:
                self._fused.add(shape)
            elif name == OF_FUSED_SCORES or (name in OF_SCORES and shape in self._products):
                self._softmax.setdefault(shape, at)
                self._num_softmax[shape] += 1
        if name in OF_BATCHES:
            self._products |= {_shape(one) for one in tensors_in(result)}
        if any(work):
            self._see_joined(name, given, result, at)
            self._see_one_hot(name, given, result, work, at)
            self._see_columns(name, given, result, work, at)
            is_of_weights = bool(given) and self._is_weight(given[-1])
            self._product_order.see(name, given, result, work[0], at, is_of_weights)
        of_model = all(
            (key := one.untyped_storage()._cdata) in self._constant or key in self._of_weights
            for one in given
        )
        self.is_repeated = self._repeated.see(func, args, given, result, work, of_model)
        self._repeated_rows.see(name, args, given, result, work[0], at, self._is_weight)
        self._see_of_weights(func, args, given, result, work, at)
        self._see_constant(func, given, result, work, at, num_bytes)
        self._see_parameters(func, name, args, given, at)

    def _is_weight(self, one: torch.Tensor) -> bool:
        of_model = self._of_weights.get(one.untyped_storage()._cdata)
        return hasattr(one, "copy_of") or (of_model is not None and bool(of_model.sources))

    def part_masked(self, name: str, given: list[torch.Tensor], result: Any) -> float:
        """Of the rows of a result, that one column of one-hot rows makes zero."""
        for one, other in (given, given[::-1]) if name == "mul" and len(given) == 2 else ():
            made, _ = self._one_hot.get(one.untyped_storage()._cdata, (None, 0))
            if made is not None and one.dim() and one.shape[-1] == 1 < other.shape[-1]:
                return 1 - 1 / made.shape[-1]
        return 0.0

    def see_bytes(self, given: list[torch.Tensor], result: Any, num_bytes: int, flops: int) -> None:
        """An operator of either pass."""
        moved = [*given, *tensors_in(result)]
        if num_bytes:
            self._bytes[_shape(max(moved, key=torch.Tensor.numel))] += num_bytes
        elif flops:
            keys = [one.untyped_storage()._cdata for one in given]
            for key in keys:
                if key in self._full:
                    zeros = 1 - PER_ENTRY * self._full[key][1]
                    self.zeros[self._zeros_at.get(key)] += round(zeros * flops)
            multiplied = [key for key in keys if key in self._multiplied]
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
    def scores_num(self) -> int:
        """Times that weights are made of such scores."""
        return sum(self._num_softmax[shape] for shape in self._scores)

    @property
    def bytes_left_out(self) -> int:
        """Of scores that a fused kernel keeps to itself."""
        return sum(self._bytes[shape] for shape in self._fused - set(self._scores))

    @property
    def tables(self) -> dict[int, Table]:
        """By id of the parameter: those with dense gradients that nothing but an index reads."""
        return {key: table for key, table in self._tables.items() if key not in self._used_otherwise}

    def returned(self, outputs: Iterable[torch.Tensor], taken: Mapping[int, float]) -> None:
        """What the model gives is read. taken: as of count_of."""
        outputs = [*outputs]
        self.kept(outputs)
        for place, one in enumerate(outputs):
            if (product := self._products_read.get(one.untyped_storage()._cdata)) is not None:
                product.read(one, part=taken.get(place, 1.0))

    def kept(self, tensors: Iterable[torch.Tensor]) -> None:
        """Of the model, or its results: what follows may read them."""
        for key in [one.untyped_storage()._cdata for one in tensors]:
            self._product_order.kept(key)
            if key in self._predictions:
                self._predictions[key][1].predicted[key].add(OTHERS)

    @property
    def unused(self) -> Counter[StackFrame | None]:
        """FLOPs of products, forward and backward, for the part of their results that nothing reads."""
        by_line = Counter[StackFrame | None]()
        for product in {*self._products_read.values()}:
            by_line[product.line] += round((1 - product.part_read) * product.flops * product.passes)
        return by_line

    @property
    def grown_bytes(self) -> Counter[StackFrame | None]:
        """Read and written for results of torch.cat that nothing but the next one in the same line reads."""
        again = self._copied_again.items()
        return Counter({line: 2 * num for line, num in again if num > GROWS * self._largest[line]})

    def is_all(self, line: StackFrame | None) -> bool:
        """Whether its function computes next to nothing but what is the same in every step."""
        key = ("", "") if line is None else (line.file, line.function)
        return self._unchanged[key] > WHOLE * self._functions[key]

    def _see_read(
        self, name: str, given: list[torch.Tensor], result: Any, work: tuple[int, int], at: StackFrame | None
    ) -> None:
        """Views read nothing, and sums (of a bias) hand on."""
        handed_on = False
        for one in given if any(work) else ():
            key = one.untyped_storage()._cdata
            product = self._products_read.get(key)
            is_sum = product is not None and name in HANDS_ON and result.numel() == product.result.numel()
            if product is not None and is_sum and not handed_on:
                handed_on = True
                made = result.untyped_storage()._cdata
                self._products_read[made] = product
                product.handed_on.append(result)
                self._normalized |= {made} if name == "_log_softmax" or key in self._normalized else set()
            elif product is not None and name == LOSS and product.result.dim() == 2:
                product.read(one, part=self._parts_counted.get(one.shape, 1.0))
                product.targets.add(given[1].untyped_storage()._cdata)
            elif product is not None and key in self._normalized:
                product.read(product.result)
            elif product is not None and name == PREDICTS:
                self._predictions[result.untyped_storage()._cdata] = result, product
                product.predicted[result.untyped_storage()._cdata] = set()
            elif product is not None:
                product.read(one, result if name in PICKS and result.numel() < one.numel() else None)
            _, of_predictions = self._predictions.get(key, (None, None))
            if of_predictions is not None:
                others = {each.untyped_storage()._cdata for each in given if each is not one}
                of_predictions.predicted[key] |= others if name == "eq" and others else {OTHERS}
        if work[0]:
            passes = num_passes(given)
            for one in tensors_in(result):
                self._products_read[one.untyped_storage()._cdata] = _Product(one, work[0], passes, at)

    def _see_zeros(
        self, name: str, given: list[torch.Tensor], result: Any, flops: int, at: StackFrame | None
    ) -> None:
        for one in given:
            key, part = one.untyped_storage()._cdata, getattr(one, "part_full", 1.0)
            if part <= MOST_FULL:
                self._full[key] = one, part
            if key in self._full and name in KEEPS_ZEROS and result.numel() == one.numel():
                self._full[result.untyped_storage()._cdata] = result, self._full[key][1]
            if flops and key in self._full:
                self._zeros_at.setdefault(key, at)

    def _see_causal(
        self, name: str, given: list[torch.Tensor], result: Any, line: Callable[[], StackFrame | None]
    ) -> None:
        if not isinstance(result, torch.Tensor) or result.dim() < 2:
            return
        key = result.untyped_storage()._cdata
        of = {
            (storage := one.untyped_storage()._cdata): storage in self._causal for one in given if one.dim()
        }
        if FILLED.match(name):
            self._filled[key] = result
        is_square = result.shape[-1] == result.shape[-2] > 1
        is_made = name in ("tril", "triu") and of.keys() <= self._filled.keys()
        is_made |= name in ("ge", "le", "gt", "lt") and len(given) == 2 and of.keys() <= self._numbers.keys()
        others = {one for one, is_mask in of.items() if not is_mask}
        is_kept = KEEPS_CAUSAL.match(name) is not None and others <= self._filled.keys()
        is_kept |= name == "add" and others <= self._products_read.keys()
        if is_square and (is_made or (is_kept and len(others) < len(of))):
            self._causal[key] = result
        if name == OF_FUSED_SCORES and self._is_fused:
            at = line()
            self.attention[at] += 1
            self.causal[at] += len(others) < len(of) and not self._is_told_causal()

    def _times_made(self, line: StackFrame | None) -> int:
        return max((len(made) for (at, _), made in self._used.items() if at == line), default=1)

    def _made_again(self, column: int) -> Counter[StackFrame | None]:
        """FLOPs or bytes, forward and as often backward."""
        again = Counter[StackFrame | None]()
        for line, sums in self._of_line.items():
            times, of_each_call = self._times_made(line), self._of_each_call.get(line, NOTHING)[column]
            within, beside = 1 - 1 / times, (1 - 1 / self.num_calls) / times
            again[line] = round(2 * (sums[column] * within + of_each_call * beside))
        return again

    @property
    def spread(self) -> Counter[StackFrame | None]:
        """FLOPs, forward and backward, of products for rows that were repeated before, by line."""
        return self._repeated_rows.flops

    @property
    def widened(self) -> Counter[StackFrame | None]:
        """FLOPs of products, forward and backward, that another order of them spares, by line."""
        return self._product_order.flops

    def widened_of(self, line: StackFrame | None) -> StackFrame | None:
        """Where such products are that the one of a line makes narrow."""
        return self._product_order.first_of(line)

    @property
    def hoisted(self) -> Counter[StackFrame | None]:
        """FLOPs to compute again what depends on nothing but what the model holds, by line."""
        return self._made_again(1)

    @property
    def hoisted_bytes(self) -> Counter[StackFrame | None]:
        return self._made_again(2)

    @property
    def hoisted_launches(self) -> int:
        """Operators, as hoisted."""
        return self._made_again(0).total()

    @property
    def hoisted_solves(self) -> int:
        """Operators of linear algebra, as hoisted."""
        return self._made_again(3).total()

    @property
    def hoisted_checks(self) -> int:
        """Error codes of these that the host reads, as hoisted."""
        return self._made_again(4).total()

    def hoisted_share(self, line: StackFrame | None) -> float:
        """Of the operators of a line."""
        return self._made_again(0)[line] / 2 / max(self._num_operators[line], 1)

    def _see_of_weights(
        self, func: Any, args: Any, given: list[torch.Tensor], result: Any, work: tuple[int, int], at: Any
    ) -> None:
        known = []
        for one in given:
            key = one.untyped_storage()._cdata
            if key not in self._of_weights and hasattr(one, "copy_of"):
                sources = {one.copy_of: (one.numel(), one.requires_grad)} if one.is_leaf else {}
                self._of_weights[key] = _OfWeights(one, one.copy_of, sources)
            known.append(self._of_weights.get(key))
        self._num_operators[at] += any(work)
        name = func._overloadpacket.__name__
        is_solve, is_check = SOLVES.match(name) is not None, name == CHECK
        self.num_solves, self.num_checks = self.num_solves + is_solve, self.num_checks + is_check
        held = [one for one in known if one is not None]
        if torch.Tag.nondeterministic_seeded in func.tags or len(held) < len(known):
            for one, of_weights in zip(given, known, strict=True):
                key = one.untyped_storage()._cdata
                if any(work) and of_weights is not None and key in self._line_of:
                    self._used.setdefault((self._line_of[key], of_weights.value), set()).add(key)
                    self._see_merged(of_weights, work[0], at)
            if func._schema.is_mutable:
                for one in given[:1]:
                    self._of_weights.pop(one.untyped_storage()._cdata, None)
        elif func._schema.is_mutable and held and not held[0].sources:  # zeros that are filled
            self._of_weights.pop(given[0].untyped_storage()._cdata, None)
        elif any(work):
            plain = [one for one in tree_leaves(args) if not isinstance(one, torch.Tensor)]
            places = [(one.storage_offset(), one.shape, one.stride()) for one in given]
            value = hash((str(func), str(plain), *places, *(one.value for one in held)))
            sources = {key: of for one in held for key, of in one.sources.items()}
            for one in tensors_in(result):
                key = one.untyped_storage()._cdata
                if key not in self._of_weights:  # not where it writes to what the model holds
                    self._of_weights[key] = _OfWeights(one, value, sources)
                    self._line_of[key] = at
            if sources:  # not an identity matrix alone, which is made of nothing
                more = (1, *work, is_solve, is_check)
                for of_line in (self._of_line, *((self._of_each_call,) if _is_of_each_call() else ())):
                    sums = of_line.setdefault(at, [*NOTHING])
                    sums[:] = [num + one for num, one in zip(sums, more, strict=True)]

    def _see_merged(self, of_weights: _OfWeights, flops: int, at: StackFrame | None) -> None:
        """A product's gradient for a matrix, where only factors of it that are far smaller need one."""
        num = of_weights.tensor.numel()
        trained = sum(size for size, trains in of_weights.sources.values() if trains)
        frozen = sum(size for size, trains in of_weights.sources.values() if not trains)
        if flops and frozen >= num and 0 < MERGED * trained <= num:
            self.merged[at] += flops

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
        elif made_before and (
            name in ("_to_copy", "clone", "index")
            or (name == "mul" and result.shape == self._one_hot[made_before[0]][0].shape)
        ):
            num_bytes = self._one_hot[made_before[0]][1] + work[1]
            self._one_hot[result.untyped_storage()._cdata] = result, num_bytes
        elif made_before and work[0]:
            made, num_bytes = self._one_hot[made_before[0]]
            left, right = given[-2:]
            if left.untyped_storage()._cdata == made_before[0] and left.shape[-1] == made.shape[-1]:
                self._multiplied.setdefault(made_before[0], at)
                self.one_hot[at] += work[0]
                self.one_hot_bytes[at] += num_bytes

    def _see_columns(
        self, name: str, given: list[torch.Tensor], result: Any, work: tuple[int, int], at: StackFrame | None
    ) -> None:
        """A convolution that is a product of the model's weights with columns, which are written first."""
        for one in given:
            made, num_bytes = self._columns.get(one.untyped_storage()._cdata, (None, 0))
            beside = [each for each in given if each is not one]
            if name == "im2col" or (made is not None and name == "clone"):
                self._columns[result.untyped_storage()._cdata] = result, num_bytes + work[1]
            elif made is not None and work[0] and all(map(self._is_weight, beside)):
                passes = num_passes(given)
                self.unfolded[at] += passes * work[0]
                self.unfolded_bytes[at] += 2 * num_bytes

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
        made = tensors_in(result)
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


def _is_of_each_call() -> bool:
    """Whether a weight is computed of others as in each call of its module: by torch's functions for that,
    but a spectral norm, whose vectors a call in training changes."""
    frame: FrameType | None = sys._getframe(2)
    found = False
    while frame is not None:
        found |= frame.f_code.co_filename.endswith(OF_EACH_CALL)
        if frame.f_code.co_qualname.startswith("_SpectralNorm."):
            return False
        frame = frame.f_back
    return found


def _shape(tensor: torch.Tensor) -> Shape:
    return tensor.numel(), frozenset(tensor.shape[-2:])
