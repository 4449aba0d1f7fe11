"""The decoder transformer that aorta trains, dense or with a mixture of experts.

setup.py makes a Transformer on the meta device, parallel.py splits it over ranks, and initial_value() then
fills each parameter. Blocks have RMSNorm, rotary positions, grouped-query attention, and SwiGLU layers.

B batch, S sequence, D model dim, F feed-forward dim, V vocabulary, H query heads, G key/value heads,
C head dim. Under tensor parallelism H, G and F are this rank's part. MixtureOfExperts has letters of its own.
"""

import math
import zlib
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from aorta.config.structs import ModelConfig

TENSOR_PARALLEL_PLAN: dict[str, Literal["replicated_input", "colwise", "rowwise"]] = {
    "attention": "replicated_input",
    "attention.query": "colwise",
    "attention.key": "colwise",
    "attention.value": "colwise",
    "attention.out": "rowwise",
    "feed_forward": "replicated_input",
    "feed_forward.gate": "colwise",
    "feed_forward.up": "colwise",
    "feed_forward.down": "rowwise",
}
"""Style in which each module of a block splits over the tp axis. Embedding, norms and output stay replicated.

replicated_input makes one all-reduce of the input's gradient out of one per column-wise layer.
"""
EXPERT_DIMS = {"gate": 2, "up": 2, "down": 1}
"""The dim of each parameter of Experts, F, that the tp axis splits."""
_ADDS_TO_STREAM = ("attention.out.weight", "feed_forward.down.weight", "experts.down")
"""Ends of the names of matrices whose output is added to the residual stream."""


