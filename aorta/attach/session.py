"""The recorder of a process that trains, driven by what the hooks see: begins and ends its steps.

The hooks (hooks.py) import this module at the first sign of training and call the methods without underscore.
An iteration is often recognised only after it has ended. So the session notes a cut at every possible end
and, once step_detection.py knows what makes an iteration, splits the open step at the cuts that were right.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from aorta.attach.instrument import Sending, instrument
from aorta.attach.position import Loaded, mark_of_file, mark_of_weights, position_of, steps_of
from aorta.attach.settings import say
from aorta.attach.step_detection import MAX_CALLS, MAX_PASSES, BackwardCycle, Ends, LoaderSign, OptimizerCycle
from aorta.errors import AortaError
from aorta.record.handles import StepHandle, profiler_is_on
from aorta.record.host import EVALUATION
from aorta.record.interception.replaced import left_uncompiled
from aorta.record.interception.switch import Interception
from aorta.record.open_steps import Cut
from aorta.record.profiler import RequestedCapture
from aorta.record.recorder import Recorder
from aorta.records.files import steps_name
from aorta.records.launches import own_notes
from aorta.records.state import MOST_SAVES, Save

MODES_AT = 3
"""Steps of the attempt after which switches of torch are read; more where the program profiles these."""
PROFILED_UNTIL = 20
"""Steps up to which nothing is looked at while the program profiles; who always does gets figures, too."""
CALLS_AT, MOST_TRIES = 2, 8
"""Steps after which the model's calls are noted, in some steps of rank 0; where that was cut short, in the
next ones."""

if TYPE_CHECKING:
    from aorta.attach.hooks import Attachment


class AttachedSession:
    """One recorder, whose steps begin and end where an iteration of the program ends."""

    def __init__(self, attachment: "Attachment", device: Any) -> None:
        self._attachment = attachment
        self._device = device
        self._recorder: Recorder | None = None
        self._open: StepHandle | None = None
        """The step whose body runs now."""
        self._cycle = OptimizerCycle()
        self._blind: BackwardCycle | None = None
        self._cuts: list[Cut | None] = []
        """Ends of the last calls of optimizers, while it is not known what makes an iteration."""
        self._pass_cuts: list[Cut | None] = []
        """Ends of the last backward passes, as long as no optimizer was called."""
        self._num_steps = 0
        """Steps that have ended; also the number of the open one."""
        self._first_number = 0
        """Number of the first step."""
        self._num_backwards = 0
        """Backward passes in the open step."""
        self._num_calls = 0
        """Calls of optimizers in the open step."""
        self._called_within = self._ends_with_pass = False
        """Hooks of the backward pass that runs called an optimizer, or the last one of an iteration."""
        self._num_signed = 0
        """Collectives of the open step that belong to the signature of an earlier backward pass."""
        self._names: dict[int, str] = {}
        """Name of each optimizer that was called, by its key (Attachment.key_of), for run.json."""
        self._ended: StepHandle | None = None
        """The step whose body has ended and whose window is open."""
        self._num_noted = 0
        """Collectives of that step's body."""
        self._loader = LoaderSign()
        self._evaluating = False
        self._evaluated_last = False
        """The iteration before this one began with an evaluation, so that it is part of the loop."""
        self.thread = threading.get_ident()
        """The thread that runs the loop."""
        self._early_saves: list[tuple[int, Save]] = []
        """What was saved while it is not known what makes an iteration, behind which call."""
        self._pool: set[int] = set()
        """The threads that run it in turn, if there are several."""
        self._thread_trains = False
        """True: that thread has been seen to train; until then it is only the one that set things up."""
        self._explicit = attachment.settings.step_at is not None
        """--step-at names the function whose calls are the steps: nothing is detected."""
        self._train: Any = None
        """Module.train as it was, and its replacement, while an evaluation runs."""
        self._pause: Any = None
        """The pause that the watchdog was told of, for an evaluation."""
        self._pause_began_s = 0.0
        self._evaluations: list[float] = []
        """Seconds of those that are in no step."""
        self._paused_for: set[int] = set()
        """Ids of the modules that were told to evaluate since the pause began."""
        self._trained_with: set[int] = set()
        """Those with which training went on: frozen parts. They are not waited for again."""
        self._capture: RequestedCapture | None = None
        self._has_modes = False
        """Switches of torch were read."""
        self.model_calls: Any = None
        """Of the step in which they are noted, for its FLOPs."""
        self._num_tries = 0

    # -- start and end -------------------------------------------------------------------------

    def start(self) -> None:
        """Put the instrument on; where the program has one of its own, stay off."""
        if Interception._installed is not None:
            self._give_way()
            return
        Interception.give_way = self._give_way
        self._recorder = self._enter_recorder()
        self._num_steps = self._first_number = self._recorder.first_number
        self._capture = RequestedCapture(self._recorder.output_dir, self._recorder.rank)
        if not self._explicit:
            self._begin()

    def _enter_recorder(self) -> Recorder:
        output = Path(self._attachment.settings.output)
        recorder = self._make_recorder(output)
        try:
            return recorder.__enter__()
        except AortaError:
            if recorder.world_size > 1:
                raise
        # Another process holds the folder: several that each train alone, under one command.
        return self._make_recorder(output / f"process_{os.getpid()}").__enter__()

    def _make_recorder(self, output: Path) -> Recorder:
        settings = self._attachment.settings
        hang = {} if settings.hang_timeout_s is None else {"timeout_s": settings.hang_timeout_s}
        options: dict[str, Any] = {
            "placement": settings.placement,
            "overhead": settings.overhead,
            "kernels": "off" if settings.kernels == "off" else "auto",  # what cannot be had ends no job
            "stacks": settings.stacks,
            "device": self._device,
            "hang": hang if settings.hang else None,
        }
        recorder = instrument(output, **options)
        if (notes := own_notes()) is not None:
            recorder.coverage_notes["launch_notes"] = notes.name
        if settings.sinks:
            recorder.companions.add(Sending(lambda folder: settings.sinks, say))
        if settings.check_every:
            from aorta.check.watch import HazardWatch  # most runs are not checked
            from aorta.hazards.exceptions import Exceptions

            exceptions = Exceptions.shipped(settings.check_exceptions)
            recorder.companions.add(
                HazardWatch(settings.check_every, settings.check_confirm, exceptions, say)
            )
        return recorder

    def _give_way(self) -> None:
        """Take this session off: the program enters a recorder of its own, which wins."""
        if self._recorder is None or self._recorder.rank == 0:
            say("the program records itself with aorta: aorta run stays off")
        self._attachment.take_off(None)

    def training_begins(self, optimizers: list[Any], loaded: Loaded) -> None:
        """Number the steps from where training stands, which is known at the first backward pass."""
        recorder = self._recorder
        if recorder is None or self._num_steps != self._first_number:
            return
        weights = mark_of_weights(optimizers, recorder.world_size)
        number, told_by = position_of(optimizers, loaded, recorder.earlier_saves, weights) or (None, None)
        self._num_steps = self._first_number = recorder.continue_at(number, told_by)
        if weights is not None:
            recorder.saved(Save(self._num_steps, weights))

    def file_saved(self, file: Any) -> None:
        """Note after which step the program saved this: an attempt that loads it is numbered by that."""
        is_in_function = self._explicit and self._open is not None  # where in its step it saves is not known
        if self._recorder is None or threading.get_ident() != self.thread or is_in_function:
            return
        mark = mark_of_file(file)
        if mark is not None:
            save = Save(self._num_steps, mark, steps_of(self._attachment.program.optimizers, False))
            if self._cycle.calls is None and self._cuts:  # the calls up to here may turn out to be iterations
                self._early_saves.append((len(self._cuts), save))
                del self._early_saves[:-MOST_SAVES]
            else:
                self._recorder.saved(save)

    def _iterations_were(self, calls_ago: Iterable[int]) -> None:
        """Note what was saved before it was known where iterations ended."""
        ends = [len(self._cuts) - ago for ago in calls_ago]
        early, self._early_saves = self._early_saves, []
        for num_calls, save in early:
            position = save.position + sum(end < num_calls for end in ends)
            if self._recorder is not None:
                self._recorder.saved(msgspec.structs.replace(save, position=position))

    def finish(self) -> None:
        """Close the recorder: the program or its process group ends."""
        recorder, error = self._recorder, _uncaught()
        if recorder is None:
            return
        if self._cuts and not self._explicit and self._blind is None and self._cycle.is_first_iteration:
            self._split(self._cuts[-1:])  # the program's only iteration: no second one has told where it ends
            self._iterations_were((1,))
            self._cuts.clear()
        open_step = None if self._open is None else self._open.step
        self._drop()
        if open_step is not None and error is not None:
            recorder.journal.failed = open_step  # in which the program failed
        self._end_pause()
        if self._capture is not None:
            self._capture.close()
        if recorder.flops is None and recorder.rank == 0:
            from aorta.attach.flops import ModelCalls

            recorder.flops = ModelCalls()  # has the reason why there is no number
        self._attachment.program.read_fallen_back()
        self._attachment.program.read_profiled_calls()
        self._attachment.program.read_idle_cores()
        self._describe(recorder)
        self._recorder = None
        Interception.give_way = None
        recorder.__exit__(None if error is None else type(error), error, None)
        if error is None:
            atexit.register(_left_after, recorder)

    def abandon(self, reason: str | None) -> None:
        """Close the recorder and leave what it has; nothing if it has no step. reason: None where another
        recorder takes over."""
        recorder, self._recorder = self._recorder, None
        Interception.give_way = None
        if recorder is None:
            return
        self._open = None
        self._model_calls_end()
        self._stop_waiting_for_training()
        if self._capture is not None:
            self._capture.close()
        recorder.abandon(reason)
        if self._num_steps == self._first_number:
            names = [steps_name(recorder.rank)] + (["run.json"] if recorder.rank == 0 else [])
            for name in names:
                (recorder.output_dir / name).unlink(missing_ok=True)

    def _describe(self, recorder: Recorder) -> None:
        """Note for run.json what the steps were found at."""
        if self._explicit:
            place = f"calls of {self._attachment.settings.step_at}"
        elif self._blind is not None:
            period = self._blind.period
            place = "no optimizer and no pattern of collectives was seen; use --step-at"
            if period == 1:
                place = "every backward pass, as no optimizer is called"
            elif period is not None:
                place = f"every {period} backward passes, by the pattern of collectives"
            if period is not None and self._blind.num_forgotten:
                place += f"; the first {self._blind.num_forgotten} backward passes are in no step"
        elif self._cycle.calls is None and self._num_steps == self._first_number:
            place = "too few calls of an optimizer to know what makes an iteration"
        else:
            calls = self._names if self._cycle.calls is None else self._cycle.calls
            place = " + ".join(self._names[key] for key in calls)  # type: ignore[index]
        recorder.coverage_notes["steps_at"] = place
        if self._evaluations:
            recorder.coverage_notes["evaluations"] = {
                "times": len(self._evaluations),
                "s": sum(self._evaluations),
            }
        recorder.program = self._attachment.program.described()

    def _is_of_the_loop(self, trains: bool = False) -> bool:
        """True on the thread that runs the loop.

        trains: called for a backward pass or an optimizer's call. The first thread with one of these runs the
        loop, whichever thread set things up. A call on one of autograd's own threads counts for the thread
        that called backward.
        """
        thread = self._attachment.training_thread()
        if trains and not self._thread_trains:
            self.thread, self._thread_trains = thread, True
            if self._open is not None:
                self._open.step.thread = thread
        return thread == self.thread

    def is_elsewhere(self, stepper: Any = None) -> bool:
        """True for a thread that trains something else beside the loop.

        stepper: what steps, called by that thread. Where it is the loop's, the loop goes on in that thread,
        as in those of a pool.
        """
        if self._explicit or self._is_of_the_loop(trains=True):
            return False
        thread = self._attachment.training_thread()
        if self._attachment.key_of(stepper) in self._names:
            self._pool |= {self.thread, thread}
        if thread not in self._pool:
            return True
        self.thread = thread
        if (opened := self._open) is not None:  # another thread may be about to end it
            opened.step.thread = thread
        return False

    # -- iterations at the optimizer -----------------------------------------------------------

    def optimizer_ended(self, stepper: Any, behind: bool) -> None:
        """Note the end of an optimizer's call, or of what steps it. behind: a backward pass ran before."""
        if self._explicit or not self._is_of_the_loop(trains=True):
            return
        if self._blind is not None:
            if self._blind.period is not None:
                return  # steps are found by collectives already; one rule for the whole run
            self._blind = None
        trained_in_pause = self._pause is not None
        if trained_in_pause:
            self._was_no_evaluation()
        self._num_calls += 1
        if self.model_calls is not None:
            self.model_calls.optimizer_stepped(stepper)
        self._called_within = self._attachment.backward_thread is not None
        key = self._attachment.key_of(stepper)
        if key not in self._names or self._attachment.has_compiled:
            self._names[key] = self._attachment.stepper_name(stepper)
        ends = self._cycle.ended(key, behind, self._attachment.num_uncalled)
        if self._early_saves and self._cycle.calls is not None:
            self._iterations_were(ends.earlier)
        if ends.earlier and self._open is not None:
            self._split([self._cuts[-ago] for ago in ends.earlier if ago <= len(self._cuts)])
        if ends.at_this_call:
            self._cuts.clear()
            self._ends_with_pass = self._called_within
            if not self._ends_with_pass:
                self._iteration_ends(trained_in_pause)
        else:
            if ends.earlier:
                self._cuts.clear()
            self._cuts.append(None)
            del self._cuts[:-MAX_CALLS]
            self.last_call_goes_on()

    def _iteration_ends(self, trained_in_pause: bool = False) -> None:
        """End the step, and begin the next one unless that begins with a batch.

        trained_in_pause: the iteration was taken for an evaluation, and its step was dropped.
        """
        if self._loader.dataset is None and self._open is not None and self._goes_on(self._open):
            self._num_steps += 1
            self._loader.iteration_ended()
            return
        if self._open is None and self._loader.dataset is not None and not trained_in_pause:
            self._loader.fails()  # no batch came: from now on iterations begin at the optimizer
            self._leave_at_body_end()
        self._end()
        self._loader.iteration_ended()
        if self._loader.dataset is None:
            self._begin()

    def last_call_goes_on(self) -> None:
        """Move the last cut to here: the iteration may be found to have ended with the last call."""
        if self._recorder is not None and self._cuts:
            self._cuts[-1] = self._recorder.cut()

    def _split(self, places: list[Cut | None]) -> None:
        """End iterations at places that have passed, oldest first."""
        assert self._recorder is not None
        previous: Cut | None = None
        for place in places:
            if place is not None:
                self._num_steps += 1
                self._open = self._recorder.split(place.after(previous), self._num_steps)
                previous = place

    def _goes_on(self, handle: StepHandle) -> bool:
        """End the step and begin the next one where the overhead leaves both out; False: in full, please.

        Companions are told all the same, and the handle is that of the next step then.
        """
        recorder, capture = self._recorder, self._capture
        if recorder is None or self._evaluating or self._evaluated_last or self._train is not None:
            return False
        if self.model_calls is not None:
            return False  # they are of one step
        if recorder.flops is not None and recorder.flops.wants(self._num_steps + 1):
            return False  # of the next one
        if recorder.companions.may_change_steps or (capture is not None and capture.is_planned):
            return False
        if not recorder.steps.goes_on(recorder.companions.goes_on, self._attachment.entered_ns):
            return False
        if capture is not None:
            capture.step_begins(handle.step.global_step)
        self._num_backwards = self._num_calls = self._num_signed = 0
        return True

    def _begin(self) -> None:
        """Open the next step."""
        assert self._recorder is not None
        self._stop_waiting_for_training()
        self._end_pause()
        self._ended = None
        self._open = self._recorder.step(global_step=self._num_steps)
        if self._capture is not None:  # before the step: starting a profiler must not count as its time
            self._capture.step_begins(self._open.step.global_step)
        self._open.step.thread = self.thread  # a hook may run on one of autograd's threads
        self._open.__enter__()
        self._note_model_calls()
        self._num_backwards = self._num_calls = self._num_signed = 0

    def _note_model_calls(self) -> None:
        """In a few steps of rank 0, ever further apart, once it is known what a step is."""
        recorder = self._recorder
        assert recorder is not None
        is_known = self._explicit or self._cycle.calls is not None
        if recorder.rank or not is_known or self._num_steps < CALLS_AT:
            return
        is_wanted = recorder.flops is None or recorder.flops.wants(self._num_steps)
        if not is_wanted or self._is_profiled():
            return
        if recorder.flops is None:
            from aorta.attach.flops import ModelCalls

            self._num_tries += 1
            recorder.flops = ModelCalls()
            recorder.coverage_notes["noted_step"] = self._num_steps  # several times as long as others
        self.model_calls = recorder.flops
        self.model_calls.begin_step(self._attachment.program.optimizers, self._num_steps)

    def _is_profiled(self) -> bool:
        """Whether the program's profiler would show what we look at now: all objects that there are, say."""
        return self._num_steps - self._first_number < PROFILED_UNTIL and profiler_is_on()

    def _model_calls_end(self, is_whole: bool = False) -> None:
        if self.model_calls is not None:
            calls, self.model_calls = self.model_calls, None
            calls.end_step(is_whole)
            if calls.is_empty and self._num_tries < MOST_TRIES and self._recorder is not None:
                self._recorder.flops = None

    def _end(self) -> None:
        """End the body of the open step; its window stays open until the next step begins."""
        if self._open is not None:
            self._model_calls_end(is_whole=True)
            self._open.__exit__(None, None, None)
            self._ended, self._open = self._open, None
            self._num_noted = len(self._ended.step.calls)
            self._num_steps += 1
            is_late = not self._has_modes and self._num_steps - self._first_number >= MODES_AT
            if reads_modes := is_late and not self._is_profiled():
                self._has_modes = True
                self._attachment.program.read_modes(self._attachment.torch)
            self._num_backwards = self._num_calls = 0
            if self._recorder is not None and self._ended.step.left_out is None:
                self._describe(self._recorder)  # now: at exit the recorder may be closed first
                if reads_modes:
                    self._recorder.write_program()
            self._evaluated_last, self._evaluating = self._evaluating, False

    def _leave(self) -> None:
        """Drop the open step and close the last window: what follows belongs to no step."""
        self._drop()
        if self._ended is not None:
            self._ended.close_window()
            self._ended = None

    def _leave_at_body_end(self) -> None:
        """Close the last window where its body ended: what came after the body belongs to no step."""
        if self._ended is not None and self._recorder is not None:
            calls = self._ended.step.calls
            self._recorder.journal.num_outside.update(call.op for call in calls[self._num_noted :])
            del calls[self._num_noted :]
            self._ended.close_window(at_body_end=True)
            self._ended = None

    def _drop(self) -> None:
        """Forget the open step."""
        self._model_calls_end()
        if self._open is not None:
            self._open.drop()
            self._open = None

    # -- iterations that begin with a batch ----------------------------------------------------

    def data_requested(self, dataset: int) -> None:
        """Begin a step where iterations begin with a batch; what the loop did after its optimizer, such as
        logging, then belongs to the last step. dataset: the id of the data set that is asked."""
        if self._explicit or threading.get_ident() != self.thread:
            return  # asked for by a thread that fetches ahead, maybe while the loop's is in a backward pass
        if not self._attachment.torch.is_grad_enabled():
            return  # for an evaluation, maybe with the data set of training
        if self._num_backwards == 0:
            self._loader.batch_requested(dataset)
        if self._open is None and dataset == self._loader.dataset and self._cycle.calls is not None:
            if self._ended is not None and self._goes_on(self._ended):
                self._open, self._ended = self._ended, None
            else:
                self._begin()

    # -- loops without a visible optimizer -----------------------------------------------------

    def backward_ended(self) -> None:
        """Note the end of a backward pass; it ends a step where the optimizer cannot be seen."""
        if self._explicit or not self._is_of_the_loop(trains=True):
            return
        self._num_backwards += 1
        if self._called_within and self._attachment.backward_thread is None:
            self._called_within = False
            if self._ends_with_pass:
                self._ends_with_pass = False
                self._iteration_ends()
            else:
                self.last_call_goes_on()
            return
        if self._num_calls or self._cycle.calls is not None or self._recorder is None:
            return
        if self._blind is None:
            self._blind = BackwardCycle()
        if self._pause is not None:  # no optimizer will tell that it is a frozen part
            self._was_no_evaluation()
        blind, was_known = self._blind, self._blind.period is not None
        ends = blind.ended(self._sign(), is_patient=self._attachment.num_uncalled > 0)
        if not was_known:
            self._pass_cuts.append(self._recorder.cut())
            del self._pass_cuts[:-MAX_PASSES]
            if blind.period is not None:
                self._split_at_passes(ends, blind.num_forgotten)
        if ends.at_this_call:
            self._end()
            self._begin()

    def _split_at_passes(self, ends: Ends, num_forgotten: int) -> None:
        """Give past iterations their steps, now that the pattern is known, if all passes are remembered."""
        places = [self._pass_cuts[-1 - ago] for ago in ends.earlier]
        self._pass_cuts.clear()
        if num_forgotten == 0:
            self._split(places)
            self._num_signed = 0 if self._open is None else len(self._open.step.calls)
        else:
            self._drop()  # an unknown number of iterations: no step
            self._begin()

    def _sign(self) -> list[tuple[str, str, int]]:
        """Return the collectives since the last backward pass, as a signature of this one."""
        step = None if self._recorder is None else self._recorder.journal.current
        if step is None:
            return []
        calls = step.calls[self._num_signed :]
        self._num_signed = len(step.calls)
        return [(call.op, call.group.name, call.bytes) for call in calls]

    # -- evaluation ----------------------------------------------------------------------------

    def _end_pause(self, has_evaluated: bool = True) -> None:
        """Tell the watchdog that the evaluation is over: it waits no longer than for any step again."""
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)
            is_outside = self._recorder is not None and self._recorder.journal.current is None
            if has_evaluated and is_outside:
                self._evaluations.append(time.monotonic() - self._pause_began_s)

    def _was_no_evaluation(self) -> None:
        """Go on with the loop: an optimizer is called, so that what is told to evaluate is a frozen part.

        A backward pass alone is no sign: an evaluation may need gradients, as that of forces does.
        """
        self._trained_with |= self._paused_for
        self._evaluating = False
        self._stop_waiting_for_training()
        self._end_pause(has_evaluated=False)

    def evaluation_begins(self, module: int) -> None:
        """Leave the loop at a model.eval() between two iterations: no step until model.train().

        module: the id of what is told to evaluate.
        """
        nothing_yet = self._open is None or not (self._num_backwards or self._num_calls)
        if threading.get_ident() != self.thread:
            return
        if self._pause is not None:
            self._paused_for.add(module)
            return
        if self._explicit or not nothing_yet or (self._open is None and self._ended is None):
            return
        if self._blind is None and (self._cycle.calls is None or self._cycle.is_open):
            return
        if self._blind is not None and self._blind.period is None:
            return
        if self._recorder is None or module in self._trained_with:
            return
        self._evaluating, self._paused_for = True, {module}
        # The loop has it where every iteration does. Where passes end steps, the open one has the update.
        if not self._evaluated_last and self._blind is None:
            self._leave()
        self._pause, self._pause_began_s = self._recorder.pausing(EVALUATION), time.monotonic()
        self._pause.__enter__()
        self._wait_for_training()

    def _wait_for_training(self) -> None:
        """Replace Module.train until training resumes; not for longer, since models call it often."""
        torch = self._attachment.torch
        original = torch.nn.Module.train
        session = self

        def train(module: Any, mode: bool = True) -> Any:
            result = original(module, mode)
            if mode and not torch.compiler.is_compiling():
                session.training_resumes()
            return result

        torch.nn.Module.train = left_uncompiled(train, with_called=False)
        self._train = (original, train)

    @left_uncompiled
    def training_resumes(self) -> None:
        """Begin a step at the model.train() that follows an evaluation."""
        try:
            self._stop_waiting_for_training()
            self._end_pause()
            if self._open is None and self._loader.dataset is None and self._attachment.is_on:
                self._begin()
        except Exception as error:
            self._attachment.take_off(f"{type(error).__name__}: {error}")

    def _stop_waiting_for_training(self) -> None:
        if self._train is not None:
            original, replacement = self._train
            self._train = None
            module = sys.modules["torch"].nn.Module
            if vars(module).get("train") is replacement:
                module.train = original

    # -- --step-at -----------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Begin a step: the function that --step-at names is called."""
        if self._open is None and self._is_of_the_loop(trains=True):
            self._begin()

    def step_ends(self) -> None:
        """End the step: that function has returned."""
        if self._is_of_the_loop():
            self._end()


def _left_after(recorder: Recorder) -> None:
    """Tell of an exception that ends the program after its process group, with which recording ended."""
    error = _uncaught()
    if error is not None:
        recorder.failed(error)


def _uncaught() -> BaseException | None:
    """What ends the program, whatever it has put for sys.excepthook; None at a prompt, which goes on."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
