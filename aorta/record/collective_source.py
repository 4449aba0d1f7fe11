"""The collective library's own events (NCCL, RCCL) beside a training loop.

The plugin is named to the library before it makes a communicator, and switched on and off by step.
"""

import logging
from time import monotonic_ns
from typing import Any, Literal, get_args

from aorta.device.collective_events import CollectiveEvents, LibraryEventsUnavailable, open_events
from aorta.errors import InstrumentError
from aorta.steps.raw import CollectiveChunk

logger = logging.getLogger(__name__)

Collectives = Literal["learned", "calls", "plugin"]
GIVEN_UP_NS = 5_000_000_000
"""Age from which on an event that has not ended is taken as it is."""
NOT_ASKED_FOR = "not asked for (collectives is not 'plugin')"
NOT_LOADED = (
    "NCCL has not loaded the plugin: it made its communicators before the instrument, or is older than 2.24; "
    "call aorta.instrument before init_process_group, or use aorta run --collectives plugin"
)


class CollectiveSource:
    """The events of one recorder."""

    def __init__(self, collectives: Collectives) -> None:
        """Name the plugin to the library, which asks when it makes its first communicator."""
        if collectives not in get_args(Collectives):
            raise InstrumentError(f"collectives must be 'learned', 'calls' or 'plugin', got {collectives!r}")
        self._events: CollectiveEvents | None = None
        self._num_names_sent = 0
        self._is_asleep = False
        self._num_captures = 0
        self._records_step = False
        self.reason: str | None = NOT_ASKED_FOR
        """Reason why there are no events; None where there are."""
        if collectives == "plugin":
            try:
                self._events = open_events()
                self.reason = None
            except LibraryEventsUnavailable as error:
                self.reason = str(error)
                logger.warning("no events of the collective library: %s", error)

    def begin_step(self, recorded: bool = True) -> bool:
        """Switch recording on or off for the step that begins; True: its collectives are recorded."""
        events = self._events
        if events is None:
            return False
        self._records_step = not self._is_asleep and recorded
        self._switch(events)
        return self._records_step

    def sleep(self) -> None:
        """Record nothing until `wake`."""
        self._is_asleep = True
        if self._events is not None:
            self._events.record(False)

    def wake(self) -> None:
        """Record again, from the next step on."""
        self._is_asleep = False

    def capturing(self, num_open: int) -> None:
        """Pause while graphs are captured: an event would put a host function into them."""
        self._num_captures = num_open
        if self._events is not None:
            self._switch(self._events)

    def _switch(self, events: CollectiveEvents) -> None:
        events.record(self._records_step and not self._is_asleep and self._num_captures == 0)

    def poll(self, closing: bool = False) -> CollectiveChunk | None:
        """Return what has ended since the last poll; None where nothing can come. closing: return all."""
        events = self._events
        if events is None:
            return None
        now_ns = monotonic_ns()
        parts = []
        while part := events.take(now_ns if closing else now_ns - GIVEN_UP_NS):
            parts.append(part)
        names = events.names(self._num_names_sent, events.num_names)
        self._num_names_sent = events.num_names
        return CollectiveChunk(b"".join(parts), names, events.complete_ns, events.num_lost)

    def described(self, had_communicators: bool) -> dict[str, Any]:
        """Describe the events for run.json. had_communicators: the program used NCCL or RCCL."""
        events = self._events
        if events is None:
            return {"reason": self.reason}
        if events.version == 0:
            return {"reason": NOT_LOADED if had_communicators else "no communicator of NCCL or RCCL was made"}
        return {
            "reason": None,
            "interface": events.version,
            "communicators": events.num_communicators,
            "times": "none" if events.version == 2 else "host" if events.version == 3 else "device",
        }
