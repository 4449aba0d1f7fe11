"""Where training stands: how many steps it had done before this process, over restarts and whole jobs.

Told by the state of its optimizers, which a checkpoint brings back. A process that loaded nothing begins at
0. Where a model was loaded and no optimizer tells, the position is not known.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Position(NamedTuple):
    num_steps: int
    """Steps of the optimizer that had been done."""
    told_by: str
    """optimizer: by its state. program: it loaded nothing, so it begins."""


def position_of(optimizers: Iterable[Any], has_loaded: bool) -> Position | None:
    """Where training stands before its first step. has_loaded: a model's or an optimizer's state was loaded.

    Of several optimizers the one with fewest steps counts: others may take several in an iteration.
    """
    counts = [count for count in map(_steps_of, optimizers) if count is not None]
    if counts:
        return Position(min(counts), "optimizer")
    return None if has_loaded else Position(0, "program")


def _steps_of(optimizer: Any) -> int | None:
    """Steps in the state of torch's optimizers; None where there is no state, or one without a count."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            return int(step)
    return None
