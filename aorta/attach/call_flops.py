"""FLOPs of one call of a copy without data, forward and backward, by torch's own formulas."""

import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from aorta.attach.compiled_modules import without_compiling
from aorta.attach.layout_copies import line_of
from aorta.attach.meta_copies import NotCountedError
from aorta.attach.needless_operators import NeedlessOperators
from aorta.attach.operators_by_line import OperatorsByLine
from aorta.attach.without_data import OneType, WithoutData, is_sparse, tensors_in
from aorta.records.libraries import program_frame
from aorta.records.stacks import StackFrame

KNOWN = ("aten", "prims", "prim", "profiler")
HEAVY = ("mm", "conv", "attention", "rnn", "lstm", "gru")
"""Parts of names of operators that have FLOPs worth counting."""


MOST_CPU_S = 4.0
"""Of the thread that counts, from which on a run's end waits no longer: an LSTM over a thousand steps of time
goes on for half a minute."""


class Count(NamedTuple):
    """FLOPs of a call, and by the lines that call what is done."""

    flops: int
    """Without what is done again."""
    by_line: OperatorsByLine
    again: Counter[StackFrame | None]
    fp64: Counter[StackFrame | None]
    """Of products in fp64; None: in the backward pass, or of modules that no line of the program calls."""
    fp32: Counter[StackFrame | None]
    """Forward, in fp32 where autocast is off."""
    num_bytes: int
    """That operators without FLOPs read and write; of these of what is done again."""
    again_bytes: int
    needless: NeedlessOperators
    forward: tuple[int, int]
    """FLOPs, and bytes of operators that have none."""
    operators: tuple[int, int]
    """Of both passes beside views, and those of what is done again."""
    ordered: Counter[StackFrame | None]
    """Bytes of either pass that deterministic algorithms bring into an order, and nothing else would."""
    indexed: Counter[StackFrame | None]
    """Bytes that CUDA's kernels bring into an order whatever is set."""
    cast: Counter[torch.dtype | None]
    """FLOPs forward, by the type to which autocast casts that the model enters itself."""
    called_at: Mapping[int, StackFrame | None]
    """The line of the program within the call that calls a module, by the module's id."""


def count_of(
    model: Module,
    args: Any,
    named: Any,
    constant: Iterable[torch.Tensor] = (),
    fuses: bool = True,
    taken: Mapping[int, float] = MappingProxyType({}),
    needs_gradient: bool = True,
    parts_counted: Mapping[torch.Size, float] = MappingProxyType({}),
    is_cached: bool = False,
    until_s: float = math.inf,
) -> Count:
    """Of a forward and a backward pass of a copy without data; a checkpointed module's second forward counts
    apart. Raises NotCountedError, and whatever the model raises.

    taken: by place among its outputs, the part of the entries that the loss takes. parts_counted: as of
    NeedlessOperators. is_cached: within parametrize.cached(). until_s: by thread_time, when to give up."""
    constant = [one for one in constant if not is_sparse(one)]
    for one in (*constant, *tree_leaves((args, named))):  # what fills up in later steps is none
        with suppress(Exception):  # of torch.func, whose count is none any more
            one.part_full = float(one.num_full) / one.numel() or 1.0  # nothing but zeros: not filled yet
    by_line = OperatorsByLine(model, count_of.__code__)
    one_type = OneType()
    needless = NeedlessOperators(constant, fuses, parts_counted, lambda: one_type.is_told_causal)
    watched = _Watched(needless, by_line, until_s)
    again = _Again(watched)
    states, handles = (random.getstate(), torch.get_rng_state()), again.watch(model)
    try:
        quiet = torch.autograd.set_detect_anomaly(False)  # else it warns of values that a copy has not
        with (
            quiet,
            without_compiling(),  # else the program's own code would be compiled for what has no data
            torch.enable_grad(),
            one_type,
            torch.device("meta"),
            _without_autocast(watched),
            _unchecked(),
            _cached(model) if is_cached else nullcontext(),
            watched,
        ):
            given = tensors_of(model(*args, **named))
            watched.needless.returned(given, taken)
            held = (one for module in model.modules() for one in vars(module).values())
            watched.needless.kept(one for one in held if type(one) is torch.Tensor and one.is_meta)
            outputs = [leaf for leaf in given if leaf.requires_grad]
            again.is_backward = watched.is_backward = True
            forward = watched.flops, watched.num_bytes
            if outputs:
                torch.autograd.backward([output.real.float().sum() for output in outputs])
            elif needs_gradient:
                raise NotCountedError("no output of the model has a gradient")
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        for handle in handles:
            handle.remove()
        by_line.ended()
    flops = watched.flops - again.flops.total()
    of_wide = watched.fp64, watched.fp32
    of_bytes = watched.num_bytes, again.num_bytes
    operators = watched.num_operators, again.num_operators
    of_sums = watched.ordered, watched.indexed
    for sums, lines in zip(of_sums, (watched.gathered, watched.taken), strict=True):
        if None in sums and lines:  # of backward passes, which show no line
            sums[max(lines, key=lines.__getitem__)] += sums.pop(None)
    return Count(
        *(flops, by_line, again.flops, *of_wide, *of_bytes, needless, forward, operators, *of_sums),
        *(watched.cast, again.called_at),
    )


