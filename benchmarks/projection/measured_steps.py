"""Training runs that were measured (steps.jsonl, one a line), as rows to compare projections with.

A run that cannot be projected is left out with a reason.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from aorta.errors import AortaError, ConfigError
from aorta.hardware.names import hardware_names
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.model import ExpertShape, Model
from aorta.projection.plan import Plan
from aorta.projection.prices import Factors, Pricer, factors_of

STEPS = "steps.jsonl"
GPUS_PER_NODE = 8
"""Ranks of a node in runs that do not name their nodes."""
MOST_FOLDERS = 10_000
_PRICERS: dict[int, Pricer] = {}
"""One pricer for each part, by the id of the hardware that it keeps alive: rows of one part share what its
kernels cost, which is most of a projection."""


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


def is_calibration(row: Row) -> bool:
    """True for runs of one and two GPUs, which the fit uses; larger ones are held out."""
    return int(row.group["world"]) <= 2


def pricer_of(row: Row, factors: Factors | None = None) -> Pricer:
    """A pricer for the row's first plan; factors: those of the part where None."""
    hardware = row.hardware
    if id(hardware) not in _PRICERS:
        _PRICERS[id(hardware)] = Pricer(hardware, row.plans[0][1])
    return _PRICERS[id(hardware)].with_plan(row.plans[0][1]).with_factors(factors or factors_of(hardware))


def quantile(values: list[float], share: float) -> float:
    """The quantile, linear between the order statistics."""
    return float(np.quantile(values, share))
