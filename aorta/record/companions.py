"""What runs beside a recorder as long as it records: a watchdog, a profiler, a file of scalars."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from aorta.records.schema import StepRecord

log = logging.getLogger(__name__)

Cause = type[BaseException] | None
"""What ended the recording: the exception that left its `with`, None otherwise."""


class Accompanied(Protocol):
    """A recorder, as its companions know it. With a `journal`, the collectives are known too."""

    output_dir: Path
    rank: int
    world_size: int

    @property
    def store_prefix(self) -> str:
        """For keys in the job's store, which outlives a restart of the ranks: of this attempt of the run."""

    def on_record(self, callback: Callable[[StepRecord], None], /) -> None: ...


class Companion(Protocol):
    """Told of a recorder's life by the thread that lives it, each time once."""

    def opened(self, recorder: Accompanied) -> None:
        """Recording begins. What is raised here is the caller's error."""

    def step_begins(self, global_step: int) -> None:
        """Before anything of the step, recorded or not (a paused recorder)."""

    def step_ended(self, global_step: int) -> None:
        """After the step's body, unless that raised."""

    def closing(self, cause: Cause) -> None:
        """Before the instrument is taken off."""

    def closed(self, cause: Cause) -> None:
        """After the last record was written."""


class Companions:
    """Several. One that fails is left out from then on, with a line in the log: training goes on."""

    def __init__(self, companions: Iterable[Companion] = ()) -> None:
        self._all = list(companions)

    def add(self, companion: Companion) -> None:
        self._all.append(companion)

    def opened(self, recorder: Accompanied) -> None:
        for companion in self._all:
            companion.opened(recorder)

    def step_begins(self, global_step: int) -> None:
        for companion in self._all:
            self._tell(companion, lambda c: c.step_begins(global_step))

    def step_ended(self, global_step: int) -> None:
        for companion in self._all:
            self._tell(companion, lambda c: c.step_ended(global_step))

    @contextmanager
    def pausing(self, activity: str) -> Iterator[None]:
        """Tell those that care (a watchdog) that what follows is no step."""
        with ExitStack() as stack:
            for companion in self._all:
                pausing = getattr(companion, "pausing", None)
                if pausing is not None:
                    stack.enter_context(pausing(activity))
            yield

    def closing(self, cause: Cause) -> None:
        for companion in reversed(self._all):
            self._tell(companion, lambda c: c.closing(cause))

    def closed(self, cause: Cause) -> None:
        for companion in reversed(self._all):
            self._tell(companion, lambda c: c.closed(cause))

    def _tell(self, companion: Companion, act: Callable[[Companion], None]) -> None:
        try:
            act(companion)
        except Exception:
            log.exception("%s ends here, training goes on", type(companion).__name__)
            self._all = [member for member in self._all if member is not companion]
