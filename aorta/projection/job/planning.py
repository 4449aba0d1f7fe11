"""Plans from a layout and a stack: one way for the command line and for tables of measured rows."""

from collections.abc import Mapping
from typing import Any

import msgspec

from aorta.errors import ConfigError
from aorta.hardware import Hardware
from aorta.projection.job.model import Model
from aorta.projection.job.plan import Plan
from aorta.projection.job.software import Release, job_facts, settings_of


def planned(
    model: Model,
    hardware: Hardware,
    release: Release,
    layout: Mapping[str, Any],
    overrides: Mapping[str, Any] = {},
    *,
    compile_blocks: bool = False,
) -> Plan:
    """The plan of a layout under a stack's settings; `given` is what somebody set, over both.

    layout: axes, batch, sequence, dtype, task, `sharding` (fsdp and hsdp as well) and `recompute` as people
    write them.
    """
    stack = release.stack
    resolved = dict(layout)
    hybrid = resolved["sharding"] == "hsdp"
    if resolved["sharding"] in ("fsdp", "hsdp"):
        resolved["sharding"] = stack.fsdp
    if resolved["recompute"] == "selective" and stack.selective == "every_second_gemm":
        resolved |= {"recompute": "none", "recompute_modules": ("every_second_gemm",)}
    facts = job_facts(
        model, hardware, resolved | {"compile": compile_blocks, "recompute": layout["recompute"]}
    )
    settings: dict[str, Any] = {"software": release.label, "sequence_parallel": resolved["tp"] > 1}
    if hybrid:  # sharded inside a node, copied across
        ranks = resolved["dp"] * resolved["cp"]
        inside = min(int(hardware.scale_out.gpus_per_node), ranks)
        settings["replicas"] = max(1, ranks // inside)
    settings |= applicable(settings_of(release, facts), resolved, model) | dict(overrides)
    if settings.get("sequence_parallel") and resolved["tp"] == 1:
        settings["sequence_parallel"] = False
    try:
        return msgspec.convert({**resolved, **settings}, Plan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"stack {release.label}: {error}") from None


def applicable(settings: Mapping[str, Any], layout: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """A stack's settings without those that a layout has no use for, such as a dispatcher without experts.

    What somebody asks for by hand is refused where it cannot be; a recipe is only a usual way to run.
    """
    sharded = layout["sharding"] in ("zero3", "fsdp2")
    experts = model.experts is not None and layout["ep"] > 1
    pipelined = layout["pp"] > 1 and not sharded
    ways = {
        "deepep": experts,
        "ep_overlap": experts and pipelined and layout["recompute"] != "full",
        "tp_overlap": layout["tp"] > 1 and settings.get("sequence_parallel", True),
        "dp_overlap": not sharded,
        "mtp": bool(model.num_mtp_layers),
        "recompute_modules": layout["recompute"] != "full",
        "schedule": layout["pp"] > 1,
        "first_stage_layers": layout["pp"] > 1,
        "last_stage_layers": layout["pp"] > 1,
    }
    chosen = {name: value for name, value in settings.items() if ways.get(name, True)}
    if "recompute_modules" in chosen and model.latent is None:
        chosen["recompute_modules"] = [part for part in chosen["recompute_modules"] if part != "latent_up"]
    return chosen
