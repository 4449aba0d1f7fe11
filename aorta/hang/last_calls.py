"""The latest collectives of a rank on CPUs, in a mapped file: they outlive a rank that cannot report. On GPUs
only their number is kept (aorta.hang.call_counts).

gloo aborts a process whose tensor does not fit, and a rank may be killed or keep the interpreter lock. What
such a rank issued last is then in the page cache all the same. Costs the training thread some microseconds a
call (6.3 µs on a busy machine).
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aorta.errors import NOT_JSON
from aorta.hang.call_counts import read_counts
from aorta.hang.mapped import new_mapped_file
from aorta.hang.schema import FOLDER, CallState, GroupState, HangReport
from aorta.records.files import call_counts_name, last_calls_name

if TYPE_CHECKING:
    from aorta.record.calls import CollectiveCall, RecordedStep

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
