"""Runs torch.profiler over windows of a run's steps and exports each window on its own.

ProfilerWindow has windows that the settings plan; RequestedCapture has those that `aorta capture` asks for
while the run goes on. export_trace writes a trace, in a child process where an export may crash the run.
"""

import faulthandler
import gzip
import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from aorta.config.structs import ProfilingConfig
from aorta.device.backend import accelerator
from aorta.records.requests import CapturePlan, plan_capture, read_plan, read_request, trace_name

log = logging.getLogger(__name__)

REQUEST_POLL_S = 0.5
"""Interval between two looks for a request, or a plan."""
LEAD_S = 3 * REQUEST_POLL_S
"""Time that the other ranks get to see the plan before its first step."""
LEAD_STEPS = 2
"""Steps between the plan and its first step, at least."""
EXPORT_POLL_S = 0.005
"""Interval between two looks whether the child that exports has ended."""


class ProfilerWindow:
    """Profiles the steps that `settings` chooses; call step() after each step.

    Each cycle of wait, warmup and active steps leaves its traces in
    `<output_dir>/torch_profiler/rank<rank>/`; one that ends before its first active step leaves
    none. A trace that cannot be taken or written is one warning. Disabled, it does nothing and
    costs one attribute test per step.
    """

    active_steps: list[int]
    """Global steps that were recorded, the unfinished cycle of an interrupted run included."""

    disturbed_steps: list[int]
    """Global steps whose windows hold work of the profiler: those that it warmed up in or recorded, the
    step after whose body it was started, and the one after a file was written."""

    trace_files: list[Path]
    """Files that were written, in order."""

    cycle_traces: list[Path]
    """One file of every cycle; the others are copies of it."""

    def __init__(self, settings: ProfilingConfig, output_dir: str | Path, rank: int) -> None:
        self.active_steps = []
        self.disturbed_steps = []
        self.trace_files = []
        self.cycle_traces = []
        self._settings = settings
        self._rank = rank
        self._num_steps = 0
        self._num_cycles = 0
        self._num_exported_steps = 0
        self._raised = False
        self._folder = Path(output_dir) / "torch_profiler" / f"rank{rank}"
        self._writes_chrome = writes_chrome(settings, rank)
        self._action: Callable[[int], ProfilerAction] = _schedule(settings)
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        """Start the profiler, in the settings' schedule."""
        settings = self._settings
        if settings.enabled:
            if not (settings.tensorboard or self._writes_chrome):
                log.warning("profiling.tensorboard and profiling.chrome_trace are both off: no trace is kept")
            self._profiler = profile(
                activities=_activities(),
                schedule=self._action,
                on_trace_ready=self._export,
                record_shapes=settings.record_shapes,
                profile_memory=settings.profile_memory,
                with_stack=settings.with_stack,
                with_flops=settings.with_flops,
                experimental_config=_experimental_config(settings),
            )
        if self._profiler is not None:
            # Every cycle is exported, so that nothing is lost with the events that torch clears after it.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._or_give_up(self._profiler.start)
        return self

    def step(self, global_step: int) -> None:
        """Tell the profiler that a step has ended."""
        if self._profiler is None:
            return
        self._count_step(global_step)
        self._or_give_up(self._profiler.step)

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if self._profiler is None:
            return
        self._raised = exc_type is not None
        self._or_give_up(self._profiler.stop)  # exports an unfinished cycle
        if self._profiler is not None and self._settings.enabled and self._num_cycles == 0:
            self._say_empty(0)
        self._profiler = None

    def _or_give_up(self, act: Callable[[], None]) -> None:
        try:
            act()
        except RuntimeError as error:  # another profiler holds the device, for instance
            log.warning("rank %d: profiling ends here, training goes on: %s", self._rank, error)
            self._profiler = None

    def _count_step(self, step: int) -> None:
        action, following = self._action(self._num_steps), self._action(self._num_steps + 1)
        # Ranks finish their files at different times, so the next step holds waits for each other.
        exported = self._num_steps > 0 and self._action(self._num_steps - 1) == ProfilerAction.RECORD_AND_SAVE
        if action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self.active_steps.append(step)
        if action != ProfilerAction.NONE or following != ProfilerAction.NONE or exported:
            self.disturbed_steps.append(step)
        self._num_steps += 1

    def _export(self, profiler: profile) -> None:
        cycle = self._num_cycles
        self._num_cycles += 1
        num_steps = len(self.active_steps) - self._num_exported_steps
        self._num_exported_steps = len(self.active_steps)
        # An error may have ended an active step: what there is of it is worth having.
        if self._settings.enabled and num_steps == 0 and not self._raised:
            self._say_empty(cycle)
            return
        try:
            self._write_traces(profiler, cycle)
        except (OSError, RuntimeError) as error:
            log.warning("rank %d: the trace of profiling cycle %d is lost: %s", self._rank, cycle, error)

    def _say_empty(self, cycle: int) -> None:
        if self._rank == 0:  # all ranks would say the same
            log.warning("profiling cycle %d leaves no trace: it ended before its first active step", cycle)

    def _write_traces(self, profiler: profile, cycle: int) -> None:
        targets = self._targets(cycle)
        if not targets:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # The profiler gives its trace away once, so the second file is a copy of the first.
        first, *copies = targets
        first.parent.mkdir(parents=True, exist_ok=True)
        export_trace(profiler.export_chrome_trace, first, self._settings)
        self.trace_files.append(first)
        self.cycle_traces.append(first)
        for copy in copies:
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy_trace(first, copy)
            self.trace_files.append(copy)

    def _targets(self, cycle: int) -> list[Path]:
        """Return the files to write the cycle's trace to; [] where it is not worth having."""
        settings = self._settings
        targets = []
        if settings.tensorboard:
            # <worker>.<time>.pt.trace.json: the plugin shows one worker with a run per cycle.
            targets.append(self._folder / f"rank{self._rank}.{time.time_ns()}.pt.trace.json")
        if self._writes_chrome:
            targets.append(self._folder / _numbered(settings.trace_filename, self._rank, cycle))
        return targets


