"""Parts of a training run that exist before its first step: device, process group, model, optimizer, data.

trainer.py calls them in the order in which they stand here. B batch, S sequence.
"""

import logging
import math
import os
import secrets
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from aorta.config.layout import Layout
from aorta.config.structs import Config, SchedulerConfig
from aorta.device.backend import accelerator, backend_of
from aorta.errors import ConfigError
from aorta.launcher import LaunchedRank
from aorta.record.run_folder import announce, announced
from aorta.training.model import (
    EXPERT_DIMS,
    TENSOR_PARALLEL_PLAN,
    MixtureOfExperts,
    Transformer,
    TransformerBlock,
    initial_value,
)
from aorta.training.parallel import Meshes, ParallelModel, WrappedParts, fill, parallelize, parameter_groups

log = logging.getLogger("aorta")
_MAX_ALPHABET = 512
"""Most different tokens in the synthetic text: few enough that the loss falls soon with any vocabulary."""


class AgreedError(ConfigError):
    """Every rank of the run raises it, with the same message: rank 0 can say it for all."""


def choose_device(config: Config, ranks: LaunchedRank) -> torch.device:
    """A GPU of its own for every rank, or the CPU. Raises ConfigError where the setting cannot be had.

    Needs no process group: a rank that has no device must not wait for others.
    """
    device_type, backend = config.training.device, config.distributed.backend
    gpus = accelerator()
    num_gpus = gpus.count() if device_type != "cpu" and gpus.is_available() else 0
    if device_type == gpus.torch_type and num_gpus < ranks.local_world_size:
        raise ConfigError(
            f"training.device = {device_type} needs {ranks.local_world_size} GPUs on this machine, "
            f"it has {num_gpus}; start fewer ranks or set training.device=cpu"
        )
    use_gpu = num_gpus >= ranks.local_world_size
    if num_gpus and not use_gpu and ranks.is_first:
        log.warning("%d GPUs for %d ranks: training on the CPU", num_gpus, ranks.local_world_size)
    if backend == "nccl" and not use_gpu:
        raise ConfigError("distributed.backend = nccl needs GPUs, set distributed.backend=auto")
    if backend == "gloo" and use_gpu:
        raise ConfigError("distributed.backend = gloo trains on the CPU, set training.device=cpu")
    return gpus.device(ranks.local_rank) if use_gpu else torch.device("cpu")


def set_arithmetic(config: Config) -> None:
    """Set matrix multiply precision, determinism and seeds of this process."""
    training = config.training
    torch.set_float32_matmul_precision("high" if training.precision == "tf32" else "highest")
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(training.seed)


