"""Types of what is noted of a step while it runs, and the interface of those who are told of a collective.

A RecordedStep holds everything; the journal says which one is open; extract.py reads it once it is closed.
Its lists are only appended to, so that noting takes no lock.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.marks import Mark
from aorta.steps.raw import HostNote

if TYPE_CHECKING:
    from aorta.device.event_clock import DeviceStream
    from aorta.record.group_stream import GroupStreamFinder


LEFT_OUT = "left out by the overhead"


class Group:
    """A process group as records name it, with what is known of its stream and its open group of calls."""

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
        """The name without the number that tells groups of the same ranks apart."""
        self.ranks = ranks
        self.backend = backend
        self.next_seq = 0
        self.num_internal = 0
        """Sequence numbers that the backend took for calls of its own, within calls of the program."""
        self.coalescing: list[CollectiveCall] | None = None
        """Members of the coalesced group that is open now."""
        self.coalesced_tensors: list[Any] = []
        """Tensors of the calls in `coalescing`, kept alive until the group ends."""
        self.forget_stream()

    def forget_stream(self) -> None:
        """Forget what is known of the stream: another process group has the name now."""
        self.own_stream: DeviceStream | None = None
        """Stream of the group's asynchronous collectives, once known (event_observer.py)."""
        self.finder: GroupStreamFinder | None = None
        """The search for that stream, while it goes on."""
        self.sought = False
        """The search has begun, or was found impossible."""
        self.placed = False
        """The device of the group's tensors has been compared with the recorder's."""


class CollectiveCall(msgspec.Struct, eq=False, gc=False):
    """One collective of this rank, or a coalesced group of them.

    Made in C and unknown to the garbage collector, like the marks, because a step makes thousands. That is
    safe as long as nothing that it refers to refers back to it.
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
    """True: the start mark lies on the compute stream."""
    blocks: bool = False
    """True: the compute stream stands still from start to end (it ran there, or was waited for there)."""
    waited: bool = False
    """True: the compute stream (CPU: the step's thread) already follows this asynchronous call."""
    future_taken: bool = False
    backward_waited: bool = False
    """True: C++ waited for futures at the end of backward, and this call's may have been among them."""
    members: "list[CollectiveCall] | None" = None
    """The calls of a coalesced group; None for a single call."""
    ends_unseen: bool = False
    """True: only a wait for the call tells when it ended."""
    failed: bool = False
    """True: the call ended with an error; some of its peers may never have come to it."""
    reason: str | None = None
    """Reason why the call has no times; None: it has."""
    module: str | None = None
    """Name of what the call is for: a unit of fully_shard, a bucket of DDP, a layer, an optimizer."""


class StreamWait(msgspec.Struct, eq=False, gc=False):
    """The compute stream waits for an asynchronous call, from `start` until the call has ended."""

    start: Mark
    call: CollectiveCall


class Stall(msgspec.Struct, eq=False, gc=False):
    """The compute stream was told to wait: it stands still from `start` to `end`.

    They are one mark where the event had passed already, so that nothing stood still.
    """

    start: Mark
    end: Mark


class FinalWait:
    """C++ code waits for futures at the end of backward (DDP's reducer).

    The stream stands still until the last of `calls` has ended, and at most until `end`.
    """

    __slots__ = ("end", "start", "calls")

    def __init__(self, start: Mark, calls: "list[CollectiveCall]") -> None:
        self.start = start
        self.end: Mark | None = None
        self.calls = calls


class LearnedCalls:
    """The collectives of a step in which none was seen: those of a step like it, in which all were."""

    __slots__ = ("first_numbers", "like")

    def __init__(self, like: "RecordedStep", first_numbers: dict[str, int]) -> None:
        self.like = like
        self.first_numbers = first_numbers
        """By the group's key: number of the step's first call in it."""


class RecordedStep:
    """Everything noted between the start of one step and the start of the next."""

    __slots__ = (
        "body_end",
        "by_kernels",
        "calls",
        "compute_raw_stream",
        "counts",
        "epoch",
        "final_waits",
        "first_node",
        "first_numbers",
        "gap",
        "global_step",
        "host_end_ns",
        "host_notes",
        "host_start_ns",
        "is_detailed",
        "is_unseen",
        "kernels_lost",
        "learned",
        "left_out",
        "logged",
        "lost_futures",
        "memory",
        "own_ns",
        "phase_peaks",
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
        """Readings of host.ThreadUse at the window's start and end."""
        self.use_at_end: tuple[int, int, int | None] | None = None
        self.compute_raw_stream = 0
        self.untimed: str | None = None
        """Reason why only the step's ends are marked and collectives have no times; None: all is marked."""
        self.by_kernels = False
        """True: the driver's kernel records time the step, and only its ends are marked, by number."""
        self.left_out: str | None = None
        """Reason why the step is not recorded: it has the host's times and nothing else. None: it is."""
        self.logged: Mark | None = None
        """In a step that is not recorded: once it has passed, what was logged has reached the host."""
        self.own_ns = 0
        """Time of the recorder's own code at the step's ends."""
        self.is_detailed = True
        """True: the step's line has its details."""
        self.is_unseen = False
        """True: the step is recorded, and nothing was called for its collectives: `learned` has them."""
        self.learned: LearnedCalls | None = None
        """None in an unseen step: its collectives are not known."""
        self.counts: dict[str, int] | None = None
        """The backends' numbers of collectives at the step's start, by the group's key; None: not read."""
        self.first_numbers: dict[str, int] = {}
        """In an unseen step: number that the next call of a group has, by its key."""
        self.kernels_lost: str | None = None
        """Reason why the kernel records of this step are not whole; None: they are, as far as is known."""
        self.first_node = 0
        """Autograd's sequence number as the step began: nodes of its graphs have this one or later ones."""
        self.thread = threading.get_ident()
        self.calls: list[CollectiveCall] = []
        self.host_notes: list[HostNote] = []
        self.waits: list[StreamWait] = []
        self.stalls: list[Stall] = []
        self.final_waits: list[FinalWait] = []
        self.lost_futures: list[CollectiveCall] = []
        """Calls whose future Python dropped in this step without a wait that was seen."""
        self.scalars: dict[str, Any] = {}
        self.memory: tuple[int, int, int, int | None, int | None] | None = None
        self.phase_peaks: tuple[int, int, int] | None = None
        """Bytes of the phases of aorta.record.phase_memory, at least."""
        self.rollbacks = 0
        self.gap: str | None = None
        """Reason why the step does not follow the one before it; None: it does."""


Launch = Callable[[], Any]
"""Starts the call on the backend; returns its Work, or None where it ran on the caller's stream."""


class Observer(Protocol):
    """Is told of every collective on one kind of device, and launches it."""

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

    def numbered_itself(self, group: ProcessGroup, num_calls: int) -> None:
        """Note that the backend numbered num_calls calls of its own, within a call of the program."""

    def coalescing_started(self, group: ProcessGroup) -> None:
        """Note that the calls from here on are members of one coalesced group."""

    def coalescing_ended(self, group: ProcessGroup, launch: Launch) -> Work | None:
        """Launch the coalesced group, as one call."""
