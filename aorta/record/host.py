"""The host in a step: what the program does there, in which phase a collective is issued, use of the cores.

HostWatch notes batches, backward passes, optimizers, checkpoints, waits for the device and garbage
collections while the step runs. Phases reads these notes later, off the training's path. ThreadUse reads the
scheduler's counters at the ends of a step.
"""

import dis
import gc
import os
import resource
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_native_id
from time import monotonic_ns
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from aorta.device.backend import accelerator
from aorta.record.interception import optimizer_hooks
from aorta.record.interception.replaced import left_uncompiled, uncompiled
from aorta.record.journal import Journal
from aorta.record.loader_workers import replacements
from aorta.record.lock_holder import SCHEDSTAT
from aorta.record.phase_memory import BACKWARD, FORWARD, OPTIMIZER, PhaseMemory
from aorta.record.thread_state import clock_of_number, cpu_ns
from aorta.records.libraries import OWN, library_of, program_frame
from aorta.records.schema import HostKind, Phase
from aorta.steps.notes import CollectiveCall, HostNote, RecordedStep, Use

MOST_NOTES = 256
"""Limit of notes per step; what comes after is not noted."""
NOTED_WAIT_NS = 20_000
"""Length from which on a call that may wait for the device is noted."""
EVALUATION = "evaluation"
"""A pause that nobody announced."""
WITHIN: tuple[HostKind, ...] = ("synchronisation", "garbage_collection")
"""Notes that may come within an evaluation."""
next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
"""Number of the next node of autograd's graph in this thread: a call of a model that trains makes some."""
FULL_COLLECTION = 2
"""The generation of garbage that is noted; younger ones take microseconds."""
TENSOR_WAITS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")
"""Methods of a tensor that wait for the device."""
MOST_SWITCHES = 200 if sys.version_info >= (3, 13) else sys.maxsize
"""Times that they are taken off for steps that are not recorded. From Python 3.13 on, a class that was
changed a thousand times has its attributes looked up anew at each use, for good: the program is slower."""
CHECKPOINTS = (
    ("torch", "save"),
    ("torch.serialization", "save"),
    ("torch.distributed.checkpoint", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.serialization", "_save"),
    ("torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"),
)
"""Functions that save, by the modules that programs take them from; last what these call, for a program that
took them before HostWatch was installed."""
STORAGES = (torch.UntypedStorage, torch.TypedStorage)
"""Saved alone by pickle, of an object that is sent to other ranks, say: no checkpoint."""
PHASES: dict[str, Phase] = {"data": "data", "backward": "backward", "optimizer": "optimizer"}
"""The phase that a host note of this kind makes; what lies between them is told by the last backward pass."""
OF_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
"""Whose use getrusage() tells; None where it tells no thread's."""
_PASSED_OVER = ("torch", OWN)
_MISSING: Any = object()
Function = Callable[..., Any]
Replacement = tuple[Any, str, Any, Any]
"""Owner, attribute, the original in the owner's dict, ours."""
MOST_FILES = 4096
"""Files whose names are remembered: waits ask for their callers again and again."""
_file_names: dict[str, str] = {}
"""Name of a file by its path; '' for torch's and our own."""


class HostWatch:
    """Notes what the program does on the host, by replacing functions while it is installed."""

    def __init__(
        self, journal: Journal, memory: PhaseMemory | None = None, samples_workers: bool = False
    ) -> None:
        self._journal = journal
        self._memory = memory
        self._samples_workers = samples_workers
        self._replaced: list[Replacement] = []
        self._replaced_waits: list[Replacement] = []
        """Methods of tensors, apart, because they are on only in steps that are recorded."""
        self._host_waits: list[Replacement] = []
        """Stay on: compiled code may hold them, and is compiled anew where they change."""
        self._num_switches = 0
        self._take_off: Function | None = None
        self._collecting_since_ns = 0
        self._updating: dict[int, int] = {}
        """Start of the step() that runs, by the optimizer's id."""
        self._descriptions: dict[int, tuple[str, int, weakref.ref[Optimizer]]] = {}
        """Description and bytes of each optimizer, by its id, which another one may get when it is gone."""
        self._missing: list[tuple[str, str]] = []
        """CHECKPOINTS that are not imported yet."""
        self._depth = 0
        """Above 0 within a noted call: torch.save within a checkpoint's save is one note."""
        self._without_gradient: HostNote | None = None
        """The batch, or the evaluation, that was asked for last with autograd off."""
        self._asked: tuple[int, int] | None = None
        """Whom it was asked of, and the next node of autograd's graph then."""

    def install(self) -> None:
        """Begin to note what happens a few times a step: a batch, a backward pass, a checkpoint."""
        if self._take_off is not None:
            return
        from torch.utils.data import dataloader

        self._around(dataloader._BaseDataLoaderIter, "__next__", "data")
        self._around(dataloader.DataLoader, "__iter__", "data")  # starts the workers of an epoch
        # Within the last __next__, or where the iterator is let go of.
        self._around(dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers", "data")
        if self._samples_workers:
            self._replaced += [_replace(*one) for one in replacements()]
        original = torch.autograd.graph._engine_run_backward
        for module in (torch.autograd, torch.autograd.graph):
            if getattr(module, "_engine_run_backward", None) is original:
                self._around(module, "_engine_run_backward", "backward")
        self._missing = list(CHECKPOINTS)
        self.look_for_checkpoints()
        self._take_off = optimizer_hooks.add(self._update_begins, self._update_ended)
        gc.callbacks.append(uncompiled(self._collection))  # Python calls it amid compiled code too

    def look_for_checkpoints(self) -> None:
        """Replace the CHECKPOINTS that the program has imported by now. Called between two steps."""
        if not self._missing or self._missing[0][0] not in sys.modules:
            return
        for name, function in self._missing:
            module = sys.modules.get(name)
            if module is not None and hasattr(module, function):
                self._around(module, function, "checkpoint")
        self._missing = [place for place in self._missing if place[0] not in sys.modules]

    def uninstall(self) -> None:
        """Put everything back."""
        self.leave_waits(for_good=True)
        _put_back(self._host_waits)
        _put_back(self._replaced)
        if self._take_off is not None:
            self._take_off()
            self._take_off = None
        self._missing = []
        with suppress(ValueError):
            gc.callbacks.remove(self._collection)

    # -- what is replaced ----------------------------------------------------------------------

    def _around(self, owner: Any, name: str, kind: HostKind) -> None:
        """Note each call of this function as `kind`."""
        original = getattr(owner, name)
        memory = self._memory if kind == "backward" else None
        is_batch = name == "__next__"

        def call(*args: Any, **named: Any) -> Any:
            step = self._journal.current
            if self._depth or step is None or (args and isinstance(args[0], STORAGES)):
                return original(*args, **named)
            self._depth += 1
            # Where steps begin and end is seen in some of these calls: a batch belongs to the step that it
            # begins, everything else to the step in which it began, whose object may be the next one's then.
            notes = None if kind == "data" else step.host_notes
            if memory is not None:
                memory.ends(FORWARD, step)
            start_ns = monotonic_ns()
            try:
                return original(*args, **named)
            finally:
                self._depth -= 1
                if is_batch and not torch.is_grad_enabled():
                    self._note_without_gradient(id(args[0]), start_ns)
                else:
                    place = _program_place(name) if kind == "checkpoint" else ""
                    self._note(kind, start_ns, place, notes=notes)
                if memory is not None:
                    memory.ends(BACKWARD, step)

        # What it calls is compiled as without it: a backward pass runs the program's own functions.
        (uncompiled if kind == "checkpoint" else left_uncompiled)(call, with_called=False)
        self._replaced.append(_replace(owner, name, _like(call, original)))

    def watch_waits(self) -> None:
        """Note calls that wait for the device, too: any number of times a step."""
        if self._replaced_waits:
            return
        if not self._host_waits:
            self._host_waits += [
                _replace(owner, name, self._wait(f"{owner.__name__}.{name}", getattr(owner, name)))
                for owner, name in accelerator().host_waits()
            ]
        ours = [
            (torch.Tensor, name, self._tensor_wait(name, getattr(torch.Tensor, name)))
            for name in TENSOR_WAITS
        ]
        # Looked up before the first is replaced: a change counts where the class was used since the last one.
        self._replaced_waits += [_replace(*one) for one in ours]

    def leave_waits(self, for_good: bool = False) -> None:
        """Put the functions back that wait for the device; after MOST_SWITCHES only for good."""
        if self._replaced_waits and (for_good or self._num_switches < MOST_SWITCHES):
            self._num_switches += 1
            _put_back(self._replaced_waits)

    def _tensor_wait(self, name: str, original: Function) -> Function:
        journal, wait = self._journal, self._waited
        function_name, is_on_device = name.strip("_"), accelerator().holds

        def call(self: torch.Tensor, *args: Any, **named: Any) -> Any:
            step = journal.current  # CPU tensors are read often, and wait never
            if step is None or step.left_out is not None or not is_on_device(self):
                return original(self, *args, **named)
            start_ns = monotonic_ns()
            try:
                return original(self, *args, **named)
            finally:
                wait(function_name, start_ns)

        return uncompiled(_like(call, original))

    def _wait(self, name: str, original: Function) -> Function:
        is_compiling = torch.compiler.is_compiling

        def call(*args: Any, **named: Any) -> Any:
            if is_compiling():  # a graph may hold a wait
                return original(*args, **named)
            step = self._journal.current
            if step is None or step.left_out is not None:
                return original(*args, **named)
            start_ns = monotonic_ns()
            try:
                return original(*args, **named)
            finally:
                self._waited(name, start_ns)

        return left_uncompiled(_like(call, original))

    def _waited(self, name: str, start_ns: int) -> None:
        end_ns = monotonic_ns()
        if end_ns - start_ns < NOTED_WAIT_NS:
            return
        step = self._journal.current
        if step is None or len(step.host_notes) >= MOST_NOTES or step.thread != threading.get_ident():
            return
        step.host_notes.append(HostNote("synchronisation", start_ns, end_ns, f"{name} in {caller()}"))

    # -- hooks ---------------------------------------------------------------------------------

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updating[id(optimizer)] = monotonic_ns()

    def _update_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        start_ns = self._updating.pop(id(optimizer), 0)
        if start_ns:
            description, num_bytes = self._describe_optimizer(optimizer)
            self._note("optimizer", self._after_closure(start_ns), description, num_bytes)
            if self._memory is not None:
                self._memory.ends(OPTIMIZER, self._journal.current)

    def _after_closure(self, start_ns: int) -> int:
        """When the update itself began: step(closure) runs forward and backward within, as Lightning's do."""
        step = self._journal.current
        for note in () if step is None else step.host_notes:
            if note.kind == "backward" and note.end_ns > start_ns:
                start_ns = note.end_ns
        return start_ns

    def _describe_optimizer(self, optimizer: Optimizer) -> tuple[str, int]:
        """Return 'AdamW (foreach=False)' and the bytes of its parameters on this rank."""
        entry = self._descriptions.get(id(optimizer))
        if entry is None or entry[2]() is not optimizer:
            num_bytes = sum(
                _local(parameter).nbytes
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            )
            flags = [
                f"{name}={value}"
                for name in ("foreach", "fused", "capturable")
                if (value := optimizer.defaults.get(name)) is not None
            ]
            description = type(optimizer).__name__ + (f" ({', '.join(flags)})" if flags else "")
            entry = self._descriptions[id(optimizer)] = description, num_bytes, weakref.ref(optimizer)
        return entry[:2]

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < FULL_COLLECTION:
            return
        if phase == "start":
            self._collecting_since_ns = monotonic_ns()
        elif self._collecting_since_ns:
            self._note("garbage_collection", self._collecting_since_ns, _collecting(sys._getframe().f_back))
            self._collecting_since_ns = 0

    def note_pause(self, activity: str, start_ns: int) -> None:
        """Note a pause that the program announced, at its end."""
        kind: HostKind = "checkpoint" if activity == "checkpoint" else "pause"
        self._note(kind, start_ns, activity)

    @left_uncompiled
    def _note(
        self,
        kind: HostKind,
        start_ns: int,
        place: str,
        num_bytes: int | None = None,
        notes: list[HostNote] | None = None,
    ) -> None:
        """Append a note. notes: those of the step to note it in; None: of the open one."""
        step = self._journal.current
        if step is None:
            return
        if notes is None:
            notes = step.host_notes
            if kind == "data" and step.start is not None:
                # What the recorder did within the call, until the step had begun, is no loading.
                start_ns = max(start_ns, step.start.host_ns)
        if len(notes) >= MOST_NOTES:
            return
        if kind != "garbage_collection" and step.thread != threading.get_ident():
            return  # another thread's doing: the step's own thread goes on beside it
        if kind not in WITHIN:
            self._journal.may_evaluate_ns = 0
        notes.append(HostNote(kind, start_ns, monotonic_ns(), place, num_bytes))

    @left_uncompiled
    def _note_without_gradient(self, loader: int, start_ns: int) -> None:
        """Note a batch that was asked for with autograd off: a second one of a loader ends an evaluation.

        It does where something lies between them, but no training: no other note, and no node of autograd's
        graph. loader: the id of the iterator that was asked.
        """
        journal, step = self._journal, self._journal.current
        if step is None or step.thread != threading.get_ident() or len(step.host_notes) >= MOST_NOTES:
            return
        notes, asked = step.host_notes, (loader, next_node())
        last = next((i for i in reversed(range(len(notes))) if notes[i].kind not in WITHIN), None)
        before = None if last is None or asked != self._asked else notes[last]
        now_ns = monotonic_ns()
        if before is None or before is not self._without_gradient:
            goes_on = evaluates = False
        else:
            goes_on = before.kind == "pause"
            evaluates = goes_on or start_ns - before.end_ns >= NOTED_WAIT_NS
        if before is not None and evaluates:
            notes[last:] = [HostNote("pause", before.start_ns, now_ns, EVALUATION)]
            if goes_on:
                journal.evaluations[-1] = (before.start_ns, now_ns)
            else:
                journal.evaluations.append((before.start_ns, now_ns))
        else:
            begin_ns = start_ns if step.start is None else max(start_ns, step.start.host_ns)
            notes.append(HostNote("data", begin_ns, now_ns, ""))
        self._without_gradient, self._asked = notes[-1], asked
        journal.may_evaluate_ns = now_ns  # after the evaluations: who reads them reads this first


def _collecting(frame: FrameType | None) -> str:
    """'gc.collect in train.py:56' where the program asks for a collection at the line that it is at; '' where
    one came by itself."""
    if frame is None or "collect" not in frame.f_code.co_names:
        return ""
    calls = (one for one in dis.get_instructions(frame.f_code) if one.argval == "collect")
    if not any(one.positions is not None and one.positions.lineno == frame.f_lineno for one in calls):
        return ""
    return f"gc.collect in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@left_uncompiled
def _program_place(name: str) -> str:
    """'save in train.py:56', the innermost line that is the program's own; '' where none is."""
    frame = program_frame()
    return "" if frame is None else f"{name} in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def caller() -> str:
    """Return the innermost place that is neither torch's nor aorta's: 'train.py:88'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = _file_names.get(path)
        if name is None:
            is_passed_over = path.startswith("<") or library_of(path) in _PASSED_OVER
            name = "" if is_passed_over else os.path.basename(path)
            if len(_file_names) < MOST_FILES:
                _file_names[path] = name
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


def _replace(owner: Any, name: str, replacement: Function) -> Replacement:
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, replacement)
    return owner, name, original, replacement


def _put_back(replaced: list[Replacement]) -> None:
    for owner, name, original, replacement in reversed(replaced):
        if vars(owner).get(name) is not replacement:
            continue  # somebody has wrapped it since, and calls it
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    replaced.clear()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    shard: torch.Tensor = getattr(parameter, "_local_tensor", parameter)
    return shard


def _like(call: Function, original: Function) -> Function:
    """Give a replacement the name and the documentation of what it stands in for."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        with suppress(AttributeError):
            setattr(call, name, getattr(original, name))
    return call


class Phases:
    """Tells in which phase of a step a collective was issued. Not used on the training's path."""

    _spans: Sequence[tuple[int, int, Phase]] = ()
    _starts: Sequence[int] = ()
    _last_backward_ns: int | None = None

    def __init__(self, step: RecordedStep) -> None:
        if not step.host_notes:
            return
        spans = sorted(
            (note.start_ns, note.end_ns, PHASES[note.kind]) for note in step.host_notes if note.kind in PHASES
        )
        self._spans = spans
        self._starts = [start for start, _, _ in spans]
        self._last_backward_ns = max((end for _, end, phase in spans if phase == "backward"), default=None)

    def of_call(self, call: CollectiveCall) -> Phase | None:
        """Return the call's phase; None where no backward pass was seen, which tells the phases apart."""
        at_ns = issued_ns(call)
        if self._last_backward_ns is None or not at_ns:
            return None
        place = bisect_right(self._starts, at_ns) - 1
        if place >= 0 and at_ns <= self._spans[place][1]:
            return self._spans[place][2]
        return "forward" if at_ns < self._last_backward_ns else "optimizer"


def issued_ns(call: CollectiveCall) -> int:
    """Return the monotonic host time at which the call was launched, or nearly; 0 where unknown."""
    return call.launched_ns or call.issued_ns or (call.start.host_ns if call.start is not None else 0)


class ThreadUse:
    """Reads counters of the calling thread, and of its process; 3 to 5 us a reading."""

    def __init__(self) -> None:
        self._thread: int | None = None
        self._file: int | None = None

    def read(self, with_process: bool = True, with_faults: bool = True) -> Use:
        """Return the thread, its ns of CPU time and of being ready without a core, its process's of CPU time,
        and its own minor faults and ns in the system, since it began.

        What the system does not count is None, and what is not asked for.
        """
        thread = get_native_id()  # another one in a forked process, unlike get_ident()
        if thread != self._thread:
            self.close()
            self._thread = thread
            try:
                self._file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # no Linux, or a kernel without CONFIG_SCHED_INFO
                self._file = None
        ready_ns = None
        if self._file is not None:
            try:
                ready_ns = int(os.pread(self._file, 64, 0).split()[1])
            except (OSError, ValueError, IndexError):  # a thread that is gone had this one's number
                self.close()
        process_ns = time.process_time_ns() if with_process else None
        faults = system_ns = None
        if with_faults and OF_THREAD is not None:
            used = resource.getrusage(OF_THREAD)
            faults, system_ns = used.ru_minflt, round(1e9 * used.ru_stime)
        return thread, time.thread_time_ns(), ready_ns, process_ns, faults, system_ns

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = self._thread = None


def own_threads_ns() -> int:
    """Return the CPU time so far of the recorder's own threads, which are named for it. 2 us each."""
    own = [thread for thread in threading.enumerate() if thread.name.startswith("aorta-")]
    return sum(cpu_ns(clock_of_number(thread.native_id)) or 0 for thread in own)
