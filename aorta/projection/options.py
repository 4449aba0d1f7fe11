"""Options that describe a job: model, GPUs, layout, software; and the plan that they give."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from aorta.command_line import Decorated, option_group
from aorta.errors import ConfigError
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.model import Model, load_model
from aorta.projection.plan import COUNTS, Plan, RecomputeModule, check_count
from aorta.projection.software import load_stack, planned

SHARDING_CHOICES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp", "hsdp")
LAYOUT = (
    *("nodes", "gpus_per_node", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "global_batch_size"),
    *("seq_len", "dtype", "fp8_scaling", "task", "sharding"),
)
"""Options of a Plan's own names that the stack does not set."""
OTHERS = {"stack", "dp", "recompute", "recompute_modules"}
"""Fields of a Plan whose options mean something else. The other fields' options, where they are given, go
before what the stack sets."""


def _flag(name: str, text: str) -> Callable[[Any], Any]:
    """An option with --no- form; None where it is not given and the stack decides."""
    return click.option(f"--{name}/--no-{name}", default=None, help=text)


PLAN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--model", required=True, metavar="NAME|FILE", help="A packaged model (llama3-8b), or a YAML file."
    ),
    # click would ask for it also where a job's file is read alone, for what it says of the layout.
    click.option(
        "--gpu-arch", metavar="NAME|FILE", help="A packaged GPU (h100), or a YAML file.  [required]"
    ),
    click.option("--nodes", type=int, default=1, help="Nodes of the job."),
    click.option("--gpus-per-node", type=int, default=8),
    click.option("--dp", type=int, help="Default: what the other axes leave."),
    click.option("--tp", type=int, default=1, help="Tensor parallelism."),
    click.option("--pp", type=int, default=1, help="Pipeline parallelism."),
    click.option("--vpp", type=int, default=1, help="Chunks per pipeline rank."),
    click.option("--cp", type=int, default=1, help="Context parallelism."),
    click.option("--ep", type=int, default=1, help="Expert parallelism."),
    click.option("--micro-batch-size", type=int, default=1),
    click.option("--global-batch-size", type=int, help="Default: one micro-batch per data-parallel rank."),
    click.option("--seq-len", type=int, default=4096),
    click.option("--dtype", type=click.Choice(["bf16", "fp8", "fp4"]), default="bf16"),
    click.option("--recompute", default="none", metavar="none|selective|full|N"),
    click.option("--task", type=click.Choice(["pretrain", "lora"]), default="pretrain"),
    click.option("--sharding", type=click.Choice(SHARDING_CHOICES), default="zero1"),
    click.option(
        "--stack",
        default="megatron",
        metavar="NAME[@YY.MM[.PATCH]]",
        help="Framework and release, such as nemo@25.04 or torchtitan; or eager, compiled, megatron. "
        "It sets every option that is not given.",
    ),
    click.option("--compile", "compile_blocks", is_flag=True, help="torch.compile, where the stack asks."),
    click.option(
        "--recompute-modules",
        metavar="norm,activation,latent_up,ffn,experts",
        help="Parts of every layer.",
    ),
    _flag("mtp", "Train the layers that predict tokens further on."),
    _flag("sequence-parallel", "Split norms and residuals over tp."),
    _flag("tp-overlap", "Collectives of tp in chunks beside GEMMs."),
    _flag("dp-overlap", "Data-parallel traffic beside compute."),
    _flag("reshard-after-forward", "FSDP: gather weights again for the backward pass."),
    click.option("--forward-prefetch", type=int, metavar="N", help="FSDP2: blocks gathered ahead, forward."),
    click.option("--backward-prefetch", type=int, metavar="N", help="FSDP2: and backward. Default: 1."),
    click.option("--grad-sync", type=click.Choice(["each", "last"]), help="FSDP: in which micro-batches."),
    click.option("--replicas", type=int, help="HSDP: copies of the sharded weights."),
    click.option(
        "--grad-dtype", type=click.Choice(["fp32", "bf16"]), help="Data type of the gradient exchange."
    ),
    click.option("--fp8-scaling", type=click.Choice(["tensor", "mx"]), default="tensor"),
    _flag("fp8-weights", "With fp8: no bf16 copy of the weights."),
    click.option("--schedule", type=click.Choice(["1f1b", "interleaved", "zero-bubble"])),
    click.option("--first-stage-layers", type=int, help="Layers of the first pipeline stage."),
    click.option("--last-stage-layers", type=int, help="Layers of the last pipeline stage."),
    click.option(
        "--attention",
        type=click.Choice(["cudnn", "flash", "unfused", "unfused_windows"]),
        help="Kernel family.",
    ),
    click.option("--cp-exchange", type=click.Choice(["ring", "all_gather", "all_to_all"])),
    click.option(
        "--adapters", type=click.Choice(["none", "attention", "all"]), help="Linear layers that LoRA adapts."
    ),
    click.option("--adapter-rank", type=int),
    click.option("--moe-grouped-gemm", type=click.Choice(["turbo", "legacy"]), help="Default: turbo."),
    click.option("--expert-tp", "expert_tp_size", type=int, help="GPUs that split one expert."),
    click.option("--enable-deepep/--no-deepep", "deepep", default=None),
    _flag("ep-overlap", "Exchange of tokens beside another micro-batch."),
    _flag("cuda-graphs", "Kernels launched as recorded graphs."),
    click.option(
        "--activation-offload",
        type=float,
        metavar="X",
        help="Share of the activations kept in the host's memory between the passes.",
    ),
    click.option("--fsdp-overlap", type=float, metavar="X", help="What if: share of FSDP traffic hidden."),
)
WHAT_IF_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--set",
        "changes",
        multiple=True,
        metavar="KEY=VALUE",
        help="What if: hardware.memory.sustained_hbm_bytes_per_s=x2, plan.slowdown=1.1, factors.gemm=0.9.",
    ),
    click.option(
        "--measured",
        type=click.Path(path_type=Path),
        metavar="RUN|FILE",
        help="One measured step to start from: the folder of a run, or a job file with step_ms.",
    ),
    click.option(
        "--measured-as",
        multiple=True,
        metavar="KEY=VALUE",
        help="What the measured job ran with where it differs from this one, such as tp=2.",
    ),
)
CLOCK_OPTION: tuple[Callable[[Any], Any], ...] = (
    click.option("--gpu-clock-mhz", type=float, help="Scales compute rates, not memory or links."),
)


