"""Bandwidth of collectives over their transfer, without the wait for late ranks."""

from collections.abc import Mapping, MutableMapping

import numpy as np

from aorta.account.load.arrays import derive
from aorta.account.load.rank.columns import Floats
from aorta.account.metrics import of_operation, operations


def busbw_by_transfer(metrics: MutableMapping[str, Floats]) -> None:
    """Bandwidth without the wait for late ranks, for operations whose transfer is known. Then steps whose
    transfer is not known have none: a column has one meaning."""
    for op in operations(metrics, "busbw_gb_s"):
        if not is_of_transfer(metrics, op):
            continue
        busbw, transfer, duration = (
            of_operation(name, op) for name in ("busbw_gb_s", "transfer_ms", "duration_ms")
        )
        derive(metrics, busbw, _of_transfer, busbw, transfer, duration)


def _of_transfer(busbw_gb_s: Floats, transfer_ms: Floats, duration_ms: Floats) -> Floats:
    longer = np.full(transfer_ms.shape, np.nan)
    np.divide(duration_ms, transfer_ms, out=longer, where=transfer_ms > 0)
    of_transfer: Floats = busbw_gb_s * longer
    return of_transfer


def is_of_transfer(metrics: Mapping[str, Floats], op: str) -> bool:
    """Returns True where busbw_gb_s.<op> is over the transfer: where that is known in at least half of the
    ranks' steps. Otherwise it is over the whole duration, which holds the wait for late ranks."""
    transfer_ms = metrics.get(of_operation("transfer_ms", op))
    if transfer_ms is None:
        return False
    num_known = (transfer_ms > 0).sum()
    del transfer_ms  # of a large run 80 MB
    num_timed = np.isfinite(metrics[of_operation("duration_ms", op)]).sum()
    return bool(0 < num_timed <= 2 * num_known)
