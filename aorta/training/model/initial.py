"""Initial values that depend on a parameter's name and the seed, and on no parallel layout."""

import zlib

import torch
from torch import Tensor

from aorta.config import ModelConfig

_ADDS_TO_STREAM = ("attention.out.weight", "feed_forward.down.weight", "experts.down")


def initial_value(
    name: str, shape: torch.Size, config: ModelConfig, seed: int, device: torch.device
) -> Tensor:
    """The whole parameter in float32. CPU and GPU draw different numbers; ranks on like devices the same.

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
