"""Where columns of record files are kept between two readings, and when they may be used.

The folder is $AORTA_CACHE_DIR/records, or aorta/records in $XDG_CACHE_HOME or ~/.cache (on Windows in
%LOCALAPPDATA%), a folder per run, a file per rank. It is kept below LARGEST_CACHE_BYTES: what was not used
for longest goes first. Columns are used as long as the file of lines, and those beside it that numbers come
from, have the size, the inode and the times of modification and of change that they had. Those of a file that
was written in the last seconds are not kept, since it may change once more within a tick of the clock.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from aorta._version import __version__
from aorta.account.load.rank.columns import RankFile
from aorta.account.load.rank.reduce import COLUMNS_VERSION, reduce_file
from aorta.files import replacing
from aorta.records.files import files_beside

LARGEST_CACHE_BYTES = 16 << 30
SUFFIX = ".arrow"
LEAST_BYTES = 16 << 20
"""Lines of a run below which columns save nothing."""
YOUNGEST_S = 2.0
"""Age of a file of lines from which on its columns are kept."""


@dataclass(frozen=True, slots=True)
class ColumnsFolder:
    """A folder of columns. Travels to other processes."""

    path: Path
    is_temporary: bool = False
    """Of this process alone, for runs whose columns do not fit in memory: nothing is looked for in it."""

    def reduce(self, path: Path) -> RankFile:
        """The numbers of a rank's file: kept ones, or those of its lines, which are then kept. Where they
        cannot be kept the numbers are in memory."""
        # pyarrow takes longer to load than a small run takes to read.
        from aorta.account.load.rank.stored import read_columns, write_columns

        target = self.path / f"{path.name}{SUFFIX}"
        key = None if self.is_temporary else state_of(path)
        if key is not None:
            kept = read_columns(target, path, key)
            if kept is not None:
                with suppress(OSError):
                    os.utime(target)  # used last now
                return kept
        rank = reduce_file(path)
        if not self.is_temporary and (key is None or key != state_of(path) or _is_young(path)):
            return rank
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(target, durable=False) as file:
                write_columns(file, rank, key or "")
        except OSError:
            return rank
        return read_columns(target, path, key or "") or rank


def cache_folder() -> Path | None:
    """Where columns of runs are kept; None where the user has no home."""
    if folder := os.environ.get("AORTA_CACHE_DIR"):
        return Path(folder, "records")
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        if base := os.environ.get(variable):
            return Path(base, "aorta", "records")
    try:
        return Path.home() / ".cache" / "aorta" / "records"
    except RuntimeError:
        return None


@contextmanager
def columns_folder(run: Path, paths: Sequence[Path], use_cache: bool) -> Iterator[ColumnsFolder | None]:
    """The folder for the columns of a run's files; None of a small run, which is read as fast without.

    Without a cache they are in a temporary folder that goes at the end.
    """
    size = 0
    for path in paths:
        with suppress(OSError):
            size += path.stat().st_size
    kept = columns_of_run(run) if use_cache and size >= LEAST_BYTES else None
    if size < LEAST_BYTES:
        yield None
    elif kept is not None and _is_writable(kept.path):
        yield kept
        _make_room()
    else:
        with tempfile.TemporaryDirectory(prefix="aorta-columns-") as folder:
            yield ColumnsFolder(Path(folder), is_temporary=True)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def columns_of_run(run: Path) -> ColumnsFolder | None:
    """Where columns of the run at this path are kept; None where the user has no home."""
    folder = cache_folder()
    if folder is None:
        return None
    name = hashlib.blake2b(str(run.resolve()).encode(errors="surrogateescape"), digest_size=12).hexdigest()
    return ColumnsFolder(folder / name)


def state_of(path: Path) -> str | None:
    """What columns of a file of lines are made of; None where it cannot be told."""
    states = []
    beside = files_beside(path)
    for file in (path,) if beside is None else (path, beside.kernels, beside.unwritten):
        try:
            state = file.stat()
        except FileNotFoundError:
            states.append("none")
            continue
        except OSError:
            return None
        states.append(f"{state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}")
    return "; ".join((f"{__version__} {COLUMNS_VERSION}", str(path.resolve()), *states))


def _is_young(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < YOUNGEST_S
    except OSError:
        return True


def _make_room() -> None:
    """Removes columns that were used last long ago, while there are too many."""
    folder = cache_folder()
    files = []
    for path in () if folder is None else folder.glob(f"*/*{SUFFIX}"):
        with suppress(OSError):
            state = path.stat()
            files.append((state.st_mtime, state.st_size, path))
    size = sum(file[1] for file in files)
    for _, num_bytes, path in sorted(files):
        if size <= LARGEST_CACHE_BYTES:
            return
        with suppress(OSError):
            path.unlink()
            size -= num_bytes
