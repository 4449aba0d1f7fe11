"""Stacks of a thread as a tree of functions and lines, and the walk over another thread's frames.

What a function is (the program's, torch's, a phase's) is worked out once for each code object. Frames are let
go of at once, so that no local of the program lives longer for it; arguments and locals are not read.

Imports no other part of the recorder: workers of a DataLoader may be new processes, which load this alone.
"""

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType

import torch

from aorta.processes import no_garbage_collection
from aorta.record.called_names import calls_of
from aorta.records.libraries import OWN, library_of
from aorta.records.stacks import STACK_PHASES, StackFrame, StackPhase

DEEPEST = 256
"""Frames of a stack that are looked at, from the innermost on."""
MOST_NODES, MOST_CODES = 40_000, 20_000
"""Bounds of memory: a node with its own frame takes 400 bytes. Beyond, a stack counts as its known part."""

PHASE = {name: place for place, name in enumerate(STACK_PHASES)}
_TORCH = str(Path(torch.__file__).parent) + os.sep
_MARKERS: tuple[tuple[str, tuple[str, ...], StackPhase], ...] = (
    ("utils/data/dataloader.py", ("__next__", "__iter__", "_shutdown_workers"), "data"),
    ("autograd/graph.py", ("_engine_run_backward",), "backward"),
    ("autograd/__init__.py", ("backward", "grad"), "backward"),
    ("_tensor.py", ("backward",), "backward"),
    ("optim/optimizer.py", ("wrapper",), "optimizer"),
    ("nn/modules/module.py", ("_wrapped_call_impl", "_call_impl"), "forward"),
    ("_dynamo/convert_frame.py", ("_compile",), "rest"),
    ("serialization.py", ("save",), "checkpoint"),
    ("distributed/checkpoint/state_dict_saver.py", ("save", "async_save"), "checkpoint"),
    ("distributed/distributed_c10d.py", (), "communication"),
    ("distributed/_functional_collectives.py", (), "communication"),
)
"""Files of torch, functions in them (all where none is given), and the phase that they show."""
_COMPILES = "_compile"
"""Function of torch._dynamo that stands for all that it calls: compiling goes through passes, too."""
_LASTING = frozenset(PHASE[name] for name in ("data", "checkpoint", "backward"))
"""Phases that are not left for what they call: a module that a data set runs is data."""


class Code:
    """What is known of a function."""

    __slots__ = ("calls", "code", "file", "is_hidden", "is_program", "name", "path", "phase")

    def __init__(self, code: CodeType) -> None:
        self.calls: dict[int, _Called] | None = None
        """By the offset of an instruction; None until a sample asks."""
        self.code, self.path = code, (path := code.co_filename)
        self.file, self.name, self.phase = path, code.co_qualname, -1
        package = library_of(path)
        self.is_hidden, self.is_program = package == OWN, not package
        if self.is_hidden:
            if f"{os.sep}record{os.sep}interception{os.sep}" in path:
                self.phase = PHASE["communication"]
        elif not self.is_program:
            self.file = package
            if path.startswith(_TORCH):
                self.phase = _phase_of(path[len(_TORCH) :].replace(os.sep, "/"), code.co_name)
            elif package == "safetensors" and code.co_name.startswith("save"):
                self.phase = PHASE["checkpoint"]


def _phase_of(path: str, name: str) -> int:
    for file, names, phase in _MARKERS:
        if path == file and (not names or name in names):
            return PHASE[phase]
    return -1


class _Called:
    """What a line of the program calls, and has no frame: as a function of a library without a name."""

    __slots__ = ("calls", "code", "file", "is_hidden", "is_program", "name", "path", "phase")

    def __init__(self, name: str) -> None:
        self.code, self.file, self.name, self.path, self.phase = name, "", name, "", -1
        self.is_hidden = self.is_program = False
        self.calls: dict[int, _Called] = {}


Known = Code | _Called


