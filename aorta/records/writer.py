"""Writes the folder of a run: one line of JSON per step (LineWriter), and run.json.

Nothing that was there before is appended to or overwritten, and no failure of the disk reaches the
training loop: recording stops with one warning.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from aorta.errors import RecordError
from aorta.files import open_regular, regular_descriptor, replacing, write_whole
from aorta.records.files import RUN_FILES, STEPS_FILE, files_beside, steps_name
from aorta.records.launches import own_notes
from aorta.records.rotation import dropped_path, read_dropped, rotate
from aorta.records.schema import RunRecord
from aorta.records.seal import encoded, seal_of, sealed

if TYPE_CHECKING:
    from aorta.records.columns import ColumnsWriter

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 30
"""Size of a file of lines, with its columns, above which its oldest details go, then its oldest lines: about
a million steps."""
RETRY_S = 5.0
"""Seconds between two trials of a disk that has failed."""
LOOK_S = 0.5
"""Seconds between two checks that the file is still there."""
CLOSING_S = 10.0
"""Seconds that a run that ends may still be writing when the next one claims its folder."""


class RunFolder:
    """One rank's files in the folder of a run. move_aside comes before, in one process."""

    def __init__(self, output_dir: Path | str, rank: int, goes_on: bool = False) -> None:
        """goes_on: append to the file of an earlier attempt, where there is one."""
        self.path = Path(output_dir)
        self.rank = rank
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"cannot make the folder {self.path}: {error.strerror}") from None
        steps = self.path / steps_name(rank)
        self.steps = LineWriter.append(steps) if goes_on and steps.exists() else LineWriter.create(steps)
        self._warned = False

    def write_run(self, run: RunRecord) -> bool:
        """Write run.json, whole or not at all; True when it was written. A failing disk only warns."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            write_json(self.path / "run.json", run)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("aorta: cannot write %s: %s", self.path / "run.json", error.strerror)
            return False
        return True

    def close(self) -> None:
        self.steps.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LineWriter:
    """Appends records to one file as lines of JSON; each line is with the OS when write returns.

    Lines are numbered and carry a checksum (aorta.records.seal). A process that is killed leaves every line
    it wrote. When the disk fails, one warning is logged, the file is cut back to its last whole line where
    that is possible, and the line is lost; its number stays taken, so that the gap shows. Every RETRY_S the
    disk is tried again. A file that somebody removed is written anew, with all that was in it. A file that
    would grow beyond MOST_BYTES is rotated (aorta.records.rotation).
    """

    def __init__(
        self,
        descriptor: int,
        path: Path | str,
        next_number: int = 0,
        columns: "ColumnsWriter | None" = None,
    ) -> None:
        self.path = Path(path)
        self.max_bytes = MOST_BYTES
        self.num_written = 0
        self.num_lost = 0
        self.why_lost: str | None = None
        self._descriptor: int | None = descriptor
        self._failed_s: float | None = None
        self._num_bytes = 0
        self._next_number = next_number
        self._looked_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._columns = columns
        _take_lock(descriptor)

    @classmethod
    def create(cls, path: Path | str) -> Self:
        """A writer of a new file; RecordError where one exists or none can be made."""
        try:
            descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise RecordError(
                f"{path} exists and is not overwritten; move it aside or choose another output_dir"
            ) from None
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        _remove_columns(Path(path))  # their lines were taken away
        return cls(descriptor, path)

    @classmethod
    def append(cls, path: Path | str, with_columns: bool = False) -> Self:
        """A writer that continues a file that `create` made: in another process, or in a later attempt.

        A last line that was cut off is removed. with_columns: write the numbers of the lines (step records)
        beside them (aorta.records.columns). That costs as much again as the line, so it is for a process that
        does not train.
        """
        try:
            descriptor = regular_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        try:
            size, next_number = _end_of_lines(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise RecordError(f"cannot write {path}: {error.strerror}") from None
        columns = None
        if with_columns:
            # Not at the top: a training process that writes lines needs none of it.
            from aorta.records.columns import ColumnsWriter

            columns = ColumnsWriter(Path(path))
        writer = cls(descriptor, path, next_number, columns)
        writer._num_bytes = size
        return writer

    @property
    def recording(self) -> bool:
        return self._descriptor is not None and self._failed_s is None

    def write(self, record: Any) -> bool:
        """Append a record; True when it is in the file. Never raises OSError."""
        return self.write_bodies((self._encoder.encode(record),))

    def write_bodies(self, bodies: Sequence[bytes]) -> bool:
        """Append records that are JSON already, all of them or none; as `write`."""
        with self._lock:
            first = self._next_number
            lines = [sealed(body, number) for number, body in enumerate(bodies, first)]
            self._next_number += len(lines)  # also for lines that are lost: the gap shows
            data = b"".join(lines)
            now_s = time.monotonic()
            must_wait = self._failed_s is not None and now_s - self._failed_s < RETRY_S
            if self._descriptor is None or must_wait:
                self.num_lost += len(lines)
                return False
            try:
                self._put_back_if_removed(now_s)
                if self._size + len(data) > self.max_bytes:
                    self._rotate()
                unwritten = memoryview(data)
                while unwritten:
                    unwritten = unwritten[os.write(self._descriptor, unwritten) :]
            except OSError as error:
                self._fail(error, now_s, len(lines))
                return False
            if self._failed_s is not None:
                logger.warning(
                    "aorta: recording goes on in %s; %d lines are missing", self.path, self.num_lost
                )
                self._failed_s = None
            if self._columns is not None:
                for line in lines:
                    self._columns.add(len(line))
            self._num_bytes += len(data)
            self.num_written += len(lines)
            return True

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                with suppress(OSError):
                    self._put_back_if_removed(float("inf"))
                    os.fsync(self._descriptor)
                with suppress(OSError):
                    os.close(self._descriptor)
                self._descriptor = None
                if self._columns is not None:
                    self._columns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _size(self) -> int:
        """Bytes of the lines and of their columns."""
        return self._num_bytes + (0 if self._columns is None else self._columns.num_bytes)

    def _fail(self, error: OSError, now_s: float, num_lines: int) -> None:
        """Count lines as lost, and cut the file back to its last whole line."""
        assert self._descriptor is not None
        if self._failed_s is None:
            logger.warning("aorta: recording stopped: cannot write %s: %s", self.path, error.strerror)
        self._failed_s = now_s
        self.num_lost += num_lines
        self.why_lost = error.strerror
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._num_bytes)
            os.lseek(self._descriptor, self._num_bytes, os.SEEK_SET)

    def _put_back_if_removed(self, now_s: float) -> None:
        """Write the file again where its name is gone: its content is there as long as it is open."""
        assert self._descriptor is not None
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        if os.fstat(self._descriptor).st_nlink > 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = regular_descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            _copy(self._descriptor, descriptor, self._num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        _take_lock(descriptor)
        logger.warning("aorta: %s was removed while it was being written: written again, complete", self.path)

    def _rotate(self) -> None:
        """Replace the file by a smaller one; OSError leaves it as it was."""
        assert self._descriptor is not None
        dropped = read_dropped(self.path)
        with open(os.dup(self._descriptor), "rb") as source, replacing(self.path) as target:
            rotate(source, target, self.max_bytes, dropped)
        write_json(dropped_path(self.path), dropped)
        descriptor = regular_descriptor(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._num_bytes = os.fstat(descriptor).st_size
        if self._columns is not None:
            self._columns.give_up()  # the first lines are gone
        _remove_columns(self.path)
        _take_lock(descriptor)


def _remove_columns(path: Path) -> None:
    beside = files_beside(path)
    if beside is not None:
        with suppress(OSError):
            beside.columns.unlink(missing_ok=True)


def _take_lock(descriptor: int) -> None:
    """Show others that the file is being written: the lock goes with the process, however that ends."""
    with suppress(OSError):  # a file system without locks, or no file
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _copy(source: int, target: int, num_bytes: int) -> None:
    position = 0
    while position < num_bytes:
        unwritten = memoryview(os.pread(source, min(1 << 20, num_bytes - position), position))
        if not unwritten:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        position += len(unwritten)
        while unwritten:
            unwritten = unwritten[os.write(target, unwritten) :]


def write_json(path: Path | str, value: Any) -> None:
    """Write an indented JSON file; readers see the old content or the new one, never a part."""
    write_whole(path, msgspec.json.format(encoded(value), indent=2) + b"\n")


def write_sealed(path: Path | str, value: msgspec.Struct) -> None:
    """Write one sealed line of JSON, whole or not at all: a reader sees that it was changed or torn."""
    write_whole(path, sealed(encoded(value), 0))


# -- the end of a file of lines ------------------------------------------------------------------------


def _end_of_lines(descriptor: int) -> tuple[int, int]:
    """End of the last whole line, and the number of the next one. Cuts off what lies behind that end."""
    size = os.fstat(descriptor).st_size
    last = tail(descriptor, size)
    end = size - len(last) + last.rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)
    return end, _number_after(last, descriptor, end)


def next_line_number(path: Path | str) -> int:
    """Number of a file's next line; 0 where there is no file or it cannot be read."""
    try:
        with open_regular(path, buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return _number_after(tail(file.fileno(), size), file.fileno(), size)
    except OSError:
        return 0


def _number_after(last: bytes, descriptor: int, end: int) -> int:
    """Number of the line that follows the whole lines of `last`, a file's end.

    By the last line's seal; in a file without seals the number of its lines up to the byte `end`.
    """
    whole = last[: last.rfind(b"\n") + 1]
    seal = seal_of(whole[whole[:-1].rfind(b"\n") + 1 :]) if whole else None
    if seal is not None:
        return seal.number + 1
    return sum(
        os.pread(descriptor, min(1 << 20, end - position), position).count(b"\n")
        for position in range(0, end, 1 << 20)
    )


def tail(descriptor: int, size: int) -> bytes:
    """The end of a file of that size, from before its last whole line or the file's beginning."""
    last = b""
    position = size
    while position > 0 and last.count(b"\n") < 2:
        step = min(1 << 16, position)
        position -= step
        last = os.pread(descriptor, step, position) + last
    return last


# -- an earlier run in the same folder -----------------------------------------------------------------


def move_aside(output_dir: Path | str, patterns: tuple[str, ...] = RUN_FILES) -> Path | None:
    """Move a finished run's files to output_dir/previous-<UTC>/ and return that; None if there were none.

    A report in output_dir/report goes along with the run.json beside it.

    Raises RecordError where a run is still writing them, and where they cannot be moved.

    For one process per folder, before the others open their files: rank 0 calls it and then
    everyone meets in a barrier. Ranks that each moved what they found would move the new files of
    those that started earlier.
    """
    folder = Path(output_dir)
    own = own_notes()  # of this launch: attempts that died before this one are in it
    old = sorted({path for pattern in patterns for path in folder.glob(pattern) if path != own})
    if not old:
        return None
    wait_until_closed([path for path in old if STEPS_FILE.fullmatch(path.name)])
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


def wait_until_closed(paths: Iterable[Path]) -> None:
    """Wait until no process writes these files; RecordError after CLOSING_S.

    Other ranks of the job may end their previous run a little later than this one.
    """
    deadline = time.monotonic() + CLOSING_S
    for path in paths:
        while _is_being_written(path):
            if time.monotonic() > deadline:
                raise RecordError(f"a run is still writing {path}: end it, or choose another output_dir")
            time.sleep(0.02)


def _is_being_written(path: Path) -> bool:
    """Return True where another process holds the lock of its LineWriter."""
    try:
        descriptor = regular_descriptor(path, os.O_RDWR)
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
