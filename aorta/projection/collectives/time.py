"""Seconds of a collective: latency of its steps plus bytes over the slowest tier.

size_bytes is the full buffer of one rank, as in nccl-tests: what all_reduce is called on, what all_gather
returns, what reduce_scatter and all_to_all take.
"""

from typing import Literal

from aorta.errors import ProjectionError
from aorta.projection.collectives.group import RankGroup
from aorta.projection.estimate import Estimate, estimate
from aorta.projection.hardware import Hardware
from aorta.projection.strict import near

Algorithm = Literal["auto", "ring", "direct", "single_shot", "hierarchical", "pxn"]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")


def busbw_factor(op: str, num_ranks: int) -> float:
    """busbw / algbw, as nccl-tests defines it."""
    if op not in OPS:
        raise ProjectionError(f"{op!r} is not a collective{near(op, OPS)}")
    if op in ("broadcast", "p2p"):
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (num_ranks - 1) / num_ranks


def collective_time(
    op: str, size_bytes: float, group: RankGroup, hardware: Hardware, algorithm: Algorithm = "auto"
) -> Estimate:
    """Seconds of one collective. One rank costs nothing."""
    fitted = hardware.efficiency.collective
    factor = busbw_factor(op, group.num_ranks)
    if group.num_ranks == 1 and op != "p2p":
        return estimate(0.0, "latency", f"{op} of one rank", fitted.interval)
    rate = hardware.scale_up.sustained_gpu_bytes_per_s
    bound = "link"
    if group.num_domains > 1:
        nics = hardware.scale_out.sustained_nic_bytes_per_s * (
            hardware.scale_out.nics_per_node / hardware.scale_out.gpus_per_node
        )
        inter = nics * (1 if op in ("all_to_all", "p2p") else group.ranks_per_domain)
        if inter < rate:
            rate, bound = inter, "nic"
    latency_s = fitted.launch_s + (group.num_ranks - 2) * fitted.hop_s
    transfer_s = factor * size_bytes / rate
    return estimate(
        latency_s + transfer_s,
        bound if transfer_s > latency_s else "latency",
        f"{op} {algorithm}",
        fitted.interval,
        {"latency_s": latency_s, "transfer_s": transfer_s},
    )
