"""`aorta.instrument`: makes a recorder, and the companions that its options ask for.

A companion runs beside the recorder as long as it records: a watchdog of hangs, torch.profiler, sinks.
`aorta run`, the integrations and train.py all come through here.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from aorta.config.structs import HangConfig, ProfilingConfig
from aorta.device.backend import accelerator
from aorta.errors import InstrumentError
from aorta.hang.watchdog import Watchdog
from aorta.record import Recorder, RecorderSettings
from aorta.record.companions import Accompanied, Cause, Companion
from aorta.record.kernel_source import Kernels
from aorta.record.profiler import ProfilerWindow
from aorta.record.settings import Placement
from aorta.sinks import Place, Sinks

log = logging.getLogger(__name__)

S = TypeVar("S", HangConfig, ProfilingConfig)


def instrument(
    output_dir: str | Path = "artifacts",
    *,
    placement: Placement = "native",
    overhead: float | str | None = "1%",
    telemetry_interval_s: float = 1.0,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    kernels: Kernels = "auto",
    flops_per_token: float | None = None,
    precision: str | None = None,
    stacks: bool = True,
    hang: HangConfig | Mapping[str, Any] | None = None,
    profiling: ProfilingConfig | Mapping[str, Any] | None = None,
    tensorboard: bool = False,
) -> Recorder:
    """Make a recorder; within its `with`, every collective of the process is recorded.

    Nothing here or in the steps waits for the device, except once before the first step, to tie the device's
    clock to the host's.

    output_dir: receives run.json (rank 0) and rank_<n>_metrics.jsonl. A finished run is moved aside.
    placement: "native" moves nothing; "dedicated" runs synchronous all-reduce, reduce-scatter, all-gather and
        all-to-all on streams of their own, fully ordered with the caller's.
    overhead: what recording may cost of the step time, such as "1%" or 0.01. The first 24 steps are recorded
        whatever that costs; then some are left out, on all ranks the same, if need be: these have the host's
        times alone. "off" records every step. run.json says what it has cost.
    telemetry_interval_s: time between two samples of clocks, power, temperature and memory.
    config, model, layout: written into run.json as they are. layout's dp and world tell which ranks share
        their tokens.
    device: found at the first step where it is not given.
    kernels: "auto" reads the driver's own kernel records where they can be had (CUDA), which is exact and
        cheaper than events; run.json says why not otherwise. "on" raises InstrumentError instead; "off"
        times by events.
    flops_per_token: model FLOPs of forward and backward without what is computed again, for model FLOP/s.
    precision: "bf16", "fp16", "fp8", "tf32" or "fp32"; with flops_per_token, for the share of the device's
        peak (MFU).
    stacks: sample the stack of the thread that trains, so that causes name lines of the program: 50
        times a second at first, then 20 times, and more rarely where that takes more than 20 ms and 0.2 % of
        a core. Arguments and locals are not read.
    hang: a watchdog on every rank, which writes to output_dir/hang where the rank stands once no step begins
        any more. HangConfig or its fields, such as {"timeout_s": 60}. Give the same on all ranks.
    profiling: windows of torch.profiler over the steps, in output_dir/torch_profiler, whose kernels are read
        back into the records when recording ends. ProfilingConfig or
        its fields, such as {"enabled": True}. Give the same on all ranks.
    tensorboard: scalars of every step in output_dir/tensorboard, by rank 0. Give the same on all ranks.

    Raises InstrumentError where the process is instrumented already or an option is impossible, RecordError
    where the folder cannot be written or another run is still writing there.
    """
    settings = RecorderSettings(
        placement=placement,
        overhead=overhead,
        telemetry_interval_s=telemetry_interval_s,
        config=config,
        model=model,
        layout=layout,
        device=device,
        kernels=kernels,
        flops_per_token=flops_per_token,
        precision=precision,
        stacks=stacks,
    )
    recorder = Recorder(output_dir, settings)
    if tensorboard:
        recorder.companions.add(Sending(_tensorboard_in, log.warning))
    if profiling is not None:
        recorder.companions.add(Windows(_settings("profiling", profiling, ProfilingConfig)))
    if hang is not None:  # the last one is the first to end
        recorder.companions.add(HangWatch(_settings("hang", hang, HangConfig)))
    return recorder


def _settings(name: str, value: Any, kind: type[S]) -> S:
    """Return the settings, or make them from a mapping. Raises InstrumentError that names the field."""
    if isinstance(value, kind):
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InstrumentError(f"{name}: {error} (it takes the fields of {kind.__name__})") from None


class HangWatch(Companion):
    """Reports where the rank stands when no step begins any more (aorta.hang.watchdog)."""

    may_change_steps = False

    def __init__(self, settings: HangConfig) -> None:
        self._settings = settings
        self._watchdog: Watchdog | None = None

    def opened(self, recorder: Accompanied) -> None:
        self._watchdog = Watchdog(
            self._settings,
            recorder.output_dir,
            recorder.rank,
            recorder.world_size,
            recorder=recorder,
            store=_store(recorder),
            device=accelerator().device_in_use(),
        )
        self._watchdog.__enter__()

    def pausing(self, activity: str) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.pausing(activity)

    def step_begins(self, global_step: int) -> None:
        if self._watchdog is not None:
            self._watchdog.beat(global_step)

    def closing(self, cause: Cause) -> None:
        if self._watchdog is not None:
            # Recording may end in a handler of the error, or at the interpreter's exit after it.
            error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            self._watchdog.__exit__(cause, None if cause is None else error, None)


class Windows(Companion):
    """Runs torch.profiler over windows of steps, and puts its kernels' times into the records afterwards."""

    def __init__(self, settings: ProfilingConfig) -> None:
        self._settings = settings
        self._recorder: Accompanied | None = None
        self._window: ProfilerWindow | None = None

    def opened(self, recorder: Accompanied) -> None:
        self._recorder = recorder

    def step_begins(self, global_step: int) -> None:
        """Start the profiler with the first step: until then the script sets things up."""
        if self._window is None and self._recorder is not None:
            recorder = self._recorder
            self._window = ProfilerWindow(self._settings, recorder.output_dir, recorder.rank)
            self._window.__enter__()

    def step_ended(self, global_step: int) -> None:
        if self._window is not None:
            self._window.step(global_step)

    def closing(self, cause: Cause) -> None:
        if self._window is not None:
            self._window.__exit__(cause, None, None)

    def closed(self, cause: Cause) -> None:
        recorder, window = self._recorder, self._window
        if not isinstance(recorder, Recorder) or window is None or cause is not None:
            return  # without records there is nothing to compare
        from aorta.merge.windows import check_run  # readers of traces, which no step needs

        check_run(
            recorder.output_dir,
            recorder.rank,
            window.cycle_traces,
            window.disturbed_steps,
            self._settings,
        )


