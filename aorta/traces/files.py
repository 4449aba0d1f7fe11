"""Opens files of profilers: gzip by the fastest library, SQLite with an end to every query.

Such files come from elsewhere: a bomb, a pipe or a view without end is refused in one line.
"""

import gzip
import importlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO
from urllib.parse import quote

from aorta import files
from aorta.errors import TraceError

_library: ModuleType
try:
    _library = importlib.import_module("isal.isal_zlib")  # several times faster than zlib
except ImportError:
    _library = zlib
NAME: str = _library.__name__
DECOMPRESS_ERRORS: tuple[type[Exception], type[Exception]] = (zlib.error, _library.error)

LARGEST_BYTES = 1 << 34
"""Size from which on an unpacked file is taken for a bomb, whatever its ratio."""
LARGEST_RATIO = 100
LARGEST_SMALL_BYTES = 1 << 28
"""Ratio of unpacked to packed size that makes a bomb of what unpacks to more than LARGEST_SMALL_BYTES: traces
unpack to 5 to 40 times their size."""
UNPACKED_BYTES = 1 << 28
"""Bytes that are unpacked at a time: most traces in one piece, which need not be joined. Each piece is
held to the ratio by itself, so that a bomb is refused long before the memory is full."""

SQLITE_MAGIC = b"SQLite format 3\0"
INSTRUCTIONS_PER_BYTE, FIRST_INSTRUCTIONS = 200, 100_000_000
"""Limit of the instructions of all queries on a database, by its size: a view made to run for ever is
ended."""
STRIDE = 100_000
"""Instructions between two looks at that limit."""
FAULTS = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""Errors of a damaged database; names in its schema may be no text."""


def open_regular(path: Path | str) -> BinaryIO:
    """The file, opened for reading.

    Raises TraceError for a pipe, which would be waited for without end, and for a device, which never ends.
    """
    try:
        return files.open_regular(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"cannot read {path}: {reason}") from error


def read_bytes(path: Path | str) -> bytes:
    """Content of a file, unpacked where it is gzip."""
    with open_regular(path) as file:
        try:
            data = file.read()
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from error
        except MemoryError as error:
            raise TraceError(f"{path} is larger than the memory here") from error
    return unpack(data, str(path))


def unpack(data: bytes, location: str) -> bytes:
    """Content of gzip data; other data as they are. location names them in errors."""
    if data[:2] != b"\x1f\x8b":
        return data
    parts: list[bytes] = []
    size = 0
    largest_bytes = max(LARGEST_SMALL_BYTES, LARGEST_RATIO * len(data))
    try:
        while data:
            unpacker = _library.decompressobj(31)
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
        """Columns of a table or view; empty where there is none of that name, or a view that fails."""
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
        """Result of a query. Raises TraceError where it fails."""
        try:
            return self._connection.execute(query, parameters).fetchall()
        except FAULTS as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"{self.location} cannot be queried: {reason}") from error

    def count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {quoted(table)}")[0][0])


def integer(value: Any) -> int:
    """The value if it is an integer, else 0: SQLite holds any type in any column."""
    return value if type(value) is int else 0


def quoted(name: str) -> str:
    """Name of a table or column, as SQL takes it whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def open_database(path: Path | str) -> Iterator[Database]:
    """Context of a SQLite file, read only.

    Raises TraceError where the file is no database or damaged, or where a query does not end.
    """
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
