"""Layouts for a number of GPUs: what is legal and fits into memory, fastest first."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aorta.errors import AortaError, ConfigError
from aorta.hardware.part import Hardware
from aorta.projection import stages
from aorta.projection.interval import layout_noise
from aorta.projection.memory import MemoryEstimate, memory
from aorta.projection.model import Model
from aorta.projection.ops import CollectiveOp
from aorta.projection.plan import Plan, check_count, layout_text
from aorta.projection.prices import Pricer
from aorta.projection.software import Release, planned
from aorta.projection.step import project
from aorta.projection.whatif import Job

FURTHER = 6
"""Layouts beyond twice the wanted ones that are worked out in full, since the quick order is not exact."""


def search(job: Job, release: Release, fixed: dict[str, Any], top: int = 15) -> dict[str, Any]:
    """Every legal layout ranked by speed among those that fit, and the Pareto front of speed and memory.

    job: model, part, factors, anchor, and the plan of one layout. fixed: what all layouts share: `layout`
    (nodes, batch, sequence, precision), `overrides` of the stack, `compile_blocks`, `changes` of the plan.
    """
    check_count("top", top)
    plan = job.plan
    plans = list(candidates(job.model, job.hardware, release, fixed))
    if not plans:
        raise ConfigError(
            f"no layout of {plan.nodes * plan.gpus_per_node} x {job.hardware.name} is legal for a batch of "
            f"{plan.global_batch_size}"
        )
    pricer = job.pricer().with_plan(plans[0])
    quick = Quick(job.model, pricer)
    ranked = sorted(plans, key=quick.step_s)
    fitting, smallest, examined = _fitting(job.model, job.hardware, ranked, 2 * top + FURTHER)
    if not fitting:
        raise ConfigError(
            f"no layout of {plan.nodes * plan.gpus_per_node} x {job.hardware.name} fits {job.model.name} at "
            f"{plan.global_batch_size} x {plan.seq_len} tokens; the smallest needs {smallest / 2**30:.0f} GiB"
        )
    return _ranked(job, pricer, fitting, len(plans), examined, top)


def candidates(
    model: Model, hardware: Hardware, release: Release, fixed: Mapping[str, Any]
) -> Iterator[Plan]:
    """Legal plans. Batches that do not divide, splits that do not fit and the like are left out."""
    layout, node = fixed["layout"], int(fixed["layout"]["gpus_per_node"])
    gpus = node * int(layout["nodes"])
    for tp in (n for n in (1, 2, 4, 8) if n <= node):
        for pp in (n for n in (1, 2, 4, 8, 16, 32) if tp * n <= gpus and n <= model.num_layers):
            for cp in (n for n in (1, 2, 4, 8, 16) if n == 1 or layout["seq_len"] // n >= 2048):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                mesh = dict(layout, tp=tp, pp=pp, cp=cp, dp=dp)
                yield from _legal(model, hardware, release, mesh, fixed)


def _legal(
    model: Model, hardware: Hardware, release: Release, mesh: dict[str, Any], fixed: Mapping[str, Any]
) -> Iterator[Plan]:
    """Legal plans of one mesh, under the stack's settings and the user's."""
    settings: dict[tuple[Any, ...], Plan | None] = {}
    for changes in _variants(model, mesh):
        batch = changes.pop("micro_batch_size")
        expert_tp = changes.pop("expert_tp_size", None)
        key = tuple(changes.values())
        if key not in settings:
            try:
                settings[key] = planned(
                    model,
                    hardware,
                    release,
                    mesh | changes | {"micro_batch_size": batch},
                    fixed["overrides"],
                    compile_blocks=fixed["compile_blocks"],
                )
            except AortaError:
                settings[key] = None
        plan = settings[key]
        if plan is None:
            continue
        chosen = {"micro_batch_size": batch, **fixed["changes"]}
        if expert_tp is not None:
            chosen["expert_tp_size"] = expert_tp
        plan = msgspec.structs.replace(plan, **chosen)
        try:
            plan.check(model)
        except AortaError:
            continue
        yield plan


def _variants(model: Model, mesh: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Choices that one mesh leaves open: experts, chunks, sharding, recomputation, micro-batch."""
    tp, pp, ranks = mesh["tp"], mesh["pp"], mesh["dp"] * mesh["cp"]
    experts = model.experts
    splits: list[dict[str, Any]] = [{"ep": 1}]
    if experts is not None:
        splits += [
            {"ep": ep, "expert_tp_size": width}
            for ep in (2, 4, 8, 16, 32, 64)
            if experts.num_experts % ep == 0
            for width in sorted({1, tp})
        ]
    layers = model.num_layers
    chunks = (
        [1]
        if pp == 1
        else [n for n in range(1, 21) if layers % (pp * n) == 0 or (layers + 2) % (pp * n) == 0]
    )
    shardings = ["zero1"] if ranks > 1 else ["ddp"]
    if pp == 1 and ranks > 1:
        shardings.append("fsdp")
        if ranks > mesh["gpus_per_node"] and ranks % mesh["gpus_per_node"] == 0:
            shardings.append("hsdp")
    recomputes: list[dict[str, Any]] = [
        {"recompute": "none", "recompute_layers": None},
        {"recompute": "selective", "recompute_layers": None},
        {"recompute": "full", "recompute_layers": max(1, layers // 2)},
        {"recompute": "full", "recompute_layers": None},
    ]
    batches = [n for n in (1, 2, 4, 8) if mesh["global_batch_size"] % (n * mesh["dp"]) == 0]
    for split, sharding, recompute, vpp, batch in itertools.product(
        splits, shardings, recomputes, chunks, batches
    ):
        yield split | {"sharding": sharding} | recompute | {"vpp": vpp, "micro_batch_size": batch}


class Quick:
    """A step in some microseconds, to order thousands of layouts: layers added up, bubble by its closed form,
    and the part of the data-parallel traffic that overlap usually leaves."""

    def __init__(self, model: Model, pricer: Pricer) -> None:
        self.model, self.pricer = model, pricer
        self._gather_seconds: dict[tuple[int, ...], float] = {}
        self._pass_seconds: dict[tuple[Any, ...], tuple[float, float, float, float]] = {}

    def step_s(self, plan: Plan) -> float:
        """Seconds, good for an order and for nothing else."""
        layers_s, ends_s = self._pass_s(plan)
        stage_s = layers_s / plan.pp
        count = plan.num_micro_batches
        bubble = (plan.pp - 1) / (plan.vpp * count)
        compute_s = count * (stage_s + ends_s / (plan.pp if plan.pp > 1 else 1)) * (1 + bubble)
        return compute_s + self._exchange_s(plan, compute_s)

    def _pass_s(self, plan: Plan) -> tuple[float, float]:
        """Seconds of all layers of a micro-batch, recomputation included, and of embedding with output."""
        key = (plan.tp, plan.cp, plan.ep, plan.expert_tp, plan.micro_batch_size)
        if key not in self._pass_seconds:
            self._pass_seconds[key] = self._passes(plan)
        forward_s, attention_s, backward_s, ends_s = self._pass_seconds[key]
        share = (plan.recompute_layers or self.model.num_layers) / self.model.num_layers
        again_s = {"none": 0.0, "selective": attention_s, "full": forward_s * share}[plan.recompute]
        return forward_s + backward_s + again_s, ends_s

    def _passes(self, plan: Plan) -> tuple[float, float, float, float]:
        """Seconds of all forward passes, their attention, all backward passes, embedding and output."""
        once = msgspec.structs.replace(plan, recompute="none", recompute_layers=None)
        pricer = self.pricer.with_plan(once)
        stage = stages.build(self.model, once, pricer, range(self.model.num_layers), True, True)
        forward_s = attention_s = backward_s = 0.0
        units = {id(unit): unit for unit in stage.blocks}
        for number, count in Counter(map(id, stage.blocks)).items():
            unit = units[number]
            forward_s += count * sum(priced.seconds for priced in unit.forward)
            backward_s += count * sum(priced.seconds for priced in unit.backward)
            attention_s += count * sum(
                priced.seconds for priced in unit.forward if priced.category == "attention"
            )
        ends = [unit for unit in (stage.first, stage.last) if unit is not None]
        ends_s = sum(priced.seconds for unit in ends for priced in (*unit.forward, *unit.backward))
        return forward_s, attention_s, backward_s, ends_s

    def _exchange_s(self, plan: Plan, compute_s: float) -> float:
        if plan.shard_ranks == 1:
            return 0.0
        key = (plan.tp, plan.pp, plan.ep, plan.shard_ranks)
        gather = self._gather_seconds.get(key)
        if gather is None:
            params = self.model.num_params / plan.tp / plan.pp / (plan.ep if self.model.experts else 1)
            op = CollectiveOp("weights", "optimizer", "all_gather", "dp", 2.0 * params)
            gather = self._gather_seconds[key] = self.pricer.with_plan(plan).price(op).seconds
        if plan.is_fsdp:
            total = 3.5 * gather * plan.num_micro_batches
            return max(0.05 * total, total - 0.8 * compute_s)
        return 3 * gather * (0.1 if plan.pp == 1 else 1 / plan.vpp / plan.pp)


def _fitting(
    model: Model, hardware: Hardware, ranked: list[Plan], max_layouts: int
) -> tuple[list[tuple[Plan, MemoryEstimate]], float, int]:
    """The first layouts of a ranking that the estimate of memory allows, and how many were looked at."""
    fitting = []
    smallest = float("inf")
    for number, plan in enumerate(ranked):
        memory_estimate = memory(model, plan, hardware.memory.hbm_bytes)
        smallest = min(smallest, memory_estimate.total_bytes)
        if memory_estimate.total_bytes <= memory_estimate.capacity_bytes:
            fitting.append((plan, memory_estimate))
            if len(fitting) == max_layouts:
                return fitting, smallest, number + 1
    return fitting, smallest, len(ranked)


def _ranked(
    job: Job, pricer: Pricer, fitting: list[Any], num_legal: int, examined: int, top: int
) -> dict[str, Any]:
    """The best layouts projected in full, and the Pareto front among them."""
    fine = sorted(_rows(job.model, fitting, pricer), key=lambda row: float(row["step_ms"]))
    front = _front(fine)
    noise = layout_noise(job.model, job.plan)
    best_ms = float(fine[0]["step_ms"])
    for row in fine:
        row["pareto"] = any(row is member for member in front)
        row["as_good_as_best"] = row["step_ms"] <= best_ms * math.exp(noise)
    return {
        "model": job.model.name,
        "gpu": job.hardware.name,
        "stack": job.plan.software,
        "anchor": None if job.anchor is None else job.anchor.name,
        "num_legal": num_legal,
        "num_examined": examined,
        "num_fitting": len(fitting),
        "noise": math.expm1(noise),
        "best": fine[:top],
        "pareto": front,
    }


def _rows(model: Model, fitting: list[Any], pricer: Pricer) -> list[dict[str, Any]]:
    rows = []
    for plan, memory_estimate in fitting:
        projection = project(model, plan, pricer)
        rows.append(
            {
                "layout": layout_text(plan),
                **projection.times,
                "memory_gib": memory_estimate.total_bytes / 2**30,
                "memory_verdict": memory_estimate.verdict,
                "host_bound": projection.host_bound,
            }
        )
    return rows


def _front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows, sorted by speed, that no faster row beats in memory."""
    front, least = [], float("inf")
    for row in rows:
        size = float(row["memory_gib"])
        if size < least:
            least = size
            front.append(row)
    return front


def text(result: dict[str, Any]) -> str:
    fit = f"the fastest of {result['num_legal']} legal layouts that fit ({result['num_examined']} looked at)"
    by = f", {result['stack']}" if result["stack"] else ""
    lines = [f"{result['model']} on {result['gpu']}{by}: {fit}"]
    if result["anchor"]:
        lines.append(f"anchored on {result['anchor']}")
    lines += [
        "",
        f"  {'tokens/s/GPU':>12s}{'step ms':>10s}{'range':>16s}{'GiB':>7s}   layout",
    ]
    lines += [_line(row) for row in result["best"]]
    front_only = [row for row in result["pareto"] if row not in result["best"]]
    if front_only:
        lines += ["", "further along the front of speed and memory:"] + [_line(row) for row in front_only]
    lines += [
        "",
        "= as good as the best: a measurement alone tells layouts within"
        f" {100 * result['noise']:.0f} % apart",
        "* on the front of speed and memory   tight: fits with what the stack can save",
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    same = "=" if row["as_good_as_best"] else " "
    mark = "*" if row["pareto"] else " "
    spread = "{:.0f}..{:.0f}".format(*row["interval_ms"])
    notes = "  host-bound" if row["host_bound"] else ""
    notes += "  tight" if row["memory_verdict"] == "tight" else ""
    return (
        f"{same} {row['tokens_per_s_per_gpu']:12.0f}{row['step_ms']:10.1f}{spread:>16s}"
        f"{row['memory_gib']:7.1f} {mark} {row['layout']}{notes}"
    )
