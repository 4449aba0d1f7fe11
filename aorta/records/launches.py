"""What launchers saw of a run: launch_<id>.jsonl, a line an event, by `aorta run` and by torchrun's agents.

The ranks cannot tell how they died, nor that they died before they trained.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import read_regular, regular_descriptor
from aorta.records.files import LAUNCH_FILES
from aorta.records.seal import encoded

VARIABLE = "AORTA_LAUNCH_NOTES"
"""The environment variable that names the file of a launch."""
OUTER = "AORTA_OUTER_LAUNCHES"
"""The environment variable with the names of the files of launches around that one, with colons between."""
_MOST_BYTES = 1 << 22
_MOST_FILES = 200


class LaunchNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event."""

    kind: Literal["failure", "signal", "end"]
    """failure: a process of a launcher ended with this code. signal: the command got one. end: it ended."""
    unix_ns: int
    host: str
    code: int = 0
    """Exit code, negative for a signal."""
    signal: str | None = None
    is_sent: bool = False
    """The launcher had begun to end its processes: a signal may be its own."""
    rank: int | None = None
    pid: int | None = None
    restarts: int = 0
    """The launcher's count of restarts."""
    why: str | None = None
    """Type and first line of the exception, from torch's error file."""
    text: str | None = None
    """What native code wrote when it gave up."""


def new_notes(folder: Path) -> Path:
    """The file of a new launch, for the environment of its processes."""
    return folder / f"launch_{secrets.token_hex(6)}.jsonl"


def own_notes() -> Path | None:
    """The file of the launch that this process belongs to; None outside of `aorta run`."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None


def own_launches() -> list[str]:
    """The names of the files of this process's launches: of commands within each other, outer ones first."""
    notes = own_notes()
    return [*filter(None, os.environ.get(OUTER, "").split(":")), *([] if notes is None else [notes.name])]


def note(path: Path, kind: Literal["failure", "signal", "end"], **fields: object) -> None:
    """Append an event. Never raises OSError: a launcher must not fail for it."""
    event = LaunchNote(kind=kind, unix_ns=time.time_ns(), host=socket.gethostname(), **fields)  # type: ignore[arg-type]
    with suppress(OSError):
        if kind == "failure":  # maybe before anything was recorded
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        try:
            os.write(descriptor, encoded(event) + b"\n")
        finally:
            os.close(descriptor)


def read_notes(folder: Path) -> list[LaunchNote]:
    """All events in the folder by time; those that cannot be read are left out."""
    notes: list[LaunchNote] = []
    with suppress(OSError):
        for path in sorted(folder.glob(LAUNCH_FILES))[-_MOST_FILES:]:
            with suppress(OSError):
                for line in read_regular(path, _MOST_BYTES).splitlines():
                    with suppress(*NOT_JSON):
                        notes.append(msgspec.json.decode(line, type=LaunchNote))
    return sorted(notes, key=lambda event: event.unix_ns)


def died_early(
    notes: Iterable[LaunchNote], known_pids: Iterable[int], started_ns: Iterable[int]
) -> list[LaunchNote]:
    """The first failure of each start whose processes never came to train.

    started_ns: when attempts that trained began. A start is an agent's count of restarts.
    """
    pids, starts = set(known_pids), sorted(started_ns)
    by_start: dict[tuple[str, int], list[LaunchNote]] = {}
    for event in notes:
        if event.kind == "failure":
            by_start.setdefault((event.host, event.restarts), []).append(event)
    early: list[LaunchNote] = []
    previous_ns = 0
    for events in sorted(by_start.values(), key=lambda events: events[0].unix_ns):
        first = events[0]
        trained = any(previous_ns < start <= first.unix_ns for start in starts)
        if not trained and not any(event.pid in pids for event in events):
            early.append(first)
        previous_ns = events[-1].unix_ns
    return early