def why_nothing_is_traced(settings: ProfilingConfig, num_steps: int) -> str | None:
    """Say why the num_steps of a (resumed) run are too few to trace one; None: they suffice."""
    if settings.enabled and settings.wait + settings.warmup >= num_steps:
        return (
            f"profiling.enabled traces no step: profiling.wait = {settings.wait} and profiling.warmup = "
            f"{settings.warmup} must add up to less than the {num_steps} steps that this run does"
        )
    return None


def _schedule(settings: ProfilingConfig) -> Any:
    return schedule(
        wait=settings.wait, warmup=settings.warmup, active=settings.active, repeat=settings.repeat
    )


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    if accelerator().is_available():
        activities.append(accelerator().profiler_activity())
    return activities


def _experimental_config(settings: ProfilingConfig) -> "torch._C._profiler._ExperimentalConfig | None":
    if not settings.sync_events:
        return None
    return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)


def _numbered(filename: str, rank: int, cycle: int) -> str:
    """Add rank and cycle: trace.json -> trace_rank0_cycle1.json; .json.gz keeps both suffixes."""
    path = Path(filename)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    stem = path.name.removesuffix(suffix)
    return str(path.with_name(f"{stem}_rank{rank}_cycle{cycle}{suffix}"))


def _copy_trace(source: Path, target: Path) -> None:
    if target.suffix == ".gz":
        with open(source, "rb") as plain, gzip.open(target, "wb") as packed:
            shutil.copyfileobj(plain, packed)
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)  # traces are large
    except OSError:
        shutil.copyfile(source, target)


