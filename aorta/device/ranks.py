"""One rank of aorta's own commands: its device, its process group, and exchange with the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from aorta.device.backend import accelerator, backend_of
from aorta.errors import ConfigError
from aorta.launcher import launched_rank, rendezvous_is_given

Backend = Literal["nccl", "gloo"]
TIMEOUT = timedelta(minutes=5)
"""Time after which a collective of these commands fails."""


@dataclass
class Ranks:
    """This process among the others. Without a launcher it is the only one and has no group."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False
    """A launcher set MASTER_ADDR: there is to be a process group, of however many ranks."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str | None = None
    """None: no process group."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.backend is None else dist.group.WORLD

    def barrier(self) -> None:
        if self.backend == "nccl":
            dist.barrier(device_ids=[self.device.index])
            accelerator().synchronize(self.device)
        elif self.backend is not None:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank."""
        values: list[Any] = [value] * self.world_size
        if self.backend is not None:
            dist.all_gather_object(values, value)
        return values


def ranks_from_environment() -> Ranks:
    """This process as the launcher describes it; device and group come later. Raises ConfigError."""
    launched, meets = launched_rank(), rendezvous_is_given()
    if launched.world_size > 1 and not meets:
        raise ConfigError(
            f"WORLD_SIZE = {launched.world_size} needs MASTER_ADDR and MASTER_PORT; start with torchrun"
        )
    return Ranks(**launched._asdict(), launched=meets)


def choose_device(choice: str, ranks: Ranks) -> torch.device:
    """The device that --device names; auto: a GPU per rank where there are enough, else the CPU.

    Raises ConfigError.
    """
    gpus = accelerator()
    num_gpus = gpus.count() if gpus.is_available() else 0
    if choice == "auto":
        enough = num_gpus >= max(ranks.local_world_size, 1)
        return gpus.device(ranks.local_rank) if enough else torch.device("cpu")
    try:
        device = torch.device(choice)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", gpus.torch_type):
        name = gpus.torch_type
        raise ConfigError(f"--device must be auto, cpu, {name} or {name}:N, got {choice!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None and ranks.world_size > 1:
        raise ConfigError(f"--device {choice}: several ranks need a GPU each, give --device {device.type}")
    index = ranks.local_rank if device.index is None else device.index
    needed = max(index + 1, ranks.local_world_size)
    if num_gpus < needed:
        raise ConfigError(f"--device {choice} needs {needed} GPUs on this machine, it has {num_gpus}")
    return gpus.device(index)


def check_backend(backend: str, device: torch.device) -> None:
    """Raise ConfigError for NCCL without a GPU."""
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError("--backend nccl needs a GPU for every rank; give --backend gloo")


@contextmanager
def process_group(ranks: Ranks, backend: Backend | None, timeout: timedelta = TIMEOUT) -> Iterator[Ranks]:
    """The same ranks, with a default process group where a launcher started them."""
    devices = backend_of(ranks.device)
    devices.set_device(ranks.device)
    if not ranks.launched:
        yield ranks
        return
    ranks.backend = backend or devices.collectives
    dist.init_process_group(
        ranks.backend, timeout=timeout, device_id=ranks.device if ranks.backend == "nccl" else None
    )
    try:
        yield ranks
    finally:
        ranks.backend = None
        dist.destroy_process_group()


def own_group(ranks: Ranks, groups: Sequence[Sequence[int]] | None) -> dist.ProcessGroup | None:
    """This rank's process group of `groups`; the whole world where that is None.

    Every rank must call it with the same groups, since each rank takes part in making all of them.
    """
    if ranks.backend is None or groups is None:
        return ranks.group
    group_of_rank = None
    for members in groups:
        group = dist.new_group(list(members), timeout=TIMEOUT)
        if ranks.rank in members:
            group_of_rank = group
    return group_of_rank
