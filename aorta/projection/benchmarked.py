"""Measured layers in place of modelled ones: benchmark mode.

The file is JSON:

    {"schema": 1, "gpu": "h200", "source": "how it was measured",
     "units": [{"unit": "dense" | "moe" | "embedding" | "output",
                "tp": 1, "ep": 1, "micro_batch_size": 1, "seq_len": 4096, "dtype": "bf16",
                "recompute": "none", "forward_ms": 3.5, "backward_ms": 7.1}]}

Times are of one unit and micro-batch with the collectives of tp and ep inside, recomputation in backward_ms.
A unit measured at another tp, ep, recomputation or stack is carried over: measured plus what the model says
that the other layout adds, every measured part kept. Batch, sequence and precision must be those of the plan.

Written by `python -m aorta.training.layer_times`. Optional beside these: `stack` and `model` (shape) of the
file, and of a unit `sequence_parallel`, `vocab_parallel`, `num_repeats`, `forward_p90_ms`, `backward_p90_ms`.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from aorta.config.yaml_files import convert
from aorta.errors import NOT_JSON, ConfigError
from aorta.projection import stages
from aorta.projection.model import Model
from aorta.projection.plan import Plan, Stack
from aorta.projection.prices import Pricer


class MeasuredUnit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    unit: Literal["dense", "moe", "embedding", "output"]
    micro_batch_size: int
    seq_len: int
    forward_ms: float
    backward_ms: float
    tp: int = 1
    ep: int = 1
    dtype: Literal["bf16", "fp8"] = "bf16"
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool | None = None
    """None: as in the plan it is used for; so is vocab_parallel."""
    vocab_parallel: bool | None = None
    num_repeats: int | None = None
    forward_p90_ms: float | None = None
    backward_p90_ms: float | None = None

    def __post_init__(self) -> None:
        if self.forward_ms <= 0 or self.backward_ms < 0:
            raise ValueError("forward_ms must be above 0 and backward_ms not below")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that decide the time of a layer, with the keys of run.json."""

    h: int
    f: int
    nh: int
    nkv: int
    V: int
    E: int = 0
    k: int = 0


def shape_of(model: Model) -> ModelShape:
    """The shape of a model whose layers are all of one kind."""
    experts = model.experts
    return ModelShape(
        h=model.hidden,
        f=experts.ffn if experts else model.ffn,
        nh=model.num_heads,
        nkv=model.num_kv_heads,
        V=model.vocab_size,
        E=experts.num_experts if experts else 0,
        k=experts.num_active if experts else 0,
    )


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: Literal[1]
    gpu: str
    source: str
    units: list[MeasuredUnit]
    stack: Literal["eager", "compiled", "megatron"] | None = None
    """Software that ran the arithmetic; None: as in the plan."""
    model: ModelShape | None = None


def read_measurements(path: Path) -> Measurements:
    """The file, checked."""
    try:
        plain = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--measurements {path}: cannot be read: {error.strerror}") from None
    except NOT_JSON as error:
        raise ConfigError(f"--measurements {path}: not valid JSON: {error}") from None
    if isinstance(plain, dict) and plain.get("schema") != 1:
        raise ConfigError(f"--measurements {path}: schema must be 1, got {plain.get('schema')!r}")
    return convert(plain, Measurements, str(path))


def measured_pricer(path: Path, model: Model, plan: Plan, pricer: Pricer) -> Pricer:
    """A pricer whose units take the measured time in total; parts keep their modelled proportions."""
    measured = read_measurements(path)
    if measured.gpu != pricer.hardware.name:
        raise ConfigError(f"--measurements {path}: measured on {measured.gpu}, not on {pricer.hardware.name}")
    if measured.model is not None and measured.model != shape_of(model):
        raise ConfigError(f"--measurements {path}: layers of other sizes than those of {model.name}")
    scales: dict[str, tuple[float, float]] = {}
    for unit in measured.units:
        if unit.unit == "moe" and model.experts is None:
            raise ConfigError(f"--measurements {path}: has a moe layer, but {model.name} has no experts")
        scales[unit.unit] = _scale(unit, measured.stack or plan.stack, model, plan, pricer, path)
    unit_names = {stages.unit_name(kind) for kind in model.layer_kinds}
    missing = unit_names - scales.keys()
    if missing:
        raise ConfigError(f"--measurements {path}: has no {' and no '.join(sorted(missing))} layer")
    return pricer.with_scales(scales)


def _scale(
    unit: MeasuredUnit, stack: Stack, model: Model, plan: Plan, pricer: Pricer, path: Path
) -> tuple[float, float]:
    """Factors on the modelled forward and backward of a unit that make them the measured ones."""
    for name in ("micro_batch_size", "seq_len", "dtype"):
        if getattr(unit, name) != getattr(plan, name):
            raise ConfigError(
                f"--measurements {path}: {unit.unit} was measured with {name} {getattr(unit, name)}, "
                f"the plan has {getattr(plan, name)}"
            )
    measured_plan = msgspec.structs.replace(
        plan,
        tp=unit.tp,
        ep=unit.ep,
        pp=1,
        vpp=1,
        cp=1,
        dp=max(unit.ep // unit.tp, 1),
        nodes=1,
        gpus_per_node=max(unit.tp, unit.ep),
        global_batch_size=plan.micro_batch_size * max(unit.ep // unit.tp, 1),
        sequence_parallel=_or_default(unit.sequence_parallel, plan.sequence_parallel) and unit.tp > 1,
        vocab_parallel=_or_default(unit.vocab_parallel, plan.vocab_parallel),
        stack=stack,
        tp_overlap=plan.tp_overlap and unit.tp > 1 and unit.sequence_parallel is not False,
        deepep=plan.deepep and unit.ep > 1,
        recompute=unit.recompute,
        recompute_layers=None,
        recompute_modules=() if unit.recompute == "full" else plan.recompute_modules,
        ep_overlap=False,
        mtp=False,
        schedule="1f1b",
        fsdp_overlap=None,
        first_stage_layers=None,
        last_stage_layers=None,
    )
    model_there = _modelled(unit.unit, model, measured_plan, pricer)
    model_here = _modelled(unit.unit, model, plan, pricer)
    factors = []
    for measured_ms, modelled_as_measured_s, modelled_as_planned_s in zip(
        (unit.forward_ms, unit.backward_ms), model_there, model_here, strict=True
    ):
        carried = measured_ms / 1e3 + modelled_as_planned_s - modelled_as_measured_s
        if carried <= 0:
            raise ConfigError(
                f"--measurements {path}: {unit.unit} at tp {unit.tp} ep {unit.ep} is shorter than what "
                f"the plan's layout saves; measure closer to tp {plan.tp} ep {plan.ep}"
            )
        factors.append(carried / modelled_as_planned_s if modelled_as_planned_s > 0 else 1.0)
    return factors[0], factors[1]


def _or_default(value: bool | None, otherwise: bool) -> bool:
    return otherwise if value is None else value


def _modelled(unit: str, model: Model, plan: Plan, pricer: Pricer) -> tuple[float, float]:
    """Seconds of forward and backward of one unit, all its operations one after the other."""
    pricer = pricer.with_plan(plan)
    layer = next((n for n in range(model.num_layers) if stages.unit_name(model.layer_kind(n)) == unit), 0)
    stage: Any = stages.build(
        model, plan, pricer, range(layer, layer + 1), unit == "embedding", unit == "output"
    )
    chosen = {"embedding": stage.first, "output": stage.last}.get(unit, stage.blocks[0])
    return (
        sum(priced.seconds for priced in chosen.forward),
        sum(priced.seconds for priced in chosen.backward),
    )
