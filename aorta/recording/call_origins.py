"""From where a collective is issued: the module whose call is on the stack, or whose node autograd runs.

A collective of a forward pass (DTensor's hooks, functional and plain calls) has the frame of its module's
call below it. In a backward pass there is none; but the node that autograd runs has the number it was given
in the forward pass, and the numbers between a module's begin and end are that module's.

A look takes microseconds, so there are few (aorta.recording.learned_names).
"""

import sys
from bisect import bisect_right
from collections.abc import Callable
from threading import get_ident
from types import CodeType, FrameType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.nn import Module

from aorta.recording.interception.uncompiled import uncompiled

_CALL = Module._call_impl.__code__
_BACKWARD = "_engine_run_backward"
_UPDATE = "Optimizer.profile_hook_step.<locals>.wrapper"
_COMPILED = ("/torch/_dynamo/", "/torch/_functorch/_aot_autograd/", "/torch/_inductor/")
_NOT_COMPILED = "DisableContext."
"""Of torch._dynamo too: calls what is not compiled."""
_AHEAD = (
    "/torch/distributed/fsdp/",
    "/deepspeed/runtime/zero/",
    "/megatron/core/distributed/",
    "/fairscale/",
)
"""Libraries that gather parameters of one module while another one is called."""
_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"))
_REPLICAS = frozenset(("DistributedDataParallel", "DataParallel"))
_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)


class CallOrigins:
    """Looks from where calls come, between `begin` and `end`."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[ReferenceType[Module], str]] = {}
        """By a module's id."""
        self._hiding: dict[str, bool] = {}
        """By a file's name: frames of it hide which module called."""
        self._numbers = _NodeNumbers()
        self._thread = 0
        """Whose nodes they are: threads number theirs each for itself."""
        self._call_impl: Callable[..., Any] | None = None
        self._wrapper: Callable[..., Any] | None = None
        self._has_compiled = False
        self._second_order = False
        self.follows_nodes = False
        """Backward passes can be named, too."""

    def begin(self) -> None:
        """Notes from now on which module makes which nodes, unless something is compiled: what torch.compile
        made depends on the functions that modules are called by."""
        self.end()
        self._has_compiled = self._has_compiled or _compiled_frames() > 0
        if _next_number is not None and not self._has_compiled:
            self._follow_nodes()
        self.follows_nodes = self._call_impl is not None

    def end(self) -> None:
        """Puts back what was replaced, and knows no module any more."""
        if self._call_impl is not None and vars(Module).get("_call_impl") is self._wrapper:
            Module._call_impl = self._call_impl  # type: ignore[method-assign]
        self._call_impl = self._wrapper = None
        self._names.clear()
        self._numbers = _NodeNumbers()

    @uncompiled
    def module(self) -> str | None:
        """Of the call that is being noted: its module's qualified name, None where it is not certain."""
        callers: list[Module | None] = []
        frame: FrameType | None = sys._getframe(1)
        backward_is_above = False
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                callers.append(frame.f_locals["self"])
            elif code.co_name == _BACKWARD:
                backward_is_above = True
                break
            elif code.co_qualname == _UPDATE:  # of an optimizer, which may run in a backward pass
                return self._name_of(callers)
            elif self._hides(code):
                callers.append(None)
            frame = frame.f_back
        named = self._name_of(callers)
        if named is not None or callers:
            return named
        return self._from_node(backward_is_above)

    def _hides(self, code: CodeType) -> bool:
        path = code.co_filename
        hides = self._hiding.get(path)
        if hides is None:
            hides = self._hiding[path] = any(part in path for part in (*_COMPILED, *_AHEAD))
        return hides and not code.co_qualname.startswith(_NOT_COMPILED)

    def _name_of(self, callers: list[Module | None]) -> str | None:
        """Of the innermost that has a name. callers: innermost first, None for what hides further ones."""
        outermost = next((module for module in reversed(callers) if module is not None), None)
        if outermost is None:
            return None
        if self._named(id(outermost)) is None:
            self._names.update(_qualified_names(outermost))
        for module in callers:
            if module is None:
                return None
            name = self._named(id(module))
            if name is not None:
                return name
        return None

    def _named(self, key: int) -> str | None:
        entry = self._names.get(key)
        return None if entry is None or id(entry[0]()) != key else entry[1]

    # -- nodes of autograd -----------------------------------------------------------------------

    def _from_node(self, backward_is_above: bool) -> str | None:
        node = _node() if self.follows_nodes else None
        if node is None:
            return None
        if torch.is_grad_enabled():  # the nodes that this makes may be numbered by another thread
            self._second_order = True
        recomputed = backward_is_above and get_ident() != self._thread  # and numbered there
        if self._second_order or recomputed:
            return None
        return self._named(self._numbers.module_at(node._sequence_nr()))

    def _follow_nodes(self) -> None:
        original: Callable[..., Any] = Module._call_impl
        numbers, thread, next_number = self._numbers, get_ident(), _next_number
        assert next_number is not None

        def _call_impl(self: Module, *args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or get_ident() != thread:
                return original(self, *args, **named)
            numbers.enter(next_number(), id(self))
            try:
                return original(self, *args, **named)
            finally:
                numbers.leave(next_number())

        self._thread = thread
        self._call_impl, self._wrapper = original, _call_impl
        Module._call_impl = _call_impl  # type: ignore[method-assign]


class _NodeNumbers:
    """Which module's call was the innermost when autograd's nodes were numbered."""

    __slots__ = ("_modules", "_numbers", "_open")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._modules: list[int] = []
        """Ids; 0: none."""
        self._open: list[int] = [0]

    def enter(self, number: int, module: int) -> None:
        self._open.append(module)
        self._numbers.append(number)
        self._modules.append(module)

    def leave(self, number: int) -> None:
        self._open.pop()
        self._numbers.append(number)
        self._modules.append(self._open[-1])

    def module_at(self, number: int) -> int:
        place = bisect_right(self._numbers, number) - 1
        return self._modules[place] if place >= 0 else 0


def _qualified_names(root: Module) -> dict[int, tuple[ReferenceType[Module], str]]:
    """By id, without what wrappers add; the root's is its class."""
    is_replica = type(root).__name__ in _REPLICAS
    names = {}
    for path, module in root.named_modules():
        parts = [part for part in path.split(".") if part not in _WRAPPERS]
        if is_replica and parts[0] == "module":
            del parts[0]
        names[id(module)] = ref(module), ".".join(parts) or type(module).__name__
    return names


def _compiled_frames() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return sum(counters.get("frames", {}).values())
