"""Methods of a class, or functions of a module, that are ours for a while."""

from collections.abc import Callable
from typing import Any

from aorta.recording.interception.uncompiled import uncompiled


class ReplacedMethods:
    """Of one owner; `restore` puts back the very objects that were there."""

    def __init__(self, owner: Any) -> None:
        """owner: a class or a module."""
        self._owner = owner
        self._originals: dict[str, Any] = {}

    def replace(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """make: from the original, which takes the object first, to what stands in for it."""
        # Out of the class's dict: what getattr gives of a method of pybind11 would not bind when set again.
        self._originals[name] = vars(self._owner)[name]
        setattr(self._owner, name, uncompiled(make(getattr(self._owner, name))))

    def restore(self) -> None:
        for name, original in self._originals.items():
            setattr(self._owner, name, original)
        self._originals.clear()
