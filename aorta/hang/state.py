"""Where a rank stands: its collectives by group, its main thread. May be asked from any thread."""

import sys
import threading
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from aorta.device.marks import Mark
from aorta.hang.schema import LISTED_AFTER, LISTED_BEFORE, CallState, GroupState
from aorta.recording.calls import CollectiveCall, Group, RecordedStep
from aorta.recording.journal import Journal

FRAMES = 20


def journal_of(recorder: Any) -> Journal | None:
    """Of a recorder that records collectives, else None."""
    return getattr(recorder, "journal", None)


def group_states(
    journal: Journal, finished_step: tuple[int, list[CollectiveCall]] | None
) -> list[GroupState]:
    """Every group of this rank with its latest collectives.

    finished_step: number and calls of a step before those that the journal still holds; what the device
    marked them with may be in use again, and they count as finished.
    """
    open_steps: list[RecordedStep] = [
        *journal.closed,
        *([] if journal.current is None else [journal.current]),
    ]
    by_group: dict[str, list[tuple[int, CollectiveCall, bool]]] = {}
    open_numbers = {step.global_step for step in open_steps}
    if finished_step is not None and finished_step[0] not in open_numbers:
        for call in finished_step[1]:
            by_group.setdefault(call.group.key, []).append((finished_step[0], call, True))
    for step in open_steps:
        for call in list(step.calls):
            by_group.setdefault(call.group.key, []).append((step.global_step, call, False))
    now_ns = time.monotonic_ns()
    return [_group_state(group, by_group.get(group.key, []), now_ns) for group in _groups(journal, by_group)]


def _groups(journal: Journal, by_group: dict[str, list[tuple[int, CollectiveCall, bool]]]) -> Iterable[Group]:
    groups: dict[str, Group] = {key: rows[0][1].group for key, rows in by_group.items()}
    groups |= {group.key: group for group in journal.groups()}
    return groups.values()


def _group_state(group: Group, rows: list[tuple[int, CollectiveCall, bool]], now_ns: int) -> GroupState:
    rows = sorted(rows, key=lambda row: row[1].seq)
    calls = []
    first_pending: int | None = None
    for index, (step, call, past) in enumerate(rows):
        if first_pending is not None and index > first_pending + LISTED_AFTER:
            break
        state = _call_state(step, call, past, now_ns)
        if not state.finished and first_pending is None:
            first_pending = index
        calls.append(state)
    start = max(0, (len(calls) if first_pending is None else first_pending) - LISTED_BEFORE)
    return GroupState(
        key=group.key,
        name=group.name,
        ranks=list(group.ranks),
        backend=group.backend,
        num_seen=group.next_seq,
        calls=list(islice(calls, start, None)),
    )


def _call_state(step: int, call: CollectiveCall, past: bool, now_ns: int) -> CallState:
    started: bool | None
    finished: bool | None
    if past:
        started = finished = True
    elif call.reason is not None:  # the recorder does not time it
        started = finished = None
    else:
        finished = _passed(call.end)
        started = True if finished else _passed(call.start)
    return CallState(
        seq=call.seq,
        op=call.op,
        bytes=call.bytes,
        dtype=call.dtype,
        peer=call.peer,
        step=step,
        started=started,
        finished=finished,
        age_s=None if call.start is None else (now_ns - call.start.host_ns) / 1e9,
    )


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


def main_thread_frames() -> list[str]:
    """Where the main thread is, the innermost call first. Reads no source file: their disk may hang."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    rows: list[str] = []
    while frame is not None and len(rows) < FRAMES:
        rows.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return rows
