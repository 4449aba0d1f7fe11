"""Where a rank stands: its collectives, the stacks of its threads, its device, torch's flight recorder.

The watchdog's thread asks for these while the main thread may hang in any call. So nothing here waits for the
device, and what might wait for a lock runs in a thread of its own.
"""

import io
import math
import pickle
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from aorta.device.backend import backend_of
from aorta.device.telemetry import TelemetrySampler
from aorta.files import write_whole
from aorta.hang.report import LISTED_AFTER, LISTED_BEFORE, CallStack, CallState, GroupState
from aorta.processes import in_thread, no_garbage_collection
from aorta.record import cpu_observer, event_observer
from aorta.record.journal import Journal
from aorta.records.schema import DeviceRecord
from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep

FRAMES = 20
"""Frames of a stack that a report holds."""
DEEPEST = 200
"""Frames of a stack that are looked at for a debugger or a collective."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/pydevd_frame.py")
OBSERVERS = (cpu_observer.__file__, event_observer.__file__)
"""Files whose functions hold the collective that they launch in a variable `call`."""
SAMPLE_S = 2.0
"""Longest wait for a sample of the device's telemetry."""
OPS_OF_TORCH = {
    "_all_gather_base": "all_gather", "_allgather_base": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "alltoall_base": "all_to_all", "all_reduce_barrier": "barrier",
}  # fmt: skip
"""Operations that torch's flight recorder calls otherwise."""
DTYPES_OF_TORCH = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8",
    "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip
BYTES_OF_TORCH = {
    "Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1,
}  # fmt: skip
MOST_STEP = 1 << 62
FLIGHT_RECORDER_S = 3.0
"""Longest wait for torch's flight recorder."""

HasPassed = Callable[[int], bool]
"""Says, without waiting, if the device has passed a mark of the kernel records, by the mark's number."""
Stand = Literal["finished", "ahead", "inside", "passed", "marked"]
"""Progress of a step's calls. finished: all have ended. Where kernel records time the step: it is ahead of
the device, the device is inside, or has passed its end on the compute stream. marked: each call has marks of
its own, which tell."""
Row = tuple[int, CollectiveCall, Stand]
"""Global step, call, and how far the calls of that step are."""


# ---- its collectives ---------------------------------------------------------------------------


def group_states(
    journal: Journal,
    finished_steps: Sequence[tuple[int, list[CollectiveCall]]],
    has_passed: HasPassed | None = None,
) -> list[GroupState]:
    """Every group of this rank with its latest collectives.

    finished_steps: number and calls of steps before those that the journal still holds. They count as
    finished: their marks may be in use again for later steps. has_passed: None where the recorder has no
    kernel records.
    """
    open_steps: list[RecordedStep] = [
        *(
            step for step in list(journal.closed) if isinstance(step, RecordedStep)
        ),  # the others have no calls
        *(step for step in (journal.current or journal.failed,) if step is not None),
    ]
    by_group: dict[str, list[Row]] = {}
    known = {step.global_step for step in open_steps}
    for number, calls in finished_steps:
        if number not in known:
            for call in calls:
                by_group.setdefault(call.group.key, []).append((number, call, "finished"))
    for step in open_steps:
        stand = _stand(step, has_passed)
        for call in list(step.calls):
            by_group.setdefault(call.group.key, []).append((step.global_step, call, stand))
    groups = {key: rows[0][1].group for key, rows in by_group.items()}
    groups |= {group.key: group for group in journal.groups()}  # those without a call, too
    now_ns = time.monotonic_ns()
    return [_group_state(group, by_group.get(group.key, []), now_ns) for group in groups.values()]


def _stand(step: RecordedStep, has_passed: HasPassed | None) -> Stand:
    """Progress of a step, by the kernel records where these time it."""
    if not step.by_kernels or has_passed is None:
        return "marked"
    start, end = step.start, step.window_end or step.body_end
    if start is not None and start.number and not has_passed(start.number):
        return "ahead"
    return "passed" if end is not None and end.number and has_passed(end.number) else "inside"


