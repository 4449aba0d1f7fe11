"""Who is told of a collective: the interface between what sees calls and what times them."""

from collections.abc import Callable
from typing import Any, Protocol

from torch._C._distributed_c10d import ProcessGroup, Work

Launch = Callable[[], Any]
"""Starts the call on the backend; gives its Work, or None where it ran on the caller's stream."""


class Observer(Protocol):
    """Of the calls on one kind of device."""

    def observe(
        self,
        group: ProcessGroup,
        op: str,
        tensors: Any,
        num_bytes: int,
        dtype: str,
        is_async: bool,
        launch: Launch,
        peer: int | None = None,
    ) -> Work:
        """Launch the call and return a work that behaves as the launched one."""
        ...

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        """The backend gave numbers to as many calls that it made itself, within a call of the program."""
        ...

    def coalescing_started(self, group: ProcessGroup) -> None: ...

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None: ...
