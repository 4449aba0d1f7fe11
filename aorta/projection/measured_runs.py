"""Training runs that were measured, as rows to fit factors to and to compare projections with.

Two forms are read: folders that aorta.training leaves (run.json and rank_*_metrics.jsonl), and steps.jsonl
with one run a line. A run that cannot be projected is left out with a reason.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, hardware_name_of, hardware_names, load_hardware
from aorta.projection.model import ExpertShape, Model
from aorta.projection.plan import Plan
from aorta.records.files import STEPS_FILES
from aorta.records.reader import read_run
from aorta.records.reader import read_steps as read_lines
from aorta.records.schema import RunRecord

RUN = "run.json"
STEPS = "steps.jsonl"
GPUS_PER_NODE = 8
"""Ranks of a node in runs that do not name their nodes."""
MOST_FOLDERS = 10_000


class Row(NamedTuple):
    """A measured step and the job that it is of."""

    name: str
    model: Model
    hardware: Hardware
    plans: tuple[tuple[str, Plan], ...]
    """A single plan where everything is known, else a plan for each alternative, with what it assumes."""
    step_ms: float | None
    tokens_per_s_per_gpu: float
    complete: bool
    group: dict[str, Any]
    """Keys that rows are compared by: family, part, precision."""
    peak_gib: float | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """A row that is not judged, and why."""

    name: str
    reason: str


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of steps.jsonl, the fields that a projection needs. Others are left alone."""

    name: str
    world: int
    dp: int
    mbs: int
    seq: int
    model: dict[str, Any]
    step_ms: float
    tp: int = 1
    ep: int = 1
    grad_accum: int = 1
    compile: bool = False
    peak_gib: float | None = None


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
            rows.append(_run_row(path, name))
        except AortaError as error:
            left_out.append(LeftOut(name, str(error)))
        except (msgspec.ValidationError, OSError) as error:
            left_out.append(LeftOut(name, f"{path / RUN}: {error}"))
    return rows, left_out


def _run_row(folder: Path, name: str) -> Row:
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
        for record in read_lines(path):
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
    is_fsdp = parallel.get("mode", "fsdp") == "fsdp" and plan.dp > 1
    grads = 2 if parallel.get("reduce_dtype") in ("bf16", "fp16") and is_fsdp else 4
    return msgspec.structs.replace(
        plan,
        sharding="fsdp2" if is_fsdp else "ddp",
        reshard_after_forward=parallel.get("reshard_after_forward", True),
        forward_prefetch=parallel.get("forward_prefetch", 0) if is_fsdp else 0,
        backward_prefetch=parallel.get("backward_prefetch", 1) if is_fsdp else 1,
        weights="fp32",  # autocast where FSDP does not convert them
        grad_bytes=grads,
    )


def read_steps(path: Path) -> tuple[list[Row], list[LeftOut]]:
    """steps.jsonl: runs on one node of the GPU that the folder is named after, else of H200."""
    hardware = load_hardware(hardware_of_folder(path.parent))
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        name = f"line {number}"
        try:
            plain = json.loads(text)
            if isinstance(plain, dict):
                name = f"line {number} ({plain.get('name')})"
            rows.append(step_row(msgspec.convert(plain, StepLine), hardware))
        except (json.JSONDecodeError, RecursionError) as error:
            left_out.append(LeftOut(name, f"not valid JSON: {error}"))
        except (msgspec.ValidationError, AortaError, ArithmeticError) as error:
            left_out.append(LeftOut(name, str(error)))
    if left_out and not rows:
        raise ConfigError(f"{path}, {left_out[0].name}: {left_out[0].reason}")
    return rows, left_out


def hardware_of_folder(folder: Path) -> str:
    """Files lie in a folder named after their GPU; elsewhere they are taken for H200's."""
    return folder.name.lower() if folder.name.lower() in hardware_names() else "h200"


