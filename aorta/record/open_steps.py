"""Steps of the program while they are open: their marks at start, end of the body and end of the window.

The handles that a script holds (handles.py) call this. What is noted between the marks goes into the journal
from elsewhere; a step whose window has ended waits there for the sending thread.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_native_id

from aorta.device.marks import HostClock, MarkClock
from aorta.errors import InstrumentError
from aorta.record.handles import profiler_is_on
from aorta.record.host import next_node
from aorta.record.journal import Journal
from aorta.record.overhead import SLOW
from aorta.record.sampling import Sampling
from aorta.record.scalars import DeviceScalar
from aorta.record.sources import Sources
from aorta.steps.notes import LEFT_OUT, LeftOutStep, Mark, RecordedStep, Use

logger = logging.getLogger(__name__)

_TRACED = "torch.profiler had the driver's kernel records, and its trace has this step"
_NO_MARK = "no mark could be put on the step's stream"
RARE = ("checkpoint", "pause")
"""Notes of the host in a step whose length says nothing about the others."""
READ_FROM_NS = 2_000_000
"""Length of a step from which on it is read how long its thread was ready without a core: 3 us."""
PROCESS_FROM_NS = 10_000_000
"""The same of what its process had of the cores: 0.6 us, and 4 to 7 in one of 340 threads, whose times the
system adds up. Steps that are begun in full have it always."""
MANY_WAITING = 512
"""Steps waiting for their records to be written from which on each new one wakes the sending thread."""
MOST_WAITING = 1000
"""Limit of steps waiting for their records to be written; beyond it steps are left out."""


_LISTS = ("calls", "host_notes", "waits", "stalls", "final_waits", "lost_futures")
"""Lists of a step that are divided where it is split."""

_SHARED = (
    "thread",
    "compute_raw_stream",
    "untimed",
    "left_out",
    "by_kernels",
    "is_detailed",
    "is_unseen",
    "kernels_lost",
)
"""What both parts of a step that is split have in common."""


@dataclass(frozen=True)
class Cut:
    """A place in an open step, at which it may be split later."""

    mark: Mark
    host_ns: int
    use: Use
    """Use of the cores by the step's thread, as host.ThreadUse reads it."""
    lengths: tuple[int, ...]
    """Length of each of _LISTS there."""

    def after(self, earlier: "Cut | None") -> "Cut":
        """Return the same place, counted from the earlier one at which the step has been split since."""
        if earlier is None:
            return self
        lengths = zip(self.lengths, earlier.lengths, strict=True)
        return replace(self, lengths=tuple(length - gone for length, gone in lengths))


