"""Tables of published runs: columns in the words that people use, and rows as plans.

A blank or doubtful field of an incomplete row becomes alternatives, each with what runs like it use.
"""

import csv
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from projection.measured_steps import LeftOut, Row

from aorta.errors import AortaError, ConfigError
from aorta.hardware.names import hardware_names, part_name
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.memory import memory
from aorta.projection.model import Model, load_model
from aorta.projection.plan import Plan, RecomputeModule
from aorta.projection.software import (
    RELEASE,
    Release,
    applicable,
    load_stack,
    planned,
    release_number,
    stacks,
)

Line = dict[str, str]
"""A row: text by column."""

PUBLISHED = "measured_throughput*.csv"
"""Name of the tables; each is reported by its own name."""
MLPERF_ROUNDS = {"4.0": "24.05", "4.1": "24.10", "5.0": "25.05", "5.1": "25.10", "6.0": "26.05"}
"""Year and month of the rounds of MLPerf Training, whose sources name the round alone."""
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
SHARDING = {
    "megatronfsdp": "zero3",
    "mcorefsdp": "zero3",
    "distributedoptimizer": "zero1",
    "distopt": "zero1",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "ddp": "ddp",
    "fsdp2": "fsdp2",
    "dp": "zero1",
}
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
ABSENT = frozenset(
    {"", "-", "none", "no", "off", "false", "n/a", "na", "nan", "null", "disabled", "unknown", "?"}
)
PRESENT = frozenset({"yes", "y", "true", "on", "1"})
FP4 = ("fp4", "float4", "e2m1")
FP8 = ("fp8", "float8", "e4m3", "e5m2", "delayed", "blockwise")
BF16 = ("bf16", "fp16", "bfloat16", "float16", "half", "amp", "mixed")


def read_published(path: Path, lines: list[dict[str, Any]] | None = None) -> tuple[list[Row], list[LeftOut]]:
    """A table of throughput: rows that can be projected, and the others with the reason.

    A model that is not packaged may lie in models/ beside the table. lines: the table's, where they are read.
    """
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    if lines is None:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                lines = list(csv.DictReader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
    for number, raw in enumerate(lines, 2):
        line = {key: (value or "").strip() for key, value in raw.items() if isinstance(key, str)}
        name = line.get("id") or f"line {number}"
        try:
            rows.append(_published(line, name, path.parent / "models"))
        except (AortaError, ValueError, ArithmeticError) as error:
            left_out.append(LeftOut(name, str(error)))
    return rows, left_out


def _published(line: Line, name: str, beside: Path) -> Row:
    own = beside / f"{needed(line, 'model')}.yaml"
    model = load_model(str(own) if own.is_file() else line["model"])
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
    """The part in nodes that send so much, all network cards together."""
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


def stack_of_row(framework: str, source: str) -> Release | None:
    """The release that a row's framework and source name; None: a framework that no file describes."""
    plain = framework.strip().lower()
    fitting = [
        stack
        for stack in stacks().values()
        if plain in (stack.name, *stack.aliases) and stack.row_source.lower() in source.lower()
    ]
    if not fitting:
        return None
    best = max(fitting, key=lambda stack: len(stack.row_source))
    named = (origin.release for origin in best.origins if re.search(origin.pattern, source))
    return Release(best, next(named, None) or release_of(source))


def release_of(text: str) -> str | None:
    """The release that a source names, as year.month[.patch]: 'NeMo 25.02', '202412', '26.04.01',
    'training_results_v5.1'."""
    round_of = re.search(r"training_results_v(\d\.\d)", text)
    if round_of:
        return MLPERF_ROUNDS.get(round_of[1])
    single = re.search(r"(?<![\w.])v(2[1-9])\.([1-9])(?![\d.])", text)
    if single:
        return f"{single[1]}.0{single[2]}"
    dotted = re.findall(rf"(?<![\d.])({RELEASE})(?!\d|\.\d)", text)
    if dotted:
        return release_number(dotted[-1][0])
    submitted = re.search(r"arxiv:? ?(2[0-9])(0[1-9]|1[0-2])\.\d{5}", text, re.IGNORECASE)
    if submitted:
        return f"{submitted[1]}.{submitted[2]}"
    dated = re.search(r"20(2[1-9])-?(0[1-9]|1[0-2])(?!\d)", text)
    return f"{dated[1]}.{dated[2]}" if dated else None


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


def is_yes(text: str) -> bool:
    return text.strip().lower() in PRESENT


def needed(line: Line, name: str) -> str:
    if not line.get(name):
        raise ConfigError(f"the column {name} is absent or blank")
    return line[name]


def whole_number(line: Line, name: str, default: int | None = None) -> int:
    """A whole number above 0 (8192, 8,192 or 8k); blank is the default."""
    text = line.get(name, "")
    if text.lower() in ABSENT and default is not None:
        return default
    value = _value(needed(line, name), name, "a whole number")
    if not 1 <= value < float("inf") or value != int(value):
        raise ConfigError(f"{name} must be a whole number above 0, got {text!r}")
    return int(value)


def amount(line: Line, name: str) -> float | None:
    """A number above 0; None where the table has none."""
    text = line.get(name, "")
    if text.lower() in ABSENT:
        return None
    value = _value(text, name, "a number")
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be above 0, got {text!r}")
    return value


def _value(text: str, name: str, what: str) -> float:
    plain = text.lower().replace(",", "").replace("_", "").strip()
    thousands = 1024 if plain.endswith("k") else 1
    try:
        return float(plain.removesuffix("k")) * thousands
    except ValueError:
        raise ConfigError(f"{name} must be {what}, got {text!r}") from None


def sharding_kind(text: str) -> str:
    """A kind of Plan.sharding, or fsdp or hsdp, from how people write it; blank is the usual one."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    for kind in ("hsdp", "fsdp2", "megatronfsdp", "mcorefsdp", "fsdp", *SHARDING):
        if kind in plain:
            return SHARDING.get(kind, kind)
    if text.strip().lower() in ABSENT:
        return SHARDING["distopt"]
    raise ConfigError(f"shard {text!r} is not one of fsdp, hsdp, {', '.join(SHARDING)}")


def precision_dtype(text: str) -> Any:
    """The type of the linear layers; blank is bf16. MXFP8, FP8-CS and the like differ in scales alone."""
    plain = re.sub(r"[\s_-]", "", text.lower()).rstrip("?")
    if plain in ABSENT:
        return "bf16"
    for name, marks in (("fp4", FP4), ("fp8", FP8), ("bf16", BF16)):
        if any(mark in plain for mark in marks):
            return name
    raise ConfigError(f"precision {text!r} is not modelled")


def task_kind(text: str) -> Literal["pretrain", "lora"]:
    """lora where adapters alone are trained, whatever the method is called."""
    return "lora" if re.search(r"lora|peft|adapter", text.lower()) else "pretrain"


def recomputation(
    text: str, model: Model, chunks: int
) -> tuple[Any, int | None, tuple[RecomputeModule, ...]]:
    """Kind of recomputation, layers that it is of (None: all), and modules of every layer.

    chunks: of the model over the pipeline; Megatron's method `block` counts layers of each.
    """
    plain = text.strip().lower()
    words = re.sub(r"[,;:=+/|()\[\]\"']", " ", plain).split()
    if plain in ABSENT or words == ["0"] or not words:
        return "none", None, ()
    named = [word for word in words if word in MODULES]
    if named:
        return ("selective" if "core_attn" in words else "none"), None, _named_modules(named, model)
    if "selective" in plain or words[0] in ("sac", "op"):
        return "selective", None, ()
    numbers = [int(word) for word in words if word.isdigit()]
    if numbers and "uniform" not in words and words != ["1"]:
        layers = numbers[0] * (chunks if "block" in words else 1)
        return ("full", min(layers, model.num_layers), ()) if layers else ("none", None, ())
    if words[0] in PRESENT or {"full", "uniform", "block", "all", "ac", "checkpointing"} & set(words):
        return "full", None, ()
    raise ConfigError(f"recompute {text!r} is not understood")


def _named_modules(names: list[str], model: Model) -> tuple[RecomputeModule, ...]:
    """Modules that the model has."""
    absent = {"latent_up": model.latent is None, "experts": model.experts is None}
    modules = (MODULES[name] for name in names)
    return tuple(module for module in modules if module and not absent.get(module, False))
