"""torch.profiler over windows of a run's steps, each window exported on its own."""

import gzip
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from aorta.config import ProfilingConfig
from aorta.device.backend import accelerator
from aorta.profiling.export import export_trace, writes_chrome

log = logging.getLogger(__name__)

KERNELS_WARMUP, KERNELS_ACTIVE = 1, 2
"""With profiling.kernels_every: a step in which the profiler starts, the step that is traced, and one in
which the work that it left behind runs out."""


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
    """What was written, in order."""

    cycle_traces: list[Path]
    """One file of every cycle, whatever else the cycle was written to."""

    def __init__(
        self, settings: ProfilingConfig, output_dir: str | Path, rank: int, first_step: int = 0
    ) -> None:
        self.active_steps = []
        self.disturbed_steps = []
        self.trace_files = []
        self.cycle_traces = []
        self._settings = settings
        self._rank = rank
        self._first_step = first_step
        self._num_steps = 0
        self._num_cycles = 0
        self._num_exported_steps = 0
        self._raised = False
        self._folder = Path(output_dir) / "torch_profiler" / f"rank{rank}"
        self._writes_chrome = writes_chrome(settings, rank)
        self._action: Callable[[int], ProfilerAction] = _schedule(settings)
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
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
        elif settings.kernels_every:
            why_none = why_no_kernels(settings)
            if why_none is not None:
                if self._rank == 0:
                    log.warning(why_none)
                return self
            self._profiler = profile(
                activities=[ProfilerActivity.CUDA], schedule=self._action, on_trace_ready=self._export
            )
        if self._profiler is not None:
            # Every cycle is exported, so that nothing is lost with the events that torch clears after it.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._or_give_up(self._profiler.start)
        return self

    def step(self, global_step: int | None = None) -> None:
        """global_step: of the step that has ended; by default they count on from the first."""
        if self._profiler is None:
            return
        self._count_step(global_step)
        self._or_give_up(self._profiler.step)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    def _count_step(self, global_step: int | None) -> None:
        step = self._first_step + self._num_steps if global_step is None else global_step
        action, following = self._action(self._num_steps), self._action(self._num_steps + 1)
        # Ranks do not finish their files at the same time, and wait for each other in the next step.
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
        # What raised may have done so in an active step: what there is of it is worth having.
        if self._settings.enabled and num_steps == 0 and not self._raised:
            self._say_empty(cycle)
            return
        try:
            self._write_traces(profiler, cycle)
        except (OSError, RuntimeError) as error:
            log.warning("rank %d: the trace of profiling cycle %d is lost: %s", self._rank, cycle, error)

    def _say_empty(self, cycle: int) -> None:
        if self._rank == 0:  # alike on all ranks
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
        settings = self._settings
        if settings.kernels_every:
            steps = self.active_steps[KERNELS_ACTIVE * cycle : KERNELS_ACTIVE * (cycle + 1)]
            # The run may have ended before the step's work had run out.
            return [self._folder / kernels_name(steps[0])] if len(steps) == KERNELS_ACTIVE else []
        targets = []
        if settings.tensorboard:
            # <worker>.<time>.pt.trace.json: the plugin shows one worker with a run per cycle.
            targets.append(self._folder / f"rank{self._rank}.{time.time_ns()}.pt.trace.json")
        if self._writes_chrome:
            targets.append(self._folder / _numbered(settings.trace_filename, self._rank, cycle))
        return targets


def why_nothing_is_traced(settings: ProfilingConfig, num_steps: int) -> str | None:
    """Why the num_steps that a run does, a resumed one from its first, are too few to trace one."""
    if settings.enabled and settings.wait + settings.warmup >= num_steps:
        return (
            f"profiling.enabled traces no step: profiling.wait = {settings.wait} and profiling.warmup = "
            f"{settings.warmup} must add up to less than the {num_steps} steps that this run does"
        )
    if settings.kernels_every > num_steps:
        return (
            f"profiling.kernels_every = {settings.kernels_every} traces no step: it must be at most the "
            f"{num_steps} steps that this run does"
        )
    return None


def why_no_kernels(settings: ProfilingConfig) -> str | None:
    """Why profiling.kernels_every, where it is set, can trace nothing on this machine."""
    if settings.kernels_every and not accelerator().is_available():
        return "profiling.kernels_every: there is no GPU whose kernels could be traced"
    return None


def kernels_name(step: int) -> str:
    """Of the trace of one step's kernels; TensorBoard's plugin does not look for such names."""
    return f"kernels/step_{step:08d}.json.gz"


def step_of_kernels(path: Path) -> int | None:
    """The step whose kernels the trace holds, if it is named by kernels_name."""
    name = path.name.removeprefix("step_").removesuffix(".json.gz")
    return int(name) if path.parent.name == "kernels" and name.isdecimal() else None


def _schedule(settings: ProfilingConfig) -> Any:
    period = settings.kernels_every
    if period:
        wait = period - KERNELS_WARMUP - KERNELS_ACTIVE
        return schedule(wait=wait, warmup=KERNELS_WARMUP, active=KERNELS_ACTIVE, repeat=0)
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
    try:
        return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    except (AttributeError, TypeError):
        log.warning(
            "profiling.sync_events is ignored: torch %s does not record synchronisation", torch.__version__
        )
        return None


def _numbered(filename: str, rank: int, cycle: int) -> str:
    """trace.json -> trace_rank0_cycle1.json; .json.gz keeps both suffixes."""
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
