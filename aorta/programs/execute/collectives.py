"""Collectives under names that torch 2.11 and 2.13 both understand, and agreements between ranks.

Before a program runs, the ranks check that all are about to communicate the same: a difference hangs a
device, and silently adds up wrong numbers on gloo.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Program
from aorta.timeline.collective import POINT_TO_POINT

Group = dist.ProcessGroup

# torch 2.13 warns about the old names, torch 2.11 does not know the new ones.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: torch.Tensor, source: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    """Fill out with the ranks' sources, one after the other. Both must be contiguous."""
    return _gather(_rows(out), _rows(source), group=group, async_op=async_op)


def reduce_scatter(out: torch.Tensor, source: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    """Fill out with this rank's part, in the order of ranks, of the sum of all sources."""
    return _scatter(_rows(out), _rows(source), group=group, async_op=async_op)


def exchange(
    source: torch.Tensor | None, to: int | None, out: torch.Tensor | None, by: int | None, group: Group
) -> list[Any]:
    """Post a send, a receive or both as one; `to` and `by` are ranks in the group.

    Returns the works, one with NCCL and two with gloo. A rank's message to itself is copied at once.
    """
    rank = dist.get_rank(group)
    if to == rank or by == rank:
        assert to == by, "sent to itself, received from another rank"
        if source is not None and out is not None:
            out.copy_(source)
        return []
    posted = []
    if source is not None and to is not None:
        posted.append(dist.P2POp(dist.isend, source, dist.get_global_rank(group, to), group))
    if out is not None and by is not None:
        posted.append(dist.P2POp(dist.irecv, out, dist.get_global_rank(group, by), group))
    works: list[Any] = dist.batch_isend_irecv(posted)
    return works


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix: gloo refuses the stacked form [ranks, rows, columns]."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in the order of ranks. The host waits for all ranks of the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def failures(problem: str | None, group: dist.ProcessGroup) -> list[str]:
    """Problems of the ranks that have one, the same list on all ranks. The host waits for all of them."""
    return [text for text in gathered(problem, group) if text is not None]


def communications(program: Program, rank: int, sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Communications that a rank will ask of its process groups, in order of issue.

    sizes: bytes of one tile of each buffer. A collective is (text,), the same on all ranks of a correct
    program. Point to point is (lane, sender, receiver, bytes), once per message of this rank.
    """
    rows: list[tuple[str, ...]] = []
    for step in program.unroll(rank):
        op = step.op
        if not isinstance(op, Communicate):
            continue
        if op.op not in POINT_TO_POINT:
            part = op.source or op.out
            assert part is not None
            text = f"{op.op}({part}) on {op.lane}, {sizes[part.name]} bytes"
            rows.append((text if op.root is None else f"{text} from rank {op.root}",))
            continue
        if op.source is not None and op.to is not None:
            rows.append((str(op.lane), str(rank), str(op.to), str(sizes[op.source.name])))
        if op.out is not None and op.by is not None:
            rows.append((str(op.lane), str(op.by), str(rank), str(sizes[op.out.name])))
    return rows


def refuse_mismatch(rows: Sequence[Sequence[tuple[str, ...]]]) -> None:
    """Raise HostProgramError where ranks would not meet; rows are communications() of all ranks.

    Collectives must be the same ones in the same order; every message must have both its ends.
    """
    collectives = [[row[0] for row in rank_rows if len(row) == 1] for rank_rows in rows]
    for rank, issued in enumerate(collectives):
        _compare(collectives[0], issued, rank)
    messages = [Counter(row for row in rank_rows if len(row) == 4) for rank_rows in rows]
    for sender, counts in enumerate(messages):
        for message, count in counts.items():
            partner = int(message[2]) if int(message[1]) == sender else int(message[1])
            if messages[partner][message] != count:
                lane, source, target, size = message
                raise HostProgramError(
                    f"ranks {source} and {target} disagree about messages of {size} bytes on {lane}:"
                    f" {count} on rank {sender}, {messages[partner][message]} on rank {partner}"
                    "; nothing was run"
                )


def _compare(first: list[str], other: list[str], rank: int) -> None:
    for number, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            raise HostProgramError(
                f"ranks communicate in different orders: number {number} is {a} on rank 0"
                f" and {b} on rank {rank}; nothing was run"
            )
    if len(first) != len(other):
        raise HostProgramError(
            f"rank 0 has {len(first)} collectives and rank {rank} has {len(other)}; nothing was run"
        )
