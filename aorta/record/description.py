"""Makes the contents of run.json: what is known of a run at its start, and at its end.

The recorder calls describe_run when it is entered and finish_run when it is closed.
"""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from aorta.device.environment import collect_devices, collect_environment, collect_versions, user_variables
from aorta.errors import AortaError, not_installed
from aorta.record.journal import Journal
from aorta.record.run_folder import Claim, with_ending
from aorta.record.settings import RecorderSettings
from aorta.record.sources import Sources
from aorta.records.schema import (
    GPU_KINDS,
    AttemptRecord,
    Ending,
    LossLoop,
    PeakRecord,
    RunRecord,
    WorkOfStep,
)
from aorta.records.secrets import redacted_command, redacted_settings
from aorta.records.state import states_of
from aorta.timeline.collective import POINT_TO_POINT

OTHERS_END_S = 2.0
"""Limit of rank 0's wait for the other ranks' states, after a run that has ended well."""
NOT_SEEN_BY_DESIGN = (
    "communication that does not pass through torch.distributed (symmetric memory, "
    "NVSHMEM, custom all-reduce kernels)",
    "collectives replayed by a CUDA or HIP graph",
    "in a step, waits for collectives that were issued outside of any step",
)
"""Communication that no recorder sees, written into every run.json."""


def describe_run(
    settings: RecorderSettings,
    claim: Claim,
    world_size: int,
    clock_anchors: list[dict[str, int]],
) -> RunRecord:
    """Make the record of a run that begins. clock_anchors: the list that the recorder goes on adding to."""
    devices = collect_devices()
    peak, not_measured = _peak(settings, devices)
    started_unix_ns = clock_anchors[0]["unix_ns"]
    attempt = AttemptRecord(attempt=claim.attempt, world_size=world_size, started_unix_ns=started_unix_ns)
    return RunRecord(
        run_id=claim.run_id,
        launch=msgspec.to_builtins(claim.launch),
        attempts=[*claim.earlier, attempt],
        started_unix_ns=started_unix_ns,
        world_size=world_size,
        command=redacted_command(sys.argv),
        config=redacted_settings(settings.config),  # type: ignore[arg-type]
        model=settings.model,
        layout=settings.layout,
        versions=collect_versions(),
        devices=devices,
        environment=collect_environment(),
        variables=user_variables(),
        clock_anchors=clock_anchors,
        coverage={},
        placement=settings.placement,
        flops_per_token=settings.flops_per_token,
        peak_flops=peak,
        not_measured=not_measured,
    )


def _peak(
    settings: RecorderSettings, devices: list[dict[str, Any]]
) -> tuple[PeakRecord | None, dict[str, str]]:
    """Return the FLOP/s that model FLOPs are a share of, or the reason why they are not known."""
    if settings.flops_per_token is None:
        return None, {"flops_per_token": "not given: pass flops_per_token to aorta.instrument"}
    try:
        return peak_record(devices, settings.precision or precision_of(settings.config)), {}
    except UnknownPeak as error:
        return None, {"peak_flops": str(error)}


class FlopsOfStep(Protocol):
    """Knows which modules a step called."""

    precision: str | None
    work: WorkOfStep | None

    @property
    def loss_loop(self) -> LossLoop | None:
        """Between the model and its loss."""

    def wants(self, number: int) -> bool:
        """True where the step of this number should be noted."""

    def begin_step(self, optimizers: Iterable[Any], number: int) -> None:
        """Note a step."""

    def batch(self) -> tuple[int | None, int | None, str]:
        """Samples and tokens of one rank's step, and why neither is known."""

    def count(self) -> tuple[float | None, str]:
        """FLOPs of one rank's step; or None, and the reason."""


def add_batch(run: RunRecord, calls: FlopsOfStep) -> None:
    """Add what a step works on, or the reason why that is not known."""
    reason = ""
    if POINT_TO_POINT & set(run.coverage.get("seen", ())):
        reason = "ranks pass activations on: what rank 0 works on says nothing of the others"
    else:
        run.samples_per_step, run.tokens_per_step, reason = calls.batch()
    if run.tokens_per_step is None:
        run.not_measured["tokens"] = reason or "the model is called with no table of tokens"