class StackTree:
    """All stacks so far: frames, and nodes of frames under their callers."""

    def __init__(self) -> None:
        self.frames: list[StackFrame] = []
        """Of these and of nodes, what came since `taken`."""
        self.nodes: list[tuple[int, int]] = []
        self._called: dict[str, _Called] = {}
        self._codes: dict[int, Code] = {}
        """By id: a code object hashes its whole content, each time. An entry keeps its code alive."""
        self._frame_ids: dict[tuple[int, int], int] = {}
        self._num_frames = 0
        self._node_ids: dict[int, int] = {}

    def restart(self) -> None:
        """Begin with empty tables. What is known of functions stays."""
        self.frames, self.nodes = [], []
        self._frame_ids.clear()
        self._node_ids.clear()
        self._num_frames = 0

    def taken(self) -> tuple[list[StackFrame], list[tuple[int, int]]]:
        """What is new since the last call."""
        new = self.frames, self.nodes
        self.frames, self.nodes = [], []
        return new

    def known(self, code: CodeType) -> Code:
        """What is known of a function; learned where it is new."""
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= MOST_CODES:
                self._codes.clear()
                self._frame_ids.clear()  # their ids may be those of other functions now
            known = self._codes[id(code)] = Code(code)
        return known

    def called(self, known: Code, offset: int) -> _Called | None:
        """What a function of the program calls at an instruction, where that has no frame of its own."""
        if not known.is_program:
            return None
        if known.calls is None:
            with no_garbage_collection():  # what is due for the program's objects would be paid by one sample
                names = calls_of(known.code)
            known.calls = {
                place: self._called.setdefault(name, _Called(name))
                for place, name in names.items()
                if len(self._called) < MOST_CODES or name in self._called
            }
        return known.calls.get(offset)

    def add(self, frames: Sequence[tuple[Known, int]]) -> tuple[int, int]:
        """The node and the phase of a stack. frames: functions and lines, the innermost first."""
        node, phase = -1, 0
        entry: Known | None = None
        """Where the program called the library that is being walked through."""
        last: Known | None = None
        is_own_step = False
        for known, line in reversed(frames):
            if known.phase >= 0 and phase not in _LASTING:
                phase = known.phase
                is_own_step = False
            elif known.is_program and phase == PHASE["optimizer"] and not is_own_step:
                # A closure, which computes the loss (Lightning's has the whole training step in it), unless
                # the optimizer is the program's.
                is_own_step = known.name.rpartition(".")[2] == "step"
                phase = phase if is_own_step else PHASE["rest"]
            if known.is_hidden:
                continue
            if known.name == _COMPILES and not known.is_program and known.phase == PHASE["rest"]:
                return self._library(node, entry or known, known), PHASE["rest"]
            if known.is_program:
                node = self._library(node, entry, None)
                entry = None
                node = self._node(node, self._frame(known, line))
            else:
                entry, last = entry or known, known
        return self._library(node, entry, last), phase

    def add_whole(self, frames: Sequence["tuple[Known, int]"]) -> int:
        """The node of a stack of which libraries are not folded; -1 of none."""
        node = -1
        for known, line in reversed(frames):
            if not known.is_hidden:
                node = self._node(node, self._frame(known, line if known.is_program else 0))
        return node

    def _library(self, node: int, entry: Known | None, last: Known | None) -> int:
        """A library's function that the program called; of the innermost also where it has got to."""
        if entry is None:
            return node
        node = self._node(node, self._frame(entry, 0))
        if last is not None and last is not entry:
            node = self._node(node, self._frame(last, 0))
        return node

    def _frame(self, known: Known, line: int) -> int:
        key = (id(known.code), line)
        frame = self._frame_ids.get(key)
        if frame is None:
            if self._num_frames >= MOST_NODES:
                return -1
            frame = self._frame_ids[key] = self._num_frames
            self._num_frames += 1
            self.frames.append(StackFrame(known.file, line, known.name, known.is_program))
        return frame

    def _node(self, parent: int, frame: int) -> int:
        if frame < 0:
            return parent
        key = (parent + 1) << 32 | frame
        node = self._node_ids.get(key)
        if node is None:
            if len(self._node_ids) >= MOST_NODES:
                return parent
            node = self._node_ids[key] = len(self._node_ids)
            self.nodes.append((parent, frame))
        return node


COLLECTS_IN_WALKS = sys.version_info < (3, 12)
"""Python may collect garbage where a frame is made, and not between instructions alone."""


def frames_of(thread: int, tree: StackTree) -> list[tuple[Known, int]]:
    """Functions and lines of a thread, the innermost first; before them what it calls that has no frame.

    A backward pass goes on in autograd's own threads, which have frames where a hook or a function of the
    program runs. Without garbage collection: in Python 3.11 one may begin where f_back makes an object; its
    finalizers let go of the interpreter's lock, as tensors that are freed do, the thread goes on, and the
    frame that is walked to is gone: a segmentation fault of the program. (Later versions collect elsewhere.)
    """
    with no_garbage_collection() if COLLECTS_IN_WALKS else nullcontext():
        found, offset = _walked(thread, tree)
    called = tree.called(found[0][0], offset) if found else None
    return [(called, 0), *found] if called is not None else [*found]


def _walked(thread: int, tree: StackTree) -> tuple[list[tuple[Code, int]], int]:
    """And the offset of the innermost one's instruction."""
    stacks = sys._current_frames()
    found: list[tuple[Code, int]] = []
    frame: FrameType | None = stacks.get(thread)
    offset = -1 if frame is None else frame.f_lasti
    if frame is not None and frame.f_code.co_name == "_engine_run_backward":
        known = {other.ident for other in threading.enumerate()}
        for ident, other in stacks.items():
            if ident not in known:
                found, offset = _walk(other, tree), other.f_lasti
                break
        del ident, other
    del stacks
    found += _walk(frame, tree)
    return found, offset


def _walk(frame: FrameType | None, tree: StackTree) -> list[tuple[Code, int]]:
    """Lines of the program's functions alone: to find one out takes longer than to walk a frame."""
    found: list[tuple[Code, int]] = []
    while frame is not None and len(found) < DEEPEST:
        known = tree.known(frame.f_code)
        found.append((known, (frame.f_lineno or 0) if known.is_program else 0))
        frame = frame.f_back
    return found
