"""Published training throughput: rows of measured_throughput*.csv and what the recipes behind them set."""

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, hardware_names, load_hardware, part_name
from aorta.projection.job.model import Model, load_model
from aorta.projection.job.plan import Plan
from aorta.projection.job.planning import applicable, planned
from aorta.projection.job.software import Release, load_stack, stack_of_row
from aorta.projection.memory import memory
from aorta.projection.validation.columns import (
    Line,
    amount,
    is_yes,
    needed,
    precision_dtype,
    recomputation,
    sharding_kind,
    task_kind,
    whole_number,
)
from aorta.projection.validation.rows import LeftOut, Row

PUBLISHED = "measured_throughput*.csv"
"""Name of the tables; each is reported by its own name."""
MEMORY_SLACK = 1.05
"""Error that the memory of a layout may have before it is ruled out: single GPUs are met within 4.5 %."""
AXES = ("tp", "pp", "vpp", "cp", "ep")
SAID: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"no TP overlap", {"tp_overlap": False}),
    (r"no sequence parallelism", {"sequence_parallel": False}),
    (r"no reshard after forward", {"reshard_after_forward": False}),
    (r"fp32 gradient", {"grad_bytes": 4}),
    (r"unfused attention", {"attention": "unfused"}),
    (r"all-to-all context parallel|ulysses", {"cp_exchange": "all_to_all"}),
    (r"CUDA graphs?", {"cuda_graphs": True}),
    (r"DualPipe", {"ep_overlap": True}),
)
"""Remarks of rows in words, and the settings that they mean."""


def read_published(path: Path) -> tuple[list[Row], list[LeftOut]]:
    """A table of throughput: rows that can be projected, and the others with the reason."""
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, raw in enumerate(lines, 2):
        line = {key: (value or "").strip() for key, value in raw.items() if isinstance(key, str)}
        name = line.get("id") or f"line {number}"
        try:
            rows.append(_published(line, name))
        except (AortaError, ValueError, ArithmeticError) as error:
            left_out.append(LeftOut(name, str(error)))
    return rows, left_out


def _published(line: Line, name: str) -> Row:
    model = load_model(needed(line, "model"))
    hardware = _hardware(line)
    gpus = whole_number(line, "n_gpus")
    step_s = amount(line, "step_s")
    plans: list[tuple[str, Plan]] = []
    reasons: list[str] = []
    for label, changes in _alternatives(line, hardware):
        try:
            plan = published_plan(line | changes, hardware, model)
            plan.check(model)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        plans.append((label, plan))
    if not plans:
        raise ConfigError(reasons[0] if reasons else "no alternative can be projected")
    plans = _fitting(plans, model, hardware)
    release = release_of_row(line)
    return Row(
        name,
        model,
        hardware,
        tuple(plans),
        step_s * 1e3 if step_s else None,
        _tokens(line, plans[0][1], step_s),
        _is_complete(line),
        {
            "gpu": (part_name(line["gpu"]) or line["gpu"]).upper(),
            "gpus": gpus,
            "scale": _scale(gpus),
            "model": model.name,
            "precision": line.get("precision", ""),
            "task": line.get("task", ""),
            "family": "moe" if model.experts else "dense",
            "framework": line.get("framework", ""),
            "stack": release.label,
            "source": _origin(line.get("source", "")),
            "model and part": f"{model.name} on {(part_name(line['gpu']) or line['gpu']).upper()}",
        },
    )


def _is_complete(line: Line) -> bool:
    return is_yes(line.get("complete") or "yes")


def _fitting(plans: list[tuple[str, Plan]], model: Model, hardware: Hardware) -> list[tuple[str, Plan]]:
    """Alternatives that the memory allows: what ran did fit. All where the model says that none does."""
    memory_limit = MEMORY_SLACK * hardware.memory.hbm_bytes
    if len(plans) == 1 or plans[0][1].task == "lora":  # adapters come with ways to save that no table tells
        return plans
    fits = [alternative for alternative in plans if memory(model, alternative[1], memory_limit).fits]
    return fits or plans


