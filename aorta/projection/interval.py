"""Interval of a projection: from the likeness to measured runs, and from what is extrapolated.

Widths are logarithms; independent ones are added as squares. Reasons say how a job's width compares with
others'; how wide that is was calibrated by family (dense, mixture, hybrid, software nobody described) and
architecture, so that about seven of eight rows lie inside whose model, or whose release, the fit had not:
benchmarks/projection/interval_widths.py. A model of a family of which no model like it was measured gets the
errors that such models had when they were first tried.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from aorta.hardware.names import hardware_names
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.constants import constants
from aorta.projection.model import KINDS, Model
from aorta.projection.plan import Plan
from aorta.projection.prices import Anchor
from aorta.projection.software import measured_releases

MEASURED_PARTS: dict[str, frozenset[str]] = {
    "h100": frozenset({"bf16", "fp8"}),
    "h100-500w": frozenset({"bf16", "fp8"}),
    "h200": frozenset({"bf16"}),
    "b200": frozenset({"fp8"}),
    "gb200": frozenset({"fp8", "fp4"}),
    "gb300": frozenset({"fp8", "fp4"}),
    "a100": frozenset({"bf16"}),
    "mi300x": frozenset({"bf16"}),
    "mi325x": frozenset({"bf16"}),
    "mi355x": frozenset({"fp8"}),
}
"""Data types in which whole steps of a part were compared."""
SELDOM_MEASURED = ("a100", "a100-40gb", "mi300x", "mi325x", "mi350x", "mi355x", "h200", "gb300", "b300")
OWN = "aorta"
"""Its own training loop."""
UNNAMED_STACKS = frozenset({"megatron", "eager", "compiled"})
"""Kinds of kernels that runs of several measured frameworks share."""
LAYOUT = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "micro_batch_size",
    "recompute",
    "recompute_modules",
    "sharding",
    "sequence_parallel",
)
"""Settings by which layouts differ from an anchor's."""
Family = Literal["dense", "mixture", "hybrid"]
NOT_IN_VIEW = "not in view when the model was made"


class Widths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Width that each reason adds, as a logarithm; constants.yaml says what each was set from."""

    base: float
    """Width of any run, before a reason adds to it."""
    unseen: float
    """Error of a job that was not in view when rules and recipes were chosen: leaving groups out
    refits factors, but chooses no rule anew."""
    experts: float
    other_part: float
    """No step of the part was measured."""
    few_rows: float
    other_dtype: float
    other_stack: float
    other_family: float
    """Width for dense models judged by runs of mixtures alone, or the other way round; unused today."""
    release_unknown: float
    later_release: float
    """What releases change of one job, for those after the last measured one."""
    early_software: float
    plain_kernels: float
    data_parallel_only: float
    fp4: float
    adapters: float
    other_mixer: float
    """State spaces; half of it for windows and latent attention."""
    large_scale: float
    context_parallel: float
    """Multiplied by the share of attention in the step."""
    other_rings: float
    """As context_parallel, for software other than Megatron's."""
    dtensor: float
    host: float
    """Multiplied by the root of the host's share of the step."""
    exposed: float
    """Multiplied by the exposed share of the step."""
    long_sequence: float
    """Multiplied by the share of attention in the step."""
    recomputed_part: float
    new_mixture: float
    """A mixture of which no step was compared."""
    new_hybrid: float
    new_vendor: float
    """A family of which no step was compared on parts of the vendor."""
    anchored: float
    """Width of a job that is the anchor's own."""
    anchored_layout: float
    anchored_part: float
    anchored_dtype: float
    anchored_doubling: float
    """Multiplied by the doublings from the anchor's number of GPUs."""
    anchored_stack: float
    anchored_model: float
    anchored_rough: float
    """Times the five above for mixtures and state spaces, and for releases of which no step was measured."""
    skew_low: float
    """Skew of the interval: unknown causes slow a step down more often than they speed it up."""
    skew_high: float


WIDTHS = constants(Widths, "widths")