@contextmanager
def _cached(model: Module) -> Iterator[None]:
    """parametrize.cached(), which the program may be in: what is kept of a copy must not outlive it, since it
    is known by the modules' numbers."""
    with parametrize.cached():
        try:
            yield
        finally:
            own = {id(module) for module in model.modules()}
            for key in [key for key in getattr(parametrize, "_cache", {}) if key[0] in own]:
                del parametrize._cache[key]


@contextmanager
def _unchecked() -> Iterator[None]:
    """Distributions do not look whether values are theirs: a copy has none."""
    former = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(former)


@contextmanager
def _without_autocast(watched: "_Watched") -> Iterator[None]:
    """A copy needs no casts, and torch knows none on its device: contexts of autocast are only counted, those
    of this thread."""
    former = {name: vars(torch.autocast)[name] for name in ("__init__", "__enter__", "__exit__")}
    counting = threading.get_ident()

    def init(context: Any, device_type: str, *args: Any, **named: Any) -> None:
        is_copy = device_type == "meta" and threading.get_ident() == counting
        former["__init__"](context, "cpu" if is_copy else device_type, *args, **named)

    def enter(context: Any) -> Any:
        if threading.get_ident() != counting:
            return former["__enter__"](context)
        watched.casts.append(context.fast_dtype if context._enabled else None)
        return context

    def leave(context: Any, *error: Any) -> Any:
        if threading.get_ident() != counting:
            return former["__exit__"](context, *error)
        watched.casts.pop()

    try:
        for name, function in zip(former, (init, enter, leave), strict=True):
            setattr(torch.autocast, name, function)
        yield
    finally:
        for name, function in former.items():
            setattr(torch.autocast, name, function)


def line_of_caller() -> StackFrame | None:
    """Of the program, that called; in a count None of a line outside of it."""
    frame = program_frame(count_of.__code__)
    return None if frame is None else line_of(frame)


class _Again:
    """FLOPs of modules that are called within a backward pass."""

    def __init__(self, watched: "_Watched") -> None:
        self._watched = watched
        self.is_backward = False
        self.flops = Counter[StackFrame | None]()
        self.num_bytes = self._bytes_before = 0
        self.num_operators = self._operators_before = 0
        self.called_at: dict[int, StackFrame | None] = {}
        """The line that calls each module forward."""
        self._depth = self._before = 0

    def watch(self, model: Module) -> list[Any]:
        handles: list[Any] = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enters))
            handles.append(module.register_forward_hook(self._leaves, always_call=True))
        return handles

    def _enters(self, module: Module, *_: Any) -> None:
        if not self.is_backward:
            self.called_at[id(module)] = line_of_caller()
            return
        if self._depth == 0:
            self._before, self._bytes_before = self._watched.flops, self._watched.num_bytes
            self._operators_before = self._watched.num_operators
        self._depth += 1

    def _leaves(self, module: Module, *_: Any) -> None:
        if self._depth:
            self._depth -= 1
            if self._depth == 0:
                num = self._watched.flops - self._before
                self.flops[self.called_at.get(id(module))] += num
                self.num_bytes += self._watched.num_bytes - self._bytes_before
                self.num_operators += self._watched.num_operators - self._operators_before


EMPTY = re.compile("(new_)?empty")
"""Operators that neither read nor write."""
OF_SPARSE = ("mm", "addmm", "_sparse_addmm", "_sparse_mm", "spmm")
"""Operators that multiply a sparse matrix with a dense one."""
ORDERED = {"index_add": 3, "index_copy": 3, "scatter_add": 3, "scatter_reduce": 3, "_unsafe_index_put": 2}
"""Operators that CUDA computes by index_put() with sums in a fixed order where it must, and the place of what
they put; index_put() itself does where it does not add up."""
GATHERS = ("_unsafe_index", "index_select", "gather")
"""Operators whose backward passes are such."""


