"""The small readers of a run's folder, each with good bytes: for inputs that nobody wrote by hand.

A reader returns something, or raises one of its own errors; anything else is a crash.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from aorta.calibration.peers import unpacked
from aorta.errors import AortaError
from aorta.hang.last_calls import read_counts
from aorta.hang.report import read_reports, report_name
from aorta.records.deaths import last_words
from aorta.records.digests import packed_slot, read_digests
from aorta.records.files import call_counts_name, digest_name, kernels_name, state_name, steps_name
from aorta.records.launches import read_notes
from aorta.records.newest import Follower
from aorta.records.reader import read_kernel_names, read_run, read_steps
from aorta.records.requests import PLAN, REQUEST, read_plan, read_request
from aorta.records.rotation import DroppedSteps, dropped_path, read_dropped
from aorta.records.schema import Ending
from aorta.records.seal import sealed
from aorta.records.secrets import redacted, redacted_command
from aorta.records.state import LinesState, ProcessState, read_states
from aorta.steps.process import unwritten_steps
from tests.hang.reports_by_hand import report
from tests.records.plain_records import run, step

STATE = ProcessState(
    run_id="a", attempt=0, rank=0, world_size=1, host="h", pid=1, process_start=1.0, started_unix_ns=1,
    written_unix_ns=2, ending=Ending(kind="crashed", why="ValueError: x"),
)  # fmt: skip
LINES = b"".join(sealed(msgspec.json.encode(step(n, run_id="a")), n) for n in range(4))
NOTE = b'{"kind":"failure","unix_ns":5,"host":"h","code":-9,"rank":1,"pid":7,"why":"x"}\n'
LOG = b"[rank0]:[E1] Watchdog caught\nterminate called\n  what():  no password=hunter2 at https://u:p@h/x\n"
ERRORS = (AortaError, ValueError)
"""ValueError: of bytes that are no traced steps."""


class Reader(NamedTuple):
    name: str
    """Of the file; '' for bytes that are no file."""
    good: bytes
    read: Callable[[Path, bytes], object]


def followed(folder: Path) -> object:
    follower = Follower(folder)
    follower.poll()
    return [rank.last for rank in follower.ranks.values()]


READERS = {
    "run.json": Reader("run.json", msgspec.json.encode(run()), lambda folder, _: read_run(folder)),
    "steps": Reader(steps_name(0), LINES, lambda folder, _: list(read_steps(folder / steps_name(0), []))),
    "top": Reader(steps_name(0), LINES, lambda folder, _: followed(folder)),
    "state": Reader(
        state_name(0),
        msgspec.json.encode(STATE).ljust(2047) + b"\n" + msgspec.json.encode(LinesState(attempt=0)) + b"\n",
        lambda folder, _: read_states(folder),
    ),
    "digest": Reader(
        digest_name(0), 2 * packed_slot((1, 0, 0, 2, 20, 12, 0, 7, 8, 9), range(13)),
        lambda folder, _: read_digests(folder),
    ),
    "kernels": Reader(
        kernels_name(0), b'{"names":["a","b"]}', lambda folder, _: read_kernel_names(folder / kernels_name(0))
    ),
    "dropped": Reader(
        dropped_path(Path(steps_name(0))).name,
        msgspec.json.encode(DroppedSteps(num_steps=3, sums={"step_ms": 2.0})),
        lambda folder, _: read_dropped(folder / steps_name(0)),
    ),
    "request": Reader(REQUEST, b'{"id":"0a","num_steps":3}', lambda folder, _: read_request(folder)),
    "plan": Reader(PLAN, b'{"id":"0a","first_step":1,"num_steps":3}', lambda folder, _: read_plan(folder)),
    "launches": Reader("launch_0.jsonl", 3 * NOTE, lambda folder, _: read_notes(folder)),
    "hang": Reader(report_name(0), msgspec.json.encode(report(0)), lambda folder, _: read_reports(folder)),
    "counts": Reader(
        call_counts_name(0), bytes(range(256)) * 8,
        lambda folder, _: read_counts(folder / call_counts_name(0)),
    ),
    "unwritten": Reader(
        "unwritten", (40).to_bytes(4, "little") + zlib.crc32(bytes(40)).to_bytes(4, "little") + bytes(40),
        lambda folder, _: unwritten_steps(folder / "unwritten", None, None),
    ),
    "peers": Reader(
        "", zlib.compress(msgspec.msgpack.encode([[{}, [], []]])), lambda _, data: unpacked(data)
    ),
    "log": Reader("", LOG, lambda _, data: last_words(data.decode(errors="replace"), 0)),
    "secrets": Reader(
        "", LOG,
        lambda _, data: (redacted(text := data.decode(errors="replace")), redacted_command(text.split())),
    ),
}  # fmt: skip


def fuzzed(name: str, folder: Path, data: bytes) -> str:
    """What became of one input: 'read' or 'refused'; anything else is raised."""
    reader = READERS[name]
    if reader.name:
        (folder / reader.name).write_bytes(data)
    try:
        reader.read(folder, data)
    except ERRORS:
        return "refused"
    return "read"
