"""Steps by events whose times a test writes down."""

from dataclasses import dataclass, field

from aorta.steps.event_steps import EventSteps
from aorta.steps.notes import (
    CallId,
    CollectiveCall,
    FinalWait,
    Group,
    Mark,
    RecordedStep,
    ResolverSettings,
    Stall,
    StreamWait,
)

AHEAD_MS = 10.0
"""The host of these tests queues everything this long before the device passes it."""


def at(ms: float, queued_ms: float | None = None, origin: float = 0.0) -> Mark:
    """A mark that the device passes at ms; the host queued it long before, or at queued_ms (run time)."""
    queued = origin + ms - AHEAD_MS if queued_ms is None else queued_ms
    return Mark(int(queued * 1e6), ms=float(ms))


def event_steps() -> EventSteps:
    """Device ms 0 is host time 0."""
    return EventSteps(
        ResolverSettings(
            rank=0,
            world_size=2,
            on_device=True,
            clock_lower_ns=0,
            clock_upper_ns=0,
            unix_minus_monotonic_ns=0,
        )
    )


@dataclass
class Made:
    """A step of the given length, its times relative to its start."""

    body_ms: float
    window_ms: float
    number: int = 0
    origin: float = 0.0
    window_end_queued: float | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)
    waits: list[StreamWait] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    final_waits: list[FinalWait] = field(default_factory=list)
    untimed: str | None = None

    def call(
        self,
        op: str,
        start: float,
        end: float,
        *,
        blocks: bool = False,
        is_async: bool = False,
        queued: float | None = None,
        launched: float = 0.0,
        group: str = "dp",
        num_ranks: int = 2,
        num_bytes: int = 1000,
        reason: str | None = None,
    ) -> CallId:
        """launched and queued are in run time."""
        made = self.groups.setdefault(group, Group(group, group, list(range(num_ranks))))
        self.calls.append(
            CollectiveCall(
                made,
                op,
                num_bytes,
                "bfloat16",
                is_async,
                seq=100 * self.number + len(self.calls),
                stream="compute" if blocks else "group",
                start=at(start, queued, self.origin) if reason is None else None,
                launched_ns=int(launched * 1e6),
                end=at(end, None, self.origin) if reason is None else None,
                on_compute=blocks,
                blocks=blocks,
                reason=reason,
            )
        )
        return self.calls[-1].id

    def wait(self, before: float, call: CallId) -> None:
        self.waits.append(StreamWait(at(before, None, self.origin), call))

    def stall(self, before: float, after: float) -> None:
        self.stalls.append(Stall(at(before, None, self.origin), at(after, None, self.origin)))

    def final_wait(self, before: float, after: float, calls: list[CallId]) -> None:
        self.final_waits.append(FinalWait(at(before, None, self.origin), calls, at(after, None, self.origin)))

    def noted(self) -> RecordedStep:
        return RecordedStep(
            self.number,
            self.number,
            0,
            None,
            start=Mark(0),
            body_end=at(self.body_ms, None, self.origin),
            window_end=at(self.window_ms, self.window_end_queued, self.origin),
            host_end_ns=1_000_000,
            calls=self.calls,
            waits=self.waits,
            stalls=self.stalls,
            final_waits=self.final_waits,
            untimed=self.untimed,
        )
