"""rank_<n>_columns.arrow: the numbers of a rank's lines as an Arrow stream, beside the lines.

The process that writes the lines makes them, from the lines themselves: they hold what a reader of the lines
reads. A column per field of aorta.records.table.FIELDS, a list of structs per list of LISTS. Each batch says
in its metadata how far the file before it goes and which lines that stands for, both with a checksum, so that
a batch counts once another one follows. Columns that do not fit their lines are not used.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np

from aorta.errors import NOT_JSON, AortaError
from aorta.files import open_regular, regular_descriptor
from aorta.records.files import files_beside
from aorta.records.lines import LIMIT, LineReader, are_possible, opened_lines, whole_lines_of
from aorta.records.table import (
    FIELDS,
    LISTS,
    NULL,
    Column,
    Items,
    LineTable,
    ListName,
    StepTable,
    Texts,
    do_integers_fit,
)
from aorta.timeline.arrays import Flags
from aorta.timeline.types import Source

try:  # ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

MOST_LINES = 1024
MOST_BYTES = 4 << 20
"""Of lines that wait for their batch."""
MOST_MISSING_BYTES = 64 << 20
"""Lines of earlier attempts without columns: with more of them there are none."""
KEY = b"aorta"
TAIL_BYTES = 32
"""End of the last line, which tells lines of another run apart."""


class Seal(msgspec.Struct, array_like=True, frozen=True):
    """What the batches before one are, and of which lines."""

    file_bytes: int
    file_crc: int
    num_lines: int
    lines_bytes: int
    lines_crc: int
    tail: str
    """The last TAIL_BYTES of those lines."""
    rank: int
    run_id: str | None
    attempts: tuple[int, int]
    """Of the first line and of the last."""


# -- writing -------------------------------------------------------------------------------------------


class ColumnsWriter:
    """Writes the columns of a file of lines, while that grows. Never raises: lines are read without, too.

    Columns are of all lines from the first on. Where a line was lost, dropped or is none that a run writes,
    and where the disk is full, the file of columns goes.
    """

    def __init__(self, lines: Path) -> None:
        beside = files_beside(lines)
        self._lines = lines
        self._path = None if beside is None else beside.columns
        self._stream: Stream | None = None
        self._reader = LineReader(lines, [])
        self._num_waiting = self._bytes_waiting = 0
        self._lines_bytes = self._lines_crc = 0
        self._first_attempt = 0
        self._tail = ""

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return 0 if self._stream is None else self._stream.num_bytes

    def add(self, num_bytes: int) -> None:
        """Say that a line of as many bytes was appended."""
        self._num_waiting += 1
        self._bytes_waiting += num_bytes
        if self._num_waiting >= MOST_LINES or self._bytes_waiting >= MOST_BYTES:
            self._extend()

    def give_up(self) -> None:
        """Remove the file: it is not of these lines any more."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        self._path = None
        self._close()

    def close(self) -> None:
        """Write what waits, where there are columns already: a short run is read as fast without."""
        if self._stream is not None:
            self._extend()
        if self._stream is not None and self._path is not None:
            try:
                self._stream.write(LineTable([]), self._seal())  # vouches for the batch before it
                self._stream.sync()
            except Exception:
                self.give_up()
        self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _extend(self) -> None:
        """Write batches of all lines that have none yet."""
        self._num_waiting = self._bytes_waiting = 0
        if self._path is None:
            return
        try:
            if self._stream is None:
                self._open(self._path)
            with opened_lines(self._lines) as file:
                file.seek(self._lines_bytes)
                for piece in whole_lines_of(file, self._lines):
                    self._put(piece)
        except Exception:  # a full disk, no pyarrow, lines that no run writes: the lines are there
            self.give_up()

    def _open(self, path: Path) -> None:
        """Begin the file, or go on with one that is of the first lines."""
        earlier = _opened(path)
        seal = None if earlier is None else earlier.seal
        size = self._lines.stat().st_size
        if seal is None or not _is_of(self._lines, seal, always=True):
            seal = None
        if size - (0 if seal is None else seal.lines_bytes) > MOST_MISSING_BYTES:
            raise ValueError("too many lines without columns")
        if seal is None:
            self._stream = Stream(path, 0, 0)
            return
        self._stream = Stream(path, seal.file_bytes, seal.file_crc)
        self._lines_bytes, self._lines_crc, self._tail = seal.lines_bytes, seal.lines_crc, seal.tail
        self._first_attempt = seal.attempts[0]
        self._reader.order.follows(0, seal.num_lines, seal.rank, seal.run_id, seal.attempts)
        self._reader.num_lines = seal.num_lines

    def _put(self, piece: bytes) -> None:
        assert self._stream is not None
        seal = self._seal()
        records = self._reader.records(piece)
        order = self._reader.order
        if self._reader.is_cut_off or not order.is_plain or order.num_lines != seal.num_lines + len(records):
            raise ValueError("lines are missing")
        table = LineTable(records)
        _check(table)
        self._stream.write(table, seal)
        if not self._lines_bytes:
            self._first_attempt = records[0].attempt
        self._lines_bytes += len(piece)
        self._lines_crc = crc32(piece, self._lines_crc)
        self._tail = _tail_text(piece)

    def _seal(self) -> Seal:
        assert self._stream is not None
        order = self._reader.order
        return Seal(
            self._stream.num_bytes,
            self._stream.checksum,
            order.num_lines,
            self._lines_bytes,
            self._lines_crc,
            self._tail,
            order.rank or 0,
            order.run_id,
            (self._first_attempt, order.attempt),
        )


