"""Columns of a rank as a file of Arrow's IPC format: written once, then read instead of the lines.

Per source of the rank three tables follow each other: a row per step, a row per collective, a row per stretch
of exposed communication. What is no column is JSON in the metadata of the first table.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from aorta.account.load.rank.calls import Kind, RecordedCalls
from aorta.account.load.rank.columns import Floats, Passes, RankColumns, RankFile, SourceColumns
from aorta.account.load.rank.reduce import COLUMNS_VERSION, reduce_file
from aorta.errors import ReportError
from aorta.records.schema import Source
from aorta.timeline.collective import GroupKey

KEY = b"aorta"
STEP_COLUMNS = (
    "global_step", "start_ns", "end_ns", "tolerance_ns", "num_collectives", "host_bound", "has_details",
    "has_collectives", "has_exposed",
)  # fmt: skip
PASS_COLUMNS = ("attempt", "rollbacks", "world_size")
CALL_COLUMNS = ("row", "kind", "group", "seq", "start_ns", "end_ns")
INDEX_COLUMNS = ("global_step", "has_collectives", *PASS_COLUMNS)
METRIC, NUM, SUM = "metric.", "num.", "sum."
"""How names of metrics begin, and those of the number and the time of each kind of collective."""


class StoredSource(msgspec.Struct):
    """What is no column of one source."""

    source: Source
    unknown: list[str]
    """Metrics without a value."""
    collectives: list[Kind]
    kinds: list[Kind]
    groups: list[tuple[tuple[int, ...] | None, str | None]]
    num_calls: int
    not_measured: dict[str, str]
    repeated: dict[int, list[tuple[int, int]]]
    gaps: list[tuple[int, str]]


class StoredRank(msgspec.Struct):
    """The head of a file."""

    version: int
    key: str
    """What the columns were made of."""
    rank: int
    world_size: int
    run_id: str | None
    notes: list[str]
    sources: list[StoredSource]


def write_columns(file: BinaryIO, rank: RankFile, key: str) -> None:
    """Writes a rank whose columns are in memory."""
    columns = {source: of_source.load() for source, of_source in rank.columns.items()}
    head = StoredRank(
        version=COLUMNS_VERSION,
        key=key,
        rank=rank.rank,
        world_size=rank.world_size,
        run_id=rank.run_id,
        notes=rank.notes,
        sources=[_stored(source, of_source) for source, of_source in columns.items()],
    )
    metadata = {KEY: msgspec.json.encode(head)}
    for of_source in columns.values():
        for table in _tables(of_source):
            table = table.replace_schema_metadata(metadata)
            metadata = {}
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.ipc.new_stream(file, table.schema, options=options) as writer:
                writer.write_batch(table)


def _stored(source: Source, columns: RankColumns) -> StoredSource:
    calls = columns.calls
    assert calls is not None
    return StoredSource(
        source=source,
        unknown=[name for name, values in columns.metrics.items() if np.isnan(values).all()],
        collectives=list(columns.collectives),
        kinds=calls.kinds,
        groups=[(key.ranks, key.name) for key in calls.groups],
        num_calls=len(calls.row),
        not_measured=columns.not_measured,
        repeated=columns.passes.repeated,
        gaps=columns.passes.gaps,
    )


def _tables(columns: RankColumns) -> Iterator[pa.RecordBatch]:
    steps: dict[str, NDArray[Any]] = {name: getattr(columns, name) for name in STEP_COLUMNS}
    steps |= {name: getattr(columns.passes, name) for name in PASS_COLUMNS}
    steps |= {METRIC + name: values for name, values in columns.metrics.items() if not np.isnan(values).all()}
    for place, (num, sum_ms) in enumerate(columns.collectives.values()):
        steps |= {f"{NUM}{place}": num, f"{SUM}{place}": sum_ms}
    yield pa.RecordBatch.from_pydict(steps)
    calls = columns.calls
    assert calls is not None
    yield pa.RecordBatch.from_pydict({name: getattr(calls, name) for name in CALL_COLUMNS})
    yield pa.RecordBatch.from_pydict({"begin_ns": calls.exposed_ns[:, 0], "end_ns": calls.exposed_ns[:, 1]})


@dataclass(slots=True)
class StoredColumns:
    """The steps of a rank by one source; their numbers are in its file."""

    path: Path
    key: str
    lines: Path
    """What the columns were made of."""
    source: Source
    global_step: NDArray[np.int64]
    passes: Passes
    has_collectives: NDArray[np.bool_]
    num_calls: int
    choose: tuple[Callable[[RankColumns], RankColumns], ...] = ()
    """Applied to what is read: rows that are left out."""

    def load(self) -> RankColumns:
        """The numbers, from the lines where the file is gone. ReportError where those have changed."""
        columns = self._read()
        if columns is None:
            columns = reduce_file(self.lines).columns[self.source].load()
        for choose in self.choose:
            columns = choose(columns)
        if not np.array_equal(columns.global_step, self.global_step):
            raise ReportError(f"{self.lines} changed while it was read: read it once more")
        return columns

    def sharing(self, other: SourceColumns | None) -> "StoredColumns":
        """With the other's steps where they are the same ones."""
        if other is None or not np.array_equal(self.global_step, other.global_step):
            return self
        is_kept = np.array_equal(self.has_collectives, other.has_collectives)
        return replace(
            self,
            global_step=other.global_step,
            has_collectives=other.has_collectives if is_kept else self.has_collectives,
        )

    def _read(self) -> RankColumns | None:
        try:
            with pa.memory_map(str(self.path)) as file:
                for head, of_source, columns in _sources(file):
                    if head.key != self.key:
                        return None
                    if of_source.source == self.source:
                        return columns
        except _UNREADABLE:
            pass
        return None