class _Watched(TorchDispatchMode):
    """Refuses what must not run, or would not be counted; routes tokens to experts evenly."""

    def __init__(self, needless: NeedlessOperators, by_line: OperatorsByLine, until_s: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.needless, self._by_line, self._until_s = needless, by_line, until_s
        self._without_data = WithoutData(needless.stands_for)
        self._num_experts = 0
        self._of_sparse: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a sparse matrix, which is held so that no other one gets its id."""
        self._of_all: dict[int, torch.Tensor] = {}
        """By id, sums, and answers to whether all of a mask holds, or its sum is a number. The model is told
        that it does not: a mask that fills no row up is left out, and FLOPs stay the same."""
        self.is_backward = False
        self.flops = self._moved_bytes = self.num_operators = 0
        self._results = _Results()
        self.casts: list[torch.dtype | None] = []
        """Of the contexts of autocast that the model is in; None of those without."""
        self.cast = Counter[torch.dtype | None]()
        self.fp64, self.fp32 = Counter[StackFrame | None](), Counter[StackFrame | None]()
        self.ordered, self.gathered = Counter[StackFrame | None](), Counter[StackFrame | None]()
        self.indexed, self.taken = Counter[StackFrame | None](), Counter[StackFrame | None]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.thread_time() > self._until_s:
            raise NotCountedError(f"to count its operators takes longer than {MOST_CPU_S:g} s")
        if not isinstance(func, torch._ops.OpOverload):
            raise NotCountedError(f"the operator {func} has no formula")
        if func is not torch.ops.prim.device.default and _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs or {})
        space, packet = func.namespace, func._overloadpacket
        name = packet.__name__
        given = tensors_in((args, kwargs))
        if any(map(_is_real_parameter, given)):
            raise NotCountedError("the forward pass uses parameters that its module does not hold")
        if "c10d" in space:
            raise NotCountedError("the model communicates in its forward pass")
        kwargs = kwargs or {}
        of_sparse = name in OF_SPARSE and any(map(is_sparse, given))
        if not of_sparse and ("device" in kwargs or not all(one.is_meta for one in given)):
            args, kwargs = self._without_data(args, kwargs)
            given = tensors_in((args, kwargs))
        formula = _grouped_mm if name == "_grouped_mm" else flop_registry.get(packet)
        if formula is None and (space not in KNOWN or _needs_formula(func)):
            raise NotCountedError(f"the operator {space}::{name} has no formula")
        if name == "topk" and args[0].dim():
            self._num_experts = int(args[0].shape[-1])
        if name == "nonzero" and args[0].is_meta:
            return self._nonzero(args[0])
        if name == "_local_scalar_dense" and args[0].is_meta:
            if id(args[0]) in self._of_all and args[0].dtype == torch.bool:
                return False
            raise NotCountedError("the forward pass reads values of tensors on the host")
        if of_sparse:  # that the program holds, with data
            return self._sparse_product(func, args, given)
        result = self._results.of(func, args, kwargs, given)
        if name in ("all", "sum") or (name == "eq" and id(args[0]) in self._of_all):
            self._of_all[id(result)] = result
        num_bytes = flops = 0
        made = tensors_in(result)
        if formula is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
            self.flops += flops
            self.cast[self.casts[-1] if self.casts else None] += 0 if self.is_backward else flops
        elif not _is_view(func) and not EMPTY.match(name):
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
            self._moved_bytes += num_bytes
        self.num_operators += bool(flops or num_bytes)
        dtype = getattr(args[0], "dtype", None) if flops else None
        is_off = None in self.casts and not self.is_backward  # of what is computed again it is off, too
        if dtype == torch.float64 or (dtype == torch.float32 and is_off):
            by_line = self.fp64 if dtype == torch.float64 else self.fp32
            by_line[None if self.is_backward else line_of_caller()] += flops
        self._see_order(name.rstrip("_"), args, made)
        if self.is_backward:
            self.needless.see_bytes(given, result, num_bytes, flops)
            self._by_line.see_backward(flops, num_bytes)
        else:
            self.needless.see(func, args, given, result, (flops, num_bytes), line_of_caller)
            part_masked = self.needless.part_masked(name, given, result)
            again = self.needless.is_repeated
            self._by_line.see(func, given, made, (flops, num_bytes), part_masked, again)
        return result

    def _see_order(self, name: str, args: Any, made: list[torch.Tensor]) -> None:
        """Operators that put rows where indices say."""
        is_put = name in ("index_put", "_index_put_impl")
        if is_put or name in ORDERED:
            sums = self.indexed if is_put and args[3:4] == (True,) else self.ordered
            at = None if self.is_backward else line_of_caller()
            sums[at] += args[ORDERED.get(name, 2)].nbytes
        elif (name in GATHERS or name == "index") and not self.is_backward:
            lines = self.taken if name == "index" else self.gathered
            lines[line_of_caller()] += made[0].nbytes if args[0].requires_grad else 0

    def _sparse_product(self, func: Any, args: Any, given: list[torch.Tensor]) -> torch.Tensor:
        """Of a sparse matrix and a dense one: each entry is multiplied with a row."""
        left, right = given[-2:]
        made = torch.empty((left.shape[0], right.shape[1]), dtype=left.dtype, device="meta")
        dense = [self._entries_of(one) if is_sparse(one) else one for one in given]
        flops = sum(2 * one._nnz() for one in given if is_sparse(one)) * made.shape[1]
        self.flops, self.num_operators = self.flops + flops, self.num_operators + 1
        if self.is_backward:
            self.needless.see_bytes(dense, made, 0, flops)
            self._by_line.see_backward(flops, 0)
        else:
            self.needless.see(func, args, dense, made, (flops, 0), line_of_caller)
            self._by_line.see(func, dense, [made], (flops, 0), 0.0, self.needless.is_repeated)
        return made

    def _entries_of(self, one: torch.Tensor) -> torch.Tensor:
        """Of a sparse matrix, the same each time."""
        made = self._of_sparse.get(id(one)) or (one, torch.empty((one._nnz(), 1), device="meta"))
        return self._of_sparse.setdefault(id(one), made)[1]

    @property
    def num_bytes(self) -> int:
        """Of operators without FLOPs; of scores none that a fused kernel keeps to itself."""
        return self._moved_bytes - self.needless.bytes_left_out

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        """Of a mask over the choices of tokens: those of one expert; over the experts: all of them."""
        if not self._num_experts:
            raise NotCountedError("the model chooses by values")
        num = mask.numel() if mask.numel() == self._num_experts else mask.numel() // self._num_experts
        return torch.empty((num, mask.dim()), dtype=torch.int64, device="meta")


class _Results:
    """What operators give without data. Of one that is called as before, the kernel, which is written in
    Python, is not asked again."""

    def __init__(self) -> None:
        self._forms: dict[Any, list[_Form] | None] = {}
        """By call, the tensors of its result; None of a call whose result is not of new tensors alone."""

    def of(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        is_plain = not (_is_view(func) or func._schema.is_mutable) and all(map(_is_plain, given))
        if not given or not is_plain:
            return func(*args, **kwargs)
        key = func, _key_of(args), _key_of(tuple(kwargs.items()))
        forms = self._forms.get(key)
        if forms is not None:
            made = [_new(*form) for form in forms]
            return tuple(made) if len(func._schema.returns) > 1 else made[0]
        result = func(*args, **kwargs)
        if key not in self._forms:
            self._forms[key] = _forms_of(result, given)
        return result


_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]


def _forms_of(result: Any, given: list[torch.Tensor]) -> list[_Form] | None:
    made = list(result) if isinstance(result, tuple) else [result]
    if not all(isinstance(one, torch.Tensor) and _is_plain(one) for one in made):
        return None
    forms = [(one.shape, one.stride(), one.dtype) for one in made]
    storages = {one.untyped_storage()._cdata for one in (*given, *made)}
    are_new = len(storages) == len({one.untyped_storage()._cdata for one in given}) + len(made)
    sizes = [one.untyped_storage().nbytes() for one in made]
    return forms if are_new and sizes == [_new(*form).untyped_storage().nbytes() for form in forms] else None


def _new(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = torch.ops.aten.empty_strided.default(shape, stride, dtype=dtype, device="meta")
    return made


def _is_plain(tensor: torch.Tensor) -> bool:
    """Of a sparse gradient there is no storage."""
    is_tensor = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_meta
    return is_tensor and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _key_of(given: Any) -> Any:
    """Types are in it: 1 is equal to 1.0 and to True."""
    if isinstance(given, torch.Tensor):
        return given.shape, given.stride(), given.dtype
    if isinstance(given, (tuple, list)):
        return type(given), *map(_key_of, given)
    return type(given), given if type(given).__hash__ is not None else object()


@cache
def _is_made_of_others(func: Any) -> bool:
    return bool(func._can_decompose())


@cache
def _needs_formula(func: Any) -> bool:
    """One without a kernel of its own is taken apart into others, which are counted."""
    name = func._overloadpacket.__name__
    is_whole = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
    return is_whole and any(part in name for part in HEAVY) and "backward" not in name


@cache
def _is_view(func: Any) -> bool:
    infos = [one.alias_info for one in func._schema.returns]
    is_told = any(info is not None and not info.is_write for info in infos)
    return is_told or func._overloadpacket is torch.ops.aten._unsafe_view


def _is_real_parameter(tensor: torch.Tensor) -> bool:
    """Of the model itself: nothing may run on it."""
    return tensor.requires_grad and not tensor.is_meta


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Of experts side by side: each row of the first meets the matrix of its own expert."""
    rows, inner = (a.shape[-2], a.shape[-1]) if a.dim() == 2 else (a.shape[0] * a.shape[1], a.shape[2])
    return 2 * rows * inner * b.shape[-1]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Of tuples and dicts, and of objects that hold some."""
    leaves = tree_leaves(output)
    for leaf in tuple(leaves):
        if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__"):
            leaves += vars(leaf).values()
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
