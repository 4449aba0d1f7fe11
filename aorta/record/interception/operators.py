"""Kernels of the `c10d::*` operators that tell an observer and call the backend as the originals do.

They are registered where the dispatcher has only the backends' own kernels left to choose from
(BackendSelect), so that those stay registered and can be called. The backend is called directly wherever
its Python binding can express the call, else through the dispatcher. Both let go of the interpreter lock:
a thread of gloo's holds gloo's queue while it drops a work, which may need that lock, so a launch that
held it while it waits for the queue would stop both for good. `torch.library.get_kernel(...).call_boxed`
holds it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keyset_full_after
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.record.interception.works import Observer

_RED_OP_TYPES: dict[str, Any] = dict(c10d.ReduceOp.RedOpType.__members__)
_PREMUL_SUM = int(_RED_OP_TYPES["PREMUL_SUM"])
"""Carries a factor that the boxed operator does not show: only the original kernel can pass it on."""
_RED_OP = {int(kind): dist.ReduceOp(kind) for name, kind in _RED_OP_TYPES.items() if name != "PREMUL_SUM"}
_unbox: Callable[[Any], Any] = ProcessGroup.unbox
_BACKENDS = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
"""Keys that the dispatcher chooses from once BackendSelect has had its turn."""
_Kernel = Callable[..., Any]
inside_operators: set[int] = set()
"""Threads that are inside one of the kernels now."""


def kernels(observers: dict[str, Observer]) -> dict[str, _Kernel]:
    """Return by operator the kernel to register for BackendSelect; its first argument is the keys.

    observers: by dispatch key, one of the CPU and perhaps one of an accelerator. Tensors of other devices go
    on as if nothing was here.
    """
    by_operator: dict[str, dict[str, _Kernel]] = {}
    for key, observer in observers.items():
        for operators in (Operators(key, observer), Operators(f"Sparse{key}", observer)):
            for name, kernel in operators.by_name().items():
                by_operator.setdefault(name, {})[operators.key] = kernel
    return {name: _by_device(name, kernel_of_key) for name, kernel_of_key in by_operator.items()}


def _by_device(name: str, kernel_of_key: dict[str, _Kernel]) -> _Kernel:
    """Return a kernel that calls the one of the tensors' device. kernel_of_key: by a dispatch key's name."""
    kernel_of_keyset: dict[int, _Kernel] = {}  # filled as sets of keys come

    def chosen(keys: DispatchKeySet) -> _Kernel:
        backend_keys = keys & _BACKENDS
        ours = kernel_of_key.get(backend_keys.highestPriorityTypeId().name)
        return partial(_handle(name).redispatch_boxed, backend_keys) if ours is None else ours

    def kernel(keys: DispatchKeySet, *args: Any) -> Any:
        raw = keys.raw_repr()
        if raw not in kernel_of_keyset:
            kernel_of_keyset[raw] = chosen(keys)
        inside_operators.add(get_ident())
        try:
            return kernel_of_keyset[raw](*args)
        finally:
            inside_operators.discard(get_ident())

    return kernel


def _handle(name: str) -> Any:
    """Return the operator's handle in the dispatcher; its `redispatch_boxed` frees the interpreter lock."""
    return getattr(torch.ops.c10d, name).default._handle


def _launched_by_original(name: str, keys: DispatchKeySet, *args: Any) -> Work:
    result = _handle(name).redispatch_boxed(keys, *args)
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


