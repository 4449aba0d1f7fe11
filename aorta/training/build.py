"""From a config to a model in its parallel form, and its optimizer."""

import torch
from torch import nn

from aorta.config import Config, Layout
from aorta.device.backend import backend_of
from aorta.training.model import (
    TENSOR_PARALLEL_PLAN,
    MixtureOfExperts,
    Transformer,
    TransformerBlock,
    initial_value,
)
from aorta.training.parallel import Meshes, ParallelModel, WrappedParts, fill, parallelize, parameter_groups


def build_model(config: Config, layout: Layout, meshes: Meshes, device: torch.device) -> ParallelModel:
    """Made on the meta device: a rank allocates its shards, and one whole parameter at a time."""
    with torch.device("meta"):
        model = Transformer(config.model, config.data.seq_len, config.training.activation_checkpointing)
    blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
    mixtures = [b.feed_forward for b in blocks if isinstance(b.feed_forward, MixtureOfExperts)]
    if meshes.expert is not None:
        for mixture in mixtures:
            mixture.set_group(meshes.expert["ep"].get_group())
            mixture.experts.num_local = config.model.num_experts // layout.ep
    parts = WrappedParts(blocks, TENSOR_PARALLEL_PLAN, [mixture.experts for mixture in mixtures])

    def initialize(sharded: nn.Module) -> None:
        for name, parameter in sharded.named_parameters():
            value = initial_value(name, parameter.shape, config.model, config.training.seed, device)
            fill(parameter, value)

    return parallelize(model, parts, config, layout, meshes, device, initialize)


def build_optimizer(config: Config, form: ParallelModel, device: torch.device) -> torch.optim.Optimizer:
    settings = config.optimizer
    fused = backend_of(device).is_device if settings.fused is None else settings.fused
    return torch.optim.AdamW(
        parameter_groups(form.plain.parameters(), settings.weight_decay),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=fused,
    )
