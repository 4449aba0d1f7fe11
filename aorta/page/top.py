"""The table of `aorta top`: newest lines of every rank, a row per rank, the straggler named above."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from aorta.errors import NOT_JSON
from aorta.records.files import STEPS_FILE, STEPS_FILES
from aorta.records.schema import RunRecord, StepRecord
from aorta.timeline.types import OWN_SOURCES

FIRST_BYTES = 1 << 20
"""Read back from the end of a file that is there already."""
RECENT_STEPS = 20
STRAGGLER_SHARE = 0.02
"""Least wait, as a part of the step, for which a rank is called late."""
STALE_STEPS = 10
COLUMNS = (
    ("rank", ""), ("step", ""), ("step", "ms"), ("exposed", "ms"), ("comm", "ms"), ("overlap", "%"),
    ("loss", ""), ("memory", "GiB"), ("clock", "MHz"), ("power", "W"),
)  # fmt: skip
NUM_ALWAYS = 6
"""Columns that are there although no rank has a value."""
MISSING = "-"


# ---- what is read --------------------------------------------------------------------------------


@dataclass
class FollowedRank:
    """The newest steps of one rank, and how far its file was read."""

    rank: int
    last: StepRecord | None = None
    recent: "deque[StepRecord]" = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """The newest steps, oldest first."""
    offset: int | None = None
    inode: int | None = None
    cut_line: bytes = b""

    def median(self, name: str) -> float | None:
        """Median of a number of the recent steps, by its name in the record or in its overlap."""
        values = sorted(v for v in (_number(record, name) for record in self.recent) if v is not None)
        return values[len(values) // 2] if values else None


def _number(record: StepRecord, name: str) -> float | None:
    value = getattr(record, name) if hasattr(record, name) else getattr(record.overlap, name, None)
    return None if value is None else float(value)


class Follower:
    """Reads what was added to the files of a folder since the last `poll`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks: dict[int, FollowedRank] = {}
        self._decoder = msgspec.json.Decoder(StepRecord)

    def poll(self) -> bool:
        """Read on; True where anything was added. A file that was replaced is read afresh."""
        changed = False
        for path in sorted(self.folder.glob(STEPS_FILES)):
            match = STEPS_FILE.fullmatch(path.name)
            if match is not None:
                state = self.ranks.setdefault(int(match[1]), FollowedRank(int(match[1])))
                changed |= self._read_on(path, state)
        return changed

    def _read_on(self, path: Path, state: FollowedRank) -> bool:
        try:
            with open(path, "rb") as file:
                status = path.stat()
                # A new file, or a shorter one: the rank was started again.
                if state.inode != status.st_ino or (state.offset or 0) > status.st_size:
                    self.ranks[state.rank] = state = FollowedRank(state.rank, inode=status.st_ino)
                    state.offset = max(0, status.st_size - FIRST_BYTES)
                file.seek(state.offset or 0)
                data = file.read()
                state.offset = file.tell()
        except OSError:
            return False
        *lines, state.cut_line = (state.cut_line + data).split(b"\n")
        for line in lines:
            try:
                record = self._decoder.decode(line)
            except NOT_JSON:
                continue  # the first one may be cut
            if record.source in OWN_SOURCES:
                state.recent.append(record)
                state.last = record
        return bool(lines)


@dataclass(frozen=True)
class LateRank:
    """The rank that the others wait for."""

    rank: int
    wait_ms: float
    """Time that this rank spends less in synchronous communication than the median rank, per step."""


