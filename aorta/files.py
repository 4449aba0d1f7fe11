"""Opens the files of a run's folder, and writes files whole or not at all.

Anybody who may write into a run's folder may put a pipe, a device, a link or gigabytes there: every file of
it is opened here. Of a file that is written, readers see the old content or the new one, never a part.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LARGEST_BYTES = 1 << 26
"""Size of the largest file that is read in one piece; run.json of 10 000 ranks takes 3 MB."""


def regular_descriptor(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Raises OSError, also for a pipe, a device, a socket and a folder.

    Never waits: a pipe is not opened until somebody else opens its other end.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path | str, buffering: int = -1) -> BinaryIO:
    """The file, opened for reading. Raises OSError as regular_descriptor does."""
    return open(regular_descriptor(path), "rb", buffering=buffering)


def read_regular(path: Path | str, most_bytes: int = LARGEST_BYTES) -> bytes:
    """Content of a file. Raises OSError as regular_descriptor does, and for more than most_bytes."""
    with open_regular(path) as file:
        return _read(file, path, most_bytes)


def read_order(path: Path | str, most_bytes: int) -> bytes:
    """Content of a file that tells a running job what to do.

    Raises OSError as read_regular does, and where it is a link, where all may write it, and where it is
    neither this user's, root's nor of the owner of its folder.
    """
    with open(regular_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        trusted = {0, os.geteuid(), os.stat(Path(path).parent).st_uid}
        if status.st_uid not in trusted or status.st_mode & stat.S_IWOTH:
            raise PermissionError(errno.EPERM, "is of another user, or all may write it", str(path))
        return _read(file, path, most_bytes)


def _read(file: BinaryIO, path: Path | str, most_bytes: int) -> bytes:
    data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes} bytes: no run writes that", str(path))
    return data


@contextmanager
def replacing(path: Path | str, *, durable: bool = True) -> Iterator[BinaryIO]:
    """An open file that takes the place of `path` when the block ends.

    An exception in the block or an OSError of the disk leaves `path` as it was, and nothing beside it.
    durable: the content is on the disk before the name is; a cache does without, since it can be made again.
    A symbolic link named `path` is replaced, its target is not written. OSError for a device: root would lose
    /dev/null.
    """
    path = Path(path)
    if path.is_char_device() or path.is_block_device():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    # A random name and O_EXCL: a link that somebody put under the temporary name is not followed.
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """Write a file as `replacing` does. Raises OSError."""
    with replacing(path, durable=durable) as file:
        file.write(data)
