"""Collectives of a workload, each stream with communicators of its own.

A communicator wants its collectives in one order on all ranks. Streams of one rank run in any order (on gloo,
whose calls happen on the streams' threads, even the calls do), so no two streams share one. Within a stream
the order is that of submission, which is the same on all ranks because the program is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aorta.device.backend import backend_of
from aorta.queues.workload import Context, Group

# torch 2.13 renamed them; the old names warn there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Lane:
    """Communicator of one stream. Call its methods in work submitted to that stream.

    Each returns when later work of the stream may use the result (on gloo that is when it is there). Without
    a group a collective copies its bytes once and gives what a group of one rank would.
    """

    def __init__(self, group: Group | None, async_op: bool = False) -> None:
        """async_op: on the process group's own stream (NCCL) instead of the caller's; the caller's stream
        waits for it all the same."""
        self.group = group
        self.async_op = async_op
        self.size = 1 if group is None else dist.get_world_size(group)
        self._copies: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum, in place."""
        if self.group is None:
            self._copy_of(buffer).copy_(buffer)
            return
        self._finish(dist.all_reduce(buffer, group=self.group, async_op=self.async_op))

    def all_gather(self, whole: Tensor, part: Tensor) -> None:
        """whole [size * n] from every rank's part [n]."""
        if self.group is None:
            whole.copy_(part)
            return
        self._finish(_all_gather(whole, part, group=self.group, async_op=self.async_op))

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """part [n]: this rank's piece of the sum of every rank's whole [size * n]."""
        if self.group is None:
            part.copy_(whole)
            return
        self._finish(_reduce_scatter(part, whole, group=self.group, async_op=self.async_op))

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """received[r] is what rank r had in sent[this rank], in `size` equal pieces of the first axis."""
        if self.group is None:
            received.copy_(sent)
            return
        self._finish(dist.all_to_all_single(received, sent, group=self.group, async_op=self.async_op))

    def _finish(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    def _copy_of(self, buffer: Tensor) -> Tensor:
        """Scratch for a simulated all-reduce, made in the warm-up; used by this lane's stream alone."""
        key = (buffer.shape, buffer.dtype)
        if key not in self._copies:
            self._copies[key] = torch.empty_like(buffer)
        return self._copies[key]


_groups: dict[tuple[tuple[int, ...], int], Group] = {}
"""(ranks, which of the groups with these ranks) -> group. Kept while the default group lives: a communicator
takes memory and a good part of a second, and a sweep asks for the same ones at every point."""
_made_in: list[object] = []


def make_lanes(
    context: Context,
    num: int,
    groups: Sequence[Sequence[int]] | None = None,
    async_op: bool = False,
) -> list[Lane]:
    """`num` lanes over this rank's group among `groups` (all ranks where None), ready for use.

    All ranks must call it alike. They are warmed up here: NCCL makes its connections at the first use.
    """
    if context.group is None:
        return [Lane(None) for _ in range(num)]
    groups = groups or [range(context.world_size)]
    lanes = [Lane(_own_group(context, groups, index), async_op) for index in range(num)]
    for lane in lanes:
        lane.all_reduce(torch.zeros(1, device=context.device))
        backend_of(context.device).synchronize(context.device)
    return lanes


def _own_group(context: Context, groups: Sequence[Sequence[int]], number: int) -> Group:
    if _made_in != [dist.group.WORLD]:
        _groups.clear()
        _made_in[:] = [dist.group.WORLD]
    mine = None
    for members in groups:
        key = (tuple(members), number)
        if key not in _groups:
            _groups[key] = dist.new_group(list(members))
        if context.rank in members:
            mine = _groups[key]
    assert mine is not None, f"rank {context.rank} is in none of {groups}"
    return mine