_UNREADABLE = (
    pa.ArrowException, OSError, msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError
)  # fmt: skip


def read_columns(path: Path, lines: Path, key: str) -> RankFile | None:
    """The rank of a file, its numbers left where they are; None where the file is of something else, of
    another version or damaged. lines: what it was made of."""
    sources: dict[Source, SourceColumns] = {}
    head: StoredRank | None = None
    try:
        with pa.memory_map(str(path)) as file:
            for head, of_source, steps in _heads(file):
                if (head.version, head.key) != (COLUMNS_VERSION, key):
                    return None
                columns = _arrays(steps)
                sources[of_source.source] = StoredColumns(
                    path=path,
                    key=key,
                    lines=lines,
                    source=of_source.source,
                    global_step=columns["global_step"],
                    passes=_passes(of_source, columns),
                    has_collectives=columns["has_collectives"],
                    num_calls=of_source.num_calls,
                )
    except _UNREADABLE:
        return None
    return (
        None
        if head is None
        else RankFile(lines, head.rank, head.world_size, sources, head.run_id, head.notes)
    )


def _small(column: NDArray[np.int64]) -> NDArray[np.int64]:
    """A column of one value, as they are as a rule, without the memory of its rows."""
    is_constant = len(column) > 0 and bool((column == column[0]).all())
    return np.broadcast_to(column[0].copy(), column.shape) if is_constant else column


def _heads(file: Any) -> Iterator[tuple[StoredRank, StoredSource, pa.RecordBatch]]:
    """One source after the other, of whose columns those of INDEX_COLUMNS alone are read."""
    head: StoredRank | None = None
    place = 0
    while head is None or place < len(head.sources):
        start = file.tell()
        schema = pa.ipc.open_stream(file).schema
        if head is None:
            head = msgspec.json.decode(schema.metadata[KEY], type=StoredRank)
        file.seek(start)
        places = [schema.get_field_index(name) for name in INDEX_COLUMNS]
        steps = _batch(file, pa.ipc.IpcReadOptions(included_fields=places))
        for _ in range(2):
            _batch(file, pa.ipc.IpcReadOptions(included_fields=[0]))
        yield head, head.sources[place], steps
        place += 1


def _sources(file: Any) -> Iterator[tuple[StoredRank, StoredSource, RankColumns]]:
    """One source after the other."""
    head: StoredRank | None = None
    place = 0
    while head is None or place < len(head.sources):
        steps, calls, exposed = (_batch(file) for _ in range(3))
        if head is None:
            head = msgspec.json.decode(steps.schema.metadata[KEY], type=StoredRank)
        of_source = head.sources[place]
        yield head, of_source, _columns(of_source, steps, calls, exposed)
        place += 1


def _batch(file: Any, options: pa.ipc.IpcReadOptions | None = None) -> pa.RecordBatch:
    """The next table, which is written in one piece."""
    reader = pa.ipc.open_stream(file, options=options)
    batch = reader.read_next_batch()
    try:
        reader.read_next_batch()
    except StopIteration:  # the end of the stream has been read
        return batch
    raise ValueError("more than one piece")


def _columns(
    head: StoredSource, steps: pa.RecordBatch, calls: pa.RecordBatch, exposed: pa.RecordBatch
) -> RankColumns:
    of_step, of_call, of_stretch = (_arrays(batch) for batch in (steps, calls, exposed))
    metrics: dict[str, Floats] = {
        name.removeprefix(METRIC): values for name, values in of_step.items() if name.startswith(METRIC)
    }
    metrics |= {name: np.full(len(steps), np.nan) for name in head.unknown}
    return RankColumns(
        **{name: of_step[name] for name in STEP_COLUMNS},
        metrics=metrics,
        collectives={
            kind: (of_step[f"{NUM}{place}"], of_step[f"{SUM}{place}"])
            for place, kind in enumerate(head.collectives)
        },
        calls=RecordedCalls(
            head.kinds,
            [GroupKey(ranks, name) for ranks, name in head.groups],
            **{name: of_call[name] for name in CALL_COLUMNS},
            exposed_ns=np.stack((of_stretch["begin_ns"], of_stretch["end_ns"]), axis=1),
        ),
        not_measured=head.not_measured,
        passes=_passes(head, of_step),
    )


def _passes(head: StoredSource, columns: dict[str, NDArray[Any]]) -> Passes:
    return Passes(
        **{name: _small(columns[name]) for name in PASS_COLUMNS}, repeated=head.repeated, gaps=head.gaps
    )


def _arrays(batch: pa.RecordBatch) -> dict[str, NDArray[Any]]:
    """Not by Table.to_numpy, which loads pandas."""
    return {
        name: batch.column(place).to_numpy(zero_copy_only=False)
        for place, name in enumerate(batch.schema.names)
    }
