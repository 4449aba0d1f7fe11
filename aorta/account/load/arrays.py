"""Arrays [rank, step] of a run by name: in memory where they are small, else in a file without a name.

An array of a large run is mapped when it is asked for and forgotten when its user is done, so that a few of
them are in memory at a time, however many metrics there are. The file goes when the process does.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.account.rows import row_blocks
from aorta.errors import ReportError

MOST_IN_MEMORY = 1 << 20
"""Numbers of an array above which it is kept in the file: 8 MB, of some fifty metrics."""


class ArrayFile:
    """A file below $AORTA_CACHE_DIR, else in the system's temporary folder, in which arrays are kept."""

    def __init__(self) -> None:
        self._file: Any = None
        self._end = 0
        self._pid = os.getpid()

    @property
    def is_own(self) -> bool:
        """False in a copy of the process that made it, which must not give out places of its own."""
        return self._pid == os.getpid()

    def allocate(self, num_bytes: int) -> int:
        """Place of as many bytes that nobody uses."""
        place = self._end
        self._end += -(-num_bytes // PAGESIZE) * PAGESIZE
        return place

    def write(self, place: int, values: NDArray[Any]) -> None:
        try:
            file = self._open()
            data = memoryview(np.ascontiguousarray(values).view(np.uint8).data)
            while len(data):
                num_bytes = os.pwrite(file.fileno(), data, place)
                place, data = place + num_bytes, data[num_bytes:]
        except OSError as error:
            raise ReportError(
                f"cannot keep the numbers of the run in {_folder() or tempfile.gettempdir()}:"
                f" {error.strerror}; AORTA_CACHE_DIR may name a folder with more room"
            ) from error

    def read(self, place: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The array, read only; its pages are in memory for as long as it is used."""
        os.ftruncate(self._open().fileno(), max(self._end, os.fstat(self._open().fileno()).st_size))
        return np.memmap(self._open(), dtype=dtype, mode="r", offset=place, shape=shape)

    def _open(self) -> Any:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=_folder(), prefix=".aorta-arrays-", buffering=0)  # noqa: SIM115
        return self._file


def _folder() -> str | None:
    """$AORTA_CACHE_DIR where it is set and can be written to; None is the system's temporary folder."""
    folder = os.environ.get("AORTA_CACHE_DIR")
    if not folder:
        return None
    with suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


class Arrays(MutableMapping[str, NDArray[Any]]):
    """Arrays of one shape and type. A file: they are kept there, and what is asked for is read only."""

    def __init__(
        self, shape: tuple[int, int], file: ArrayFile | None = None, dtype: Any = np.float64
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._file = file
        self._entries: dict[str, _InMemory | _InFile] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._entries[name].read()

    def __setitem__(self, name: str, values: NDArray[Any]) -> None:
        if self._file is None:
            self._entries[name] = _InMemory(values if values.flags.writeable else values.copy())
            return
        entry = self._entries[name] = self._new_entry()
        for row, of_row in enumerate(values):
            entry.set_row(row, of_row)

    def set_row(self, name: str, row: int, values: NDArray[Any]) -> None:
        """One rank's values. Rows that are not set are NaN, or 0 of integers."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = self._new_entry()
        entry.set_row(row, values)

    def derive(self, name: str, function: Callable[..., NDArray[Any]], *sources: str) -> None:
        """Sets an array to function(the same rows of each source), in a file a block of ranks at a time.
        What function returns as it got it is not written there again."""
        if self._file is None:
            self[name] = function(*(self[source] for source in sources))
            return
        for rows in row_blocks(self.shape):
            blocks = [self[source][rows] for source in sources]
            values = function(*blocks)
            if name == sources[0] and values is blocks[0]:
                continue
            for row, of_row in enumerate(values, start=rows.start):
                self.set_row(name, row, of_row)

    def chosen(self, num_rows: int, columns: NDArray[np.intp]) -> "Arrays":
        """The first rows and these columns, in increasing order, of every array."""
        if (num_rows, len(columns)) == self.shape:
            return self
        chosen = Arrays((num_rows, len(columns)), self._file, self.dtype)
        for name in self:
            values = self[name]
            for row in range(num_rows):
                chosen.set_row(name, row, values[row, columns])
        return chosen

    def parted(self, *groups: list[str]) -> "list[Arrays]":
        """Arrays by these names, those of each group in its order."""
        parts = []
        for names in groups:
            part = Arrays(self.shape, self._file, self.dtype)
            part._entries = {name: self._entries[name] for name in names}
            parts.append(part)
        return parts

    def _new_entry(self) -> "_InMemory | _InFile":
        empty = np.nan if self.dtype.kind == "f" else 0
        if self._file is None or not self._file.is_own:
            return _InMemory(np.full(self.shape, empty, dtype=self.dtype))
        return _InFile(self._file, self.shape, np.full(self.shape[0], empty, dtype=self.dtype))

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._entries


def derive(
    arrays: MutableMapping[str, NDArray[Any]],
    name: str,
    function: Callable[..., NDArray[Any]],
    *sources: str,
) -> None:
    """Sets an array to function(sources), which looks at one rank at a time: by blocks where it can."""
    if isinstance(arrays, Arrays):
        arrays.derive(name, function, *sources)
    else:
        arrays[name] = function(*(arrays[source] for source in sources))


class _InMemory:
    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def read(self) -> NDArray[Any]:
        return self._values

    def set_row(self, row: int, values: NDArray[Any]) -> None:
        self._values[row] = values


class _InFile:
    """Rows that are all one number stay out of the file until one is not."""

    def __init__(self, file: ArrayFile, shape: tuple[int, int], constants: NDArray[Any]) -> None:
        self._file, self._shape = file, shape
        self._constants = constants
        self._is_written = np.zeros(shape[0], dtype=bool)
        self._place: int | None = None

    def set_row(self, row: int, values: NDArray[Any]) -> None:
        first = values[0]
        is_nan = bool(first != first)
        if bool(np.isnan(values).all()) if is_nan else bool((values == first).all()):
            self._constants[row] = first
            self._is_written[row] = False
        else:
            self._write(row, values)

    def read(self) -> NDArray[Any]:
        if self._place is None:
            return np.broadcast_to(self._constants[:, None], self._shape)
        for row in np.flatnonzero(~self._is_written).tolist():
            self._write(row, np.full(self._shape[1], self._constants[row]))
        return self._file.read(self._place, self._shape, self._constants.dtype)

    def _write(self, row: int, values: NDArray[Any]) -> None:
        dtype = self._constants.dtype
        if self._place is None:
            self._place = self._file.allocate(dtype.itemsize * self._shape[0] * self._shape[1])
        place = self._place + dtype.itemsize * row * self._shape[1]
        self._file.write(place, values.astype(dtype, copy=False))
        self._is_written[row] = True
