"""Arithmetic that a training step needs."""

from aorta.config import ModelConfig


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
