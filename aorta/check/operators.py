"""What each operator reads and writes: a mode of the dispatcher that adds them to the log.

An operator's schema says which arguments it writes; its outputs that alias no argument are written. Views
and operators that only make memory access nothing. Operators on subclasses of tensors are seen as the
operators on plain tensors that they become."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from aorta.hazards.check import Access
from aorta.record.interception.replaced import uncompiled

PLAIN = frozenset((Tensor, torch.nn.Parameter))
FAKE = frozenset(("FakeTensor", "FunctionalTensor", "FakeFunctionalTensor"))
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


Accesses = list[tuple[Tensor | None, Access]]
"""Tensors, where there are any, and their bytes."""


def accessed(tensor: Tensor) -> Access | None:
    """Bytes that an operation on the tensor touches; None where it has none."""
    try:
        address, size = tensor.data_ptr(), tensor.nbytes
        if not (address and size):
            return None
        if tensor.is_contiguous():
            return address, size
        item = tensor.element_size()
        sizes, strides = tuple(tensor.size()), tuple(stride * item for stride in tensor.stride())
    except RuntimeError:  # it has no storage of its own: a sparse or fake one, or one of functorch
        return None
    span = item + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    return (address, span) if span == size else (address, span, (item, sizes, strides))


class Plan:
    """What is known of an operator from its schema."""

    __slots__ = ("arguments", "call", "func", "is_collective", "is_none", "is_question", "name", "returns")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.call = func._op if type(func) is torch._ops.OpOverload else func  # as its __call__ does
        self.name = schema.name
        namespace, _, short = schema.name.partition("::")
        self.is_collective = namespace in COLLECTIVES and short.lstrip("_").startswith(NAMES)
        self.arguments = [
            (
                place,
                argument.name,
                argument.alias_info is not None and argument.alias_info.is_write,
                "List" in str(argument.type),
            )
            for place, argument in enumerate(schema.arguments)
            if "Tensor" in str(argument.type)
        ]
        """Of arguments that are tensors: place, name, whether it is written, whether it is a list of them."""
        self.returns = namespace != "c10d" and any(value.alias_info is None for value in schema.returns)
        """True: outputs may be new tensors."""
        is_view = bool(schema.returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
        )
        writes = any(is_write for _, _, is_write, _ in self.arguments)
        is_wait = namespace in COLLECTIVES and not self.is_collective
        has_tensors = bool(self.arguments) or any("Tensor" in str(value.type) for value in schema.returns)
        self.is_question = not writes and not any("Tensor" in str(value.type) for value in schema.returns)
        """It only tells the host something: a number of a tensor, as item() does."""
        self.is_none = schema.name in NO_ACCESS or (is_view and not writes) or is_wait or not has_tensors

    def note(self, args: Any, kwargs: Any, reads: Accesses, writes: Accesses) -> None:
        """Add what the operator's arguments say that it touches."""
        num = len(args)
        for place, name, is_write, is_list in self.arguments:
            value = args[place] if place < num else kwargs.get(name)
            if value is None:
                continue
            into = writes if is_write else reads
            for tensor in value if is_list else (value,):
                try:  # as accessed() does it, without a call: this is most of what a checked step costs
                    address = tensor.data_ptr()
                    size = tensor.nbytes
                    if tensor.is_contiguous():
                        if address and size:
                            into.append((tensor, (address, size)))
                        continue
                except (RuntimeError, AttributeError):  # not on memory; not a tensor
                    continue
                access = accessed(tensor)
                if access is not None:
                    into.append((tensor, access))

    def note_result(self, result: Any, reads: Accesses, writes: Accesses) -> None:
        """Add the new tensors among what it returned."""
        outputs: Accesses = []
        _add(result, outputs)
        known = {access[0] for part in (reads, writes) for _, access in part}
        writes += [output for output in outputs if output[1][0] not in known]


class Issued:
    """One operation that is being issued."""

    __slots__ = ("is_async", "is_collective", "name", "reads", "site", "values", "writes")

    def __init__(self, name: str, is_collective: bool) -> None:
        self.name = name
        self.reads: Accesses = []
        self.writes: Accesses = []
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
        self.plain: Callable[[Plan, Any, Any], Any] | None = None
        """Runs and logs what is no collective, in place of `around`, with as few calls as may be."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled in checked steps

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds; `uncompiled` does the same

    def begin(self) -> None:
        """See all operators from now on, below the modes of the program: it may leave those first, and leaves
        the topmost one."""
        above = _taken_off(None)
        self.__enter__()  # type: ignore[no-untyped-call]
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    def end(self) -> None:
        """See no more."""
        above = _taken_off(self)
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for mode in above:
            TorchDispatchMode.__enter__(mode)

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and not PLAIN.issuperset(types):
            if any(kind.__name__ in FAKE for kind in types):
                return func(*args, **kwargs)  # nothing runs; a fake tensor refuses while a mode is above it
            return NotImplemented
        plan = _plans.get(id(func))  # an operator's own hash is made in Python
        if plan is None:
            plan = _plans[id(func)] = Plan(func)
        if plan.is_none:
            result = plan.call(*args, **kwargs)
            if kwargs and kwargs.get("pin_memory"):
                self._pinned(result)
            if plan.name == "aten::record_stream":
                self._record_stream(args[0], args[1])
            elif plan.name == "_c10d_functional::wait_tensor":
                self._waited(args[0])
            return result
        pins = plan.name == "aten::_pin_memory" or (kwargs and kwargs.get("pin_memory"))
        if self.plain is not None and not (plan.is_collective or pins):
            return self.plain(plan, args, kwargs)
        issued = Issued(plan.name, plan.is_collective)
        if plan.is_collective:
            _collective(plan, args, kwargs, issued)
        else:
            plan.note(args, kwargs, issued.reads, issued.writes)

        def run() -> Any:
            result = plan.call(*args, **kwargs)
            if plan.returns:
                plan.note_result(result, issued.reads, issued.writes)
            if pins:
                self._pinned(result)
            return result

        return self._around(issued, run)


def _taken_off(lowest: TorchDispatchMode | None) -> list[TorchDispatchMode]:
    """Take the modes above one off, and return them from below; above all but torch's own, if it is None."""
    above = []
    while (mode := _get_current_dispatch_mode()) not in (lowest, None):
        if lowest is None and mode.is_infra_mode():
            break
        TorchDispatchMode.__exit__(mode, None, None, None)
        above.append(mode)
    return above[::-1]


_plans: dict[int, Plan] = {}
"""By the id of the operator, which the plan keeps alive."""


def _collective(plan: Plan, args: Any, kwargs: Any, issued: Issued) -> None:
    short = plan.name.partition("::")[2]
    values = (
        dict(zip((argument.name for argument in plan.func._schema.arguments), args, strict=False)) | kwargs
    )
    issued.values = values
    is_functional = not plan.name.startswith("c10d::")
    issued.is_async = is_functional or bool(values.get("asyncOp", values.get("async_op", True)))
    root = _is_root(values)
    for name, value in values.items():
        if is_functional:
            is_written = name == "out" or short.endswith("_") and name in ("input", "inputs")
            _add(value, issued.writes if is_written else issued.reads)
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


def _add(value: Any, into: Accesses) -> None:
    if isinstance(value, Tensor):
        access = accessed(value)
        if access is not None:
            into.append((value, access))
    elif isinstance(value, (list, tuple)):
        for item in value:
            _add(item, into)
