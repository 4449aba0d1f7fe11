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
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _dispatch_keyset_full_after
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.record.interception.works import Launch, Observer

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


class Operators:
    """The kernels for the tensors of one dispatch key.

    Argument names, order and defaults are those of the operators' schemas: the dispatcher leaves
    out trailing arguments that equal the default.
    """

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
        names = [
            "allreduce_", "allreduce_coalesced_", "_allgather_base_", "_reduce_scatter_base_",
            "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_",
            "reduce_scatter_", "alltoall_", "alltoall_base_", "broadcast_", "reduce_", "gather_",
            "scatter_", "barrier", "send", "recv_", "recv_any_source_", "allgather_coalesced_",
        ]  # fmt: skip
        if self._is_sparse:
            names = ["allreduce_"]
        elif self._device.type == "cpu":
            names.append("monitored_barrier_")
        return {name: getattr(self, name) for name in names}

    def _original(self, name: str, *args: Any) -> Launch:
        """Return a launch through the original kernel, always asynchronous: it cannot return no work."""
        return partial(_launched_by_original, name, self._keyset, *args)

    def allreduce_(self, tensors: Any, process_group: Any, reduce_op: Any, sparse_indices: Any = None,
                   async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        red_op = reduce_op._get_method("op")()
        if red_op == _PREMUL_SUM or sparse_indices is not None or self._is_sparse:
            launch = self._original(
                "allreduce_", tensors, process_group, reduce_op, sparse_indices, True, timeout
            )
        else:
            options = _options(c10d.AllreduceOptions, async_op, timeout, red_op)
            launch = partial(group._get_backend(self._device).allreduce, tensors, options)

        num_bytes = _total_sparse(tensors) if self._is_sparse else _total(tensors)
        work = self._observe(
            group, "all_reduce", tensors, num_bytes, DTYPE_NAMES[tensors[0].dtype], async_op, launch
        )
        return tensors, work.boxed()

    def allreduce_coalesced_(self, tensors: Any, process_group: Any, reduce_op: Any,
                             async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        red_op = reduce_op._get_method("op")()
        if red_op == _PREMUL_SUM:
            launch = self._original("allreduce_coalesced_", tensors, process_group, reduce_op, True, timeout)
        else:
            options = _options(c10d.AllreduceCoalescedOptions, async_op, timeout, red_op)
            launch = partial(group._get_backend(self._device).allreduce_coalesced, tensors, options)

        work = self._observe(
            group, "all_reduce", tensors, _total(tensors), DTYPE_NAMES[tensors[0].dtype], async_op, launch
        )
        return work.boxed()

    def _allgather_base_(self, output_tensor: Tensor, input_tensor: Tensor, process_group: Any,
                         async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.AllgatherOptions, async_op, timeout)
        work = self._observe(
            group,
            "all_gather",
            (output_tensor, input_tensor),
            output_tensor.nbytes,
            DTYPE_NAMES[output_tensor.dtype],
            async_op,
            partial(group._get_backend(self._device)._allgather_base, output_tensor, input_tensor, options),
        )
        return output_tensor, work.boxed()

    def _reduce_scatter_base_(self, output_tensor: Tensor, input_tensor: Tensor, process_group: Any,
                              reduce_op: Any, async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        red_op = reduce_op._get_method("op")()
        if red_op == _PREMUL_SUM:
            launch = self._original(
                "_reduce_scatter_base_", output_tensor, input_tensor, process_group, reduce_op, True, timeout
            )
        else:
            options = _options(c10d.ReduceScatterOptions, async_op, timeout, red_op)
            launch = partial(
                group._get_backend(self._device)._reduce_scatter_base, output_tensor, input_tensor, options
            )

        work = self._observe(
            group,
            "reduce_scatter",
            (output_tensor, input_tensor),
            input_tensor.nbytes,
            DTYPE_NAMES[input_tensor.dtype],
            async_op,
            launch,
        )
        return output_tensor, work.boxed()

    def allgather_into_tensor_coalesced_(self, outputs: Any, inputs: Any, process_group: Any,
                                         async_op: bool = True) -> Any:  # fmt: skip
        group = _unbox(process_group)
        launch = self._original("allgather_into_tensor_coalesced_", outputs, inputs, process_group, True)
        work = self._observe(
            group,
            "all_gather",
            (outputs, inputs),
            _total(outputs),
            DTYPE_NAMES[outputs[0].dtype],
            async_op,
            launch,
        )
        return work.boxed()

    def reduce_scatter_tensor_coalesced_(self, outputs: Any, inputs: Any, process_group: Any, reduce_op: Any,
                                         async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        launch = self._original(
            "reduce_scatter_tensor_coalesced_", outputs, inputs, process_group, reduce_op, True, timeout
        )
        work = self._observe(
            group,
            "reduce_scatter",
            (outputs, inputs),
            _total(inputs),
            DTYPE_NAMES[inputs[0].dtype],
            async_op,
            launch,
        )
        return work.boxed()

    def allgather_(self, output_tensors: Any, input_tensors: Any, process_group: Any,
                   async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.AllgatherOptions, async_op, timeout)
        work = self._observe(
            group,
            "all_gather",
            (output_tensors, input_tensors),
            _total_nested(output_tensors),
            DTYPE_NAMES[input_tensors[0].dtype],
            async_op,
            partial(group._get_backend(self._device).allgather, output_tensors, input_tensors, options),
        )
        return output_tensors, work.boxed()

    def allgather_coalesced_(self, output_lists: Any, input_list: Any, process_group: Any,
                             async_op: bool = True) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.AllgatherOptions, async_op, -1)
        work = self._observe(
            group,
            "all_gather",
            (output_lists, input_list),
            _total_nested(output_lists),
            DTYPE_NAMES[input_list[0].dtype],
            async_op,
            partial(group._get_backend(self._device).allgather_coalesced, output_lists, input_list, options),
        )
        return work.boxed()

    def reduce_scatter_(self, output_tensors: Any, input_tensors: Any, process_group: Any, reduce_op: Any,
                        async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        red_op = reduce_op._get_method("op")()
        if red_op == _PREMUL_SUM:
            launch = self._original(
                "reduce_scatter_", output_tensors, input_tensors, process_group, reduce_op, True, timeout
            )
        else:
            options = _options(c10d.ReduceScatterOptions, async_op, timeout, red_op)
            launch = partial(
                group._get_backend(self._device).reduce_scatter, output_tensors, input_tensors, options
            )

        work = self._observe(
            group,
            "reduce_scatter",
            (output_tensors, input_tensors),
            _total_nested(input_tensors),
            DTYPE_NAMES[output_tensors[0].dtype],
            async_op,
            launch,
        )
        return output_tensors, work.boxed()

    def alltoall_(self, output_tensors: Any, input_tensors: Any, process_group: Any,
                  async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.AllToAllOptions, async_op, timeout)
        work = self._observe(
            group,
            "all_to_all",
            (output_tensors, input_tensors),
            max(_total(output_tensors), _total(input_tensors)),
            DTYPE_NAMES[input_tensors[0].dtype],
            async_op,
            partial(group._get_backend(self._device).alltoall, output_tensors, input_tensors, options),
        )
        return output_tensors, work.boxed()

    def alltoall_base_(self, output: Tensor, input: Tensor, process_group: Any, output_split_sizes: Any,
                       input_split_sizes: Any, async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = _options(c10d.AllToAllOptions, async_op, timeout)
        work = self._observe(
            group,
            "all_to_all",
            (output, input),
            max(output.nbytes, input.nbytes),
            DTYPE_NAMES[input.dtype],
            async_op,
            partial(
                group._get_backend(self._device).alltoall_base,
                output,
                input,
                output_split_sizes,
                input_split_sizes,
                options,
            ),
        )
        return work.boxed()

    def broadcast_(self, tensors: Any, process_group: Any, root_rank: int, root_tensor: int,
                   async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root_rank, root_tensor
        _set(options, async_op, timeout)
        work = self._observe(
            group,
            "broadcast",
            tensors,
            _total(tensors),
            DTYPE_NAMES[tensors[0].dtype],
            async_op,
            partial(group._get_backend(self._device).broadcast, tensors, options),
            root_rank,
        )
        return tensors, work.boxed()

    def reduce_(self, tensors: Any, process_group: Any, reduce_op: Any, root_rank: int, root_tensor: int,
                async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        red_op = reduce_op._get_method("op")()
        if red_op == _PREMUL_SUM:
            launch = self._original(
                "reduce_", tensors, process_group, reduce_op, root_rank, root_tensor, True, timeout
            )
        else:
            options = c10d.ReduceOptions()
            options.reduceOp = _RED_OP[red_op]
            options.rootRank, options.rootTensor = root_rank, root_tensor
            _set(options, async_op, timeout)
            launch = partial(group._get_backend(self._device).reduce, tensors, options)

        work = self._observe(
            group,
            "reduce",
            tensors,
            _total(tensors),
            DTYPE_NAMES[tensors[0].dtype],
            async_op,
            launch,
            root_rank,
        )
        return work.boxed()

    def gather_(self, output_tensors: Any, input_tensors: Any, process_group: Any, root_rank: int,
                async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = c10d.GatherOptions()
        options.rootRank = root_rank
        _set(options, async_op, timeout)
        work = self._observe(
            group,
            "gather",
            (output_tensors, input_tensors),
            max(_total_nested(output_tensors), _total(input_tensors)),
            DTYPE_NAMES[input_tensors[0].dtype],
            async_op,
            partial(group._get_backend(self._device).gather, output_tensors, input_tensors, options),
            root_rank,
        )
        return work.boxed()

    def scatter_(self, output_tensors: Any, input_tensors: Any, process_group: Any, root_rank: int,
                 async_op: bool = True, timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = c10d.ScatterOptions()
        options.rootRank = root_rank
        _set(options, async_op, timeout)
        work = self._observe(
            group,
            "scatter",
            (output_tensors, input_tensors),
            max(_total(output_tensors), _total_nested(input_tensors)),
            DTYPE_NAMES[output_tensors[0].dtype],
            async_op,
            partial(group._get_backend(self._device).scatter, output_tensors, input_tensors, options),
            root_rank,
        )
        return output_tensors, work.boxed()

    def barrier(self, tensor: Tensor, process_group: Any, device_ids: Any, async_op: bool = True,
                timeout: int = -1) -> Any:  # fmt: skip
        group = _unbox(process_group)
        options = c10d.BarrierOptions()
        options.device_ids = device_ids
        _set(options, async_op, timeout)
        work = self._observe(
            group, "barrier", (), 0, "", async_op, partial(group._get_backend(self._device).barrier, options)
        )
        return work.boxed()

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

    def send(self, tensors: Any, process_group: Any, dst: int, tag: int) -> Any:
        group = _unbox(process_group)
        work = self._observe(
            group,
            "send",
            tensors,
            _total(tensors),
            DTYPE_NAMES[tensors[0].dtype],
            True,
            partial(group._get_backend(self._device).send, tensors, dst, tag),
            dst,
        )
        return work.boxed()

    def recv_(self, tensors: Any, process_group: Any, src: int, tag: int) -> Any:
        group = _unbox(process_group)
        work = self._observe(
            group,
            "recv",
            tensors,
            _total(tensors),
            DTYPE_NAMES[tensors[0].dtype],
            True,
            partial(group._get_backend(self._device).recv, tensors, src, tag),
            src,
        )
        return work.boxed()

    def recv_any_source_(self, tensors: Any, process_group: Any, tag: int) -> Any:
        group = _unbox(process_group)
        work = self._observe(
            group,
            "recv",
            tensors,
            _total(tensors),
            DTYPE_NAMES[tensors[0].dtype],
            True,
            partial(group._get_backend(self._device).recv_anysource, tensors, tag),
        )
        return work.boxed()


_known_options: dict[tuple[Any, bool, int | None], Any] = {}


def _options(kind: Any, async_op: bool, timeout: int, red_op: int | None = None) -> Any:
    """Return options of a call. Backends only read them, so those without a timeout are shared."""
    key = (kind, async_op, red_op)
    options = _known_options.get(key) if timeout < 0 else None
    if options is None:
        options = kind()
        if red_op is not None:
            options.reduceOp = _RED_OP[red_op]
        _set(options, async_op, timeout)
        if timeout < 0:
            _known_options[key] = options
    return options


def _set(options: Any, async_op: bool, timeout: int) -> None:
    options.asyncOp = async_op
    if timeout >= 0:
        options.timeout = timedelta(milliseconds=timeout)


def _total(tensors: Sequence[Tensor]) -> int:
    if len(tensors) == 1:
        return tensors[0].nbytes
    return sum(tensor.nbytes for tensor in tensors)


def _total_sparse(tensors: Sequence[Tensor]) -> int:
    return sum(tensor._indices().nbytes + tensor._values().nbytes for tensor in tensors)


def _total_nested(lists: Sequence[Sequence[Tensor]]) -> int:
    return sum(_total(tensors) for tensors in lists)


class _DtypeNames(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        name = self[dtype] = str(dtype).removeprefix("torch.")
        return name


DTYPE_NAMES = _DtypeNames()
