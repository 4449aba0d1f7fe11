"""The messages of the recorder to the process that makes records: plain numbers, no device, no torch.

A step is a RawStep. Kernel records come later than the step that they belong to, in a
KernelChunk. Each message crosses the pipe in a Frame.
"""

from enum import IntEnum

import msgspec
import numpy as np

from aorta.records.schema import DeviceRecord, HostKind, Phase

RawMark = tuple[float | None, int]
"""(ms after the step's start on the device's clock, None if the mark was set on the host's;
monotonic host ns at which it was queued)."""

CallId = tuple[str, int]
"""(group key, sequence number)."""


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


class RawGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    key: str
    name: str
    ranks: list[int]


class RawMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    op: str
    bytes: int
    dtype: str
    peer: int | None


class RawCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One collective. start and end are None where it has no times, and `reason` says why."""

    group: int
    """Index into RawStep.groups."""
    op: str
    stream: str
    bytes: int
    dtype: str
    seq: int
    is_async: bool
    blocks: bool
    """The compute stream stands still from start to end."""
    start: RawMark | None
    launched_ns: int
    """Monotonic host time at which the launch returned, 0 if unknown."""
    end: RawMark | None
    reason: str | None
    members: list[RawMember] | None
    on_compute: bool = False
    """The start mark lies on the compute stream."""
    module: int | None = None
    """Index into RawStep.modules."""
    phase: Phase | None = None


class RawStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    global_step: int
    step: int
    epoch: int
    tokens: int | None
    start_ns: int
    """Monotonic host time at which the start was queued."""
    window_ms: float
    body_ms: float
    body_end_ns: int
    window_end_ns: int
    host_ms: float
    groups: list[RawGroup] = []
    calls: list[RawCall] = []
    waits: list[tuple[RawMark, CallId]] = []
    """(mark, call): the compute stream began to wait for an asynchronous call."""
    stalls: list[tuple[RawMark, RawMark]] = []
    final_waits: list[tuple[RawMark, RawMark | None, list[CallId]]] = []
    """(before, after, calls): the compute stream waits for the last of the calls."""
    scalars: dict[str, float] = {}
    memory: tuple[int, int, int, int | None, int | None] | None = None
    """Allocated, reserved, peak allocated bytes; retries and segments given back, since the process began."""
    device: DeviceRecord | None = None
    not_measured: dict[str, str] = {}
    gap_ms: float = 0.0
    """Time between the previous window's end and this start; 0 unless the recorder was paused."""
    untimed: str | None = None
    """Why it is not known when compute stood still: waits, and mostly the calls' times, were not noted or not
    seen. None: it is known."""
    kernel_marks: tuple[int, int, int] | None = None
    """Numbers of the marks at the step's start, at the end of its body and of its window, among the driver's
    kernel records; None: the step was timed by events. window_ms and body_ms then mean nothing."""
    kernels_lost: str | None = None
    """Why the step has no kernel records though it was to be timed by them."""
    phase_peaks: tuple[int, int, int] | None = None
    """Bytes in forward, backward, and behind it up to the optimizer's end."""
    rollbacks: int = 0
    gap: str | None = None
    modules: list[str] = []
    """Modules and optimizers that this step's collectives serve; RawCall.module is an index."""
    host_notes: list[HostNote] = []
    host_use: tuple[float, float | None] | None = None
    """CPU and ready ms of the step's thread in the window."""
    own_ms: float | None = None
    """Time that the recorder's own code took at the step's ends."""
    left_out: str | None = None
    """Why the step is not recorded: it has the host's times alone. None: it is recorded."""
    num_calls: int | None = None
    """Number of collectives where `calls` does not hold them; None: it does."""
    is_detailed: bool = True
    """The step's line has details: lists of collectives and segments, kernels by name."""
    is_unseen: bool = False
    """The step's collectives were not seen one by one."""
    learned: tuple[int, list[int]] | None = None
    """Of an unseen step: number of the RawSequence that its collectives are taken for, and the number of the
    first one of each of its groups. None: they are not known, or `calls` holds them already."""


class RawSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The collectives of a step, sent once, for the unseen steps that are like it."""

    number: int
    groups: list[RawGroup]
    calls: list[RawCall]
    """seq counts from the group's first call of the step."""
    modules: list[str]

    def of_step(self, step: RawStep, first_numbers: list[int]) -> RawStep:
        """Return the unseen step with these collectives."""
        return msgspec.structs.replace(
            step,
            groups=self.groups,
            calls=[
                msgspec.structs.replace(call, seq=first_numbers[call.group] + call.seq) for call in self.calls
            ],
            modules=self.modules,
            learned=None,
        )


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
"""`Record` of aorta/device/native/kernel_records.c. Times are monotonic ns; correlation counts up with every
call of the driver, so it orders launches; name is an index, of a mark its number."""


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

    step: RawStep | None = None
    left_out: LeftOutSteps | None = None
    sequence: RawSequence | None = None
    kernels: KernelChunk | None = None
    close: bool = False
    reply: bool = False
    """Send the step's record back: the recorder's listener wants it."""
