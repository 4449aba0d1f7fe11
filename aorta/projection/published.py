"""Published training throughput: rows of measured_throughput.csv and what the recipes behind them set."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, hardware_name_of, hardware_names, load_hardware
from aorta.projection.memory import memory
from aorta.projection.model import Model, load_model
from aorta.projection.plan import Plan
from aorta.projection.rows import LeftOut, Row

PUBLISHED = "measured_throughput.csv"
SHARDING = {
    "dp": "zero1",
    "distopt": "zero1",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "ddp": "ddp",
}
MEMORY_SLACK = 1.05
"""How far the memory of a layout may be off before it is ruled out: single GPUs are met within 4.5 %."""
AXES = ("tp", "pp", "vpp", "cp", "ep")

Line = dict[str, str]


def read_published(path: Path) -> tuple[list[Row], list[LeftOut]]:
    """measured_throughput.csv: rows that can be projected, and the others with the reason."""
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
    model = load_model(_needed(line, "model"))
    hardware = _hardware(line)
    gpus = _number(line, "n_gpus")
    step_s = _positive(line, "step_s")
    plans: list[tuple[str, Plan]] = []
    reasons: list[str] = []
    for label, changes in _alternatives(line):
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
    return Row(
        name,
        model,
        hardware,
        tuple(plans),
        step_s * 1e3 if step_s else None,
        _tokens(line, plans[0][1], step_s),
        line.get("complete", "yes") == "yes",
        {
            "gpu": line["gpu"],
            "gpus": gpus,
            "scale": _scale(gpus),
            "model": model.name,
            "precision": line.get("precision", ""),
            "task": line.get("task", ""),
            "family": "moe" if model.experts else "dense",
            "framework": line.get("framework", ""),
        },
    )


def _fitting(plans: list[tuple[str, Plan]], model: Model, hardware: Hardware) -> list[tuple[str, Plan]]:
    """Alternatives that the memory allows: what ran did fit. All where the model says that none does."""
    most = MEMORY_SLACK * hardware.memory.hbm_bytes
    if len(plans) == 1 or plans[0][1].task == "lora":  # adapters come with ways to save that no table tells
        return plans
    fits = [one for one in plans if memory(model, one[1], most).fits]
    return fits or plans


def _hardware(line: Line) -> Hardware:
    """The part; torchtitan's H100 have less power and memory bandwidth than the data sheet's."""
    name = _needed(line, "gpu").lower()
    if name == "h100" and "500W" in line.get("source", ""):
        return load_hardware("h100-500w")
    if name in hardware_names() or "pcie" in name or ("nvl" in name and not name.startswith("gb")):
        return load_hardware(name)  # cards have other clocks and links than the modules of the same name
    return load_hardware(hardware_name_of(name) or name)


def _scale(gpus: int) -> str:
    return "up to 16 GPUs" if gpus <= 16 else "17 to 256 GPUs" if gpus <= 256 else "more than 256 GPUs"


def _tokens(line: Line, plan: Plan, step_s: float | None) -> float:
    """Tokens per second and GPU, from the step where the table has no rate."""
    rate = _positive(line, "tok_s_gpu")
    if rate is not None:
        return rate
    if step_s is None or not line.get("gbs"):
        raise ConfigError("has neither tok_s_gpu nor step_s with gbs")
    return plan.global_batch_size * plan.seq_len / step_s / plan.world_size


def _alternatives(line: Line) -> Iterator[tuple[str, Line]]:
    """Blank or doubtful fields of incomplete rows, each with what runs like it use."""
    if line.get("complete", "yes") == "yes":
        yield "", {}
        return
    choices = list(_choices(line))
    for combination in itertools.product(*choices):
        changes: Line = {}
        for _, change in combination:
            changes |= change
        yield ", ".join(label for label, _ in combination), changes


def _choices(line: Line) -> Iterator[list[tuple[str, Line]]]:
    def one_of(name: str, *values: str) -> list[tuple[str, Line]]:
        return [(f"{name} {value}", {name: value}) for value in values]

    precision = line.get("precision", "")
    if not precision or "fp4" in precision:
        fp4 = "fp4" in precision and line["gpu"].lower().startswith(("b", "gb", "mi35"))
        yield one_of("precision", "fp8", *(("fp4",) if fp4 else ()))
    if not line.get("mbs"):
        yield one_of("mbs", "1", "2")
    if not line.get("tp"):
        yield one_of("tp", "1", "2", "4")
    if not line.get("cp") and line.get("gbs"):
        # Split along the sequence where there are fewer sequences than GPUs, as nothing else would use them.
        few = _number(line, "gbs") * _number(line, "tp", 1) * _number(line, "pp", 1) < _number(line, "n_gpus")
        yield one_of("cp", *(("2", "4", "8") if few and line.get("task") != "lora" else ("1",)))
    if not line.get("gbs") and not (line.get("framework") == "torchtitan" and line.get("mbs")):
        yield [(f"{count} micro-batches", {"micro_batches": count}) for count in ("1", "4", "16")]
    if not line.get("recompute"):
        yield one_of("recompute", "none", "full")  # selective lies between
    if not line.get("shard"):
        yield one_of("shard", "distopt")
    if line.get("schedule") == "interleaved" and line.get("vpp", "1") in ("", "1"):
        yield one_of("vpp", "2", "4")
    if line.get("framework") == "torchtitan":
        yield one_of("attention", "cudnn", "flash")


def published_plan(line: Line, hardware: Hardware, model: Model) -> Plan:
    """The plan of a row, blanks read as what is usual."""
    gpus = _number(line, "n_gpus")
    # Where links reach beyond a node, as in an NVL72, groups may too.
    domain = max(int(hardware.scale_up.domain_size), int(hardware.scale_out.gpus_per_node))
    node = next(size for size in range(min(gpus, domain), 0, -1) if gpus % size == 0)
    tp, pp, vpp, cp, ep = (_number(line, name, 1) for name in AXES)
    mbs = _number(line, "mbs", 1)
    if gpus % node or gpus % (tp * pp * cp):
        raise ConfigError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs on nodes of {node}")
    dp = gpus // (tp * pp * cp)
    batch = _number(line, "gbs", mbs * dp * _number(line, "micro_batches", 1))
    if pp > 1 and line.get("framework") == "torchtitan":
        mbs = 1  # its batch of a rank is cut into micro-batches of one sequence for the pipeline
    if batch < mbs * dp and line.get("task") == "lora":
        # Fewer sequences than GPUs: what is left over goes along the sequence.
        cp = cp * dp * mbs // batch
        dp = gpus // (tp * pp * cp)
    recompute, layers = _recompute(line.get("recompute", ""), model)
    framework = line.get("framework", "")
    titan = framework == "torchtitan"
    nvidia = framework in ("nemo", "megatron-bridge")
    alone = framework == "nemo" and tp == pp == 1
    kept = titan and recompute == "selective"
    settings: dict[str, Any] = {
        "recompute": "none" if kept else recompute,
        "recompute_modules": ("every_second_gemm",) if kept else (),
        "recompute_layers": layers,
        "sharding": _sharding(line.get("shard", ""), titan),
        "sequence_parallel": tp > 1,
        "schedule": "1f1b",
        "stack": ("compiled" if line.get("compile") == "yes" else "eager") if titan else "megatron",
        # NeMo's and Megatron-Bridge's recipes for dense models overlap the collectives of tp with GEMMs and
        # reduce gradients in bf16.
        "tp_overlap": nvidia and tp > 1 and model.experts is None,
        "grad_bytes": 2 if nvidia and not alone else None,
        # MLPerf's 8B with one micro-batch: from one to two nodes (rows b0, b1 to b3, none of them scored) a
        # step grows by what fp32 gradients and bf16 weights take on the network with nothing beside them.
        "dp_overlap": not alone,
        "task": "lora" if line.get("task") == "lora" else "pretrain",
        "attention": line.get("attention") or None,
    }
    if framework == "megatron-bridge":
        settings |= bridge_mixture(model, hardware, pp, vpp, ep)
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
        seq_len=_number(line, "seq"),
        dtype=_dtype(line.get("precision", "")),
        **settings,
    )


def bridge_mixture(model: Model, hardware: Hardware, pp: int, vpp: int, ep: int) -> dict[str, Any]:
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


def _sharding(text: str, titan: bool) -> Any:
    text = text.lower()
    if text in ("fsdp", "fsdp2", "hsdp"):
        return "fsdp2" if titan else "zero3"
    if text not in SHARDING:
        raise ConfigError(f"shard {text!r} is not one of fsdp, {', '.join(SHARDING)}")
    return SHARDING[text]


def _dtype(text: str) -> Any:
    """The type of the linear layers. MXFP8, FP8-CS and the like differ in their scales alone."""
    text = text.lower().rstrip("?")
    for name, marks in (("fp4", ("fp4",)), ("fp8", ("fp8",)), ("bf16", ("bf16", "fp16"))):
        if any(mark in text for mark in marks):
            return name
    raise ConfigError(f"precision {text!r} is not modelled")


def _recompute(text: str, model: Model) -> tuple[Any, int | None]:
    words = text.replace(",", " ").split()
    if not words or words == ["none"]:
        return "none", None
    if words in (["selective"], ["full"]):
        return words[0], None
    numbers = [int(word) for word in words if word.isdigit()]
    if not numbers:
        raise ConfigError(f"recompute {text!r} is not understood")
    return ("full", min(numbers[0], model.num_layers)) if numbers[0] else ("none", None)


def _needed(line: Line, name: str) -> str:
    if not line.get(name):
        raise ConfigError(f"the column {name} is absent or blank")
    return line[name]


def _number(line: Line, name: str, default: int | None = None) -> int:
    """A whole number above 0; blank is the default."""
    text = line.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = float(_needed(line, name))
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {text!r}") from None
    if value < 1 or value != int(value):
        raise ConfigError(f"{name} must be a whole number above 0, got {text!r}")
    return int(value)


def _positive(line: Line, name: str) -> float | None:
    text = line.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {text!r}") from None
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be above 0, got {text!r}")
    return value
