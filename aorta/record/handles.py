"""Handles that a training script holds: of a step and of a range.

Also cuts: places in an open step at which `aorta run` may end it in retrospect.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from aorta.record.interception.replaced import uncompiled
from aorta.record.journal import Journal
from aorta.record.scalars import scalar
from aorta.steps.notes import Mark, RecordedStep
from aorta.timeline.types import STEP_ANNOTATION

if TYPE_CHECKING:
    from aorta.record.recorder import Recorder


profiler_is_on = torch._C._autograd._profiler_enabled
"""True while a torch.profiler of the program or of ours runs; costs nothing to ask."""
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
        # Companions first: a profiler that starts now is not to count as the step's time.
        self._recorder.companions.step_begins(self._step.global_step)
        self._recorder.steps.begin(self._step)
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


@dataclass(frozen=True)
class Cut:
    """A place in an open step, at which it may be split later."""

    mark: Mark
    host_ns: int
    use: tuple[int, int, int | None]
    """Use of the cores by the step's thread, as host.ThreadUse reads it."""
    lengths: tuple[int, ...]
    """Length of each of _LISTS there."""

    def after(self, earlier: "Cut | None") -> "Cut":
        """Return the same place, counted from the earlier one at which the step has been split since."""
        if earlier is None:
            return self
        lengths = zip(self.lengths, earlier.lengths, strict=True)
        return replace(self, lengths=tuple(length - gone for length, gone in lengths))


def cut(step: RecordedStep, mark: Mark, use: tuple[int, int, int | None]) -> Cut:
    """Return the place where the step stands now."""
    return Cut(mark, time.monotonic_ns(), use, tuple(len(getattr(step, name)) for name in _LISTS))


def split(journal: Journal, place: Cut, following: RecordedStep) -> None:
    """End the open step at place; what came after it moves to `following`, which is the open step then."""
    step = journal.current
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
    journal.current = following
    journal.closed.append(step)
