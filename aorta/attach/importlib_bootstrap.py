"""Functions of torch that call a hook of ours as well, and that torch's warnings do not name.

A library warns with stacklevel=2 so that Python names its caller's line, which would be one of ours; and
Python shows a warning once a line. It passes over frames of files that have `importlib` and `_bootstrap` in
their paths (warnings._is_internal_frame), as over its own import system: hence this file's name.
"""

import functools
from collections.abc import Callable
from typing import Any


def call_after(original: Callable[..., Any], hook: Callable[[tuple[Any, ...]], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        hook(args)
        return result

    return call


def call_before(original: Callable[..., Any], hook: Callable[[tuple[Any, ...]], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        hook(args)
        return original(*args, **named)

    return call


def call_after_save(
    original: Callable[..., Any], hook: Callable[[Any], None], storages: tuple[type, ...]
) -> Callable[..., Any]:
    """Of torch.save, with the file; not of storages, which pickle saves, in messages too."""

    @functools.wraps(original)
    def save(obj: Any, f: Any, *args: Any, **named: Any) -> None:
        original(obj, f, *args, **named)
        if not isinstance(obj, storages):
            hook(f)

    return save


def call_after_load(
    original: Callable[..., Any], hook: Callable[[Any], None], storages: tuple[type, ...]
) -> Callable[..., Any]:
    """Of torch.load, with the file; not of storages."""

    @functools.wraps(original)
    def load(f: Any, *args: Any, **named: Any) -> Any:
        result = original(f, *args, **named)
        if not isinstance(result, storages):
            hook(f)
        return result

    return load
