"""Memory by phase of a step, from the allocator's own counters at the ends of phases.

The peak is the program's to reset, so it is only read. Where it rose within a phase it is that phase's peak;
where it did not, the phase's peak is at least what was allocated at its ends.
"""

import threading
from collections.abc import Callable

from aorta.device.backend import Backend
from aorta.record.interception.replaced import left_uncompiled
from aorta.steps.notes import RecordedStep

FORWARD, BACKWARD, OPTIMIZER = range(3)
"""What lies before a backward pass; the pass; what lies behind it, up to the optimizer's end."""
MOST_READS = 16
"""Per step: a reading takes about 10 us, and a step may accumulate many passes."""
NEAR_LIMIT = 0.95


class PhaseMemory:
    """Reads the counters in steps that are recorded on a device."""

    def __init__(self, device: Backend) -> None:
        self.near: Callable[[RecordedStep, int], None] = lambda step, limit_bytes: None
        """Told once, where the peak comes near the limit, while what the backward pass needs is there."""
        self._device = device
        self._index: int | None = None
        self._limit_bytes: int | None = None
        self._step: RecordedStep | None = None
        self._last: tuple[int, int] | None = None
        """Allocated and peak at the last reading; None where other steps have run since."""
        self._peaks = [0, 0, 0]
        self._num_reads = 0

    def begin_step(self, step: RecordedStep, index: int) -> None:
        """The step begins on this device."""
        if step.left_out is not None:
            self._step = self._last = None
            return
        if index != self._index:
            self._index, self._last = index, None
            self._limit_bytes = self._device.memory_limit_bytes(index)
        self._step, self._peaks, self._num_reads = step, [0, 0, 0], 0

    @left_uncompiled
    def ends(self, phase: int, step: RecordedStep | None) -> None:
        if step is None or step is not self._step or self._num_reads >= MOST_READS:
            return
        if step.thread == threading.get_ident():
            self._num_reads += 1
            self._read(phase)
            if phase == FORWARD and self._limit_bytes and self._last is not None:
                limit = self._limit_bytes
                if self._last[1] >= NEAR_LIMIT * limit:
                    self._limit_bytes = None
                    self.near(step, limit)

    def end_step(self, step: RecordedStep) -> None:
        """The step's body ends: note its memory."""
        if step is self._step:
            self._read(OPTIMIZER)
            if self._num_reads:
                step.phase_peaks = (self._peaks[0], self._peaks[1], self._peaks[2])
        self._step = None

    def _read(self, phase: int) -> None:
        assert self._step is not None
        assert self._index is not None
        memory = self._step.memory = self._device.memory_of(self._index)
        if memory is None:
            self._last = None
            return
        allocated, peak = memory[0], memory[2]
        seen = allocated if self._last is None else max(allocated, self._last[0])
        if self._last is not None and peak > self._last[1]:
            seen = peak
        self._peaks[phase] = max(self._peaks[phase], seen)
        self._last = allocated, peak
