"""What a window of kernel tracing says about the bias of event numbers.

Events cannot see the gaps between kernels: the microsecond between one kernel and the next, and
the longer ones in which the host is late. Both count as compute, and as hidden where a collective
runs beside them. A collective's start mark fires before its kernel has found room on the device.
A kernel window of other steps tells how much of each event number is real, apart for the time in
which the host was late (the starved bounds of the record) and the rest.
"""

from statistics import median

import msgspec
import numpy as np

from aorta.timeline.types import Calibrated, OverlapRecord

SPREAD = 0.15
"""Starved shares of the compute time that differ by less say nothing about starved time apart, and
steps whose share lies further outside the window's range are left as they are."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Kernel ms / event ms over the steps of a window; never judge it on those."""

    steps: list[int]
    comm_share: float
    compute_share: float
    """Of the compute stream's kernels, as hidden_share."""
    compute_share_starved: float
    hidden_share: float
    hidden_share_starved: float
    starved_range: tuple[float, float]
    """Least and greatest starved_bound_ms / compute_ms of the window's steps."""

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
        low, high = self.starved_range
        if not low - SPREAD <= _starved_share(record) <= high + SPREAD:
            return None
        step_ms = record.compute_ms + record.exposed_ms + record.idle_ms
        starved = record.starved_bound_ms or 0.0
        starved_hidden = record.starved_hidden_bound_ms or 0.0
        compute = self.compute_share * (record.compute_ms - starved) + self.compute_share_starved * starved
        hidden = (
            self.hidden_share * (record.hidden_ms - starved_hidden)
            + self.hidden_share_starved * starved_hidden
        )
        comm = record.comm_ms * self.comm_share
        compute = min(compute, step_ms)
        hidden = min(hidden, comm, compute)
        return Calibrated(
            compute_ms=compute,
            comm_ms=comm,
            hidden_ms=hidden,
            exposed_ms=comm - hidden,
            idle_ms=max(0.0, step_ms - compute - (comm - hidden)),
        )


def calibrate(pairs: list[tuple[int, OverlapRecord, OverlapRecord]]) -> Calibration | None:
    """From (global step, event record, kernel record) of the same steps; None without any.

    Pairs of all ranks may be put together: where the host is the bottleneck on one rank, the others
    wait for it, and only together do the ranks show both kinds of step.
    """
    rows = [
        (step, events, kernels, kernels.compute_stream)
        for step, events, kernels in pairs
        if kernels.compute_stream is not None and events.compute_ms and events.hidden_ms is not None
    ]
    if not rows:
        return None
    starved_shares = [_starved_share(events) for _, events, _, _ in rows]
    spread = max(starved_shares) - min(starved_shares)
    compute = _two_shares(
        [(e.compute_ms or 0.0, e.starved_bound_ms or 0.0, same.compute_ms) for _, e, _, same in rows], spread
    )
    hidden = _two_shares(
        [(e.hidden_ms or 0.0, e.starved_hidden_bound_ms or 0.0, same.hidden_ms) for _, e, _, same in rows],
        spread,
    )
    comm = [(k.comm_ms or 0.0) / e.comm_ms for _, e, k, _ in rows if e.comm_ms]
    return Calibration(
        steps=sorted({step for step, _, _, _ in rows}),
        comm_share=median(comm) if comm else 1.0,
        compute_share=compute[0],
        compute_share_starved=compute[1],
        hidden_share=hidden[0],
        hidden_share_starved=hidden[1],
        starved_range=(min(starved_shares), max(starved_shares)),
    )


def _two_shares(rows: list[tuple[float, float, float]], spread: float) -> tuple[float, float]:
    """(share of the rest, share of starved time) that best explain the kernels' ms.

    rows: event ms, the starved part of it, kernel ms. One share for both where the steps are too
    alike to tell the two apart.
    """
    known = [row for row in rows if row[0] > 0]
    if not known:
        return 1.0, 1.0
    alike = median(kernel / event for event, _, kernel in known)
    if spread < SPREAD:
        return alike, alike
    parts = np.array([(event - starved, starved) for event, starved, _ in known])
    truth = np.array([kernel for _, _, kernel in known])
    rest, starved_share = np.linalg.lstsq(parts, truth, rcond=None)[0].tolist()
    if not (0.0 <= rest <= 1.5 and 0.0 <= starved_share <= 1.5):
        return alike, alike
    return rest, starved_share


def _starved_share(record: OverlapRecord) -> float:
    if not record.compute_ms:
        return 0.0
    return (record.starved_bound_ms or 0.0) / record.compute_ms
