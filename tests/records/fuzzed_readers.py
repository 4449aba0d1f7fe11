"""The small readers of a run's folder, each with good bytes: for inputs that nobody wrote by hand.

A reader returns something, or raises one of its own errors; anything else is a crash.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from aorta.account.results.schema import read_document
from aorta.account.watch import newest_of
from aorta.config.load import load_config
from aorta.errors import AortaError
from aorta.hang.last_calls import read_counts
from aorta.hang.report import read_reports, report_name
from aorta.hazards.exceptions import Exceptions
from aorta.hazards.findings import read_checked
from aorta.records import columns
from aorta.records.blocks import read_blocks
from aorta.records.deaths import last_words
from aorta.records.digests import SLOT_BYTES, packed_slot, read_digests
from aorta.records.files import (
    call_counts_name,
    columns_name,
    digest_name,
    hazards_name,
    kernels_name,
    memory_name,
    sites_name,
    stacks_name,
    state_name,
    steps_name,
)
from aorta.records.launches import read_notes
from aorta.records.memory import read_shortages
from aorta.records.newest import Follower
from aorta.records.reader import read_beside, read_kernel_names, read_run, read_steps
from aorta.records.requests import PLAN, REQUEST, read_plan, read_request
from aorta.records.rotation import DroppedSteps, dropped_path, read_dropped
from aorta.records.schema import CallSites, Ending
from aorta.records.seal import sealed
from aorta.records.secrets import redacted, redacted_command
from aorta.records.stacks import read_stacks
from aorta.records.state import LinesState, ProcessState, read_states
from aorta.records.writer import LineWriter
from aorta.steps.unwritten import unwritten_steps
from tests.hang.reports_by_hand import report
from tests.queues.documents import document, point
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
    wrap: Callable[[bytes], bytes] = bytes
    """Makes a mutation whole again, with a checksum or packed, so that it is not refused for that alone."""


def written_columns() -> tuple[bytes, bytes]:
    """A file of lines, and the one of columns beside it."""
    most, columns.MOST_LINES = columns.MOST_LINES, 16
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / steps_name(0)
            LineWriter.create(path).close()
            with LineWriter.append(path, with_columns=True) as writer:
                for number in range(48):
                    writer.write(step(number, run_id="a"))
            return path.read_bytes(), path.with_name(columns_name(0)).read_bytes()
    finally:
        columns.MOST_LINES = most


def with_checksums(data: bytes) -> bytes:
    """Of each slot of a digest."""
    slots = [data[place : place + SLOT_BYTES] for place in range(0, len(data), SLOT_BYTES)]
    return b"".join(slot[:4] + zlib.crc32(slot[8:]).to_bytes(4, "little") + slot[8:] for slot in slots)


def sealed_lines(data: bytes) -> bytes:
    """Each line with its number and the checksum of what it has become."""
    bodies = [line.rpartition(b',"line":')[0] + b"}" for line in data.splitlines() if b',"line":' in line]
    return b"".join(sealed(body, number) for number, body in enumerate(bodies))


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def read_columns(folder: Path) -> object:
    (folder / steps_name(0)).write_bytes(COLUMNS[0])
    return [block.integers("global_step") for block in read_blocks(folder / steps_name(0), [], whole=True)]


COLUMNS = written_columns()


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
        lambda folder, _: [newest_of(slots, 5) for slots in (read_digests(folder),) if len(slots)],
        with_checksums,
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
        "unwritten", msgspec.msgpack.encode({"step": {"global_step": 3, "rollbacks": 0, "marks": [1, 2]}}),
        lambda folder, _: unwritten_steps(folder / "unwritten", None, None), frame,
    ),
    "sealed": Reader(
        steps_name(0), LINES, lambda folder, _: list(read_steps(folder / steps_name(0), [])), sealed_lines
    ),
    "columns": Reader(columns_name(0), COLUMNS[1], lambda folder, _: read_columns(folder)),
    "sites": Reader(
        sites_name(0),
        b'{"num_steps":3,"sites":[{"file":"t.py","line":3,"function":"f","is_program":true,"op":"all_reduce",'
        b'"moves":"gradients","num_calls":3,"bytes":12}]}',
        lambda folder, _: read_beside(folder / sites_name(0), CallSites),
    ),
    "memory": Reader(
        memory_name(0),
        b'{"why":"out of memory","asked_bytes":5,"held":[{"kind":"parameters","bytes":7,"num_blocks":1}]}',
        lambda folder, _: read_shortages(folder, [0]),
    ),
    "stacks": Reader(
        stacks_name(0),
        sealed(
            b'{"begins":true,"frames":[["t.py",3,"f",true]],"nodes":[[-1,0]],'
            b'"samples":[[3,0,0,0,false,0,5000]],"cpu_s":0.1,"elapsed_s":2.0}', 0
        ),
        lambda folder, _: list(read_stacks(folder / stacks_name(0))), sealed_lines,
    ),
    "hazards": Reader(
        hazards_name(0),
        b'{"rank":0,"steps":[1,2],"num_operations":3,"seen":{"a":1},"blind":[],"findings":[]}',
        lambda folder, _: read_checked(folder),
    ),
    "exceptions": Reader(
        "known.yaml",
        b"- operation: aten::copy_\n  reason: it is meant so\n- {where: a.py:3, reason: yes}\n",
        lambda folder, _: Exceptions.shipped(folder / "known.yaml"),
    ),
    "settings": Reader(
        "config.yaml",
        b"training: {max_steps: 5}\nmodel:\n  num_layers: 2\nhang: {timeout_s: 9.5}\n",
        lambda folder, _: load_config(folder / "config.yaml", []),
    ),
    "queues": Reader(
        "document.json", msgspec.json.encode(document(point(streams=2))),
        lambda folder, _: read_document(folder / "document.json"),
    ),
    "log": Reader("", LOG, lambda _, data: last_words(data.decode(errors="replace"), 0)),
    "secrets": Reader(
        "", LOG,
        lambda _, data: (redacted(text := data.decode(errors="replace")), redacted_command(text.split())),
    ),
}  # fmt: skip


def fuzzed(name: str, folder: Path, data: bytes) -> str:
    """What became of one mutation: 'read' or 'refused'; anything else is raised."""
    reader = READERS[name]
    data = reader.wrap(data)
    if reader.name:
        (folder / reader.name).write_bytes(data)
    try:
        reader.read(folder, data)
    except ERRORS:
        return "refused"
    return "read"
