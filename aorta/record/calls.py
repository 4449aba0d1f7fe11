"""What a step notes while it runs (calls of collectives, waits, ranges), and the interface of who is told of a collective."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.marks import Mark
from aorta.records.schema import HostKind

if TYPE_CHECKING:
    from aorta.device.event_clock import DeviceStream
    from aorta.record.event_observer import GroupStreamFinder


class Group:
    """A process group as records name it."""

    __slots__ = (
        "backend",
        "coalesced_tensors",
        "coalescing",
        "described_as",
        "finder",
        "key",
        "name",
        "next_seq",
        "num_internal",
        "own_stream",
        "placed",
        "ranks",
        "sought",
    )

    def __init__(self, key: str, name: str, ranks: list[int], backend: str) -> None:
        self.key = key
        self.name = name
        self.described_as = name
        """The name may have a number besides."""
        self.ranks = ranks
        self.backend = backend
        self.next_seq = 0
        self.num_internal = 0
        """Numbers that the backend gave to calls that it made itself, within calls of the program."""
        self.coalescing: list[CollectiveCall] | None = None
        """Members of the coalesced group that is open now."""
        self.coalesced_tensors: list[Any] = []
        """Theirs."""
        self.forget_stream()

    def forget_stream(self) -> None:
        """Another process group has the name now."""
        self.own_stream: DeviceStream | None = None
        """Stream of its asynchronous collectives, once known (aorta.record.event_observer)."""
        self.finder: GroupStreamFinder | None = None
        """Looks for it."""
        self.sought = False
        self.placed = False
        """Its tensors were found to be on the recorder's device, or not."""


class CollectiveCall(msgspec.Struct, eq=False, gc=False):
    """One collective of this rank, or a coalesced group of them.

    Like the marks, made in C and unknown to the garbage collector: nothing that it refers to refers back.
    """

    group: Group
    op: str
    bytes: int
    dtype: str
    is_async: bool
    peer: int | None = None
    seq: int = -1
    stream: str = ""
    start: Mark | None = None
    issued_ns: int = 0
    """Host time before the launch, where no start is marked."""
    launched_ns: int = 0
    """Host time at which the launch returned: the kernel cannot be older than its launch."""
    end: Mark | None = None
    on_compute: bool = False
    """The start mark lies on the compute stream."""
    blocks: bool = False
    """The compute stream stands still from start to end (it ran there, or was waited for there)."""
    waited: bool = False
    """The compute stream (CPU: the step's thread) already follows this asynchronous call."""
    future_taken: bool = False
    backward_waited: bool = False
    """What C++ waited for at the end of backward may have been its future."""
    members: "list[CollectiveCall] | None" = None
    ends_unseen: bool = False
    """Its end is known from the wait for it alone."""
    failed: bool = False
    """It ended with an error: of its peers, some may never have come to it."""
    reason: str | None = None
    """Why the call has no times."""
    module: str | None = None
    """What it is for: a unit of fully_shard, a bucket of DDP, a layer, an optimizer."""


class HostNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the program did on the host for a while."""

    kind: HostKind
    start_ns: int
    """Monotonic, as end_ns."""
    end_ns: int
    where: str
    """The optimizer and its flags; the place that waits for the device; ''."""
    bytes: int | None = None
    """Of the parameters that an optimizer updates on this rank."""


class StreamWait(msgspec.Struct, eq=False, gc=False):
    """The compute stream waits for an asynchronous call, from `before` until the call has ended."""

    start: Mark
    call: CollectiveCall


class Stall(msgspec.Struct, eq=False, gc=False):
    """The compute stream was told to wait: it stands still from `before` to `after`.

    One mark is both where what it was to wait for had passed already.
    """

    start: Mark
    end: Mark


class FinalWait:
    """C++ code waits for futures at the end of backward (DDP's reducer).

    It stands still until the last of `calls` has ended, and at most until `after`.
    """

    __slots__ = ("end", "start", "calls")

    def __init__(self, start: Mark, calls: "list[CollectiveCall]") -> None:
        self.start = start
        self.end: Mark | None = None
        self.calls = calls


class MarkedRange:
    """Work on a named stream that is not a collective (aux: prefetch copies)."""

    __slots__ = ("end", "name", "start")

    def __init__(self, name: str, start: Mark) -> None:
        self.name = name
        self.start = start
        self.end: Mark | None = None


class RecordedStep:
    """Everything noted between the start of one step and the start of the next."""

    __slots__ = (
        "body_end",
        "by_kernels",
        "by_library",
        "calls",
        "compute_raw_stream",
        "epoch",
        "final_waits",
        "gap",
        "global_step",
        "host_end_ns",
        "host_notes",
        "host_start_ns",
        "kernels_lost",
        "lost_futures",
        "memory",
        "ranges",
        "rollbacks",
        "scalars",
        "stalls",
        "start",
        "step",
        "thread",
        "tokens",
        "untimed",
        "use_at_end",
        "use_at_start",
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
        self.use_at_start: tuple[int, int, int | None] | None = None
        """Readings of ThreadUse at the window's ends."""
        self.use_at_end: tuple[int, int, int | None] | None = None
        self.compute_raw_stream = 0
        self.untimed: str | None = None
        """Why collectives are only noted, and nothing is marked but the step's ends; None: all is marked."""
        self.by_kernels = False
        """Timed by the driver's kernel records: nothing is marked but the step's ends, by number."""
        self.by_library = False
        """The collective library records events of its calls."""
        self.kernels_lost: str | None = None
        """Why the kernel records of this step are not whole."""
        self.thread = threading.get_ident()
        self.calls: list[CollectiveCall] = []
        self.host_notes: list[HostNote] = []
        self.waits: list[StreamWait] = []
        self.stalls: list[Stall] = []
        self.final_waits: list[FinalWait] = []
        self.lost_futures: list[CollectiveCall] = []
        """Calls whose future Python let go of in this step, and nobody was seen to wait for it."""
        self.ranges: list[MarkedRange] = []
        self.scalars: dict[str, Any] = {}
        self.memory: tuple[int, int, int, int | None] | None = None
        self.rollbacks = 0
        self.gap: str | None = None
        """Why it does not follow the step before it."""


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
