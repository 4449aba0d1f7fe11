"""Checkpoints with torch.distributed.checkpoint: complete or absent, whatever the parallel layout."""

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from aorta.config import Config
from aorta.errors import ConfigError
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
        self.folder = Path(config.training.checkpoint_dir or Path(config.training.output_dir) / "checkpoints")
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
        if path is None:
            if self._rank == 0:
                log.warning("training.resume = latest: no checkpoint in %s, starting afresh", self.folder)
            return 0
        meta = read_meta(path)
        self._check(meta, path)
        model, optimizer = get_state_dict(self._model, self._optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self._scale.value, self._scale.num_good = meta.loss_scale, meta.num_good
        rng_file = path / f"rng_{self._rank}.pt"
        if rng_file.exists():  # a larger world resumes too; its new ranks keep the state of their seed
            _set_rng_state(torch.load(rng_file, weights_only=True))
        return meta.step

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
