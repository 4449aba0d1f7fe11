"""Collectives that a rank keeps in a mapped file, for the case that it ends without a report.

While it runs, a rank notes its collectives in such a file (LastCalls on CPUs, CallCounts on GPUs). The bytes
are in the page cache as soon as they are assigned, so they outlive a process that is killed. with_last_calls
makes reports of what silent ranks left there.
"""

import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import regular_descriptor
from aorta.hang.report import CallState, GroupState, HangReport
from aorta.records.files import HANG_FOLDER, call_counts_name, last_calls_name

if TYPE_CHECKING:  # whoever reads reports needs no torch
    from aorta.steps.notes import CollectiveCall, RecordedStep

SLOT_BYTES, NUM_SLOTS = 160, 512
"""Layout of LastCalls: the latest NUM_SLOTS calls, one in each slot."""
MOST_GROUPS = 256
"""Groups that CallCounts has room for; later ones are not counted."""
COUNT_SLOT_BYTES = 128
_HEAD = struct.Struct("=qq")
"""Head of a slot of CallCounts: number of calls and step of the latest. The group's key follows."""
_MOST_KEY_BYTES = COUNT_SLOT_BYTES - _HEAD.size
_WORDS = COUNT_SLOT_BYTES // 8

MOST_SILENT = 1024
"""Silent ranks that are looked for; more means that the run's folders are not together here."""
LEFT_NO_REPORT = "left no report; its latest collectives were kept"
COUNTED = "left no report; the number of its collectives was kept"


class NotedCall(msgspec.Struct, frozen=True, array_like=True):
    """A slot of LastCalls. number counts the rank's calls of all groups."""

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


class GroupCount(NamedTuple):
    """Collectives that a rank has issued in a group."""

    num_seen: int
    step: int
    """Global step of the latest one."""


# ---- writing, while the rank runs --------------------------------------------------------------


class _KeptFile:
    """A new mapped file, all zero. Raises OSError where it cannot be made, and where `path` is a link."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            # Blocks and all: to write into a hole of a mapped file on a full disk ends the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the file: the run has ended well, and nobody will ask for it."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class LastCalls(_KeptFile):
    """The latest calls of one rank, in a ring of slots."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, SLOT_BYTES * NUM_SLOTS)
        self._num = 0
        self._encode = msgspec.json.Encoder().encode

    def note(self, step: "RecordedStep", call: "CollectiveCall") -> None:
        """Keep a call that the rank issues now."""
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

    def forget(self) -> None:
        """Keep none of them: what the rank issues from now on is not seen, and these would mislead."""
        self._map[:] = bytes(len(self._map))


class CallCounts(_KeptFile):
    """The number of calls of one rank in each group, and the step of the latest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, COUNT_SLOT_BYTES * MOST_GROUPS)
        self._words = memoryview(self._map).cast("q")
        self._places: dict[str, int | None] = {}
        """Index of a group's first word, by the group's key; None where there is no room for it."""
        self._num_slots = 0

    def note(self, step: "RecordedStep", call: "CollectiveCall") -> None:
        """Count a call that the rank issues now."""
        key = call.group.key
        place = self._places[key] if key in self._places else self._new_place(key)
        if place is not None:
            # Two stores into mapped memory and nothing else: this is on the way of every collective.
            self._words[place] = call.seq + 1
            self._words[place + 1] = step.global_step

    def forget(self) -> None:
        """As LastCalls.forget."""
        for start in range(0, self._num_slots * _WORDS, _WORDS):
            self._words[start] = 0

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


# ---- reading, when the others hang -------------------------------------------------------------


def with_last_calls(output_dir: Path | str, reports: list[HangReport]) -> list[HangReport]:
    """The reports of a run, by rank; for ranks that wrote none, reports made of their mapped files."""
    folder = Path(output_dir)
    if folder.name == HANG_FOLDER and not (folder / HANG_FOLDER).is_dir():
        folder = folder.parent
    silent = set(range(reports[0].world_size)) - {report.rank for report in reports}
    if len(silent) > MOST_SILENT:
        return reports
    kept = [_kept_report(folder, rank, reports) for rank in silent]
    return sorted([*reports, *filter(None, kept)], key=lambda report: report.rank)


def _kept_report(folder: Path, rank: int, others: list[HangReport]) -> HangReport | None:
    """A report made of the file of a silent rank; None where there is no such file.

    others: reports of the same run. They have the groups' names and ranks, which the file lacks.
    """
    notes = _noted_calls(folder / last_calls_name(rank))
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
    """A report made of a rank's counts alone; None where it kept none."""
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
    """A report in the name of a silent rank; what it cannot tell is taken from the others."""
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
    """State of a noted call: a rank that issued another one has come out of a synchronous call."""
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


def _noted_calls(path: Path) -> list[NotedCall]:
    """Calls that a LastCalls kept, in order; slots that were being written are left out."""
    data = _kept_bytes(path, SLOT_BYTES * NUM_SLOTS)
    notes = []
    for start in range(0, len(data), SLOT_BYTES):
        with suppress(*NOT_JSON):
            notes.append(msgspec.json.decode(data[start : start + SLOT_BYTES], type=NotedCall))
    return sorted(notes, key=lambda note: note.number)


def read_counts(path: Path) -> dict[str, GroupCount]:
    """Counts that a CallCounts kept, by the group's key; empty where there is no such file."""
    data = _kept_bytes(path, COUNT_SLOT_BYTES * MOST_GROUPS)
    counts = {}
    for start in range(0, len(data) - COUNT_SLOT_BYTES + 1, COUNT_SLOT_BYTES):
        num_seen, step = _HEAD.unpack_from(data, start)
        with suppress(UnicodeDecodeError):
            key = data[start + _HEAD.size : start + COUNT_SLOT_BYTES].rstrip(b"\0").decode()
            if key and num_seen > 0 and step >= 0:
                counts[key] = GroupCount(num_seen, step)
    return counts


def _kept_bytes(path: Path, most_bytes: int) -> bytes:
    """Content of a mapped file; empty where there is none. A link is not followed, a pipe not waited for."""
    try:
        with open(regular_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            return file.read(most_bytes)
    except OSError:
        return b""
