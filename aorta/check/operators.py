"""What each operator reads and writes: a mode of the dispatcher that adds them to the log.

An operator's schema says which arguments it writes; its outputs that alias no argument are written. Views
and operators that only make memory access nothing. Operators on subclasses of tensors are seen as the
operators on plain tensors that they become."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.hazards.check import Access
from aorta.record.interception.replaced import uncompiled

FAKE = frozenset(("FakeTensor", "FunctionalTensor", "FakeFunctionalTensor"))
PLAIN = (Tensor, torch.nn.Parameter)
NO_ACCESS = frozenset(
    (
        "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
        "aten::new_empty_strided", "aten::set_", "aten::resize_", "aten::is_pinned", "aten::record_stream",
        "aten::sym_size", "aten::sym_stride", "aten::is_same_size", "aten::_unsafe_view",
        "aten::_reshape_alias", "aten::alias", "aten::_efficientzerotensor", "aten::lift_fresh",
        "inductor::_alloc_from_pool", "aten::_has_compatible_shallow_copy_type",
    )
)  # fmt: skip
OUTPUT_FIRST = ("output", "out")
"""Beginnings of the names of arguments that a collective writes; other tensors it reads."""
IN_PLACE = frozenset(("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"))
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
NAMES = ("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "permute_tensor", "shard_dim")
"""Beginnings of the names of collectives; other operators of these libraries touch no data."""


def accessed(tensor: Tensor) -> Access | None:
    """Bytes that an operation on the tensor touches; None where it has none."""
    size = tensor.numel()
    if size == 0:
        return None
    address, item = tensor.data_ptr(), tensor.element_size()
    if address == 0:
        return None
    if tensor.is_contiguous():
        return address, size * item
    sizes, strides = tuple(tensor.size()), tuple(stride * item for stride in tensor.stride())
    span = item + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    return (address, span) if span == size * item else (address, span, (item, sizes, strides))


class _Plan:
    """What is known of an operator from its schema."""

    __slots__ = ("arguments", "is_collective", "is_none", "name", "returns")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        namespace, _, short = schema.name.partition("::")
        self.is_collective = namespace in COLLECTIVES and short.lstrip("_").startswith(NAMES)
        self.arguments = [
            (argument.name, argument.alias_info is not None and argument.alias_info.is_write)
            for argument in schema.arguments
        ]
        self.returns = any(value.alias_info is None for value in schema.returns)
        """True: outputs may be new tensors."""
        is_view = bool(schema.returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
        )
        writes = any(is_write for _, is_write in self.arguments)
        is_wait = namespace in COLLECTIVES and not self.is_collective
        self.is_none = schema.name in NO_ACCESS or (is_view and not writes) or is_wait


class Issued:
    """One operation that is being issued."""

    __slots__ = ("is_async", "is_collective", "name", "reads", "site", "values", "writes")

    def __init__(self, name: str, is_collective: bool) -> None:
        self.name = name
        self.reads: list[tuple[Tensor | None, Access]] = []
        self.writes: list[tuple[Tensor | None, Access]] = []
        """Tensors, where there are any, and their bytes."""
        self.is_collective = is_collective
        self.is_async = False
        self.site = -1
        self.values: dict[str, Any] = {}
        """Of a collective: its arguments by name."""


class OperatorMode(TorchDispatchMode):
    """Tells `around` of each operator that touches memory; it runs the operator and logs it."""

    def __init__(
        self,
        around: Callable[[Issued, Callable[[], Any]], Any],
        record_stream: Callable[[Tensor, Any], None],
        waited: Callable[[Tensor], None],
        pinned: Callable[[Tensor], None],
    ) -> None:
        """pinned: told of memory that the host's allocator gives, which it has waited for if it was used."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = around
        self._record_stream = record_stream
        self._waited = waited
        self._pinned = pinned
        self._plans: dict[Any, _Plan] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled in checked steps

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds; `uncompiled` does the same

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(kind not in PLAIN for kind in types):
            if any(kind.__name__ in FAKE for kind in types):
                return func(*args, **kwargs)  # nothing runs; a fake tensor refuses while a mode is above it
            return NotImplemented
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = _Plan(func)
        if plan.is_none:
            result = func(*args, **kwargs)
            if kwargs.get("pin_memory"):
                self._pinned(result)
            if plan.name == "aten::record_stream":
                self._record_stream(args[0], args[1])
            elif plan.name == "_c10d_functional::wait_tensor":
                self._waited(args[0])
            return result
        issued = Issued(plan.name, plan.is_collective)
        if plan.is_collective:
            _collective(plan, args, kwargs, issued)
        else:
            for (_, is_write), value in zip(plan.arguments, args, strict=False):
                _add(value, issued.writes if is_write else issued.reads)
            if kwargs:
                for name, is_write in plan.arguments[len(args) :]:
                    if name in kwargs:
                        _add(kwargs[name], issued.writes if is_write else issued.reads)
        if plan.name == "aten::_pin_memory" or kwargs.get("pin_memory"):
            return self._around(issued, lambda: self._run_pinned(func, args, kwargs, plan, issued))
        return self._around(issued, lambda: _run(func, args, kwargs, plan, issued))

    def _run_pinned(self, func: Any, args: Any, kwargs: Any, plan: _Plan, issued: Issued) -> Any:
        result = _run(func, args, kwargs, plan, issued)
        self._pinned(result)
        return result


def _run(func: Any, args: Any, kwargs: Any, plan: _Plan, issued: Issued) -> Any:
    result = func(*args, **kwargs)
    if plan.returns and not (plan.is_collective and plan.name.startswith("c10d::")):
        inputs = {access[0] for _, access in issued.reads} | {access[0] for _, access in issued.writes}
        outputs: list[tuple[Tensor | None, Access]] = []
        _add(result, outputs)
        issued.writes += [entry for entry in outputs if entry[1][0] not in inputs]
    return result


def _collective(plan: _Plan, args: Any, kwargs: Any, issued: Issued) -> None:
    short = plan.name.partition("::")[2]
    values = dict(zip((name for name, _ in plan.arguments), args, strict=False)) | kwargs
    issued.values = values
    is_functional = not plan.name.startswith("c10d::")
    issued.is_async = is_functional or bool(values.get("asyncOp", values.get("async_op", True)))
    root = _is_root(values)
    for name, value in values.items():
        if is_functional:
            _add(
                value, issued.writes if short.endswith("_") and name in ("input", "inputs") else issued.reads
            )
        elif short in IN_PLACE:
            if short == "broadcast_" and root or short == "reduce_" and root is False:
                _add(value, issued.reads)
            else:
                _add(value, issued.writes)
        elif short.startswith("recv") or name.startswith(OUTPUT_FIRST):
            _add(value, issued.writes)
        else:
            _add(value, issued.reads)


def _is_root(values: dict[str, Any]) -> bool | None:
    root, group = values.get("root_rank"), values.get("process_group")
    if root is None or group is None:
        return None
    return int(torch.distributed.ProcessGroup.unbox(group).rank()) == int(root)


def _add(value: Any, into: list[tuple[Tensor | None, Access]]) -> None:
    if isinstance(value, Tensor):
        access = _of(value)
        if access is not None:
            into.append((value, access))
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(item, into)


def _of(tensor: Tensor) -> Access | None:
    if tensor.device.type == "meta":
        return None
    if tensor.layout is torch.strided:
        try:
            return accessed(tensor)
        except RuntimeError:  # it has no storage: a fake one, or one of functorch
            return None
    return None