_FORMS: dict[str, tuple[str, str, Any]] = {
    "allreduce_": ("all_reduce", "allreduce", c10d.AllreduceOptions),
    "allreduce_coalesced_": ("all_reduce", "allreduce_coalesced", c10d.AllreduceCoalescedOptions),
    "_allgather_base_": ("all_gather", "_allgather_base", c10d.AllgatherOptions),
    "_reduce_scatter_base_": ("reduce_scatter", "_reduce_scatter_base", c10d.ReduceScatterOptions),
    "allgather_into_tensor_coalesced_": ("all_gather", "", None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "", None),
    "allgather_": ("all_gather", "allgather", c10d.AllgatherOptions),
    "allgather_coalesced_": ("all_gather", "allgather_coalesced", c10d.AllgatherOptions),
    "reduce_scatter_": ("reduce_scatter", "reduce_scatter", c10d.ReduceScatterOptions),
    "alltoall_": ("all_to_all", "alltoall", c10d.AllToAllOptions),
    "alltoall_base_": ("all_to_all", "alltoall_base", c10d.AllToAllOptions),
    "broadcast_": ("broadcast", "broadcast", c10d.BroadcastOptions),
    "reduce_": ("reduce", "reduce", c10d.ReduceOptions),
    "gather_": ("gather", "gather", c10d.GatherOptions),
    "scatter_": ("scatter", "scatter", c10d.ScatterOptions),
    "send": ("send", "send", None),
    "recv_": ("recv", "recv", None),
    "recv_any_source_": ("recv", "recv_anysource", None),
}
"""By operator: what the observer is told, the method of the backend ("": its binding cannot express the
call), and the method's options. All else is read from the operator's schema."""
_FIELDS = {"root_rank": "rootRank", "root_tensor": "rootTensor"}
"""Arguments of operators that are fields of the options, beside the reduction, async_op and timeout."""
_PEERS = ("root_rank", "dst", "src")


class Operators:
    """The kernels for the tensors of one dispatch key."""

    def __init__(self, key: str, observer: Observer) -> None:
        """key: a device's, such as "CPU", or that of its sparse tensors, "SparseCPU"."""
        self.key = key
        self._is_sparse = key.startswith("Sparse")
        self._device = torch.device(key.removeprefix("Sparse").lower())
        # Its arguments below, by place: group, op, tensors, num_bytes, dtype, is_async, launch, and the peer
        # or root where there is one.
        self._observe = observer.observe
        self._numbered_itself = observer.numbered_itself
        self._keyset = DispatchKeySet(DispatchKey.__members__[key])

    def by_name(self) -> dict[str, _Kernel]:
        if self._is_sparse:
            return {"allreduce_": self._kernel("allreduce_")}
        found = {name: self._kernel(name) for name in _FORMS} | {"barrier": self.barrier}
        if self._device.type == "cpu":
            found["monitored_barrier_"] = self.monitored_barrier_
        return found

    def _kernel(self, name: str) -> _Kernel:
        """Return the kernel of an operator that is called as (tensors, ..., process_group, ...)."""
        op, method, options_type = _FORMS[name]
        schema = getattr(torch.ops.c10d, name).default._schema
        place = {argument.name: at for at, argument in enumerate(schema.arguments)}
        num, num_args = place["process_group"], len(place)
        # What is at the end stands in for arguments that the operator has not.
        defaults = (*(argument.default_value for argument in schema.arguments), None, True, -1)
        at_red_op, at_async, at_timeout = (
            place.get(key, num_args + nth) for nth, key in enumerate(("reduce_op", "async_op", "timeout"))
        )
        at_sparse, at_peer = (
            place.get("sparse_indices"),
            next((place[key] for key in _PEERS if key in place), 0),
        )
        fields = [(field, place[key]) for key, field in _FIELDS.items() if options_type and key in place]
        # What the method is given behind the tensors, such as a tag, where it is not in the options.
        in_options = {at_red_op, at_async, at_timeout, at_sparse, *(at for _, at in fields)}
        rest = [at for at in range(num + 1, num_args) if at not in in_options]
        types = [str(argument.type) for argument in schema.arguments[:num]]
        first_size, *other_size = [_total_sparse] if self._is_sparse else [_NUM_BYTES[one] for one in types]
        flat = next(at for at, one in enumerate(types) if one != "List[List[Tensor]]")
        is_list, returns_tensors = types[flat] != "Tensor", len(schema.returns) > 1
        device, keyset, observe = self._device, self._keyset, self._observe
        always_original = not method or self._is_sparse

        def kernel(*args: Any) -> Any:
            args += defaults[len(args) :]  # the dispatcher leaves out trailing ones that equal the default
            given, group, is_async, red_op = args[:num], _unbox(args[num]), args[at_async], args[at_red_op]
            if red_op is not None:
                red_op = red_op._get_method("op")()
            if always_original or red_op == _PREMUL_SUM or (at_sparse and args[at_sparse] is not None):
                # Asynchronous: it cannot return no work.
                of_original = (*args[:at_async], True, *args[at_async + 1 :])[:num_args]
                launch = partial(_launched_by_original, name, keyset, *of_original)
            else:
                function = getattr(group._get_backend(device), method)
                values = [args[at] for at in rest] if rest else []
                if options_type:
                    own = tuple([(field, args[at]) for field, at in fields]) if fields else ()
                    values.append(_options(options_type, is_async, args[at_timeout], red_op, own))
                launch = partial(function, *given, *values)
            size = first_size(given[0])
            if other_size:
                size = max(size, other_size[0](given[1]))
            dtype = DTYPE_NAMES[(given[flat][0] if is_list else given[flat]).dtype]
            told = given if other_size else given[0]
            peer = (args[at_peer],) if at_peer else ()
            work = observe(group, op, told, size, dtype, is_async, launch, *peer)
            return (given[0], work.boxed()) if returns_tensors else work.boxed()

        return kernel

    def barrier(self, tensor: Tensor, process_group: Any, device_ids: Any, async_op: bool = True,
                timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.BarrierOptions, async_op, timeout, None, (("device_ids", tuple(device_ids)),))
        launch = partial(group._get_backend(self._device).barrier, options)
        return self._observe(group, "barrier", (), 0, "", async_op, launch).boxed()

    def monitored_barrier_(self, tensor: Tensor, process_group: Any, device_ids: Any, timeout: int,
                           wait_all_ranks: bool) -> None:  # fmt: skip
        group = _unbox(process_group)

        before = group._get_sequence_number_for_group()

        def launch() -> None:
            group._get_backend(self._device).monitored_barrier(
                timedelta(milliseconds=timeout), wait_all_ranks
            )

        self._observe(group, "barrier", (), 0, "", False, launch)
        # gloo numbers the sends and receives that the barrier is made of.
        self._numbered_itself(group, group._get_sequence_number_for_group() - before - 1)


