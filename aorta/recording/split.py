"""Ends a step at a place that has passed: for who learns late that an iteration had ended there."""

import time
from dataclasses import dataclass, replace

from aorta.device.marks import Mark
from aorta.recording.calls import RecordedStep
from aorta.recording.journal import Journal

LISTS = ("calls", "host_notes", "waits", "stalls", "final_waits", "ranges")


@dataclass(frozen=True)
class Cut:
    """A place in an open step."""

    mark: Mark
    host_ns: int
    use: tuple[int, int, int | None]
    """Of the step's thread, as ThreadUse reads it."""
    lengths: tuple[int, ...]
    """Of the step's lists there."""

    def after(self, earlier: "Cut | None") -> "Cut":
        """The same place once the step has been split at an earlier one."""
        if earlier is None:
            return self
        lengths = zip(self.lengths, earlier.lengths, strict=True)
        return replace(self, lengths=tuple(length - gone for length, gone in lengths))


def cut(step: RecordedStep, mark: Mark, use: tuple[int, int, int | None]) -> Cut:
    """The place where the step stands now."""
    return Cut(mark, time.monotonic_ns(), use, tuple(len(getattr(step, name)) for name in LISTS))


def split(journal: Journal, place: Cut, following: RecordedStep) -> None:
    """End the open step at place; what came after it belongs to `following`, which is open from there on."""
    step = journal.current
    assert step is not None
    for name, length in zip(LISTS, place.lengths, strict=True):
        entries = getattr(step, name)
        getattr(following, name).extend(entries[length:])
        del entries[length:]
    following.start = place.mark
    following.host_start_ns = place.host_ns
    following.use_at_start = step.use_at_end = place.use
    for name in ("thread", "compute_raw_stream", "untimed", "by_kernels", "kernels_lost"):
        setattr(following, name, getattr(step, name))
    step.body_end = step.window_end = place.mark
    step.host_end_ns = place.host_ns
    journal.current = following
    journal.closed.append(step)
