"""Files that are written whole or not at all: readers see the old content or the new one, never a part."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path | str, *, durable: bool = True) -> Iterator[BinaryIO]:
    """An open file that takes the place of `path` when the block ends.

    An exception in the block or an OSError of the disk leaves `path` as it was, and nothing beside it.
    durable: the content is on the disk before the name is; a cache does without, since it can be made again.
    A symbolic link named `path` is replaced, its target is not written.
    """
    path = Path(path)
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