_known_options: dict[Any, Any] = {}


def _options(
    kind: Any, async_op: bool, timeout: int, red_op: int | None, own: tuple[tuple[str, Any], ...]
) -> Any:
    """Return options of a call. Backends only read them, so those without a timeout are shared."""
    key = (kind, async_op, red_op, own)
    options = _known_options.get(key) if timeout < 0 else None
    if options is None:
        options = kind()
        options.asyncOp = async_op
        for field, value in own if red_op is None else (*own, ("reduceOp", _RED_OP[red_op])):
            setattr(options, field, value)
        if timeout < 0:
            _known_options[key] = options
        else:
            options.timeout = timedelta(milliseconds=timeout)
    return options


def _total(tensors: Sequence[Tensor]) -> int:
    if len(tensors) == 1:
        return tensors[0].nbytes
    return sum(tensor.nbytes for tensor in tensors)


def _total_sparse(tensors: Sequence[Tensor]) -> int:
    return sum(tensor._indices().nbytes + tensor._values().nbytes for tensor in tensors)


def _total_nested(lists: Sequence[Sequence[Tensor]]) -> int:
    return sum(_total(tensors) for tensors in lists)


_NUM_BYTES: dict[str, Callable[[Any], int]] = {
    "Tensor": attrgetter("nbytes"),
    "List[Tensor]": _total,
    "List[List[Tensor]]": _total_nested,
}
"""By types in schemas. A collective counts the larger side."""


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


DTYPE_NAMES = _DtypeNames()
