"""The recorder: what a training script holds, and what ties the parts of the instrument together.

observers, replaced methods -> Journal                      on the threads of the program
    -> SendingThread: Extractor -> RawStep                  on a thread of our own
    -> RecordSink: StepRecord -> lines, callbacks           on a GPU in a process of its own
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

from aorta.device.backend import CPU, Backend, accelerator
from aorta.device.environment import environment_warnings
from aorta.device.event_clock import EventClock
from aorta.device.marks import HostClock, Mark, MarkClock, clock_anchor
from aorta.device.telemetry import TelemetrySampler
from aorta.errors import InstrumentError
from aorta.launcher import rank_and_world_size
from aorta.record.calls import Observer, RecordedStep
from aorta.record.collective_names import ModuleNames
from aorta.record.collective_source import NOT_LOADED, CollectiveSource
from aorta.record.companions import Cause, Companions
from aorta.record.cpu_observer import CpuObserver
from aorta.record.description import NOT_SEEN_BY_DESIGN, collectives_seen, describe_run, end_marks, finish_run
from aorta.record.event_observer import EventObserver
from aorta.record.extract import Extractor, Telemetry
from aorta.record.handles import Cut, RangeHandle, StepHandle, cut, profiler_is_on, split
from aorta.record.host import HostWatch, ThreadUse
from aorta.record.interception.replaced import uncompiled
from aorta.record.interception.stalls import CaptureWatch, StreamWaitPatch
from aorta.record.interception.switch import BackendCounts, Interception
from aorta.record.journal import Journal
from aorta.record.kernel_source import KernelSource
from aorta.record.run_folder import Claim, Standing, claim_folder, ending_of
from aorta.record.sending import ProcessSink, RecordSink, SendingThread, ThreadSink, UnwrittenSteps
from aorta.record.settings import RecorderSettings, is_int, value_text
from aorta.records.files import state_name, unwritten_name
from aorta.records.schema import Ending, RunRecord, StepRecord
from aorta.records.state import Tally
from aorta.records.writer import RunFolder
from aorta.steps.calibration import Calibration
from aorta.steps.raw import ResolverSettings

logger = logging.getLogger(__name__)

_NO_MARK = "no mark could be put on the step's stream"
LEFT_OUT = "not timed in this step (recording.timed_every)"
MANY_WAITING = 100
"""Steps waiting for their records to be written from which on each new one wakes the sending thread."""
MOST_WAITING = 1000
"""Limit of steps waiting for their records to be written; beyond it steps are left out."""


class Recorder:
    """Records every step of this process between `with` and its end. Made by `instrument`."""

    def __init__(self, output_dir: str | Path, settings: RecorderSettings) -> None:
        self.output_dir = Path(output_dir)
        self._settings = settings
        self._calibration = settings.calibration
        self._journal = Journal()
        self._kernels = KernelSource(settings.kernels, settings.timed_every)
        self._collectives = CollectiveSource(settings.collectives, settings.timed_every)
        self._clock: MarkClock | None = None
        self._accelerator = accelerator()
        self._current_raw_stream = self._accelerator.current_raw_stream
        self._memory_of = self._accelerator.memory_of
        self._device: torch.device | None = None
        self._folder: RunFolder | None = None
        self._claim: Claim | None = None
        self._standing: Standing | None = None
        self._unwritten: UnwrittenSteps | None = None
        self._pid = os.getpid()
        self._interception: Interception | None = None
        self._is_on = False
        self._had_device = False
        """True: the program had used its devices before this recorder did, by asking for their properties."""
        self._was_entered = False
        self._stopped_by: str | None = None
        self._observers: dict[str, Observer] = {}
        self._wrap: Callable[[Observer], Observer] | None = None
        self._event_observer: EventObserver | None = None
        self._stream_patch: StreamWaitPatch | None = None
        self._captures = CaptureWatch()
        self._captures.listener = self._collectives.capturing
        self._host_watch = HostWatch(self._journal)
        self._thread_use = ThreadUse()
        self._module_names = ModuleNames(self._journal)
        self._sink: RecordSink | None = None
        self._sending: SendingThread | None = None
        self._telemetry: TelemetrySampler | None = None
        self._callbacks: list[Callable[[StepRecord], None]] = []
        self.companions = Companions()
        """Watchdog, profiler and the like that run beside it; to be added before `with`."""
        self._cause: Cause = None
        self._exit_error: tuple[BaseException | None] | None = None
        """The exception that left `with`, or None, in a tuple once `with` is left."""
        self._num_left_out = 0
        self._anchors: list[dict[str, int]] = []
        self._next_global_step = 0
        self._last_global_step: int | None = None
        self._rollbacks = 0
        self._gap: str | None = None
        self._run: RunRecord | None = None
        self._counts = BackendCounts(self._journal)
        self.coverage_notes: dict[str, Any] = {}
        """Notes that are added to the coverage in run.json."""
        self.rank = 0
        self.world_size = 1

    # -- for the training script --------------------------------------------------------------

    @uncompiled
    def step(
        self,
        *,
        tokens: int | None = None,
        epoch: int = 0,
        step: int | None = None,
        global_step: int | None = None,
    ) -> StepHandle:
        """A context for the body of one training step.

        The step's window reaches to the start of the next step, so data loading between the two is seen as
        between_steps_ms. Steps are counted where step and global_step are not given. tokens: those of this
        rank in this step. No line is written for a step whose body raises, or while the recorder is paused.
        """
        if self._folder is None:
            raise InstrumentError("recorder.step outside of 'with aorta.instrument(...)'")
        if tokens is not None and (not is_int(tokens) or tokens < 0):
            # A tensor would have to be waited for.
            raise InstrumentError(f"tokens must be an int that the host knows, got {value_text(tokens)}")
        for name, value in (("epoch", epoch), ("step", step), ("global_step", global_step)):
            if value is not None and not is_int(value):
                raise InstrumentError(f"{name} must be an int, got {value_text(value)}")
        number = self._next_global_step if global_step is None else global_step
        self._next_global_step = number + 1
        return StepHandle(self, RecordedStep(number, number if step is None else step, epoch, tokens))

    @uncompiled
    def range(self, name: str = "aux") -> RangeHandle:
        """A context around work on the current stream that belongs to a named stream (aux: prefetch)."""
        if name != "aux":
            raise InstrumentError(f"recorder.range knows 'aux', got {name!r}")
        return RangeHandle(self, name)

    @contextmanager
    def pausing(self, activity: str) -> Iterator[None]:
        """A context around what is no step and may take long: "validation", "checkpoint".

        Nothing is recorded differently; the watchdog waits for it, on this rank and on those that wait for
        this one, up to hang.pause_timeout_s (hang.checkpoint_timeout_s for "checkpoint").
        """
        enclosing, self._journal.pause = self._journal.pause, activity
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._host_watch.note_pause(activity, start_ns)
            self._journal.pause_ended_s = time.monotonic()
            self._journal.pause = enclosing

    @property
    def store_prefix(self) -> str:
        """Prefix of keys in the job's store, one per attempt: the store outlives a restart of the ranks."""
        assert self._claim is not None, "inside 'with'"
        return f"aorta/{self._claim.run_id}/{self._claim.attempt}"

    @property
    def clock(self) -> MarkClock | None:
        """The clock that sets the marks; None before the first step."""
        return self._clock

    @property
    def journal(self) -> Journal:
        """The journal, for a watchdog that reads which collectives were seen and which steps are open."""
        return self._journal

    def has_passed(self, number: int) -> bool:
        """True once the device has passed a mark of the kernel records. Only reads the host's memory."""
        return self._kernels.has_passed(number)

    def wrap_observers(self, wrap: Callable[[Observer], Observer]) -> None:
        """Have `wrap` applied to the observers of collectives (markers of a profiler). Before `with`."""
        self._wrap = wrap

    def on_record(self, callback: Callable[[StepRecord], None]) -> None:
        """Call back with every record, some steps later and on another thread. It must not block."""
        self._callbacks.append(callback)

    def calibrate(self, calibration: Calibration | None) -> None:
        """Use a calibration for the `calibrated` numbers of the steps resolved from now on."""
        self._calibration = calibration
        if self._sink is not None:
            self._sink.calibrate(calibration)
        if self._run is not None:
            self._run.calibration = None if calibration is None else msgspec.to_builtins(calibration)

    def pause(self) -> None:
        """Take the instrument off between two steps: until `resume` nothing is seen and nothing costs.

        All ranks should pause and resume at the same steps, so that their sequence numbers stay comparable.
        Raises InstrumentError inside a step.
        """
        step = self._journal.current
        if step is not None and step.body_end is None:
            raise InstrumentError("recorder.pause inside recorder.step")
        self._gap = "the recorder was paused"
        self._uninstall()
        self._journal.finish_current()

    def resume(self) -> None:
        """Put the instrument back on. Does nothing where it is on."""
        if self._folder is None:
            raise InstrumentError("recorder.resume outside of 'with aorta.instrument(...)'")
        if not self._is_on:
            if Interception._installed is not None:
                raise InstrumentError("this process is instrumented by another recorder: close it first")
            self._install()

    # -- life ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if Interception._installed is not None and Interception.give_way is not None:
            Interception.give_way()
        if Interception._installed is not None:
            raise InstrumentError("this process is instrumented already: close the first recorder")
        if self._was_entered:
            raise InstrumentError("a recorder is for one run: make another with aorta.instrument(...)")
        self._settings.check_writable()  # on every rank, before anything is made
        self.rank, self.world_size = rank_and_world_size()
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.output_dir = self.output_dir.absolute()  # the script may change its working directory
        self._pid = os.getpid()
        claim = self._claim = claim_folder(self.output_dir, self.rank, self.world_size)
        self._folder = RunFolder(self.output_dir, self.rank, claim.goes_on)
        self._standing = Standing(self.output_dir, claim, self.rank, self.world_size)
        for warning in environment_warnings():
            if self.rank == 0:
                logger.warning("%s", warning)
        self._anchors.append(clock_anchor())
        self._kernels.watch(self._make_room_for_profiler)
        try:
            self._install()
            self._had_device = self._accelerator.is_initialized()
            self._run = describe_run(self._settings, claim, self.world_size, self._anchors, self._calibration)
            if self.rank == 0:
                self._folder.write_run(self._run)
            self.companions.opened(self)
        except BaseException as error:
            self._uninstall()
            self._kernels.close()
            self._standing.end(ending_of(error))
            self._folder.close()
            self._folder = None
            raise
        self._was_entered = True
        atexit.register(self._left_open)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cause = kind
        self._exit_error = (error,)
        # After an error the device may never finish what is queued, so the wait is short. It goes through
        # `close`, so that a program that has wrapped `close` sees every end.
        self.close(timeout_s=60.0 if kind is None else 5.0)

    def close(self, timeout_s: float = 60.0) -> None:
        """Remove the instrument, write what the device finishes within timeout_s, finish run.json.

        Does nothing in a forked child: the records belong to the process that was forked.
        """
        # Once `with` was left, only its own error counts: it may all stand in the handler of another one.
        (error,) = self._exit_error or (sys.exc_info()[1],)
        self._close(ending_of(error), timeout_s)

    def stopped(self, reason: str) -> None:
        """Note that the run was asked to end early. reason: by what, such as a signal's name."""
        self._stopped_by = reason

    def flush(self, timeout_s: float) -> None:
        """Have the last finished step written, within timeout_s: the process is about to be ended.

        May be called on any thread.
        """
        self._journal.finish_current()
        end_s = time.monotonic() + timeout_s
        while self._journal.closed and time.monotonic() < end_s:
            if self._sending is not None:
                self._sending.wake()
            time.sleep(0.01)

    def end(self, ending: Ending) -> None:
        """Note how this process ends, for a caller that ends it without leaving the recorder."""
        if self._standing is not None:
            self._standing.end(ending)

    def _left_open(self) -> None:
        """Close the recorder at the exit of the interpreter, if nobody did."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._close(ending_of(error), timeout_s=5.0)

    def _close(self, ending: Ending, timeout_s: float) -> None:
        """Take the instrument off, have the last lines written, and then run.json, which counts them."""
        if self._folder is None or os.getpid() != self._pid:
            return
        atexit.unregister(self._left_open)
        if ending.kind == "finished" and self._stopped_by is not None:
            ending = Ending(kind="stopped", why=self._stopped_by, unix_ns=ending.unix_ns)
        self.companions.closing(self._cause)
        step = self._journal.current
        if step is not None and step.body_end is None:
            self._journal.current = None  # the script left in the middle of it
        self.pause()
        self._journal.close()
        if self._sending is not None:
            self._sending.close(timeout_s)
            if self._sending.num_unresolved:
                logger.warning(
                    "rank %d: %d steps were still running on the device and are not recorded",
                    self.rank,
                    self._sending.num_unresolved,
                )
        self._kernels.close()
        if self._unwritten is not None:
            self._unwritten.close()
        if self._telemetry is not None:
            self._telemetry.stop()
            if self._settings.rocm_metrics and self._telemetry.rocm_smi_output() is None and self.rank == 0:
                logger.warning("no readings of rocm-smi: %s", self._telemetry.rocm_smi_reason)
        self._anchors.append(clock_anchor())
        if self._standing is not None:
            self._standing.end(ending)
        if self._run is not None:
            self._run.finished_unix_ns = time.time_ns()
            self._run.coverage = self._coverage()
            if self.rank == 0:
                finish_run(self.output_dir, self._run, ending)
                self._folder.write_run(self._run)
        self._folder.close()
        self._folder = None
        self._thread_use.close()
        self.companions.closed(self._cause)

    def _install(self) -> None:
        """Put on what sees the program. Observers are made once, and kept over pauses."""
        self._is_on = True
        self._counts.begin()
        if not self._observers:
            self._observers[CPU.dispatch_key] = CpuObserver(self._journal, HostClock())
            if self._accelerator.is_available():
                dedicated = self._settings.placement == "dedicated"
                self._event_observer = EventObserver(self._journal, dedicated, self._captures)
                self._observers[self._accelerator.dispatch_key] = self._event_observer
            if self._wrap is not None:
                self._observers = {key: self._wrap(observer) for key, observer in self._observers.items()}
        if dist.is_available():
            self._interception = Interception(self._observers)
            self._interception.install()
        if self._stream_patch is not None:
            self._stream_patch.install()
        self._captures.install()
        self._host_watch.install(waits_for_device=self._accelerator.is_available())
        self._module_names.install()
        self._kernels.wake()
        self._collectives.wake()

    def _uninstall(self) -> None:
        if self._is_on:
            self._counts.end()
        self._is_on = False
        self._kernels.pause()
        self._collectives.sleep()
        if self._interception is not None:
            self._interception.uninstall()
            self._interception = None
        if self._stream_patch is not None:
            self._stream_patch.uninstall()
        self._captures.uninstall()
        self._host_watch.uninstall()
        self._module_names.uninstall()

    # -- steps (called by the handles) -----------------------------------------------------------

    def _open(self, step: RecordedStep) -> None:
        """Begin a step, and with that end the window of the one before."""
        journal = self._journal
        if step.start is not None:
            raise InstrumentError("this step was entered before: make each with recorder.step(...)")
        if not self._is_on:
            return
        if journal.stopped:  # nobody takes steps off the journal any more
            journal.current = None
            journal.closed.clear()
            return
        clock = self._clock
        if clock is None:
            clock = self._open_device()
        previous = journal.current
        if previous is not None and previous.body_end is None:
            raise InstrumentError("recorder.step inside recorder.step")
        if len(journal.closed) >= MOST_WAITING:
            if self._num_left_out == 0:
                logger.warning("steps are shorter than the writing of their records: some are left out")
            self._num_left_out += 1
            self._gap = "steps were left out: their records could not be written in time"
            journal.finish_current()
            return
        self._module_names.begin_step()
        self._host_watch.look_for_checkpoints()
        step.host_start_ns = time.monotonic_ns()
        step.use_at_start = self._thread_use.read()
        if self._device is not None:
            step.compute_raw_stream = self._current_raw_stream(self._device.index)
            step.untimed = journal.away
            step.by_library = self._collectives.begin_step(step.global_step)
            step.by_kernels = self._kernels.begin_step(step.global_step) and step.untimed is None
            # A step that a profiler traces is always timed: the other steps are calibrated with it.
            if step.global_step % self._settings.timed_every != 0 and not profiler_is_on():
                step.untimed = LEFT_OUT
        # The window of the step before ends at this mark, so it has to be of the kind that times that step.
        needs_event = not step.by_kernels or (previous is not None and not previous.by_kernels)
        step.start = clock.mark() if needs_event else Mark(time.monotonic_ns())
        self._number(step.start, step)
        self._note_order(step)
        journal.current, journal.failed = step, None
        if previous is not None:
            if previous.window_end is None:
                previous.window_end = step.start
                previous.use_at_end = step.use_at_start
                if previous.by_kernels and not step.start.number:
                    previous.kernels_lost = previous.kernels_lost or _NO_MARK
            journal.closed.append(previous)
            self._keep(previous)

    def _note_order(self, step: RecordedStep) -> None:
        """Note in the step whether it follows the one before, and how often the run was rolled back."""
        last, self._last_global_step = self._last_global_step, step.global_step
        if last is not None and step.global_step <= last:
            self._rollbacks += 1
            self._gap = f"rolled back from step {last}"
        step.rollbacks, step.gap, self._gap = self._rollbacks, self._gap, None
        if self._standing is not None:
            self._standing.begin(step.global_step)

    def _number(self, mark: Mark, step: RecordedStep) -> None:
        """Put the mark among the kernel records, too, where they are on."""
        if not self._kernels.is_on:
            return
        if not (self._captures.num_open and self._captures.is_capturing()):
            mark.number = self._kernels.mark(step.compute_raw_stream)
        if step.by_kernels and not mark.number:
            step.kernels_lost = step.kernels_lost or _NO_MARK

    def _mark_for(self, step: RecordedStep, clock: MarkClock) -> Mark:
        """Set a mark on the step's stream, of the kind that times the step."""
        if not step.by_kernels:
            return clock.mark()
        mark = Mark(time.monotonic_ns())
        if step.kernels_lost is None:
            self._number(mark, step)
        return mark

    def _make_room_for_profiler(self) -> None:
        """End the open step's window here, or give its kernel records up: a profiler takes them."""
        step = self._journal.current
        if step is None or not step.by_kernels:
            return
        if step.body_end is None:
            step.kernels_lost = "torch.profiler took the driver's records in this step"
        elif step.window_end is None:
            assert self._clock is not None
            step.window_end = self._mark_for(step, self._clock)

    def _end_body(self, step: RecordedStep) -> None:
        """End a step's body; its window stays open until the next step begins."""
        clock = self._clock
        if clock is None or step.body_end is not None or self._journal.current is not step:
            return
        step.body_end = self._mark_for(step, clock)
        step.host_end_ns = time.monotonic_ns()
        self._module_names.end_body(step)
        if self._device is not None:
            step.memory = self._memory_of(self._device.index)
        self._journal.release_finished()

    def _drop(self, step: RecordedStep) -> None:
        """Drop a step whose body raised: its times are not those of a step."""
        self._module_names.leave_step()
        if self._journal.current is step and step.body_end is None:
            self._journal.current, self._journal.failed = None, step
            self._journal.num_outside.update(call.op for call in step.calls)
            self._gap = f"step {step.global_step} raised an error"

    def _forget(self, step: RecordedStep) -> None:
        """Drop what was no step; the next one may have its number."""
        self._module_names.leave_step()
        if self._journal.current is step and step.body_end is None:
            self._journal.current = None
            self._journal.num_outside.update(call.op for call in step.calls)
            self._gap = step.gap
            self._last_global_step = step.global_step - 1 if step.global_step else None

    def cut(self) -> Cut | None:
        """Return the place where the open step stands now, for `split`; None without an open step."""
        step, clock = self._journal.current, self._clock
        if step is None or clock is None or step.body_end is not None:
            return None
        return cut(step, self._mark_for(step, clock), self._thread_use.read())

    def split(self, place: Cut, global_step: int) -> StepHandle:
        """End the open step at a place that has passed, and return the step that is open from there on."""
        previous = self._journal.current
        assert previous is not None
        following = self.step(global_step=global_step)
        split(self._journal, place, following.step)
        self._note_order(following.step)
        self._keep(previous)
        return following

    def _keep(self, closed_step: RecordedStep) -> None:
        """Keep the step that was just closed, lest this process is killed; wake the sender if need be."""
        if self._unwritten is None or self._sending is None:
            return
        num_waiting = len(self._journal.closed)
        self._unwritten.keep(closed_step, num_before=max(num_waiting - 1, 0))
        if self._device is None or num_waiting >= MANY_WAITING:
            self._sending.wake()

    def _close_window(self, step: RecordedStep, at_body_end: bool) -> None:
        """End the window of a step without beginning another one."""
        clock, journal = self._clock, self._journal
        if clock is not None and journal.current is step and step.body_end is not None:
            if step.window_end is None and at_body_end:
                journal.end_at_body(step)
            elif step.window_end is None:
                step.window_end = self._mark_for(step, clock)
                step.use_at_end = self._thread_use.read()
            journal.current = None
            journal.closed.append(step)

    def _open_device(self) -> MarkClock:
        """Find the device and begin to write. At the first step: by then the script has chosen the device."""
        devices = self._accelerator
        device = self._settings.torch_device
        if device is None:
            uses_device = devices.is_available() and devices.is_initialized()
            uses_device = uses_device and (self._had_device or not _trains_on_cpu(devices))
            device = devices.current_device() if uses_device else torch.device(CPU.torch_type)
        anchor = clock_anchor()
        self._anchors.append(anchor)
        clock: MarkClock
        lower_ns = upper_ns = 0
        first_mark: Mark | None = None
        if device.type == devices.torch_type:
            if device.index is None:
                device = devices.current_device()
            self._device = device
            clock = events = EventClock(device, devices)
            first_mark, lower_ns, upper_ns = events.first_mark()
            self._kernels.open(device)
            assert self._event_observer is not None
            self._event_observer.attach(events)
            self._stream_patch = StreamWaitPatch(self._journal, clock, device.index, self._captures)
            self._stream_patch.install()
        else:
            clock = HostClock()
        settings = ResolverSettings(
            rank=self.rank,
            world_size=self.world_size,
            on_device=clock.is_device,
            detail_every=self._settings.detail_every,
            clock_lower_ns=lower_ns,
            clock_upper_ns=upper_ns,
            unix_minus_monotonic_ns=anchor["unix_ns"] - anchor["monotonic_ns"],
            run_id=None if self._claim is None else self._claim.run_id,
            attempt=0 if self._claim is None else self._claim.attempt,
            max_bytes=self._settings.max_bytes,
        )
        self._sink = self._open_sink(settings)
        self._sink.calibrate(self._calibration)
        self._start_telemetry()
        self._clock = clock
        self._sending = SendingThread(
            self._journal,
            Extractor(clock, self._kernels, first_mark),
            self._kernels,
            self._collectives,
            self._sink,
            self._latest_telemetry,
            lambda: bool(self._callbacks),
            self._device,
            None if self._standing is None else self._standing.beat,
        )
        return clock

    def _open_sink(self, settings: ResolverSettings) -> RecordSink:
        assert self._folder is not None
        writer = self._folder.steps
        state = self.output_dir / state_name(self.rank)
        self._unwritten = UnwrittenSteps(self.output_dir / unwritten_name(self.rank), settings)
        if not settings.on_device:
            return ThreadSink(settings, writer, self._tell, Tally(state, settings.attempt))
        writer.close()  # the file exists and is ours; the other process writes it from here on
        sink = ProcessSink(settings, writer.path, self._tell, state)
        if self._standing is not None:
            self._standing.written_by(sink.pid)
        return sink

    def _start_telemetry(self) -> None:
        index = None if self._device is None else self._device.index
        self._telemetry = TelemetrySampler(
            index, self._settings.telemetry_interval_s, rocm_text=self._settings.rocm_metrics
        )
        self._telemetry.start()

    def _latest_telemetry(self) -> Telemetry:
        telemetry = self._telemetry
        if telemetry is None:
            return Telemetry()
        sample = telemetry.latest()
        reasons = {} if sample is not None else {"device": telemetry.reason or "no sample yet"}
        text = telemetry.rocm_smi_output()
        if self._settings.rocm_metrics and text is None:
            reasons["rocm_smi_output"] = telemetry.rocm_smi_reason or "no sample yet"
        return Telemetry(device=sample, rocm_smi_output=text, not_measured=reasons)

    def _tell(self, record: StepRecord) -> None:
        for callback in self._callbacks:
            try:
                callback(record)
            except Exception:
                logger.exception("aorta: a record callback failed")

    def _kernel_records(self) -> dict[str, Any]:
        """Say in run.json whether kernel records were read, why not, and how collectives fit to kernels."""
        coverage = self._sink.kernel_coverage if isinstance(self._sink, ProcessSink) else None
        return {
            "reason": "there is no device" if self._device is None else self._kernels.reason,
            "note": self._kernels.note,
            "gaps_for_profilers": self._kernels.num_yields,
            "matched": None if coverage is None else msgspec.to_builtins(coverage),
        }

    def _library_events(self) -> dict[str, Any]:
        """Say in run.json whether the library's events were recorded, why not, and how they fit to calls."""
        coverage = self._sink.library_coverage if isinstance(self._sink, ProcessSink) else None
        has_nccl = any(group.backend == "nccl" for group in self._journal.groups())
        matched = None if coverage is None else msgspec.to_builtins(coverage)
        described = self._collectives.described(has_nccl)
        if described["reason"] == NOT_LOADED and self.rank == 0:
            logger.warning("no events of the collective library: %s", NOT_LOADED)
        return described | {"matched": matched}

    def _coverage(self) -> dict[str, Any]:
        sending = self._sending
        return {
            "rank": self.rank,
            **collectives_seen(self._journal, self._counts.result()),
            **self.coverage_notes,
            "end_marks": end_marks(self._journal),
            "kernel_records": self._kernel_records(),
            "library_events": self._library_events(),
            "unresolved_steps": 0 if sending is None else sending.num_unresolved,
            "left_out_steps": self._num_left_out,
            "lost_lines": 0 if sending is None else sending.num_lost,
            "not_seen_by_design": NOT_SEEN_BY_DESIGN,
        }


def _trains_on_cpu(devices: Backend) -> bool:
    """True for a rank whose process group knows no GPU and whose process holds no memory of one."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() != CPU.collectives:
        return False
    return all(devices.reserved_bytes(index) == 0 for index in range(devices.count()))
