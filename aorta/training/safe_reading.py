"""Checkpoints are read without running what they hold.

torch.distributed.checkpoint keeps its metadata and everything that is no tensor as pickles, which may call
any function. Here a pickle may name the classes that a checkpoint consists of, and nothing else.
"""

import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_MODULES = ("torch.distributed.checkpoint.metadata",)
_NAMES = {
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


class SafeReader(FileSystemReader):
    """Refuses metadata that names anything else than what metadata is made of: pickle.UnpicklingError."""

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
    """Loads what is no tensor with weights_only: numbers, texts, lists."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_allowed = module in _MODULES and "." not in name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            is_allowed = True
        if is_allowed or (module, name) in _NAMES:
            result = super().find_class(module, name)
            if is_allowed and not isinstance(result, type | torch.dtype | torch.layout):
                raise pickle.UnpicklingError(f"{module}.{name} is no class")
            return result
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no checkpoint needs")
