"""Steps that the overhead left out: what is known of them all the same.

Their lines have the step by the host's clock and what the host did. Where a process communicates with nobody
that is all there is to know on a CPU: it computes whenever it is in a step.
"""

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.arrays import Sides
from aorta.account.rows import row_blocks


def left_out_steps(sides: Sides) -> NDArray[np.bool_]:
    """[step]: no rank has times of the source in it, and other steps have."""
    is_timed = np.zeros(sides.metrics.shape[1], dtype=bool)
    for rows in row_blocks(sides.metrics.shape):
        is_timed |= np.isfinite(sides.metrics["compute_ms"][rows]).any(axis=0)
    result: NDArray[np.bool_] = ~is_timed & is_timed.any()
    return result


def complete_alone(sides: Sides, left_out: NDArray[np.bool_]) -> None:
    """Fill in what source host would have noted of these steps, in a run of one process none of whose
    recorded steps communicates."""
    metrics = sides.metrics
    is_alone = metrics.shape[0] == 1 and not np.nan_to_num(metrics["comm_ms"]).any()
    if not left_out.any() or not is_alone or sides.integers["num_collectives"].any():
        return
    step_ms, between_ms = metrics["step_ms"], metrics["between_steps_ms"]
    noted = {"compute_ms": step_ms - between_ms, "idle_ms": between_ms}
    none = ("comm_ms", "hidden_ms", "exposed_ms", "hidden_per_compute")
    for name, values in noted.items():
        metrics[name] = np.where(left_out, values, metrics[name])
    for name in (*none, "compute_allreduce_ms", "compute_reducescatter_ms", "stalled_ms"):
        metrics[name] = np.where(left_out & np.isfinite(step_ms), 0.0, metrics[name])