def _name(option: Callable[[Any], Any]) -> str:
    """The parameter that an option sets."""

    def command() -> None: ...

    return str(option(command).__click_params__[0].name)


SEARCHED: dict[str, Any] = {
    **dict.fromkeys(("nodes", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size"), 1),
    **dict.fromkeys(("dp", "recompute_modules", "replicas", "schedule", "expert_tp_size", "deepep")),
    **dict.fromkeys(("first_stage_layers", "last_stage_layers", "ep_overlap", "fsdp_overlap")),
    **{"recompute": "none", "sharding": "zero1"},
}
"""Options that `search` chooses itself, or leaves to the stack, with what stands for them in one layout."""
_BATCH_OF_SEARCH = click.option(
    "--global-batch-size", type=int, help="Batch at which layouts are compared.  [required]"
)
SEARCH_OPTIONS = tuple(
    _BATCH_OF_SEARCH if _name(option) == "global_batch_size" else option
    for option in PLAN_OPTIONS
    if _name(option) not in SEARCHED
)


def options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Decorated], Decorated]:
    """Groups of options on one command, in order."""
    return option_group(*(option for group in groups for option in group))


def read(option_values: Mapping[str, Any]) -> tuple[Model, Plan, Hardware]:
    """Model, plan and hardware that the options name; refuses what would have no effect."""
    _check_counts(option_values)
    model, hardware = model_and_hardware(option_values)
    if option_values["moe_grouped_gemm"] and model.experts is None:
        raise ConfigError(f"--moe-grouped-gemm has no effect: {model.name} has no experts")
    if option_values["schedule"] not in (None, "1f1b") and option_values["pp"] == 1:
        raise ConfigError(f"--schedule {option_values['schedule']} has no effect without --pp above 1")
    if option_values["task"] != "lora" and (option_values["adapters"] or option_values["adapter_rank"]):
        raise ConfigError("--adapters and --adapter-rank have no effect without --task lora")
    ends = [name for name in ("first_stage_layers", "last_stage_layers") if option_values[name] is not None]
    if ends and option_values["pp"] == 1:
        raise ConfigError(f"--{ends[0].replace('_', '-')} has no effect without --pp above 1")
    plan = plan_of(option_values, model, hardware)
    plan.check(model)
    return model, plan, hardware


