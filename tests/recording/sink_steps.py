"""Raw steps for the sinks that resolve them."""

from aorta.steps.raw import RawStep, ResolverSettings
from tests.steps.raw_steps import Made

SETTINGS = ResolverSettings(
    rank=0,
    world_size=2,
    on_device=True,
    detail_every=1,
    clock_lower_ns=0,
    clock_upper_ns=0,
    unix_minus_monotonic_ns=0,
)


def steps(num: int) -> list[RawStep]:
    made = []
    for number in range(num):
        step = Made(10, 10, number=number, origin=10.0 * number)
        call = step.call("all_reduce", 2, 8, is_async=True)
        step.wait(5, call)
        step.call("all_gather", 9, 12)
        made.append(step.raw())
    return made
