"""Where a rank stands: its collectives by group, counted in mapped files that outlive a rank that cannot report."""

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from aorta.device.marks import Mark
from aorta.errors import NOT_JSON
from aorta.hang.report import FOLDER, LISTED_AFTER, LISTED_BEFORE, CallState, GroupState, HangReport
from aorta.record.calls import CollectiveCall, Group, RecordedStep
from aorta.record.journal import Journal
from aorta.records.files import call_counts_name, last_calls_name

if TYPE_CHECKING:
    from aorta.record.calls import CollectiveCall, RecordedStep


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


def new_mapped_file(path: Path, num_bytes: int) -> mmap.mmap:
    """The bytes of a new file, all zero; what is assigned to them is in the page cache at once.

    Raises OSError where the file cannot be made, and where `path` is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        # Blocks and all: to write into a hole of a mapped file on a full disk ends the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


MOST_GROUPS = 256
"""Groups that come later are not counted."""
COUNT_SLOT_BYTES = 128
_HEAD = struct.Struct("=qq")
_MOST_KEY_BYTES = COUNT_SLOT_BYTES - _HEAD.size
_WORDS = COUNT_SLOT_BYTES // 8


class GroupCount(NamedTuple):
    """What a rank has issued in a group."""

    num_seen: int
    step: int
    """Global step of the last of them."""


class CallCounts:
    """The file of one rank. Raises OSError where it cannot be made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map = new_mapped_file(path, COUNT_SLOT_BYTES * MOST_GROUPS)
        self._words = memoryview(self._map).cast("q")
        self._places: dict[str, int | None] = {}
        """By the group's key: index of its first word, None where there is no room for it."""
        self._num_slots = 0

    def note(self, step: "RecordedStep", call: "CollectiveCall") -> None:
        """The rank issues this call."""
        key = call.group.key
        place = self._places[key] if key in self._places else self._new_place(key)
        if place is not None:
            self._words[place] = call.seq + 1
            self._words[place + 1] = step.global_step

    def _new_place(self, key: str) -> int | None:
        data = key.encode()
        place = None
        if self._num_slots < MOST_GROUPS and len(data) <= _MOST_KEY_BYTES:
            start = self._num_slots * COUNT_SLOT_BYTES
            self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
            place = self._num_slots * _WORDS
            self._num_slots += 1
        if len(self._places) < 2 * MOST_GROUPS:  # a script may make a group in every step
            self._places[key] = place
        return place

    def remove(self) -> None:
        """The run has ended well: nobody will ask."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def read_counts(path: Path) -> dict[str, GroupCount]:
    """By the group's key; empty where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(COUNT_SLOT_BYTES * MOST_GROUPS)
    except OSError:
        return {}
    counts = {}
    for start in range(0, len(data) - COUNT_SLOT_BYTES + 1, COUNT_SLOT_BYTES):
        num_seen, step = _HEAD.unpack_from(data, start)
        with suppress(UnicodeDecodeError):
            key = data[start + _HEAD.size : start + COUNT_SLOT_BYTES].rstrip(b"\0").decode()
            if key and num_seen > 0 and step >= 0:
                counts[key] = GroupCount(num_seen, step)
    return counts


MOST_SILENT = 1024
"""More ranks without a report are a run whose folders are not together."""
SLOT_BYTES, NUM_SLOTS = 160, 512
LEFT_NO_REPORT = "left no report; its latest collectives were kept"
COUNTED = "left no report; the number of its collectives was kept"


