"""What the recorder notes while a step runs: calls of collectives, waits, ranges.

These are plain slots filled on the hot path. Nothing is computed here; `extract` turns them into
plain numbers once the device has passed their marks. A call never owns a tensor after the
process group's own work would have let it go.
"""

import threading
from typing import Any

from aorta.device.marks import Mark


class Group:
    """A process group as records name it."""

    __slots__ = ("backend", "coalescing", "key", "name", "next_seq", "ranks")

    def __init__(self, key: str, name: str, ranks: list[int], backend: str) -> None:
        self.key = key
        self.name = name
        self.ranks = ranks
        self.backend = backend
        self.next_seq = 0
        self.coalescing: list[Call] | None = None
        """Members of the coalesced group that is open now."""


class Call:
    """One collective of this rank, or a coalesced group of them."""

    __slots__ = (
        "blocks",
        "bytes",
        "dtype",
        "end",
        "future_taken",
        "group",
        "is_async",
        "launched_ns",
        "members",
        "on_compute",
        "op",
        "peer",
        "reason",
        "seq",
        "start",
        "stream",
        "waited",
    )

    def __init__(
        self,
        group: Group,
        op: str,
        num_bytes: int,
        dtype: str,
        is_async: bool,
        peer: int | None = None,
    ) -> None:
        self.group = group
        self.op = op
        self.bytes = num_bytes
        self.dtype = dtype
        self.is_async = is_async
        self.peer = peer
        self.seq = -1
        self.stream = ""
        self.start: Mark | None = None
        self.launched_ns = 0
        """Host time at which the launch returned: the kernel cannot be older than its launch."""
        self.end: Mark | None = None
        self.on_compute = False
        """The start mark lies on the compute stream."""
        self.blocks = False
        """The compute stream stands still from start to end (it ran there, or was waited for there)."""
        self.waited = False
        """The compute stream (CPU: the step's thread) already follows this asynchronous call."""
        self.future_taken = False
        self.members: list[Call] | None = None
        self.reason: str | None = None
        """Why the call has no times."""


class Wait:
    """The compute stream waits for an asynchronous call, from `before` until the call has ended."""

    __slots__ = ("before", "call")

    def __init__(self, before: Mark, call: Call) -> None:
        self.before = before
        self.call = call


class Stall:
    """The compute stream was told to wait: it stands still from `before` to `after`."""

    __slots__ = ("after", "before")

    def __init__(self, before: Mark, after: Mark) -> None:
        self.before = before
        self.after = after


class FinalWait:
    """C++ code waits for futures at the end of backward (DDP's reducer).

    It stands still until the last of `calls` has ended, and at most until `after`.
    """

    __slots__ = ("after", "before", "calls")

    def __init__(self, before: Mark, calls: "list[Call]") -> None:
        self.before = before
        self.after: Mark | None = None
        self.calls = calls


class Range:
    """Work on a named stream that is not a collective (aux: prefetch copies)."""

    __slots__ = ("end", "name", "start")

    def __init__(self, name: str, start: Mark) -> None:
        self.name = name
        self.start = start
        self.end: Mark | None = None


class Step:
    """Everything noted between the start of one step and the start of the next."""

    __slots__ = (
        "body_end",
        "calls",
        "compute_raw_stream",
        "epoch",
        "final_waits",
        "global_step",
        "host_end_ns",
        "host_start_ns",
        "memory",
        "ranges",
        "scalars",
        "stalls",
        "start",
        "step",
        "thread",
        "tokens",
        "waits",
        "window_end",
    )

    def __init__(self, global_step: int, step: int, epoch: int, tokens: int | None) -> None:
        self.global_step = global_step
        self.step = step
        self.epoch = epoch
        self.tokens = tokens
        self.start: Mark | None = None
        self.body_end: Mark | None = None
        self.window_end: Mark | None = None
        self.host_start_ns = 0
        self.host_end_ns = 0
        self.compute_raw_stream = 0
        self.thread = threading.get_ident()
        self.calls: list[Call] = []
        self.waits: list[Wait] = []
        self.stalls: list[Stall] = []
        self.final_waits: list[FinalWait] = []
        self.ranges: list[Range] = []
        self.scalars: dict[str, Any] = {}
        self.memory: tuple[int, int, int] | None = None
