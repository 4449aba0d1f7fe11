"""This process's place among the ranks by the launcher's environment, before any process group exists.

torchrun sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; a process without them is alone.
"""

import os
from typing import NamedTuple

from aorta.errors import ConfigError

LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""Variables of torchrun, Slurm and Open MPI: the rank, its number on its machine, and how many are there."""


class LaunchedRank(NamedTuple):
    """Place of this process among the others; without a launcher it is the only one."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def launched_rank() -> LaunchedRank:
    """Place of this process by torchrun's variables. Raises ConfigError where these cannot be."""
    world_size, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK = {rank} must be below WORLD_SIZE = {world_size}; start with torchrun")
    return LaunchedRank(
        rank, _number("LOCAL_RANK", rank), world_size, _number("LOCAL_WORLD_SIZE", world_size)
    )


def rank_and_world_size() -> tuple[int, int]:
    """RANK and WORLD_SIZE as they stand, (0, 1) without. Raises ConfigError where they are no numbers."""
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def rendezvous_is_given() -> bool:
    """True where a launcher says where the ranks meet, so that the environment gives a process group."""
    return "MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ


def rank_text() -> str | None:
    """RANK as it stands, for messages; None without a launcher."""
    return os.environ.get("RANK")


def is_first_rank() -> bool:
    """True on rank 0 and without a launcher. Never raises: for processes that report a wrong environment."""
    return os.environ.get("RANK", "0") == "0"


def is_first_of_machine() -> bool:
    """True on one rank of every machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def local_rank(rank: int) -> int:
    """Number of this rank on its machine; the rank itself where no launcher tells. Never raises."""
    local = _told_of(rank, 1)
    return rank if local is None else local


def num_local_ranks(rank: int) -> int | None:
    """Ranks on the machine of this one; None where no launcher tells. Never raises."""
    return _told_of(rank, 2)


def _told_of(rank: int, place: int) -> int | None:
    for names in LAUNCHERS:
        text = os.environ.get(names[place], "")
        # Processes that a rank of the launcher starts have its variables too, and other numbers.
        if os.environ.get(names[0]) == str(rank) and text.isdecimal():
            return int(text)
    return None


def is_first_launch() -> bool:
    """True in one of the processes that start one command on several machines (srun, torchrun)."""
    return all(os.environ.get(name, "0") == "0" for name in ("SLURM_PROCID", "RANK", "NODE_RANK"))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {text!r}; start with torchrun") from None
