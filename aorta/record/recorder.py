"""The recorder: what a training script holds. It ties the actors of the instrument together.

    Recorder     life: enter, pause, resume, close; run.json
      Sources    what sees the program: put on and taken off
      OpenSteps  begins and ends steps, on the threads of the program
      Journal    what is noted meanwhile
      Output     the folder, the thread and process that write lines

observers, replaced methods -> Journal                      on the threads of the program
    -> SendingThread: Extractor reads marks                 on a thread of our own
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

import torch.distributed as dist

from aorta.device.environment import environment_warnings
from aorta.device.marks import MarkClock, clock_anchor
from aorta.errors import InstrumentError
from aorta.launcher import rank_and_world_size
from aorta.record import loader_workers
from aorta.record.companions import Cause, Companions
from aorta.record.description import (
    NOT_SEEN_BY_DESIGN,
    FlopsOfStep,
    add_batch,
    add_flops,
    collectives_seen,
    describe_run,
    end_marks,
    finish_run,
)
from aorta.record.handles import StepHandle
from aorta.record.host import own_threads_ns
from aorta.record.interception.replaced import uncompiled
from aorta.record.interception.switch import Interception
from aorta.record.interception.works import Observer
from aorta.record.journal import Journal
from aorta.record.open_steps import Cut, OpenSteps
from aorta.record.output import Output
from aorta.record.run_folder import Standing, claim_folder, ending_of
from aorta.record.sampling import Sampling, Store, state_path
from aorta.record.settings import RecorderSettings, is_int, value_text
from aorta.record.sources import Sources
from aorta.records.files import sites_name, stacks_name, workers_name
from aorta.records.schema import Ending, PositionSource, RunRecord, StepRecord
from aorta.records.state import Save
from aorta.steps.notes import RecordedStep

logger = logging.getLogger(__name__)


class Recorder:
    """Records every step of this process between `with` and its end. Made by `instrument`."""

    def __init__(self, output_dir: str | Path, settings: RecorderSettings) -> None:
        self.output_dir = Path(output_dir)
        self._settings = settings
        self.journal = Journal()
        """What was noted, for a watchdog that reads which collectives were seen and which steps are open."""
        self._sources = Sources(self.journal, settings)
        self._sampling = Sampling(settings.limit)
        self._sampling.own_threads_ns = own_threads_ns
        self.steps = OpenSteps(self.journal, self._sampling, self._sources)
        self.steps.open_clock = self._open_clock
        self._sources.phase_memory.near = self._near_memory_limit
        self._output: Output | None = None
        """None outside of `with`."""
        self._standing: Standing | None = None
        self._store_prefix: str | None = None
        self._pid = os.getpid()
        self._had_device = False
        """True: the program had used its devices before this recorder did, by asking for their properties."""
        self._was_entered = False
        self._was_asked = False
        """The first step has looked for the device."""
        self._stopped_by: str | None = None
        self._callbacks: list[Callable[[StepRecord], None]] = []
        self.companions = Companions()
        """Watchdog, profiler and the like that run beside it; to be added before `with`."""
        self._cause: Cause = None
        self._exit_error: tuple[BaseException | None] | None = None
        """The exception that left `with`, or None, in a tuple once `with` is left."""
        self._anchors: list[dict[str, int]] = []
        self._run: RunRecord | None = None
        self.coverage_notes: dict[str, Any] = {}
        """Notes that are added to the coverage in run.json."""
        self.program: dict[str, Any] | None = None
        """What the program made, for run.json; None: nobody watched it."""
        self.flops: FlopsOfStep | None = None
        """Counts the model FLOPs of a step when the run has ended; None: nobody watched the model."""
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
        if self._output is None:
            raise InstrumentError("recorder.step outside of 'with aorta.instrument(...)'")
        if tokens is not None and (not is_int(tokens) or tokens < 0):
            # A tensor would have to be waited for.
            raise InstrumentError(f"tokens must be an int that the host knows, got {value_text(tokens)}")
        for name, value in (("epoch", epoch), ("step", step), ("global_step", global_step)):
            if value is not None and not is_int(value):
                raise InstrumentError(f"{name} must be an int, got {value_text(value)}")
        if global_step is not None and self._output is not None:
            self._output.standing.program_numbers()
        return StepHandle(self, self.steps.new(global_step, step, epoch, tokens))

    @contextmanager
    def pausing(self, activity: str) -> Iterator[None]:
        """A context around what is no step and may take long: "validation", "checkpoint".

        Nothing is recorded differently; the watchdog waits for it, on this rank and on those that wait for
        this one, up to hang.pause_timeout_s (hang.checkpoint_timeout_s for "checkpoint").
        """
        enclosing, self.journal.pause = self.journal.pause, activity
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._sources.host_watch.note_pause(activity, start_ns)
            self.journal.pause_ended_s = time.monotonic()
            self.journal.pause = enclosing

    def cut(self) -> Cut | None:
        """Return the place where the open step stands now, for `split`; None without an open step."""
        return self.steps.cut()

    @property
    def first_number(self) -> int:
        """The number of the first step where nobody gives another: that after the attempts before."""
        return 0 if self._output is None else self._output.claim.next_step

    @property
    def earlier_saves(self) -> list[Save] | None:
        """What earlier attempts of the run have saved; None: this is the first one."""
        assert self._output is not None
        claim = self._output.claim
        return claim.saves if claim.attempt else None

    def saved(self, save: Save) -> None:
        """Note what the program has saved, for an attempt that goes on from there."""
        assert self._output is not None
        self._output.standing.saved(save)

    def continue_at(self, number: int | None, told_by: PositionSource | None) -> int:
        """Number the steps from here on, before the first one has ended; return the first number.

        number: steps that training had done before; None, and what cannot be after the attempts before this
        one: not known, and the steps are counted on from the last one that was recorded.
        """
        assert self._output is not None
        claim = self._output.claim
        if number is None or (claim.attempt and number > claim.next_step):
            number, told_by = claim.next_step, None
        self.steps.continue_at(number)
        self._output.standing.continue_at(number, told_by)
        return number

    def split(self, place: Cut, global_step: int) -> StepHandle:
        """End the open step at a place that has passed, and return the step that is open from there on."""
        following = self.step(global_step=global_step)
        self.steps.split(place, following.step)
        return following

    @property
    def store_prefix(self) -> str:
        """Prefix of keys in the job's store, one per attempt: the store outlives a restart of the ranks."""
        assert self._store_prefix is not None, "inside 'with'"
        return self._store_prefix

    def has_passed(self, number: int) -> bool:
        """True once the device has passed a mark of the kernel records. Only reads the host's memory."""
        return self._sources.kernels.has_passed(number)

    def unseen(self) -> dict[str, tuple[int, int]]:
        """Return by group's key which collectives were issued in steps that are not recorded, up to now.

        (the backend's count before them, their number); {} where the open step is recorded. For a watchdog.
        """
        return self._sources.counts.unseen()

    def wrap_observers(self, wrap: Callable[[Observer], Observer]) -> None:
        """Have `wrap` applied to the observers of collectives (markers of a profiler). Before `with`."""
        self._sources.wrap_observers(wrap)

    def on_record(self, callback: Callable[[StepRecord], None]) -> None:
        """Call back with every record, some steps later and on another thread. It must not block."""
        self._callbacks.append(callback)

    def pause(self) -> None:
        """Take the instrument off between two steps: until `resume` nothing is seen and nothing costs.

        All ranks should pause and resume at the same steps, so that their sequence numbers stay comparable.
        Raises InstrumentError inside a step.
        """
        step = self.journal.current
        if step is not None and step.body_end is None:
            raise InstrumentError("recorder.pause inside recorder.step")
        self.steps.gap = "the recorder was paused"
        self._sampling.interrupted()
        self._sources.uninstall()
        self.steps.finish()

    def resume(self) -> None:
        """Put the instrument back on. Does nothing where it is on."""
        if self._output is None:
            raise InstrumentError("recorder.resume outside of 'with aorta.instrument(...)'")
        if not self._sources.is_on:
            self._sources.install()

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
        claim = claim_folder(self.output_dir, self.rank, self.world_size)
        self._store_prefix = f"aorta/{claim.run_id}/{claim.attempt}"
        output = self._output = Output(self.output_dir, claim, self.rank, self.world_size)
        output.callbacks = self._callbacks
        self._sampling.open(self.rank, self.world_size, self._common_store, state_path(self.output_dir))
        self.steps.began = output.standing.begin
        if claim.attempt:
            self.steps.continue_at(claim.next_step)
        self.steps.closed = lambda step: output.keep(step, len(self.journal.closed))
        for warning in environment_warnings():
            if self.rank == 0:
                logger.warning("aorta: %s", warning)
        self._anchors.append(clock_anchor())
        self._sources.sites.write_to(self.output_dir / sites_name(self.rank), claim.run_id)
        self._sources.stacks.write_to(self.output_dir / stacks_name(self.rank), claim.run_id, claim.attempt)
        if self._settings.stacks:
            loader_workers.page().tell(self.output_dir / workers_name(self.rank), claim.run_id)
        self._sources.kernels.watch(self.steps.make_room_for_profiler)
        try:
            self._sources.install()
            self._had_device = self._sources.accelerator.is_initialized()
            self._run = describe_run(self._settings, claim, self.world_size, self._anchors)
            output.write_run(self._run)
            self.companions.opened(self)
        except BaseException as error:
            self._sources.uninstall()
            self._sources.kernels.close()
            output.end(ending_of(error))
            output.close()
            self._output = None
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
        self._close(error, timeout_s)

    def abandon(self, reason: str | None) -> None:
        """Close while the program goes on.

        reason: an error of aorta's own; None: another recorder takes over.
        """
        if reason is not None:
            self._stopped_by = f"an error of aorta's own, behind which the program went on: {reason}"
        self._exit_error = (None,)  # what is being handled is no end of the program
        self.close(timeout_s=5.0)

    def stopped(self, reason: str) -> None:
        """Note that the run was asked to end early. reason: by what, such as a signal's name."""
        self._stopped_by = reason

    def flush(self, timeout_s: float) -> None:
        """Have the last finished step written, within timeout_s: the process is about to be ended.

        May be called on any thread.
        """
        self.steps.settle()
        self.steps.finish()
        end_s = time.monotonic() + timeout_s
        while self.journal.closed and time.monotonic() < end_s:
            if self._output is not None:
                self._output.wake()
            time.sleep(0.01)

    def end(self, ending: Ending) -> None:
        """Note how this process ends, for a caller that ends it without leaving the recorder."""
        if self._output is not None:
            self._output.end(ending)

    def _left_open(self) -> None:
        """Close the recorder at the exit of the interpreter, if nobody did."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._close(error, timeout_s=5.0)

    def failed(self, error: BaseException) -> None:
        """Note that the program ended by an exception, after `close`."""
        if self._standing is not None and os.getpid() == self._pid:
            self._standing.end(ending_of(error))

    def _close(self, error: BaseException | None, timeout_s: float) -> None:
        """Take the instrument off, have the last lines written, and then run.json, which counts them."""
        output = self._output
        if output is None or os.getpid() != self._pid:
            return
        atexit.unregister(self._left_open)
        ending = ending_of(error)
        if error is not None:
            from aorta.record.shortage import note_shortage  # most runs end well

            note_shortage(
                output.path, output.claim, self.rank, error, self.journal.current or self.journal.failed
            )
        if ending.kind == "finished" and self._stopped_by is not None:
            ending = Ending(kind="stopped", why=self._stopped_by, unix_ns=ending.unix_ns)
        self.companions.closing(self._cause)
        step = self.journal.current
        if step is not None and step.body_end is None:
            self.journal.current = None  # the script left in the middle of it
        self.steps.settle()
        self.pause()
        self._sampling.close()
        self.journal.close()
        output.finish(timeout_s)
        self._sources.kernels.close()
        self._anchors.append(clock_anchor())
        output.end(ending)
        self._standing = output.standing
        if self._run is not None:
            self._run.finished_unix_ns = time.time_ns()
            self._run.coverage = self._coverage(output)
            self._run.overhead = self._sampling.record()
            self._run.program = self.program
            if self.flops is not None:
                add_batch(self._run, self.flops)
            if self.flops is not None and ending.kind == "finished" and self._run.flops_per_token is None:
                add_flops(self._run, self.flops)
            if self.rank == 0:
                finish_run(self.output_dir, self._run, ending)
            output.write_run(self._run)
        output.close()
        self._output = None
        self._sources.thread_use.close()
        self.companions.closed(self._cause)

    def _near_memory_limit(self, step: RecordedStep, limit_bytes: int) -> None:
        """Note once who holds the device's memory. The step is longer for it, and tells no cost."""
        from aorta.record.shortage import note_nearness  # most runs have room

        output, device = self._output, self._sources.device
        if output is not None and device is not None:
            start_ns = time.monotonic_ns()
            note_nearness(output.path, output.claim, self.rank, device, step, limit_bytes)
            self._sources.host_watch.note_pause("aorta looks who holds memory", start_ns)

    def _common_store(self) -> Store | None:
        """Return the job's store once there is a process group."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(self.store_prefix, dist.distributed_c10d._get_default_store())

    def _open_clock(self) -> MarkClock | None:
        """Find the device and begin to write. At the first step: by then most scripts have chosen the device,
        and where one has not, at the second one."""
        assert self._output is not None
        device = self._sources.device_in_use(self._had_device)
        was_asked, self._was_asked = self._was_asked, True
        if not was_asked and self._sources.may_use_device_later(device):
            return None
        anchor = clock_anchor()
        self._anchors.append(anchor)
        clock, first_mark = self._sources.open_device(device)
        self._output.begin(self.journal, self._settings, self._sources, clock, first_mark, anchor)
        return clock

    # -- run.json ---------------------------------------------------------------------------------

    def write_program(self) -> None:
        """Write what the program has made: of a run that a signal ends nothing more comes into run.json."""
        if self._run is not None and self._output is not None:
            self._run.program = self.program
            self._output.write_run(self._run)

    def _coverage(self, output: Output) -> dict[str, Any]:
        kernels = self._sources.kernels
        return {
            "rank": self.rank,
            **collectives_seen(self.journal, self._sources.counts.result(), self._sources),
            **self.coverage_notes,
            "end_marks": end_marks(self.journal),
            "kernel_records": {
                "reason": "there is no device" if self._sources.device is None else kernels.reason,
                "note": kernels.note,
                **kernels.tracer,
                "gaps_for_profilers": kernels.num_yields,
                "matched": output.matched(),
            },
            "unresolved_steps": output.num_unresolved,
            "left_out_steps": self.steps.num_left_out,
            "lost_lines": output.num_lost,
            "not_seen_by_design": NOT_SEEN_BY_DESIGN,
        }