class OpenSteps:
    """Opens and closes the steps of one recorder."""

    def __init__(self, journal: Journal, sampling: Sampling, sources: Sources) -> None:
        self._journal = journal
        self._sampling = sampling
        self._sources = sources
        self.clock: MarkClock | None = None
        """The clock that sets the marks; None before the first step."""
        self.open_clock: Callable[[], MarkClock | None]
        """Finds the device at the first step, begins to write, and returns the clock. None: nothing is on a
        device yet, which the second step shall look at."""
        self._is_timed_for_now = False
        """True: the host's clock times the first step, until that is known."""
        self.began: Callable[[int], None] = lambda _: None
        """Told of each step that begins, by its number."""
        self.closed: Callable[[RecordedStep], None] = lambda _: None
        """Told of each step whose window has just ended because the next one began."""
        self._is_plain = False
        """True: the open step is left out, and nothing is put on, taken off or marked in it."""
        self._is_rare = False
        """The step before the open one holds something RARE."""
        self._usual_own_ns = 0.0
        """Time that goes_on takes, the middle of the latest calls."""
        self.num_left_out = 0
        self.gap: str | None = None
        """Reason why the next step does not follow the one before it."""
        self._next_global_step = 0
        self._last_global_step: int | None = None
        self._rollbacks = 0

    def new(self, global_step: int | None, step: int | None, epoch: int, tokens: int | None) -> RecordedStep:
        """Return a step that has not begun; counted on where global_step is None."""
        number = self._next_global_step if global_step is None else global_step
        self._next_global_step = number + 1
        return RecordedStep(number, number if step is None else step, epoch, tokens)

    def continue_at(self, number: int) -> None:
        """Number the run's first step, which may be open, and those after it from here on."""
        step = self._journal.current
        delta = number - (self._next_global_step if step is None else step.global_step)
        self._next_global_step = number + (step is not None)
        if step is not None and delta:
            step.global_step = step.step = self._last_global_step = number
            self._sampling.renumbered(delta)
            self.began(number)

    def begin(self, step: RecordedStep) -> None:
        """Begin a step, and with that end the window of the one before."""
        journal, sources = self._journal, self._sources
        if step.start is not None:
            raise InstrumentError("this step was entered before: make each with recorder.step(...)")
        if not sources.is_on:
            return
        if journal.stopped:  # nobody takes steps off the journal any more
            journal.current = None
            journal.closed.clear()
            return
        clock = self.clock
        if clock is None or self._is_timed_for_now:
            clock = self.find_device()
        previous = journal.current
        if previous is not None and previous.body_end is None:
            raise InstrumentError("recorder.step inside recorder.step")
        if len(journal.closed) >= MOST_WAITING:
            self._leave_out()
            return
        began_ns = time.thread_time_ns()
        counts = self._end_calls(previous)
        # Not at the body's end: metrics, logging and checkpoints communicate behind it.
        sources.sites.end_step(previous.calls if previous is not None and not previous.is_unseen else ())
        notes = () if previous is None else previous.host_notes
        was_rare, self._is_rare = self._is_rare, any(note.kind in RARE for note in notes)
        if previous is None or (self._is_rare and not was_rare):  # in every step it is part of the loop
            self._sampling.interrupted()
        step.left_out = None if self._is_recorded(step) else LEFT_OUT
        sources.module_names.begin_step()
        sources.sites.begin_step(sources.looks and step.left_out is None)
        sources.host_watch.look_for_checkpoints()
        step.first_node = next_node()
        step.host_start_ns = time.monotonic_ns()
        is_recorded = step.left_out is None or (previous is not None and previous.left_out is None)
        step.use_at_start = sources.thread_use.read(with_faults=is_recorded)
        if sources.device is not None:
            self._choose_clock(step, sources.device.index)
            sources.phase_memory.begin_step(step, sources.device.index)
            if step.by_kernels and sources.learns:
                sources.learner.begin(step, sources.learner.read() if counts is None else counts)
        # The window of the step before ends at this mark, so it has to be of the kind that times that step.
        needs_event = _is_timed_by_events(step) or (previous is not None and _is_timed_by_events(previous))
        step.start = clock.mark() if needs_event else Mark(time.monotonic_ns())
        self._number(step.start, step)
        self._note_order(step)
        journal.current, journal.failed = step, None
        if previous is not None:
            previous.is_detailed = previous.is_detailed or self._sampling.was_slow
            if previous.window_end is None:
                previous.window_end = step.start
                previous.use_at_end = step.use_at_start
                if previous.by_kernels and not step.start.number:
                    previous.kernels_lost = previous.kernels_lost or _NO_MARK
            journal.closed.append(previous)
            self.closed(previous)
        self._is_plain = step.left_out is not None and not (sources.kernels.is_on or sources.looks)
        step.own_ns = time.thread_time_ns() - began_ns
        if step.left_out is not None:
            self._sampling.took(step.own_ns)

    def find_device(self) -> MarkClock:
        """Open the clock of the device. What was begun before it was in use is dropped then."""
        was_timed, journal = self._is_timed_for_now, self._journal
        clock = self.open_clock()
        self._is_timed_for_now = clock is None
        self.clock = clock or HostClock()
        if was_timed and self.clock.is_device:
            journal.current = None
            journal.closed.clear()
            self.gap = "it began before the program used its device"
            self._sampling.interrupted()
        return self.clock

    def settle(self) -> None:
        """Have the first step written, where no second one begins."""
        if self._is_timed_for_now:
            self.find_device()

    def goes_on(
        self, tell: Callable[[int], None], since_ns: int, following: RecordedStep | None = None
    ) -> bool:
        """End the open step's window and begin the next step, where the overhead leaves both out.

        A short loop does this thousands of times a second, so the open step's object becomes the next one
        where nobody has made that (following). Returns False, with nothing done, where there is more to do
        than that. tell: called with the number of the step that ends. since_ns: when the hook that calls was
        entered.
        """
        journal = self._journal
        step, closed = journal.current, journal.closed
        if step is None or not self._is_plain or profiler_is_on() or len(closed) >= MOST_WAITING:
            return False
        if following is not None and (
            step.body_end is None
            or following.start is not None
            or following.global_step != step.global_step + 1
            or following.step != following.global_step
            or following.tokens
            or following.epoch
        ):
            return False
        if (
            step.scalars
            or step.calls
            or step.gap
            or step.tokens
            or step.epoch
            or step.step != step.global_step
        ):
            return False
        notes, before = step.host_notes, step.use_at_start
        for note in notes:
            if note.kind in RARE:
                return False
        now_ns = time.monotonic_ns()
        if before is None or before[0] != get_native_id() or not self._sampling.goes_on(now_ns):
            return False
        assert step.start is not None
        number, start_ns = step.global_step, step.start.host_ns
        tell(number)
        use: Use = before[0], time.thread_time_ns(), None, None, None, None
        if now_ns - start_ns >= READ_FROM_NS:
            with_process = now_ns - start_ns >= PROCESS_FROM_NS
            use = self._sources.thread_use.read(with_process, with_faults=False)
        closed.append(
            LeftOutStep(
                number,
                step.rollbacks,
                start_ns,
                now_ns if step.body_end is None else step.body_end.host_ns,
                now_ns,
                use[1] - before[1],
                None if use[2] is None or before[2] is None else use[2] - before[2],
                None if use[3] is None or before[3] is None else use[3] - before[3],
                step.own_ns,
                notes,
            )
        )
        if len(closed) >= MANY_WAITING:
            self.closed(step)
        self._next_global_step, self._last_global_step = number + 2, number + 1
        if following is None:
            step.global_step = step.step = number + 1
            step.body_end, step.host_notes = None, []
        else:
            for name in _SHARED:
                setattr(following, name, getattr(step, name))
            following.rollbacks = step.rollbacks
            step = journal.current = following
        step.start, step.host_start_ns, step.use_at_start = Mark(now_ns), now_ns, use
        step.first_node = next_node()
        self._is_rare = False
        self.began(number + 1)
        own_ns = time.monotonic_ns() - since_ns
        usual_ns = self._usual_own_ns or own_ns
        self._usual_own_ns = usual_ns * (1.02 if own_ns > usual_ns else 1 / 1.02)
        # The thread's own clock would take as long as the rest. A core that was lost here is not ours.
        step.own_ns = min(own_ns, int(SLOW * usual_ns))
        self._sampling.took(step.own_ns)
        return True

    def _end_calls(self, previous: RecordedStep | None) -> dict[str, int] | None:
        """Learn or tell the collectives of the step before; return the backends' counts if they were read."""
        if previous is None or previous.counts is None or previous.window_end is not None:
            return None
        learner = self._sources.learner
        counts = learner.read()
        learner.end(previous, counts)
        return counts

    def _is_recorded(self, step: RecordedStep) -> bool:
        """Choose, and put on or take off what sees the program."""
        sources = self._sources
        traced = profiler_is_on()
        planned = self._sampling.begin(step.global_step)
        recorded = planned or traced
        sees = recorded and (traced or not sources.can_look_away or self._sampling.is_seen())
        if sees and not sources.looks:
            sources.look()
        elif not sees and sources.looks:
            if not recorded:
                self._sampling.switched()
            sees = not sources.look_away()
            recorded = recorded or sees
        sources.watch_waits(recorded)
        step.is_unseen = recorded and not sees
        step.is_detailed = traced or self._sampling.has_details()
        if recorded and not planned:
            self._sampling.interrupted()  # its length is neither that of a plain step nor of a planned one
        return recorded

    def _leave_out(self) -> None:
        if self.num_left_out == 0:
            logger.warning("aorta: steps are shorter than the writing of their records: some are left out")
        self.num_left_out += 1
        self.gap = "steps were left out: their records could not be written in time"
        self.finish()

    def _choose_clock(self, step: RecordedStep, device_index: int) -> None:
        """Note in a step on a device what times it."""
        sources = self._sources
        step.compute_raw_stream = sources.accelerator.current_raw_stream(device_index)
        recorded = step.left_out is None
        step.untimed = self._journal.away if recorded else LEFT_OUT
        was_on = sources.kernels.is_on
        step.by_kernels = (
            sources.kernels.begin_step(recorded, self._sampling.comes_next()) and step.untimed is None
        )
        if not recorded and (was_on or sources.kernels.is_on):
            self._sampling.switched()
        if step.is_unseen and not step.by_kernels:  # the records were not to be had after all
            sources.look()
            step.is_unseen = False
        if recorded and not step.by_kernels:
            step.is_detailed = True
            if sources.kernels.is_lent:  # marks at every collective would change what the profiler sees
                step.untimed = step.untimed or _TRACED
        sources.watch_streams(recorded and not step.by_kernels and step.untimed is None)

    def _note_order(self, step: RecordedStep) -> None:
        """Note in the step whether it follows the one before, and how often the run was rolled back."""
        last, self._last_global_step = self._last_global_step, step.global_step
        if last is not None and step.global_step <= last:
            self._rollbacks += 1
            self.gap = f"rolled back from step {last}"
        step.rollbacks, step.gap, self.gap = self._rollbacks, self.gap, None
        self.began(step.global_step)

    # -- marks -----------------------------------------------------------------------------------

    def _number(self, mark: Mark, step: RecordedStep) -> None:
        """Put the mark among the kernel records, too, where they are on."""
        kernels = self._sources.kernels
        if not kernels.is_on:
            return
        if not self._sources.is_captured():
            mark.number = kernels.mark(step.compute_raw_stream)
        if step.by_kernels and not mark.number:
            step.kernels_lost = step.kernels_lost or _NO_MARK

    def _mark_for(self, step: RecordedStep, clock: MarkClock) -> Mark:
        """Set a mark on the step's stream, of the kind that times the step."""
        if _is_timed_by_events(step):
            return clock.mark()
        mark = Mark(time.monotonic_ns())
        if step.by_kernels and step.kernels_lost is None:
            self._number(mark, step)
        return mark

    def make_room_for_profiler(self) -> None:
        """End the open step's window here, or give its kernel records up: a profiler takes them."""
        step = self._journal.current
        if step is None or not step.by_kernels:
            return
        if step.body_end is None:
            step.kernels_lost = "torch.profiler took the driver's records in this step"
        elif step.window_end is None:
            assert self.clock is not None
            step.window_end = self._mark_for(step, self.clock)

    # -- ends ------------------------------------------------------------------------------------

    def end_body(self, step: RecordedStep) -> None:
        """End a step's body; its window stays open until the next step begins."""
        clock, sources = self.clock, self._sources
        if clock is None or step.body_end is not None or self._journal.current is not step:
            return
        step.body_end = self._mark_for(step, clock)
        step.host_end_ns = time.monotonic_ns()
        began_ns = time.thread_time_ns()
        if step.is_unseen:
            sources.learner.end_body(step)
        elif step.left_out is None:
            sources.module_names.end_body(step)
        elif any(isinstance(value, DeviceScalar) for value in step.scalars.values()):
            step.logged = clock.mark()  # behind the copies to the host
        if sources.device is not None and step.left_out is None:
            sources.phase_memory.end_step(step)
        self._journal.release_finished()
        own_ns = time.thread_time_ns() - began_ns
        step.own_ns += own_ns
        if step.left_out is not None:
            self._sampling.took(own_ns)

    def drop(self, step: RecordedStep) -> None:
        """Drop a step whose body raised: its times are not those of a step."""
        self._sources.module_names.leave_step()
        self._sources.sites.leave_step()
        self._sampling.interrupted()
        if self._journal.current is step and step.body_end is None:
            self._journal.current, self._journal.failed = None, step
            self._journal.num_outside.update(call.op for call in step.calls)
            self.gap = f"step {step.global_step} raised an error"

    def forget(self, step: RecordedStep) -> None:
        """Drop what was no step; the next one may have its number."""
        self._sources.module_names.leave_step()
        self._sources.sites.leave_step()
        self._sampling.interrupted()
        if self._journal.current is step and step.body_end is None:
            self._journal.current = None
            self._journal.num_outside.update(call.op for call in step.calls)
            self.gap = step.gap
            self._last_global_step = step.global_step - 1 if step.global_step else None

    def close_window(self, step: RecordedStep, at_body_end: bool) -> None:
        """End the window of a step without beginning another one."""
        clock, journal = self.clock, self._journal
        if clock is not None and journal.current is step and step.body_end is not None:
            if step.window_end is None and not at_body_end:
                step.window_end = self._mark_for(step, clock)
                step.use_at_end = self._sources.thread_use.read(with_faults=step.left_out is None)
            self.finish()
            self._sampling.interrupted()
            self._sources.sites.end_step(() if step.is_unseen else step.calls)

    def finish(self) -> None:
        """End the open window where its body ended, since no step follows that would end it.

        Does nothing without a step whose body has ended. Calls that were issued after the body are then in no
        step: their kernels are not among those launched between the step's marks.
        """
        journal = self._journal
        step = journal.current
        if step is None or step.body_end is None:
            return
        journal.current = None
        if step.window_end is None:
            ended_ns = step.body_end.host_ns
            step.window_end = step.body_end
            late = [call for call in step.calls if call.issued_ns > ended_ns] if step.by_kernels else []
            if late:
                step.calls = [call for call in step.calls if call.issued_ns <= ended_ns]
                journal.num_outside.update(call.op for call in late)
        journal.closed.append(step)

    # -- steps that end in retrospect --------------------------------------------------------------

    def cut(self) -> Cut | None:
        """Return the place where the open step stands now, for `split`; None without an open step."""
        step, clock = self._journal.current, self.clock
        if step is None or clock is None or step.body_end is not None:
            return None
        lengths = tuple(len(getattr(step, name)) for name in _LISTS)
        use = self._sources.thread_use.read(with_faults=step.left_out is None)
        return Cut(self._mark_for(step, clock), time.monotonic_ns(), use, lengths)

    def split(self, place: Cut, following: RecordedStep) -> None:
        """End the open step at a place that has passed; what came after it moves to `following`, which is the
        open step then."""
        step = self._journal.current
        assert step is not None
        for name, length in zip(_LISTS, place.lengths, strict=True):
            entries = getattr(step, name)
            getattr(following, name).extend(entries[length:])
            del entries[length:]
        following.start = place.mark
        following.host_start_ns = place.host_ns
        following.use_at_start = step.use_at_end = place.use
        for name in _SHARED:
            setattr(following, name, getattr(step, name))
        step.counts = step.learned = None  # those of both parts together: neither is known, nor learned from
        step.body_end = step.window_end = place.mark
        step.host_end_ns = place.host_ns
        self._journal.current = following
        self._journal.closed.append(step)
        self._note_order(following)
        self.closed(step)


def _is_timed_by_events(step: RecordedStep) -> bool:
    """True where the step's ends are marked on its stream; the host times a step that is not recorded."""
    return step.left_out is None and not step.by_kernels
