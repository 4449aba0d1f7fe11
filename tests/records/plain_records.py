"""The smallest records of a step and of a run."""

from aorta.records.schema import RunRecord, StepRecord
from aorta.timeline.types import OverlapRecord


def step(global_step=0, **changes):
    fields = dict(
        rank=0,
        world_size=1,
        epoch=0,
        step=global_step,
        global_step=global_step,
        loss=1.5,
        lr=None,
        grad_norm=None,
        tokens=8,
        source="events",
        start_unix_ns=10**18,
        clock_error_us=None,
        step_ms=10.0,
        between_steps_ms=0.0,
        host_ms=9.0,
        streams={},
        overlap=OverlapRecord(
            comm_ms=0.0,
            compute_ms=0.0,
            hidden_ms=0.0,
            exposed_ms=0.0,
            idle_ms=10.0,
            exposed_copy_ms=None,
            overlap_ratio=None,
            hidden_per_compute=None,
            compute_allreduce_ms=0.0,
            compute_reducescatter_ms=0.0,
            hidden_by_op={},
            exposed_by_op={},
        ),
        active_segments=[],
        collectives=[],
        num_collectives=0,
        not_measured={"lr": "no scheduler"},
    )
    return StepRecord(**(fields | changes))


def run(**changes):
    fields = dict(
        started_unix_ns=1,
        world_size=1,
        command=["train.py"],
        config=None,
        model=None,
        layout=None,
        versions={},
        devices=[],
        environment={},
        clock_anchors=[],
        coverage={},
        placement=None,
    )
    return RunRecord(**(fields | changes))
