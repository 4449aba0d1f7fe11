"""Programs over streams, and what a machine says about when each of their kernels ran.

Every experiment of the probe is a program and a plain function on the times that come back, so that the same
code runs on a GPU and, in tests, on a simulated device whose queues are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from aorta.errors import AortaError
from aorta.timeline.arrays import Floats

MOST_STREAMS = 128
"""Kernels that a GPU holds at once; more streams would measure that limit instead of the queues."""


class ProbeError(AortaError):
    """The probe cannot run here, or a measurement cannot be made."""


def check_streams(num_streams: int) -> None:
    """ProbeError where that many cannot be probed."""
    if not 2 <= num_streams <= MOST_STREAMS:
        raise ProbeError(f"--streams must be from 2 to {MOST_STREAMS}, got {num_streams}")


@dataclass(frozen=True, slots=True)
class Spin:
    """A kernel whose CTAs each run until the device's clock has advanced by `us`."""

    stream: int
    us: float
    ctas: int = 1
    """1: a single warp, which leaves the device free for others. More: CTAs of 256 threads, of which
    Machine.resident_ctas fill the device."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A kernel that reads the clock and ends."""

    stream: int


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The event captures what the stream holds now."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class QueueWait:
    """Later work of the stream follows the event."""

    stream: int
    event: int


Op = Spin | Stamp | QueueRecord | QueueWait


@dataclass(frozen=True)
class Outcome:
    """Times of a program's kernels, in the order in which the program submits them."""

    start_us: Floats
    """Start of a kernel's first CTA, after the opening of the gate that held all streams back."""
    end_us: Floats
    """End of its last CTA."""
    primed: bool
    """The whole program was submitted before the gate opened, so that no time depends on the host."""

    @property
    def span_us(self) -> float:
        return float(self.end_us.max() - self.start_us.min())


class ProbeClock(msgspec.Struct, frozen=True, kw_only=True):
    """The clock that kernels read."""

    source: str
    tick_ns: float
    """Smallest nonzero difference of successive reads in one kernel."""
    read_ns: float
    """Mean time between successive reads: a tick finer than this cannot be seen."""
    ns_per_count: float
    host_ratio: float
    """An interval of this clock over the same interval of the host's clock; 1 within launch jitter."""


class ProbeMachine(Protocol):
    """Streams 0 … num_streams − 1 of a device."""

    num_streams: int
    resident_ctas: int
    """CTAs of 256 threads that run at the same time."""
    clock: ProbeClock

    def run(self, program: Sequence[Op]) -> Outcome:
        """Submits the program behind a gate, opens it, waits for the end."""
        ...


class MakeMachine(Protocol):
    """Gives a machine with one stream per priority (lower runs first; 0 is the default)."""

    def __call__(self, priorities: Sequence[int]) -> ProbeMachine: ...
