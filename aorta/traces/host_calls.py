"""Ties device work to calls of the host: runtime API (link), annotations (step_marks), RCCL API
(CollectiveCalls). What else the host did (host_of_calls).

For readers whose profilers number calls by process: rocprofv3 and Nsight Systems.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aorta.records.schema import HostKind
from aorta.timeline.arrays import Flags, Ints
from aorta.timeline.collective import canonical_op
from aorta.timeline.intervals import distinct
from aorta.timeline.types import STEP_ANNOTATION
from aorta.traces.assemble import UNLINKED, CollectiveInfo, StepMark
from aorta.traces.host_spans import (
    NOTED_WAIT_NS,
    SERVED,
    HostEvent,
    HostSide,
    Operators,
    host_side,
    kinds_of_ranges,
    libraries_of,
    may_wait,
)

KERNEL_LAUNCH = re.compile(
    r"^(cuda|cu|hip)(Ext)?(Module)?Launch(Cooperative)?Kernel|^hipExtModuleLaunch", re.IGNORECASE
)
STEP_NAME = re.compile(rf"^(?P<kind>{re.escape(STEP_ANNOTATION)}|ProfilerStep#)(?P<step>\d{{1,18}})$")
RUNTIME = ("cu", "hip")
"""Starts of the names of runtime calls."""
OPERATOR = "aten::"
"""Start of the names of torch's operators."""
ITERATION = re.compile(
    rf"(?:{SERVED}|step\["
    r"|(?:(?:train|training|prefill|decode|inference)[ _-]?)?(?:step|iter|iteration)"
    r"(?:[ _#:=-]*(?P<step>\d{1,18}))?$)",
    re.IGNORECASE,
)
"""Annotations around one iteration: of vLLM, SGLang, TensorRT-LLM, and of loops that name theirs so."""
FEWEST_ITERATIONS = 2
"""A single one is no series of steps: the window of the trace says as much."""
NCCL_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
              "bfloat16", "float8_e4m3", "float8_e5m2")  # fmt: skip
"""Data types in the order of ncclDataType_t."""
NCCL_ALIASES = {"char": "int8", "int": "int32", "half": "float16", "float": "float32", "double": "float64"}
TYPE_BYTES = dict(zip(NCCL_TYPES, (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1), strict=True))
COUNT_ARGUMENTS = ("count", "sendcount", "recvcount")
SCALED_BY_RANKS = frozenset(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"))
"""Operations whose count argument is one rank's share."""


CallRow = tuple[int, int, int, int, str]
"""Correlation, start and end in ns, thread and name of a call."""


class HostCalls(NamedTuple):
    """Calls that launch device work, as columns."""

    correlation: Ints
    start_ns: Ints
    thread: Ints
    is_launch: Flags
    """True for calls that launch a kernel, by their names."""

    @classmethod
    def from_rows(cls, rows: Sequence[CallRow]) -> "HostCalls":
        if not rows:
            return NO_CALLS
        correlation, start, _, thread, name = zip(*rows, strict=True)
        launches = {text: bool(KERNEL_LAUNCH.match(text)) for text in set(name)}
        return cls(
            np.array(correlation, np.int64),
            np.array(start, np.int64),
            np.array(thread, np.int64),
            np.array([launches[text] for text in name], bool),
        )


NO_CALLS = HostCalls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, bool))


class Links(NamedTuple):
    """Launches of activities."""

    launch_ns: Ints
    """Start of the call that launched each activity, or UNLINKED."""
    thread: Ints
    """Thread that launched each activity; -1 where unknown."""
    num_launches: int | None
    dropped_ns: Ints
    """Starts of launches whose kernel the trace lacks."""


def link(correlation: Ints, calls: HostCalls) -> Links:
    """Launches of activities, found by correlation id."""
    launch_ns = np.full(len(correlation), UNLINKED)
    thread = np.full(len(correlation), -1, dtype=np.int64)
    if len(calls.correlation) == 0:
        return Links(launch_ns, thread, None, np.empty(0, np.int64))
    order = np.argsort(calls.correlation, kind="stable")
    position = np.searchsorted(calls.correlation[order], correlation)
    position[position == len(order)] = 0
    call = order[position]
    is_linked = calls.correlation[call] == correlation
    launch_ns[is_linked] = calls.start_ns[call[is_linked]]
    thread[is_linked] = calls.thread[call[is_linked]]
    dropped = calls.is_launch & ~np.isin(calls.correlation, correlation)
    return Links(launch_ns, thread, int(np.count_nonzero(calls.is_launch)), calls.start_ns[dropped])


