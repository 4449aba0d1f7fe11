"""What a training script holds of an open step and of a range."""

from typing import TYPE_CHECKING, Any, Self

import torch

from aorta.recording.calls import MarkedRange, RecordedStep
from aorta.recording.interception.uncompiled import uncompiled
from aorta.recording.scalars import scalar
from aorta.timeline.types import STEP_ANNOTATION

if TYPE_CHECKING:
    from aorta.recording.recorder import Recorder

profiler_is_on = torch._C._autograd._profiler_enabled


class StepHandle:
    """One open step; made by Recorder.step."""

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
        """What is noted of the step."""
        return self._step

    def drop(self) -> None:
        """End the step without a line: it was none. Its number is free again."""
        self._recorder._forget(self._step)

    def close_window(self, at_body_end: bool = False) -> None:
        """End the window of a step whose body has ended: what follows belongs to no step."""
        self._recorder._close_window(self._step, at_body_end)

    @uncompiled
    def __enter__(self) -> Self:
        self._recorder.companions.step_begins(self._step.global_step)
        self._recorder._open(self._step)
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
            self._recorder._end_body(self._step)
            self._recorder.companions.step_ended(self._step.global_step)
        else:
            self._recorder._drop(self._step)


class RangeHandle:
    __slots__ = ("_name", "_range", "_recorder")

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._range: MarkedRange | None = None

    @uncompiled
    def __enter__(self) -> None:
        recorder = self._recorder
        step = recorder._journal.current
        timed = step is not None and step.untimed is None and not step.by_kernels
        if timed and step is not None and recorder._clock is not None:
            self._range = MarkedRange(self._name, recorder._clock.mark())
            step.ranges.append(self._range)

    @uncompiled
    def __exit__(self, *_: object) -> None:
        if self._range is not None and self._recorder._clock is not None:
            self._range.end = self._recorder._clock.mark()
