"""Options of the command line that describe what is projected."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from aorta.errors import ConfigError
from aorta.hardware import Hardware, load_hardware
from aorta.projection.model import Model, load_model
from aorta.projection.plan import COUNTS, Plan, RecomputeModule, check_count

Command = TypeVar("Command", bound=Callable[..., Any])

CLOCKS_MHZ = (1.0, 100_000.0)
"""No GPU runs outside of these, and within them no time overflows."""

SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")

PLAN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--model", required=True, metavar="NAME|FILE", help="config/models, or a YAML file."),
    click.option("--gpu-arch", metavar="NAME|FILE", help="config/hardware, or a YAML file."),
    click.option("--nodes", type=int, default=1, show_default=True),
    click.option("--gpus-per-node", type=int, default=8, show_default=True),
    click.option("--dp", type=int, help="Default: what the other axes leave."),
    click.option("--tp", type=int, default=1, show_default=True),
    click.option("--pp", type=int, default=1, show_default=True),
    click.option("--vpp", type=int, default=1, show_default=True, help="Chunks per pipeline rank."),
    click.option("--cp", type=int, default=1, show_default=True),
    click.option("--ep", type=int, default=1, show_default=True),
    click.option("--micro-batch-size", type=int, default=1, show_default=True),
    click.option("--global-batch-size", type=int, help="Default: one micro-batch per data-parallel rank."),
    click.option("--seq-len", type=int, default=4096, show_default=True),
    click.option("--dtype", type=click.Choice(["bf16", "fp8", "fp4"]), default="bf16", show_default=True),
    click.option("--recompute", default="none", show_default=True, metavar="none|selective|full|N"),
    click.option("--recompute-modules", metavar="norm,activation,latent_up", help="Parts of every layer."),
    click.option("--mtp", is_flag=True, help="Train the layers that predict tokens further on."),
    click.option("--sharding", type=click.Choice(SHARDINGS), default="zero1", show_default=True),
    click.option("--sequence-parallel/--no-sequence-parallel", default=True, show_default=True),
    click.option("--tp-overlap", is_flag=True, help="Collectives of tp in chunks beside GEMMs."),
    click.option("--dp-overlap/--no-dp-overlap", default=True, help="Data-parallel traffic beside compute."),
    click.option("--grad-dtype", type=click.Choice(["fp32", "bf16"]), help="Of the gradient exchange."),
    click.option("--fp8-weights", is_flag=True, help="With fp8: no bf16 copy of the weights."),
    click.option("--schedule", type=click.Choice(["1f1b", "interleaved", "zero-bubble"]), default="1f1b"),
    click.option("--first-stage-layers", type=int, help="Layers of the first pipeline stage."),
    click.option("--last-stage-layers", type=int, help="Layers of the last pipeline stage."),
    click.option("--stack", type=click.Choice(["eager", "compiled", "megatron"]), default="megatron"),
    click.option("--attention", type=click.Choice(["cudnn", "flash"]), help="Kernel family."),
    click.option("--task", type=click.Choice(["pretrain", "lora"]), default="pretrain"),
    click.option("--moe-grouped-gemm", type=click.Choice(["turbo", "legacy"]), help="Default: turbo."),
    click.option("--enable-deepep", is_flag=True),
    click.option("--ep-overlap", is_flag=True, help="Exchange of tokens beside another micro-batch."),
    click.option("--fsdp-overlap", type=float, metavar="X", help="What if: share of FSDP traffic hidden."),
)

BACKEND_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--gemm-backend", default="tile", show_default=True, metavar="tile|roofline|table|origami"),
    click.option(
        "--gemm-table", type=click.Path(path_type=Path), help="Measured GEMMs of --gemm-backend table."
    ),
    click.option("--sdpa-backend", default="tile", show_default=True, metavar="tile|roofline|origami"),
    click.option("--gpu-clock-mhz", type=float, help="Scales compute rates, not memory or links."),
)


def options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Command], Command]:
    """Groups of options on one command, in order."""

    def add(command: Command) -> Command:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return add


def read(given: Mapping[str, Any]) -> tuple[Model, Plan, Hardware]:
    """Model, plan and hardware that the options name; refuses what would have no effect."""
    model = load_model(given["model"])
    if not given["gpu_arch"]:
        raise ConfigError("--gpu-arch is needed, for example --gpu-arch h100")
    clock_mhz = given.get("gpu_clock_mhz")
    if clock_mhz is not None and not CLOCKS_MHZ[0] <= clock_mhz <= CLOCKS_MHZ[1]:
        low, high = CLOCKS_MHZ
        raise ConfigError(f"--gpu-clock-mhz must be between {low:g} and {high:g}, got {clock_mhz:g}")
    _check_counts(given)
    hardware = load_hardware(given["gpu_arch"], clock_mhz)
    if given["moe_grouped_gemm"] and model.experts is None:
        raise ConfigError(f"--moe-grouped-gemm has no effect: {model.name} has no experts")
    if given["schedule"] != "1f1b" and given["pp"] == 1:
        raise ConfigError(f"--schedule {given['schedule']} has no effect without --pp above 1")
    ends = [name for name in ("first_stage_layers", "last_stage_layers") if given[name] is not None]
    if ends and given["pp"] == 1:
        raise ConfigError(f"--{ends[0].replace('_', '-')} has no effect without --pp above 1")
    if given.get("gemm_table") and given["gemm_backend"] != "table":
        raise ConfigError("--gemm-table has no effect without --gemm-backend table")
    if given.get("gemm_backend") == "table" and not given.get("gemm_table"):
        raise ConfigError("--gemm-backend table needs --gemm-table FILE")
    plan = plan_of(given)
    plan.check(model)
    return model, plan, hardware


def _check_counts(given: Mapping[str, Any]) -> None:
    """Before anything is worked out from them."""
    for name in (*COUNTS, "global_batch_size"):
        if given[name] is not None:
            check_count(name, given[name])
    for name in ("first_stage_layers", "last_stage_layers"):
        if given[name] is not None:
            check_count(name, given[name], least=0)


def plan_of(given: Mapping[str, Any]) -> Plan:
    """The plan of options, data parallelism and batch filled in."""
    gpus = given["nodes"] * given["gpus_per_node"]
    others = given["tp"] * given["pp"] * given["cp"]
    dp, batch = given["dp"], given["global_batch_size"]
    if dp is None:
        if gpus % others:
            raise ConfigError(f"tp x pp x cp = {others} must divide {gpus} GPUs")
        dp = gpus // others
    recompute, layers = _recompute(given["recompute"])
    return Plan(
        nodes=given["nodes"],
        gpus_per_node=given["gpus_per_node"],
        dp=dp,
        tp=given["tp"],
        pp=given["pp"],
        vpp=given["vpp"],
        cp=given["cp"],
        ep=given["ep"],
        micro_batch_size=given["micro_batch_size"],
        global_batch_size=given["micro_batch_size"] * dp if batch is None else batch,
        seq_len=given["seq_len"],
        dtype=given["dtype"],
        recompute=recompute,
        recompute_layers=layers,
        recompute_modules=_modules(given["recompute_modules"]),
        mtp=given["mtp"],
        sharding=given["sharding"],
        sequence_parallel=given["sequence_parallel"] and given["tp"] > 1,
        schedule=given["schedule"],
        first_stage_layers=given["first_stage_layers"],
        last_stage_layers=given["last_stage_layers"],
        stack=given["stack"],
        tp_overlap=given["tp_overlap"],
        grad_bytes={None: None, "fp32": 4, "bf16": 2}[given["grad_dtype"]],
        fp8_weights=given["fp8_weights"],
        dp_overlap=given["dp_overlap"],
        moe_grouped_gemm=given["moe_grouped_gemm"] or "turbo",
        deepep=given["enable_deepep"],
        ep_overlap=given["ep_overlap"],
        attention=given["attention"],
        task=given["task"],
        fsdp_overlap=given["fsdp_overlap"],
    )


def _modules(text: str | None) -> tuple[Any, ...]:
    names = tuple(text.split(",")) if text else ()
    known = get_args(RecomputeModule)
    for name in names:
        if name not in known:
            raise ConfigError(f"--recompute-modules {name} is not one of {', '.join(known)}")
    return names


def _recompute(text: str) -> tuple[Any, int | None]:
    if text in ("none", "selective", "full"):
        return text, None
    if text.isdecimal() and len(text) < 10 and int(text) > 0:  # Python reads no number of 5000 digits
        return "full", int(text)
    raise ConfigError(f"--recompute must be none, selective, full or a number of layers, got {text!r}")
