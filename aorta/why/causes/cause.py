"""One reason for the length of a step, as every source of causes gives it."""

from typing import Literal

import msgspec

from aorta.account.judge.stacks import CodeLine

__all__ = ["KINDS", "Cause", "CauseKind", "CauseSource"]

CauseKind = Literal[
    "compute",
    "transfer",
    "late_rank",
    "launch_bound",
    "synchronisation",
    "data_loading",
    "bubble",
    "contention",
    "copy",
    "clock",
    "memory",
    "small_messages",
    "no_prefetch",
    "imbalance",
    "optimizer",
    "shared_communicator",
    "checkpoint",
    "garbage_collection",
    "between_steps",
    "pause",
    "core_taken",
    "idle",
    "program_code",
]

KINDS: dict[CauseKind, str] = {
    "compute": "kernels of the model itself; on a CPU, a loop over operators that hardly compute",
    "transfer": "communication that no compute hides, after the last rank came",
    "late_rank": "waiting in collectives for a rank that came last",
    "launch_bound": "the device has nothing queued because the host launches too late",
    "synchronisation": "the host waits for the device, and the device then for the host",
    "data_loading": "the next batch is not there yet",
    "bubble": "a pipeline stage has no micro-batch",
    "contention": "kernels are slower beside communication than alone",
    "copy": "copies that nothing hides",
    "clock": "the device runs below its clock",
    "memory": "the allocator had to free its cache, or memory is near its limit",
    "small_messages": "collectives so small that their latency is most of their time",
    "no_prefetch": "gathers start after the compute that could have hidden them",
    "imbalance": "ranks have different amounts of work",
    "optimizer": "time after backward that the optimizer takes on the host",
    "shared_communicator": "calls wait for the previous call of their communicator",
    "checkpoint": "the program saves a checkpoint",
    "garbage_collection": "Python collects garbage",
    "between_steps": "time between two step bodies of which nothing else is known",
    "pause": "the program sleeps or pauses, or single steps are much longer than the others",
    "core_taken": "the training threads are ready to run, and others have the cores",
    "program_code": "what the program does in every step outside of its model, loader and optimizer",
    "idle": "the device has nothing to do, and the source does not show what the host does",
}
"""Each kind, and what it means."""

CauseSource = Literal["trace", "records", "telemetry"]
"""trace: the dependency graph of a traced step. records: lines of steps. telemetry: samples of the device."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step, why they are lost, and what would save them."""

    kind: CauseKind
    subject: str
    """What it is about: 'rank 3', 'all_gather of layers.3 (default group)', 'aten::item in train.py:88'."""
    ms: float
    """Milliseconds of the mean step that are at stake. Causes of one run do not overlap."""
    interval_ms: tuple[float, float] | None
    """95 % over steps, widened by how far mending may be off what the cells say (worth.MENDED_ERROR and
    MENDED_MORE)."""
    why_no_interval: str = ""
    """Where interval_ms is None."""
    bound_ms: float | None
    """What a mended step takes at least: without the upper end of the interval, and without what aorta itself
    takes of it. None where there is no interval."""
    share: float
    """ms of the step."""
    evidence: tuple[str, ...]
    """Sentences with numbers, and where to look: rank, step, file."""
    change: str
    """What to set, as the stack at hand spells it."""
    check: str
    """A command that shows whether the change helped."""
    source: CauseSource
    line: CodeLine | None = None
    """Line of the program that it is in, by sampled stacks; None where they do not show one."""
    rank: int | None = None
    """Rank to look at; None where all are alike."""
    is_in_step: bool = True
    """False: of the time between steps; share is of steps and gaps together, and ms may exceed the step."""
    is_of_trace: bool = False
    """The trace marks no steps: ms, share and bound_ms are of all of it."""
    is_waited_for: bool = False
    """The other ranks wait for it: it is the late one."""
    global_step: int | None = None
    """Step to look at, a typical one; None where none stands for the others."""
    at_ms: tuple[float, float] | None = None
    """Start and end in that step's window on that rank, for a link into the timeline."""
