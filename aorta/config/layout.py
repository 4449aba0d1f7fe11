"""Mesh of a config for a world size (resolve_layout), and checks of settings against each other (validate).

Both raise ConfigError before any process starts.
"""

import msgspec

from aorta.config.structs import Config
from aorta.errors import ConfigError


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the mesh axes. dp x tp = world; ep is a part of dp, the rest of it holds copies."""

    world: int
    dp: int
    tp: int
    ep: int

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp // self.ep


def resolve_layout(config: Config, world_size: int) -> Layout:
    """Mesh for this world size. Raises ConfigError with the number that does not fit."""
    dp, tp, ep = config.parallel.dp or 0, config.parallel.tp, config.parallel.ep
    if dp == 0 and tp == 0:
        raise ConfigError("parallel.dp and parallel.tp cannot both be null: set one of them")
    if dp == 0:
        if world_size % tp:
            raise ConfigError(f"parallel.tp = {tp} does not divide the {_ranks(world_size)}")
        dp = world_size // tp
    elif tp == 0:
        if world_size % dp:
            raise ConfigError(f"parallel.dp = {dp} does not divide the {_ranks(world_size)}")
        tp = world_size // dp
    if dp * tp != world_size:
        raise ConfigError(
            f"parallel.dp = {dp} x parallel.tp = {tp} needs {dp * tp} ranks, the world has {world_size}; "
            f"start {dp * tp} or set parallel.dp=null"
        )
    if dp % ep:
        raise ConfigError(f"parallel.ep = {ep} must divide the dp axis, which has {_ranks(dp)}")
    return Layout(world=world_size, dp=dp, tp=tp, ep=ep)


def validate(config: Config, world_size: int) -> Layout:
    """Mesh of resolve_layout, once all settings fit each other."""
    layout = resolve_layout(config, world_size)
    _check_model(config)
    _check_axes(config, layout)
    if config.training.resume == "":
        raise ConfigError("training.resume must be a path, 'latest' or null, got ''")
    return layout


def _check_model(config: Config) -> None:
    model = config.model
    if model.hidden % model.num_heads or (model.hidden // model.num_heads) % 2:
        raise ConfigError(
            f"model.hidden = {model.hidden} must be an even multiple of model.num_heads = {model.num_heads}"
        )
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads = {model.num_kv_heads} must divide model.num_heads = {model.num_heads}"
        )
    if model.num_experts and model.num_active_experts > model.num_experts:
        raise ConfigError(
            f"model.num_active_experts = {model.num_active_experts} must be at most "
            f"model.num_experts = {model.num_experts}"
        )


def _check_axes(config: Config, layout: Layout) -> None:
    """Raise ConfigError where the model does not divide among the axes, or axes and modes do not combine."""
    model, parallel = config.model, config.parallel
    for key, value in (
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.num_kv_heads),
        ("ffn", model.ffn),
    ):
        if value % layout.tp:
            raise ConfigError(f"model.{key} = {value} must be divisible by parallel.tp = {layout.tp}")
    if layout.tp > 1 and layout.dp > 1 and parallel.mode == "ddp":
        raise ConfigError(
            f"parallel.mode = ddp does not combine dp = {layout.dp} with tp = {layout.tp}, "
            "use parallel.mode=fsdp"
        )
    if parallel.mode == "ddp" and parallel.static_graph and config.training.grad_accum_steps > 1:
        raise ConfigError(
            "parallel.static_graph = true does not combine with training.grad_accum_steps = "
            f"{config.training.grad_accum_steps} (DDP's reducer fails), set parallel.static_graph=false"
        )
    if layout.ep > 1 and not model.num_experts:
        raise ConfigError(f"parallel.ep = {layout.ep} needs experts, set model.num_experts")
    if model.num_experts % layout.ep:
        raise ConfigError(
            f"model.num_experts = {model.num_experts} must be divisible by parallel.ep = {layout.ep}"
        )
    if model.num_experts and parallel.mode == "fsdp":
        per_rank = model.num_experts // layout.ep
        if per_rank % layout.expert_dp and model.hidden % layout.expert_dp + model.ffn % layout.expert_dp:
            raise ConfigError(
                f"model.num_experts = {model.num_experts} leaves {per_rank} experts for {layout.expert_dp} "
                f"ranks: make that, or model.hidden and model.ffn, divisible by {layout.expert_dp}"
            )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