def host_of_calls(
    rows: Sequence[CallRow], ranges: Sequence[HostEvent], copies: tuple[Sequence[int], Ints], links: Links
) -> HostSide:
    """What the host did, of calls of the runtime and ranges of NVTX or roctx: torch's emit_nvtx makes ranges
    of operators. copies: correlations, and when half of each was done. Raises OverflowError."""
    kinds = kinds_of_ranges({event.name for event in ranges})
    shown: set[HostKind] = set()
    if any(name.startswith(RUNTIME) for *_, name in rows):
        shown.add("synchronisation")
    if kinds or any(event.name.startswith(OPERATOR) for event in ranges):
        shown |= {"data", "backward", "optimizer"}
    backward = [event for event in ranges if kinds.get(event.name) == "backward"]
    threads = distinct(links.thread[links.launch_ns != UNLINKED]).tolist()
    edges = np.array([(event.start_ns, event.end_ns) for event in backward], np.int64).reshape(-1, 2)
    side = host_side(
        shown,
        ((kind, e) for e in ranges if (kind := kinds.get(e.name)) is not None and kind != "backward"),
        (
            HostEvent(name, start, end, thread, correlation)
            for correlation, start, end, thread, name in rows
            if end - start >= NOTED_WAIT_NS and may_wait(name)
        ),
        dict(zip(copies[0], copies[1].tolist(), strict=True)),
        {thread: links.launch_ns[links.thread == thread] for thread in threads},
        Operators(edges[:, 0], edges[:, 1], {event.thread for event in backward}),
        {event.thread for event in ranges if STEP_NAME.match(event.name)},
    )
    return side._replace(libraries=libraries_of(event.name for event in ranges))


def step_marks(annotations: Iterable[tuple[str, int, int, int]]) -> list[StepMark]:
    """Steps among annotations (name, index of the process, start and end in ns): aorta's own where
    there are any, else the profiler's, else the iterations that the program marks."""
    marks: dict[str, list[StepMark]] = {}
    iterations: list[tuple[str, StepMark]] = []
    for name, process, start_ns, end_ns in annotations:
        if match := STEP_NAME.match(name):
            mark = StepMark(int(match["step"]), process, start_ns, end_ns)
            marks.setdefault(match["kind"], []).append(mark)
        elif match := ITERATION.match(name):
            number = int(match["step"] or match["executed"] or -1)
            kind = re.split(r"[\d(\[]", name, maxsplit=1)[0] or name[:1]
            iterations.append((kind, StepMark(number, process, start_ns, end_ns)))
    return marks.get(STEP_ANNOTATION) or marks.get("ProfilerStep#") or _iterations(iterations)


def is_mark(name: str) -> bool:
    """Whether step_marks may take an annotation of this name for a step."""
    return STEP_NAME.match(name) is not None or ITERATION.match(name) is not None


def _iterations(annotations: Iterable[tuple[str, StepMark]]) -> list[StepMark]:
    """Of the kind that fills most time the marks, each up to the next; those within others are parts of them.

    They keep their numbers where all have one, and else count from 0.
    """
    outermost: dict[str, list[StepMark]] = {}
    until_ns: dict[int, int] = {}
    for kind, mark in sorted(annotations, key=lambda row: (row[1].start_ns, -row[1].end_ns)):
        if mark.start_ns >= until_ns.get(mark.process, mark.start_ns):
            until_ns[mark.process] = mark.end_ns
            outermost.setdefault(kind, []).append(mark)
    series = [marks for marks in outermost.values() if len(marks) >= FEWEST_ITERATIONS]
    if not series:
        return []
    marks = max(series, key=lambda marks: sum(mark.end_ns - mark.start_ns for mark in marks))
    numbers = [mark.step for mark in marks]
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        numbers = list(range(len(marks)))
    ends_ns = [*(mark.start_ns for mark in marks[1:]), marks[-1].end_ns]
    return [
        StepMark(number, mark.process, mark.start_ns, end_ns)
        for number, mark, end_ns in zip(numbers, marks, ends_ns, strict=True)
    ]


