"""Measured steps of files: what ran, how fast, and what is not known about it."""

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aorta.errors import ConfigError
from aorta.projection.hardware import Hardware, hardware_names, load_hardware
from aorta.projection.model import Experts, Model, load_model
from aorta.projection.plan import Plan

STEPS = "steps.jsonl"
PUBLISHED = "measured_throughput.csv"


class Row(NamedTuple):
    """One measured step."""

    name: str
    model: Model
    hardware: Hardware
    plans: tuple[tuple[str, Plan], ...]
    """One where everything is known; else one for each alternative, with what it assumes."""
    step_ms: float | None
    tokens_per_s_per_gpu: float
    complete: bool
    group: dict[str, Any]
    """What rows are compared by: family, part, precision."""
    peak_gib: float | None = None


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of steps.jsonl, the fields that a projection needs. Others are left alone."""

    name: str
    world: int
    dp: int
    tp: int
    ep: int
    mbs: int
    seq: int
    grad_accum: int
    compile: bool
    model: dict[str, Any]
    step_ms: float
    tok_s_gpu: float
    peak_gib: float | None = None


def read_steps(path: Path) -> Iterator[Row]:
    """steps.jsonl: runs on one node of the GPU that the folder is named after, else of H200."""
    hardware = load_hardware(path.parent.name if path.parent.name in hardware_names() else "h200")
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = msgspec.convert(json.loads(text), StepLine)
            plan = _step_plan(line)
            model = _step_model(line)
            plan.check(model)
        except (json.JSONDecodeError, msgspec.ValidationError, ConfigError, KeyError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        axes = f"dp{line.dp} tp{line.tp} ep{line.ep}"
        yield Row(
            f"{line.name} {axes}",
            model,
            hardware,
            (("", plan),),
            line.step_ms,
            line.tok_s_gpu,
            True,
            {"world": line.world, "family": "moe" if model.experts else "dense"},
            line.peak_gib,
        )


def _step_model(line: StepLine) -> Model:
    shape = line.model
    experts = None
    if shape.get("E"):
        experts = Experts(num_experts=shape["E"], num_active=shape["k"], ffn=shape["f"])
    return Model(
        name=line.name,
        source="a measured run",
        hidden=shape["h"],
        num_layers=shape["L"],
        num_heads=shape["nh"],
        num_kv_heads=shape["nkv"],
        ffn=shape["f"],
        vocab_size=shape["V"],
        experts=experts,
    )


def _step_plan(line: StepLine) -> Plan:
    """FSDP2 over dp, DTensor over tp with embedding and output replicated, eager or compiled blocks."""
    return Plan(
        nodes=1,
        gpus_per_node=line.world,
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
    )


def read_published(path: Path) -> tuple[list[Row], list[dict[str, Any]]]:
    """measured_throughput.csv: rows that can be projected, and the others with the reason."""
    rows: list[Row] = []
    left_out: list[dict[str, Any]] = []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            try:
                rows.append(_published(line))
            except (ConfigError, ValueError) as error:
                left_out.append({"name": line.get("id"), "reason": str(error)})
    return rows, left_out


def _published(line: dict[str, str]) -> Row:
    try:
        model = load_model(line["model"])
        hardware = load_hardware(line["gpu"].lower())
    except Exception as error:
        raise ConfigError(str(error)) from None
    plans = []
    reasons = []
    for label, changes in _alternatives(line, model):
        try:
            plan = _published_plan(line | changes, hardware, model)
            plan.check(model)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        plans.append((label, plan))
    if not plans:
        raise ConfigError(reasons[0] if reasons else "no alternative can be projected")
    step_s = line["step_s"]
    return Row(
        line["id"],
        model,
        hardware,
        tuple(plans),
        float(step_s) * 1e3 if step_s else None,
        float(line["tok_s_gpu"]),
        line["complete"] == "yes",
        {
            "gpu": line["gpu"],
            "gpus": int(line["n_gpus"]),
            "model": model.name,
            "precision": line["precision"],
            "task": line["task"],
            "family": "moe" if model.experts else "dense",
            "framework": line["framework"],
        },
    )


def _alternatives(line: dict[str, str], model: Model) -> Iterator[tuple[str, dict[str, str]]]:
    """Blank fields of incomplete rows, each with what runs like it use."""
    choices: list[list[tuple[str, dict[str, str]]]] = []
    if line["complete"] == "yes":
        yield "", {}
        return
    if not line["precision"] or "fp4" in line["precision"]:
        choices.append([(f"precision {dtype}", {"precision": dtype}) for dtype in ("fp8",)])
    if not line["mbs"]:
        choices.append([(f"mbs {mbs}", {"mbs": mbs}) for mbs in ("1", "2")])
    if not line["tp"]:
        choices.append([(f"tp {tp}", {"tp": tp}) for tp in ("1", "2", "4")])
    if not line["gbs"]:
        choices.append([(f"{count} micro-batches", {"micro_batches": count}) for count in ("1", "4", "16")])
    if not line["recompute"]:
        choices.append([(f"recompute {how}", {"recompute": how}) for how in ("none", "selective", "full")])
    if not line["shard"]:
        choices.append([("sharding zero1", {"shard": "distopt"})])
    for combination in itertools.product(*choices):
        changes: dict[str, str] = {}
        for _, change in combination:
            changes |= change
        yield ", ".join(label for label, _ in combination), changes


def _published_plan(line: dict[str, str], hardware: Hardware, model: Model) -> Plan:
    gpus = int(line["n_gpus"])
    node = min(gpus, int(hardware.scale_out.gpus_per_node))
    tp, pp, vpp, cp, ep = (int(line[name] or 1) for name in ("tp", "pp", "vpp", "cp", "ep"))
    dp = gpus // (tp * pp * cp)
    mbs = int(line["mbs"] or 1)
    batch = int(line["gbs"]) if line["gbs"] else mbs * dp * int(line.get("micro_batches", "1"))
    if batch < mbs * dp and line["task"] == "lora":
        # Fewer sequences than GPUs: what is left over goes along the sequence.
        cp = cp * dp * mbs // batch
        dp = gpus // (tp * pp * cp)
    recompute, layers = _recompute(line["recompute"], model)
    framework = line["framework"]
    titan = framework == "torchtitan"
    nvidia = framework in ("nemo", "megatron-bridge")
    alone = framework == "nemo" and tp == pp == 1
    return Plan(
        nodes=gpus // node,
        gpus_per_node=node,
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        micro_batch_size=mbs,
        global_batch_size=batch,
        seq_len=int(line["seq"]),
        dtype="fp8" if line["precision"].startswith("fp8") else "bf16",
        recompute=recompute,
        recompute_layers=layers,
        sharding={"fsdp": "fsdp2" if titan else "zero3", "dp": "zero1", "distopt": "zero1"}[line["shard"]],
        sequence_parallel=tp > 1,
        stack=("compiled" if line["compile"] == "yes" else "eager") if titan else "megatron",
        # NeMo's and Megatron-Bridge's recipes for dense models overlap the collectives of tp with GEMMs and
        # reduce gradients in bf16.
        tp_overlap=nvidia and tp > 1 and model.experts is None,
        grad_bytes=2 if nvidia and not alone else None,
        # MLPerf's 8B with one micro-batch: from one to two nodes (rows b0, b1 to b3, none of them scored) a
        # step grows by what fp32 gradients and bf16 weights take on the network with nothing beside them.
        dp_overlap=not alone,
        task="lora" if line["task"] == "lora" else "pretrain",
        **(_bridge_mixture(model, hardware, pp, vpp, ep) if framework == "megatron-bridge" else {}),
    )


def _bridge_mixture(model: Model, hardware: Hardware, pp: int, vpp: int, ep: int) -> dict[str, Any]:
    """What Megatron-Bridge's recipes for mixtures of experts set beyond the columns of the table.

    Source: github.com/NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs (qwen, deepseek), read
    2026-11: the dispatcher, the overlap of its exchange, and for DeepSeek-V3 the stages of the pipeline, the
    layer for the token after the next, and what is recomputed. All balance the router by force.
    """
    if model.experts is None or ep == 1:
        return {}
    if model.name == "deepseek-v3":
        found: dict[str, Any] = {"deepep": True, "mtp": True, "recompute_modules": ("latent_up",)}
        if pp * vpp == 32:
            found |= {"first_stage_layers": 1, "last_stage_layers": 0}
        return found
    if model.name == "qwen3-235b-a22b" and hardware.scale_up.domain_size == 8:
        # All-to-all of NCCL on parts in nodes of eight; on H100 beside another micro-batch.
        return {"ep_overlap": hardware.architecture == "sm_90" and pp > 1}
    return {"deepep": True}


def _recompute(text: str, model: Model) -> tuple[Any, int | None]:
    words = text.replace(",", " ").split()
    if not words or words == ["none"]:
        return "none", None
    if words in (["selective"], ["full"]):
        return words[0], None
    numbers = [int(word) for word in words if word.isdigit()]
    if not numbers:
        raise ConfigError(f"recompute {text!r} is not understood")
    return "full", min(numbers[0], model.num_layers)
