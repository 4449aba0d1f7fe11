"""What a rank writes to hang/rank<n>.json once no step ends any more: calls, Python stacks, the driver's view."""

import io
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from aorta.device.backend import backend_of
from aorta.device.telemetry import TelemetrySampler
from aorta.errors import NOT_JSON, RecordError
from aorta.files import write_whole
from aorta.record.calls import CollectiveCall
from aorta.records.schema import DeviceRecord

SCHEMA_VERSION = 1
FOLDER = "hang"
MOST_RANKS = 1 << 20
LISTED_BEFORE, LISTED_AFTER = 400, 1000
"""Calls of a group that a report lists before and after the first one that is not finished: with a step or
more on either side, which tells the usual order."""


class CallState(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, as this rank has it."""

    seq: int
    """Counts this rank's collectives of the group, from 0."""
    op: str
    bytes: int
    dtype: str
    peer: int | None = None
    """Of a send or a receive: the other rank's number within the group."""
    step: int
    """Global step in whose window it was issued."""
    started: bool | None
    """The host (gloo) or the device (NCCL) has reached it; None where it cannot be told."""
    finished: bool | None
    age_s: float | None
    """Since the host issued it."""


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
    """Where in the program a collective is waited for, or was launched."""

    group: str
    """Its key."""
    op: str
    seq: int
    thread: str
    """'main thread', 'thread <id>': it is in the call now. 'launch': where an asynchronous one was begun."""
    frames: list[str]
    """'function (path:line)', the innermost call first."""


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA_VERSION
    rank: int
    world_size: int
    host: str
    pid: int
    written_unix_ns: int
    reason: str
    is_from_last_calls: bool = False
    """The rank wrote none: made of the calls that it noted last (aorta.hang.standing)."""
    step: int | None
    """The step that the rank was in, or had finished last; None before the first."""
    num_steps: int
    """Steps that it has begun."""
    since_s: float
    """Since the last sign of progress."""
    limit_s: float
    groups: list[GroupState] | None
    """None where collectives were not recorded."""
    main_thread: list[str]
    """'function (path:line)', the innermost call first."""
    stacks: list[CallStack] = []
    """Of the threads that are in a collective; of launches, where torch's flight recorder has them."""
    device: DeviceRecord | None
    not_measured: dict[str, str] = {}


def report_name(rank: int) -> str:
    return f"rank{rank}.json"


def stacks_name(rank: int) -> str:
    return f"rank{rank}.stacks.txt"


def flight_recorder_name(rank: int) -> str:
    """A pickle, as torch's own flight recorder analyzer reads it."""
    return f"rank{rank}.flight_recorder"


def read_reports(output_dir: Path | str) -> list[HangReport]:
    """The reports of a run's folder, or of its hang folder, by rank; RecordError where there are none."""
    folder = Path(output_dir)
    try:
        if not folder.is_dir():
            raise RecordError(f"{folder} is no folder; give the folder of a run")
        if (folder / FOLDER).is_dir():
            folder = folder / FOLDER
        paths = [path for path in folder.iterdir() if path.match("rank*.json")]
    except OSError as error:
        raise RecordError(f"cannot read {folder}: {error.strerror}") from error
    reports = [_read(path) for path in paths]
    if not reports:
        raise RecordError(f"{folder} holds no rank<n>.json: no rank has reported a hang")
    sizes = sorted({report.world_size for report in reports})
    if len(sizes) > 1:
        raise RecordError(f"{folder} mixes runs of {' and '.join(map(str, sizes))} ranks")
    reports.sort(key=lambda report: report.rank)
    twice = next((a.rank for a, b in pairwise(reports) if a.rank == b.rank), None)
    if twice is not None:
        raise RecordError(f"{folder} holds two reports of rank {twice}; give the folder of one run")
    return reports


def _read(path: Path) -> HangReport:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=HangReport)
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


FRAMES = 20
"""Of a stack, that a report holds."""
DEEPEST = 200
"""Frames that are looked at."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/pydevd_frame.py")
OBSERVERS = ("/aorta/record/cpu_observer.py", "/aorta/record/event_observer.py")


def main_thread_frames() -> list[str]:
    """Where the main thread is, the innermost call first. Reads no source file: their disk may hang."""
    return _texts(sys._current_frames().get(threading.main_thread().ident or -1))


def in_debugger() -> bool:
    """True while the main thread stands in a Python debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    return any(frame.f_code.co_filename.endswith(DEBUGGERS) for frame in _frames(frame))


