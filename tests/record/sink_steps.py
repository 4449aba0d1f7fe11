"""Steps for the sinks that resolve them: raw ones, and as they are when they are closed."""

from aorta.steps.notes import CollectiveCall, Group, Mark, RecordedStep, ResolverSettings
from tests.steps.event_marks import Made

SETTINGS = ResolverSettings(
    rank=0,
    world_size=2,
    on_device=True,
    clock_lower_ns=0,
    clock_upper_ns=0,
    unix_minus_monotonic_ns=0,
)

GROUP = Group("0", "default", [0, 1], "nccl")


class OnItsWay:
    """A number that the device has not given yet."""


def closed_step(number: int, by_kernels: bool = True) -> RecordedStep:
    """32 tokens, three collectives, and a loss that the device has not given yet."""
    step = RecordedStep(number, number, 0, 32)
    step.by_kernels = by_kernels
    step.start, step.body_end, step.window_end = (Mark(1000 * number + ns) for ns in (0, 800, 1000))
    step.host_start_ns, step.host_end_ns = 1000 * number, 1000 * number + 900
    step.calls = [CollectiveCall(GROUP, "all_reduce", 64, "float32", True, issued_ns=0) for _ in range(3)]
    step.scalars = {"lr": 0.5, "loss": OnItsWay()}
    return step


def steps(num: int) -> list[RecordedStep]:
    made = []
    for number in range(num):
        step = Made(10, 10, number=number, origin=10.0 * number)
        call = step.call("all_reduce", 2, 8, is_async=True)
        step.wait(5, call)
        step.call("all_gather", 9, 12)
        made.append(step.noted())
    return made
