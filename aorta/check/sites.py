"""Where operations are issued: file and line, found once per place and known by a number from then on."""

import inspect
import os
import sys
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn

from aorta.hazards.findings import Site

TORCH = os.path.dirname(torch.__file__) + os.sep
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
PLUMBING = tuple(
    os.path.join(TORCH, *parts)
    for parts in (
        ("_ops.py",), ("_tensor.py",), ("_utils.py",), ("_jit_internal.py",), ("_compile.py",),
        ("autograd", ""), ("utils", ""), ("nn", "modules", "module.py"), ("nn", "functional.py"),
        ("_dynamo", ""), ("functional.py",), ("_prims_common", ""), ("_refs", ""), ("_library", ""),
    )
)  # fmt: skip
"""Files of torch that say nothing about who issued an operation."""
MODULE_FILE = os.path.join(TORCH, "nn", "modules", "module.py")


class Sites:
    """The sites of one process, by number."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._numbers: dict[Any, int] = {}
        self._kinds: dict[int, int] = {}
        """By the id of a code, whose hash looks through all its constants."""
        self.modules: dict[int, Any] = {}
        """Of a site that a module's code issued: a reference to the first such module, which may be gone."""
        self._codes: list[CodeType] = []
        """Kept alive, so that no other gets the id of one."""

    def number(self, operation: str, tensor: Any = None, is_collective: bool = False) -> int:
        """Number of the site that the caller's stack and the operation are."""
        user = inside = None
        kinds = self._kinds
        frame: Any = sys._getframe(2)  # of the check's own frames, two at least
        while frame is not None:
            code = frame.f_code
            try:
                kind = kinds[id(code)]
            except KeyError:
                kind = kinds[id(code)] = _kind(code.co_filename)
                self._codes.append(code)
            if not kind:
                user = frame
                break
            if kind == 1 and inside is None:
                inside = frame
            frame = frame.f_back
        key: Any = operation
        for at in (user, inside):
            if at is not None:
                key = key, id(at.f_code), at.f_lasti
        number = self._numbers.get(key)
        if number is None:  # one line has several places, such as a call and what it is called with
            by, via = (None if at is None else (at.f_code, at.f_lineno) for at in (user, inside))
            place = operation, by, via
            number = self._numbers.get(place)
            if number is None:
                number = self._numbers[place] = len(self.sites)
                self.sites.append(_site(operation, by, via, tensor, is_collective))
                module = _module()
                if module is not None:
                    self.modules[number] = ref(module)
            self._numbers[key] = number
        return number


def variables(frame: FrameType) -> dict[str, Any]:
    """A frame's variables, which it does not keep alive for having been asked.

    Before Python 3.13 a function's frame holds what it was asked for until it ends. That is let go again,
    unless the program has the same dict, from `locals()`, or a tracer may write it back to the frame.
    """
    held = frame.f_locals
    taken = dict(held)
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else they are a module's or a class's own
    if sys.version_info < (3, 13) and is_function and sys.getrefcount(held) == 3 and sys.gettrace() is None:
        held.clear()
    return taken


def _module() -> nn.Module | None:
    """The innermost module whose code runs. Frames of torch that call one are asked, not the program's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and code.co_filename == MODULE_FILE:
            owner = variables(frame).get("self")
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None


def _kind(path: str) -> int:
    """0: the user's code, 1: torch's, which may say who issued an operation, 2: neither."""
    if path.startswith(OURS) or path.startswith(PLUMBING) or path.startswith("<"):
        return 2
    return 1 if path.startswith(TORCH) else 0


def _site(operation: str, user: Any, inside: Any, tensor: Any, is_collective: bool) -> Site:
    node = torch._C._current_autograd_node() if user is None else None
    return Site(
        operation=operation,
        where="" if user is None else f"{_short(user[0].co_filename)}:{user[1]}",
        inside="" if inside is None else f"torch/{inside[0].co_filename[len(TORCH) :]}:{inside[1]}",
        function=user[0].co_qualname if user is not None else "" if node is None else node.name(),
        tensor="" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
        is_collective=is_collective,
    )


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
