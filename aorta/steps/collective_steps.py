"""Joins the collective library's events with the calls of a step: one to one, in the order of launch.

The events of one kernel have one plan, so plans are matched to calls as kernels are
(aorta.steps.kernel_steps). A communicator belongs to one group: a match that says otherwise is none.
"""

from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.records.schema import CollectiveRecord, LibraryCall, LibraryCoverage, StepRecord
from aorta.steps.clocks import DeviceTimer
from aorta.steps.event_steps import ExactSpan
from aorta.steps.kernel_steps import LaunchedKernel, kernel_op, match_calls
from aorta.steps.raw import EVENT_DTYPE, CollectiveChunk, Flag, RawStep, TimedBy

Events = NDArray[np.void]

_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "send_recv",
    "Recv": "send_recv",
    "SendRecv": "send_recv",
    "AlltoAll": "send_recv",
    "Gather": "send_recv",
    "Scatter": "send_recv",
}
"""Operations by the library's names of its functions."""
_MOST_EVENTS = 1_000_000
"""Events kept while no step asks for them."""
_MOST_BEFORE_NS = 1_000_000
"""How far before the library's note of a launch its kernel may have begun."""
_SHOWN = 5
"""Leftovers that are named; all are counted."""


class CallEvents(NamedTuple):
    """The library's events of one call."""

    rows: Events
    device: tuple[int, int] | None
    """First start and last end in ticks of the device's timer; None where not all have them."""
    host_ns: tuple[int, int] | None
    """First start and last end in monotonic ns."""
    has_end: bool = True
    """False for sends and receives: their end is when the first of the two was done."""


