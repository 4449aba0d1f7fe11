"""Modules of a program that compiles, and whose calls can be noted all the same.

Compiled code is guarded by the classes of the modules in it, and by what these hold: to replace
Module.__call__ for a step compiles anew, and breaks the graph of what is compiled meanwhile. What compiled
code is called from, as a model whose blocks are compiled in place, is in none of its graphs. Of such a module
the attribute that Module.compile() sets is replaced, which torch reads before each call and leaves out of
copies and files.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch.nn import Module

from aorta.attach.needless_batches import plain_class
from aorta.record.interception.replaced import left_uncompiled

CALL = "_compiled_call_impl"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def may_compile() -> bool:
    """True where the program asked torch.compile for something, which may not have run yet."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(one is not None for one in backends.values())


def as_written(value: Any) -> Any:
    """The function that torch.compile was given; anything else as it is."""
    if isinstance(value, FunctionType) and not vars(value).get("_torchdynamo_disable"):
        return vars(value).get("_torchdynamo_orig_callable", value)
    return value


class _EagerHere:
    """The stance of torch.compiler.set_stance("force_eager") on the thread that made it; on others, where the
    program may train or serve on, the former one."""

    def __init__(self, former: Any) -> None:
        self._former = former
        self.thread: int | None = get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._former, name)

    @property
    def stance(self) -> str:
        return "force_eager" if self.thread == get_ident() else str(self._former.stance)


@contextmanager
def without_compiling() -> Iterator[None]:
    """A context in which what is compiled runs as it was written, on this thread."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        yield
        return
    former = frames._stance
    here = frames._stance = _EagerHere(former)
    try:
        yield
    finally:
        here.thread = None  # another thread may put it back later
        if frames._stance is here:
            frames._stance = former


def call_before_compiling(hook: Callable[[Any], None]) -> Callable[[], None]:
    """Have hook called before torch compiles a frame, on whatever thread. Returns what takes it off."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:
        return lambda: None
    handler.register_start_callback(hook)

    def take_off() -> None:
        with suppress(ValueError):  # torch._dynamo.reset() has done so
            handler.remove_start_callback(hook)

    return take_off


def called_around() -> tuple[list[Module], list[Module]]:
    """Modules that compiled code is called from, that are compiled themselves and in nothing that is, and
    those that are in no other module, but what torch.compile has wrapped; and all that is compiled.

    A function that is compiled may call the latter two. Torch passes over their own call then, unless they
    have hooks: with some those in no other module are left out.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), Module) and "_modules" in vars(one)]
    parents: dict[int, list[Module]] = {}
    for module in modules:
        for child in module._modules.values():
            parents.setdefault(id(child), []).append(module)
    compiled = [one for one in modules if _is_wrapper(one) or _holds_compiled(one)]
    apart = compiled + [one for one in modules if _is_replicated(one)]
    within = {id(inner) for one in apart for inner in one.modules() if inner is not one}
    found = {id(one): one for one in modules if id(one) not in parents and not _has_hooks(one)}
    waiting = [*compiled]
    while waiting:
        module = waiting.pop()
        if found.get(id(module)) is None or id(module) not in parents:
            waiting += [one for one in parents.get(id(module), ()) if id(one) not in found]
        found[id(module)] = module
    return [one for key, one in found.items() if key not in within and not _is_wrapper(one)], compiled


def is_guarded(module: Module) -> bool:
    """Whether compiled code may look at CALL of this module, which is not compiled itself, before each call:
    it does so where a module has hooks. Looks at what torch keeps of all code."""
    if not _has_hooks(module) or _holds_compiled(module):
        return False
    codes = [held() for held in sys.modules["torch._dynamo.convert_frame"].input_codes.seen]
    entries_of = sys.modules["torch._C._dynamo.eval_frame"]._debug_get_cache_entry_list
    entries = (entry for code in codes if code is not None for entry in entries_of(code))
    return any(CALL in str(entry.guard_manager) for entry in entries)


def replace_call(module: Module, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Have replacement(original, args, named) called where this module is. Returns what puts it back."""
    held = vars(module)
    former = held.get(CALL)
    original = former or module._call_impl

    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **named)
        return replacement(original, args, named)

    left_uncompiled(call, with_called=False)

    def put_back() -> None:
        if held.get(CALL) is not call:  # the program has compiled it meanwhile
            return
        if former is None:
            del held[CALL]
        else:
            held[CALL] = former

    held[CALL] = call
    return put_back


def _is_wrapper(module: Module) -> bool:
    return plain_class(type(module)).__name__ == "OptimizedModule"


def _is_replicated(module: Module) -> bool:
    """Whether copies of what is in it are made in each call, from all that these hold."""
    return plain_class(type(module)).__name__ == "DataParallel"


def _has_hooks(module: Module) -> bool:
    return any(vars(module).get(name) for name in HOOKS)


def _holds_compiled(module: Module) -> bool:
    return _any_compiled(vars(module).values()) or _class_holds_compiled(type(module))  # type: ignore[arg-type]


@cache
def _class_holds_compiled(cls: type) -> bool:
    return any(_any_compiled(vars(one).values()) for one in cls.__mro__)


def _any_compiled(values: Iterable[Any]) -> bool:
    functions = (getattr(one, "__func__", one) if isinstance(one, staticmethod) else one for one in values)
    return any(as_written(one) is not one for one in functions)
