"""What a window of kernel tracing says about the bias of event numbers.

Events cannot see the gaps between kernels: the microsecond between one kernel and the next, and
the longer ones in which the host is late. Both count as compute, and as hidden where a collective
runs beside them. A collective's start mark fires before its kernel has found room on the device.
A kernel window of other steps tells how much of each event number is real.
"""

from statistics import median

import msgspec

from aorta.timeline.types import Calibrated, OverlapRecord

MAX_STARVED_DIFFERENCE = 0.15
"""Steps whose starved share of the compute time differs by more from the window's behave differently:
their numbers are left as they are."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel number / event number, median over the steps of a window; never judge it on those."""

    steps: list[int]
    comm_share: float
    compute_share: float
    """Of the compute stream's kernels, as hidden_share."""
    hidden_share: float
    starved_share: float
    """starved_bound_ms / compute_ms of the events in the window."""

    def apply(self, record: OverlapRecord) -> Calibrated | None:
        """The event numbers of another step after correction; None where the step is not comparable."""
        if (
            record.comm_ms is None
            or record.compute_ms is None
            or record.hidden_ms is None
            or record.exposed_ms is None
            or record.idle_ms is None
        ):
            return None
        if abs(_starved_share(record) - self.starved_share) > MAX_STARVED_DIFFERENCE:
            return None
        step_ms = record.compute_ms + record.exposed_ms + record.idle_ms
        comm = record.comm_ms * self.comm_share
        compute = min(record.compute_ms * self.compute_share, step_ms)
        hidden = min(record.hidden_ms * self.hidden_share, comm, compute)
        return Calibrated(
            compute_ms=compute,
            comm_ms=comm,
            hidden_ms=hidden,
            exposed_ms=comm - hidden,
            idle_ms=max(0.0, step_ms - compute - (comm - hidden)),
        )


def calibrate(pairs: list[tuple[int, OverlapRecord, OverlapRecord]]) -> Calibration | None:
    """From (global step, event record, kernel record) of the same steps; None without any."""
    comm: list[float] = []
    compute: list[float] = []
    hidden: list[float] = []
    starved: list[float] = []
    steps: list[int] = []
    for step, events, kernels in pairs:
        truth = kernels.compute_stream
        if truth is None or kernels.comm_ms is None:
            continue
        if not events.compute_ms or events.comm_ms is None or events.hidden_ms is None:
            continue
        steps.append(step)
        comm.append(_share(kernels.comm_ms, events.comm_ms))
        compute.append(_share(truth.compute_ms, events.compute_ms))
        hidden.append(_share(truth.hidden_ms, events.hidden_ms))
        starved.append(_starved_share(events))
    if not steps:
        return None
    return Calibration(
        steps=steps,
        comm_share=median(comm),
        compute_share=median(compute),
        hidden_share=median(hidden),
        starved_share=median(starved),
    )


def _share(kernels_ms: float, events_ms: float) -> float:
    return kernels_ms / events_ms if events_ms > 0 else 1.0


def _starved_share(record: OverlapRecord) -> float:
    if not record.compute_ms:
        return 0.0
    return (record.starved_bound_ms or 0.0) / record.compute_ms
