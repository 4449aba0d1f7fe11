"""Parts of the time between the bound and the measurement. Plain arithmetic.

    bound              max(T_comm, T_gemm), each alone in one piece
    fill               the first or last slice, which cannot be hidden: min(T_comm, T_gemm) / S
    decomposition      slices of a kind, alone, take longer together than the whole in one piece
    dependency_waste   waits that the data does not need
    interference       slices take longer while the other kind runs
    scheduling_gap     measured, with the host ahead, over all of the above
    host_gap           measured over that with the host ahead

Each row is a difference of two figures of the same model, so that the rows sum to the time; one of them
can be negative (a slice that gains from the other's gap, a model that is too strict).
"""

from collections.abc import Callable
from dataclasses import dataclass

Model = Callable[[float, float, bool], float]
"""(all comm slices ms, all gemm slices ms, required edges only) -> ms without any other cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians in ms. slices: all of one kind, without the other; beside: while the other kind runs."""

    time: float
    time_host_ahead: float
    comm: float
    gemm: float
    comm_slices: float
    gemm_slices: float
    comm_beside: float
    gemm_beside: float
    exposed_comm: float
    exposed_gemm: float


def pipeline_bound_ms(comm_ms: float, gemm_ms: float, exposed_comm: float, exposed_gemm: float) -> float:
    """Least time of any order of these slices: the longer kind, and the share of the other it cannot hide.

    With S equal slices and every multiply needing one of the communications both shares are 1/S, and this is
    max + min / S.
    """
    return max(gemm_ms + exposed_comm * comm_ms, comm_ms + exposed_gemm * gemm_ms)


def waterfall(measured: Measured, model: Model) -> dict[str, float]:
    """Rows in ms that sum to measured.time, in the order of the module's table."""
    m = measured
    levels = {
        "bound": max(m.comm, m.gemm),
        "fill": pipeline_bound_ms(m.comm, m.gemm, m.exposed_comm, m.exposed_gemm),
        "decomposition": model(m.comm_slices, m.gemm_slices, True),
        "dependency_waste": model(m.comm_slices, m.gemm_slices, False),
        "interference": model(m.comm_beside, m.gemm_beside, False),
        "scheduling_gap": m.time_host_ahead,
        "host_gap": m.time,
    }
    rows, reached = {}, 0.0
    for name, level in levels.items():
        rows[name] = level - reached
        reached = level
    return rows
