"""What the two ranks of the test of distributed workloads run."""

import warnings

import torch
import torch.distributed as dist

from aorta.queues.workload import WorkloadOptions
from aorta.queues.workloads import find, workloads
from aorta.queues.workloads.comms_compute_overlap import OverlapOptions
from aorta.queues.workloads.communication import make_lanes
from tests.queues.workloads.driver import driven

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def cases() -> list[tuple[str, int, WorkloadOptions]]:
    """(workload, streams, options)."""
    found = [
        (name, num, kind.Options())
        for name, kind in workloads().items()
        if kind.uses_collectives
        for num in (kind.min_streams, (kind.min_streams + kind.max_streams) // 2)
    ]
    for collective in COLLECTIVES:
        options = {"collective": collective, "num_coll": 3, "compute_streams": 2}
        found.append(("comms_compute_overlap", 5, OverlapOptions(**options)))
        halves = {"comm_dtype": "float16", "comp_dtype": "float32", "async_op": True}
        found.append(("comms_compute_overlap", 4, OverlapOptions(**options, **halves)))
    found.append(("comms_compute_overlap", 3, OverlapOptions(process_groups=((1,), (0,)))))
    return found


def run_cases() -> dict[str, str]:
    """What each case found wrong: nothing, it is hoped. The same order on both ranks."""
    warnings.simplefilter("error", FutureWarning)
    wrong = {}
    for name, num_streams, options in cases():
        with driven(find(name), num_streams, options, dist.group.WORLD) as ran:
            # 20 all-reduces in place: enough to leave the range of float16, were they not started over.
            ran.iterate(20 if name == "comms_compute_overlap" else 1)
            ran.iterate(2, join=False)
            for leg in ran.workload.legs().values():
                ran.iterate(1, work=leg)
            check = ran.workload.validate_correctness()
            if not check.ok:
                wrong[f"{name} {num_streams} {options}"] = check.detail
            if sorted(ran.pieces) != list(range(num_streams)):
                wrong[f"{name} {num_streams} {options} streams"] = str(sorted(ran.pieces))
    return wrong


def corrupted_on_one_rank() -> list[bool]:
    """Of every collective: whether each rank sees that rank 1 sent something else than it should have."""
    found = []
    for collective in COLLECTIVES:
        options = OverlapOptions(collective=collective)
        with driven(find("comms_compute_overlap"), 2, options, dist.group.WORLD) as ran:
            if dist.get_rank() == 1:
                ran.workload.collectives[0].source.add_(1)  # type: ignore[attr-defined]
            ran.iterate(1)
            found.append(ran.workload.validate_correctness().ok)
    return found


def lanes_are_kept() -> bool:
    """A second set of lanes takes the communicators of the first one, each lane one of its own."""
    with driven(find("moe"), 3, None, dist.group.WORLD) as ran:
        first, again = (make_lanes(ran.workload.context, 2) for _ in range(2))
        same = all(a.group is b.group for a, b in zip(first, again, strict=True))
        return same and len({id(lane.group) for lane in first}) == 2


def everything() -> tuple[dict[str, str], list[bool], bool]:
    torch.set_num_threads(1)
    return run_cases(), corrupted_on_one_rank(), lanes_are_kept()
