"""What a window of kernel tracing says about the bias of event numbers.

Events cannot see gaps in which the compute stream has nothing queued: such time counts as
compute, and as hidden where a collective runs beside it. Records bound it (starved_bound_ms and
its hidden part). A kernel window of other steps tells which share of the bound is really idle,
and by how much a collective's kernel starts after its start mark.
"""

import msgspec

from aorta.timeline.types import Calibrated, OverlapRecord


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Corrections learned from the steps in `steps`; never judge them on those."""

    steps: list[int]
    starved_idle_share: float
    """Share of starved_bound_ms in which the compute stream was idle in the kernel windows."""
    busy_share: float
    """compute_stream.compute_ms / (compute_ms - idle part of the starved bound): gaps between
    kernels that are too short for events."""
    comm_share: float
    """comm_ms of the kernels / comm_ms of the events."""

    def apply(self, record: OverlapRecord, starved_ms: float, starved_hidden_ms: float) -> Calibrated | None:
        """The event numbers of another step after correction."""
        if record.compute_ms is None or record.comm_ms is None or record.hidden_ms is None:
            return None
        if record.idle_ms is None or record.exposed_ms is None:
            return None
        step_ms = record.compute_ms + record.exposed_ms + record.idle_ms
        compute = (record.compute_ms - self.starved_idle_share * starved_ms) * self.busy_share
        hidden = (record.hidden_ms - self.starved_idle_share * starved_hidden_ms) * self.busy_share
        comm = record.comm_ms * self.comm_share
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

    The share of starved time that is idle is estimated over all steps together; where the bound
    is under 1 % of the compute time it says nothing, and the share is 0.
    """
    usable = [
        (step, events, kernels)
        for step, events, kernels in pairs
        if None not in (events.compute_ms, events.comm_ms, events.starved_bound_ms)
        and kernels.compute_stream is not None
        and kernels.comm_ms is not None
    ]
    if not usable:
        return None
    event_compute = sum(e.compute_ms or 0.0 for _, e, _ in usable)
    kernel_compute = sum(k.compute_stream.compute_ms for _, _, k in usable if k.compute_stream)
    starved = sum(e.starved_bound_ms or 0.0 for _, e, _ in usable)
    event_comm = sum(e.comm_ms or 0.0 for _, e, _ in usable)
    kernel_comm = sum(k.comm_ms or 0.0 for _, _, k in usable)
    share = 0.0
    if starved > 0.01 * event_compute:
        share = min(1.0, max(0.0, (event_compute - kernel_compute) / starved))
    busy = event_compute - share * starved
    return Calibration(
        steps=[step for step, _, _ in usable],
        starved_idle_share=share,
        busy_share=min(1.0, kernel_compute / busy) if busy > 0 else 1.0,
        comm_share=kernel_comm / event_comm if event_comm > 0 else 1.0,
    )
