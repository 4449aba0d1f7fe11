"""Names of collectives and of their groups, the named stream on which each counts, and bandwidth."""

import re
from typing import NamedTuple

SPELLINGS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather allgatherbase allgatherinto allgatherintotensor allgathersingle",
    "reduce_scatter": "reducescatter reducescatterbase reducescattertensor reducescattersingle",
    "all_to_all": "alltoall alltoallv alltoallbase alltoallsingle",
    "broadcast": "broadcast broadcastoop bcast",
    "reduce": "reduce reduceoop",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send isend",
    "recv": "recv recvany recvanysource irecv",
    "send_recv": "sendrecv",
    "barrier": "barrier",
}
"""Without punctuation, case and `coalesced`, by the name in this project."""
ALIASES = {spelling: op for op, spellings in SPELLINGS.items() for spelling in spellings.split()}

STREAM_OF_OP = {
    op: op.replace("_", "") for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
}

POINT_TO_POINT = frozenset(("send", "recv", "send_recv"))
"""Operations between two ranks: the other ranks of the group have no call to match."""
ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""Operations that some ranks may leave before the last has arrived: these tell no wait, transfer or clock."""
UNEVEN = frozenset(("all_to_all", "gather", "scatter"))
"""Operations of which ranks may hold different sizes."""


class GroupKey(NamedTuple):
    """A process group; None is what a source does not tell."""

    ranks: tuple[int, ...] | None
    name: str | None


def canonical_op(name: str) -> str | None:
    """The project's name of a collective, whatever torch, c10d or NCCL calls it; None if unknown."""
    plain = re.sub(r"[^a-z]", "", name.lower()).removesuffix("coalesced").removeprefix("nccl")
    return ALIASES.get(plain)


def stream_of(op: str) -> str:
    """The key of StepRecord.streams under which this operation counts: aux where none is its own."""
    stream = STREAM_OF_OP.get(op)
    if stream is not None:
        return stream
    return STREAM_OF_OP.get(canonical_op(op) or "", "aux")


def busbw_factor(op: str, num_ranks: int) -> float:
    """Ratio of busbw to algbw: bytes that every rank must send, relative to the buffer.

    The buffer is the larger of a rank's input and output (all_gather: gathered, reduce_scatter:
    unscattered, gather and scatter: the root's). 0 for a group of one rank, which sends nothing
    in the operations that scale with n.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md and the GetBw functions of src/*.cu.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    share = (num_ranks - 1) / num_ranks
    match canonical_op(op):
        case "all_reduce":
            return 2 * share
        case "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter":
            return share
        case _:
            return 1.0


def algbw_gb_s(size_bytes: int, duration_ms: float | None) -> float | None:
    """10^9 bytes of the buffer per second; None for a duration that is unknown or zero."""
    if duration_ms is None or duration_ms <= 0:
        return None
    return size_bytes / duration_ms / 1e6


def busbw_gb_s(op: str, size_bytes: int, num_ranks: int, duration_ms: float | None) -> float | None:
    """Bandwidth of the links, comparable between operations and numbers of ranks; None as for algbw_gb_s."""
    algbw = algbw_gb_s(size_bytes, duration_ms)
    return None if algbw is None else algbw * busbw_factor(op, num_ranks)