def call_stacks() -> list[CallStack]:
    """The stack of each thread that is inside a collective, with that collective."""
    stacks = []
    main_id = threading.main_thread().ident
    for thread_id, frame in sys._current_frames().items():
        call = _call_of(frame)
        if call is not None:
            stacks.append(
                CallStack(
                    group=call.group.key,
                    op=call.op,
                    seq=call.seq,
                    thread="main thread" if thread_id == main_id else f"thread {thread_id}",
                    frames=_texts(frame),
                )
            )
    return stacks


def launch_stacks(flight_record: bytes, groups: Sequence[GroupState]) -> list[CallStack]:
    """Where each group's first unfinished call was launched, by torch's flight recorder.

    flight_record: its pickle, made by this very process; nothing in it may run code. Empty where it is not
    in the form known here.
    """
    try:
        entries = _Plain(io.BytesIO(flight_record)).load()["entries"]
        return list(_launches(entries, {group.key: group for group in groups}))
    except Exception:  # another version of torch
        return []


def _launches(entries: list[dict[str, Any]], groups: dict[str, GroupState]) -> Iterator[CallStack]:
    for key, group in groups.items():
        call = next((call for call in group.calls if call.finished is False), None)
        entry = next(
            (
                entry
                for entry in entries
                if entry["process_group"][0] == key and not entry["retired"] and entry["state"] != "completed"
            ),
            None,
        )
        if entry is None or call is None or call.op not in entry["profiling_name"]:
            continue
        frames = [f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in entry["frames"]]
        yield CallStack(group=key, op=call.op, seq=call.seq, thread="launch", frames=frames[:FRAMES])


class _Plain(pickle.Unpickler):
    """Numbers, texts, lists and dicts."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")


def _call_of(frame: FrameType | None) -> CollectiveCall | None:
    for inner in _frames(frame):
        code = inner.f_code
        if code.co_filename.endswith(OBSERVERS) and "call" in code.co_varnames:
            call = inner.f_locals.get("call")
            if isinstance(call, CollectiveCall) and call.seq >= 0:
                return call
    return None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(DEEPEST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _texts(frame: FrameType | None) -> list[str]:
    rows = []
    for inner in _frames(frame):
        rows.append(f"{inner.f_code.co_name} ({inner.f_code.co_filename}:{inner.f_lineno})")
        if len(rows) == FRAMES:
            break
    return rows


log = logging.getLogger(__name__)

SAMPLE_S = 2.0
FLIGHT_RECORDER_S = 3.0


def in_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Started; an end of the process does not wait for it."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # a vendor's library may raise anything
            log.info("%s: %r", name, error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def ask_once(device: torch.device | None) -> None:
    """While the device answers: torch keeps its properties, which the sampler asks for."""
    if device is not None and backend_of(device).is_device:
        backend_of(device).properties(device.index)


def sample(device: torch.device | None) -> tuple[DeviceRecord | None, str | None]:
    """Power, clocks and throttling of this moment, or why not. NVML and amdsmi do not wait for kernels."""
    if device is None or not backend_of(device).is_device:
        return None, "there is no device"
    with TelemetrySampler(device.index, SAMPLE_S / 4) as sampler:
        end_s = time.monotonic() + SAMPLE_S
        while sampler.latest() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        record = sampler.latest()
        return record, None if record is not None else sampler.reason or f"no sample within {SAMPLE_S:g} s"


def write_flight_recorder(path: Path) -> bytes:
    """PyTorch's own record of its calls, where this build has one; empty where not. Returns within
    FLIGHT_RECORDER_S unless it waits with the interpreter lock: for a lock of NCCL's threads, say. So it
    comes last."""
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return b""
    answers: list[bytes] = []

    def ask() -> None:
        data = dump()
        if data:
            answers.append(data)
            write_whole(path, data)

    in_thread(ask, "aorta-flight-recorder").join(FLIGHT_RECORDER_S)
    return answers[0] if answers else b""
