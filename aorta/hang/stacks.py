"""Python stacks: of the main thread, of each thread that is in a collective, and of the calls' launches."""

import io
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from aorta.hang.schema import CallStack, GroupState
from aorta.record.calls import CollectiveCall

FRAMES = 20
"""Of a stack, that a report holds."""
DEEPEST = 200
"""Frames that are looked at."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/pydevd_frame.py")
OBSERVERS = "/aorta/recording/observers/"


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
        if OBSERVERS in code.co_filename and "call" in code.co_varnames:
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
