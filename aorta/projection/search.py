"""Layouts for a number of GPUs: what is legal and fits into memory, fastest first."""

import sys
from collections.abc import Iterator
from typing import Any

from aorta.errors import AortaError, ConfigError
from aorta.hardware import Hardware, load_hardware
from aorta.projection import show
from aorta.projection.memory import memory
from aorta.projection.model import Model, load_model
from aorta.projection.plan import Plan, check_count
from aorta.projection.pricing import Pricer
from aorta.projection.step import project


def search(
    model: str,
    gpu_arch: str | None,
    gpus: int,
    gpus_per_node: int,
    global_batch_size: int,
    seq_len: int,
    dtype: str,
    stack: str,
    top: int = 15,
    progress: bool = False,
) -> dict[str, Any]:
    """Every legal layout ranked by speed among those that fit, and the Pareto front of speed and memory."""
    if not gpu_arch:
        raise ConfigError("--gpu-arch is needed, for example --gpu-arch h100")
    shape, hardware = load_model(model), load_hardware(gpu_arch)
    counts = {
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "global_batch_size": global_batch_size,
        "seq_len": seq_len,
        "top": top,
    }
    for name, count in counts.items():
        check_count(name, count)
    if gpus % min(gpus, gpus_per_node):
        raise ConfigError(f"--gpus {gpus} must be a multiple of --gpus-per-node {gpus_per_node}")
    fixed = {
        "nodes": gpus // min(gpus, gpus_per_node),
        "gpus_per_node": min(gpus, gpus_per_node),
        "global_batch_size": global_batch_size,
        "seq_len": seq_len,
        "dtype": dtype,
        "stack": stack,
    }
    plans = list(candidates(shape, gpus, fixed))
    fitting = []
    smallest = None
    for plan in plans:
        used = memory(shape, plan, hardware.memory.hbm_bytes)
        smallest = min(smallest or used.total_bytes, used.total_bytes)
        if used.total_bytes <= used.capacity_bytes:
            fitting.append((plan, used))
    if not fitting:
        least = f"; the smallest needs {smallest / 2**30:.0f} GiB" if smallest else ""
        raise ConfigError(
            f"no layout of {gpus} x {hardware.name} fits {shape.name} at "
            f"{global_batch_size} x {seq_len} tokens{least}"
        )
    return _ranked(shape, hardware, fitting, len(plans), top, progress)


def _ranked(
    model: Model, hardware: Hardware, fitting: list[Any], num_legal: int, top: int, progress: bool
) -> dict[str, Any]:
    """All without the host's launches first, which is quick; then those that may be shown, as they are."""
    pricer = Pricer(hardware, fitting[0][0])
    coarse = _sorted(_rows(model, fitting, pricer.without("host"), progress))
    shown = coarse[: 2 * top] + _front(coarse)
    wanted = {row["number"] for row in shown}
    fine = _sorted(_rows(model, [fitting[number] for number in sorted(wanted)], pricer, progress))
    front = _front(fine)
    for row in fine:
        row["pareto"] = row in front
    for row in fine:
        del row["number"]
    return {
        "model": model.name,
        "gpu": hardware.name,
        "num_legal": num_legal,
        "num_fitting": len(fitting),
        "best": fine[:top],
        "pareto": front,
    }


def _rows(model: Model, fitting: list[Any], pricer: Pricer, progress: bool) -> list[dict[str, Any]]:
    rows = []
    for number, (plan, used) in enumerate(fitting):
        if progress and sys.stderr.isatty() and number % 20 == 0:
            print(f"\r{number} of {len(fitting)} layouts", end="", file=sys.stderr, flush=True)
        projection = project(model, plan, pricer)
        rows.append(
            {
                "number": number,
                "layout": show.layout(plan),
                "step_ms": projection.step_s * 1e3,
                "tokens_per_s_per_gpu": projection.tokens_per_s_per_gpu,
                "memory_gib": used.total_bytes / 2**30,
                "host_bound": projection.host_bound,
            }
        )
    if progress and sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return rows


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: float(row["step_ms"]))


def _front(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows sorted by speed, those that no faster one beats in memory."""
    front, least = [], float("inf")
    for row in rows:
        size = float(row["memory_gib"])
        if size < least:
            least = size
            front.append(row)
    return front


def candidates(model: Model, gpus: int, fixed: dict[str, Any]) -> Iterator[Plan]:
    """Legal plans. Batches that do not divide, splits that do not fit and the like are left out."""
    node = int(fixed["gpus_per_node"])
    for tp in (n for n in (1, 2, 4, 8) if n <= node):
        for pp in (n for n in (1, 2, 4, 8, 16) if tp * n <= gpus and n <= model.num_layers):
            if gpus % (tp * pp):
                continue
            for cp in (1, 2, 4) if fixed["seq_len"] >= 16384 else (1,):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                for changes in _variants(model, pp, cp, dp):
                    plan = Plan(
                        **fixed,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        dp=dp,
                        sequence_parallel=tp > 1,
                        tp_overlap=tp > 1 and fixed["stack"] == "megatron" and model.experts is None,
                        **changes,
                    )
                    try:
                        plan.check(model)
                    except AortaError:
                        continue
                    yield plan


def _variants(model: Model, pp: int, cp: int, dp: int) -> Iterator[dict[str, Any]]:
    experts = model.experts
    eps = [1] if experts is None else [n for n in (1, 2, 4, 8, 16, 32, 64) if experts.num_experts % n == 0]
    vpps = [1] if pp == 1 else [n for n in (1, 2, 4) if pp * n <= model.num_layers]
    shardings = ["zero1"] if dp * cp > 1 else ["ddp"]
    if pp == 1 and dp * cp > 1:
        shardings.append("zero3")
    for ep in eps:
        for vpp in vpps:
            for sharding in shardings:
                for micro_batch_size in (1, 2, 4):
                    for recompute in ("none", "full"):
                        yield {
                            "ep": ep,
                            "vpp": vpp,
                            "sharding": sharding,
                            "micro_batch_size": micro_batch_size,
                            "recompute": recompute,
                        }


def text(found: dict[str, Any]) -> str:
    fit = f"{found['num_fitting']} of {found['num_legal']} legal layouts fit"
    lines = [
        f"{found['model']} on {found['gpu']}: {fit}",
        "",
        f"{'tokens/s/GPU':>12s}{'step ms':>12s}{'GiB':>8s}   layout (* on the front of speed and memory)",
    ]
    lines += [_line(row) for row in found["best"]]
    rest = [row for row in found["pareto"] if row not in found["best"]]
    if rest:
        lines += ["", "further along the front:"] + [_line(row) for row in rest]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    mark = "*" if row["pareto"] else " "
    host = "  host-bound" if row["host_bound"] else ""
    return (
        f"{row['tokens_per_s_per_gpu']:12.0f}{row['step_ms']:12.1f}{row['memory_gib']:8.1f} {mark} "
        f"{row['layout']}{host}"
    )
