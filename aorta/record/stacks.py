"""Samples the stack of the thread that trains, a few times a second, on a thread of its own.

What a function is (the program's, torch's, a phase's) is worked out once for each code object. A sample walks
the frames, finds its node in a tree of all stacks so far, and asks the kernel whether the thread runs. Frames
are let go of at once, so that no local of the program lives longer for it; arguments and locals are not read.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType

import torch

from aorta.files import regular_descriptor
from aorta.processes import no_garbage_collection
from aorta.record.called_names import calls_of
from aorta.record.journal import Journal
from aorta.record.lock_holder import LockWatch, clock_of, cpu_ns
from aorta.records.libraries import OWN, library_of
from aorta.records.seal import encoded, sealed
from aorta.records.stacks import (
    DOING,
    NO_STEP,
    PLACES,
    STACK_PHASES,
    StackChunk,
    StackFrame,
    StackPhase,
    StackSample,
)
from aorta.steps.notes import RecordedStep

PERIOD_S = 0.05
FIRST_PERIOD_S, NUM_FIRST = 0.02, 100
"""A short run needs an answer too: its first samples come faster, as far as FIRST_CPU_S allows."""
CPU_SHARE, FIRST_CPU_S = 0.001, 0.02
"""Part of a core that sampling may take, and what the first samples may take at once, which is made up for
within 40 s; where a sample takes longer, samples come more rarely. The thread that trains waits as long."""
LONG_STEP, AGAIN, MOST_AGAIN = 2.0, 0.5, 4
"""In a step that has gone on for so many mean steps when it is looked at, it is looked at again after this
part of its time so far, and so on: a long call that is rare has samples enough to tell its line."""
AGAIN_SHARE = 0.0005
"""Part of a core that this may take beside CPU_SHARE."""
MIN_STEPS = 4
"""That tell how long a step is."""
MANY = 36_000
"""Samples (half an hour of them) after which they come more rarely the longer the run is: from then on each
doubling of its length adds about 25,000."""
PROBE_S = 0.0005
"""Time over which the thread's CPU clock tells whether it runs."""
RUNNING = 0.3
"""Part of that time on a core, from which on it runs."""
LONGEST_S = 1.0
"""Time that one sample may stand for: a stopped process stood still."""
FLUSH_S = 5.0
DEEPEST = 256
"""Frames of a stack that are looked at, from the innermost on."""
MOST_NODES, MOST_CODES = 40_000, 20_000
"""Bounds of memory: a node with its own frame takes 400 bytes. Beyond, a stack counts as its known part."""
MOST_BYTES = 16 << 20
"""Of a process's lines in the file."""

_PHASE = {name: place for place, name in enumerate(STACK_PHASES)}
_RUNS, _READY, _SLEEPS, _LOCKED_OUT = range(len(DOING))
_BODY, _BEHIND_BODY, _NO_STEP = range(len(PLACES))
_NEEDS_LOCK = frozenset(_PHASE[name] for name in ("rest", "forward", "optimizer"))
"""Phases in which a function of torch neither waits for others nor goes on for long without the lock."""
MOST_WAITING = 200
"""Limit of samples that wait to be told from those of an evaluation: 10 s, which a killed process loses."""
_Key = tuple[int, int, int, int, bool, int]
"""Global step, place, phase, what the thread did, whether a backward pass had ended, node of the tree."""
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
_LASTING = frozenset(_PHASE[name] for name in ("data", "checkpoint", "backward"))
"""Phases that are not left for what they call: a module that a data set runs is data."""


class _Code:
    """What is known of a function."""

    __slots__ = ("calls", "code", "file", "is_hidden", "is_program", "name", "phase")

    def __init__(self, code: CodeType) -> None:
        self.calls: dict[int, _Called] | None = None
        """By the offset of an instruction; None until a sample asks."""
        self.code, path = code, code.co_filename
        self.file, self.name, self.phase = path, code.co_qualname, -1
        package = library_of(path)
        self.is_hidden, self.is_program = package == OWN, not package
        if self.is_hidden:
            if f"{os.sep}record{os.sep}interception{os.sep}" in path:
                self.phase = _PHASE["communication"]
        elif not self.is_program:
            self.file = package
            if path.startswith(_TORCH):
                self.phase = _phase_of(path[len(_TORCH) :].replace(os.sep, "/"), code.co_name)
            elif package == "safetensors" and code.co_name.startswith("save"):
                self.phase = _PHASE["checkpoint"]


def _phase_of(path: str, name: str) -> int:
    for file, names, phase in _MARKERS:
        if path == file and (not names or name in names):
            return _PHASE[phase]
    return -1