def _hardware(line: Line) -> Hardware:
    """The part; with less power, other memory or another network where the row says so."""
    gpu = needed(line, "gpu")
    name = part_name(gpu) or gpu
    wording = f"{line.get('quality', '')} {line.get('source', '')}"
    for size, unit in re.findall(r"\b(\d{2,4}) ?(W|GB)\b", wording):
        variant = f"{name}-{size}{unit.lower()}"
        if variant in hardware_names():
            name = variant
    hardware = load_hardware(name)
    network = re.search(r"(\d+) ?Gb(?:/s|ps)(?: per node)?", wording)
    if network:
        return with_network(hardware, float(network[1]) * 1e9 / 8)
    return hardware


def with_network(hardware: Hardware, node_bytes_per_s: float) -> Hardware:
    """The same part in nodes that send so much, all network cards together."""
    old = hardware.scale_out
    nic = node_bytes_per_s / old.nics_per_node
    share = old.sustained_nic_bytes_per_s / old.nic_bytes_per_s
    return msgspec.structs.replace(
        hardware,
        scale_out=msgspec.structs.replace(old, nic_bytes_per_s=nic, sustained_nic_bytes_per_s=nic * share),
    )


def _origin(source: str) -> str:
    """Repository, site or paper of a row's source."""
    named = re.search(r"arXiv \d{4}\.\d{5}|Megatron-Bridge|training_results_v[\d.]+", source)
    if named:
        return named[0]
    words = source.split()
    return "/".join(re.sub(r"@.*", "", words[0]).split("/")[:2]) if words else ""


def _scale(gpus: int) -> str:
    return "up to 16 GPUs" if gpus <= 16 else "17 to 256 GPUs" if gpus <= 256 else "more than 256 GPUs"


def _tokens(line: Line, plan: Plan, step_s: float | None) -> float:
    """Tokens per second and GPU, from the step where the table has no rate."""
    rate = amount(line, "tok_s_gpu")
    if rate is not None:
        return rate
    if step_s is None or not line.get("gbs"):
        raise ConfigError("has neither tok_s_gpu nor step_s with gbs")
    return plan.global_batch_size * plan.seq_len / step_s / plan.world_size


def _alternatives(line: Line, hardware: Hardware) -> Iterator[tuple[str, Line]]:
    """Blank or doubtful fields of incomplete rows, each with what runs like it use."""
    if _is_complete(line):
        yield "", {}
        return
    choices = list(_choices(line, hardware))
    for combination in itertools.product(*choices):
        changes: Line = {}
        for _, change in combination:
            changes |= change
        yield ", ".join(label for label, _ in combination), changes


def _choices(line: Line, hardware: Hardware) -> Iterator[list[tuple[str, Line]]]:
    rates = hardware.compute.peak_flops
    is_lora = task_kind(line.get("task", "")) == "lora"

    def one_of(name: str, *values: str) -> list[tuple[str, Line]]:
        return [(f"{name} {value}", {name: value}) for value in values]

    precision = line.get("precision", "")
    if not precision:
        yield one_of("precision", "bf16", *(dtype for dtype in ("fp8",) if dtype in rates))
    elif "fp4" in precision:
        yield one_of("precision", "fp8", *(dtype for dtype in ("fp4",) if dtype in rates))
    if not line.get("mbs"):
        yield one_of("mbs", "1", "2")
    if not line.get("tp"):
        yield one_of("tp", "1", "2", "4")
    if not line.get("cp") and line.get("gbs"):
        # Split along the sequence where there are fewer sequences than GPUs, as nothing else would use them.
        few = whole_number(line, "gbs") * whole_number(line, "tp", 1) * whole_number(
            line, "pp", 1
        ) < whole_number(line, "n_gpus")
        yield one_of("cp", *(("2", "4", "8") if few and not is_lora else ("1",)))
    batch_of_rank = release_of_row(line).stack.pipeline_micro_batch is not None
    if not line.get("gbs") and not (batch_of_rank and line.get("mbs")):
        yield [(f"{count} micro-batches", {"micro_batches": count}) for count in ("1", "4", "16")]
    if not line.get("recompute"):
        yield one_of("recompute", "none", "full")  # selective lies between
    if not line.get("shard"):
        yield one_of("shard", "distopt")
    if line.get("schedule") == "interleaved" and line.get("vpp", "1") in ("", "1"):
        yield one_of("vpp", "2", "4")
    if batch_of_rank:
        yield one_of("attention", "cudnn", "flash")


