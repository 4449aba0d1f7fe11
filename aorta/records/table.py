"""Neighbouring lines of one rank as columns, which statistics, Parquet and the file of columns are made of.

A StepTable gives columns by name: a field of StepRecord or of its overlap (step_ms, comm_ms), or a part's and
a field's name (memory.reserved_bytes, streams.allreduce.busy_ms). Lists have a length per line, and columns
of their items, of all lines together. LineTable makes them of decoded lines; aorta.records.columns reads
them from a file.
"""

import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, compress
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from aorta.records.schema import HOST_KINDS, DeviceRecord, HostUse, KernelSums, MemoryRecord, StepRecord
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.timeline.types import STREAM_NAMES, OverlapRecord, Source, StreamUse

NULL = -(2**63)
"""An integer that was not measured. Such a number is NaN, a flag and a place in a table of texts -1."""

PARTS: tuple[tuple[str, type], ...] = (
    *((f"streams.{name}", StreamUse) for name in STREAM_NAMES),
    ("memory", MemoryRecord),
    ("device", DeviceRecord),
    ("host_use", HostUse),
    ("kernels", KernelSums),
)
"""Parts of a record whose fields have the part's name before their own."""
NOT_MEASURED, THROTTLING = "not_measured", "device.throttling"
"""Columns of JSON texts."""

ListName = Literal[
    "collectives", "active_segments", "exposed_run_lengths_ns", "host_spans", "kernels.top",
    "kernels.classes", "kernels.copies", "hidden_by_op", "exposed_by_op", "scalars",
]  # fmt: skip

LISTS: dict[ListName, dict[str, type]] = {
    "collectives": {
        "op": str, "stream": str, "group": str, "num_ranks": int, "ranks": str, "bytes": int, "dtype": str,
        "seq": int, "launch_ms": float, "start_ms": float, "end_ms": float,
    },
    "active_segments": {"start_ms": float, "end_ms": float, "active_streams": str},
    "exposed_run_lengths_ns": {"ns": int},
    "host_spans": {"kind": str, "start_ms": float, "end_ms": float, "bytes": int},
    "kernels.top": {"name": int, "ms": float, "count": int},
    "kernels.classes": {"key": str, "ms": float, "count": int},
    **{
        name: {"key": str, "value": float}
        for name in ("kernels.copies", "hidden_by_op", "exposed_by_op", "scalars")
    },
}  # fmt: skip
"""Fields of the items by list. ranks: JSON, of the first call of a group among the lines alone.
active_streams: JSON."""


LONG: tuple[ListName, ...] = ("collectives", "active_segments", "host_spans")
"""Lists that are most of a line."""
LARGEST = 2**62
"""Above every integer of a column: times in ns, sizes in bytes, counts."""


class LineKey(NamedTuple):
    """What a line is of."""

    rank: int
    run_id: str | None
    attempt: int
    rollbacks: int
    global_step: int


class Texts(NamedTuple):
    """A column of texts: places in a table, -1 where there is none."""

    places: NDArray[np.int32]
    table: list[str]


Column = Floats | Ints | NDArray[np.int8] | Texts


@dataclass(frozen=True)
class Items:
    """A list of every line."""

    num: Ints
    """Length by line, -1 where it has no list."""
    columns: dict[str, Any]
    """Of the items of all lines, in their order."""

    @cached_property
    def row(self) -> Ints:
        """The line of each item."""
        return np.repeat(np.arange(len(self.num)), np.maximum(self.num, 0))


class HostSpans(NamedTuple):
    """Host spans of all lines, those of each in order of their starts."""

    row: Ints
    kind: Ints
    """Place in HOST_KINDS."""
    start_ms: Floats
    end_ms: Floats
    optimizer_bytes: Floats
    """[row]: of what optimizers update; NaN where none says."""
    meets: Flags
    """[span]: it starts before the span before it, of the same row, has ended, or just then."""
    window_ms: tuple[Floats, Floats]
    """[row], [row]: from where to where the host went through the step; NaN where the line does not tell."""


