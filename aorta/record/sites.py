"""Who issues the collectives of a step: learned at first sight and now and then, by the stack at the call.

A looked-at call walks the frames above it. What it moves is told by their functions, and by the name that the
call has at the step's end (a bucket, a unit). All other steps pay nothing. Arguments and locals are not read.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from aorta.record.interception.replaced import uncompiled
from aorta.record.journal import Journal
from aorta.records.libraries import OWN, PYTHON, library_of
from aorta.records.schema import CallSite, CallSites
from aorta.records.writer import write_sealed
from aorta.steps.notes import CollectiveCall

FIRST = 2
"""Seen steps that are passed over: they connect, and synchronise what was made."""
LOOKS_EVERY = 1024
"""Seen steps between two looks; in the beginning each power of two is looked at, too."""
MOST_EXTRA = 64
"""Further looks in a run, after a step that had calls of an unknown kind: what comes every tenth step."""
MOST_CALLS = 512
"""Limit of calls of a step that are looked at."""
MOST_SITES = 1000
DEEPEST = 200
VALUE_BYTES, SMALL_BYTES = 8, 64
"""A tensor of at most these is a value, or a few: a loss, a flag, counts."""
METRICS = ("torchmetrics", "evaluate", "sklearn")
"""Libraries whose collectives move metrics."""
_OF_FUNCTIONS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("barrier", "monitored_barrier")), "nothing"),
    (
        frozenset(
            ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
             "send_object_list", "recv_object_list")
        ),
        "an object",
    ),
    (frozenset(("_sync_buffers", "_sync_module_buffers", "_sync_final_model")), "buffers"),
    (frozenset(("_sync_module_states", "_verify_param_shape_across_processes")), "the model's first state"),
    (frozenset(("clip_grad_norm_", "get_total_norm", "_get_total_norm")), "the norm of gradients"),
)  # fmt: skip
"""Functions among the callers, and what moves where one of them is there."""


class _Place(NamedTuple):
    file: str
    line: int
    function: str
    is_program: bool


class Sites:
    """Notes the call sites of some steps, and writes them as rank_<n>_sites.json."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._path: Path | None = None
        self._run_id: str | None = None
        self._num_steps = 0
        self._num_looked = 0
        self._looked: list[tuple[CollectiveCall, _Place, frozenset[str], str]] | None = None
        self._kinds: set[tuple[str, int]] = set()
        """Operations and sizes (powers of two) that were looked at."""
        self._num_extra = MOST_EXTRA
        self._misses = False
        """True: a step since has had calls of another kind."""
        self._sites: dict[tuple[_Place, str, str], list[int]] = {}
        """Number and bytes of calls by place, operation and what moves."""

    def write_to(self, path: Path, run_id: str | None = None) -> None:
        """Without a path nothing is looked at."""
        self._path, self._run_id = path, run_id

    def begin_step(self, is_seen: bool) -> None:
        """Called before a step: look who issues its calls, if it is time to.

        is_seen: calls are noted in it.
        """
        self.end_step()  # one whose end is found in retrospect
        if not is_seen or self._path is None:
            return
        number = self._num_steps
        self._num_steps += 1
        is_extra = self._misses and self._num_extra > 0
        if number < FIRST or (number % LOOKS_EVERY and number & (number - 1) and not is_extra):
            return
        self._num_extra -= is_extra
        self._looked = []
        self._journal.note_site = self._note

    def leave_step(self) -> None:
        """Stop looking."""
        if self._looked is not None:
            self._looked = self._journal.note_site = None

    @uncompiled
    def _note(self, call: CollectiveCall) -> None:
        looked = self._looked
        if looked is not None and len(looked) < MOST_CALLS:
            with suppress(Exception):  # frames of any program
                looked.append((call, *self._place()))

    def _place(self) -> tuple[_Place, frozenset[str], str]:
        """The caller's place in the program, the functions of libraries below it, and their packages.

        A backward pass of a device runs in a thread of autograd, which the step's thread waits for.
        """
        found = _innermost(sys._getframe(2))
        step = self._journal.current
        if not found[0].is_program and step is not None:
            waits = sys._current_frames().get(step.thread)
            outer = _innermost(waits)
            if outer[0].is_program:
                return outer[0], found[1] | outer[1], found[2] or outer[2]
        return found

    def end_step(self, calls: Sequence[CollectiveCall] = ()) -> None:
        """Called at the end of a step's window, when its calls have their names.

        calls: all of a step that is seen.
        """
        looked = self._looked
        self.leave_step()
        if looked is None and self._num_extra > 0 and self._num_looked:
            self._misses |= any(_kind(call) not in self._kinds for call in calls)
        num_kinds = len(self._kinds)
        self._kinds.update(_kind(entry[0]) for entry in looked or ())
        self._misses &= len(self._kinds) == num_kinds  # found, or still missed
        if not looked or self._path is None:
            return
        self._num_looked += 1
        num_before = len(self._sites)
        for call, place, functions, package in looked:
            key = place, call.op, _moves(call, functions, package)
            if key in self._sites or len(self._sites) < MOST_SITES:
                sums = self._sites.setdefault(key, [0, 0])
                sums[0] += 1
                sums[1] += call.bytes
        if len(self._sites) > num_before or self._num_looked.bit_count() == 1:
            with suppress(OSError):  # a full disk
                write_sealed(self._path, self._told())

    def _told(self) -> CallSites:
        return CallSites(
            num_steps=self._num_looked,
            run_id=self._run_id,
            sites=[
                CallSite(**place._asdict(), op=op, moves=moves, num_calls=num, bytes=num_bytes)
                for (place, op, moves), (num, num_bytes) in self._sites.items()
            ],
        )


def _kind(call: CollectiveCall) -> tuple[str, int]:
    return call.op, call.bytes.bit_length()


def _innermost(frame: FrameType | None) -> tuple[_Place, frozenset[str], str]:
    """The innermost line of the program above a frame, else the library's function that calls torch."""
    functions: set[str] = set()
    outer: _Place | None = None
    package = ""
    for _ in range(DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        library = library_of(code.co_filename)
        if not library:
            place = _Place(code.co_filename, frame.f_lineno or 0, code.co_qualname, True)
            return place, frozenset(functions), package
        if library != OWN:
            functions.add(code.co_name)
            if library != PYTHON:
                outer = _Place(library, 0, code.co_qualname, False)
                package = package if package or library == "torch" else library
        frame = frame.f_back
    return outer or _Place(PYTHON, 0, "", False), frozenset(functions), package


def _moves(call: CollectiveCall, functions: frozenset[str], package: str) -> str:
    for names, what in _OF_FUNCTIONS:
        if names & functions:
            return what
    if package in METRICS:
        return "a metric"
    if call.module is not None:
        if call.module.startswith("bucket "):
            return f"gradients, {call.module}"
        kind = {"all_gather": "parameters of ", "reduce_scatter": "gradients of "}.get(call.op, "for ")
        return f"{kind}{call.module}"
    if "_engine_run_backward" in functions:
        return "gradients"
    few = "a value" if call.bytes <= VALUE_BYTES else "a few numbers"
    return few if call.bytes <= SMALL_BYTES else "a tensor"
