"""A device whose times a test writes down: marks know when the device passes them."""

from aorta.device.anchors import DeviceClock
from aorta.device.marks import Mark
from aorta.recording.calls import Call, FinalWait, Group, Stall, Step, Wait
from aorta.recording.resolve import Resolver

AHEAD_NS = 10_000_000
"""The host of these tests queues everything this long before the device passes it."""


class FakeDevice:
    """MarkClock of a device: a mark's event is the time in ms at which it passes."""

    is_device = True

    def mark(self, stream: object = None) -> Mark:
        raise AssertionError("these tests place their marks by hand")

    def passed(self, mark: Mark) -> bool:
        return True

    def distance_ms(self, start: Mark, end: Mark) -> float:
        assert isinstance(start.event, float)
        assert isinstance(end.event, float)
        return end.event - start.event

    def recycle(self, marks: list[Mark]) -> None:
        return None


def at(ms: float, queued_ms: float | None = None) -> Mark:
    """A mark that the device passes at ms; the host queued it long before, or at queued_ms."""
    queued = ms * 1e6 - AHEAD_NS if queued_ms is None else queued_ms * 1e6
    return Mark(int(queued), float(ms))


def resolver() -> Resolver:
    """Device ms 0 is host time 0."""
    return Resolver(FakeDevice(), DeviceClock(0, 0), 0, rank=0, world_size=2, detail_every=1)


def group(name: str = "dp", num_ranks: int = 2) -> Group:
    return Group(name, name, list(range(num_ranks)), "nccl")


def step(start: float, body_end: float, window_end: float, number: int = 0, **queued: float) -> Step:
    made = Step(number, number, 0, None)
    made.start, made.body_end = at(start), at(body_end)
    made.window_end = at(window_end, queued.get("window_end_queued"))
    return made


def call(
    of: Step,
    op: str,
    start: float,
    end: float,
    *,
    blocks: bool = False,
    is_async: bool = False,
    launched_ms: float | None = None,
    in_group: Group | None = None,
    num_bytes: int = 1000,
) -> Call:
    made = Call(in_group or group(), op, num_bytes, "bfloat16", is_async)
    made.start, made.end = at(start), at(end)
    made.blocks, made.stream = blocks, "compute" if blocks else "group"
    made.launched_ns = 0 if launched_ms is None else int(launched_ms * 1e6)
    of.calls.append(made)
    return made


def waits(of: Step, before: float, for_call: Call) -> None:
    of.waits.append(Wait(at(before), for_call))


def stalls(of: Step, before: float, after: float) -> None:
    of.stalls.append(Stall(at(before), at(after)))


def final_wait(of: Step, before: float, after: float, calls: list[Call]) -> None:
    wait = FinalWait(at(before), calls)
    wait.after = at(after)
    of.final_waits.append(wait)
