"""Steps in the order in which they ran: by events at once, by kernel records when those have come."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from aorta.records.schema import KernelCoverage, StepRecord
from aorta.steps.calibration import Calibration
from aorta.steps.kernel_chunk import KernelChunk
from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.raw import RawStep, ResolverSettings
from aorta.steps.resolver import Resolver

_LATER = 8
"""Steps after one whose marks are looked at: a step waits for the next one or two as a rule."""
MOST_WAITING = 256
"""Steps that wait for kernel records before the oldest is written without them."""


class StepQueue:
    """Resolves the steps of one rank in order; a step behind one that waits for its kernels waits too."""

    def __init__(self, settings: ResolverSettings) -> None:
        self._by_events = Resolver(settings)
        self._by_kernels = KernelSteps(settings)
        self._waiting: deque[tuple[RawStep, bool]] = deque()

    @property
    def kernel_names(self) -> list[str]:
        return list(self._by_kernels.names)

    def kernel_coverage(self) -> KernelCoverage | None:
        """None where no step was timed by kernel records."""
        coverage = self._by_kernels.coverage()
        return coverage if coverage.num_steps else None

    def calibrate(self, calibration: Calibration | None) -> None:
        self._by_events.calibrate(calibration)

    def put(self, step: RawStep, reply: bool) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now, each with whether somebody listens for it."""
        self._waiting.append((step, reply))
        return self._ready()

    def add_kernels(self, chunk: KernelChunk) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now."""
        self._by_kernels.add(chunk)
        return self._ready()

    def finish(self) -> Iterator[tuple[StepRecord, bool]]:
        """What is left, with the kernel records that have come."""
        while self._waiting:
            yield self._resolve_first()

    def _ready(self) -> Iterator[tuple[StepRecord, bool]]:
        while self._waiting:
            step = self._waiting[0][0]
            if step.kernel_marks is not None and len(self._waiting) <= MOST_WAITING:
                later = [step, *(waiting for waiting, _ in islice(self._waiting, 1, _LATER))]
                if not self._by_kernels.is_complete(step, later):
                    return
            yield self._resolve_first()

    def _resolve_first(self) -> tuple[StepRecord, bool]:
        step, reply = self._waiting.popleft()
        resolver = self._by_events if step.kernel_marks is None else self._by_kernels
        return resolver.resolve(step), reply