class RequestedCapture:
    """Traces the steps that `aorta capture` asks for while the run goes on.

    A thread of its own looks for requests; the program's thread calls step_begins and close. Rank 0 answers a
    request with a plan that names its first step, far enough ahead for all ranks to read it in time.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._step = 0
        self._began_s = time.monotonic()
        self._num_begun = 0
        self._plan: CapturePlan | None = None
        self._answered = {plan.id} if (plan := read_plan(folder)) is not None else set()
        self._profiler: Any = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="aorta-capture", daemon=True)
        self._thread.start()

    def step_begins(self, global_step: int) -> None:
        """Called before the first work of a step; starts or ends the trace where it is due."""
        self._step = global_step
        self._num_begun += 1
        plan = self._plan
        if plan is None:
            return
        if self._profiler is not None:
            if global_step >= plan.first_step + plan.num_steps:
                self._end(plan)
        elif global_step >= plan.first_step:
            self._begin(plan)

    @property
    def is_planned(self) -> bool:
        """True while a trace is going on, or is about to begin."""
        return self._plan is not None

    def close(self) -> None:
        """Write what was being traced."""
        self._closing.set()
        if self._profiler is not None and self._plan is not None:
            self._end(self._plan)

    def _begin(self, plan: CapturePlan) -> None:
        if self._step > plan.first_step:
            log.warning("rank %d: the plan for a capture came late, at step %d", self._rank, self._step)
        try:
            self._profiler = profile(activities=_activities())
            self._profiler.start()
        except RuntimeError as error:  # another profiler is on
            log.warning("rank %d: aorta capture: %s", self._rank, error)
            self._profiler = self._plan = None

    def _end(self, plan: CapturePlan) -> None:
        profiler, self._profiler, self._plan = self._profiler, None, None
        path = self._folder / trace_name(plan.id, self._rank)
        try:
            profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")  # `aorta capture` waits for the whole file
            export_trace(profiler.export_chrome_trace, temporary, ProfilingConfig())
            temporary.rename(path)
        except (OSError, RuntimeError) as error:
            log.warning("rank %d: the trace of aorta capture is lost: %s", self._rank, error)

    def _watch(self) -> None:
        """Look for requests and plans until the run ends; the next step_begins sees a new plan."""
        while not self._closing.wait(REQUEST_POLL_S):
            try:
                if self._rank == 0:
                    self._answer()
                plan = read_plan(self._folder)
            except OSError as error:
                log.warning("rank %d: aorta capture: %s", self._rank, error)
                continue
            if plan is not None and plan.id not in self._answered:
                self._answered.add(plan.id)
                self._plan = plan

    def _answer(self) -> None:
        """Write the plan for a new request, as rank 0."""
        request = read_request(self._folder)
        if request is None or request.id in self._answered or self._plan is not None:
            return
        plan = read_plan(self._folder)
        if plan is not None and plan.id == request.id:
            return
        step_s = (time.monotonic() - self._began_s) / max(1, self._num_begun)
        lead = max(LEAD_STEPS, int(LEAD_S / max(step_s, 1e-4)) + 1)
        plan_capture(
            self._folder,
            CapturePlan(id=request.id, first_step=self._step + lead, num_steps=request.num_steps),
        )


def writes_chrome(settings: ProfilingConfig, rank: int = 0) -> bool:
    """True if Chrome traces are written; warns where the default leaves them out."""
    if settings.chrome_trace is not None:
        return settings.chrome_trace
    if is_rocm():
        if settings.enabled and rank == 0:
            log.warning(
                "no Chrome trace: on ROCm its export has crashed runs; profiling.chrome_trace=true writes it"
            )
        return False
    return True


def is_rocm() -> bool:
    return accelerator().kind == "hip" and accelerator().is_available()


def export_trace(write: Callable[[str], object], path: Path, settings: ProfilingConfig) -> None:
    """Call write(path), here or in a child. Raises OSError or RuntimeError where no trace came of it."""
    if settings.export == "child" or (settings.export == "auto" and is_rocm()):
        in_child(lambda: write(str(path)), settings.export_timeout_s, path)
    else:
        write(str(path))
    if not path.exists():  # a write that fails in Kineto is not raised
        raise OSError(f"the profiler could not write {path}")


def in_child(write: Callable[[], object], timeout_s: float, path: Path) -> None:
    """Run write in a forked child and wait for it. Raises OSError, and removes path, where that went wrong.

    The child has only the thread that called. A lock that another thread held at that moment stays locked in
    it for ever, hence the time limit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside threads
        pid = os.fork()
    if pid == 0:
        _child(write)
    fault = _wait(pid, timeout_s)
    if fault is not None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise OSError(f"the process that wrote {path} {fault}")


def _child(write: Callable[[], object]) -> None:
    """Run write in the child, and leave without touching anything that the parent shares."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)  # a signal to this process is none to the run
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.disable()  # its report of a crash here would read like a crash of the run
        write()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is flushed or closed twice


def _wait(pid: int, timeout_s: float) -> str | None:
    """Wait for the child; return what went wrong, None if nothing."""
    end_s = time.monotonic() + timeout_s
    while True:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            break
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"did not end within {timeout_s:g} s (profiling.export_timeout_s)"
        time.sleep(EXPORT_POLL_S)
    if os.WIFSIGNALED(status):
        return f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    return None if code == 0 else f"ended with status {code}"
