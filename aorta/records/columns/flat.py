"""Step records as columns: every field that is one number, flag or text, host spans and sums of kernels.

Lists of collectives and segments are no columns: a column says which lines have them. Plain Python, since it
runs where a run is recorded.
"""

import math
import types
import typing
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from aorta.records.schema import (
    STREAM_NAMES,
    Calibrated,
    DeviceRecord,
    HostSpan,
    HostUse,
    KernelSums,
    MemoryRecord,
    OverlapRecord,
    StepRecord,
    StreamOverlap,
    StreamUse,
)

NULL = -(2**63)
"""An integer that was not measured; of a number it is NaN, of a flag and of a text -1."""
LIMIT = 2**62
"""Above every integer of a column."""
PLACE = "i"
"""Type code of texts: places in their table."""
TYPE_CODES: dict[Any, str] = {float: "d", int: "q", bool: "b", str: PLACE}
PARTS: tuple[tuple[str, type], ...] = (
    ("compute_stream", StreamOverlap),
    ("calibrated", Calibrated),
    *((f"streams.{name}", StreamUse) for name in STREAM_NAMES),
    ("memory", MemoryRecord),
    ("device", DeviceRecord),
    ("host_use", HostUse),
)
"""Parts of a record whose fields have the part's name before their own."""
LEFT_OUT = ("rocm_smi_output", "where")
"""Long texts that no statistic is made of."""
NOT_MEASURED, THROTTLING = "not_measured", "device.throttling"
"""Columns of JSON texts."""
DETAILS = ("collectives", "active_segments")
"""Flags: the line has this list."""
SPANS, RUN_LENGTHS, KERNELS, TOP = "host_spans", "exposed_run_lengths_ns", "kernels", "kernels.top"
"""Lists: <name>.num is their length by line, -1 where a line has none, <name>.<field> their items, of all
lines together."""


class NotPlain(ValueError):
    """A record has what no column holds."""


@dataclass(frozen=True, slots=True)
class FlatColumns:
    """Columns of neighbouring records."""

    num_records: int
    constants: dict[str, float | int | str]
    """Columns of one value; of texts the text itself."""
    arrays: dict[str, "array[Any]"]
    """Columns in which there is a value, but for those of constants."""
    texts: dict[str, list[str]]
    """The table of each array of texts."""


@cache
def scalar_fields(struct: type) -> dict[str, type]:
    """The fields of a record that are one number, flag or text, with their type."""
    fields = {}
    for name, hint in typing.get_type_hints(struct).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)  # of a Literal: the former
        kinds = typing.get_args(hint) if is_union else (hint,)
        plain = [kind for kind in kinds if kind is not type(None)]
        kind = str if typing.get_origin(plain[0]) is typing.Literal else plain[0]
        if len(plain) == 1 and kind in TYPE_CODES and name not in LEFT_OUT:
            fields[name] = kind
    return fields


def flat_columns(records: Sequence[StepRecord]) -> FlatColumns:
    """The columns of one record or more. NotPlain where a number is none that a line can hold."""
    flat = _Flat(len(records))
    flat.add("", records, StepRecord)
    overlaps = [record.overlap for record in records]
    flat.add("", overlaps, OverlapRecord)
    for prefix, struct in PARTS:
        flat.add(f"{prefix}.", list(_parts(prefix, records, overlaps)), struct)
    for name in ("hidden_by_op", "exposed_by_op"):
        flat.add_keyed(name, [getattr(overlap, name) for overlap in overlaps], float)
    flat.add_texts(NOT_MEASURED, [record.not_measured for record in records])
    flat.add_texts(THROTTLING, [record.device and record.device.throttling for record in records])
    for name in DETAILS:
        flat.add_column(name, [getattr(record, name) is not None for record in records], bool)
    flat.add_lists(SPANS, [record.host_spans for record in records], HostSpan)
    flat.add_run_lengths([record.exposed_run_lengths_ns for record in records])
    flat.add_kernels([record.kernels for record in records])
    return flat.columns


def _parts(prefix: str, records: Sequence[StepRecord], overlaps: Sequence[OverlapRecord]) -> Iterator[Any]:
    head, _, stream = prefix.partition(".")
    if stream:
        return (record.streams.get(stream) for record in records)
    owners: Sequence[Any] = overlaps if head in OverlapRecord.__struct_fields__ else records
    return (getattr(owner, head) for owner in owners)


