"""Files of a checkpoint: whole or absent, and with the system's reason where they cannot be written."""

import hashlib
import io
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem


class Disk(FileSystem):
    """Raises what the system said, and gives the room of a file that is not whole back at once.

    torch.save makes of an OSError a RuntimeError about positions in its archive. And a disk that stays
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


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(partial: Path, path: Path) -> None:
    """Give partial the name path. An OSError leaves what has that name where it is."""
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
