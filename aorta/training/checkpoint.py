"""Checkpoints with torch.distributed.checkpoint: complete or absent, whatever the parallel layout."""

import logging
import pickle
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from aorta.config import Config
from aorta.errors import ConfigError
from aorta.training.environment import AgreedError, agree
from aorta.training.schedule import LossScale

log = logging.getLogger("aorta")

_META = "aorta.json"


class CheckpointMeta(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is of. The learning rate is a function of the step and needs no state."""

    step: int
    """Optimizer steps that are in it."""
    world_size: int
    seed: int
    model: dict[str, Any]
    loss_scale: float
    num_good: int


class Checkpoints:
    """Saves and loads one run's state in <folder>/step_<n>. Every rank calls every method."""

    def __init__(
        self, config: Config, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale
    ) -> None:
        self.folder = folder_of(config)
        self._config, self._rank = config, rank
        self._model, self._optimizer, self._scale = model, optimizer, scale
        self._last_saved: int | None = None

    def save(self, step: int) -> Path:
        """Write the state after `step` steps. Under its name only when complete: a rename is the last act."""
        path = self.folder / f"step_{step:08d}"
        if step == self._last_saved:
            return path
        partial = self.folder / f".{path.name}.partial"
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        torch.save(_rng_state(), partial / f"rng_{self._rank}.pt")
        model, optimizer = get_state_dict(self._model, self._optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
        if self._rank == 0:
            (partial / _META).write_bytes(msgspec.json.encode(self._meta(step)))
            _replace(partial, path)
        self._last_saved = step
        return path

    def resume(self, name: str) -> int:
        """Load what training.resume names and return its number of steps; 0 where 'latest' finds nothing."""
        path = newest(self.folder) if name == "latest" else Path(name)
        meta = self._agreed_meta(path)
        if path is None or meta is None:
            if self._rank == 0:
                log.warning("training.resume = latest: no checkpoint in %s, starting afresh", self.folder)
            return 0
        model, optimizer = get_state_dict(self._model, self._optimizer)
        try:
            load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        except CheckpointException as error:  # raised on every rank, with the failures of all
            rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
            raise AgreedError(_damaged(path, rank, failure)) from None
        rng_state = self._agreed_rng_state(path)
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self._scale.value, self._scale.num_good = meta.loss_scale, meta.num_good
        if rng_state is not None:
            _set_rng_state(rng_state)
        return meta.step

    def _agreed_meta(self, path: Path | None) -> CheckpointMeta | None:
        meta = problem = None
        try:
            if path is not None:
                meta = read_meta(path)
                self._check(meta, path)
        except ConfigError as error:
            problem = str(error)
        agree(problem)
        return meta

    def _agreed_rng_state(self, path: Path) -> dict[str, torch.Tensor] | None:
        """None on a rank that the saved world did not have: it keeps the state of its seed."""
        state: dict[str, torch.Tensor] | None = None
        problem = None
        rng_file = path / f"rng_{self._rank}.pt"
        try:
            if rng_file.exists():
                state = torch.load(rng_file, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            problem = _damaged(path, self._rank, error)
        agree(problem)
        return state

    def _meta(self, step: int) -> CheckpointMeta:
        return CheckpointMeta(
            step=step,
            world_size=dist.get_world_size(),
            seed=self._config.training.seed,
            model=msgspec.to_builtins(self._config.model),
            loss_scale=self._scale.value,
            num_good=self._scale.num_good,
        )

    def _check(self, meta: CheckpointMeta, path: Path) -> None:
        """aux_loss_weight and capacity_factor may change; what decides the parameters may not."""
        free = {"aux_loss_weight", "capacity_factor"}
        for key, value in msgspec.to_builtins(self._config.model).items():
            saved = meta.model.get(key, value)
            if saved != value and key not in free:
                raise ConfigError(
                    f"training.resume: {path} was saved with model.{key} = {saved}, this run has {value}"
                )


def folder_of(config: Config) -> Path:
    return Path(config.training.checkpoint_dir or Path(config.training.output_dir) / "checkpoints")


def claim_checkpoint_folder(config: Config) -> None:
    """Make the folder of a run that writes checkpoints; AgreedError where it cannot have it.

    A run that does not resume gets no folder that holds checkpoints: it would overwrite some of them and
    leave the others to be taken for its own. Every rank calls it.
    """
    training = config.training
    if training.checkpoint_every or training.checkpoint_at_end:
        agree(_why_not(folder_of(config), config))


def _why_not(folder: Path, config: Config) -> str | None:
    training = config.training
    another = "another training.checkpoint_dir"
    if not training.checkpoint_dir:
        another = "another training.output_dir or training.checkpoint_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # os.access does not know quotas, nor what a server allows
            pass
    except OSError as error:
        return f"checkpoints cannot be written to {folder}: {error.strerror}; choose {another}"
    latest = newest(folder) if training.resume is None else None
    if latest is None:
        return None
    return (
        f"{folder} holds checkpoints of an earlier run, the newest is {latest.name}; continue it with "
        f"training.resume=latest or choose {another}"
    )


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    complete = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def read_meta(path: Path) -> CheckpointMeta:
    try:
        return msgspec.json.decode((path / _META).read_bytes(), type=CheckpointMeta)
    except FileNotFoundError:
        raise ConfigError(
            f"training.resume: {path} is not a checkpoint, give a step_<n> folder or 'latest'"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"training.resume: {path} cannot be read: {error}") from None


def _damaged(path: Path, rank: int, error: BaseException) -> str:
    what = next(iter(str(error).splitlines()), "")
    return (
        f"training.resume: {path} is damaged or incomplete, give another step_<n> folder or remove it "
        f"(rank {rank}: {type(error).__name__}{': ' if what else ''}{what})"
    )


def _replace(partial: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
