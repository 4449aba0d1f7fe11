"""What is noted of a step while it runs, and crosses the pipe to the process that makes records: no torch.

A RecordedStep holds everything. Calls, waits and marks are appended to it on the threads of the program, so
that noting takes no lock. Once it is closed and the device has passed it, the sending thread reads its marks
(aorta.record.sending) and sends it. Kernel records come later than the step that they belong to, in a
KernelChunk. Each message crosses the pipe in a Frame.
"""

from collections import Counter
from enum import IntEnum
from threading import get_ident
from typing import Any, TypeVar

import msgspec
import numpy as np

from aorta.records.schema import DeviceRecord, HostKind, Phase

LEFT_OUT = "left out by the overhead"

T = TypeVar("T")

CallId = tuple[str, int]
"""(group key, sequence number)."""


class Mark(msgspec.Struct, array_like=True, eq=False, gc=False):
    """A point on a stream. `host_ns` is the monotonic host time just before it was queued.

    Made by the hundred beside a training loop: in C, and unknown to the garbage collector, which
    would otherwise run more often (an event refers to nothing).
    """

    host_ns: int
    event: Any = None
    """None: set on the host, or read."""
    number: int = 0
    """The mark's number among the driver's kernel records; 0: it is not one of those."""
    ms: float | None = None
    """Time after its step's start on the device's clock, once the device was asked; None of a host's mark."""