def model_and_hardware(option_values: Mapping[str, Any]) -> tuple[Model, Hardware]:
    model = load_model(option_values["model"])
    if not option_values["gpu_arch"]:
        raise ConfigError("--gpu-arch is needed, for example --gpu-arch h100")
    return model, load_hardware(option_values["gpu_arch"], option_values.get("gpu_clock_mhz"))


def _check_counts(option_values: Mapping[str, Any]) -> None:
    """Refuses impossible counts before anything is computed from them."""
    for name in (*COUNTS, "global_batch_size", "adapter_rank", "expert_tp_size"):
        if option_values[name] is not None:
            check_count(name, option_values[name])
    for name in ("first_stage_layers", "last_stage_layers"):
        if option_values[name] is not None:
            check_count(name, option_values[name], least=0)


def plan_of(option_values: Mapping[str, Any], model: Model, hardware: Hardware) -> Plan:
    """The plan of options, data parallelism and batch filled in, and from the stack what is not given."""
    gpus = option_values["nodes"] * option_values["gpus_per_node"]
    model_parallel = option_values["tp"] * option_values["pp"] * option_values["cp"]
    dp, batch = option_values["dp"], option_values["global_batch_size"]
    if dp is None:
        if gpus % model_parallel:
            enough = f"; {model_parallel} GPUs would do" if gpus < model_parallel else ""
            raise ConfigError(f"tp x pp x cp = {model_parallel} must divide {gpus} GPUs{enough}")
        dp = gpus // model_parallel
    recompute, layers = _recompute(option_values["recompute"])
    layout = {name: option_values[name] for name in LAYOUT} | {"dp": dp}
    if batch is None:
        layout["global_batch_size"] = option_values["micro_batch_size"] * dp
    layout |= {"recompute": recompute, "recompute_layers": layers}
    over = overrides(option_values)
    release = load_stack(option_values["stack"])
    return planned(model, hardware, release, layout, over, compile_blocks=option_values["compile_blocks"])


def overrides(option_values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Plan that options give over those of the stack."""
    names = option_values.keys() & set(Plan.__struct_fields__) - OTHERS - set(LAYOUT)
    over = {name: option_values[name] for name in sorted(names) if option_values[name] is not None}
    if option_values["grad_dtype"] is not None:
        over["grad_bytes"] = {"fp32": 4, "bf16": 2}[option_values["grad_dtype"]]
    if option_values.get("recompute_modules"):
        over["recompute_modules"] = _modules(option_values["recompute_modules"])
    return over


def _modules(text: str | None) -> tuple[Any, ...]:
    names = tuple(text.split(",")) if text else ()
    module_names = get_args(RecomputeModule)
    for name in names:
        if name not in module_names:
            raise ConfigError(f"--recompute-modules {name} is not one of {', '.join(module_names)}")
    return names


def _recompute(text: str) -> tuple[Any, int | None]:
    if text in ("none", "selective", "full"):
        return text, None
    if text.isdecimal() and len(text) < 10 and int(text) > 0:  # Python reads no number of 5000 digits
        return "full", int(text)
    raise ConfigError(f"--recompute must be none, selective, full or a number of layers, got {text!r}")