class _Called:
    """What a line of the program calls, and has no frame: as a function of a library without a name."""

    __slots__ = ("calls", "code", "file", "is_hidden", "is_program", "name", "phase")

    def __init__(self, name: str) -> None:
        self.code, self.file, self.name, self.phase = name, "", name, -1
        self.is_hidden = self.is_program = False
        self.calls: dict[int, _Called] = {}


class StackTree:
    """All stacks so far: frames, and nodes of frames under their callers."""

    def __init__(self) -> None:
        self.frames: list[StackFrame] = []
        """Of these and of nodes, what came since `taken`."""
        self.nodes: list[tuple[int, int]] = []
        self._called: dict[str, _Called] = {}
        self._codes: dict[int, _Code] = {}
        """By id: a code object hashes its whole content, each time. An entry keeps its code alive."""
        self._frame_ids: dict[tuple[int, int], int] = {}
        self._num_frames = 0
        self._node_ids: dict[int, int] = {}

    def taken(self) -> tuple[list[StackFrame], list[tuple[int, int]]]:
        """What is new since the last call."""
        new = self.frames, self.nodes
        self.frames, self.nodes = [], []
        return new

    def known(self, code: CodeType) -> _Code:
        """What is known of a function; learned where it is new."""
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= MOST_CODES:
                self._codes.clear()
                self._frame_ids.clear()  # their ids may be those of other functions now
            known = self._codes[id(code)] = _Code(code)
        return known

    def called(self, known: _Code, offset: int) -> _Called | None:
        """What a function of the program calls at an instruction, where that has no frame of its own."""
        if not known.is_program:
            return None
        if known.calls is None:
            known.calls = {
                place: self._called.setdefault(name, _Called(name))
                for place, name in calls_of(known.code).items()
                if len(self._called) < MOST_CODES or name in self._called
            }
        return known.calls.get(offset)

    def add(self, frames: Sequence[tuple[_Code | _Called, int]]) -> tuple[int, int]:
        """The node and the phase of a stack. frames: functions and lines, the innermost first."""
        node, phase = -1, 0
        entry: _Code | _Called | None = None
        """Where the program called the library that is being walked through."""
        last: _Code | _Called | None = None
        for known, line in reversed(frames):
            if known.phase >= 0 and phase not in _LASTING:
                phase = known.phase
            if known.is_hidden:
                continue
            if known.name == _COMPILES and not known.is_program and known.phase == _PHASE["rest"]:
                return self._library(node, entry or known, known), _PHASE["rest"]
            if known.is_program:
                node = self._library(node, entry, None)
                entry = None
                node = self._node(node, self._frame(known, line))
            else:
                entry, last = entry or known, known
        return self._library(node, entry, last), phase

    def _library(self, node: int, entry: _Code | _Called | None, last: _Code | _Called | None) -> int:
        """A library's function that the program called; of the innermost also where it has got to."""
        if entry is None:
            return node
        node = self._node(node, self._frame(entry, 0))
        if last is not None and last is not entry:
            node = self._node(node, self._frame(last, 0))
        return node

    def _frame(self, known: _Code | _Called, line: int) -> int:
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


