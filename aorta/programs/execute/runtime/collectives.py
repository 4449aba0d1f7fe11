"""Collectives under the names that torch 2.11 and 2.13 both understand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup

# torch 2.13 warns about the old names, torch 2.11 does not know the new ones.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: torch.Tensor, source: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    """out holds the ranks' sources one after the other. Both contiguous."""
    return _gather(_rows(out), _rows(source), group=group, async_op=async_op)


def reduce_scatter(out: torch.Tensor, source: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    """out is this rank's part, in the order of ranks, of the sum of all sources."""
    return _scatter(_rows(out), _rows(source), group=group, async_op=async_op)


def all_reduce(tensor: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    """Sums the tensor over the ranks, in place."""
    return dist.all_reduce(tensor, group=group, async_op=async_op)


def exchange(
    source: torch.Tensor | None, to: int | None, out: torch.Tensor | None, by: int | None, group: Group
) -> list[Any]:
    """Posts a send, a receive or both as one; `to` and `by` are ranks in the group.

    Returns the works, one with NCCL and two with gloo. What a rank sends to itself is copied.
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