class HostNote(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of the host's time: a batch, a backward pass, an optimizer, a checkpoint."""

    kind: HostKind
    start_ns: int
    """Monotonic, as end_ns."""
    end_ns: int
    where: str
    """Detail of the kind: the optimizer and its flags, or the place that waits for the device; else ''."""
    bytes: int | None = None
    """Bytes of the parameters that an optimizer updates on this rank."""


class LeftOutStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step that the overhead left out, and of which there is no more than this. Times are monotonic."""

    global_step: int
    rollbacks: int
    start_ns: int
    body_end_ns: int
    end_ns: int
    cpu_ns: int
    """CPU time of the step's thread."""
    ready_ns: int | None
    """Time in which it was ready and had no core. None: not read."""
    process_ns: int | None
    """CPU time of its process. None: not read."""
    own_ns: int
    """Time that the recorder's own code took at the step's ends."""
    notes: list[HostNote]


class LeftOutSteps(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Steps in a row that the overhead left out."""

    steps: list[LeftOutStep]
    reason: str
    """Why they are not recorded."""
    device: DeviceRecord | None
    """A sample that came since the steps before: in the line of the first of them."""
    not_measured: dict[str, str]
    """Where there is no device."""


class Group:
    """A process group as records name it, with what is known of its stream and its open group of calls.

    Of it key, name and ranks cross the pipe.
    """

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

    def __init__(self, key: str, name: str, ranks: list[int], backend: str = "") -> None:
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
        self.own_stream: Any = None
        """Stream (DeviceStream) of the group's asynchronous collectives, once known (event_observer.py)."""
        self.finder: Any = None
        """The search for that stream (GroupStreamFinder), while it goes on."""
        self.sought = False
        """The search has begun, or was found impossible."""
        self.placed = False
        """The device of the group's tensors has been compared with the recorder's."""


class CollectiveCall(msgspec.Struct, array_like=True, eq=False, gc=False):
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
    """Host time at which the launch returned: the kernel cannot be older than its launch. 0: not known."""
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
    phase: Phase | None = None
    """The phase of the step in which it was issued, once the step is read."""

    @property
    def id(self) -> CallId:
        return self.group.key, self.seq


class StreamWait(msgspec.Struct, array_like=True, eq=False, gc=False):
    """The compute stream waits for an asynchronous call, from `start` until the call has ended."""

    start: Mark
    call: CallId


class Stall(msgspec.Struct, array_like=True, eq=False, gc=False):
    """The compute stream was told to wait: it stands still from `start` to `end`.

    They are one mark where the event had passed already, so that nothing stood still.
    """

    start: Mark
    end: Mark


class FinalWait(msgspec.Struct, array_like=True, eq=False, gc=False):
    """C++ code waits for futures at the end of backward (DDP's reducer).

    The stream stands still until the last of `calls` has ended, and at most until `end`.
    """

    start: Mark
    calls: list[CallId]
    end: Mark | None = None


class LearnedCalls(msgspec.Struct, array_like=True, eq=False):
    """The collectives of a step in which none was seen: those of a step like it, in which all were."""

    calls: list[CollectiveCall]
    """Those of the step like it; [] once it is sent."""
    first_numbers: dict[str, int]
    """By the group's key: number of the step's first call in it."""
    number: int = 0
    """Of the CallSequence that was sent of them; 0: none was."""


Use = tuple[int, int, int | None, int | None, int | None, int | None]
"""A thread, its ns of CPU time, its ns of being ready without a core, ns of CPU time of its process, and of
the thread again its minor faults and its ns of CPU time in the system; None where nobody counts or reads
them."""


class RecordedStep(msgspec.Struct, array_like=True, eq=False):
    """Everything noted between the start of one step and the start of the next."""

    global_step: int
    step: int
    epoch: int
    tokens: int | None
    start: Mark | None = None
    body_end: Mark | None = None
    window_end: Mark | None = None
    host_start_ns: int = 0
    host_end_ns: int = 0
    use_at_start: Use | None = None
    use_at_end: Use | None = None
    compute_raw_stream: int = 0
    untimed: str | None = None
    """Reason why it is not known when compute stood still: only the step's ends are marked, or waits were not
    seen. None: all is marked."""
    by_kernels: bool = False
    """True: the driver's kernel records time the step, and only its ends are marked, by number."""
    left_out: str | None = None
    """Reason why the step is not recorded: it has the host's times and nothing else. None: it is."""
    logged: Mark | None = None
    """In a step that is not recorded: once it has passed, what was logged has reached the host."""
    own_ns: int = 0
    """Time of the recorder's own code at the step's ends."""
    is_detailed: bool = True
    """True: the step's line has its details: lists of collectives and segments, kernels by name."""
    is_unseen: bool = False
    """True: the step is recorded, and nothing was called for its collectives: `learned` has them."""
    learned: LearnedCalls | None = None
    """None in an unseen step: its collectives are not known, or `calls` holds them already."""
    num_calls: int | None = None
    """Number of collectives where `calls` does not hold them; None: it does."""
    counts: dict[str, int] | None = None
    """The backends' numbers of collectives at the step's start, by the group's key; None: not read."""
    first_numbers: dict[str, int] = {}
    """In an unseen step: number that the next call of a group has, by its key."""
    kernels_lost: str | None = None
    """Reason why the kernel records of this step are not whole; None: they are, as far as is known."""
    first_node: int = 0
    """Autograd's sequence number as the step began: nodes of its graphs have this one or later ones."""
    thread: int = msgspec.field(default_factory=get_ident)
    calls: list[CollectiveCall] = []
    host_notes: list[HostNote] = []
    waits: list[StreamWait] = []
    stalls: list[Stall] = []
    final_waits: list[FinalWait] = []
    lost_futures: list[CollectiveCall] = []
    """Calls whose future Python dropped in this step without a wait that was seen."""
    scalars: dict[str, Any] = {}
    """Numbers; until the step is read also those that are on their way from the device."""
    memory: tuple[int, int, int, int | None, int | None] | None = None
    """Allocated, reserved, peak allocated bytes; retries and segments given back, since the process began."""
    phase_peaks: tuple[int, int, int] | None = None
    """Bytes of the phases of aorta.record.phase_memory, at least."""
    rollbacks: int = 0
    gap: str | None = None
    """Reason why the step does not follow the one before it; None: it does."""
    gap_ms: float = 0.0
    """Time between the previous window's end and this start; 0 unless the recorder was paused."""
    device: DeviceRecord | None = None
    """The latest sample when the step was read."""
    not_measured: dict[str, str] = {}

    # Of a step whose window has ended:

    @property
    def start_ns(self) -> int:
        """Monotonic host time at which the start was queued."""
        assert self.start is not None
        return self.start.host_ns

    @property
    def body_end_ns(self) -> int:
        assert self.body_end is not None
        return self.body_end.host_ns

    @property
    def window_end_ns(self) -> int:
        assert self.window_end is not None
        return self.window_end.host_ns

    @property
    def body_ms(self) -> float:
        """Length of the body by what timed the step; of one that kernel records time by the host."""
        assert self.body_end is not None
        return self.ms_of(self.body_end)

    @property
    def window_ms(self) -> float:
        assert self.window_end is not None
        return self.ms_of(self.window_end)

    def ms_of(self, mark: Mark) -> float:
        """ms from the step's start to one of its marks, by the device's clock where that has set it."""
        return (mark.host_ns - self.start_ns) / 1e6 if mark.ms is None else mark.ms

    @property
    def kernel_marks(self) -> tuple[int, int, int]:
        """Numbers of the marks at the step's start, at the end of its body and of its window, among the
        driver's kernel records."""
        assert self.start is not None
        assert self.body_end is not None
        assert self.window_end is not None
        return self.start.number, self.body_end.number, self.window_end.number

    @property
    def modules(self) -> list[str]:
        """Modules and optimizers that the step's collectives serve, in their order."""
        return list(dict.fromkeys(call.module for call in self.calls if call.module is not None))


class CallSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The collectives of a step, sent once, for the unseen steps that are like it."""

    number: int
    calls: list[CollectiveCall]

    def of_step(self, step: RecordedStep) -> RecordedStep:
        """Return the unseen step with these collectives, numbered as its own."""
        assert step.learned is not None
        num_of_group = Counter(step.learned.first_numbers)
        calls = []
        for call in self.calls:
            key = call.group.key
            calls.append(msgspec.structs.replace(call, seq=num_of_group[key], launched_ns=0))
            num_of_group[key] += 1
        return msgspec.structs.replace(step, calls=calls, learned=None)


class ResolverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a rank's steps: sent once, when the process starts."""

    rank: int
    world_size: int
    on_device: bool
    clock_lower_ns: int
    clock_upper_ns: int
    """The device's first mark passed between these monotonic host times."""
    unix_minus_monotonic_ns: int
    run_id: str | None = None
    attempt: int = 0


RECORD_DTYPE = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("correlation", "u4"),
        ("stream", "u4"),
        ("name", "u4"),
        ("buffer", "u4"),
        ("device", "u2"),
        ("what", "u1"),
        ("in_graph", "u1"),
        ("unused", "u4"),
    ]
)
"""`Record` of aorta/device/native/kernel_ring.h. Times are monotonic ns; correlation counts up with every
call of the driver, so it orders launches; name is an index, of a mark its number, of a copy its kinds."""


