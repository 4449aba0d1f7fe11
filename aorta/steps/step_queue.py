"""Steps in the order in which they ran: by events at once, by kernel records when those have come."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from aorta.records.schema import KernelCoverage, LibraryCoverage, StepRecord
from aorta.steps.calibration import Calibration
from aorta.steps.collective_chunk import CollectiveChunk
from aorta.steps.collective_steps import CollectiveSteps
from aorta.steps.kernel_chunk import KernelChunk
from aorta.steps.kernel_steps import KernelSteps
from aorta.steps.raw import RawStep, ResolverSettings
from aorta.steps.resolver import Resolver

_LATER = 8
"""Steps after one whose marks are looked at: a step waits for the next one or two as a rule."""
MOST_WAITING = 2048
"""Steps that wait for kernel records before the oldest is written without them."""


class StepQueue:
    """Resolves the steps of one rank in order; a step behind one that waits for its kernels waits too."""

    def __init__(self, settings: ResolverSettings, kernel_names: Sequence[str] = ()) -> None:
        """kernel_names: those that lines of earlier attempts refer to."""
        self._by_events = Resolver(settings)
        self._by_kernels = KernelSteps(settings, kernel_names)
        self._library = CollectiveSteps()
        self._unix_minus_monotonic_ns = settings.unix_minus_monotonic_ns
        self._waiting: deque[tuple[RawStep, bool]] = deque()

    @property
    def kernel_names(self) -> list[str]:
        return list(self._by_kernels.names)

    def kernel_coverage(self) -> KernelCoverage | None:
        """None where no step was timed by kernel records."""
        coverage = self._by_kernels.coverage()
        return coverage if coverage.num_steps else None

    def library_coverage(self) -> LibraryCoverage | None:
        """None where no step had events of the collective library."""
        return self._library.coverage()

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

    def add_collectives(self, chunk: CollectiveChunk) -> Iterator[tuple[StepRecord, bool]]:
        """The records that are ready now."""
        self._library.add(chunk)
        return self._ready()

    def finish(self) -> Iterator[tuple[StepRecord, bool]]:
        """What is left, with the kernel records that have come."""
        while self._waiting:
            yield self._resolve_first()

    def _ready(self) -> Iterator[tuple[StepRecord, bool]]:
        while self._waiting:
            step = self._waiting[0][0]
            if len(self._waiting) <= MOST_WAITING and not self._is_complete(step):
                return
            yield self._resolve_first()

    def _resolve_first(self) -> tuple[StepRecord, bool]:
        step, reply = self._waiting.popleft()
        events = self._library.of_step(step)
        if step.kernel_marks is not None:
            record = self._by_kernels.resolve(step)
        else:
            record = self._by_events.resolve(step, self._library.exact(events))
        return self._library.with_events(
            record, record.start_unix_ns - self._unix_minus_monotonic_ns, events
        ), reply

    def _is_complete(self, step: RawStep) -> bool:
        """Whether everything that was recorded beside the step has come."""
        if not self._library.is_complete(step):
            return False
        if step.kernel_marks is None:
            return True
        later = [step, *(waiting for waiting, _ in islice(self._waiting, 1, _LATER))]
        return self._by_kernels.is_complete(step, later)
