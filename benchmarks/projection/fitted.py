"""Everything that was fitted to whole published runs: few factors, each with the jobs it acts on.

A factor is shared by a part and data type, or by a framework's releases, never by a row. Where all rows that
could tell it are left out, `prior` takes its place: what one would have assumed without them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from projection.measured_steps import Row

from aorta.projection.plan import Plan
from aorta.projection.prices import Factors

HOPPER = ("h100", "h100-500w", "h800")
BLACKWELL = ("b200", "gb200")
ULTRA = ("b300", "gb300")
CDNA3 = ("mi300x", "mi325x")

YOUNG = 1.12
"""Prior of libraries in their first year or two on a part: half of the 27 % that H100 systems gained from one
year of software (blogs.nvidia.com/blog/mlperf-training-benchmarks, MLPerf Training 4.0)."""
FIRST_FLASH = 1.4
"""Prior of the first flash attention over the second: alike to twice (arXiv 2307.08691, abstract)."""
SLOW_EXPERTS = 1.2
"""Prior of experts in MXFP8 before the fused grouped MLP of Megatron-Bridge 0.5: that it came says that they
were slow, and not how much."""
ROUTED = ("gemm", "elementwise", "fp8_cast")
COMPUTE = ("gemm", "attention", "elementwise", "fp8_cast")


class FittedFactor(NamedTuple):
    """One factor; the job's plan or factors hold it."""

    name: str
    prior: float
    acts_on: Callable[[Row, Plan], bool]
    value: Callable[[Plan, Factors], float]
    categories: tuple[str, ...]
    """Categories of a step's breakdown that the factor multiplies."""


def _of_part(name: str, field: str, parts: tuple[str, ...], dtype: str, prior: float) -> FittedFactor:
    """A factor of a part's GEMMs in one data type."""
    return FittedFactor(
        name,
        prior,
        lambda row, plan: row.hardware.name in parts and plan.dtype == dtype,
        lambda plan, factors: float(getattr(factors, field)),
        ("gemm",),
    )


def _of_all(
    name: str, field: str, prior: float, acts_on: Callable[[Row, Plan], bool], category: str
) -> FittedFactor:
    return FittedFactor(
        name, prior, acts_on, lambda plan, factors: float(getattr(factors, field)), (category,)
    )


def _of_plan(
    name: str,
    field: str,
    acts_on: Callable[[Row, Plan], bool],
    categories: tuple[str, ...],
    prior: float = 1.0,
) -> FittedFactor:
    """A factor that stacks/*.yaml set for some releases."""
    return FittedFactor(
        name,
        prior,
        lambda row, plan: getattr(plan, field) != 1.0 and acts_on(row, plan),
        lambda plan, factors: float(getattr(plan, field)),
        categories,
    )


def _of_stack(
    name: str, field: str, stack: str, categories: tuple[str, ...], prior: float = 1.0
) -> FittedFactor:
    return _of_plan(name, field, lambda row, plan: _stack(row) == stack, categories, prior)


def _of_age(name: str, architecture: str, dtypes: tuple[str, ...], prior: float) -> FittedFactor:
    """Factor of the libraries' early releases for a part, in frameworks but NeMo and torchtitan, which have
    their own."""

    def acts_on(row: Row, plan: Plan) -> bool:
        return (
            row.hardware.architecture == architecture
            and plan.dtype in dtypes
            and not (_stack(row) == "nemo" and plan.tp * plan.pp == 1)
            and not (_stack(row) == "torchtitan" and architecture == "sm_90")
        )

    return _of_plan(name, "slowdown", acts_on, COMPUTE, prior)


def _stack(row: Row) -> str:
    return str(row.group.get("stack", "")).partition("@")[0]


def _has_experts_on_host(row: Row, plan: Plan) -> bool:
    return row.model.experts is not None and plan.stack == "megatron"


FITTED: tuple[FittedFactor, ...] = (
    _of_part("bf16 GEMMs of H100", "gemm", HOPPER, "bf16", 0.94),
    _of_part("FP8 GEMMs of H100", "fp8_gemm", HOPPER, "fp8", 1.0),
    _of_part("FP8 GEMMs of B200", "fp8_gemm", BLACKWELL, "fp8", 1.15),
    _of_part("FP8 GEMMs of B300", "fp8_gemm", ULTRA, "fp8", 1.15),
    _of_part("FP4 GEMMs of B200", "fp4_gemm", BLACKWELL, "fp4", 1.4),
    _of_part("FP4 GEMMs of B300", "fp4_gemm", ULTRA, "fp4", 1.4),
    _of_part("bf16 GEMMs of MI300", "gemm", CDNA3, "bf16", 1.0),
    _of_all("stragglers", "straggler", 0.02, lambda row, plan: plan.world_size > 8, "stragglers"),
    _of_all("host time of experts", "moe_layer_host_s", 6.5e-3, _has_experts_on_host, "host"),
    _of_age("bf16 on Hopper before 24.09", "sm_90", ("bf16",), YOUNG),
    _of_age("FP8 on Hopper before 24.09", "sm_90", ("fp8",), YOUNG),
    _of_age("Ampere before 24.01", "sm_80", ("bf16",), YOUNG),
    _of_age("Blackwell before 25.05", "sm_100", ("bf16", "fp8", "fp4"), YOUNG),
    _of_age("AMD before 25.05", "gfx942", ("bf16", "fp8"), YOUNG),
    _of_plan(
        "NeMo before 25.04 without tp",
        "slowdown",
        lambda row, plan: _stack(row) == "nemo" and plan.tp * plan.pp == 1,
        COMPUTE,
        YOUNG,
    ),
    _of_stack("llm-foundry: attention", "attention_factor", "llm-foundry", ("attention",), FIRST_FLASH),
    _of_plan(
        "torchtitan before 25.01 on Hopper",
        "slowdown",
        lambda row, plan: _stack(row) == "torchtitan" and row.hardware.architecture == "sm_90",
        COMPUTE,
        YOUNG,
    ),
    _of_stack("torchtitan: rings", "attention_factor", "torchtitan", ("attention",)),
    _of_stack("Megatron-Bridge from 26.01: host", "host_factor", "megatron-bridge", ("host",)),
    _of_plan(
        "Megatron-Bridge: experts in MXFP8 one by one",
        "expert_factor",
        lambda row, plan: plan.expert_factor > 1,
        ROUTED,
        SLOW_EXPERTS,
    ),
    _of_plan(
        "Megatron-Bridge from 26.06: fused experts in MXFP8",
        "expert_factor",
        lambda row, plan: plan.expert_factor < 1,
        ROUTED,
    ),
)


