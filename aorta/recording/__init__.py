"""The instrument: records every collective and every step of a training script."""

from pathlib import Path
from typing import Any

import torch

from aorta.recording.observers.collective_source import Collectives
from aorta.recording.observers.kernel_source import Kernels
from aorta.recording.recorder import Placement, Recorder, StepHandle
from aorta.steps.calibration import Calibration, calibrate

__all__ = ["Calibration", "Recorder", "StepHandle", "calibrate", "instrument"]


def instrument(
    output_dir: str | Path = "artifacts",
    *,
    placement: Placement = "native",
    detail_every: int = 1,
    timed_every: int = 1,
    telemetry_interval_s: float = 1.0,
    rocm_metrics: bool = False,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    calibration: Calibration | None = None,
    device: torch.device | str | None = None,
    kernels: Kernels = "auto",
    collectives: Collectives = "calls",
    flops_per_token: float | None = None,
    precision: str | None = None,
) -> Recorder:
    """A recorder to use in `with`; within it every collective of the process is recorded.

    output_dir receives run.json (rank 0) and rank_<n>_metrics.jsonl; files of a finished run are
    moved aside. placement "native" moves nothing; "dedicated" runs synchronous all-reduce,
    reduce-scatter, all-gather and all-to-all on streams of their own, fully ordered with the
    caller's. detail_every keeps the lists of segments and collectives in one step of N (sums are
    in every line). timed_every, on GPUs, times collectives and waits in one step of N: the others
    have null and a reason for them, and cost a host-bound script less. config, model and layout go
    into run.json as they are. kernels: "auto" reads the driver's own kernel records where they can be had
    (CUDA), which is exact and cheaper than events, and says in run.json why not otherwise; "on" raises
    InstrumentError instead; "off" times by events. collectives: "plugin" has NCCL or RCCL itself tell
    algorithm, protocol, channels, start and end of each; call instrument before init_process_group then.
    device is found at the first step where it is not given.
    flops_per_token, the model FLOPs of forward and backward without what is computed again, lets
    reports give model FLOP/s, and with precision ("bf16", "fp16", "fp8", "tf32" or "fp32") the share
    of the device's peak (MFU); layout's dp and world tell which ranks share their tokens.

    Nothing here or in the steps waits for the device, except once before the first step, to tie
    the device's clock to the host's. Raises InstrumentError where the process is instrumented
    already, RecordError where the folder cannot be written or another run is still writing there.
    """
    return Recorder(
        output_dir,
        placement=placement,
        detail_every=detail_every,
        timed_every=timed_every,
        telemetry_interval_s=telemetry_interval_s,
        rocm_metrics=rocm_metrics,
        config=config,
        model=model,
        layout=layout,
        calibration=calibration,
        device=device,
        kernels=kernels,
        collectives=collectives,
        flops_per_token=flops_per_token,
        precision=precision,
    )