class Stream:
    """Arrow's stream, appended to a file batch by batch."""

    closed = False
    """Asked for by pyarrow."""

    def __init__(self, path: Path, num_bytes: int, checksum: int) -> None:
        """num_bytes: those of the file that stay, with their checksum."""
        import pyarrow as pa

        self.num_bytes, self.checksum = num_bytes, checksum
        self._written = bytearray()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._writer = pa.ipc.new_stream(pa.PythonFile(self, "w"), arrow_schema(), options=options)
        if num_bytes:  # which has the schema already
            self._writer.write_batch(arrow_batch(LineTable([])))
            self._written.clear()
        self._descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        os.ftruncate(self._descriptor, num_bytes)

    def write(self, table: "StepTable | bytes", seal: Seal | None = None) -> int:
        """Append a batch. pyarrow calls it with bytes, which wait here until the batch is whole."""
        if not isinstance(table, StepTable):
            self._written += table
            return len(table)
        self._writer.write_batch(arrow_batch(table), custom_metadata={KEY: msgspec.json.encode(seal)})
        unwritten = memoryview(bytes(self._written))
        self._written.clear()
        self.checksum = crc32(unwritten, self.checksum)
        while unwritten:
            num = os.pwrite(self._descriptor, unwritten, self.num_bytes)
            unwritten, self.num_bytes = unwritten[num:], self.num_bytes + num
        return self.num_bytes

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        os.utime(self._descriptor)  # newer than the lines, which were synchronised before

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def _check(table: LineTable) -> None:
    """Raise ValueError where a number is none that a run writes."""
    clock_error_us = table.numbers("clock_error_us")
    is_off = clock_error_us is not None and ((clock_error_us < 0) | (clock_error_us >= LIMIT)).any()
    if is_off or not do_integers_fit(table) or not are_possible(table):
        raise ValueError("impossible numbers")


