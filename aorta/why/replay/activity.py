"""The host calls and the device work of one rank's trace, as columns; the classes of device work."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from aorta.timeline.arrays import Ints
from aorta.timeline.types import STEP_ANNOTATION
from aorta.traces.classify import COPY, kernel_class
from aorta.traces.host_spans import SYNCHRONISES

RECORD_NAME = re.compile(r"^(cuda|cu|hip)EventRecord")
WAIT_NAME = re.compile(r"^(cuda|cu|hip)StreamWaitEvent")
PLAIN = ("nccl:", "ProfilerStep#", STEP_ANNOTATION)
"""Annotations that name no part of the program."""
ACCUMULATE_GRADIENT = "torch::autograd::AccumulateGrad"
OPTIMIZER_SCOPE = re.compile(r"Optimizer\.|optimizer|clip_grad", re.IGNORECASE)
SHARDING_SCOPE = re.compile(r"FSDP::(?!cast_forward_inputs)|torch::autograd::AccumulateGrad|Reducer")
"""Scopes that gather parameters or reduce gradients: work that does not depend on the batch."""
OPTIMIZER = "optimizer"
FOREACH = "aten::_foreach_"
"""Operators over lists of tensors."""


# ---- the trace of one rank, as columns -----------------------------------------------------------


class CallKind(IntEnum):
    LAUNCH = 0
    """Started device work that the trace holds."""
    RECORD = 1
    """Recorded an event on a stream."""
    WAIT = 2
    """Made a stream wait for an event."""
    SYNC = 3
    """May block the host until the device is done."""


def call_kind(name: str) -> CallKind | None:
    """The kind of a call by its name; None where it only matters if it started device work."""
    if SYNCHRONISES.match(name):
        return CallKind.SYNC
    if RECORD_NAME.match(name):
        return CallKind.RECORD
    if WAIT_NAME.match(name):
        return CallKind.WAIT
    return None


class WorkKind(IntEnum):
    COMPUTE = 0
    COMM = 1
    COPY = 2


@dataclass(slots=True)
class Calls:
    """Host calls in order of their starts."""

    start_ns: Ints
    end_ns: Ints
    kind: Ints
    name: list[str]
    thread: list[str]
    correlation: list[int | str | None]

    def __len__(self) -> int:
        return len(self.name)


@dataclass(slots=True)
class Work:
    """Device activities in order of their starts."""

    start_ns: Ints
    end_ns: Ints
    kind: Ints
    name: list[str]
    shape: list[str]
    """Grid and block: kernels of one name and shape do the same work."""
    stream: list[str]
    call: Ints
    """Place in Calls of the call that started it; -1 where the trace lacks it."""
    collective: Ints
    """Place among the rank's collectives; -1 for other work."""

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """A wait that the profiler recorded with its event (synchronisation events)."""

    correlation: int | str
    kind: str
    """'Stream Wait Event', 'Event Sync', 'Stream Sync' or 'Context Sync'."""
    stream: str | None
    record: int | str | None
    """Correlation of the call that recorded the event."""
    record_stream: str | None
    event: int | None = None
    """Number of the event: events are numbered as they are made."""


@dataclass(frozen=True, slots=True)
class StepAnnotation:
    """A step's annotation on the host."""

    step: int
    thread: str
    start_ns: int
    end_ns: int


class Scopes:
    """Answers which part of the program a thread was in: innermost operator and innermost annotation."""

    def __init__(self, rows: Sequence[tuple[str, int, int, str, bool]]) -> None:
        """rows: thread, start and end in ns, name, whether it is a user's annotation."""
        self._rows: dict[str, list[tuple[int, int, str, bool]]] = {}
        for thread, start, end, name, is_annotation in rows:
            self._rows.setdefault(thread, []).append((start, end, name, is_annotation))
        self._nested: dict[str, tuple[list[int], list[int]]] = {}

    def innermost(self, thread: str, time_ns: int) -> tuple[str | None, str | None]:
        """Innermost operator, and innermost annotation that names a part of the program, of the thread at a
        time. What autograd does with a finished gradient is annotated: its work is on parameters."""
        operator = None
        for name, is_annotation in self._around(thread, time_ns):
            if not is_annotation:
                operator = operator or name
                if name.endswith(ACCUMULATE_GRADIENT):
                    return operator, ACCUMULATE_GRADIENT
            elif not name.startswith(PLAIN):
                return operator, name
        return operator, None

    def annotations(self, thread: str, time_ns: int) -> list[str]:
        """Annotations around a time that name a part of the program, the innermost first."""
        around = self._around(thread, time_ns)
        return [name for name, is_annotation in around if is_annotation and not name.startswith(PLAIN)]

    def _around(self, thread: str, time_ns: int) -> Iterator[tuple[str, bool]]:
        """Name of what the thread is in at a time, the innermost first, and whether it is an annotation."""
        rows = self._rows.get(thread, [])
        if thread not in self._nested:
            self._nested[thread] = _nest(rows)
        starts, parent = self._nested[thread]
        i = bisect_right(starts, time_ns) - 1
        while i >= 0:
            _, end, name, is_annotation = rows[i]
            if time_ns < end:
                yield name, is_annotation
            i = parent[i]


def _nest(rows: list[tuple[int, int, str, bool]]) -> tuple[list[int], list[int]]:
    """Starts, and for every row the nearest earlier row that had not ended when it began."""
    rows.sort(key=lambda row: (row[0], -row[1]))
    parent: list[int] = []
    stack: list[int] = []
    for i, (start, _, _, _) in enumerate(rows):
        while stack and rows[stack[-1]][1] <= start:
            stack.pop()
        parent.append(stack[-1] if stack else -1)
        stack.append(i)
    return [row[0] for row in rows], parent


@dataclass(slots=True)
class RankActivity:
    """Calls, device work and synchronisation in the trace of one rank."""

    rank: int
    calls: Calls
    work: Work
    waits: list[SyncRecord]
    scopes: Scopes
    marks: list[StepAnnotation]
    compute_stream: str
    base_ns: int = 0
    """Added to every time for the Unix clock."""
    host_events: float = 0.0
    """Host events that the profiler recorded per marked step."""
    has_host: bool = True
    """Device work is linked to host calls."""
    notes: list[str] = field(default_factory=list)


# ---- what device work is for ---------------------------------------------------------------------


def work_class(name: str, program: str, unit: str) -> str:
    """The class of a kernel. Kernels over lists of tensors are the optimizer's by name; what launched them
    knows better."""
    scope = f"{program} {unit}"
    if OPTIMIZER_SCOPE.search(scope):
        return OPTIMIZER
    label = kernel_class(name)
    if label == OPTIMIZER and FOREACH in program and not SHARDING_SCOPE.search(scope):
        return "elementwise"  # clipping gradients, say: an optimizer's step has an annotation of its own
    return COPY if label == OPTIMIZER and SHARDING_SCOPE.search(scope) else label


def depends_on_batch(name: str, program: str, unit: str) -> bool:
    """True if the work grows with the samples of a pass; false for the optimizer, gathering parameters and
    reducing gradients."""
    if FOREACH in program:
        return False  # over parameters or gradients
    return work_class(name, program, unit) != OPTIMIZER and not SHARDING_SCOPE.search(f"{program} {unit}")