class Transformer(nn.Module):
    """Model from tokens to loss: the output layer and the cross entropy are part of it."""

    def __init__(self, config: ModelConfig, seq_len: int, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        rope = Rope(config.hidden // config.num_heads, seq_len, config.rope_theta)
        self.blocks = nn.ModuleList(
            TransformerBlock(config, rope, recompute) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy over the micro-batch, and the load-balancing loss summed over layers."""
        x_BSD = self.embedding(token_BS)
        aux_loss = torch.zeros((), device=token_BS.device)
        for block in self.blocks:
            x_BSD, block_aux_loss = block(x_BSD)
            if block_aux_loss is not None:
                aux_loss = aux_loss + block_aux_loss
        logit_BSV = self.output(self.norm(x_BSD))
        loss = F.cross_entropy(logit_BSV.flatten(0, 1).float(), target_BS.flatten())
        return loss, aux_loss


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream; a mixture's balancing loss."""

    def __init__(self, config: ModelConfig, rope: "Rope", recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config, rope)
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward: nn.Module = (
            MixtureOfExperts(config) if config.num_experts else FeedForward(config.hidden, config.ffn)
        )

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.recompute and torch.is_grad_enabled():
            # Inside the block's forward, so that FSDP's hooks on the block stay outside the recomputed part.
            out = checkpoint(self._layers, x_BSD, use_reentrant=False, preserve_rng_state=False)
            return cast(tuple[Tensor, Tensor | None], out)
        return self._layers(x_BSD)

    def _layers(self, x_BSD: Tensor) -> tuple[Tensor, Tensor | None]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        y_BSD, aux_loss = self.feed_forward(self.feed_forward_norm(x_BSD))
        return x_BSD + y_BSD, aux_loss


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: "Rope") -> None:
        super().__init__()
        self.head_dim = config.hidden // config.num_heads
        self.rope = rope
        self.query = nn.Linear(config.hidden, config.num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.hidden, config.num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_heads * self.head_dim, config.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        query_BHSC, key_BGSC = self._heads(self.query(x_BSD)), self._heads(self.key(x_BSD))
        # Rotated together: a step of many small kernels is bound by how fast the host launches them.
        sizes = (query_BHSC.shape[1], key_BGSC.shape[1])
        both_BHSC = self.rope.rotate(torch.cat((query_BHSC, key_BGSC), dim=1))
        query_BHSC, key_BGSC = both_BHSC.split(sizes, dim=1)
        value_BGSC = self._heads(self.value(x_BSD))
        y_BHSC = F.scaled_dot_product_attention(
            query_BHSC, key_BGSC, value_BGSC, is_causal=True, enable_gqa=True
        )
        return cast(Tensor, self.out(y_BHSC.transpose(1, 2).flatten(2)))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        x_BSHC = cast(Tensor, x_BSD.unflatten(-1, (-1, self.head_dim)))  # torch does not annotate it
        return x_BSHC.transpose(1, 2)


class Rope:
    """Rotary position angles, float32 whatever the model computes in.

    No module and no buffer: mixed precision would round the angles, and all blocks share one table.
    """

    def __init__(self, head_dim: int, seq_len: int, theta: float) -> None:
        self.head_dim, self.seq_len, self.theta = head_dim, seq_len, theta
        self._table: tuple[Tensor, Tensor] | None = None

    def table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos_SC and sin_SC, built on first use on a device."""
        if self._table is None or self._table[0].device != device:
            half = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
            frequency_C = self.theta ** (-half / self.head_dim)
            angle_SC = torch.outer(torch.arange(self.seq_len, device=device).float(), frequency_C).repeat(
                1, 2
            )
            self._table = (angle_SC.cos(), angle_SC.sin())
        return self._table

    def rotate(self, x_BHSC: Tensor) -> Tensor:
        cos_SC, sin_SC = (t[: x_BHSC.shape[2]] for t in self.table(x_BHSC.device))
        first, second = x_BHSC.chunk(2, dim=-1)
        # The products with the float32 table are float32; negating and joining is exact before that.
        rotated: Tensor = x_BHSC * cos_SC + torch.cat((-second, first), dim=-1) * sin_SC
        return rotated.to(x_BHSC.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) x weight, computed in the type of x."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, (x_BSD.shape[-1],), self.weight.to(x_BSD.dtype), self.eps)


class FeedForward(nn.Module):
    """SwiGLU. The second output stands where a mixture has its load-balancing loss."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, None]:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD)), None


class MixtureOfExperts(nn.Module):
    """Each token visits its K best experts and gets the mean of their outputs, weighted by the router.

    N tokens of this rank's micro-batch, E experts, K experts per token, A = N K assignments of a token to an
    expert, R ranks of the ep axis, L experts of this rank (E = R L), X assignments that this rank's experts
    serve; with a capacity, C slots per expert and source rank and S = E C slots of this rank's tokens.

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
        self.tensor_parallel_group: dist.ProcessGroup | None = None

    def set_group(self, group: dist.ProcessGroup | None) -> None:
        """The ep axis that the experts are spread over; None: all experts are here."""
        self.group = group

    def set_tensor_parallel_group(self, group: dist.ProcessGroup | None) -> None:
        """The tp axis, of equal tokens, that each expert's F is spread over; None: F is whole here."""
        self.tensor_parallel_group = group

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and its load-balancing loss (over this rank's tokens)."""
        x_ND = x_BSD.flatten(0, 1)
        weight_NK, expert_NK, aux_loss = route(x_ND, self.router.weight, self.num_active)
        # Assignments in the order of their experts. Stable, so that equal inputs give equal sums.
        expert_A, order_A = torch.sort(expert_NK.flatten(), stable=True)
        assigned_AD = x_ND.index_select(0, order_A // self.num_active)
        # Each tp rank's experts give a part of every output, so that what reaches their inputs and weights in
        # backward is a part as well. The router itself works with whole numbers, the same on all of them.
        split = self.tensor_parallel_group
        if split is not None:
            assigned_AD = _SumGradients.apply(assigned_AD, split)  # type: ignore[no-untyped-call]
            weight_NK = _SumGradients.apply(weight_NK, split)  # type: ignore[no-untyped-call]
        if self.capacity_factor is None:
            y_AD = self._dropless(assigned_AD, expert_A)
        else:
            y_AD = self._with_capacity(assigned_AD, expert_A, self.capacity_factor)
        y_NKD = torch.empty_like(y_AD).index_copy(0, order_A, y_AD).unflatten(0, weight_NK.shape)
        y_ND = (y_NKD * weight_NK.to(y_NKD.dtype).unsqueeze(-1)).sum(dim=1)
        if split is not None:
            y_ND = _SumOutputs.apply(y_ND, split)  # type: ignore[no-untyped-call]
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
        """Output of each token's expert; counts None: as many tokens for every expert.

        Both forms below come through this one call, so that FSDP's hooks gather the parameters.
        """
        gate_LDF, up_LDF, down_LFD = _local(self.gate), _local(self.up), _local(self.down)
        if counts is None:
            return torch.bmm(F.silu(torch.bmm(x_XD, gate_LDF)) * torch.bmm(x_XD, up_LDF), down_LFD)
        outputs = [
            (F.silu(x @ gate_LDF[e]) * (x @ up_LDF[e])) @ down_LFD[e]
            for e, x in enumerate(x_XD.split(counts))
        ]
        return torch.cat(outputs)

    def batched(self, x_LXD: Tensor) -> Tensor:
        """Outputs for the same number of tokens per expert."""
        return cast(Tensor, self(x_LXD, None))

    def ragged(self, x_XD: Tensor, counts: list[int]) -> Tensor:
        """Outputs for counts[e] tokens of expert e, one expert's after the other's."""
        return cast(Tensor, self(x_XD, counts))


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


class _SumGradients(torch.autograd.Function):
    """The input itself; its gradient is the sum of those of the group's ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumOutputs(torch.autograd.Function):
    """The sum over the group's ranks, whose gradient is the same for all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return cast(Tensor, _summed(x, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as below
def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]  # counts are host data: the graph breaks here
def _all_to_all(
    x_XD: Tensor, receive: list[int] | None, send: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    num_rows = len(x_XD) if receive is None else sum(receive)
    received_XD = x_XD.new_empty(num_rows, *x_XD.shape[1:])
    dist.all_to_all_single(received_XD, x_XD.contiguous(), receive, send, group=group)
    return received_XD


def _first_of_each(expert_A: Tensor, num_experts: int) -> Tensor:
    """Place at which each expert's run starts in sorted assignments."""
    return torch.searchsorted(expert_A, torch.arange(num_experts, device=expert_A.device))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def initial_value(
    name: str, shape: torch.Size, config: ModelConfig, seed: int, device: torch.device
) -> Tensor:
    """The whole parameter in float32, a function of its name and the seed, whatever the parallel layout.

    CPU and GPU draw different numbers; ranks on like devices the same.

    Matrices are normal with variance 1 / fan-in, less for those that add to the stream (1 / 2 layers).
    """
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    value = torch.empty(shape, device=device).normal_(generator=generator)
    if name == "embedding.weight":
        return value.mul_(0.1)
    std: float = shape[1] ** -0.5  # fan-in: a Linear is out x in, stacked experts are E x in x out
    if name.endswith(_ADDS_TO_STREAM):
        std *= (2 * config.num_layers) ** -0.5
    return value.mul_(std)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOP of forward and backward per token, a multiply-add counted as two.

    Backward costs twice the forward of every matrix multiply. These are model FLOPs: a forward that is done
    again to save memory is not among them, which is what makes MFU a measure of the work that was wanted.
    Causal attention counts half of the S x S products. Norms, softmax and the embedding are left out.
    """
    head_dim = config.hidden // config.num_heads
    projections = 2 * config.hidden * head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    attention = 2 * 2 * config.num_heads * head_dim * seq_len / 2
    feed_forward = 2 * 3 * config.hidden * config.ffn
    if config.num_experts:
        feed_forward = config.num_active_experts * feed_forward + 2 * config.hidden * config.num_experts
    blocks = config.num_layers * (projections + attention + feed_forward)
    output = 2 * config.hidden * config.vocab_size
    return 3 * (blocks + output)
