"""The folder a run writes: one line of JSON per step, and run.json.

Nothing that was there before is appended to or overwritten, and no failure of the disk reaches the
training loop: recording stops with one warning.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from aorta.errors import RecordError
from aorta.records.schema import RunRecord

logger = logging.getLogger(__name__)

RUN_FILES = (
    "run.json",
    "rank_*_metrics.jsonl",
    "rank_*_kernels.json",
    "torch_profiler",
    "tensorboard",
    "hang",
)
"""What a run leaves in its folder."""

CLOSING_S = 10.0
"""How long a run that ends may still be writing when the next one claims its folder."""


def steps_name(rank: int) -> str:
    return f"rank_{rank}_metrics.jsonl"


def kernels_name(rank: int) -> str:
    return f"rank_{rank}_kernels.json"


def move_aside(output_dir: Path | str, patterns: tuple[str, ...] = RUN_FILES) -> Path | None:
    """Move a finished run's files to output_dir/previous-<UTC>/; where they went, None if there were none.

    A report in output_dir/report goes along with the run.json beside it.

    Raises RecordError where a run is still writing them, and where they cannot be moved.

    For one process per folder, before the others open their files: rank 0 calls it and then
    everyone meets in a barrier. Ranks that each moved what they found would move the new files of
    those that started earlier.
    """
    folder = Path(output_dir)
    old = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not old:
        return None
    _wait_until_closed([path for path in old if path.name.endswith("_metrics.jsonl")])
    # scripts/demo.sh puts it there; beside the records of the next run it would read as the report of that.
    report = folder / "report"
    if folder / "run.json" in old and (report / "summary.json").is_file():
        old.append(report)
    try:
        aside = _new_folder(folder)
        for path in old:
            path.rename(aside / path.name)
    except OSError as error:
        raise RecordError(f"cannot move the previous run in {folder} aside: {error}") from None
    return aside


class LineWriter:
    """Appends records to one file as lines of JSON; each line is with the OS when write returns.

    A process that is killed leaves every line it wrote. When the disk fails, one warning is logged,
    the file is cut back to its last whole line where that is possible, and later writes do nothing.
    """

    def __init__(self, descriptor: int, path: Path | str) -> None:
        self.path = Path(path)
        self.num_written = 0
        self.num_lost = 0
        self._descriptor: int | None = descriptor
        self._failed = False
        self._num_bytes = 0
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        with suppress(OSError):  # a file system without locks, or no file
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """A writer of a new file; RecordError where one exists or none can be made."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise RecordError(
                f"{path} exists and is not overwritten; move it aside or choose another output_dir"
            ) from None
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        return cls(descriptor, path)

    @classmethod
    def append(cls, path: Path | str) -> Self:
        """A writer that goes on with a file that `create` made, in another process."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        writer = cls(descriptor, path)
        writer._num_bytes = os.fstat(descriptor).st_size
        return writer

    @property
    def recording(self) -> bool:
        return self._descriptor is not None and not self._failed

    def write(self, record: Any) -> bool:
        """Whether the record is in the file. Never raises OSError."""
        line = self._encoder.encode(record) + b"\n"
        with self._lock:
            if self._descriptor is None or self._failed:
                self.num_lost += 1
                return False
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self._failed = True
                self.num_lost += 1
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._num_bytes)
                logger.warning("recording stopped: cannot write %s: %s", self.path, error.strerror)
                return False
            self._num_bytes += len(line)
            self.num_written += 1
            return True

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                with suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunFolder:
    """One rank's files in the folder of a run. move_aside comes before, in one process."""

    def __init__(self, output_dir: Path | str, rank: int) -> None:
        self.path = Path(output_dir)
        self.rank = rank
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the folder {self.path}: {error.strerror}") from None
        self.steps = LineWriter.create(self.path / steps_name(rank))
        self._warned = False

    def write_run(self, run: RunRecord) -> bool:
        """Write run.json, whole or not at all. Whether it was written; a failing disk only warns."""
        try:
            write_json(self.path / "run.json", run)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("cannot write %s: %s", self.path / "run.json", error.strerror)
            return False
        return True

    def close(self) -> None:
        self.steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_json(path: Path | str, value: Any) -> None:
    """Write an indented JSON file; readers see the old content or the new one, never a part."""
    data = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    with replacing(Path(path)) as file:
        file.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends; an OSError leaves `path` as it was."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            yield file
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _wait_until_closed(paths: Iterable[Path]) -> None:
    """Other ranks of the job may be a little later than this one with the end of its run before."""
    deadline = time.monotonic() + CLOSING_S
    for path in paths:
        while _is_being_written(path):
            if time.monotonic() > deadline:
                raise RecordError(f"a run is still writing {path}: end it, or choose another output_dir")
            time.sleep(0.02)


def _is_being_written(path: Path) -> bool:
    """Whether another process writes it: a LineWriter's lock goes with its process, however that ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _new_folder(folder: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        aside = folder / f"previous-{stamp}{suffix}"
        try:
            aside.mkdir()
        except FileExistsError:
            continue
        return aside
    raise FileExistsError(f"{folder}/previous-{stamp}-*")
