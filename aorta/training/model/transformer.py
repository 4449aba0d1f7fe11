"""Decoder transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

B batch, S sequence, D model dim, F feed-forward dim, V vocabulary, H query heads, G key/value heads,
C head dim. Under tensor parallelism H, G and F are this rank's part.
"""

from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aorta.config import ModelConfig
from aorta.training.model.moe import MixtureOfExperts

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
"""How a block's modules split over the tp axis. Embedding, norms and output stay replicated.

replicated_input makes one all-reduce of the input's gradient out of one per column-wise layer.
"""


class Transformer(nn.Module):
    """Tokens in, loss out: the output layer and the cross entropy are part of the model."""

    def __init__(self, config: ModelConfig, seq_len: int, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        rope = Rope(config.hidden // config.num_heads, seq_len, config.rope_theta)
        self.rope = rope
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


class RMSNorm(nn.Module):
    """x / rms(x) x weight, computed in the type of x."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return F.rms_norm(x_BSD, (x_BSD.shape[-1],), self.weight.to(x_BSD.dtype), self.eps)


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


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: Rope) -> None:
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


class FeedForward(nn.Module):
    """SwiGLU. The second output stands where a mixture has its load-balancing loss."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, None]:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD)), None
