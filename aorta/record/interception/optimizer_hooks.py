"""Hooks around each step of an optimizer. torch.compile guards what it makes of a step by their number, and
compiles it anew where one comes or goes: those of `aorta run` are there from the import of torch on."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim import optimizer

from aorta.record.interception.replaced import unless_compiling

Hook = Callable[[Any, Any, Any], None]


class AttachedHooks:
    """What the hooks of `aorta run` call; theirs stay on where compiled code counts them."""

    def __init__(self) -> None:
        self.before: list[Hook] = []
        self.after: list[Hook] = []


attached: AttachedHooks | None = None
"""None: `aorta run` has no hooks in this process."""


def add(begins: Hook, ended: Hook) -> Callable[[], None]:
    """Have these called around each step, but not where it is traced. Returns what takes them off.

    ended: called first of all such hooks: another one may end the step, and a note would come too late.
    """
    if (called := attached) is not None:
        called.before.append(begins)
        called.after.insert(0, ended)

        def leave_out() -> None:
            called.before.remove(begins)
            called.after.remove(ended)

        return leave_out
    handles = (
        optimizer.register_optimizer_step_pre_hook(unless_compiling(begins)),
        optimizer.register_optimizer_step_post_hook(unless_compiling(ended)),
    )
    with suppress(AttributeError, KeyError):
        hooks: Any = optimizer._global_optimizer_post_hooks
        hooks.move_to_end(handles[1].id, last=False)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove
