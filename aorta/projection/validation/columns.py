"""Columns of tables of published runs, in the words that people use for them."""

import re
from typing import Any, Literal

from aorta.errors import ConfigError
from aorta.projection.job.model import Model
from aorta.projection.job.plan import RecomputeModule

Line = dict[str, str]
"""A row: text by column."""

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
        return ("selective" if "core_attn" in words else "none"), None, _modules(named, model)
    if "selective" in plain or words[0] in ("sac", "op"):
        return "selective", None, ()
    numbers = [int(word) for word in words if word.isdigit()]
    if numbers and "uniform" not in words and words != ["1"]:
        layers = numbers[0] * (chunks if "block" in words else 1)
        return ("full", min(layers, model.num_layers), ()) if layers else ("none", None, ())
    if words[0] in PRESENT or {"full", "uniform", "block", "all", "ac", "checkpointing"} & set(words):
        return "full", None, ()
    raise ConfigError(f"recompute {text!r} is not understood")


def _modules(names: list[str], model: Model) -> tuple[RecomputeModule, ...]:
    """Modules that the model has."""
    absent = {"latent_up": model.latent is None, "experts": model.experts is None}
    modules = (MODULES[name] for name in names)
    return tuple(module for module in modules if module and not absent.get(module, False))
