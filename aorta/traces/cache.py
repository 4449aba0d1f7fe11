"""Reads traces once: a RankTrace is kept as Parquet in the user's cache folder, by the content of its files.

Commands take a Reading along: the rules, whether the cache is used, and how steps are cut.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aorta.files import replacing
from aorta.processes import no_garbage_collection
from aorta.records.schema import HostKind, HostSpan
from aorta.timeline.types import Source as TimelineSource
from aorta.timeline.types import Timeline
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.model import RankTrace, TraceCollective, TraceQuality
from aorta.traces.sources import Source, TraceFile
from aorta.traces.steps import StepRule, with_steps

LARGEST_CACHE_BYTES = 4 << 30
"""Size of the folder above which the files used longest ago are removed."""
VERSION = 8
"""Number to raise with every change of what a reader finds in a trace."""
CHUNK = 1 << 20
KEY = b"aorta"
"""Key of the metadata in the Parquet file's schema."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings of how runs and traces are read. Travels to other processes."""

    rules: Sequence[CommRule] = COMM_RULES
    cache: bool = True
    steps: StepRule = StepRule()
    operators: bool = False
    """Read who launched each kernel, too: a second reading of a trace, without the cache."""
    strict: bool = True
    """Refuse a run with damaged or missing files, instead of reading what is left."""

    def read(self, source: Source, rank: int) -> RankTrace:
        """Trace of one rank, cut into steps."""
        if self.cache:
            trace = read_cached(source, rank, rules=self.rules)
        else:
            trace = source.read(rank, rules=self.rules)
        return with_steps(trace, self.steps)


class _Metadata(msgspec.Struct):
    """RankTrace without its columns, as the Parquet file's metadata has it."""

    rank: int
    world_size: int | None
    device: str | None
    host: str | None
    source: TimelineSource
    origin_unix_ns: int
    window_ms: tuple[float, float]
    streams: tuple[str, ...]
    ops: tuple[str, ...]
    names: tuple[str, ...]
    compute_streams: list[int]
    sees_copies: bool
    steps: list[tuple[int | None, tuple[float, float]]]
    collectives: list[TraceCollective]
    quality: TraceQuality
    versions: dict[str, str]
    devices: tuple[str, ...]
    untimed: dict[str, str]
    host_spans: list[HostSpan]
    host_not_shown: dict[HostKind, str]


@no_garbage_collection()  # a trace is 1e5 objects and more, none of which refers to itself
def read_cached(
    source: Source,
    rank: int,
    *,
    rules: Sequence[CommRule] = COMM_RULES,
) -> RankTrace:
    """source.read(rank), from the cache where it has this trace; else read, and kept if that is possible."""
    file = source.files[rank]
    path = _cache_path(file, rank, rules)
    if path is not None:
        cached = _load(path)
        if cached is not None:
            return cached
    trace = source.read(rank, rules=rules)
    if path is not None:
        _save(trace, path)
    return trace


def cache_folder() -> Path | None:
    """Folder of cached traces; None where the user has no home."""
    if folder := os.environ.get("AORTA_CACHE_DIR"):
        return Path(folder)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        if base := os.environ.get(variable):
            return Path(base, "aorta", "traces")
    try:
        return Path.home() / ".cache" / "aorta" / "traces"
    except RuntimeError:
        return None


def _cache_path(file: TraceFile, rank: int, rules: Sequence[CommRule]) -> Path | None:
    """File of the cache for this trace: its name is a digest of the content and of all that reading
    depends on."""
    digest = hashlib.blake2b(digest_size=16)
    settings = (
        VERSION,
        rank,
        file.rank_is_assumed,
        file.format,
        file.member,
        file.process,
        file.device,
        tuple(rules),
    )
    digest.update(repr(settings).encode())
    try:
        for path in file.paths:
            with open(path, "rb") as data:
                while chunk := data.read(CHUNK):
                    digest.update(chunk)
    except OSError:
        return None
    folder = cache_folder()
    return None if folder is None else folder / f"{digest.hexdigest()}.parquet"


