"""Arithmetic that a training step needs."""

from aorta.config import ModelConfig


def train_flops_per_token(config: ModelConfig, seq_len: int, recompute: bool = False) -> float:
    """FLOP of forward and backward per token, a multiply-add counted as two.

    Backward costs twice the forward of every matrix multiply; recompute adds one forward of the blocks.
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
    return (4 if recompute else 3) * blocks + 3 * output