class Segments(NamedTuple):
    """Segments of all lines, in their order."""

    row: Ints
    start_ms: Floats
    end_ms: Floats
    active: Ints
    """Places in `sets`."""
    sets: list[tuple[str, ...]]
    """The different sets of active streams."""


class TopKernels(NamedTuple):
    """Kernels by name, of all lines, in their order."""

    row: Ints
    """Of each kernel."""
    name: Ints
    ms: Floats
    num: Ints
    is_complete: Flags
    """By line that has kernels: no kernel is missing in its list."""


@cache
def scalar_fields(struct: type) -> dict[str, type]:
    """The fields of a struct that are one number, flag or text, with their type."""
    fields = {}
    for name, hint in typing.get_type_hints(struct).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)  # of a Literal: the former
        kinds = typing.get_args(hint) if is_union else (hint,)
        plain = [kind for kind in kinds if kind is not type(None)]
        kind = str if typing.get_origin(plain[0]) is typing.Literal else plain[0]
        if len(plain) == 1 and kind in (float, int, bool, str):
            fields[name] = kind
    return fields


def _fields() -> dict[str, type]:
    fields = scalar_fields(StepRecord) | scalar_fields(OverlapRecord)
    for prefix, struct in PARTS:
        fields |= {f"{prefix}.{name}": kind for name, kind in scalar_fields(struct).items()}
    return fields | {NOT_MEASURED: str, THROTTLING: str}


FIELDS: dict[str, type] = _fields()
"""Columns of one value per line, with their type."""
SHARES = {"overlap_ratio": "comm_ms", "hidden_per_compute": "compute_ms"}
"""Columns that are hidden_ms over another one, which lines without details leave out."""
_OF_OVERLAP = frozenset((*OverlapRecord.__struct_fields__,))
_decode_reasons = msgspec.json.Decoder(dict[str, str]).decode
_decode_list = msgspec.json.Decoder(list[str]).decode


