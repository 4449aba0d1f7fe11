"""A SQLite file of a profiler: opened to be read, never written, and with an end to every query."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aorta.errors import TraceError
from aorta.traces.files.inflate import open_regular

MAGIC = b"SQLite format 3\0"
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
            if file.read(len(MAGIC)) != MAGIC:
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
