"""Checkpoints of a training run, with torch.distributed.checkpoint.

A checkpoint is complete or absent: its folder gets its name when all is written. It can be resumed under
another parallel layout. It is read without running what it holds: unpickling is limited to a list of names.
Ranks agree after every part that can fail on one of them, so that none waits in a collective for another.
"""

import enum
import errno
import hashlib
import io
import logging
import os
import pathlib
import pickle
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from aorta.config.structs import Config
from aorta.device.backend import accelerator
from aorta.errors import NOT_JSON, ConfigError
from aorta.files import write_whole
from aorta.training.setup import AgreedError, LossScale, agree

log = logging.getLogger("aorta")
_META = "aorta.json"
"""File in a checkpoint with CheckpointMeta."""
_SAFE_MODULES = ("torch.distributed.checkpoint.metadata",)
"""Modules whose classes a checkpoint's metadata may name."""
_SAFE_NAMES = {
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
"""Further names, with their modules, that it may name."""


class CheckpointMeta(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Description of a checkpoint. The learning rate is a function of the step and needs no state."""

    step: int
    """Number of optimizer steps done."""
    world_size: int
    seed: int
    model: dict[str, Any]
    loss_scale: float
    num_good: int
    files: dict[str, str] = {}
    """Checksum of each file by its name; empty in checkpoints of earlier versions."""


class Checkpoints:
    """Save and load one run's state in <folder>/step_<n>. Every rank calls every method."""

    def __init__(
        self, config: Config, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, scale: LossScale
    ) -> None:
        self.folder = folder_of(config)
        self._config, self._rank = config, rank
        self._model, self._optimizer, self._scale = model, optimizer, scale
        self._last_saved: int | None = None

    def save(self, step: int) -> Path:
        """Write the state after `step` steps and return its folder.

        A rename is the last act: only a complete checkpoint has the name. Raises AgreedError where a rank
        cannot write; earlier checkpoints are then as they were.
        """
        path = self.folder / f"step_{step:08d}"
        if step == self._last_saved:
            return path
        partial = self.folder / f".{path.name}.partial"
        try:
            self._write(partial, path, step)
        except AgreedError:
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._last_saved = step
        return path

    def _write(self, partial: Path, path: Path, step: int) -> None:
        with self._agreed_writing(path):
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        with self._agreed_writing(path):  # a rank that fails here must not enter the collectives below
            write_whole(partial / _rng_name(self._rank), _rng_state())
        model, optimizer = get_state_dict(self._model, self._optimizer)
        writer = FileSystemWriter(partial)
        writer.fs = Disk()
        with self._agreed_writing(path), _own_failure(self._rank, OSError):
            save({"model": model, "optimizer": optimizer}, storage_writer=writer)
        checksums: list[dict[str, str]] = [{}] * dist.get_world_size()
        with self._agreed_writing(path):
            own_checksums = {file.name: checksum(file) for file in self._own_files(partial)}
        dist.all_gather_object(checksums, own_checksums)
        with self._agreed_writing(path):
            if self._rank == 0:
                checksum_of = {
                    name: text for rank_checksums in checksums for name, text in rank_checksums.items()
                }
                meta = self._meta(step, checksum_of)
                write_whole(partial / _META, msgspec.json.encode(meta))
                # Content before the name: after a crash the name never stands for half a checkpoint.
                sync_folder(partial)
                replace(partial, path)
                sync_folder(path.parent)

    def _own_files(self, folder: Path) -> list[Path]:
        """Files of a checkpoint that this rank wrote; rank 0 also wrote the metadata."""
        files = [*folder.glob(f"__{self._rank}_*"), folder / _rng_name(self._rank)]
        return [*files, folder / ".metadata"] if self._rank == 0 else files

    @contextmanager
    def _agreed_writing(self, path: Path) -> Iterator[None]:
        """Context in which an OSError of one rank becomes everyone's AgreedError. Every rank enters."""
        problem = None
        try:
            yield
        except OSError as error:
            problem = _unwritten(path, error, self._config)
        agree(problem)

    def _meta(self, step: int, checksum_of: dict[str, str]) -> CheckpointMeta:
        return CheckpointMeta(
            step=step,
            world_size=dist.get_world_size(),
            seed=self._config.training.seed,
            model=msgspec.to_builtins(self._config.model),
            loss_scale=self._scale.value,
            num_good=self._scale.num_good,
            files=checksum_of,
        )

    def resume(self, name: str) -> int:
        """Load what training.resume names and return its number of steps; 0 where 'latest' finds nothing."""
        path = newest(self.folder) if name == "latest" else Path(name)
        meta = self._agreed_meta(path)
        if path is None or meta is None:
            if self._rank == 0:
                log.warning("training.resume = latest: no checkpoint in %s, starting afresh", self.folder)
            return 0
        with self._agreed_reading(path):
            self._check_files(path, meta)
            SafeReader(path).read_metadata()  # load would log a traceback, and look for other files
        model, optimizer = get_state_dict(self._model, self._optimizer)
        with self._agreed_reading(path), _own_failure(self._rank, Exception):
            load(
                {"model": model, "optimizer": optimizer},
                storage_reader=SafeReader(path),
                planner=SafePlanner(),
            )
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self._scale.value, self._scale.num_good = meta.loss_scale, meta.num_good
        with self._agreed_reading(path):
            if self._rank < meta.world_size:  # another rank keeps the state of its seed
                _set_rng_state(torch.load(path / _rng_name(self._rank), weights_only=True))
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

    def _check(self, meta: CheckpointMeta, path: Path) -> None:
        """Raise ConfigError for another model; aux_loss_weight and capacity_factor may change."""
        free = {"aux_loss_weight", "capacity_factor"}
        for key, value in msgspec.to_builtins(self._config.model).items():
            saved = meta.model.get(key, value)
            if saved != value and key not in free:
                raise ConfigError(
                    f"training.resume: {path} was saved with model.{key} = {saved}, this run has {value}"
                )

    def _check_files(self, path: Path, meta: CheckpointMeta) -> None:
        """Raise ValueError where a file of this rank's share is not as it was written.

        Checkpoints of earlier versions have no checksums and pass.
        """
        for number, (name, text) in enumerate(sorted(meta.files.items())):
            if number % dist.get_world_size() != self._rank:
                continue
            if Path(name).name != name or checksum(path / name) != text:
                raise ValueError(f"{name} is not as it was written: its checksum differs")

    @contextmanager
    def _agreed_reading(self, path: Path) -> Iterator[None]:
        """Context in which any error of one rank becomes everyone's AgreedError. Every rank enters."""
        problem = None
        try:
            yield
        except Exception as error:  # unpickling what is damaged may raise anything
            problem = _damaged(path, f"{type(error).__name__}: {error}")
        agree(problem)


def claim_checkpoint_folder(config: Config) -> None:
    """Make the folder of a run that writes checkpoints; raise AgreedError where the run cannot have it.

    A run that does not resume gets no folder that holds checkpoints: it would overwrite some of them and
    leave the others to be taken for its own. Every rank calls it.
    """
    training = config.training
    if training.checkpoint_every or training.checkpoint_at_end:
        agree(_why_not(folder_of(config), config))


def folder_of(config: Config) -> Path:
    return Path(config.training.checkpoint_dir or Path(config.training.output_dir) / "checkpoints")


def _why_not(folder: Path, config: Config) -> str | None:
    remedy = _another_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # os.access does not know quotas, nor what a server allows
            pass
    except OSError as error:
        return f"checkpoints cannot be written to {folder}: {error.strerror}; choose {remedy}"
    latest = newest(folder) if config.training.resume is None else None
    if latest is None:
        return None
    return (
        f"{folder} holds checkpoints of an earlier run, the newest is {latest.name}; continue it with "
        f"training.resume=latest or choose {remedy}"
    )


def _another_folder(config: Config) -> str:
    if config.training.checkpoint_dir:
        return "another training.checkpoint_dir"
    return "another training.output_dir or training.checkpoint_dir"


def _unwritten(path: Path, error: OSError, config: Config) -> str:
    remedy = f"choose {_another_folder(config)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room there or {remedy}"
    latest = newest(path.parent)
    if latest is not None:
        remedy += f", and continue with training.resume={latest}"
    return f"checkpoint {path.name} cannot be written to {path.parent}: {error.strerror or error}; {remedy}"


def newest(folder: Path) -> Path | None:
    """Path of the complete checkpoint with the most steps; None where there is none."""
    complete = filter(_is_step, folder.glob("step_*"))
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"step_\d+", path.name) is not None


def read_meta(path: Path) -> CheckpointMeta:
    """Description of the checkpoint at path. Raises ConfigError where there is none or it is damaged."""
    try:
        return msgspec.json.decode((path / _META).read_bytes(), type=CheckpointMeta)
    except FileNotFoundError:
        if path.is_dir() and _is_step(path):
            raise ConfigError(_damaged(path, f"no {_META} in it")) from None
        raise ConfigError(
            f"training.resume: {path} is not a checkpoint, give a step_<n> folder or 'latest'"
        ) from None
    except (OSError, *NOT_JSON) as error:
        raise ConfigError(_damaged(path, f"{_META}: {error}")) from None


def _damaged(path: Path, reason: str) -> str:
    first_line = next(iter(reason.splitlines()), "")
    return (
        f"training.resume: {path} is damaged or incomplete, give another step_<n> folder or remove it "
        f"({first_line.removesuffix(': ')})"
    )


@contextmanager
def _own_failure(rank: int, kind: type[Exception]) -> Iterator[None]:
    """Context in which, of the failures that torch gathers and raises on every rank, a rank raises its own.

    Where one is not of the kind expected, torch's error with all of them and their tracebacks goes on.
    """
    try:
        yield
    except CheckpointException as error:
        failures = {number: failure for number, (failure, _) in error.failures.items()}
        if not all(isinstance(failure, kind) for failure in failures.values()):
            raise
        if rank in failures:
            raise failures[rank] from None


def _rng_name(rank: int) -> str:
    return f"rng_{rank}.pt"


def _rng_state() -> bytes:
    state = {"cpu": torch.get_rng_state()}
    devices = accelerator()
    if devices.is_initialized():
        state[devices.torch_type] = devices.rng_state()
    content = io.BytesIO()  # torch.save to a path does not say why it cannot write there
    torch.save(state, content)
    return content.getvalue()


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    devices = accelerator()
    if devices.torch_type in state and devices.is_initialized():
        devices.set_rng_state(state[devices.torch_type])


class Disk(FileSystem):
    """File system that raises the operating system's own error and removes a file that could not be finished.

    torch.save turns an OSError into a RuntimeError about positions in its archive. And a disk that stays
    full until all ranks have noticed would stop the records too.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except Exception as error:
            reason = _system_error(error)
            if reason is None:
                raise
            if "w" in mode:
                Path(path).unlink(missing_ok=True)
            raise OSError(reason.errno, reason.strerror, os.fspath(path)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def checksum(path: Path) -> str:
    """blake2b of a file's content, 16 bytes in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def replace(partial: Path, path: Path) -> None:
    """Rename partial to path. After an OSError the checkpoint that had the name still has it."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    try:
        partial.rename(path)
    except OSError:
        if old.is_dir():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class SafeReader(FileSystemReader):
    """Reader whose metadata may hold nothing but metadata; raises pickle.UnpicklingError for the rest."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"metadata is a {type(metadata).__name__}")
        for info in (metadata.storage_data or {}).values():
            inside = pathlib.PurePath(info.relative_path)
            if inside.is_absolute() or ".." in inside.parts:
                raise pickle.UnpicklingError(f"metadata names {inside}, which is not in the checkpoint")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Planner that loads what is no tensor (numbers, texts, lists) with weights_only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def _member(of: type, name: str) -> enum.Enum:
    """For getattr, by which Python 3.11.0 to 3.11.3 pickle members of enumerations, and nothing else here."""
    if not (isinstance(of, type) and issubclass(of, enum.Enum)) or name not in of.__members__:
        raise pickle.UnpicklingError(f"{name} is no member of an enumeration")
    return of[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_allowed = module in _SAFE_MODULES and "." not in name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            is_allowed = True
        if is_allowed or (module, name) in _SAFE_NAMES:
            result = super().find_class(module, name)
            if is_allowed and not isinstance(result, type | torch.dtype | torch.layout):
                raise pickle.UnpicklingError(f"{module}.{name} is no class")
            return result
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint needs")