class NotedCall(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the file. number counts the rank's calls of all groups."""

    number: int
    unix_ns: int
    step: int
    group: str
    seq: int
    op: str
    bytes: int
    dtype: str
    peer: int | None
    is_async: bool


class LastCalls:
    """The file of one rank. Raises OSError where it cannot be made."""

    def __init__(self, path: Path) -> None:
        self._path, self._num = path, 0
        self._map = new_mapped_file(path, SLOT_BYTES * NUM_SLOTS)
        self._encode = msgspec.json.Encoder().encode

    def note(self, step: "RecordedStep", call: "CollectiveCall") -> None:
        """The rank issues this call."""
        number = self._num
        self._num = number + 1
        row = (
            number, time.time_ns(), step.global_step, call.group.key, call.seq, call.op, call.bytes,
            call.dtype, call.peer, call.is_async,
        )  # fmt: skip
        data = self._encode(row)
        if len(data) <= SLOT_BYTES:
            offset = number % NUM_SLOTS * SLOT_BYTES
            self._map[offset : offset + SLOT_BYTES] = data.ljust(SLOT_BYTES)

    def remove(self) -> None:
        """The run has ended well: nobody will ask."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def with_last_calls(output_dir: Path | str, reports: list[HangReport]) -> list[HangReport]:
    """The reports of a run, by rank; with what is left of the ranks that wrote none."""
    folder = Path(output_dir)
    if folder.name == FOLDER and not (folder / FOLDER).is_dir():
        folder = folder.parent
    silent = set(range(reports[0].world_size)) - {report.rank for report in reports}
    if len(silent) > MOST_SILENT:
        return reports
    kept = [kept_report(folder, rank, reports) for rank in silent]
    return sorted([*reports, *filter(None, kept)], key=lambda report: report.rank)


def kept_report(folder: Path, rank: int, others: list[HangReport]) -> HangReport | None:
    """A report from the file of a rank that left none; None where there is no such file.

    others: reports of the same run, whose groups name the ranks of this one's.
    """
    notes = _read(folder / last_calls_name(rank))
    known_groups = {group.key: group for report in others for group in report.groups or ()}
    if not notes:
        return _counted_report(folder, rank, others, known_groups)
    by_group: dict[str, list[NotedCall]] = {}
    for note in notes:
        by_group.setdefault(note.group, []).append(note)
    groups = [
        GroupState(
            key=key,
            name=known_groups[key].name,
            ranks=known_groups[key].ranks,
            backend=known_groups[key].backend,
            num_seen=calls[-1].seq + 1,
            calls=[_state(note, is_last=note is notes[-1], now_ns=notes[-1].unix_ns) for note in calls],
        )
        for key, calls in by_group.items()
        if key in known_groups and rank in known_groups[key].ranks
    ]
    since_s = max(0.0, (others[0].written_unix_ns - notes[-1].unix_ns) / 1e9)
    return _report_of(rank, others, groups, LEFT_NO_REPORT, notes[-1].step, since_s)


def _counted_report(
    folder: Path, rank: int, others: list[HangReport], known_groups: dict[str, GroupState]
) -> HangReport | None:
    counts = {
        key: count
        for key, count in read_counts(folder / call_counts_name(rank)).items()
        if key in known_groups and rank in known_groups[key].ranks
    }
    if not counts:
        return None
    groups = [
        msgspec.structs.replace(known_groups[key], num_seen=count.num_seen, calls=[])
        for key, count in counts.items()
    ]
    step = max(count.step for count in counts.values())
    return _report_of(rank, others, groups, COUNTED, step, others[0].since_s)


def _report_of(
    rank: int, others: list[HangReport], groups: list[GroupState], reason: str, step: int, since_s: float
) -> HangReport:
    return HangReport(
        rank=rank,
        world_size=others[0].world_size,
        host="",
        pid=0,
        written_unix_ns=max(report.written_unix_ns for report in others),
        reason=reason,
        is_from_last_calls=True,
        step=step,
        num_steps=max(report.num_steps for report in others),
        since_s=since_s,
        limit_s=others[0].limit_s,
        groups=groups,
        main_thread=[],
        device=None,
        not_measured={"device": reason},
    )


def _state(note: NotedCall, is_last: bool, now_ns: int) -> CallState:
    """Whoever issues another call has come out of a synchronous one."""
    return CallState(
        seq=note.seq,
        op=note.op,
        bytes=note.bytes,
        dtype=note.dtype,
        peer=note.peer,
        step=note.step,
        started=True,
        finished=None if is_last or note.is_async else True,
        age_s=(now_ns - note.unix_ns) / 1e9,
    )


def _read(path: Path) -> list[NotedCall]:
    """By number. Slots that were being written are left out."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(SLOT_BYTES * NUM_SLOTS)
    except OSError:
        return []
    notes = []
    for start in range(0, len(data), SLOT_BYTES):
        with suppress(*NOT_JSON):
            notes.append(msgspec.json.decode(data[start : start + SLOT_BYTES], type=NotedCall))
    return sorted(notes, key=lambda note: note.number)