def prior_shift(factor: FittedFactor, plan: Plan, factors: Factors) -> float:
    """Log of what the factor would be without any row, over what it is."""
    return math.log(factor.prior / factor.value(plan, factors))


def slope_of(factor: FittedFactor, breakdown_s: Mapping[str, float]) -> float:
    """Change of the log step time per log of the factor, to first order.

    Bubbles, contention and stragglers grow with the work that they go with.
    """
    following = sum(breakdown_s.get(name, 0.0) for name in ("pipeline_bubble", "contention", "stragglers"))
    total = sum(breakdown_s.values())
    if factor.categories == ("stragglers",):
        return breakdown_s.get("stragglers", 0.0) / total
    return sum(breakdown_s.get(name, 0.0) for name in factor.categories) / (total - following)


PUBLISHED_ROWS = (
    "e0", "e2", "e3", "c0", "c2", "c3", "t0", "h1", "a1", "a2", "m0", "m2", "m4", "m7", "m8", "m9",
    "kt-175b-full", "kt-175b-selective", "i7-a100", "kt-n-1t-full", "kt-n-1t-selective", "fa1-8", "fa70-64",
    "bg175-2502", "e8-b200", "b8-2502", "bn15-2502", "bn340-2502", "eq235-b200-256", "eq235-b200-64",
    "eq30-b200", "e70-gb200-fp4", "e70-gb200-mx", "elora-gb200", "esft-gb200", "e8-gb200", "e405-gb200",
    "e405-gb200-mx", "gmx22-2504", "gmx7-2504", "gn340-2504", "e70-gb300-fp4", "e70-gb300-mx", "e405-gb300",
    "e405-gb300-b", "e405-gb300-fp4", "e405-gb300-mx", "eq30-gb300", "dg175-bf16-128", "dg175-bf16-2048",
    "dg175-bf16-512", "dg175-fp8-128", "dg175-fp8-2048", "dg175-fp8-512", "hg175-2502", "mlp-11616", "ng5",
    "i7-h100", "nl2-7", "nlora7", "nsft7", "nl3-8", "jlora8", "da405-bf16-1152", "da405-bf16-2304",
    "da405-bf16-576", "da405-fp8-1152", "da405-fp8-2304", "da405-fp8-576", "t8cp1", "t8cp2", "t8cp4",
    "t8cp8", "fh13-16k", "fh13-32k", "fh13-8", "fh1-8", "fh7-32k", "fh7-512", "fh7-64k", "fh7-8", "fh7-8k",
    "dn15-bf16-128", "dn15-bf16-16", "dn15-bf16-2048", "dn15-fp8-128", "dn15-fp8-16", "dn15-fp8-2048",
    "dn340-bf16-128", "dn340-bf16-2048", "dn340-bf16-512", "dn340-fp8-128", "dn340-fp8-2048",
    "dn340-fp8-512", "jloraq7", "eq30-h100", "jq30", "k1", "k2", "k3", "k4", "k5", "k6", "r70-MI300X",
    "r70-MI325X",
)  # fmt: skip

FITTED_ON: dict[str, Any] = {
    "kernels": "measured sheets and published single numbers, see aorta/hardware/parts/vendor",
    "steps": "gemm, contention_compute and dtensor_launch_s by `calibrate` on runs of one and two H200; runs "
    "of four are held out, but for fsdp_dtensor_unit_s: only they combine FSDP and tp, it is set from one",
    "trace": "memory shares and contention_communication from one trace of FSDP2 on four H200 (an 8B of four "
    "layers, not among the steps)",
    "published": PUBLISHED_ROWS,
    "published_note": "the factors of fitted.py, each shared by a part and data type or by a framework's "
    "releases; all complete rows of both tables were in view, and none of them is held out. Rows of other "
    "tables are, and leave_one_group_out says what the factors are worth without a group",
}
"""Data that the factors of steps were fitted to; everything else is held out."""