class CollectiveSteps:
    """Joins the steps of a rank with the events of its collective library."""

    def __init__(self) -> None:
        self.timer = DeviceTimer()
        self._names: list[str] = []
        self._events: Events = np.empty(0, EVENT_DTYPE)
        self._complete_ns = 0
        self._num_lost = 0
        self._group_of: dict[int, str] = {}
        """Communicator -> key of the group whose calls it carries out."""
        self._coverage: Counter[str] = Counter()
        self._leftovers: list[str] = []

    def coverage(self) -> LibraryCoverage | None:
        """None where no step was recorded."""
        if not self._coverage["steps"]:
            return None
        return LibraryCoverage(
            num_steps=self._coverage["steps"],
            num_matched=self._coverage["matched"],
            num_timed=self._coverage["timed"] - self._coverage["contradicted"],
            num_contradicted=self._coverage["contradicted"],
            num_calls_without_events=self._coverage["lone_calls"],
            num_plans_without_call=self._coverage["lone_plans"],
            num_lost=self._num_lost,
            tick_ns=self.timer.unit_ns,
            leftovers=self._leftovers,
        )

    def add(self, chunk: CollectiveChunk) -> None:
        events = np.frombuffer(chunk.events, EVENT_DTYPE)
        self._names += chunk.names
        self._complete_ns = max(self._complete_ns, chunk.complete_ns)
        self._num_lost = chunk.num_lost
        if len(events) == 0:
            return
        self._events = np.concatenate([self._events, events])[-_MOST_EVENTS:]
        (timed_by,) = _whole_numbers(events, "timed_by")
        timed = events[(timed_by == TimedBy.DEVICE) & _are_of_one_launch(events)]
        self.timer.add(
            np.concatenate([timed["start"], timed["end"]]),
            np.concatenate([timed["start_seen_ns"], timed["end_seen_ns"]]),
        )

    def is_complete(self, step: RawStep) -> bool:
        """Return True when all events of the step have come."""
        return not step.by_library or self._complete_ns >= step.window_end_ns

    def of_step(self, step: RawStep) -> list[CallEvents | None] | None:
        """Events of every call; None for a step without recording. Steps must come in order."""
        if not step.by_library:
            return None
        events = self._events
        launched_ns: NDArray[np.int64] = events["launched_ns"]
        step_events = events[(launched_ns >= step.start_ns) & (launched_ns < step.window_end_ns)]
        self._events = events[launched_ns >= step.window_end_ns]
        (plan,) = _whole_numbers(step_events, "plan")
        plans, first, plan_of = np.unique(plan, return_index=True, return_inverse=True)
        kernels = [LaunchedKernel(self._op(step_events[plan_of == i]), i) for i in range(len(plans))]
        kernels.sort(
            key=lambda kernel: (
                step_events["launched_ns"][first[kernel.row]],
                step_events["number"][first[kernel.row]],
            )
        )
        matched = match_calls(step.calls, step.groups, kernels)
        result: list[CallEvents | None] = []
        lone_plans = len(matched.lone_kernels)
        lone_calls = list(matched.lone_calls)
        for place, rows in enumerate(matched.kernels_of_call):
            call_events = step_events[np.isin(plan_of, rows)] if rows else None
            if call_events is not None and not self._is_of_group(step, place, call_events):
                lone_calls.append(place)
                lone_plans += len(rows)
                call_events = None
            result.append(None if call_events is None else self._timed(call_events))
        self._count(step, result, lone_calls, lone_plans)
        return result

    def _op(self, events: Events) -> str:
        ops = {_OPS.get(self._name(int(func)), self._name(int(func))) for func in np.unique(events["func"])}
        return ops.pop() if len(ops) == 1 else "coalesced"

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else ""

    def _is_of_group(self, step: RawStep, place: int, events: Events) -> bool:
        """Return True where the events' communicator belongs to the call's group, and remember that."""
        call = step.calls[place]
        group = step.groups[call.group]
        hashes = np.unique(events["communicator"]).tolist()
        if any(self._group_of.get(communicator, group.key) != group.key for communicator in hashes):
            return False
        (num_ranks_of_events,) = _whole_numbers(events, "num_ranks")
        num_ranks = np.unique(num_ranks_of_events).tolist()
        pairs = kernel_op(call.op) == "send_recv"  # torch makes communicators of two ranks for them
        if any(number not in (0, len(group.ranks)) and not (pairs and number == 2) for number in num_ranks):
            return False
        for communicator in hashes:
            self._group_of[communicator] = group.key
        return True

    def _timed(self, events: Events) -> CallEvents:
        timed = events[events["flags"] & Flag.TO_ITSELF == 0]
        timers = np.unique(timed["timed_by"])
        if len(timers) != 1 or timers[0] == TimedBy.NOTHING or not _are_of_one_launch(timed).all():
            return CallEvents(events, None, None)
        has_end = bool((timed["peer"] < 0).all())
        span = (int(timed["start"].min()), int(timed["end"].max()))
        if timers[0] == TimedBy.HOST:
            return CallEvents(events, None, span, has_end)
        host_ns = self.timer.monotonic_ns(np.array(span, np.uint64))
        if host_ns is None or host_ns[0] < timed["launched_ns"].min() - _MOST_BEFORE_NS:
            return CallEvents(events, None, None)
        return CallEvents(events, span if has_end else None, (int(host_ns[0]), int(host_ns[1])), has_end)

    def _count(
        self, step: RawStep, result: list[CallEvents | None], lone_calls: list[int], lone_plans: int
    ) -> None:
        self._coverage.update(
            steps=1,
            matched=sum(1 for events in result if events is not None),
            timed=sum(1 for call in result if call is not None and call.host_ns is not None and call.has_end),
            lone_calls=len(lone_calls),
            lone_plans=lone_plans,
        )
        texts = [
            f"step {step.global_step}: {step.calls[place].op} #{step.calls[place].seq} of group "
            f"{step.groups[step.calls[place].group].name}: no events"
            for place in lone_calls
        ]
        if lone_plans:
            texts.append(f"step {step.global_step}: {lone_plans} launches of the library: no call")
        self._leftovers += texts[: _SHOWN - len(self._leftovers)]

    def exact(self, events: list[CallEvents | None] | None) -> list[ExactSpan | None] | None:
        """Start and end of every call in ns of the device's timer; None where the step has no events."""
        unit_ns = self.timer.unit_ns
        if events is None or unit_ns is None:
            return None
        return [
            None
            if call is None or call.device is None
            else (call.device[0] * unit_ns, call.device[1] * unit_ns)
            for call in events
        ]

    # -- records -------------------------------------------------------------------------------

    def with_events(
        self, record: StepRecord, start_ns: int, events: list[CallEvents | None] | None
    ) -> StepRecord:
        """The record with the library's events added. start_ns: monotonic start of its window."""
        if events is None or record.collectives is None or len(events) != len(record.collectives):
            return record
        collectives = [
            collective if call_events is None else self._with_library(collective, call_events, start_ns)
            for collective, call_events in zip(record.collectives, events, strict=True)
        ]
        return msgspec.structs.replace(record, collectives=collectives)

    def _with_library(
        self, collective: CollectiveRecord, call_events: CallEvents, start_ns: int
    ) -> CollectiveRecord:
        rows = call_events.rows
        start_ms = end_ms = None
        if collective.start_by == "library":  # on the step's own axis
            start_ms, end_ms = collective.start_ms, collective.end_ms
        elif call_events.host_ns is not None:
            start_ms, end_ms = ((host_ns - start_ns) / 1e6 for host_ns in call_events.host_ns)
            if _is_elsewhere(start_ms, end_ms, collective):
                start_ms = end_ms = None
                self._coverage["contradicted"] += call_events.has_end
            elif not call_events.has_end:
                end_ms = None
        return msgspec.structs.replace(
            collective,
            library=LibraryCall(
                algorithm=self._common_name(rows["algorithm"]),
                protocol=self._common_name(rows["protocol"]),
                num_channels=int(rows["num_channels"].max()),
                num_events=len(rows),
                sequence=int(rows["sequence"].min()),
                communicator=f"{int(rows['communicator'][0]):x}",
                launch_ms=(int(rows["launched_ns"].min()) - start_ns) / 1e6,
                start_ms=start_ms,
                end_ms=end_ms,
            ),
        )

    def _common_name(self, indices: NDArray[np.uint16]) -> str | None:
        names = {self._name(index) for index in np.unique(indices).tolist()}
        return (names.pop() or None) if len(names) == 1 else None


def _are_of_one_launch(events: Events) -> NDArray[np.bool_]:
    """For each event, True where it has times of all its channels, and all are of this launch.

    Channels of one launch run at the same time, so each has started before any has ended. One channel alone
    cannot contradict itself: it is believed while its communicator has sent nothing to the own rank.
    """
    num_stopped, num_channels = _whole_numbers(events, "num_stopped", "num_channels")
    start, end, last_start, first_end = _whole_numbers(events, "start", "end", "last_start", "first_end")
    is_whole = (num_stopped > 0) & (num_stopped >= num_channels) & (start > 0) & (start <= end)
    believed = (num_stopped > 1) | (events["flags"] & Flag.AFTER_ONE_TO_ITSELF == 0)
    return np.asarray(is_whole & (last_start <= first_end) & believed)


def _whole_numbers(events: Events, *names: str) -> list[NDArray[np.uint64]]:
    """Columns of the events, typed: mypy tries every overload of numpy for an untyped array."""
    return [events[name] for name in names]


def _is_elsewhere(start_ms: float, end_ms: float, collective: CollectiveRecord) -> bool:
    """Return True where the library's times and the record's do not overlap: of another launch."""
    if collective.start_ms is None or collective.end_ms is None:
        return False
    return start_ms > collective.end_ms or end_ms < collective.start_ms