def start_process_group(config: Config, ranks: LaunchedRank, device: torch.device) -> Store:
    """Make the default group; the result is a store of the same ranks for the run's own keys."""
    timeout = timedelta(seconds=config.distributed.timeout_s)
    store: Store
    if "MASTER_ADDR" in os.environ:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
        store.set_timeout(timeout)
    elif ranks.world_size == 1:
        store = HashStore()
    else:
        raise ConfigError(
            f"WORLD_SIZE = {ranks.world_size} needs MASTER_ADDR and MASTER_PORT; start with torchrun"
        )
    # Under torchrun the store outlives a restart, and with it the keys of the attempt before, torch's too.
    attempt = f"attempt/{_drawn_by_rank_0(store, ranks)}"
    devices = backend_of(device)
    if devices.is_device:
        devices.set_device(device)
    dist.init_process_group(
        devices.collectives,
        store=PrefixStore(f"{attempt}/default_group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if devices.is_device else None,
    )
    return PrefixStore(f"{attempt}/aorta", store)


def _drawn_by_rank_0(store: Store, ranks: LaunchedRank) -> str:
    """A random word, the same on all ranks, that no other attempt of the job has."""
    word = secrets.token_hex(8)
    if ranks.world_size == 1:
        return word
    if not ranks.is_first:
        return announced(store, ranks.rank)
    announce(store, ranks.world_size, word)
    return word


def agree(problem: str | None) -> None:
    """Raise AgreedError on every rank if one has a problem. Collective over the default group."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, message in enumerate(problems):
        if message is not None:
            raise AgreedError(message if rank == 0 else f"rank {rank}: {message}")


def build_model(config: Config, layout: Layout, meshes: Meshes, device: torch.device) -> ParallelModel:
    """The wrapped model with its initial values. Collective.

    It is made on the meta device, so that a rank allocates its shards and one whole parameter at a time.
    """
    with torch.device("meta"):
        model = Transformer(config.model, config.data.seq_len, config.training.activation_checkpointing)
    blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
    mixtures = [b.feed_forward for b in blocks if isinstance(b.feed_forward, MixtureOfExperts)]
    if meshes.expert is not None:
        for mixture in mixtures:
            mixture.set_group(meshes.expert["ep"].get_group())
            mixture.experts.num_local = config.model.num_experts // layout.ep
    plan = TENSOR_PARALLEL_PLAN
    if mixtures:  # they split their experts themselves
        plan = {name: style for name, style in plan.items() if not name.startswith("feed_forward")}
        for mixture in mixtures if layout.tp > 1 else ():
            mixture.set_tensor_parallel_group(meshes.tp.get_group())
    parts = WrappedParts(blocks, plan, [mixture.experts for mixture in mixtures], EXPERT_DIMS)

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


class BatchFeed:
    """Micro-batches on the device, in order; the next is copied while the last one taken is computed on."""

    def __init__(self, config: Config, dp_rank: int, device: torch.device, first_step: int) -> None:
        self._tokens = SyntheticTokens(
            config.model.vocab_size,
            config.data.seq_len,
            config.training.batch_size,
            config.training.seed,
            dp_rank,
        )
        self._num_micro_batches = config.training.grad_accum_steps
        self._device = device
        self._index = first_step * self._num_micro_batches
        self._devices = backend_of(device)
        prefetches = config.data.prefetch and self._devices.is_device
        self._stream = self._devices.new_stream(device) if prefetches else None
        self._next: tuple[Tensor, Any] | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        """Inputs token_BS and their target_BS, ready for the current stream."""
        batch_BS = self._take_copied() if self._stream is not None else self._read().to(self._device)
        return batch_BS[:, :-1], batch_BS[:, 1:]

    def _read(self) -> Tensor:
        step, micro_batch = divmod(self._index, self._num_micro_batches)
        self._index += 1
        return self._tokens.batch(step, micro_batch)

    def _take_copied(self) -> Tensor:
        batch_BS, copied = self._next or self._start_copy()
        current = self._devices.current_stream(self._device.index).stream
        current.wait_event(copied)
        # The allocator must not give this memory to the copy stream again while the current one reads it.
        batch_BS.record_stream(current)
        self._next = self._start_copy()
        return batch_BS

    def _start_copy(self) -> tuple[Tensor, Any]:
        assert self._stream is not None
        pinned_BS = self._read().pin_memory()
        with self._devices.on_stream(self._stream):
            batch_BS = pinned_BS.to(self._device, non_blocking=True)
            return batch_BS, self._stream.record_event()


class SyntheticTokens:
    """Walks around a circle of tokens in a fixed random order: each token decides the next.

    A batch is a function of seed, dp rank, step and micro-batch, so a resumed run sees what it would have.
    """

    def __init__(self, vocab_size: int, seq_len: int, batch_size: int, seed: int, dp_rank: int) -> None:
        self._batch_size, self._seed, self._dp_rank = batch_size, seed, dp_rank
        rng = np.random.default_rng([seed, 0])
        self._circle = rng.permutation(vocab_size)[:_MAX_ALPHABET].astype(np.int64)
        self._offset_S = np.arange(seq_len + 1)

    def batch(self, step: int, micro_batch: int) -> Tensor:
        """Tokens as int64 on the CPU, one more per row than the model reads: targets are shifted by one."""
        rng = np.random.default_rng([self._seed, 1, self._dp_rank, step, micro_batch])
        start_B = rng.integers(len(self._circle), size=self._batch_size)
        place_BS = (start_B[:, None] + self._offset_S) % len(self._circle)
        return torch.from_numpy(self._circle[place_BS])


def learning_rate(step: int, num_steps: int, lr: float, scheduler: SchedulerConfig) -> float:
    """Rate at a global step, counted from 0: a linear rise over warmup_steps, then as scheduler.kind says."""
    if step < scheduler.warmup_steps:
        return lr * (step + 1) / scheduler.warmup_steps
    if scheduler.kind == "constant":
        return lr
    num_after_warmup = max(1, num_steps - 1 - scheduler.warmup_steps)
    progress = min(1.0, (step - scheduler.warmup_steps) / num_after_warmup)
    part = 1 - progress if scheduler.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (scheduler.min_lr_ratio + (1 - scheduler.min_lr_ratio) * part)


class LossScale:
    """Keeps fp16 gradients in range: halved when they overflow, doubled after enough steps without.

    torch.amp.GradScaler looks for infinities per tensor mesh; here the global gradient norm, which all
    ranks share, decides, so that sharded and replicated parameters skip the same steps.
    """

    def __init__(self, enabled: bool, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.value = initial if enabled else 1.0
        self.num_good = 0
        self._growth_interval = growth_interval

    def update(self, finite: bool) -> None:
        if not self.enabled:
            return
        if not finite:
            self.value, self.num_good = max(1.0, self.value / 2), 0
            return
        self.num_good += 1
        if self.num_good == self._growth_interval:
            self.value, self.num_good = self.value * 2, 0
