"""A GPU as a ProbeMachine: submits programs behind a gate and reads the stamps of their kernels."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from aorta.device.backend import accelerator
from aorta.device.streams import DeviceStreams
from aorta.queues.probe.kernels import NEVER, NUM_SLOTS, WIDE_THREADS, measure_clock, open_kernels
from aorta.queues.probe.machine import Op, Outcome, ProbeError, QueueRecord, QueueWait, Spin, Stamp

GATE_LEAST_MS = 1.0
GATE_MOST_MS = 400.0
GATE_MARGIN = 2.0
"""Length of the gate over the submission time seen so far."""
ATTEMPTS = 4
"""Runs of a program, each with a longer gate, until one was submitted whole before the gate opened."""
WARM_UP_MS = 30.0


class Device:
    """State shared by all machines of one GPU: kernels, their buffer, the clock."""

    def __init__(self, device: torch.device) -> None:
        gpus = self.backend = accelerator()
        if device.type != gpus.torch_type or not gpus.is_available():
            raise ProbeError(f"probe needs a GPU, and {device} is not one that torch sees here")
        index = gpus.current_index() if device.index is None else device.index
        if index >= gpus.count():
            raise ProbeError(f"{device} is not there: torch sees {gpus.count()} GPUs")
        self.device = gpus.device(index)
        properties = gpus.properties(index)
        self.name: str = properties.name
        per_unit: int = properties.max_threads_per_multi_processor // WIDE_THREADS
        self.resident_ctas: int = per_unit * properties.multi_processor_count
        with gpus.on_device(self.device):
            self.buffer = torch.zeros((NUM_SLOTS, 2), dtype=torch.int64, device=self.device)
            self.unwritten = torch.tensor([[NEVER, 0]], dtype=torch.int64, device=self.device)
            self.unwritten = self.unwritten.repeat(NUM_SLOTS, 1)
            self.kernels = open_kernels(self.device, self.buffer)
            self.clock = measure_clock(self.kernels, self.device, self.buffer)
        self.launch_ms = 0.02
        """Submission time of one operation, as seen so far."""

    def least_and_greatest_priority(self) -> tuple[int, int]:
        """Priorities of streams; (0, 0) where the device has one level. Lower numbers run first."""
        least, greatest = self.backend.stream_priorities()
        return min(least, 0), greatest

    def machine(self, priorities: Sequence[int]) -> "DeviceMachine":
        return DeviceMachine(self, priorities)


class DeviceMachine:
    """Streams of a GPU, all of them used once before anything is measured."""

    def __init__(self, shared: Device, priorities: Sequence[int]) -> None:
        self.shared = shared
        self.clock = shared.clock
        self.resident_ctas = shared.resident_ctas
        self.num_streams = len(priorities)
        # One more, made last: the gate runs on a stream that no experiment uses.
        try:
            self._streams = DeviceStreams(self.num_streams + 1, shared.device, [*priorities, 0])
        except RuntimeError as error:
            raise ProbeError(
                f"{self.num_streams} streams cannot be had ({error}): try --streams 31"
            ) from error
        self._gate = self._streams.raw(self.num_streams)
        self._opened = shared.backend.new_event()
        self._events: dict[int, Any] = {}
        self.run([Spin(stream, 1.0) for stream in range(self.num_streams)])

    def run(self, program: Sequence[Op]) -> Outcome:
        """Repeats with a longer gate until the gate outlasts the submission, ATTEMPTS times at most."""
        if 1 + sum(isinstance(op, Spin | Stamp) for op in program) > NUM_SLOTS:
            raise ProbeError(f"a program of {len(program)} operations exceeds the {NUM_SLOTS} stamps")
        gate_ms = max(GATE_LEAST_MS, GATE_MARGIN * self.shared.launch_ms * (len(program) + self.num_streams))
        for _ in range(ATTEMPTS):
            outcome, submit_ms = self._attempt(program, min(gate_ms, GATE_MOST_MS))
            self.shared.launch_ms = submit_ms / (len(program) + self.num_streams)
            if outcome.primed or gate_ms >= GATE_MOST_MS:
                break
            gate_ms = GATE_MARGIN * max(gate_ms, submit_ms)
        return outcome

    def _attempt(self, program: Sequence[Op], gate_ms: float) -> tuple[Outcome, float]:
        shared = self.shared
        with shared.backend.on_device(shared.device):
            shared.buffer.copy_(shared.unwritten)
            shared.backend.synchronize(shared.device)
            # A kernel that spins holds all streams back while the host submits. What is measured afterwards
            # does not depend on how fast the host was, provided the gate was still closed at the end.
            shared.kernels.spin(self._gate, 0, self._counts(gate_ms * 1e3), 1)
            self._opened.record(self._gate)
            started = time.perf_counter()
            for stream in sorted({op.stream for op in program}):
                self._streams.raw(stream).wait_event(self._opened)
            slot = 1
            for op in program:
                slot = self._submit(op, slot)
            submit_ms = (time.perf_counter() - started) * 1e3
            primed = not self._opened.query()
            shared.backend.synchronize(shared.device)
            stamps = shared.buffer[:slot].cpu().numpy()
        return self._outcome(stamps, primed), submit_ms

    def _submit(self, op: Op, slot: int) -> int:
        """The next free slot."""
        stream = self._streams.raw(op.stream)
        if isinstance(op, QueueRecord):
            self._event(op.event).record(stream)
        elif isinstance(op, QueueWait):
            stream.wait_event(self._event(op.event))
        elif isinstance(op, Stamp):
            self.shared.kernels.stamp(stream, slot)
            return slot + 1
        else:
            self.shared.kernels.spin(stream, slot, self._counts(op.us), op.ctas)
            return slot + 1
        return slot

    def _outcome(self, stamps: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", primed: bool) -> Outcome:
        if (stamps[:, 1] == 0).any():
            raise ProbeError(f"{int((stamps[:, 1] == 0).sum())} of {len(stamps)} kernels left no stamp")
        # Differences in whole counts first: float64 cannot hold a clock since the epoch to the nanosecond.
        times_us = (stamps[1:] - stamps[0, 1]) * (self.clock.ns_per_count / 1e3)
        return Outcome(start_us=times_us[:, 0], end_us=times_us[:, 1], primed=primed)

    def _counts(self, duration_us: float) -> int:
        return max(1, round(duration_us * 1e3 / self.clock.ns_per_count))

    def _event(self, event: int) -> Any:
        """Made once: a run has ended before the next one records it again."""
        if event not in self._events:
            self._events[event] = self.shared.backend.new_event()
        return self._events[event]


def warm_up(shared: Device) -> None:
    """Raises the clocks of an idle GPU with a device full of kernels."""
    machine = shared.machine([0])
    machine.run([Spin(0, WARM_UP_MS * 1e3, shared.resident_ctas)])
