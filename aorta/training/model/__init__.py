"""The decoder transformer that aorta trains, dense or with a mixture of experts."""

from aorta.training.model.flops import train_flops_per_token
from aorta.training.model.initial import initial_value
from aorta.training.model.moe import Experts, MixtureOfExperts
from aorta.training.model.transformer import TENSOR_PARALLEL_PLAN, Block, Transformer

__all__ = [
    "TENSOR_PARALLEL_PLAN",
    "Block",
    "Experts",
    "MixtureOfExperts",
    "Transformer",
    "initial_value",
    "train_flops_per_token",
]
