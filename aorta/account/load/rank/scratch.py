"""Ranks of a run that do not fit in memory together: their numbers wait in files until they are asked for.

The files lie in a folder of this process alone, below $AORTA_CACHE_DIR or the system's temporary folder, and
go at the end.
"""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aorta.account.load.rank.columns import (
    Passes,
    RankColumns,
    RankFile,
    SourceColumns,
    packed,
    unpacked,
)
from aorta.account.load.rank.reduce import reduce_file
from aorta.errors import ReportError
from aorta.files import open_regular, replacing
from aorta.records.files import files_beside
from aorta.records.schema import Source

MOST_BYTES_IN_MEMORY = 256 << 20
"""Lines of a run above which its numbers wait in files; they take about half as much."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """The folder. Travels to other processes."""

    path: Path

    def reduce(self, path: Path, strict: bool = True) -> RankFile:
        """The numbers of a rank's file, left in a file. strict: as in reduce_file."""
        rank = reduce_file(path, strict)
        stored: dict[Source, SourceColumns] = {}
        for source, columns in rank.columns.items():
            target = self.path / f"{path.name}.{source}"
            stored[source] = _stored(target, columns.load())
        return replace(rank, columns=stored)


@contextmanager
def scratch_of(paths: Sequence[Path]) -> Iterator[Scratch | None]:
    """A folder for the numbers of these files of lines; None where they fit in memory."""
    size = 0
    for path in paths:
        beside = files_beside(path)
        for file in (path,) if beside is None else (path, beside.columns):
            with suppress(OSError):
                size += file.stat().st_size
    if size <= MOST_BYTES_IN_MEMORY:
        yield None
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="aorta-", dir=scratch_folder())
    except OSError as error:
        raise ReportError(f"cannot make a temporary folder: {error.strerror}") from error
    with folder as name:
        yield Scratch(Path(name))


def scratch_folder() -> str | None:
    """$AORTA_CACHE_DIR where it is set and can be made; else None, which is the system's temporary folder."""
    folder = os.environ.get("AORTA_CACHE_DIR")
    if not folder:
        return None
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def no_room(folder: Path | str, error: OSError) -> ReportError:
    return ReportError(
        f"cannot keep the numbers of the run in {folder}: {error.strerror}; AORTA_CACHE_DIR may name a folder"
        " with more room"
    )


@dataclass(slots=True)
class StoredColumns:
    """The steps of a rank by one source; their numbers are in a file."""

    path: Path
    global_step: NDArray[np.int64]
    passes: Passes
    has_collectives: NDArray[np.bool_]
    num_calls: int
    choose: tuple[Callable[[RankColumns], RankColumns], ...] = ()
    """Applied to what is read: rows that are left out."""

    def load(self) -> RankColumns:
        with open_regular(self.path) as file:
            columns, metrics = pickle.load(file)
        columns.metrics = {name: unpacked(*column) for name, column in metrics.items()}
        for choose in self.choose:
            columns = choose(columns)
        loaded: RankColumns = columns
        return loaded

    def sharing(self, other: SourceColumns | None) -> "StoredColumns":
        """With the other's steps where they are the same ones."""
        if other is None or not np.array_equal(self.global_step, other.global_step):
            return self
        is_kept = np.array_equal(self.has_collectives, other.has_collectives)
        return replace(
            self,
            global_step=other.global_step,
            has_collectives=other.has_collectives if is_kept else self.has_collectives,
        )


def _stored(path: Path, columns: RankColumns) -> StoredColumns:
    metrics = {name: packed(values) for name, values in columns.metrics.items()}
    try:
        with replacing(path, durable=False) as file:
            pickle.dump((replace(columns, metrics={}), metrics), file, protocol=5)
    except OSError as error:
        raise no_room(path.parent, error) from error
    return StoredColumns(
        path, columns.global_step, columns.passes, columns.has_collectives, columns.num_calls
    )