def _group_state(group: Group, rows: list[Row], now_ns: int) -> GroupState:
    """A group with its latest calls, around the first one that is not finished."""
    rows = sorted(rows, key=lambda row: row[1].seq)
    calls = []
    # Open: not known to be finished. Pending: known not to be; what follows it is consequence.
    first_open: int | None = None
    first_pending: int | None = None
    for index, (step, call, stand) in enumerate(rows):
        if first_pending is not None and index > first_pending + LISTED_AFTER:
            break
        state = _call_state(step, call, stand, now_ns)
        if not state.finished and first_open is None:
            first_open = index
        if state.finished is False and first_pending is None:
            first_pending = index
        calls.append(state)
    start = max(0, (len(calls) if first_open is None else first_open) - LISTED_BEFORE)
    return GroupState(
        key=group.key,
        name=group.name,
        ranks=list(group.ranks),
        backend=group.backend,
        num_seen=group.next_seq,
        calls=calls[start:],
    )


def _call_state(step: int, call: CollectiveCall, stand: Stand, now_ns: int) -> CallState:
    started, finished = _progress(call, stand)
    issued_ns = call.issued_ns if call.start is None else call.start.host_ns
    return CallState(
        seq=call.seq,
        op=call.op,
        bytes=call.bytes,
        dtype=call.dtype,
        peer=call.peer,
        step=step,
        started=started,
        finished=finished,
        age_s=(now_ns - issued_ns) / 1e9 if issued_ns else None,
    )


def _progress(call: CollectiveCall, stand: Stand) -> tuple[bool | None, bool | None]:
    """True or False for `has started` and for `has finished`; None where that cannot be told."""
    if stand == "finished":
        return True, True
    if call.failed:  # gloo ends a call whose peer is gone: it was waiting for that peer
        return True, False
    if call.reason is not None:  # the recorder does not time it
        return None, None
    if stand == "marked" or call.start is not None:  # of CPU tensors: the host's marks
        finished = _passed(call.end)
        return True if finished else _passed(call.start), finished
    if stand == "ahead":
        return False, False
    # What runs on a stream of its own may go on where the compute stream has not waited for it.
    if stand == "passed" and not call.is_async and call.stream != "side":
        return True, True
    return None, None


def _passed(mark: Mark | None) -> bool | None:
    """True where the device or host has reached the mark, False where not or where it is not set yet."""
    if mark is None:
        return False
    event = mark.event  # read once: the thread that resolves steps sets it to None
    if event is None:
        return True  # set on the host when it happened, or resolved
    try:
        return bool(event.query())
    except RuntimeError:  # the device is in an error state
        return None


# ---- its threads -------------------------------------------------------------------------------


@no_garbage_collection()  # see aorta.record.stack_tree.frames_of
def main_thread_frames() -> list[str]:
    """Frames of the main thread, the innermost call first. Reads no source files: their disk may hang."""
    return _frame_texts(sys._current_frames().get(threading.main_thread().ident or -1))


@no_garbage_collection()
def in_debugger() -> bool:
    """True while the main thread stands in a Python debugger."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    return any(frame.f_code.co_filename.endswith(DEBUGGERS) for frame in _frames(frame))


@no_garbage_collection()
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
                    frames=_frame_texts(frame),
                )
            )
    return stacks


def _call_of(frame: FrameType | None) -> CollectiveCall | None:
    """The collective that an observer of this stack is launching or waiting for.

    An observer's frame holds it in the local `call`, numbered once the journal has it.
    """
    for inner in _frames(frame):
        code = inner.f_code
        if code.co_filename in OBSERVERS and "call" in code.co_varnames:
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


def _frame_texts(frame: FrameType | None) -> list[str]:
    rows = []
    for inner in _frames(frame):
        rows.append(f"{inner.f_code.co_name} ({inner.f_code.co_filename}:{inner.f_lineno})")
        if len(rows) == FRAMES:
            break
    return rows


# ---- its device, and torch's flight recorder ----------------------------------------------------


def cache_device_properties(device: torch.device | None) -> None:
    """Ask for the device's properties while it answers: torch keeps them for the sampler."""
    if device is not None and backend_of(device).is_device:
        backend_of(device).properties(device.index)


def telemetry_sample(device: torch.device | None) -> tuple[DeviceRecord | None, str | None]:
    """Power, clocks and throttling of this moment, or the reason why there are none.

    NVML and amdsmi do not wait for kernels.
    """
    if device is None or not backend_of(device).is_device:
        return None, "there is no device"
    with TelemetrySampler(device.index, SAMPLE_S / 4) as sampler:
        end_s = time.monotonic() + SAMPLE_S
        while sampler.latest() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        record = sampler.latest()
        return record, None if record is not None else sampler.reason or f"no sample within {SAMPLE_S:g} s"


