"""Folders that runs of aorta.training leave (run.json and rank_*_metrics.jsonl) as rows to compare with."""

from pathlib import Path
from statistics import median

import msgspec

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, hardware_name_of, load_hardware
from aorta.projection.job.plan import Plan
from aorta.projection.validation.below import files_below
from aorta.projection.validation.rows import LeftOut, Row, StepLine, step_row
from aorta.records.files import STEPS_FILES
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import RunRecord

RUN = "run.json"


def run_folders(folder: Path) -> list[Path]:
    """Folders at or below this one that hold a run; older runs that were moved aside are not among them."""
    return [
        path.parent
        for path in files_below(folder, RUN)
        if not any(part.startswith("previous-") for part in path.relative_to(folder).parts)
    ]


def read_runs(folder: Path) -> tuple[list[Row], list[LeftOut]]:
    """A row per run: the median step of its slowest rank, over the later half of the steps."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for path in run_folders(folder):
        name = str(path.relative_to(folder)) if path != folder else path.name
        try:
            rows.append(_row(path, name))
        except AortaError as error:
            left_out.append(LeftOut(name, str(error)))
        except (msgspec.ValidationError, OSError) as error:
            left_out.append(LeftOut(name, f"{path / RUN}: {error}"))
    return rows, left_out


def _row(folder: Path, name: str) -> Row:
    run = read_run(folder)
    if run.model is None or run.layout is None:
        raise ConfigError(f"{folder / RUN}: has no model or no layout")
    hardware = hardware_of_device(run)
    step_ms, peak_gib = _measured(folder)
    line = msgspec.convert({**run.layout, "name": name, "model": run.model, "step_ms": step_ms}, StepLine)
    row = step_row(line, hardware)
    return row._replace(name=name, plans=(("", _as_configured(row.plans[0][1], run)),), peak_gib=peak_gib)


def hardware_of_device(run: RunRecord) -> Hardware:
    """The hardware file whose name the device's name holds."""
    names = sorted({str(device.get("name")) for device in run.devices})
    for name in names:
        hardware_name = hardware_name_of(name)
        if hardware_name is not None:
            return load_hardware(hardware_name)
    raise ConfigError(f"ran on {', '.join(names) or 'no known device'}, which has no hardware file")


def _measured(folder: Path) -> tuple[float, float | None]:
    """Step time of the slowest rank in ms, and the largest peak of allocated GiB where one was recorded."""
    slowest = 0.0
    peaks = []
    for path in sorted(folder.glob(STEPS_FILES)):
        steps = []
        for record in read_steps(path):
            if record.source != "projected" and record.step_ms is not None:
                steps.append(record.step_ms)
            if record.memory is not None:
                peaks.append(record.memory.peak_allocated_bytes)
        if steps:
            slowest = max(slowest, median(steps[len(steps) // 2 :]))
    if not slowest:
        raise ConfigError(f"{folder}: has no measured steps")
    return slowest, max(peaks) / 2**30 if peaks else None


def _as_configured(plan: Plan, run: RunRecord) -> Plan:
    """The plan of a run's configuration beyond its layout; refuses what the projection does not model."""
    config = run.config or {}
    training, parallel = config.get("training", {}), config.get("parallel", {})
    precision = training.get("precision", "bf16")
    if precision not in ("bf16", "fp16"):
        raise ConfigError(f"ran in {precision}, only 16-bit arithmetic is modelled")
    if parallel.get("reshard_after_forward") is False and plan.is_fsdp:
        raise ConfigError("reshard_after_forward: false is not modelled")
    is_fsdp = parallel.get("mode", "fsdp") == "fsdp" and plan.dp > 1
    grads = 2 if parallel.get("reduce_dtype") in ("bf16", "fp16") and is_fsdp else 4
    return msgspec.structs.replace(
        plan,
        sharding="fsdp2" if is_fsdp else "ddp",
        weights="fp32",  # autocast where FSDP does not convert them
        grad_bytes=grads,
    )