class Sending(Companion):
    """Sends the numbers of steps on (aorta.sinks), as long as the recorder records, however that ends.

    A missing package or a full disk is one line and ends the sink, not the training.
    """

    may_change_steps = False

    def __init__(self, targets: Callable[[Path], list[str]], say: Callable[[str], None]) -> None:
        """targets: KIND=TARGET, by the folder of the records, which is known once the recorder is open."""
        self._targets = targets
        self._say = say
        self._sinks: Sinks | None = None

    def opened(self, recorder: Accompanied) -> None:
        # Now, in a process of its rank: an older run's files were moved aside by then.
        place = Place(recorder.output_dir, recorder.rank, recorder.world_size)
        self._sinks = Sinks(self._targets(recorder.output_dir), place, self._say)
        if self._sinks.takes_records:
            recorder.on_record(self._sinks.add)

    def closed(self, cause: Cause) -> None:
        if self._sinks is not None:
            self._sinks.close()


def _tensorboard_in(folder: Path) -> list[str]:
    return [f"tensorboard={folder / 'tensorboard'}"]


def _store(recorder: Accompanied) -> Store | None:
    """Return the job's store, over which ranks tell of hangs; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # torchrun keeps its store over restarts: a hang of the attempt before must not be met again.
    return PrefixStore(recorder.store_prefix, dist.distributed_c10d._get_default_store())
