"""Companions: what runs beside a recorder as long as it records, such as a watchdog or a profiler.

aorta.attach.instrument makes them; the recorder calls them through Companions.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from aorta.records.schema import StepRecord

log = logging.getLogger(__name__)

Cause = type[BaseException] | None
"""The exception that left the recorder's `with`; None where none did."""


class Accompanied(Protocol):
    """The part of a recorder that companions may know. One with a `journal` knows the collectives too."""

    output_dir: Path
    rank: int
    world_size: int

    @property
    def store_prefix(self) -> str:
        """Prefix of keys in the job's store, one per attempt: the store outlives a restart of the ranks."""

    def on_record(self, callback: Callable[[StepRecord], None], /) -> None: ...


class Companion:
    """Called at each stage of a recorder's life, once, on the thread that trains. Does nothing by itself."""

    may_change_steps = True
    """What it does as a step begins or ends may put something on that the step has to know of."""

    def opened(self, recorder: Accompanied) -> None:
        """Begin, with the recording. An exception here reaches the caller of `with`."""

    def step_begins(self, global_step: int) -> None:
        """Called before anything of the step, also while the recorder is paused."""

    def step_ended(self, global_step: int) -> None:
        """Called after the step's body, unless that raised."""

    def pausing(self, activity: str) -> AbstractContextManager[None]:
        """Return a context around what is no step."""
        return nullcontext()

    def closing(self, cause: Cause) -> None:
        """Called before the instrument is taken off."""

    def closed(self, cause: Cause) -> None:
        """Called after the last record was written."""


class Companions:
    """Passes each call on to all companions. One that fails is logged and left out: training goes on."""

    def __init__(self) -> None:
        self._all: list[Companion] = []
        self.may_change_steps = False

    def add(self, companion: Companion) -> None:
        self._all.append(companion)
        self.may_change_steps = self.may_change_steps or companion.may_change_steps

    def goes_on(self, global_step: int) -> None:
        """Tell them that a step ends and the next one begins. global_step: of the one that ends."""
        if self._all:
            self.step_ended(global_step)
            self.step_begins(global_step + 1)

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
        """Enclose what is no step, and tell every companion."""
        with ExitStack() as stack:
            for companion in self._all:
                stack.enter_context(companion.pausing(activity))
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