def add_flops(run: RunRecord, flops: FlopsOfStep) -> None:
    """Add the FLOPs of a step and the peak that they are compared with, or the reasons why not."""
    run.flops_per_step, reason = flops.count()
    run.loss_loop, run.work = flops.loss_loop, flops.work
    if run.flops_per_step is None:
        run.not_measured["flops_per_step"] = reason
        return
    run.not_measured.pop("flops_per_token", None)
    if run.peak_flops is None:
        try:
            run.peak_flops = peak_record(run.devices, flops.precision)
        except UnknownPeak as error:
            run.not_measured["peak_flops"] = str(error)


class UnknownPeak(AortaError):
    """Raised where no peak rate is known; the message is the reason, for not_measured."""


def peak_record(devices: Sequence[Mapping[str, Any]], precision: str | None) -> PeakRecord:
    """Return the dense rate of matrix multiplies of one device in this precision.

    Raises UnknownPeak where aorta/hardware/parts has none: a device is never priced as a similar one.
    """
    names = sorted({str(row.get("name")) for row in devices if row.get("kind") in GPU_KINDS})
    if not names:
        raise UnknownPeak("no GPU was used, and peak rates are known of GPUs alone")
    if len(names) > 1:
        raise UnknownPeak(f"the devices differ: {', '.join(names)}")
    if precision is None:
        raise UnknownPeak("the precision is not known: give aorta.instrument precision, such as 'bf16'")
    try:
        from aorta.hardware.names import hardware_name_of  # PyYAML, which recording does without
        from aorta.hardware.part import load_hardware  # PyYAML, which recording does without
    except ImportError as error:
        raise UnknownPeak(not_installed(error) or str(error)) from error
    hardware_name = hardware_name_of(names[0])
    if hardware_name is None:
        raise UnknownPeak(f"the peak rate of {names[0]} is not known")
    try:
        hardware = load_hardware(hardware_name)
    except AortaError as error:
        raise UnknownPeak(str(error)) from error
    rates = hardware.compute.peak_flops
    if precision not in rates:
        raise UnknownPeak(
            f"peak rates of {hardware.title} are known for {', '.join(rates)}, not for {precision}"
        )
    source = hardware.sources.get(f"compute.peak_flops.{precision}")
    return PeakRecord(
        flops_per_s=rates[precision],
        precision=precision,
        hardware=hardware.title,
        origin="derived" if source is None else f"{source.what}, {source.date}",
    )


def precision_of(config: Mapping[str, Any] | None) -> str | None:
    """Return training.precision of a configuration in train.py's form; None of any other."""
    training = (config or {}).get("training")
    precision = training.get("precision") if isinstance(training, Mapping) else None
    return precision if isinstance(precision, str) else None


def finish_run(output_dir: Path, run: RunRecord, ending: Ending) -> None:
    """Put the ending of all ranks into the run's last attempt, from the states that they wrote."""
    attempt = run.attempts[-1]
    assert run.run_id is not None
    end_s = time.monotonic() + (OTHERS_END_S if ending.kind in ("finished", "stopped") else 0.0)
    while True:
        states = states_of(output_dir, run.run_id, attempt.attempt)
        if all(state.process.ending is not None for state in states) or time.monotonic() > end_s:
            break
        time.sleep(0.02)
    attempt = with_ending(output_dir, attempt, states, is_over=False)
    if attempt.ending is None:
        attempt = msgspec.structs.replace(attempt, ending=ending)
    run.attempts = [*run.attempts[:-1], attempt]


def collectives_seen(journal: Journal, groups: Any, sources: Sources) -> dict[str, Any]:
    """Count collectives by operation, in steps and outside. groups: the backends' own counts."""
    return {
        "interception": "c10d dispatcher kernels",
        "seen": dict(journal.num_seen),
        "outside_step": dict(journal.num_outside),
        "learned": dict(sources.learner.num_learned),
        "why_all_seen": sources.why_all_seen,
        "groups": groups,
    }


def end_marks(journal: Journal) -> dict[str, str]:
    """Return where the ends of asynchronous collectives are marked, by NCCL group."""
    return {
        group.name: "group's stream" if group.own_stream is not None else "waiting stream"
        for group in journal.groups()
        if group.sought and group.backend == "nccl"
    }
