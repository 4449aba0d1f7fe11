"""Raw steps whose times a test writes down."""

from dataclasses import dataclass, field

from aorta.steps.event_steps import EventSteps
from aorta.steps.raw import CallId, RawCall, RawGroup, RawMark, RawStep, ResolverSettings

AHEAD_MS = 10.0
"""The host of these tests queues everything this long before the device passes it."""


def at(ms: float, queued_ms: float | None = None, origin: float = 0.0) -> RawMark:
    """A mark that the device passes at ms; the host queued it long before, or at queued_ms (run time)."""
    queued = origin + ms - AHEAD_MS if queued_ms is None else queued_ms
    return (float(ms), int(queued * 1e6))


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
    groups: list[RawGroup] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    waits: list[tuple[RawMark, CallId]] = field(default_factory=list)
    stalls: list[tuple[RawMark, RawMark]] = field(default_factory=list)
    final_waits: list[tuple[RawMark, RawMark | None, list[CallId]]] = field(default_factory=list)
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
        index = next((i for i, g in enumerate(self.groups) if g.key == group), None)
        if index is None:
            index = len(self.groups)
            self.groups.append(RawGroup(group, group, list(range(num_ranks))))
        seq = 100 * self.number + len(self.calls)
        timed = reason is None
        self.calls.append(
            RawCall(
                index,
                op,
                "compute" if blocks else "group",
                num_bytes,
                "bfloat16",
                seq,
                is_async,
                blocks,
                at(start, queued, self.origin) if timed else None,
                int(launched * 1e6),
                at(end, None, self.origin) if timed else None,
                reason,
                None,
                blocks,
            )
        )
        return (group, seq)

    def wait(self, before: float, call: CallId) -> None:
        self.waits.append((at(before, None, self.origin), call))

    def stall(self, before: float, after: float) -> None:
        self.stalls.append((at(before, None, self.origin), at(after, None, self.origin)))

    def final_wait(self, before: float, after: float, calls: list[CallId]) -> None:
        self.final_waits.append((at(before, None, self.origin), at(after, None, self.origin), calls))

    def raw(self) -> RawStep:
        window_end = at(self.window_ms, self.window_end_queued, self.origin)
        return RawStep(
            global_step=self.number,
            step=self.number,
            epoch=0,
            tokens=None,
            start_ns=0,
            window_ms=float(self.window_ms),
            body_ms=float(self.body_ms),
            body_end_ns=at(self.body_ms, None, self.origin)[1],
            window_end_ns=window_end[1],
            host_ms=1.0,
            groups=self.groups,
            calls=self.calls,
            waits=self.waits,
            stalls=self.stalls,
            final_waits=self.final_waits,
            scalars={},
            memory=None,
            device=None,
            not_measured={},
            untimed=self.untimed,
        )
