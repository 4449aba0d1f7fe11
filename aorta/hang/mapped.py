"""Files of a rank that outlive it: mapped into its memory, written without a call of the system."""

import mmap
import os
from pathlib import Path


def new_mapped_file(path: Path, num_bytes: int) -> mmap.mmap:
    """The bytes of a new file, all zero; what is assigned to them is in the page cache at once.

    Raises OSError where the file cannot be made, and where `path` is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        # Blocks and all: to write into a hole of a mapped file on a full disk ends the process (SIGBUS).
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
