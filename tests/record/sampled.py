"""A recorder that records the steps of a pattern, in place of what it would choose by their cost."""

from aorta.record import Recorder


def record_every(recorder: Recorder, period: int) -> Recorder:
    """Have one step of `period` recorded, step 0 first."""
    sampling = recorder._sampling
    numbers = [0]

    def begin(global_step: int) -> bool:
        numbers[0] = global_step
        return global_step % period == 0

    sampling.begin = begin  # type: ignore[method-assign]
    sampling.comes_next = lambda: (numbers[0] + 1) % period == 0  # type: ignore[method-assign]
    return recorder
