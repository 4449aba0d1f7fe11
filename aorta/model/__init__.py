"""The decoder transformer that aorta trains, dense or with a mixture of experts."""

from aorta.model.flops import train_flops_per_token
from aorta.model.initial import initial_value
from aorta.model.moe import Experts, MixtureOfExperts
from aorta.model.transformer import TENSOR_PARALLEL_PLAN, Block, Transformer

__all__ = [
    "TENSOR_PARALLEL_PLAN",
    "Block",
    "Experts",
    "MixtureOfExperts",
    "Transformer",
    "initial_value",
    "train_flops_per_token",
]