@cache
def arrow_schema() -> Any:
    import pyarrow as pa

    kinds = {float: pa.float64(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    columns = {name: kinds[kind] for name, kind in FIELDS.items()}
    for name, fields in LISTS.items():
        columns[name] = pa.list_(pa.struct([(field, kinds[kind]) for field, kind in fields.items()]))
    return pa.schema(list(columns.items()))


def arrow_batch(table: StepTable) -> Any:
    """All columns of a table."""
    import pyarrow as pa

    schema = arrow_schema()
    columns = []
    for field in schema:
        if field.name in LISTS:
            columns.append(_arrow_list(table.items(field.name) if len(table) else None, field.type))
        else:
            column = table.column(field.name) if len(table) else None
            columns.append(
                pa.nulls(len(table), field.type) if column is None else arrow_column(column, field.type)
            )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def arrow_column(column: Column, kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, Texts):
        places = pa.array(column.places, mask=column.places < 0)
        return pa.DictionaryArray.from_arrays(places, pa.array(column.table, pa.string())).dictionary_decode()
    if column.dtype.kind == "f":
        return pa.array(column, kind, from_pandas=True)  # null in place of NaN
    if column.dtype.itemsize == 1:
        return pa.array(column == 1, kind, mask=column < 0)
    return pa.array(column, kind, mask=column == NULL)


def _arrow_list(items: Items | None, kind: Any) -> Any:
    import pyarrow as pa

    if items is None:
        return pa.array([], kind)
    struct = kind.value_type
    children = [
        arrow_column(items.columns[struct.field(i).name], struct.field(i).type)
        for i in range(struct.num_fields)
    ]
    values = pa.StructArray.from_arrays(children, fields=[struct.field(i) for i in range(struct.num_fields)])
    ends = np.concatenate(([0], np.cumsum(np.maximum(items.num, 0)))).astype(np.int32)
    is_null = np.append(items.num < 0, False)
    return pa.ListArray.from_arrays(pa.array(ends, mask=is_null), values, type=kind)


# -- reading -------------------------------------------------------------------------------------------


class ArrowTable(StepTable):
    """A table of Arrow's columns."""

    def __init__(self, table: Any) -> None:
        super().__init__(len(table))
        self._table = table
        self._names = frozenset(table.schema.names)

    def chosen(self, rows: Flags) -> "ArrowTable":
        import pyarrow as pa

        return ArrowTable(self._table.filter(pa.array(rows)))

    def _column(self, name: str) -> Column | None:
        if name not in self._names:
            return None
        column = self._table.column(name)
        return None if column.null_count == len(column) else _values(column, FIELDS[name])

    def _items(self, name: ListName) -> Items:
        import pyarrow as pa

        if name not in self._names:
            return LineTable([None] * len(self)).items(name)
        lists = self._table.column(name)
        lists = pa.concat_arrays(lists.chunks) if lists.num_chunks != 1 else lists.chunk(0)
        num = np.diff(lists.offsets.to_numpy()).astype(np.int64)
        if lists.null_count:
            num[lists.is_null().to_numpy(zero_copy_only=False)] = -1
        structs = lists.flatten()
        children = structs.flatten()
        fields = LISTS[name]
        columns = {structs.type.field(i).name: child for i, child in enumerate(children)}
        return Items(num, {field: _values(columns[field], kind) for field, kind in fields.items()})


def _values(column: Any, kind: type) -> Any:
    """Arrow's values as numpy's."""
    if kind is str:
        column = column.dictionary_encode()
        column = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        places = column.indices
        places = places.fill_null(-1) if places.null_count else places
        return Texts(
            places.to_numpy(zero_copy_only=False).astype(np.int32, copy=False), column.dictionary.to_pylist()
        )
    if kind is bool:
        column = column.cast("int8")
    if kind is not float and column.null_count:
        column = column.fill_null(-1 if kind is bool else NULL)
    return column.to_numpy(zero_copy_only=False) if hasattr(column, "type") else column.to_numpy()


class Columns(NamedTuple):
    """Columns of the first lines of a file."""

    seal: Seal
    batches: list[Any]

    @property
    def table(self) -> ArrowTable:
        import pyarrow as pa

        return ArrowTable(pa.Table.from_batches(self.batches))


def columns_of(lines: Path, names: Sequence[str] | None = None) -> Columns | None:
    """The columns beside a file of lines; None where there are none, and where they are of other lines.

    names: those that are wanted, all by default.
    """
    beside = files_beside(lines)
    if beside is None or not beside.columns.exists():
        return None
    columns = _opened(beside.columns, names)
    if columns is None or not columns.seal.num_lines or not _is_of(lines, columns.seal):
        return None
    return columns if _is_plain(columns.table, columns.seal) else None


def _is_plain(table: ArrowTable, seal: Seal) -> bool:
    """Return True where a run may have written such columns: a checksum is no proof that a run did."""
    attempts = table.integers("attempt")
    try:
        texts = (table.reasons, table.throttling(), table.segments(), table.host_spans())
        groups = [
            msgspec.json.decode(text, type=list[int])
            for text in table.items("collectives").columns["ranks"].table
        ]
    except (ValueError, *NOT_JSON):
        return False
    del texts, groups
    return (
        are_possible(table)
        and do_integers_fit(table)
        and set(table.sources()) <= set(get_args(Source))
        and table.distinct("rank", "world_size")[1:] == []
        and table.first.rank == seal.rank
        and {table.first.run_id, table.last.run_id} == {seal.run_id}
        and bool((attempts >= 0).all() and (table.integers("rollbacks") >= 0).all())
        and bool((np.diff(attempts) >= 0).all())
    )


def _opened(path: Path, names: Sequence[str] | None = None) -> Columns | None:
    """Whole batches of a file that another one vouches for."""
    import pyarrow as pa

    try:
        with open_regular(path) as file:
            data = pa.py_buffer(mmap(file.fileno(), 0, access=ACCESS_READ))
        batches = list(_batches(pa, data, names))
        if len(batches) < 2:
            return None
        seal = msgspec.json.decode(batches[-1].custom_metadata[KEY], type=Seal)
        before = memoryview(data)[: seal.file_bytes]
        columns = Columns(seal, [batch.batch for batch in batches[:-1]])
        for batch in columns.batches:
            batch.validate(full=True)  # offsets that lead elsewhere would end the process
        kinds = {field.name: field.type for field in arrow_schema()}
        if any(field.type != kinds.get(field.name, field.type) for field in columns.batches[0].schema):
            return None
        is_whole = len(before) == seal.file_bytes and crc32(before) == seal.file_crc
        return columns if is_whole and sum(map(len, columns.batches)) == seal.num_lines else None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, *NOT_JSON):
        return None


def _batches(pa: Any, data: Any, names: Sequence[str] | None) -> Iterator[Any]:
    included = None
    if names is not None:
        schema = pa.ipc.read_schema(data)
        included = [place for name in names if (place := schema.get_field_index(name)) >= 0]
    # Batches are small: handing their columns to threads takes more than reading them.
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=included)
    stream = pa.ipc.open_stream(data, options=options)
    with suppress(StopIteration, OSError, pa.ArrowException):  # the last one may have been cut off
        while True:
            yield stream.read_next_batch_with_custom_metadata()


def _is_of(lines: Path, seal: Seal, always: bool = False) -> bool:
    """Return True where columns are of these lines, by the end of those; where the lines are newer, as after
    a copy, by all of them. always: by all of them."""
    beside = files_beside(lines)
    assert beside is not None
    try:
        with opened_lines(lines) as file:
            state = os.fstat(file.fileno())
            if state.st_size < seal.lines_bytes:
                return False
            file.seek(max(0, seal.lines_bytes - TAIL_BYTES))
            if _tail_text(file.read(min(TAIL_BYTES, seal.lines_bytes))) != seal.tail:
                return False
            if not always and state.st_mtime_ns <= beside.columns.stat().st_mtime_ns:
                return True
            file.seek(0)
            checksum, left = 0, seal.lines_bytes
            while left and (piece := file.read(min(1 << 20, left))):
                checksum, left = crc32(piece, checksum), left - len(piece)
            return checksum == seal.lines_crc
    except (OSError, AortaError):
        return False


def _tail_text(piece: bytes) -> str:
    return piece[-TAIL_BYTES:].decode("latin-1")
