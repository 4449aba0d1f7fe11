"""How much runs of one job differ, as runs in turn have shown on this machine: a file that later comparisons
of single runs use.

One line for each series: the program's name and the size of its model, the devices, the spread of the step
time and its degrees of freedom. In $XDG_STATE_HOME/aorta/run_spread.jsonl, else below ~/.local/state; nothing
else is kept there.
"""

import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aorta.account.judge.settings import devices_text, parameter_bytes, program_of
from aorta.account.model import Dataset
from aorta.files import read_regular
from aorta.records.schema import RunRecord
from aorta.timeline.ratio import Spread

FILE = "run_spread.jsonl"
MOST_BYTES = 4 << 20
NEWEST = 20
"""Series of one program and machine that count, the newest."""
LEAST_FREEDOM = 3


class SpreadLine(msgspec.Struct, frozen=True):
    program: str
    parameter_bytes: int
    """Of all optimizers: programs are often called train.py."""
    devices: str
    ranks: int
    spread: float
    """Standard deviation of the logarithm of the step time, between runs."""
    freedom: int
    date: str


def spreads_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "aorta" / FILE


def note_spread(run: RunRecord, spread: float, freedom: int) -> None:
    """Add a series' spread. Where nothing can be written, nothing is: it is a help, and no result."""
    key = _key(run)
    if key is None or freedom < LEAST_FREEDOM or not 0 < spread < math.inf:
        return
    line = SpreadLine(*key, spread, freedom, datetime.date.today().isoformat())
    path = spreads_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
    except OSError:
        return


def known_spread(reference: Dataset, candidate: Dataset) -> Spread | None:
    """Of single runs of one program on machines alike, if series of it were run here; None otherwise."""
    if len(reference.runs) != 1 or len(candidate.runs) != 1:
        return None
    records = [side.first.run.run for side in (reference, candidate)]
    if records[0] is None or records[1] is None or _key(records[0]) != _key(records[1]):
        return None
    return spread_of(records[0])


def spread_of(run: RunRecord) -> Spread | None:
    """Of the runs of its program on such devices; None where no series is known."""
    key = _key(run)
    lines = [line for line in _lines() if _key_of(line) == key][-NEWEST:]
    if not lines:
        return None
    freedom = sum(line.freedom for line in lines)
    value = math.sqrt(sum(line.freedom * line.spread**2 for line in lines) / freedom)
    series = "a series" if len(lines) == 1 else f"{len(lines)} series"
    return Spread(value, freedom, f"of {series} of runs in turn on such a machine, {lines[-1].date}")


Key = tuple[str, int, str, int]


def _key(run: RunRecord) -> Key | None:
    program = program_of(run)
    size = parameter_bytes(run)
    if program is None or not size:
        return None
    return program, size, devices_text(run.devices), run.world_size


def _key_of(line: SpreadLine) -> Key:
    return line.program, line.parameter_bytes, line.devices, line.ranks


def _lines() -> Sequence[SpreadLine]:
    try:
        content = read_regular(spreads_file(), MOST_BYTES)
    except OSError:
        return []
    found = []
    for line in content.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=SpreadLine))
        except (msgspec.MsgspecError, ValueError):
            continue  # half written, or of another version
    return [line for line in found if line.freedom >= 1 and 0 < line.spread < math.inf]