def step_row(line: StepLine, hardware: Hardware) -> Row:
    """The row of a checked line; raises where the line describes nothing that can be projected."""
    if not line.step_ms > 0:
        raise ConfigError(f"step_ms must be above 0, got {line.step_ms}")
    plan, model = step_plan(line), step_model(line)
    plan.check(model)
    tokens = plan.global_batch_size * plan.seq_len
    recompute = "" if plan.recompute == "none" else " recompute"
    return Row(
        f"{line.name} dp{line.dp} tp{line.tp} ep{line.ep}",
        model,
        hardware,
        (("", plan),),
        line.step_ms,
        tokens / line.step_ms * 1e3 / line.world,
        True,
        {
            "world": line.world,
            "family": "moe" if model.experts else "dense",
            "form": _form(line) + recompute,
            "stack": plan.stack,
            "tokens": plan.tokens,
        },
        line.peak_gib,
    )


def _form(line: StepLine) -> str:
    axes = [name for name in ("dp", "tp", "ep") if getattr(line, name) > 1]
    return " x ".join(axes) or "one GPU"


def step_model(line: StepLine) -> Model:
    """The block stack of a line: h, f, nh, nkv, V, L, and E and k of a mixture."""
    shape = line.model
    missing = [key for key in ("h", "f", "nh", "nkv", "V", "L") if not isinstance(shape.get(key), int)]
    if shape.get("E") and not isinstance(shape.get("k"), int):
        missing.append("k")
    if missing:
        raise ConfigError(f"model has no whole number {missing[0]!r}")
    experts = None
    if shape.get("E"):
        experts = ExpertShape(num_experts=shape["E"], num_active=shape["k"], ffn=shape["f"])
    return Model(
        name=line.name,
        source="a measured run",
        hidden=shape["h"],
        num_layers=shape["L"],
        num_heads=shape["nh"],
        num_kv_heads=shape["nkv"],
        ffn=shape["f"],
        vocab_size=shape["V"],
        head_dim=shape.get("hd") or 0,
        experts=experts,
    )


def step_plan(line: StepLine) -> Plan:
    """FSDP2 over dp, DTensor over tp with embedding and output replicated, eager or compiled blocks."""
    node = min(line.world, GPUS_PER_NODE)
    if line.world < 1 or line.world % node:
        raise ConfigError(f"world {line.world} does not fill nodes of {GPUS_PER_NODE}")
    return Plan(
        nodes=line.world // node,
        gpus_per_node=node,
        dp=line.dp,
        tp=line.tp,
        ep=line.ep,
        micro_batch_size=line.mbs,
        global_batch_size=line.mbs * line.dp * line.grad_accum,
        seq_len=line.seq,
        recompute="full" if line.model.get("recompute") else "none",
        sharding="fsdp2" if line.dp > 1 else "ddp",
        sequence_parallel=False,
        vocab_parallel=False,
        joined_input_grads=False,
        stack="compiled" if line.compile else "eager",
        software="aorta",
    )


def find(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder, else the first one below it."""
    if (folder / name).is_file():
        return folder / name
    return next(iter(files_below(folder, name)), None)


def folders_below(folder: Path) -> list[Path]:
    """The folder and all below it, sorted; those that may not be read, or are gone, are left out, and links
    are not followed. ConfigError where it is none, or holds more than MOST_FOLDERS."""
    return sorted(place for place, _ in _walked(folder))


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Files at or below the folder whose name fits, sorted; as folders_below."""
    paths = [place / name for place, names in _walked(folder) for name in names if fnmatch(name, pattern)]
    return sorted(path for path in paths if path.is_file())


def _walked(folder: Path) -> list[tuple[Path, list[str]]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder")
    walked: list[tuple[Path, list[str]]] = []
    for place, _, names in os.walk(folder):
        walked.append((Path(place), names))
        if len(walked) > MOST_FOLDERS:
            raise ConfigError(
                f"{folder}: holds more than {MOST_FOLDERS} folders; give the one with the measurements"
            )
    return walked
