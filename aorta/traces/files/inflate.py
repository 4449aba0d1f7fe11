"""Files of traces, opened and unpacked: by isal (Intel's ISA-L) where it is installed, else by Python's zlib.

A third of the time of reading a trace is inflating it, and ISA-L inflates two to three times as fast. It has
wheels for Linux, macOS and Windows on x86-64 and arm64; where there is none, nothing else changes.
"""

import gzip
import importlib
import os
import stat
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from aorta.errors import TraceError

_library: ModuleType
try:
    _library = importlib.import_module("isal.isal_zlib")
except ImportError:
    _library = zlib

LARGEST_BYTES = 1 << 34
"""A file that unpacks to more is taken for a bomb, and so is one that unpacks to more than LARGEST_RATIO
times its size and to more than LARGEST_SMALL_BYTES: traces unpack to 5 to 40 times theirs. A piece of
UNPACKED_BYTES is held to the ratio by itself, so that a bomb is refused long before the memory is full."""
LARGEST_RATIO = 100
LARGEST_SMALL_BYTES = 1 << 28
UNPACKED_BYTES = 1 << 28
"""Unpacked at a time: most traces in one piece, which need not be joined."""


NAME: str = _library.__name__
DECOMPRESS_ERRORS: tuple[type[Exception], type[Exception]] = (zlib.error, _library.error)


def decompressobj(wbits: int) -> Any:
    """As zlib.decompressobj."""
    return _library.decompressobj(wbits)


def open_regular(path: Path | str) -> BinaryIO:
    """The file, opened to be read. TraceError for what is none: a pipe would be waited for without end, and a
    device never ends."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TraceError(f"{path} is no regular file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"cannot read {path}: {reason}") from error


def read_bytes(path: Path | str) -> bytes:
    """The file's content, unpacked where it is gzip."""
    with open_regular(path) as file:
        try:
            data = file.read()
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from error
        except MemoryError as error:
            raise TraceError(f"{path} is larger than the memory here") from error
    return unpack(data, str(path))


def unpack(data: bytes, location: str) -> bytes:
    """The content of gzip, or data as they are."""
    if data[:2] != b"\x1f\x8b":
        return data
    parts: list[bytes] = []
    size = 0
    largest_bytes = max(LARGEST_SMALL_BYTES, LARGEST_RATIO * len(data))
    try:
        while data:
            unpacker = decompressobj(31)
            packed = data
            while packed and not unpacker.eof:
                num_packed = len(packed)
                parts.append(unpacker.decompress(packed, UNPACKED_BYTES))
                packed = unpacker.unconsumed_tail
                num_packed -= len(packed)
                size += len(parts[-1])
                is_dense = len(parts[-1]) == UNPACKED_BYTES > LARGEST_RATIO * num_packed
                if size > min(largest_bytes, LARGEST_BYTES) or is_dense:
                    size_gb = min(size, largest_bytes, LARGEST_BYTES) / 1e9
                    raise TraceError(
                        f"{location} is a damaged gzip file: it unpacks to more than {size_gb:.3g} GB,"
                        " which no trace of its size does"
                    )
            if not unpacker.eof:
                raise TraceError(f"{location} is a damaged gzip file: it is cut off")
            data = unpacker.unused_data.lstrip(b"\0")  # some writers pad
    except (*DECOMPRESS_ERRORS, gzip.BadGzipFile) as error:
        raise TraceError(f"{location} is a damaged gzip file: {error}") from error
    except MemoryError as error:
        raise TraceError(f"{location} unpacks to more than the memory here") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)