def _load(path: Path) -> RankTrace | None:
    if not path.is_file():
        return None
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        metadata = msgspec.json.decode(table.schema.metadata[KEY], type=_Metadata)
        columns: dict[str, Any] = {name: table[name].to_numpy() for name in table.column_names}
        with suppress(OSError):
            os.utime(path)  # _make_room goes by the time of the last use
        return _trace(metadata, columns)
    except (pa.ArrowException, OSError, msgspec.DecodeError, KeyError, TypeError, ValueError, IndexError):
        return None


def _trace(metadata: _Metadata, columns: dict[str, Any]) -> RankTrace:
    """The trace of a file of the cache. Raises ValueError for a damaged one."""
    launch_step = columns.pop("launch_step").astype(np.int64)
    for name, table in (("stream", metadata.streams), ("op", metadata.ops), ("name", metadata.names)):
        column = columns[name] = columns[name].astype(np.int32)
        if len(column) and not (column.min() >= 0 and column.max() < len(table)):
            raise ValueError(f"{name} is beyond its table")
    timeline = Timeline(
        rank=metadata.rank,
        step=None,
        source=metadata.source,
        origin_unix_ns=metadata.origin_unix_ns,
        window_ms=metadata.window_ms,
        start_ms=columns["start_ms"].astype(np.float64),
        end_ms=columns["end_ms"].astype(np.float64),
        kind=columns["kind"].astype(np.int8),
        stream=columns["stream"],
        op=columns["op"],
        name=columns["name"],
        streams=metadata.streams,
        ops=metadata.ops,
        names=metadata.names,
        compute_streams=frozenset(metadata.compute_streams),
        sees_copies=metadata.sees_copies,
    )
    return RankTrace(
        rank=metadata.rank,
        world_size=metadata.world_size,
        device=metadata.device,
        host=metadata.host,
        timeline=timeline,
        steps=[
            replace(timeline.select(launch_step == i), step=step, window_ms=window)
            for i, (step, window) in enumerate(metadata.steps)
        ],
        collectives=metadata.collectives,
        quality=metadata.quality,
        launch_step=launch_step,
        versions=metadata.versions,
        devices=metadata.devices,
        untimed=metadata.untimed,
        host_spans=metadata.host_spans,
        host_not_shown=metadata.host_not_shown,
    )


def _save(trace: RankTrace, path: Path) -> None:
    """Write the trace to the cache; _trace is the inverse."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    line = trace.timeline
    metadata = _Metadata(
        rank=trace.rank,
        world_size=trace.world_size,
        device=trace.device,
        host=trace.host,
        source=trace.source,
        origin_unix_ns=line.origin_unix_ns,
        window_ms=line.window_ms,
        streams=line.streams,
        ops=line.ops,
        names=line.names,
        compute_streams=sorted(line.compute_streams),
        sees_copies=line.sees_copies,
        steps=[(step.step, step.window_ms) for step in trace.steps],
        collectives=trace.collectives,
        quality=trace.quality,
        versions=trace.versions,
        devices=trace.devices,
        untimed=trace.untimed,
        host_spans=list(trace.host_spans),
        host_not_shown=trace.host_not_shown,
    )
    columns = {name: getattr(line, name) for name in ("start_ms", "end_ms", "kind", "stream", "op", "name")}
    table = pa.table(columns | {"launch_step": trace.launch_step})
    table = table.replace_schema_metadata({KEY: msgspec.json.encode(metadata)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False) as file:
            pq.write_table(table, file, compression="zstd")
        _make_room(path.parent)
    except OSError:
        pass  # the trace was read; the next reading decodes it again


def _make_room(folder: Path) -> None:
    """Remove the files used longest ago while the folder is too large."""
    files = []
    for path in folder.glob("*.parquet"):
        with suppress(OSError):
            state = path.stat()
            files.append((state.st_mtime, state.st_size, path))
    size = sum(file[1] for file in files)
    for _, num_bytes, path in sorted(files)[:-1]:
        if size <= LARGEST_CACHE_BYTES:
            return
        with suppress(OSError):
            path.unlink()
            size -= num_bytes