class _Flat:
    """Columns while they are made."""

    def __init__(self, num_records: int) -> None:
        self.columns = FlatColumns(num_records, {}, {}, {})

    def add(self, prefix: str, parts: Sequence[Any], struct: type) -> None:
        """The fields of a part that records may lack."""
        fields = scalar_fields(struct)
        nulls = (None,) * len(fields)
        if not any(part is not None for part in parts):
            return
        get = attrgetter(*fields)
        rows = [nulls if part is None else get(part) for part in parts]
        for (name, kind), values in zip(fields.items(), zip(*rows, strict=True), strict=True):
            self.add_column(prefix + name, values, kind)

    def add_column(self, name: str, values: Sequence[Any], kind: type) -> None:
        """A value per record, or per item of a list."""
        num_null = values.count(None)
        if num_null == len(values):
            return
        if kind is str:
            self._add_places(name, values)
            return
        given = values if not num_null else [value for value in values if value is not None]
        column = array(TYPE_CODES[kind], _checked(name, given, kind))
        if column.tobytes() == column[:1].tobytes() * len(values):
            self.columns.constants[name] = column[0]
            return
        if num_null:
            null = {float: math.nan, int: NULL, bool: -1}[kind]
            column = array(column.typecode, [null if value is None else value for value in values])
        self.columns.arrays[name] = column

    def add_texts(self, name: str, values: Sequence[Any]) -> None:
        """Values as JSON, each text once: as a rule line after line has the same."""
        texts: list[str | None] = []
        last, text = None, None
        for value in values:
            if value is not None and (text is None or (value is not last and value != last)):
                last, text = value, msgspec.json.encode(value).decode()
            texts.append(None if value is None else text)
        self.add_column(name, texts, str)

    def _add_places(self, name: str, values: Sequence[str | None]) -> None:
        table = {text: place for place, text in enumerate(dict.fromkeys(values)) if text is not None}
        if not set(map(type, table)) <= {str}:
            raise NotPlain(name)
        if len(table) == 1 and None not in values:
            self.columns.constants[name] = next(iter(table))
            return
        table = {text: place for place, text in enumerate(table)}
        self.columns.texts[name] = list(table)
        self.columns.arrays[name] = array(PLACE, [-1 if text is None else table[text] for text in values])

    def add_keyed(self, name: str, values: Sequence[dict[str, Any]], kind: type) -> None:
        """A column per key."""
        for key in dict.fromkeys(key for of_record in values for key in of_record):
            self.add_column(f"{name}.{key}", [of_record.get(key) for of_record in values], kind)

    def add_lists(self, name: str, lists: Sequence[list[Any] | None], struct: type) -> None:
        """The fields of all items, and how many items each record has."""
        self.add_nums(name, lists)
        self.add(f"{name}.", [item for of_record in lists if of_record for item in of_record], struct)

    def add_nums(self, name: str, lists: Sequence[Sequence[Any] | None]) -> None:
        self.add_column(
            f"{name}.num", [-1 if of_record is None else len(of_record) for of_record in lists], int
        )

    def add_run_lengths(self, lists: Sequence[list[int] | None]) -> None:
        self.add_nums(RUN_LENGTHS, lists)
        self.add_column(
            f"{RUN_LENGTHS}.ns", [length for of_record in lists if of_record for length in of_record], int
        )

    def add_kernels(self, sums: Sequence[KernelSums | None]) -> None:
        if not any(part is not None for part in sums):
            return
        self.add(f"{KERNELS}.", sums, KernelSums)
        classes = [{} if part is None else part.classes for part in sums]
        for place, (name, kind) in enumerate((("kernel_ms", float), ("kernel_count", int))):
            self.add_keyed(name, [{key: pair[place] for key, pair in of.items()} for of in classes], kind)
        tops = [None if part is None else part.top for part in sums]
        self.add_nums(TOP, tops)
        items = [item for top in tops if top for item in top]
        if items:
            places, times_ms, counts = zip(*items, strict=True)
            self.add_column(f"{TOP}.name", places, int)
            self.add_column(f"{TOP}.ms", times_ms, float)
            self.add_column(f"{TOP}.count", counts, int)


def _checked(name: str, values: Sequence[Any], kind: type) -> Iterable[Any]:
    """values: without None."""
    types_of_values = set(map(type, values))
    if kind is float:
        # A line has null in place of what is not finite.
        if types_of_values <= {float, int} and (
            math.isfinite(sum(values)) or all(map(math.isfinite, values))
        ):
            return values
    elif types_of_values == {kind} and -LIMIT < min(values) <= max(values) < LIMIT:
        return values
    raise NotPlain(name)
