"""Cores of the host: what ranks, others and nobody had of those that a process may use."""

from typing import NamedTuple

import numpy as np

from aorta.account.load.measures import usable_cores
from aorta.account.load.rank.host import CPU
from aorta.account.metrics import CORES
from aorta.account.model import Run, once_of_run
from aorta.account.rows import positive


class CoresHad(NamedTuple):
    """Means over the judged steps, of the cores of one machine that its ranks share."""

    num: int
    ranks: float
    """By all threads of the processes of its ranks; of several machines on the one where they have most."""
    helpers: float
    """Of these, by threads beside those that train, a mean over ranks."""
    others: float
    """By other processes, as the system counted over the run."""

    @property
    def free(self) -> float:
        return max(self.num - self.ranks - self.others, 0.0)


@once_of_run
def cores_had(judged: Run) -> CoresHad | None:
    """None where any of it was not measured."""
    usable, whole = usable_cores(judged.noted), judged.whole
    if usable is None or usable.others is None or CORES not in whole.metrics or CPU not in whole.host_parts:
        return None
    used, own_ms = whole.values(CORES), whole.host_parts[CPU][:, whole.judged_steps]
    step_ms = np.where(np.isfinite(used + own_ms), positive(whole.values("step_ms")), 0.0)
    total_ms = step_ms.sum(axis=1)
    if not (total_ms > 0).all():
        return None
    by_rank = (positive(used) * step_ms).sum(axis=1) / total_ms
    helpers = by_rank - np.where(step_ms > 0, positive(own_ms), 0.0).sum(axis=1) / total_ms
    machines = np.array(whole.ranks) // usable.num_ranks
    most = max(float(by_rank[machines == one].mean()) for one in np.unique(machines))
    of_mean_rank = float(by_rank[machines == machines[0]].mean() / max(by_rank[0], 1e-9))
    usable = usable_cores(judged.noted, of_mean_rank) or usable
    return CoresHad(
        usable.num, most * usable.num_ranks, max(float(helpers.mean()), 0.0), usable.others or 0.0
    )
