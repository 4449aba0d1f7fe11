"""Files of profilers, opened to be read: decompression by the fastest library, SQLite with an end to every query."""

import gzip
import importlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO
from urllib.parse import quote

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


SQLITE_MAGIC = b"SQLite format 3\0"
INSTRUCTIONS_PER_BYTE = 200
"""A query over a file of this kind takes less; a view made to run for ever does not."""
FIRST_INSTRUCTIONS = 100_000_000
STRIDE = 100_000
FAULTS = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Names in a damaged schema may be no text."""


class Database:
    """Tables and views of one file, with their columns."""

    def __init__(self, connection: sqlite3.Connection, location: str) -> None:
        self._connection = connection
        self.location = location
        self._columns: dict[str, list[str]] = {}
        self.names = [
            row[0] for row in self.rows("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        ]

    def columns(self, table: str) -> list[str]:
        """Of a table or view; empty where there is none of that name, or a view that cannot be used."""
        if table not in self.names:
            return []
        if table not in self._columns:
            try:
                cursor = self._connection.execute(f"SELECT * FROM {quoted(table)} LIMIT 0")
                self._columns[table] = [column[0] for column in cursor.description]
            except FAULTS:
                self._columns[table] = []
        return self._columns[table]

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(query, parameters).fetchall()
        except FAULTS as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"{self.location} cannot be queried: {reason}") from error

    def count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {quoted(table)}")[0][0])


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def open_database(path: Path | str) -> Iterator[Database]:
    """TraceError in one line where the file is none, is damaged, or a query does not end."""
    try:
        with open_regular(path) as file:
            if file.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
                raise TraceError(f"{path} is no SQLite file")
            size = file.seek(0, 2)
        connection = sqlite3.connect(f"file:{quote(str(Path(path).resolve()))}?mode=ro&immutable=1", uri=True)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    strides = (FIRST_INSTRUCTIONS + INSTRUCTIONS_PER_BYTE * size) // STRIDE

    def exhausted() -> int:
        nonlocal strides
        strides -= 1
        return int(strides < 0)

    try:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.set_progress_handler(exhausted, STRIDE)
        connection.execute("PRAGMA trusted_schema = OFF")
        yield Database(connection, str(path))
    except (*FAULTS, MemoryError) as error:
        raise TraceError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    finally:
        connection.close()
