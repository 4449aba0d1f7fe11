"""Kernels that the dispatcher does not see: those of Triton, launched by users or by what inductor
compiled."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from aorta.check.operators import Issued, accessed

Around = Callable[[Issued, Callable[[], Any]], Any]


class Launches:
    """Tells `around` of each launch while it listens. Modules that were never imported launch nothing."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._replaced: list[tuple[Any, Any]] = []
        self._written: dict[Any, frozenset[str] | None] = {}
        """Names of the arguments that a user's kernel writes; None where that cannot be told."""

    def listen(self) -> None:
        for module, name, make in (
            ("triton.runtime.jit", "JITFunction", self._of_user),
            ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", self._of_inductor),
        ):
            owner = getattr(sys.modules.get(module), name, None)
            if owner is not None:
                original = owner.run
                self._replaced.append((owner, original))
                owner.run = make(original)

    def stop(self) -> None:
        for owner, original in self._replaced:
            owner.run = original
        self._replaced.clear()

    def _of_user(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
            issued = Issued(f"triton {getattr(kernel, '__name__', 'kernel')}", False)
            written = self._writes(kernel, named)
            for name, tensor in tensors.items():
                access = accessed(tensor)
                if access is not None:
                    if written is None or name in written:
                        issued.writes.append((tensor, access))
                    issued.reads.append((tensor, access))
            return self._around(issued, lambda: original(kernel, *args, **kwargs))

        return run

    def _writes(self, kernel: Any, named: dict[str, Any]) -> frozenset[str] | None:
        """Names of the arguments that the kernel stores to, from its intermediate code."""
        if kernel not in self._written:
            try:
                from torch._higher_order_ops.triton_kernel_wrap import identify_mutated_tensors

                known = {name: value for name, value in named.items() if name in kernel.arg_names}
                found = identify_mutated_tensors(kernel, known, {})
                self._written[kernel] = frozenset(found)
            except Exception:
                self._written[kernel] = None  # it may write any of them
        return self._written[kernel]

    def _of_inductor(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            names = list(getattr(getattr(tuner, "fn", None), "arg_names", ()))
            issued = Issued(f"inductor {getattr(getattr(tuner, 'fn', None), '__name__', 'kernel')}", False)
            for name, value in zip(names, args, strict=False):
                access = accessed(value) if isinstance(value, Tensor) else None
                if access is not None:
                    if not name.startswith("in_ptr"):
                        issued.writes.append((value, access))
                    if not name.startswith("out_ptr"):
                        issued.reads.append((value, access))
            return self._around(issued, lambda: original(tuner, *args, **kwargs))

        return run
