"""Takes the collectives that Python code calls on a process group, before they go through the dispatcher.

    dist.all_reduce -> ProcessGroup.allreduce -> dispatcher -> replaced operator -> observer -> backend
                       ^ taken here: ------------------------------------------->

A replaced operator (operators.py) sees every path, but being called from the dispatcher costs: the
arguments are boxed, turned into Python objects and back. The calls that training makes most
often from Python, those of FSDP2 for instance, are taken where they still have their Python arguments.
Whenever something listens in the dispatcher (modes, functorch, a profiler, tensors of another kind) they go
its way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from aorta.device.backend import CPU
from aorta.record.interception.operators import DTYPE_NAMES
from aorta.record.interception.replaced import ReplacedMethods
from aorta.record.interception.works import Observer, TimedWork

CPU_KEY = CPU.dispatch_key
_Method = Callable[..., Any]
_ONLY_BACKENDS = DispatchKeySet(DispatchKey.BackendSelect)
_NOBODY_LISTENS = frozenset(
    (_ONLY_BACKENDS.raw_repr(), _ONLY_BACKENDS.add(DispatchKey.ADInplaceOrView).raw_repr())
)
"""Include sets of the dispatcher where it would only pass a call on: in inference mode, and outside."""
_included = torch._C._dispatch_tls_local_include_set
_keys = torch._C._dispatch_keys
_profiling = torch._C._autograd._profiler_enabled
_keeps_works = c10d._allow_inflight_collective_as_graph_input
_is_plain = frozenset((Tensor, torch.nn.Parameter)).__contains__


def _keys_of(key: str) -> frozenset[int]:
    """Return the key sets of a dense tensor of this device, of inference mode or not."""
    device = DispatchKeySet(DispatchKey.__members__[key]).add(DispatchKey.__members__[f"Autocast{key}"])
    tracked = device.add(DispatchKey.__members__[f"Autograd{key}"]).add(DispatchKey.ADInplaceOrView)
    return frozenset((device.raw_repr(), tracked.raw_repr()))


class _Target:
    """The observer of one device's tensors, with the keys that such tensors have."""

    __slots__ = ("device", "keys", "observe")

    def __init__(self, key: str, observer: Observer) -> None:
        self.observe = observer.observe
        self.device = torch.device(key.lower())
        self.keys = _keys_of(key)


class MethodCalls:
    """Takes calls from Python, by replacing methods of ProcessGroup; `uninstall` puts the originals back."""

    def __init__(self, observers: dict[str, Observer]) -> None:
        """observers: by dispatch key, one of the CPU and perhaps one of an accelerator."""
        self._targets = {key: _Target(key, observer) for key, observer in observers.items()}
        self._device_key = next((key for key in observers if key != CPU_KEY), CPU_KEY)
        self._methods = ReplacedMethods(ProcessGroup)

    def install(self) -> None:
        for name, replacement in self._replacements().items():
            if name in vars(ProcessGroup):  # torch 2.13 has new names beside the old ones
                self._methods.replace(name, replacement)

    def uninstall(self) -> None:
        self._methods.restore()

    def _replacements(self) -> dict[str, Callable[[_Method], _Method]]:
        gather = self._replacement("all_gather", c10d.AllgatherOptions, 3, "_allgather_base")
        scatter = self._replacement("reduce_scatter", c10d.ReduceScatterOptions, 3, "_reduce_scatter_base")
        exchange = self._replacement("all_to_all", c10d.AllToAllOptions, 5, "alltoall_base")
        return {
            "allreduce": self._replacement("all_reduce", c10d.AllreduceOptions, 2, "allreduce"),
            "_allgather_base": gather,
            "all_gather_single": gather,
            "_reduce_scatter_base": scatter,
            "reduce_scatter_single": scatter,
            "alltoall_base": exchange,
            "all_to_all_single": exchange,
        }

    def _target(self, *tensors: Tensor) -> _Target | None:
        """Return the target of a call with these tensors; None: let the dispatcher have it."""
        if _included().raw_repr() not in _NOBODY_LISTENS or _profiling() or _keeps_works():
            return None
        target = None
        for tensor in tensors:
            if not _is_plain(type(tensor)) or tensor.requires_grad:
                return None
            target = target or self._targets.get(CPU_KEY if tensor.is_cpu else self._device_key)
            if target is None or _keys(tensor).raw_repr() not in target.keys:
                return None
        return target

    def _replacement(
        self, op: str, options_type: type[Any], num_args: int, name: str
    ) -> Callable[[_Method], _Method]:
        """Replace a method that takes an output and an input, or with two arguments a list of one tensor, and
        the options last. name: the backend's method to call."""

        def replacement(original: _Method) -> _Method:
            def method(group: Any, *args: Any, **named: Any) -> Any:
                if len(args) == num_args and not named and type(args[-1]) is options_type:
                    given = args[:2] if num_args > 2 else args[0]
                    target = self._target(*given) if num_args > 2 or _is_one(given) else None
                    if target is not None:
                        work = target.observe(
                            group,
                            op,
                            given,
                            max(given[0].nbytes, given[-1].nbytes),
                            DTYPE_NAMES[given[-1].dtype],
                            args[-1].asyncOp,
                            partial(getattr(group._get_backend(target.device), name), *args),
                        )
                        if type(work) is TimedWork:
                            work.stays_in_python = True
                        return work
                return original(group, *args, **named)

            return method

        return replacement


def _is_one(tensors: Any) -> bool:
    return type(tensors) is list and len(tensors) == 1
