"""Where a rank stands: its collectives by group. May be asked from any thread."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal

from aorta.device.marks import Mark
from aorta.hang.schema import LISTED_AFTER, LISTED_BEFORE, CallState, GroupState
from aorta.record.calls import CollectiveCall, Group, RecordedStep
from aorta.record.journal import Journal


def journal_of(recorder: Any) -> Journal | None:
    """Of a recorder that records collectives, else None."""
    return getattr(recorder, "journal", None)


HasPassed = Callable[[int], bool]
"""Whether the device has passed a mark of the kernel records, by its number. Waits for nothing."""

Stand = Literal["finished", "ahead", "inside", "passed", "marked"]
"""What is known of the calls of a step. finished: all of them have. Where kernel records time the step: it is
ahead of the device, the device is inside, or has passed its end on the compute stream. marked: each call has
marks of its own."""

Row = tuple[int, CollectiveCall, Stand]
"""Global step, call, and what is known of its step."""


def group_states(
    journal: Journal,
    finished_steps: Sequence[tuple[int, list[CollectiveCall]]],
    has_passed: HasPassed | None = None,
) -> list[GroupState]:
    """Every group of this rank with its latest collectives.

    finished_steps: number and calls of steps before those that the journal still holds; what the device
    marked them with may be in use again, and they count as finished. has_passed: None where the recorder has
    no kernel records.
    """
    open_steps: list[RecordedStep] = [
        *journal.closed,
        *(step for step in (journal.current or journal.failed,) if step is not None),
    ]
    by_group: dict[str, list[Row]] = {}
    known = {step.global_step for step in open_steps}
    for number, calls in finished_steps:
        if number not in known:
            for call in calls:
                by_group.setdefault(call.group.key, []).append((number, call, "finished"))
    for step in open_steps:
        stand = _stand(step, has_passed)
        for call in list(step.calls):
            by_group.setdefault(call.group.key, []).append((step.global_step, call, stand))
    now_ns = time.monotonic_ns()
    return [_group_state(group, by_group.get(group.key, []), now_ns) for group in _groups(journal, by_group)]


def _stand(step: RecordedStep, has_passed: HasPassed | None) -> Stand:
    if not step.by_kernels or has_passed is None:
        return "marked"
    start, end = step.start, step.window_end or step.body_end
    if start is not None and start.number and not has_passed(start.number):
        return "ahead"
    return "passed" if end is not None and end.number and has_passed(end.number) else "inside"


def _groups(journal: Journal, by_group: dict[str, list[Row]]) -> Iterable[Group]:
    groups: dict[str, Group] = {key: rows[0][1].group for key, rows in by_group.items()}
    groups |= {group.key: group for group in journal.groups()}
    return groups.values()


def _group_state(group: Group, rows: list[Row], now_ns: int) -> GroupState:
    rows = sorted(rows, key=lambda row: row[1].seq)
    calls = []
    first_open: int | None = None
    first_pending: int | None = None
    for index, (step, call, stand) in enumerate(rows):
        if first_pending is not None and index > first_pending + LISTED_AFTER:
            break
        state = _call_state(step, call, stand, now_ns)
        if not state.finished and first_open is None:
            first_open = index
        if state.finished is False and first_pending is None:
            first_pending = index
        calls.append(state)
    start = max(0, (len(calls) if first_open is None else first_open) - LISTED_BEFORE)
    return GroupState(
        key=group.key,
        name=group.name,
        ranks=list(group.ranks),
        backend=group.backend,
        num_seen=group.next_seq,
        calls=list(islice(calls, start, None)),
    )


def _call_state(step: int, call: CollectiveCall, stand: Stand, now_ns: int) -> CallState:
    started, finished = _progress(call, stand)
    issued_ns = call.issued_ns if call.start is None else call.start.host_ns
    return CallState(
        seq=call.seq,
        op=call.op,
        bytes=call.bytes,
        dtype=call.dtype,
        peer=call.peer,
        step=step,
        started=started,
        finished=finished,
        age_s=(now_ns - issued_ns) / 1e9 if issued_ns else None,
    )


def _progress(call: CollectiveCall, stand: Stand) -> tuple[bool | None, bool | None]:
    """Whether it has started, and finished; None where that cannot be told."""
    if stand == "finished":
        return True, True
    if call.failed:  # gloo ends a call whose peer is gone: it was waiting for that peer
        return True, False
    if call.reason is not None:  # the recorder does not time it
        return None, None
    if stand == "marked" or call.start is not None:  # of CPU tensors: the host's marks
        finished = _passed(call.end)
        return True if finished else _passed(call.start), finished
    if stand == "ahead":
        return False, False
    # What runs on a stream of its own may go on where the compute stream has not waited for it.
    if stand == "passed" and not call.is_async and call.stream != "side":
        return True, True
    return None, None


def _passed(mark: Mark | None) -> bool | None:
    if mark is None:
        return False
    event = mark.event  # once: the thread that resolves steps takes it away
    if event is None:
        return True  # set on the host when it happened, or resolved
    try:
        return bool(event.query())  # type: ignore[attr-defined]
    except RuntimeError:  # the device is in an error state
        return None
