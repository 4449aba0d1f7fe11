"""The device, the process group and the arithmetic of a training process."""

import logging
import os
import secrets
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from aorta.config import Config
from aorta.device.backend import accelerator, backend_of
from aorta.device.collective_events import LibraryEventsUnavailable, configure
from aorta.errors import ConfigError
from aorta.launcher import LaunchedRank
from aorta.record.run_folder import announce, announced

log = logging.getLogger("aorta")


class AgreedError(ConfigError):
    """Every rank of the run raises it, with the same message: rank 0 can say it for all."""


def choose_device(config: Config, ranks: LaunchedRank) -> torch.device:
    """A GPU of its own for every rank, or the CPU. Before any process group exists."""
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
        if config.recording.enabled and config.recording.collectives == "plugin":
            with suppress(LibraryEventsUnavailable):  # the recorder says why
                configure(os.environ)
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
    """A word that no other attempt of the job has."""
    word = secrets.token_hex(8)
    if ranks.world_size == 1:
        return word
    if not ranks.is_first:
        return announced(store, ranks.rank)
    announce(store, ranks.world_size, word)
    return word


def agree(problem: str | None) -> None:
    """AgreedError on every rank as soon as one has a problem. Every rank calls it, in the default group."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, message in enumerate(problems):
        if message is not None:
            raise AgreedError(message if rank == 0 else f"rank {rank}: {message}")


def set_arithmetic(config: Config) -> None:
    """Matrix multiply precision, determinism and seeds of this process."""
    training = config.training
    torch.set_float32_matmul_precision("high" if training.precision == "tf32" else "highest")
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(training.seed)
