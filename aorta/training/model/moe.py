"""Mixture of experts, its experts spread over the ep axis.

N tokens of this rank's micro-batch, D model dim, F feed-forward dim, E experts, K experts per token,
R ranks of the ep axis, L experts of this rank (E = R L), C slots per expert and source rank,
A = N K assignments of a token to an expert.
"""

import math
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aorta.config import ModelConfig


class MixtureOfExperts(nn.Module):
    """Each token visits its K best experts and gets the mean of their outputs, weighted by the router.

    With a capacity all shapes are fixed and the host never waits. Without one (dropless) every token is
    served and the host reads the counts, which synchronises the device.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.num_active = config.num_active_experts
        self.capacity_factor = config.capacity_factor
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = Experts(config.num_experts, config.hidden, config.ffn)
        self.group: dist.ProcessGroup | None = None

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        """The ep axis that the experts are spread over; None: all experts are here."""
        self.group = group

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and its load-balancing loss (over this rank's tokens)."""
        x_ND = x_BSD.flatten(0, 1)
        weight_NK, expert_NK, aux_loss = route(x_ND, self.router.weight, self.num_active)
        # Assignments in the order of their experts. Stable, so that equal inputs give equal sums.
        expert_A, order_A = torch.sort(expert_NK.flatten(), stable=True)
        assigned_AD = x_ND.index_select(0, order_A // self.num_active)
        if self.capacity_factor is None:
            y_AD = self._dropless(assigned_AD, expert_A)
        else:
            y_AD = self._with_capacity(assigned_AD, expert_A, self.capacity_factor)
        y_NKD = torch.empty_like(y_AD).index_copy(0, order_A, y_AD).unflatten(0, weight_NK.shape)
        y_ND = (y_NKD * weight_NK.to(y_NKD.dtype).unsqueeze(-1)).sum(dim=1)
        return y_ND.view_as(x_BSD), aux_loss

    def _with_capacity(self, x_AD: Tensor, expert_A: Tensor, factor: float) -> Tensor:
        """Outputs of the experts; zero for the assignments that found their expert full."""
        capacity = max(1, math.ceil(factor * len(x_AD) / self.num_experts))
        num_slots = self.num_experts * capacity
        place_A = (
            torch.arange(len(x_AD), device=x_AD.device) - _first_of_each(expert_A, self.num_experts)[expert_A]
        )
        # One slot behind the last takes what is dropped.
        slot_A = torch.where(place_A < capacity, expert_A * capacity + place_A, num_slots)
        slots_SD = x_AD.new_zeros(num_slots + 1, x_AD.shape[1]).index_copy(0, slot_A, x_AD)[:num_slots]
        received_RLCD = self._exchange(slots_SD).unflatten(0, (-1, self.experts.num_local, capacity))
        y_LXD = self.experts.batched(received_RLCD.transpose(0, 1).flatten(1, 2))
        y_RLCD = y_LXD.unflatten(1, (-1, capacity)).transpose(0, 1)
        y_SD = self._exchange(y_RLCD.flatten(0, 2))
        return F.pad(y_SD, (0, 0, 0, 1)).index_select(0, slot_A)

    def _dropless(self, x_AD: Tensor, expert_A: Tensor) -> Tensor:
        first_E = _first_of_each(expert_A, self.num_experts)
        sent_E = torch.diff(first_E, append=first_E.new_tensor([len(x_AD)]))
        if self.group is None:
            return self.experts.ragged(x_AD, sent_E.tolist())
        received_E = torch.empty_like(sent_E)  # R x L: from each rank, for each of this rank's experts
        dist.all_to_all_single(received_E, sent_E, group=self.group)
        num_local = self.experts.num_local
        sent, received = torch.stack((sent_E, received_E)).tolist()  # the one synchronisation of the layer
        to_rank = [sum(sent[i : i + num_local]) for i in range(0, len(sent), num_local)]
        from_rank = [sum(received[i : i + num_local]) for i in range(0, len(received), num_local)]
        x_XD = self._exchange(x_AD, from_rank, to_rank)
        y_XD = self._by_expert(x_XD, received)
        return self._exchange(y_XD, to_rank, from_rank)

    def _by_expert(self, x_XD: Tensor, received: list[int]) -> Tensor:
        """Tokens arrive by rank and then expert; each expert wants its own together."""
        num_local = self.experts.num_local
        pieces = x_XD.split(received)
        by_expert = [pieces[i] for e in range(num_local) for i in range(e, len(pieces), num_local)]
        counts = [sum(received[e::num_local]) for e in range(num_local)]
        y_XD = self.experts.ragged(torch.cat(by_expert), counts)
        outputs = y_XD.split([len(piece) for piece in by_expert])
        num_ranks = len(pieces) // num_local
        return torch.cat([outputs[e * num_ranks + r] for r in range(num_ranks) for e in range(num_local)])

    def _exchange(
        self, x_XD: Tensor, receive: list[int] | None = None, send: list[int] | None = None
    ) -> Tensor:
        if self.group is None:
            return x_XD
        return cast(Tensor, _AllToAll.apply(x_XD, receive, send, self.group))  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """SwiGLU experts, stacked in the first dim. With the parameters sharded over ep this rank's own."""

    def __init__(self, num_experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.up = nn.Parameter(torch.empty(num_experts, hidden, ffn))
        self.down = nn.Parameter(torch.empty(num_experts, ffn, hidden))
        self.num_local = num_experts
        """Experts of this rank; whoever shards the parameters over the ep axis says so here."""

    def forward(self, x_XD: Tensor, counts: list[int] | None) -> Tensor:
        """Through the module's call, so that FSDP's hooks gather the parameters."""
        gate_LDF, up_LDF, down_LFD = _local(self.gate), _local(self.up), _local(self.down)
        if counts is None:
            return torch.bmm(F.silu(torch.bmm(x_XD, gate_LDF)) * torch.bmm(x_XD, up_LDF), down_LFD)
        outputs = [
            (F.silu(x @ gate_LDF[e]) * (x @ up_LDF[e])) @ down_LFD[e]
            for e, x in enumerate(x_XD.split(counts))
        ]
        return torch.cat(outputs)

    def batched(self, x_LXD: Tensor) -> Tensor:
        """The same number of tokens for every expert."""
        return cast(Tensor, self(x_LXD, None))

    def ragged(self, x_XD: Tensor, counts: list[int]) -> Tensor:
        """counts[e] tokens for expert e, one expert's after the other's."""
        return cast(Tensor, self(x_XD, counts))


def route(x_ND: Tensor, router_ED: Tensor, num_active: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight_NK (float32, sums to 1 over K), expert_NK (int64) and the load-balancing loss.

    The loss is E sum_e f_e p_e, f the fraction of assignments and p the mean probability of expert e:
    1 when balanced. Source: Fedus et al., Switch Transformers, equations 4 to 6.
    """
    num_experts = router_ED.shape[0]
    with torch.autocast(x_ND.device.type, enabled=False):  # float32 also where autocast is on
        score_NE = F.linear(x_ND.float(), router_ED.float()).softmax(dim=-1)
    weight_NK, expert_NK = torch.topk(score_NE, num_active, dim=-1)
    sorted_A = expert_NK.flatten().sort().values
    first_E = _first_of_each(sorted_A, num_experts)
    fraction_E = torch.diff(first_E, append=first_E.new_full((1,), len(sorted_A))) / len(sorted_A)
    aux_loss = num_experts * (fraction_E * score_NE.mean(dim=0)).sum()
    return weight_NK / weight_NK.sum(dim=-1, keepdim=True), expert_NK, aux_loss


def _first_of_each(expert_A: Tensor, num_experts: int) -> Tensor:
    """Where each expert's run starts in sorted assignments."""
    return torch.searchsorted(expert_A, torch.arange(num_experts, device=expert_A.device))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _AllToAll(torch.autograd.Function):
    """dist.all_to_all_single whose backward is the reverse exchange. Counts None: equal parts."""

    @staticmethod
    def forward(
        ctx: Any, x_XD: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return cast(Tensor, _all_to_all(x_XD, receive, send, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.send, ctx.receive, ctx.group), None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # counts are host data: the graph breaks here
def _all_to_all(
    x_XD: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    num_rows = len(x_XD) if receive is None else sum(receive)
    received_XD = x_XD.new_empty(num_rows, *x_XD.shape[1:])
    dist.all_to_all_single(received_XD, x_XD.contiguous(), receive, send, group=group)
    return received_XD
