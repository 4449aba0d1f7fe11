"""The decoder transformer that aorta trains, dense or with a mixture of experts."""

from aorta.training.model.flops import train_flops_per_token
from aorta.training.model.initial import initial_value
from aorta.training.model.moe import Experts, MixtureOfExperts
from aorta.training.model.transformer import TENSOR_PARALLEL_PLAN, Transformer, TransformerBlock

__all__ = [
    "TENSOR_PARALLEL_PLAN",
    "TransformerBlock",
    "Experts",
    "MixtureOfExperts",
    "Transformer",
    "initial_value",
    "train_flops_per_token",
]
