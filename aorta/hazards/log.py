"""The log: what a rank's host issued, in its order, as plain data that can be kept and played to the check.

An entry is a list: the name of a method of HazardCheck, then its arguments. As JSON lines:

["allocate", 4096, 512, "compute"]
["launch", "compute", [[4096, 512]], [[8192, 512]], 3]
["wait_stream", "reduce", "compute"]
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError
from aorta.hazards.check import HazardCheck

Entry = Sequence[Any]
NAMES = (
    "begin_step", "blocking_stream", "record", "wait", "wait_stream", "forget_event", "synchronize",
    "synchronize_event", "synchronize_all", "allocate", "free", "record_stream", "launch", "begin_capture",
    "end_capture", "replay",
)  # fmt: skip


EVENT_AT = {"record": 1, "wait": 2, "synchronize_event": 1}
"""Place of the event in an entry."""


class LogError(AortaError):
    """A log cannot be read."""


def play(entries: Iterable[Entry], check: HazardCheck | None = None) -> HazardCheck:
    """Play a log to a check (a new one, if none is given) and return it."""
    check = HazardCheck() if check is None else check
    methods = {name: getattr(check, name) for name in NAMES}
    for name, *arguments in entries:
        methods[name](*arguments)
    return check


def without_events(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with events by the order in which they come, and steps without their numbers: logs that are
    alike then have the same hazards. When events are destroyed is up to c10d's watchdog, and changes none."""
    events: dict[Any, int] = {}
    whole = list[Entry]()
    for entry in entries:
        name = entry[0]
        place = EVENT_AT.get(name)
        if place is not None:
            number = events.setdefault(entry[place], len(events))
            entry = [*entry[:place], number, *entry[place + 1 :]]
        elif name == "begin_step":
            entry = [name]
        elif name == "forget_event":
            continue
        whole.append(entry)
    return whole


def read_log(path: Path) -> list[list[Any]]:
    """Entries of a log file of JSON lines. Raises LogError where it is none."""
    decoder, entries = msgspec.json.Decoder(list[Any]), list[list[Any]]()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                entry = decoder.decode(line)
                if not entry or entry[0] not in NAMES:
                    raise LogError(f"{path}, line {number}: an entry begins with one of {', '.join(NAMES)}")
                entries.append(entry)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise LogError(f"{path} is not a log of operations: {error}") from None
    return entries
