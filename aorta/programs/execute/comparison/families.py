"""Strategies tried for an operation: families of alternatives; the best of each goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from aorta.programs.execute.strategies.base import Strategy, StrategyBench, StrategyUnavailable
from aorta.programs.execute.strategies.chunked import Chunked
from aorta.programs.execute.strategies.copy_engine import GatherByCopy, GatherByPull, ReduceByCopy
from aorta.programs.execute.strategies.graph import Graphed
from aorta.programs.execute.strategies.torch_symmetric import (
    FusedGather,
    FusedScatter,
    LowContentionGather,
    LowContentionScatter,
)
from aorta.programs.language.emit import ORDERS

Make = Callable[[StrategyBench], Strategy]
COPY_CHUNKS = (1, 2, 4, 8, 16)
CTA_LIMITS = (4, 8, 16)
CARVE_OUTS = (8, 16, 24)


@dataclass(frozen=True)
class Family:
    """Alternatives under one name; tried against each other first."""

    name: str
    members: list[Make]


def first_families(op: str, tiles: Sequence[int], streams: Sequence[int], device: bool) -> list[Family]:
    """Families that need no earlier result."""
    families = [
        Family(order, [_chunked(order, s, n) for s in tiles for n in streams if n <= s]) for order in ORDERS
    ]
    # All communication first, one worker: no fork or join to get wrong.
    breadth = [_chunked("both_hoisted", s, 1, tile_order="breadth") for s in tiles if s > 1]
    families.append(Family("breadth", breadth))
    if op == "ag_gemm":
        for comm in ("ring", "pairwise"):
            members = [
                _chunked("both_hoisted", s, n, comm=comm) for s in tiles for n in streams if 1 < n <= s
            ]
            families.append(Family(f"{comm} send_recv", members))
    return families + _of_symmetric_memory(op) if device else families


def _of_symmetric_memory(op: str) -> list[Family]:
    if op == "ag_gemm":
        tapered = [_gather(chunks, taper=True) for chunks in COPY_CHUNKS[1:4]]
        return [
            Family("copy engine pairwise", [*map(_gather, COPY_CHUNKS), *tapered]),
            Family("copy engine ring", [_gather(chunks, route="ring") for chunks in COPY_CHUNKS[:4]]),
            Family("copy engine, signals by kernels", [_gather(c, signals="kernels") for c in (4, 8)]),
            Family("copy engine pull", [_pull(c, s) for c in (2, 4, 8) for s in ("kernels", "flags")]),
            Family("torch fused", [FusedGather]),
            Family("torch low contention", [LowContentionGather]),
        ]
    reduce = [_reduce(chunks) for chunks in COPY_CHUNKS]
    by_kernels = [_reduce(chunks, signals="kernels") for chunks in (2, 4)]
    copies = [Family("copy engine ring", reduce), Family("copy engine, signals by kernels", by_kernels)]
    if op == "gemm_ar":
        return copies
    low = [_low_contention(tiles) for tiles in (2, 4, 8)]
    return [*copies, Family("torch fused", [FusedScatter]), Family("torch low contention", low)]


def later_families(bench: StrategyBench, best: Chunked) -> list[Family]:
    """Families that change one thing about the best program: priority, CTAs, SMs left free, a graph."""
    if not bench.on_device:
        return []
    priority = _again(best, "high priority", group=nccl_group(high_priority=True))
    limits = [
        _again(best, "limited CTAs", group=nccl_group(max_ctas=limit), settings={"ctas": limit})
        for limit in CTA_LIMITS
    ]
    families = _again(
        best,
        "high priority, limited CTAs",
        group=nccl_group(high_priority=True, max_ctas=CTA_LIMITS[1]),
        settings={"ctas": CTA_LIMITS[1]},
    )
    carved = [_again(best, "SM carve-out", carve_out=sms, settings={"sms": sms}) for sms in CARVE_OUTS]
    graphs: list[Make] = [lambda b: Graphed(b, _again(best, best.name))]
    if bench.problem.op == "ag_gemm":
        graphs.append(lambda b: Graphed(b, _pull(4, "kernels")))
    return [
        Family("high priority", [priority]),
        Family("limited CTAs", limits),
        Family("high priority, limited CTAs", [families]),
        Family("SM carve-out", carved),
        *(Family("CUDA graph", [make]) for make in graphs),
    ]


_groups: dict[tuple[Any, bool, int], dist.ProcessGroup] = {}


def nccl_group(high_priority: bool = False, max_ctas: int = 0) -> dist.ProcessGroup | str:
    """A group of all ranks with these options, made once; as a text, why it cannot be made. Collective."""
    key = (dist.group.WORLD, high_priority, max_ctas)
    if key not in _groups:
        if not dist.is_nccl_available() or dist.get_backend() != "nccl":
            return "needs the NCCL backend"
        options: Any = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = high_priority
        if max_ctas:
            options.config.min_ctas, options.config.max_ctas = 1, max_ctas
        _groups[key] = dist.new_group(backend="nccl", pg_options=options)
    return _groups[key]


def _again(best: Chunked, name: str, **changes: Any) -> Make:
    best_settings = {key: best.settings[key] for key in ("order", "tiles", "streams")}
    tile_order = best.settings.get("tile_order", "depth")

    def make(bench: StrategyBench) -> Strategy:
        if isinstance(changes.get("group"), str):
            raise StrategyUnavailable(changes["group"])
        if changes.get("carve_out") and not hasattr(torch._C, "_set_sm_carveout_experimental"):
            raise StrategyUnavailable("this torch has no SM carve-out")
        settings: Any = {**best_settings, "tile_order": tile_order, **changes}
        return Chunked(bench, name=name, **settings)

    return make


def _chunked(order: str, tiles: int, streams: int, **options: Any) -> Make:
    return lambda bench: Chunked(bench, order, tiles, streams, **options)


def _gather(chunks: int, **options: Any) -> Make:
    return lambda bench: GatherByCopy(bench, chunks, **options)


def _pull(chunks: int, signals: Any) -> Make:
    return lambda bench: GatherByPull(bench, chunks, signals=signals)


def _reduce(chunks: int, **options: Any) -> Make:
    return lambda bench: ReduceByCopy(bench, chunks, **options)


def _low_contention(tiles: int) -> Make:
    return lambda bench: LowContentionScatter(bench, tiles)