class HostCall(NamedTuple):
    """A call of the host, or a marker by its text."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    arguments: Mapping[str, str] = {}
    """Of the RCCL API alone."""
    correlation: int = 0
    domain: str = ""
    """Holds MARKER, RCCL or the name of another API."""


class CollectiveCalls:
    """Collectives that the threads of a process launched, from its calls of the RCCL (or NCCL) API.

    Inside ncclGroupStart and ncclGroupEnd calls only enqueue: the kernel is launched by the outermost
    ncclGroupEnd, for all of them.
    """

    def __init__(self, calls: Iterable[HostCall]) -> None:
        rows = sorted(calls, key=lambda call: call.start_ns)
        sizes = {
            int(n) for call in rows if (n := call.arguments.get("nranks", "")).isdecimal() and len(n) < 9
        }
        self.num_ranks = max(sizes, default=None)
        ranks = {
            int(rank)
            for call in rows
            if call.arguments.get("nranks") == str(self.num_ranks)
            for name in ("rank", "myrank")
            if (rank := call.arguments.get(name, "")).isdecimal() and len(rank) < 9
        }
        self.rank = min(ranks) if len(ranks) == 1 else None
        self._group_size = self.num_ranks if len(sizes) == 1 else None
        self._of_thread: dict[int, list[tuple[int, int, CollectiveInfo]]] = {}
        open_groups: dict[int, list[CollectiveInfo]] = {}
        depth: dict[int, int] = {}
        for call in rows:
            thread, info = call.thread, self._information(call)
            if call.name.startswith("ncclGroupStart"):
                depth[thread] = depth.get(thread, 0) + 1
            elif call.name.startswith("ncclGroupEnd") and depth.get(thread, 0) > 0:
                depth[thread] -= 1
                if depth[thread] == 0:
                    together = _together(open_groups.pop(thread, []))
                    if together is not None:
                        self._add(call, together)
            elif info is not None and depth.get(thread, 0) > 0:
                open_groups.setdefault(thread, []).append(info)
            elif info is not None:
                self._add(call, info)

    def call_at(self, thread: int, time_ns: int) -> CollectiveInfo | None:
        """Collective that the thread was launching at that time."""
        rows = self._of_thread.get(thread, [])
        i = bisect_right(rows, time_ns, key=lambda row: row[0]) - 1
        return rows[i][2] if i >= 0 and time_ns <= rows[i][1] else None

    def information(self, links: Links) -> dict[int, CollectiveInfo]:
        """Collectives by index of the activity that carries them out."""
        if not self._of_thread:
            return {}
        threads = np.array(sorted(self._of_thread))
        candidates = np.flatnonzero((links.launch_ns != UNLINKED) & np.isin(links.thread, threads))
        calls = {i: self.call_at(int(links.thread[i]), int(links.launch_ns[i])) for i in candidates.tolist()}
        return {i: info for i, info in calls.items() if info is not None}

    def _add(self, call: HostCall, info: CollectiveInfo) -> None:
        self._of_thread.setdefault(call.thread, []).append((call.start_ns, call.end_ns, info))

    def _information(self, call: HostCall) -> CollectiveInfo | None:
        op = canonical_op(call.name)
        if op is None:
            return None
        dtype = _dtype(call.arguments.get("datatype"))
        counts = [call.arguments.get(name, "") for name in COUNT_ARGUMENTS]
        count = next((int(text) for text in counts if text.isdecimal() and len(text) < 18), None)
        size = None
        if count is not None and dtype is not None:
            size = count * TYPE_BYTES[dtype]
            if op in SCALED_BY_RANKS:
                size = size * self._group_size if self._group_size else None
        return CollectiveInfo(op=op, bytes=size, dtype=dtype)


def _together(infos: list[CollectiveInfo]) -> CollectiveInfo | None:
    """Calls of one ncclGroup as one collective; None for none."""
    if not infos:
        return None
    ops = {info.op for info in infos}
    dtypes = {info.dtype for info in infos}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
    if len(ops) == 1:
        sizes = [info.bytes for info in infos if info.bytes is not None]
        size = sum(sizes) if len(sizes) == len(infos) else None
        return CollectiveInfo(op=infos[0].op, bytes=size, dtype=dtype)
    return CollectiveInfo(op="send_recv" if ops == {"send", "recv"} else None, dtype=dtype)


def _dtype(text: str | None) -> str | None:
    if text is None:
        return None
    if text.isdecimal():
        return NCCL_TYPES[int(text)] if len(text) < 3 and int(text) < len(NCCL_TYPES) else None
    name = text.lower().removeprefix("nccl")
    name = NCCL_ALIASES.get(name, name)
    return name if name in TYPE_BYTES else None
