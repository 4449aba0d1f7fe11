"""Published training throughput: rows of measured_throughput*.csv and what the recipes behind them set."""

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, hardware_name_of, hardware_names, load_hardware
from aorta.projection.job import planned
from aorta.projection.memory import memory
from aorta.projection.model import Model, load_model
from aorta.projection.plan import Plan, RecomputeModule
from aorta.projection.software import Release, load_stack, stack_of_row
from aorta.projection.validation.rows import LeftOut, Row

PUBLISHED = "measured_throughput*.csv"
"""Name of the tables; each is reported by its own name."""
SHARDING = {
    "megatronfsdp": "zero3",
    "mcorefsdp": "zero3",
    "distopt": "zero1",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "dp": "zero1",
}
MEMORY_SLACK = 1.05
"""How far the memory of a layout may be off before it is ruled out: single GPUs are met within 4.5 %."""
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
"""What rows say in words, and the settings that it means."""

Line = dict[str, str]


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
    release = release_of_row(line)
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
            "stack": release.label,
            "source": _origin(line.get("source", "")),
            "model and part": f"{model.name} on {line['gpu']}",
        },
    )


def _fitting(plans: list[tuple[str, Plan]], model: Model, hardware: Hardware) -> list[tuple[str, Plan]]:
    """Alternatives that the memory allows: what ran did fit. All where the model says that none does."""
    memory_limit = MEMORY_SLACK * hardware.memory.hbm_bytes
    if len(plans) == 1 or plans[0][1].task == "lora":  # adapters come with ways to save that no table tells
        return plans
    fits = [alternative for alternative in plans if memory(model, alternative[1], memory_limit).fits]
    return fits or plans


def _hardware(line: Line) -> Hardware:
    """The part; with less power or another network where the row says so."""
    name = _needed(line, "gpu").lower()
    limited = re.search(r"\b(\d{3,4}) ?W\b", line.get("source", ""))
    if limited and f"{name}-{limited[1]}w" in hardware_names():
        name = f"{name}-{limited[1]}w"
    part = name if name in hardware_names() else hardware_name_of(name)
    hardware = load_hardware(part or name)
    network = re.search(
        r"(\d+) ?Gb(?:/s|ps)(?: per node)?", f"{line.get('quality', '')} {line.get('source', '')}"
    )
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
    release = release_of_row(line)
    if pp > 1 and release.stack.pipeline_micro_batch is not None:
        mbs = release.stack.pipeline_micro_batch
    if batch < mbs * dp and line.get("task") == "lora":
        # Fewer sequences than GPUs: what is left over goes along the sequence.
        cp = cp * dp * mbs // batch
        dp = gpus // (tp * pp * cp)
    recompute, layers, modules = _recompute(line.get("recompute", ""), model)
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
        "seq_len": _number(line, "seq"),
        "dtype": _dtype(line.get("precision", "")),
        "fp8_scaling": "mx" if re.search(r"mx|_mx", line.get("precision", "").lower()) else "tensor",
        "task": "lora" if line.get("task") == "lora" else "pretrain",
        "recompute": recompute,
        "recompute_layers": layers,
        "sharding": _sharding(line.get("shard", "")),
    }
    wording = f"{line.get('quality', '')}; {line.get('shard', '')}"
    overrides: dict[str, Any] = {}
    for words, meant in SAID:
        if re.search(words, wording, re.IGNORECASE):
            overrides |= meant
    if line.get("attention"):
        overrides["attention"] = line["attention"]
    if modules:
        overrides["recompute_modules"] = modules
    return planned(model, hardware, release, layout, overrides, compile_blocks=line.get("compile") == "yes")


def _sharding(text: str) -> str:
    """A kind of Plan.sharding, or fsdp or hsdp, from how people write it; blank is the usual one."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    for kind in ("hsdp", "fsdp2", "megatronfsdp", "mcorefsdp", "fsdp", *SHARDING):
        if kind in plain:
            return SHARDING.get(kind, kind)
    if plain in ("", "none", "no"):
        return SHARDING["distopt"]
    raise ConfigError(f"shard {text!r} is not one of fsdp, hsdp, {', '.join(SHARDING)}")


def _dtype(text: str) -> Any:
    """The type of the linear layers. MXFP8, FP8-CS and the like differ in their scales alone."""
    text = text.lower().rstrip("?")
    for name, marks in (("fp4", ("fp4",)), ("fp8", ("fp8",)), ("bf16", ("bf16", "fp16"))):
        if any(mark in text for mark in marks):
            return name
    raise ConfigError(f"precision {text!r} is not modelled")


MODULES: dict[str, RecomputeModule | None] = {
    "moe_act": "activation",
    "mlp_act": "activation",
    "layernorm": "norm",
    "mla_up_proj": "latent_up",
    "mlp": "ffn",
    "moe": "experts",
    "core_attn": None,
    "shared_experts": None,
}
"""Names of Megatron-Core's recomputed modules; None: no module here (core_attn is `selective`)."""


def _recompute(text: str, model: Model) -> tuple[Any, int | None, tuple[RecomputeModule, ...]]:
    """Kind of recomputation, layers that it is of (None: all), and modules of every layer."""
    words = re.sub(r"[,;+/|()\[\]\"']", " ", text.lower()).replace("selective:", "").split()
    if not words or words == ["none"]:
        return "none", None, ()
    if words in (["selective"], ["full"]):
        return words[0], None, ()
    if any(word in MODULES for word in words):
        named = [MODULES[word] for word in words if word in MODULES]
        modules = tuple(
            module
            for module in named
            if module
            and (module != "latent_up" or model.latent is not None)
            and (module != "experts" or model.experts is not None)
        )
        return "selective" if "core_attn" in words else "none", None, modules
    numbers = [int(word) for word in words if word.isdigit()]
    if not numbers:
        raise ConfigError(f"recompute {text!r} is not understood")
    return ("full", min(numbers[0], model.num_layers), ()) if numbers[0] else ("none", None, ())


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
