"""The handle of a step that a training script holds."""

import time
from typing import TYPE_CHECKING, Any, Self

import torch

from aorta.record.interception.replaced import uncompiled
from aorta.record.scalars import scalar
from aorta.steps.notes import RecordedStep
from aorta.timeline.types import STEP_ANNOTATION

if TYPE_CHECKING:
    from aorta.record.recorder import Recorder


profiler_is_on = torch._C._autograd._profiler_enabled
"""True while a torch.profiler of the program or of ours runs; costs nothing to ask."""


def _nobody(global_step: int) -> None:
    """Tell nobody."""


class StepHandle:
    """The context around one step's body; made by Recorder.step."""

    __slots__ = ("_annotation", "_recorder", "_step")

    def __init__(self, recorder: "Recorder", step: RecordedStep) -> None:
        self._recorder = recorder
        self._step = step
        self._annotation: Any = None

    @uncompiled
    def log(self, **scalars: Any) -> None:
        """Note scalars of this step by name, such as loss, lr and grad_norm: numbers or one-element tensors.

        A device tensor is copied asynchronously and read steps later; nothing waits here.
        """
        for name, value in scalars.items():
            if value is not None:
                self._step.scalars[name] = scalar(value)

    @property
    def step(self) -> RecordedStep:
        """Notes of the step."""
        return self._step

    def drop(self) -> None:
        """Forget the step, which was none: it gets no line, and its number is free again."""
        self._recorder.steps.forget(self._step)

    def close_window(self, at_body_end: bool = False) -> None:
        """End the window of a step whose body has ended: what follows belongs to no step.

        at_body_end: so does what came since the body's end.
        """
        self._recorder.steps.close_window(self._step, at_body_end)

    @uncompiled
    def __enter__(self) -> Self:
        entered_ns = time.monotonic_ns()
        companions, steps = self._recorder.companions, self._recorder.steps
        # Companions first: a profiler that starts now is not to count as the step's time.
        companions.step_begins(self._step.global_step)
        # They are told here: what the short way would have told them is told already.
        if companions.may_change_steps or not steps.goes_on(_nobody, entered_ns, self._step):
            steps.begin(self._step)
        if profiler_is_on():
            # A trace of this step then names it, and the reader assigns kernels to it.
            self._annotation = torch.profiler.record_function(f"{STEP_ANNOTATION}{self._step.global_step}")
            self._annotation.__enter__()
        return self

    @uncompiled
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if kind is None:
            self._recorder.steps.end_body(self._step)
            self._recorder.companions.step_ended(self._step.global_step)
        else:
            self._recorder.steps.drop(self._step)