class StepTable(ABC):
    """Neighbouring lines of one file, at least one."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._columns: dict[str, Column | None] = {}
        self._lists: dict[str, Items] = {}
        self._host_spans: HostSpans | None = None
        self._segments: Segments | None = None

    def __len__(self) -> int:
        return self._num_rows

    # -- what a table is made of ------------------------------------------------------------------------

    @abstractmethod
    def _column(self, name: str) -> Column | None:
        """A column of FIELDS; None where no line has a value. OverflowError where 64 bits do not hold one."""

    @abstractmethod
    def _items(self, name: ListName) -> Items: ...

    @abstractmethod
    def chosen(self, rows: Flags) -> "StepTable":
        """Those lines alone, at least one."""

    # -- columns ----------------------------------------------------------------------------------------

    def column(self, name: str) -> Column | None:
        if name not in self._columns:
            self._columns[name] = self._share(name) if name in SHARES else self._column(name)
        return self._columns[name]

    def _share(self, name: str) -> Column | None:
        """A column of SHARES, with what its lines leave out."""
        share, hidden_ms, whole_ms = self._column(name), self.numbers("hidden_ms"), self.numbers(SHARES[name])
        if hidden_ms is None or whole_ms is None:
            return share
        known = np.full(len(self), np.nan) if share is None else np.asarray(share)
        lacks = np.isnan(known) & (whole_ms > 0)
        return np.where(lacks, hidden_ms / np.where(lacks, whole_ms, 1.0), known) if lacks.any() else share

    def items(self, name: ListName) -> Items:
        if name not in self._lists:
            self._lists[name] = self._items(name)
        return self._lists[name]

    def __contains__(self, name: str) -> bool:
        return self.column(name) is not None

    def numbers(self, name: str) -> Floats | None:
        """A value per line, NaN where it has none; None where no line has one."""
        if name not in FIELDS:
            head, _, key = name.partition(".")
            return self._keyed(typing.cast(ListName, head), key)
        column = self.column(name)
        if column is None or isinstance(column, Texts):
            return None
        if column.dtype.kind == "f":
            return typing.cast(Floats, column)
        null = NULL if column.dtype.itemsize == 8 else -1
        return np.where(column == null, np.nan, column)

    def _keyed(self, name: ListName, key: str, field: str = "value") -> Floats | None:
        """By line the value of one key of a list of keys and values."""
        items = self.items(name)
        keys: Texts = items.columns["key"]
        if key not in keys.table:
            return None
        chosen = keys.places == keys.table.index(key)
        values = np.full(len(self), np.nan)
        values[items.row[chosen]] = items.columns[field][chosen]
        return values

    def keys(self, name: ListName) -> list[str]:
        return list(self.items(name).columns["key"].table)

    def integers(self, name: str) -> Ints:
        """NULL where a line has no value."""
        column = self.column(name)
        return (
            np.full(len(self), NULL, dtype=np.int64) if column is None else np.asarray(column, dtype=np.int64)
        )

    def flags(self, name: str) -> NDArray[np.int8]:
        """1, 0, or -1 of a line that does not say."""
        column = self.column(name)
        return np.full(len(self), -1, dtype=np.int8) if column is None else np.asarray(column, dtype=np.int8)

    def places(self, name: str) -> Texts:
        column = self.column(name)
        if column is None:
            return Texts(np.full(len(self), -1, dtype=np.int32), [])
        assert isinstance(column, Texts)
        return column

    def texts(self, name: str) -> list[str | None]:
        places, table = self.places(name)
        values = [*table, None]
        return [values[place] for place in places.tolist()]

    def has(self, name: ListName | Literal["kernels"]) -> Flags:
        """Which lines have this list, be it empty, or kernels."""
        if name == "kernels":
            return np.not_equal(self.integers("kernels.num_kernels"), NULL)
        return self.items(name).num >= 0

    # -- what lines are of ------------------------------------------------------------------------------

    @cached_property
    def first(self) -> LineKey:
        return self._key(0)

    @cached_property
    def last(self) -> LineKey:
        return self._key(len(self) - 1)

    def _key(self, row: int) -> LineKey:
        places, table = self.places("run_id")
        run_id = table[places[row]] if places[row] >= 0 else None
        names = ("rank", "attempt", "rollbacks", "global_step")
        rank, attempt, rollbacks, step = (int(self.integers(name)[row]) for name in names)
        return LineKey(rank, run_id, attempt, rollbacks, step)

    @property
    def source(self) -> Source:
        """Of the first line."""
        places, table = self.places("source")
        return typing.cast(Source, table[places[0]])

    def sources(self) -> list[Source]:
        """Those that occur, in order."""
        places, table = self.places("source")
        return typing.cast(list[Source], [table[place] for place in dict.fromkeys(places.tolist())])

    def of_source(self, source: Source) -> "StepTable":
        """The lines of a source that some line has."""
        places, table = self.places("source")
        is_chosen = places == table.index(source)
        return self if is_chosen.all() else self.chosen(is_chosen)

    def distinct(self, *names: str) -> list[tuple[int, ...]]:
        """The different values of these integers together, as they come."""
        columns = np.stack([self.integers(name) for name in names])
        if (columns == columns[:, :1]).all():
            return [tuple(columns[:, 0].tolist())]
        return list(dict.fromkeys(map(tuple, columns.T.tolist())))

    def gaps(self) -> Iterator[tuple[int, str]]:
        """Global step and gap of the lines that have one."""
        if "gap" in self:
            for step, gap in zip(self.integers("global_step").tolist(), self.texts("gap"), strict=True):
                if gap is not None:
                    yield step, gap

    @property
    def reasons(self) -> Sequence[dict[str, str]]:
        """Values of not_measured in the order in which lines have them first: what repeats is left out."""
        places, table = self.places(NOT_MEASURED)
        return [_decode_reasons(table[place]) for place in dict.fromkeys(places.tolist()) if place >= 0]

    def throttling(self) -> tuple[NDArray[np.int32], list[list[str]]]:
        """Reasons for which the device was throttled: of each line its place in a list of them, -1 where it
        does not say."""
        places, table = self.places(THROTTLING)
        return places, [*map(_decode_list, table)]

    # -- lists ------------------------------------------------------------------------------------------

    def operations(self) -> list[str]:
        """Those that exposed_by_op names: columns exposed_by_op.<op>, hidden_by_op.<op>."""
        return self.keys("exposed_by_op")

    def kernel_class(self, name: str) -> tuple[Floats, Floats]:
        """ms and number, of the lines that have kernels."""
        rows = self.has("kernels")
        columns = (self._keyed("kernels.classes", name, field) for field in ("ms", "count"))
        times_ms, counts = (
            np.zeros(int(rows.sum())) if column is None else np.nan_to_num(column[rows], nan=0.0)
            for column in columns
        )
        return times_ms, counts

    def top_kernels(self) -> TopKernels:
        items = self.items("kernels.top")
        row, count = items.row, items.columns["count"]
        num_kernels = self.integers("kernels.num_kernels")
        listed = np.zeros(len(self), dtype=np.int64)
        np.add.at(listed, row, count)
        is_complete = (listed == num_kernels)[num_kernels != NULL]
        return TopKernels(row, items.columns["name"], items.columns["ms"], count, is_complete)

    def copies(self) -> dict[str, Floats]:
        """ms by what they are from and to; NaN in lines that list no kernels."""
        is_listed = self.items("kernels.top").num > 0
        columns = {kind: self._keyed("kernels.copies", kind) for kind in self.keys("kernels.copies")}
        return {
            kind: np.where(is_listed, np.nan_to_num(ms), np.nan)
            for kind, ms in columns.items()
            if ms is not None
        }

    def host_spans(self) -> HostSpans:
        if self._host_spans is None:
            self._host_spans = self._made_host_spans()
        return self._host_spans

    def _made_host_spans(self) -> HostSpans:
        items = self.items("host_spans")
        row, num_bytes = items.row, items.columns["bytes"]
        start_ms, end_ms = items.columns["start_ms"], items.columns["end_ms"]
        places, table = items.columns["kind"]
        kind = np.array([*map(HOST_KINDS.index, table), -1], dtype=np.int64)[places]
        is_window = kind == HOST_KINDS.index("step")
        window_ms = np.full(len(self), np.nan), np.full(len(self), np.nan)
        for bound, values in zip(window_ms, (start_ms, end_ms), strict=True):
            bound[row[is_window]] = values[is_window]
        row, kind, num_bytes = row[~is_window], kind[~is_window], num_bytes[~is_window]
        start_ms, end_ms = start_ms[~is_window], end_ms[~is_window]
        chosen = (kind == HOST_KINDS.index("optimizer")) & (num_bytes != NULL)
        sums = np.where(
            np.bincount(row[chosen], minlength=len(self)) > 0,
            np.bincount(row[chosen], num_bytes[chosen], len(self)),
            np.nan,
        )
        if ((row[1:] == row[:-1]) & (start_ms[1:] < start_ms[:-1])).any():
            order = np.lexsort((start_ms, row))
            kind, start_ms, end_ms = kind[order], start_ms[order], end_ms[order]
        meets = np.append(False, (row[1:] == row[:-1]) & (start_ms[1:] <= end_ms[:-1]))[: len(row)]
        return HostSpans(row, kind, start_ms, end_ms, sums, meets, window_ms)

    def segments(self) -> Segments:
        if self._segments is None:
            self._segments = self._made_segments()
        return self._segments

    def _made_segments(self) -> Segments:
        items = self.items("active_segments")
        places, table = items.columns["active_streams"]
        sets = [tuple(_decode_list(text)) for text in table]
        columns = items.columns
        return Segments(items.row, columns["start_ms"], columns["end_ms"], places.astype(np.int64), sets)


# -- tables of decoded lines ---------------------------------------------------------------------------


class LineTable(StepTable):
    """A table of records, or of structs that have the fields that are asked for."""

    def __init__(self, records: Sequence[Any]) -> None:
        super().__init__(len(records))
        self._rows: dict[str, dict[str, Sequence[Any]]] = {"": _fields_of(records)}
        """Fields of the lines, their overlap and their parts, each as a value per line."""

    @classmethod
    def of_pieces(cls, pieces: Iterable[Sequence[Any]]) -> "LineTable":
        """Of lines that come piece by piece, each small enough for a core's own cache: the lists that are
        most of a line become columns while they are there, which takes half of the time."""
        tables, lists = [], []
        for piece in pieces:
            tables.append(table := cls(piece))
            lists.append([table.items(name) for name in LONG])
            for name in LONG:
                del table._rows[""][name]
        whole = cls([])
        whole._num_rows = sum(map(len, tables))
        fields = tables[0]._rows[""]
        whole._rows[""] = {name: [*chain(*(table._rows[""][name] for table in tables))] for name in fields}
        whole._lists = {name: _joined(parts) for name, *parts in zip(LONG, *lists, strict=True)}
        return whole

    def chosen(self, rows: Flags) -> "LineTable":
        table = LineTable([])
        table._num_rows = int(rows.sum())
        table._rows[""] = {name: [*compress(values, rows)] for name, values in self._rows[""].items()}
        table._lists = {name: _chosen(items, rows) for name, items in self._lists.items()}
        return table

    def values(self, name: str) -> Sequence[Any]:
        """A field of every line, its overlap or a part, as decoded; None where a line lacks the part."""
        head, _, field = name.rpartition(".")
        if not head and name in _OF_OVERLAP:
            head, field = "overlap", name
        fields = self._rows.get(head)
        if fields is None:
            part, _, stream = head.partition(".")
            parts = self.values(part)
            fields = _fields_of([of_line.get(stream) for of_line in parts] if stream else parts)
            self._rows[head] = fields
        return fields.get(field, (None,) * len(self))

    def _column(self, name: str) -> Column | None:
        values = self.values(name)
        if not values or values[0] is None and values.count(None) == len(values):
            return None
        kind = FIELDS[name]
        if kind is float:
            return np.array(values, dtype=np.float64)  # NaN in place of None
        if kind is str:
            if name in (NOT_MEASURED, THROTTLING):
                return _json_texts(values)
            return texts_of(values)
        null = NULL if kind is int else -1
        if None in values:
            values = [null if value is None else value for value in values]
        return np.array(values, dtype=np.int64) if kind is int else np.array(values, dtype=np.int8)

    def _items(self, name: ListName) -> Items:
        lists: Sequence[Any] = self.values(name)
        fields = LISTS[name]
        if lists.count(None) == len(lists):
            num = np.full(len(lists), -1, dtype=np.int64)
        else:
            num = np.array([-1 if of_line is None else len(of_line) for of_line in lists], dtype=np.int64)
        present = [of_line for of_line in lists if of_line]
        if not present:
            return Items(num, {field: _item_column((), kind) for field, kind in fields.items()})
        if name not in LONG:
            columns = zip(fields.items(), _FLATTEN.get(name, _keyed)(present), strict=True)
            return Items(num, {field: _item_column(values, kind) for (field, kind), values in columns})
        values = _fields_of(list(chain.from_iterable(present)))
        found = {
            field: _item_column(values[field], kind)
            for field, kind in fields.items()
            if field not in ("ranks", "num_ranks")
        }
        return Items(num, found | self._members(found, values["ranks"], num) if "ranks" in fields else found)

    def _members(self, columns: dict[str, Any], ranks: Sequence[Any], num: Ints) -> dict[str, Any]:
        """num_ranks and ranks of collectives, these once for each group of an attempt and source, since of
        large groups they are most of a line."""
        num_ranks = np.fromiter(map(len, ranks), dtype=np.int64, count=len(ranks))
        row = np.repeat(np.arange(len(num)), np.maximum(num, 0))
        keys = [columns["group"].places, num_ranks, self.integers("attempt")[row]]
        keys.append(self.places("source").places[row])
        code = np.zeros(len(ranks), dtype=np.int64)
        for key in keys:
            code = code * (int(key.max()) + 2) + key
        firsts = np.sort(np.unique(code, return_index=True)[1])
        places = np.full(len(ranks), -1, dtype=np.int32)
        places[firsts] = np.arange(len(firsts))
        texts = Texts(places, [_json(ranks[first]) for first in firsts.tolist()])
        return {"num_ranks": num_ranks, "ranks": texts}


def _fields_of(parts: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """Every field of structs of one type, by name; None of those that are None."""
    present = next((part for part in parts if part is not None), None)
    if present is None:
        return {}
    names = type(present).__struct_fields__
    none = (None,) * len(names)
    rows = [none if part is None else astuple(part) for part in parts]
    return dict(zip(names, zip(*rows, strict=True), strict=True))


class _Places(dict[Any, int]):
    """Places of values in a table, in order of their first use; -1 of None."""

    def __init__(self) -> None:
        super().__init__({None: -1})

    def __missing__(self, value: Any) -> int:
        self[value] = place = len(self) - 1
        return place

    def of(self, values: Sequence[Any]) -> NDArray[np.int32]:
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=len(values))

    @property
    def table(self) -> list[Any]:
        return list(self)[1:]


def texts_of(values: Sequence[Any]) -> Texts:
    """Texts as places in a table, in order of their first use; lists of texts as JSON."""
    places = _Places()
    found = places.of(list(map(tuple, values)) if values and isinstance(values[0], list) else values)
    return Texts(found, [value if isinstance(value, str) else _json(value) for value in places.table])


def _json_texts(values: Sequence[Any]) -> Texts:
    """Values as JSON; as a rule line after line has the same."""
    texts: list[str | None] = []
    last, text = None, None
    for value in values:
        if value is not None and (text is None or (value is not last and value != last)):
            last = value
            text = bytes(value).decode() if isinstance(value, msgspec.Raw) else _json(value)
        texts.append(None if value is None else text)
    return texts_of(texts)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _item_column(values: Sequence[Any], kind: type) -> Any:
    if kind is str:
        return texts_of(values)
    if (
        values and values[0] is None and values.count(None) == len(values)
    ):  # which a column of floats takes long for
        return np.full(len(values), NULL if kind is int else np.nan)
    if kind is int:
        if None in values:
            values = [NULL if value is None else value for value in values]
        return np.array(values, dtype=np.int64)
    return np.array(values, dtype=np.float64)


def _joined(pieces: Sequence[Items]) -> Items:
    """The items of neighbouring pieces of lines."""
    if len(pieces) == 1:
        return pieces[0]
    columns: dict[str, Any] = {}
    for name in pieces[0].columns:
        parts = [piece.columns[name] for piece in pieces]
        if not isinstance(parts[0], Texts):
            columns[name] = np.concatenate(parts)
        elif all(part.table == parts[0].table for part in parts):
            columns[name] = Texts(np.concatenate([part.places for part in parts]), parts[0].table)
        else:
            table = _Places()
            places = [np.append(table.of(part.table), np.int32(-1))[part.places] for part in parts]
            columns[name] = Texts(np.concatenate(places), table.table)
    return Items(np.concatenate([piece.num for piece in pieces]), columns)


def _chosen(items: Items, rows: Flags) -> Items:
    """The items of some lines."""
    chosen = rows[items.row]
    return Items(
        items.num[rows],
        {
            name: Texts(column.places[chosen], column.table) if isinstance(column, Texts) else column[chosen]
            for name, column in items.columns.items()
        },
    )


def _keyed(lists: Sequence[Any]) -> list[Sequence[Any]]:
    return [[*chain.from_iterable(lists)], [*chain.from_iterable(map(dict.values, lists))]]


_FLATTEN: dict[str, Callable[[Sequence[Any]], Iterable[Sequence[Any]]]] = {
    "exposed_run_lengths_ns": lambda lists: [list(chain.from_iterable(lists))],
    "kernels.top": lambda lists: zip(*chain.from_iterable(lists), strict=True),
    "kernels.classes": lambda lists: zip(
        *((key, *pair) for of_line in lists for key, pair in of_line.items()), strict=True
    ),
}


def do_integers_fit(table: StepTable) -> bool:
    """Return True where every integer is below LARGEST."""
    try:
        columns = [table.column(name) for name, kind in FIELDS.items() if kind is int]
        for name, fields in LISTS.items():
            columns += [table.items(name).columns[field] for field, kind in fields.items() if kind is int]
    except (OverflowError, ValueError):
        return False
    # The absolute value of NULL is NULL.
    return all(
        np.abs(column).max(initial=0) < LARGEST for column in columns if isinstance(column, np.ndarray)
    )