def straggler(states: Iterable[FollowedRank]) -> LateRank | None:
    """The rank with the least exposed communication: it comes last, and the others wait for it.

    None where ranks differ by less than STRAGGLER_SHARE of a step, or where communication is not measured.
    """
    exposed = {s.rank: s.median("exposed_ms") for s in states}
    measured = {rank: value for rank, value in exposed.items() if value is not None}
    step_ms = [value for s in states if (value := s.median("step_ms")) is not None]
    if len(measured) < 2 or not step_ms:
        return None
    values = sorted(measured.values())
    rank = min(measured, key=lambda rank: measured[rank])
    wait_ms = values[len(values) // 2] - measured[rank]
    if wait_ms < STRAGGLER_SHARE * sorted(step_ms)[len(step_ms) // 2]:
        return None
    return LateRank(rank, wait_ms)


# ---- what is shown -------------------------------------------------------------------------------


def top_table(
    run: RunRecord | None, states: list[FollowedRank], now_ns: int | None = None, height: int = 40
) -> Group:
    """Screen of the job: one line for the run, the straggler, a row per rank."""
    late = straggler(states)
    table = Table(box=None, pad_edge=False, header_style="bold")
    listed_states = _most_telling(states, late, max(4, height - 6))
    rows = [_row(state) for state in listed_states]
    shown = [i for i in range(len(COLUMNS)) if i < NUM_ALWAYS or any(row[i] != MISSING for row in rows)]
    for i in shown:
        name, unit = COLUMNS[i]
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for state, row in zip(listed_states, rows, strict=True):
        style = "bold red" if late is not None and state.rank == late.rank else ""
        table.add_row(*(row[i] for i in shown), style=style)
    lines: list[Text | Table] = [_headline(run, states, time.time_ns() if now_ns is None else now_ns)]
    if late is not None:
        lines.append(
            Text(
                f"rank {late.rank} is late: the median rank waits {late.wait_ms:.1f} ms a step for it", "red"
            )
        )
    lines.append(table)
    if len(listed_states) < len(states):
        lines.append(Text(f"and {len(states) - len(listed_states)} more ranks", "dim"))
    return Group(*lines)


def _headline(run: RunRecord | None, states: list[FollowedRank], now_ns: int) -> Text:
    last = [s.last for s in states if s.last is not None]
    if not last:
        return Text("no step yet")
    newest = max(last, key=lambda record: record.end_unix_ns)
    age_s = max(0.0, (now_ns - newest.end_unix_ns) / 1e9)
    world_size = newest.world_size
    text = f"step {newest.global_step}   {world_size} ranks"
    if run is not None and run.finished_unix_ns is not None:
        return Text(f"{text}   finished", "bold")
    step_s = (newest.step_ms or 0.0) / 1e3
    style = "bold red" if age_s > max(10.0, STALE_STEPS * step_s) else "bold"
    return Text(f"{text}   last record {age_s:.0f} s ago", style)


def _most_telling(states: list[FollowedRank], late: LateRank | None, max_rows: int) -> list[FollowedRank]:
    """The ranks that fit on the screen: the straggler first, then those with most exposed communication."""
    if len(states) <= max_rows:
        return states
    first = [s for s in states if late is not None and s.rank == late.rank]
    remaining = sorted((s for s in states if s not in first), key=lambda s: -(s.median("exposed_ms") or 0.0))
    return sorted(first + remaining[: max_rows - len(first)], key=lambda s: s.rank)


def _row(state: FollowedRank) -> list[str]:
    last = state.last
    memory = None if last is None or last.memory is None else last.memory
    used_gib = None if memory is None else (memory.device_used_bytes or memory.reserved_bytes) / 2**30
    device = None if last is None else last.device
    overlap = state.median("overlap_ratio")
    return [
        str(state.rank),
        MISSING if last is None else str(last.global_step),
        _number_text(state.median("step_ms"), 1),
        _number_text(state.median("exposed_ms"), 1),
        _number_text(state.median("comm_ms"), 1),
        _number_text(None if overlap is None else 100 * overlap, 0),
        _number_text(None if last is None else last.loss, 4),
        _number_text(used_gib, 1),
        _number_text(None if device is None else device.sm_clock_mhz, 0),
        _number_text(None if device is None else device.power_w, 0),
    ]


def _number_text(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"