def release_of_row(line: Line) -> Release:
    """Framework and release of a row. One that no file describes is taken for plain kernels of PyTorch where
    it shards weights, and else for Megatron's."""
    release = stack_of_row(line.get("framework", ""), line.get("source", ""))
    if release is not None:
        return release
    sharded = line.get("shard", "").lower() in ("fsdp", "fsdp2", "hsdp", "zero3")
    return load_stack("fsdp" if sharded else "megatron")


def published_plan(line: Line, hardware: Hardware, model: Model) -> Plan:
    """The plan of a row, blanks read as what is usual."""
    gpus = whole_number(line, "n_gpus")
    # Where links reach beyond a node, as in an NVL72, groups may too.
    domain = max(int(hardware.scale_up.domain_size), int(hardware.scale_out.gpus_per_node))
    node = next(size for size in range(min(gpus, domain), 0, -1) if gpus % size == 0)
    tp, pp, vpp, cp, ep = (whole_number(line, name, 1) for name in AXES)
    ep = ep if model.experts else 1
    mbs = whole_number(line, "mbs", 1)
    if gpus % node or gpus % (tp * pp * cp):
        raise ConfigError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs on nodes of {node}")
    dp = gpus // (tp * pp * cp)
    batch = whole_number(line, "gbs", mbs * dp * whole_number(line, "micro_batches", 1))
    release = release_of_row(line)
    task = task_kind(line.get("task", ""))
    if pp > 1 and release.stack.pipeline_micro_batch is not None:
        mbs = release.stack.pipeline_micro_batch
    if batch < mbs * dp and task == "lora":
        # Fewer sequences than GPUs: what is left over goes along the sequence.
        cp = cp * dp * mbs // batch
        dp = gpus // (tp * pp * cp)
    if pp == 1 or (line.get("gbs") and batch % (mbs * dp * pp)):  # no pipeline, or no whole rounds in it
        vpp = 1
    recompute, layers, modules = recomputation(line.get("recompute", ""), model, pp * vpp)
    layout: dict[str, Any] = {
        "nodes": gpus // node,
        "gpus_per_node": node,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "vpp": vpp,
        "cp": cp,
        "ep": ep,
        "micro_batch_size": mbs,
        "global_batch_size": batch,
        "seq_len": whole_number(line, "seq"),
        "dtype": precision_dtype(line.get("precision", "")),
        "fp8_scaling": "mx" if re.search(r"mx|_mx", line.get("precision", "").lower()) else "tensor",
        "task": task,
        "recompute": recompute,
        "recompute_layers": layers,
        "sharding": sharding_kind(line.get("shard", "")),
    }
    wording = f"{line.get('quality', '')}; {line.get('shard', '')}"
    overrides: dict[str, Any] = {}
    for words, meant in SAID:
        if re.search(words, wording, re.IGNORECASE):
            overrides |= applicable(meant, layout | {"recompute": "none"}, model)
    if line.get("attention"):
        overrides["attention"] = line["attention"]
    if modules:
        overrides["recompute_modules"] = modules
    return planned(
        model, hardware, release, layout, overrides, compile_blocks=is_yes(line.get("compile", ""))
    )
