"""The report that a rank writes to hang/rank<n>.json when no step ends any more: its form, and its reading.

standing.py gathers what is in it, watchdog.py writes it, find.py compares the reports of all ranks.
"""

import re
from itertools import pairwise
from pathlib import Path

import msgspec

from aorta.errors import NOT_JSON, RecordError
from aorta.files import read_regular
from aorta.records.files import HANG_FOLDER, call_counts_name, last_calls_name
from aorta.records.schema import DeviceRecord

SCHEMA_VERSION = 1
LISTED_BEFORE, LISTED_AFTER = 400, 1000
"""Calls of a group that a report lists before and after the first unfinished one: a step or more on either
side, which tells the usual order."""
MOST_RANKS = 1 << 20
"""World size above which a report is taken for damaged."""


class CallState(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, as this rank has it."""

    seq: int
    """Counts this rank's collectives of the group, from 0."""
    op: str
    bytes: int
    dtype: str
    peer: int | None = None
    """The other rank of a send or a receive, by its number within the group."""
    step: int
    """Global step in whose window it was issued."""
    started: bool | None
    """True once the host (gloo) or the device (NCCL) has reached it; None where that cannot be told."""
    finished: bool | None
    age_s: float | None
    """Time since the host issued it."""


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The latest collectives of one process group."""

    key: str
    name: str
    ranks: list[int]
    backend: str
    num_seen: int
    """Collectives that this rank has issued in this group since the start of the run."""
    calls: list[CallState]
    """In order; all that are not finished, as far as the list reaches, and those before them."""


class CallStack(msgspec.Struct, frozen=True, kw_only=True):
    """The place in the program that waits for a collective, or launched it."""

    group: str
    """Key of the group."""
    op: str
    seq: int
    thread: str
    """'main thread', 'thread <id>': it is in the call now. 'launch': where an asynchronous one was begun."""
    frames: list[str]
    """'function (path:line)', the innermost call first."""


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of a hang, as it is in hang/rank<n>.json."""

    schema: int = SCHEMA_VERSION
    rank: int
    world_size: int
    host: str
    pid: int
    written_unix_ns: int
    reason: str
    is_from_last_calls: bool = False
    """True where the rank wrote no report: made of the calls that it noted last (aorta.hang.last_calls)."""
    step: int | None
    """The step that the rank was in, or had finished last; None before the first."""
    num_steps: int
    """Steps that the rank has begun."""
    since_s: float
    """Time since the last sign of progress."""
    limit_s: float
    groups: list[GroupState] | None
    """None where collectives were not recorded."""
    main_thread: list[str]
    """'function (path:line)', the innermost call first."""
    stacks: list[CallStack] = []
    """Stacks of threads in a collective, and of launches where torch's flight recorder has them."""
    device: DeviceRecord | None
    not_measured: dict[str, str] = {}


def report_name(rank: int) -> str:
    return f"rank{rank}.json"


_REPORT = re.compile(r"rank\d+\.json")
NO_REPORT = "no rank has reported a hang"


class NoReport(RecordError):
    """A folder without a report of a hang: of a run that did not hang, or was not watched."""


def stacks_name(rank: int) -> str:
    return f"rank{rank}.stacks.txt"


def flight_recorder_name(rank: int) -> str:
    """Name of the pickle that torch's own flight recorder analyzer reads."""
    return f"rank{rank}.flight_recorder"


def read_reports(output_dir: Path | str) -> list[HangReport]:
    """The reports of a run's folder, or of its hang folder, by rank; NoReport where there are none."""
    folder = Path(output_dir)
    try:
        if not folder.is_dir():
            raise RecordError(f"{folder} is no folder; give the folder of a run")
        if (folder / HANG_FOLDER).is_dir():
            folder = folder / HANG_FOLDER
        paths = [path for path in folder.iterdir() if _REPORT.fullmatch(path.name)]
    except OSError as error:
        raise RecordError(f"cannot read {folder}: {error.strerror}") from error
    reports = [_read(path) for path in paths]
    if not reports:
        raise NoReport(f"{folder} holds no rank<n>.json: {NO_REPORT}; {_why_none(folder)}")
    sizes = sorted({report.world_size for report in reports})
    if len(sizes) > 1:
        raise RecordError(f"{folder} mixes runs of {' and '.join(map(str, sizes))} ranks")
    reports.sort(key=lambda report: report.rank)
    twice = next((a.rank for a, b in pairwise(reports) if a.rank == b.rank), None)
    if twice is not None:
        raise RecordError(f"{folder} holds two reports of rank {twice}; give the folder of one run")
    return reports


def _why_none(folder: Path) -> str:
    """Whether anything watches the run of this folder, or of which it is the hang folder."""
    run = folder.parent if folder.name == HANG_FOLDER else folder
    kept = (last_calls_name, call_counts_name)
    if any((run / name(0)).exists() for name in kept):  # while the watchdog works, and after a death
        return "the watchdog is on, and no rank stood still for as long as its limit"
    return "aorta run --hang turns the watchdog on"


def _read(path: Path) -> HangReport:
    try:
        report = msgspec.json.decode(read_regular(path), type=HangReport)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    except NOT_JSON as error:
        raise RecordError(f"{path} is no report of a hang: {error}") from error
    if report.schema != SCHEMA_VERSION:
        raise RecordError(f"{path} has schema {report.schema}, this version of aorta reads {SCHEMA_VERSION}")
    fault = _fault(report)
    if fault is not None:
        raise RecordError(f"{path}: impossible report: {fault}")
    return report


def _fault(report: HangReport) -> str | None:
    if not 0 <= report.rank < report.world_size <= MOST_RANKS:
        return f"rank {report.rank} of {report.world_size}"
    for group in report.groups or ():
        if any(not 0 <= rank < report.world_size for rank in group.ranks):
            return f"group {group.name} has ranks that are none of the run's {report.world_size}"
        if any(call.peer is not None and not 0 <= call.peer < len(group.ranks) for call in group.calls):
            return f"a call of group {group.name} has a peer that is not in the group"
    return None
