"""The collectives of a run by kind, over the judged steps."""

import numpy as np
from numpy.typing import NDArray

from aorta.report.model import CollectiveKind, CollectiveRow, Run
from aorta.timeline.collective import busbw_factor

Floats = NDArray[np.float64]


def collective_rows(run: Run, num_warmup: int) -> list[CollectiveRow]:
    """What the steps after the first num_warmup have, what takes longest in a step first."""
    judged = np.flatnonzero(run.has_collectives) >= num_warmup
    rows = [_row(kind, judged) for kind in run.collectives] if judged.any() else []
    present = [row for row in rows if row.count_per_step > 0]
    return sorted(present, key=lambda row: -(row.count_per_step * (row.duration_ms or 0.0)))


def _row(kind: CollectiveKind, judged: NDArray[np.bool_]) -> CollectiveRow:
    durations, waits, transfers = (
        _medians(values[:, judged]) for values in (kind.duration_ms, kind.wait_ms, kind.transfer_ms)
    )
    duration, transfer = _median(durations), _median(transfers)
    moved_in = transfer or duration
    busbw = None
    if kind.bytes and kind.num_ranks and moved_in:  # neither unknown nor 0 bytes, as a barrier's
        busbw = kind.bytes / moved_in / 1e6 * busbw_factor(kind.op, kind.num_ranks)
    return CollectiveRow(
        op=kind.op,
        bytes=kind.bytes,
        dtype=kind.dtype,
        num_ranks=kind.num_ranks,
        stream=kind.stream,
        count_per_step=float(np.nanmean(kind.count[:, judged])),
        duration_ms=duration,
        duration_min_ms=min(durations, default=None),
        duration_max_ms=max(durations, default=None),
        wait_ms=_median(waits),
        transfer_ms=transfer,
        busbw_gb_s=busbw,
    )


def _medians(values: Floats) -> list[float]:
    """Over steps, of each rank that has any."""
    return [float(np.median(measured)) for row in values if len(measured := row[~np.isnan(row)])]


def _median(medians: list[float]) -> float | None:
    return float(np.median(medians)) if medians else None