class Scales(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factor on the width of all reasons of a job, by what it is of."""

    dense: float
    """Dense models on architectures that are not below."""
    dense_sm_80: float
    dense_sm_90: float
    dense_sm_100: float
    dense_sm_103: float
    plain: float
    """Dense models under kernels of PyTorch."""
    mixture: float
    hybrid: float
    """Models with state spaces."""
    undescribed: float
    """Software of which no step was compared within a year of the release."""
    own: float
    """aorta's own training loop."""


SCALES = constants(Scales, "scales")
MEASURED_MIXTURES = frozenset(
    {
        "deepseek-v3",
        "gpt-oss-120b",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "nemotron-3-nano-30b-a3b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
    }
)
"""Mixtures and hybrids of which whole steps were compared."""
MEASURED_FAMILIES = frozenset(
    {("nvidia", "dense"), ("nvidia", "mixture"), ("nvidia", "hybrid"), ("amd", "dense")}
)
"""Families of which steps were compared, by vendor of the part."""


class Widening(NamedTuple):
    """A reason for a wider interval."""

    reason: str
    width: float
    """Logarithm that it stands for alone."""
    measured: bool = True
    """False: nothing of the kind was ever compared with a measurement."""
    known: bool = True
    """False: nothing that was measured says how far a projection may be off for this reason."""


def widenings(
    model: Model, plan: Plan, hardware: Hardware, breakdown_s: Mapping[str, float]
) -> list[Widening]:
    """Reasons for the width of a projected step's interval, the base first."""
    scale = scale_of(model, plan, hardware)
    reasons = [
        Widening("any run", WIDTHS.base),
        *([] if plan.software == OWN else [Widening(NOT_IN_VIEW, WIDTHS.unseen)]),
        *_hardware_reasons(plan, hardware),
        *_software_reasons(plan),
        *_model_reasons(model, plan),
        *_share_reasons(plan, breakdown_s),
    ]
    scaled = [reason._replace(width=scale * reason.width) for reason in reasons]
    return [*scaled, *_never_measured(model, plan, hardware)]


def _share_reasons(plan: Plan, breakdown_s: Mapping[str, float]) -> Iterator[Widening]:
    """Reasons that weigh by their share of the step, and its size."""
    total = sum(breakdown_s.values())
    shares = {name: seconds / total for name, seconds in breakdown_s.items()} if total else {}
    host, attention = shares.get("host", 0.0), shares.get("attention", 0.0)
    exposed = sum(share for name, share in shares.items() if name.startswith("exposed_"))
    if host > 0.02:
        yield Widening(f"{100 * host:.0f} % of the step waits for the host", WIDTHS.host * math.sqrt(host))
    if exposed > 0.05:
        text = f"{100 * exposed:.0f} % of the step is exposed communication"
        yield Widening(text, WIDTHS.exposed * exposed)
    if plan.cp > 1:
        width = WIDTHS.context_parallel if plan.stack == "megatron" else WIDTHS.other_rings
        yield Widening("context parallelism", width * max(0.3, attention))
    if attention > 0.3:
        text = f"attention is {100 * attention:.0f} % of the step"
        yield Widening(text, WIDTHS.long_sequence * attention)
    if plan.world_size > 2560:
        yield Widening("more than 2560 GPUs", WIDTHS.large_scale)


def family(model: Model) -> Family:
    """hybrid: with state spaces; mixture: with experts; else dense."""
    if any(KINDS[kind][0] == "state" for kind in model.layer_kinds):
        return "hybrid"
    return "mixture" if model.experts is not None else "dense"


def scale_of(model: Model, plan: Plan, hardware: Hardware) -> float:
    """The factor on the width of a job's reasons."""
    if plan.software == OWN:
        return SCALES.own
    if not _release_measured(plan):
        return SCALES.undescribed
    kind = family(model)
    if kind == "dense" and plan.stack != "megatron":
        return SCALES.plain
    scale: float = getattr(SCALES, f"{kind}_{hardware.architecture}", getattr(SCALES, kind))
    return scale


def _never_measured(model: Model, plan: Plan, hardware: Hardware) -> Iterator[Widening]:
    """What no measured step says anything about, which no scale of measured ones covers."""
    kind, name = family(model), hardware.name
    own_hz = load_hardware(name).compute.sustained_clock_hz if name in hardware_names() else math.inf
    clock_hz = hardware.compute.sustained_clock_hz
    if clock_hz > 1.001 * own_hz:
        asked = f"{clock_hz / 1e6:.0f} MHz, where {name} under load sustains {own_hz / 1e6:.0f}"
        yield Widening(asked, math.log(clock_hz / own_hz), False)
    if (hardware.vendor, kind) not in MEASURED_FAMILIES:
        text = f"not known: no step of a {kind} was measured on a part of {hardware.vendor.upper()}"
        yield Widening(text, WIDTHS.new_vendor, False, False)
    for one in plan.rests_on:
        text = f"the software's {one.setting} rests on one model ({one.model})"
        told_by_this = one.model == model.name
        width = 0.0 if told_by_this else 2 * one.left_out / (WIDTHS.skew_low + WIDTHS.skew_high)
        yield Widening(text, width, told_by_this)
    if kind != "dense" and model.name not in MEASURED_MIXTURES and plan.software != OWN:
        with_what = ", ".join(_features(model))
        text = f"not known: no step of {model.name} was measured ({kind} with {with_what})"
        yield Widening(text, WIDTHS.new_hybrid if kind == "hybrid" else WIDTHS.new_mixture, False, False)


def _features(model: Model) -> list[str]:
    """What sets a mixture or a hybrid apart from others, in words."""
    features = []
    if model.experts is not None:
        features.append(f"{model.experts.num_experts} experts of {model.experts.ffn}")
    mixers = {KINDS[kind][0] for kind in model.layer_kinds}
    named = (
        ("state spaces", "state" in mixers),
        ("windows", "window" in mixers),
        ("sinks", model.sinks),
        ("latent attention", model.latent is not None),
    )
    return features + [name for name, has in named if has]


def anchored_widenings(model: Model, plan: Plan, hardware: Hardware | None, anchor: Anchor) -> list[Widening]:
    """Reasons for the width of a step's interval that rests on a measured one: what differs from that one.

    hardware: None: the anchor's own part.
    """
    there = anchor.plan
    rough = WIDTHS.anchored_rough if model.experts or model.state or not _release_measured(plan) else 1.0
    reasons = [Widening(f"anchored on {anchor.name}", WIDTHS.anchored)]

    def add(reason: str, width: float) -> None:
        reasons.append(Widening(reason, width * rough))

    if any(getattr(plan, name) != getattr(there, name) for name in LAYOUT):
        add("another layout than the anchor's", WIDTHS.anchored_layout)
    if hardware is not None and hardware.name != anchor.part:
        add(f"the anchor ran on {anchor.part}", WIDTHS.anchored_part)
    if plan.dtype != there.dtype:
        add(f"the anchor ran in {there.dtype}", WIDTHS.anchored_dtype)
    if plan.world_size != there.world_size:
        doublings = abs(math.log2(plan.world_size / there.world_size))
        add(f"the anchor ran on {there.world_size} GPUs", WIDTHS.anchored_doubling * doublings)
    if plan.software != there.software:
        add(f"the anchor ran {there.software or 'other software'}", WIDTHS.anchored_stack)
    if _shape(model) != _shape(anchor.model):
        add(f"the anchor trained {anchor.model.name}", WIDTHS.anchored_model)
    return reasons


def layout_noise(model: Model, plan: Plan) -> float:
    """Logarithm by which two layouts of one job may differ in their errors."""
    rough = WIDTHS.anchored_rough if model.experts or model.state or not _release_measured(plan) else 1.0
    return WIDTHS.skew_high * rough * WIDTHS.anchored_layout


def with_anchor_bounds(step_s: float, model: Model, plan: Plan) -> tuple[float, float]:
    """The interval that a projection of this step would have with one node of the same job measured."""
    node = msgspec.structs.replace(
        plan, tp=1, pp=1, vpp=1, cp=1, ep=1, dp=plan.gpus_per_node, nodes=1, micro_batch_size=-1
    )
    anchor = Anchor("", model, node, "", {}, 1.0)
    reasons = anchored_widenings(model, plan, None, anchor)
    return bounds(step_s, reasons)


def _release_measured(plan: Plan) -> bool:
    """True where steps of the framework were compared, and of a release within a year of this one."""
    name, _, release = plan.software.partition("@")
    if name not in measured_releases() and name not in UNNAMED_STACKS:
        return name in ("", OWN)
    dated = _dated(name)
    return not release or not dated or min(abs(_months(release) - _months(one)) for one in dated) <= 12


def _dated(name: str) -> list[str]:
    """Measured releases of a framework in order, where they are dated."""
    return sorted(version for version in measured_releases().get(name, {}) if version != "undated")


def _months(release: str) -> int:
    year, month = release.split(".")[:2]
    return 12 * int(year) + int(month)


def _shape(model: Model) -> tuple[object, ...]:
    return (model.hidden, model.num_layers, model.ffn, model.num_heads, model.experts, model.state)


def _hardware_reasons(plan: Plan, hardware: Hardware) -> Iterator[Widening]:
    name = hardware.name
    dtypes = MEASURED_PARTS.get(name)
    if dtypes is None:
        yield Widening(f"no step was measured on {name}", WIDTHS.other_part, False)
    elif plan.dtype not in dtypes:
        yield Widening(f"no {plan.dtype} step was measured on {name}", WIDTHS.other_dtype, False)
    elif name in SELDOM_MEASURED and plan.software != OWN:
        yield Widening(f"few steps were measured on {name}", WIDTHS.few_rows)
    if plan.dtype == "fp4":
        yield Widening("FP4", WIDTHS.fp4)


def _software_reasons(plan: Plan) -> Iterator[Widening]:
    name, _, release = plan.software.partition("@")
    if name in UNNAMED_STACKS:
        yield Widening("no framework is named (--stack)", WIDTHS.other_stack)
    elif name and name != OWN and name not in measured_releases():
        yield Widening(f"no step of {name} was measured", WIDTHS.other_stack, False)
    elif not release and name != OWN:
        yield Widening("the software's release is not known", WIDTHS.release_unknown)
    dated = _dated(name)
    if release and dated and release > dated[-1] and _release_measured(plan):  # else its scale says more
        yield Widening(f"no step of {name} after {dated[-1]} was measured", WIDTHS.later_release, False)
    if plan.slowdown != 1.0:
        yield Widening("early software for the part", WIDTHS.early_software)
    if plan.stack != "megatron" and name != OWN:
        yield Widening("kernels of PyTorch", WIDTHS.plain_kernels)
        if plan.tp > 1:
            yield Widening("tensor parallelism by PyTorch", WIDTHS.dtensor)
    elif plan.tp == plan.pp == 1 and name != OWN:
        yield Widening("neither tensor nor pipeline parallelism", WIDTHS.data_parallel_only)
    if plan.recompute_modules or plan.recompute == "selective" or plan.recompute_layers:
        yield Widening("part of the layers is recomputed", WIDTHS.recomputed_part)


def _model_reasons(model: Model, plan: Plan) -> Iterator[Widening]:
    if model.experts is not None:
        yield Widening("mixture of experts", WIDTHS.experts / (2 if plan.software == OWN else 1))
    if plan.task == "lora":
        yield Widening("adapters", WIDTHS.adapters)
    mixers = {KINDS[kind][0] for kind in model.layer_kinds}
    if "state" in mixers:
        yield Widening("state spaces", WIDTHS.other_mixer, False)
    elif "window" in mixers or model.latent is not None:
        yield Widening("windows" if "window" in mixers else "latent attention", WIDTHS.other_mixer / 2)


def width_of(reasons: list[Widening]) -> float:
    """The width of all reasons together, as a logarithm."""
    return math.sqrt(sum(reason.width**2 for reason in reasons))


def bounds(step_s: float, reasons: list[Widening]) -> tuple[float, float]:
    """The least and the most that a step is likely to take."""
    width = width_of(reasons)
    return step_s * math.exp(-WIDTHS.skew_low * width), step_s * math.exp(WIDTHS.skew_high * width)
