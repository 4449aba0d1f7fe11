"""Finds the stream on which a process group runs its asynchronous collectives: torch does not tell.

The event observer asks `finder_of` for a search at a group's first collective, and shows it each collective
that follows until the stream is found or the search is given up.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from aorta.device.event_clock import DeviceStream, EventClock

POOL_SIZE = 32
"""Streams in torch's pool, which it hands out in turn. Asking for all leaves the turn where it was."""
PER_LOOK = 4
"""Streams asked per collective, about 1 us each; a small collective would end before more are asked."""
MOST_LOOKS = 800
"""Limit of collectives that the search may take."""
NUM_CHECKS = 8
"""Comparisons with the last candidate before it may be taken; none may refute it."""
NUM_TOGETHER = 6
"""Comparisons that have to agree before the candidate is taken."""
MOST_CHECKS = 40
"""Limit of comparisons: after these the search is given up."""
TOGETHER_MS = 0.06
"""Longest delay of the waiting stream behind the candidate with which a comparison agrees."""
REFUTED_MS = -0.01
"""Delay below which a comparison refutes the candidate: the waiting stream came earlier."""


class GroupStreamFinder:
    """Finds which stream of torch's pool a process group runs its collectives on.

    After the launch of each collective `look` rules out streams that are idle while it runs. When one is
    left, `check` compares it with a stream that waits for the collective alone: both must pass together.
    """

    def __init__(self, pool: Sequence[DeviceStream], new_event: Callable[[], Any]) -> None:
        """pool: the streams it may be. new_event: makes a timing event."""
        self.stream: DeviceStream | None = None
        """The group's stream, once found."""
        self.given_up = not pool
        self._candidates: deque[DeviceStream] = deque(pool)
        self._new_event = new_event
        self._num_looks = 0
        self._num_checks = 0
        self._pending: deque[tuple[Any, Any]] = deque()
        """Events on the candidate and on the waiting stream that have not passed yet."""
        self._later_ms: list[float] = []
        """Delays of the waiting stream behind the candidate, as compared so far."""

    def look(self, work: Work, caller: int) -> None:
        """Rule out streams, right after the launch of `work`. Never blocks.

        caller: handle of the stream that it was called on, which is never the group's, however busy it is.
        """
        self._num_looks += 1
        candidates = self._candidates
        examined = [candidates[i] for i in range(min(PER_LOOK, len(candidates)))]
        candidates.rotate(-len(examined))
        idle = [stream for stream in examined if stream.stream.query()]
        # Asked last: what was idle before is so too when the work is pending now.
        ruled_out = idle if idle and not work.is_completed() else []
        for stream in examined:
            if stream in ruled_out or stream.raw == caller:
                candidates.remove(stream)
        if not candidates or self._num_looks >= MOST_LOOKS:
            self.given_up = True

    def check(self, waiting: Any) -> None:
        """Compare the last candidate with a stream that has just been told to wait for the work alone."""
        self._compare_passed()
        if self.stream is not None or self.given_up or len(self._candidates) != 1:
            return
        if self._num_checks >= MOST_CHECKS:
            self.given_up = True
            return
        self._num_checks += 1
        on_candidate, on_waiting = self._new_event(), self._new_event()
        on_candidate.record(self._candidates[0].stream)
        on_waiting.record(waiting)
        self._pending.append((on_candidate, on_waiting))

    def _compare_passed(self) -> None:
        pending = self._pending
        while pending and pending[0][0].query() and pending[0][1].query():
            on_candidate, on_waiting = pending.popleft()
            self._later_ms.append(on_candidate.elapsed_time(on_waiting))
        if any(ms < REFUTED_MS for ms in self._later_ms):
            self.given_up = True
        together = sum(ms <= TOGETHER_MS for ms in self._later_ms)
        if len(self._later_ms) >= NUM_CHECKS and together >= NUM_TOGETHER and not self.given_up:
            self.stream = self._candidates[0]


def finder_of(
    group: ProcessGroup, clock: EventClock, recorder_streams: Sequence[DeviceStream]
) -> GroupStreamFinder:
    """Make a search on the clock's device. recorder_streams: our own, which wait for the works too."""
    backend, device = clock.backend, clock.device
    priority = _priority(group, device)
    pool = [backend.new_stream(device, priority) for _ in range(POOL_SIZE)]
    distinct = {stream.raw: stream for stream in map(backend.device_stream, pool)}
    if any(stream.raw in distinct for stream in recorder_streams):
        distinct = {}  # the group may have been given the same stream: give up
    return GroupStreamFinder(list(distinct.values()), lambda: backend.new_event(True))


def _priority(group: ProcessGroup, device: torch.device) -> int:
    """Return the priority of the group's stream: torch has a pool for each."""
    if os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "0").lower() in ("1", "true", "t", "yes", "y", "on"):
        return -100
    options = getattr(group._get_backend(device), "options", None)
    high = getattr(options, "is_high_priority_stream", False)
    return -100 if high else 0  # torch takes the highest that there is