class StackSampler:
    """Samples from `start` to `stop`, which may follow one another several times."""

    def __init__(self, journal: Journal, is_wanted: bool = True) -> None:
        self._journal = journal
        self._is_wanted = is_wanted
        self._tree = StackTree()
        self._path: Path | None = None
        self._attempt = 0
        self._run_id: str | None = None
        self._num_lines = 0
        self._num_bytes = 0
        self._sums: dict[_Key, int] = {}
        self._waiting: list[tuple[int, _Key, int]] = []
        """Samples that may turn out to be of an evaluation: monotonic ns, what they add to, and us."""
        self._thread: threading.Thread | None = None
        self._stopping = threading.Lock()
        """Held while the thread shall run: to wait for a lock takes less than to wait for an event."""
        self._trains = threading.main_thread().ident or 0
        """The thread that was seen to train last."""
        self._lock: LockWatch | None = None
        self._random = random.Random()  # of its own: the program's numbers stay the same
        self._num_samples = 0
        self._elapsed_s = 0.0
        self._cpu_s = self._again_cpu_s = 0.0
        self._looks: list[tuple[int, _Key, float]] = []
        """The last sample and those taken again in its step, which share its time: monotonic ns, what each is
        added to, and its part of the time."""
        self._look_s = 0.0
        self._looked_at_ns = 0
        """Start of the step that these are in; 0 of none."""
        self._first_step = 0, 0
        """Of steps whose mean length is known: the first one's number and start."""
        self._pid = os.getpid()

    def write_to(self, path: Path, run_id: str | None = None, attempt: int = 0) -> None:
        """Append lines to this file. Without one nothing is sampled."""
        self._path, self._run_id, self._attempt = path, run_id, attempt

    def start(self) -> None:
        """Begin, or go on, to sample."""
        if not self._is_wanted or self._path is None or self._thread is not None:
            return
        self._pid = os.getpid()
        self._stopping = threading.Lock()
        self._stopping.acquire()
        self._thread = threading.Thread(target=self._run, name="aorta-stacks", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End, and write what there is. Does nothing in a forked child, which has no such thread."""
        thread, self._thread = self._thread, None
        if thread is None or os.getpid() != self._pid:
            return
        self._stopping.release()
        thread.join(timeout_s)

    def _run(self) -> None:
        stopping, path = self._stopping, self._path
        assert path is not None
        began_s, cpu_before_s = time.monotonic(), self._cpu_s
        last_s = flushed_s = began_s
        elapsed_before_s = self._elapsed_s
        try:
            while True:
                wait_s = self._period_s() * self._random.uniform(0.5, 1.5)
                wait_s = self._look_again(wait_s, stopping)
                if self._lock is not None:
                    self._lock.sleep_begins()
                if stopping.acquire(timeout=wait_s):
                    break
                holder = None if self._lock is None else self._lock.holder(int(1e9 * wait_s))
                now_s = time.monotonic()
                self._sample(min(now_s - last_s, LONGEST_S), stopping, holder)
                last_s = now_s
                self._num_samples += 1
                self._elapsed_s = elapsed_before_s + now_s - began_s
                self._cpu_s = cpu_before_s + time.thread_time()
                if now_s - flushed_s >= FLUSH_S:
                    flushed_s = now_s
                    self._flush(path)
            self._share_out()
            self._add(all_of_them=True)
            self._flush(path)
        except Exception:
            self._sums.clear()  # training goes on without stacks; the file says how far they reach
        finally:
            self._close_lock()

    def _period_s(self) -> float:
        if not self._num_samples:
            return FIRST_PERIOD_S
        period_s = FIRST_PERIOD_S if self._num_samples < NUM_FIRST else PERIOD_S
        period_s = max(period_s, self._elapsed_s / MANY)
        allowed_s = max(CPU_SHARE * self._elapsed_s, FIRST_CPU_S + CPU_SHARE / 2 * self._elapsed_s)
        cpu_s = self._cpu_s - self._again_cpu_s
        if cpu_s > allowed_s:  # half as often as their mean cost allows, until the time has made it up
            period_s = max(period_s, 2 * cpu_s / self._num_samples / CPU_SHARE)
        return period_s

    def _look_again(self, wait_s: float, stopping: threading.Lock) -> float:
        """Take more samples of a long step, in the time until the next one is due; what is left of it."""
        while len(self._looks) <= MOST_AGAIN and self._again_cpu_s <= AGAIN_SHARE * self._elapsed_s:
            again_s = self._again_s()
            if not 0 < again_s < wait_s:
                break
            began_s, cpu_s = time.monotonic(), time.thread_time()
            if stopping.acquire(timeout=again_s):
                stopping.release()  # for the wait that follows, which ends at once
                break
            if self._is_long():  # still the same one
                self._sample(time.monotonic() - began_s, stopping, None, is_again=True)
            wait_s = max(wait_s - (time.monotonic() - began_s), 0.0)
            self._again_cpu_s += time.thread_time() - cpu_s
        return wait_s

    def _again_s(self) -> float:
        """After which time the step is looked at again; 0 of one that is not long."""
        return AGAIN * (time.monotonic_ns() - self._looked_at_ns) / 1e9 if self._is_long() else 0.0

    def _is_long(self) -> bool:
        """Whether the step of the last sample goes on, for longer than others."""
        step = self._journal.current
        if step is None or not self._looked_at_ns or step.host_start_ns != self._looked_at_ns:
            return False
        number, start_ns = self._first_step
        num = step.global_step - number
        if not start_ns or num < 0:
            self._first_step = step.global_step, step.host_start_ns
        mean_ns = (step.host_start_ns - start_ns) / max(num, 1)
        return num >= MIN_STEPS and time.monotonic_ns() - step.host_start_ns > LONG_STEP * mean_ns

    def _sample(
        self, weight_s: float, stopping: threading.Lock, holder: int | None, is_again: bool = False
    ) -> None:
        """is_again: the last sample's step, of whose time it takes a part as long as weight_s."""
        step = self._journal.current
        if is_again and (step is None or step.host_start_ns != self._looked_at_ns):
            return
        thread = self._trains = step.thread if step is not None else self._trains
        frames = _frames_of(thread, self._tree)
        if not frames:
            return
        place, number, is_behind = _where(step)
        if self._lock is None or self._lock.thread != thread:
            self._close_lock()
            self._lock = LockWatch(thread)
        clock = clock_of(thread)
        before_ns, began_ns = cpu_ns(clock), time.monotonic_ns()
        node, phase = self._tree.add(frames)
        if self._journal.pause not in (None, "checkpoint"):
            phase = _PHASE["evaluation"]
        doing = _RUNS
        if before_ns is not None:
            time.sleep(PROBE_S)
            after_ns, length_ns = cpu_ns(clock), time.monotonic_ns() - began_ns
            if after_ns is not None and after_ns - before_ns < RUNNING * length_ns:
                doing = _READY if self._lock.is_ready() else _SLEEPS
        if node < 0 or not stopping.locked():
            return
        if holder is not None and frames[0][0].file == "torch" and phase in _NEEDS_LOCK:
            held_by, _ = self._tree.add(_frames_of(holder, self._tree))
            locked_s = self._lock.taken_ns(int(1e9 * weight_s)) / 1e9
            locked_out = number, place, phase, _LOCKED_OUT, is_behind, held_by
            self._waiting.append((began_ns, locked_out, int(1e6 * locked_s)))
            weight_s -= locked_s
        key = (number, place, phase, doing, is_behind, node)
        if not is_again:
            self._share_out()
            self._look_s, self._looked_at_ns = weight_s, 0 if step is None else step.host_start_ns
            weight_s = min(weight_s, (began_ns - self._looked_at_ns) / 1e9)
        self._looks.append((began_ns, key, max(weight_s, 1e-6)))

    def _share_out(self) -> None:
        """Add the last sample, with those that were taken again in its step: together the time since the one
        before it, each as long as it was in the step."""
        whole_s = sum(part_s for _, _, part_s in self._looks)
        for at_ns, key, part_s in self._looks:
            self._waiting.append((at_ns, key, int(1e6 * self._look_s * part_s / whole_s)))
        self._looks.clear()
        self._add()

    def _add(self, all_of_them: bool = False) -> None:
        """Add up the samples of which it is known whether they were of an evaluation."""
        since_ns = self._journal.may_evaluate_ns  # read before the evaluations, which are written before
        evaluations = tuple(self._journal.evaluations)
        all_of_them = all_of_them or len(self._waiting) > MOST_WAITING
        samples, self._waiting = self._waiting, []
        for at_ns, key, us in samples:
            if 0 < since_ns <= at_ns and not all_of_them:
                self._waiting.append((at_ns, key, us))
                continue
            if any(start_ns <= at_ns <= end_ns for start_ns, end_ns in evaluations):
                key = (*key[:2], _PHASE["evaluation"], *key[3:])
            self._sums[key] = self._sums.get(key, 0) + us

    def _close_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _flush(self, path: Path) -> None:
        """Append a line with what came since the last one."""
        sums, self._sums = self._sums, {}
        frames, nodes = self._tree.taken()
        if not sums or self._num_bytes > MOST_BYTES:
            return
        chunk = StackChunk(
            begins=not self._num_lines,
            attempt=self._attempt,
            run_id=self._run_id,
            frames=frames,
            nodes=nodes,
            samples=[StackSample(*key, us) for key, us in sums.items()],
            cpu_s=round(self._cpu_s, 6),
            elapsed_s=round(self._elapsed_s, 6),
        )
        line = sealed(encoded(chunk), self._num_lines)
        descriptor = regular_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        with open(descriptor, "ab", buffering=0) as file:
            file.write(line)
        self._num_lines += 1
        self._num_bytes += len(line)


def _where(step: RecordedStep | None) -> tuple[int, int, bool]:
    """Place, global step, and whether a backward pass of it has ended."""
    if step is None:
        return _NO_STEP, NO_STEP, False
    is_behind = any(note.kind == "backward" for note in tuple(step.host_notes))
    return _BODY if step.body_end is None else _BEHIND_BODY, step.global_step, is_behind


COLLECTS_IN_WALKS = sys.version_info < (3, 12)
"""Python may collect garbage where a frame is made, and not between instructions alone."""


def _frames_of(thread: int, tree: StackTree) -> list[tuple[_Code | _Called, int]]:
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


def _walked(thread: int, tree: StackTree) -> tuple[list[tuple[_Code, int]], int]:
    """And the offset of the innermost one's instruction."""
    stacks = sys._current_frames()
    found: list[tuple[_Code, int]] = []
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


def _walk(frame: FrameType | None, tree: StackTree) -> list[tuple[_Code, int]]:
    """Lines of the program's functions alone: to find one out takes longer than to walk a frame."""
    found: list[tuple[_Code, int]] = []
    while frame is not None and len(found) < DEEPEST:
        known = tree.known(frame.f_code)
        found.append((known, (frame.f_lineno or 0) if known.is_program else 0))
        frame = frame.f_back
    return found