def flight_record(path: Path | None = None) -> bytes:
    """PyTorch's own record of its calls; empty where this build keeps none. Written to `path`; without one it
    lacks their stacks, which take seconds.

    Returns within FLIGHT_RECORDER_S, unless torch waits for a lock of NCCL's threads while it holds the
    interpreter lock. So ask for it last.
    """
    dump: Any = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return b""
    answers: list[bytes] = []

    def ask() -> None:
        if path is None:
            answers.append(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))
        elif data := dump():
            answers.append(data)
            write_whole(path, data)

    in_thread(ask, "aorta-flight-recorder").join(FLIGHT_RECORDER_S)
    return answers[0] if answers else b""


def _entries(record: bytes) -> list[dict[str, Any]]:
    """Of the recorder's pickle, made by this very process: nothing in it may run code. Empty where its form
    is not the one known here, as of another version of torch."""
    try:
        entries: list[dict[str, Any]] = _Plain(io.BytesIO(record)).load()["entries"]
        return entries
    except Exception:
        return []


def with_unseen(
    groups: Sequence[GroupState],
    unseen: Mapping[str, tuple[int, int]],
    record: bytes,
    begun: Sequence[tuple[int, int]],
) -> list[GroupState]:
    """The groups with the collectives of a step that is not recorded: their number by the backends' counts,
    and what they are by torch's flight recorder, where it has them.

    unseen: as Recorder.unseen returns it. record: of the flight recorder, empty where there is none.
    begun: Unix ns at which the latest steps began, and their numbers.
    """
    entries, now_ns = _entries(record), time.time_ns()
    result = []
    for group in groups:
        left_at, num_unseen = unseen.get(group.key, (0, 0))
        # What was noted of the steps before is over: the host has come out of them.
        earlier = [msgspec.structs.replace(call, started=True, finished=True) for call in group.calls]
        calls = _unseen_calls(entries, group, left_at, begun, now_ns) if num_unseen else []
        result.append(
            msgspec.structs.replace(
                group,
                num_seen=group.num_seen + num_unseen,
                calls=[*earlier, *calls][-(LISTED_BEFORE + LISTED_AFTER) :],
            )
        )
    return result


def _unseen_calls(
    entries: list[dict[str, Any]],
    group: GroupState,
    left_at: int,
    begun: Sequence[tuple[int, int]],
    now_ns: int,
) -> list[CallState]:
    calls = []
    for entry in entries if begun else []:
        library, _, op = entry["profiling_name"].partition(":")
        # As the backends count: gloo's sends and receives have numbers, too, and no entries.
        number = entry["op_id" if library == "gloo" else "collective_seq_id"]
        if entry["process_group"][0] != group.key or entry["is_p2p"] or number <= left_at:
            continue
        finished = bool(entry["retired"]) or entry["state"] == "completed"
        # gloo's collectives begin with their launch; of NCCL's torch knows it only where it times them.
        started = finished or library == "gloo" or entry["state"] == "started" or None
        sizes = zip(
            [*entry["input_sizes"], *entry["output_sizes"]],
            [*entry["input_dtypes"], *entry["output_dtypes"]],
            strict=False,
        )
        num_bytes, dtype = max(((_bytes_of(size, kind), kind) for size, kind in sizes), default=(0, ""))
        calls.append(
            CallState(
                seq=group.num_seen + number - left_at - 1,
                op=OPS_OF_TORCH.get(op, op),
                bytes=num_bytes,
                dtype=DTYPES_OF_TORCH.get(dtype, dtype.lower()),
                step=begun[max(0, bisect_right(begun, (entry["time_created_ns"], MOST_STEP)) - 1)][1],
                started=started,
                finished=finished,
                age_s=max(0.0, (now_ns - entry["time_created_ns"]) / 1e9),
            )
        )
    return calls


def _bytes_of(sizes: Sequence[int], dtype: str) -> int:
    return math.prod(sizes) * BYTES_OF_TORCH.get(dtype, 4)


def launch_stacks(flight_record: bytes, groups: Sequence[GroupState]) -> list[CallStack]:
    """Stack of the launch of each group's first unfinished call, from torch's flight recorder."""
    try:
        return list(_launches(_entries(flight_record), {group.key: group for group in groups}))
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
    """Unpickler of numbers, texts, lists and dicts alone: a class in the data is an error."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")
