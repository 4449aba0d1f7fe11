"""Software that runs a training step, as data, and the plans that follow from it.

Each file of stacks/ is one framework. `set` holds settings of a Plan; `rules` add to them where a job and a
release meet their conditions, later ones over earlier ones. Nothing else in the projection asks for the name
of a framework, so the command line (--stack nemo@25.04) and a table of measured rows give the same plan.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from aorta.config.yaml_files import near, read_structs
from aorta.errors import ConfigError
from aorta.hardware.part import Hardware
from aorta.projection.model import Model
from aorta.projection.plan import Plan, RestsOn

STACK_DIR = Path(__file__).resolve().parent / "stacks"
RELEASES = STACK_DIR.parent / "releases.yaml"
RELEASE = r"(2\d)\.(0[1-9]|1[0-2])(?:\.(\d\d?))?"
"""A release by year and month, with the number of its patch where it has one: 25.04, 26.04.01."""
EVERY = "any"
"""The file whose rules hold for every framework, before its own."""


class StackRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the jobs that meet all conditions of `when`; see job_facts for what can be asked."""

    set: dict[str, Any]
    source: str
    when: dict[str, Any] = {}
    since: str | None = None
    """First release, as year.month; a patch of it comes after it."""
    before: str | None = None
    """Release from which it holds no longer."""
    rests_on: RestsOn | None = None
    """The one model whose rows told it, where it was not read from the software."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Release of the rows whose source matches, where the source names something else."""

    pattern: str
    release: str
    source: str


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework: its settings, the rules of its releases, its names."""

    name: str
    source: str
    set: dict[str, Any] = {}
    rules: tuple[StackRule, ...] = ()
    aliases: tuple[str, ...] = ()
    row_source: str = ""
    """Rows of these frameworks are meant where their source holds this text."""
    origins: tuple[Origin, ...] = ()
    newest: str = "99.12"
    """The release that is taken where none is named."""
    fsdp: Literal["fsdp2", "zero3"] = "zero3"
    """Sharding that the framework calls fully sharded data parallelism."""
    selective: Literal["attention", "every_second_gemm"] = "attention"
    """Operations that its selective recomputation repeats."""
    pipeline_micro_batch: int | None = None
    """Sequences of a micro-batch of a pipeline, where its batch size is that of a rank."""


class ReleaseRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What published tables hold of a release."""

    rows: int
    jobs: int = 0
    """Jobs that the release before it ran as well."""
    gain: tuple[float, float, float] | None = None
    """Tokens per second over those under the release before: least, median and largest of these jobs."""


class Releases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of releases."""

    source: str
    releases: dict[str, dict[str, ReleaseRows]]


class Release(msgspec.Struct, frozen=True):
    """A framework at a release; None where it is not known."""

    stack: Stack
    version: str | None

    @property
    def label(self) -> str:
        return f"{self.stack.name}@{self.version}" if self.version else self.stack.name


@cache
def stacks() -> dict[str, Stack]:
    """Every framework by name."""
    read = (read_structs(path, Stack) for path in sorted(STACK_DIR.glob("*.yaml")))
    return {stack.name: stack for stack in read}


@cache
def measured_releases() -> dict[str, dict[str, ReleaseRows]]:
    """Releases of which whole steps were compared, by framework; `undated` where rows name none."""
    return read_structs(RELEASES, Releases).releases


def load_stack(name: str) -> Release:
    """nemo, or nemo@25.04 for a release by year and month, nemo@25.04.01 for a patch of it."""
    plain, _, text = name.strip().lower().partition("@")
    version = release_number(text)
    if text and version is None:
        raise ConfigError(f"--stack {name}: a release is year.month or year.month.patch, as in {plain}@25.04")
    frameworks = {name: stack for name, stack in stacks().items() if name != EVERY}
    for stack in frameworks.values():
        if plain in (stack.name, *stack.aliases) and not (stack.row_source and plain != stack.name):
            return Release(stack, version)
    names = [*frameworks, *(alias for stack in frameworks.values() for alias in stack.aliases)]
    raise ConfigError(f"--stack {plain} is not known{near(plain, sorted(set(names)))}")


def release_number(text: str) -> str | None:
    """The release that a text names and nothing else, in the form that sorts: 26.4 is none, 26.04.1 is
    26.04.01."""
    found = re.fullmatch(RELEASE, text)
    return ".".join(part.zfill(2) for part in found.groups() if part is not None) if found else None


def job_facts(model: Model, hardware: Hardware, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that rules can ask for: of the model, the part, and the layout as far as it is known already."""
    axes = {name: int(plan.get(name, 1)) for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
    return {
        "family": "moe" if model.experts else "dense",
        "model": model.name,
        "hidden": model.hidden,
        "sinks": model.sinks,
        "gated": model.gated_ffn,
        "rms_norm": not model.layer_norm,
        "rotary": model.positions == "rotary",
        "bias": model.linear_bias,
        "part": hardware.name,
        "architecture": hardware.architecture,
        "vendor": hardware.vendor,
        "domain": hardware.scale_up.domain_size,
        "dtype": plan.get("dtype", "bf16"),
        "task": plan.get("task", "pretrain"),
        "recompute": plan.get("recompute", "none"),
        "compile": plan.get("compile", False),
        "fp8_scaling": plan.get("fp8_scaling", "tensor"),
        "sharded": plan.get("sharding") in ("zero3", "fsdp2"),
        "chunks": axes["pp"] * axes["vpp"],
        **axes,
    }


def settings_of(release: Release, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a Plan that the release makes for a job."""
    version = release.version or release.stack.newest
    chosen = dict(release.stack.set)
    told: dict[str, RestsOn | None] = {}
    for rule in (*stacks()[EVERY].rules, *release.stack.rules):
        in_time = (rule.since is None or version >= rule.since) and (
            rule.before is None or version < rule.before
        )
        if in_time and _meets(rule.when, facts, release.stack.name):
            chosen |= rule.set
            told |= dict.fromkeys(rule.set, rule.rests_on)
    of_one_model = tuple(one for one in told.values() if one is not None)
    return chosen | ({"rests_on": of_one_model} if of_one_model else {})


def _meets(conditions: Mapping[str, Any], facts: Mapping[str, Any], name: str) -> bool:
    """True if all conditions hold: a value, a list of values, or '>1' for numbers above that."""
    for key, condition in conditions.items():
        if key not in facts:
            raise ConfigError(f"stacks/{name}.yaml: {key} is no fact of a job{near(key, facts)}")
        value = facts[key]
        if isinstance(condition, str) and condition.startswith(">"):
            if not value > int(condition[1:]):
                return False
        elif value not in (
            condition if isinstance(condition, Sequence) and not isinstance(condition, str) else [condition]
        ):
            return False
    return True


def planned(
    model: Model,
    hardware: Hardware,
    release: Release,
    layout: Mapping[str, Any],
    overrides: Mapping[str, Any] = {},
    *,
    compile_blocks: bool = False,
) -> Plan:
    """The plan of a layout under a stack's settings; `overrides` are what the user set, over both.

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
    settings["rests_on"] = [one for one in settings.get("rests_on", ()) if one.setting not in overrides]
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