class What(IntEnum):
    """Kinds of records."""

    KERNEL = 0
    COPY = 1
    SET = 2
    MARK = 3
    PEER_COPY = 4


class KernelChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Kernel records that have come since the last chunk."""

    records: bytes
    """Rows of RECORD_DTYPE."""
    names: list[str]
    """Names that are new: they follow those of earlier chunks."""
    settled: int
    """All records in driver's buffers with a lower number have come."""
    complete_ns: int
    """Every activity launched before this monotonic time has come; 0: this chunk does not tell."""
    num_lost: int
    """Records that found the ring full, so far."""
    lost_ns: tuple[int, int]
    """Monotonic start and end of the time in which they were lost."""
    num_dropped: int
    """Records that the driver had no room for, so far."""
    num_no_time: int = 0
    """Records without times, so far; they are not among `records`."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to the process; exactly one of the first five fields is set."""

    step: RecordedStep | None = None
    left_out: LeftOutSteps | None = None
    sequence: CallSequence | None = None
    kernels: KernelChunk | None = None
    close: bool = False
    reply: bool = False
    """Send the step's record back: the recorder's listener wants it."""


def encoded(message: Any) -> bytes:
    """A message as msgpack. Each group goes once, and its place afterwards; what is of use in its own process
    alone (events) does not."""
    places: dict[Group, int] = {}

    def plain(value: Any) -> tuple[str, str, list[int]] | int | None:
        if not isinstance(value, Group):
            return None
        if value in places:
            return places[value]
        places[value] = len(places)
        return value.key, value.name, value.ranks

    return msgspec.msgpack.encode(message, enc_hook=plain)


def decoded(data: bytes, kind: type[T]) -> T:
    """The message of `encoded`; msgspec.MsgspecError where it is none."""
    groups: list[Group] = []

    def group(_: type, value: Any) -> Group:
        if isinstance(value, int):
            return groups[value]
        groups.append(Group(*value))
        return groups[-1]

    return msgspec.msgpack.decode(data, type=kind, dec_hook=group)
