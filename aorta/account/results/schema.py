"""What a run leaves: one schema for a single run of queues and a sweep over stream counts.

A document is a list of points; a point is a configuration (what was asked for, by which points of two
documents are matched), its metrics with intervals, and what the ranks measured.
"""

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from aorta.errors import NOT_JSON, RecordError
from aorta.files import read_regular, write_whole
from aorta.records.schema import DeviceKind, DeviceRecord

SCHEMA_VERSION = 1

Better = Literal["higher", "lower", "neither"]
Status = Literal["measured", "skipped", "failed"]
Value = str | int | float | bool | None | list[Any] | dict[str, Any]


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """95 %; None on a side where the number of iterations gives no bound."""

    low: float | None
    high: float | None


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    value: float | None
    """None: not measured, see reason."""
    unit: str
    better: Better = "neither"
    interval: Interval | None = None
    error: float | None = None
    """Standard error, and its degrees of freedom: what a comparison is made with."""
    freedom: float | None = None
    num: int | None = None
    """Iterations behind it."""
    reason: str | None = None
    """Why value or interval is None."""
    source: str | None = None
    """Where it is not that of the point."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank over its timed iterations; None where there is no device. Earlier versions wrote a
    further field, which is left out."""

    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    """At the end of the timed iterations, as reserved_bytes and device_used_bytes."""
    reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    """All of the device's used memory: other processes, the communication library and the runtime too."""
    reason: str | None = None


class Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of validate_correctness on one rank."""

    ok: bool
    detail: str
    """Comparison made, and the largest error; names the fault where there is one."""


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Concurrency from timing events around single pieces, in iterations of their own. Earlier versions wrote
    further fields, which are left out."""

    iterations: int
    achieved: float
    """Pieces under way at a time while any is: sum of their durations over length of their union."""
    idle_share: float
    """Of the time from the first fork to the end of the last piece: no piece under way."""
    placement_bound: float | None
    """Speed-up over one stream if no piece slowed another one down: the sum of pieces alone over the busiest
    stream's part of it."""
    slowdown: dict[str, float]
    """By name: duration overlapped over duration alone."""
    comm_ms_each: list[float]
    """Union of communication pieces by iteration, as hidden_ms_each; empty without any."""
    hidden_ms_each: list[float]


class RankRun(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one rank at one point. Earlier versions wrote further fields, which are left out."""

    rank: int
    device: str
    iteration_ms: list[float]
    enqueue_ms: list[float]
    device_ms: float
    wall_ms: float
    launch_bound: bool
    operations: float
    """Per iteration, as samples and units."""
    samples: float
    units: float
    memory: Memory
    check: Checked
    concurrency: Concurrency | None
    """From events."""
    leg_ms: dict[str, list[float]]
    """Fork to join of each round of interleaved legs, `iteration` among them."""
    workload_metrics: dict[str, float | None]
    device_bound_ms: Metric
    """Least time of an iteration at the device's peak rates."""
    notes: list[str]
    telemetry: DeviceRecord | None
    """At the end of the timed iterations."""
    telemetry_reason: str | None
    traces: list[str] = []


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    configuration: dict[str, Value]
    """Points of two documents with equal configurations are compared."""
    status: Status
    reason: str | None = None
    """Why it was skipped or failed."""
    metrics: dict[str, Metric] = {}
    source: str = ""
    """events (of a device), or threads (worker threads on CPU, whose speed says nothing about a GPU)."""
    collectives: Literal["real", "simulated", "none"] = "none"
    iterations: int | None = None
    warmup: int | None = None
    skew_ms: Metric | None = None
    """Slowest minus fastest rank, median over iterations."""
    ranks: list[RankRun] = []
    notes: list[str] = []


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """A workload over its stream counts; lists are in the order of `streams`."""

    workload: str
    configuration: dict[str, Value]
    """What its points share."""
    streams: list[int]
    baseline_streams: int
    """1, or the fewest that the workload can use: what speed-up and efficiency refer to."""
    throughput: list[float]
    unit: str
    speedup: list[float]
    efficiency: list[float]
    """Speed-up over what as many streams would give at best, streams / baseline_streams."""
    bound: list[float | None]
    """Greatest speed-up over baseline_streams if pieces did not slow each other down; None: no pieces."""
    knee: int
    """Fewest streams with at least 95 % of the best throughput of the sweep."""
    knee_interval: tuple[int, int] | None
    knee_reason: str | None = None


class Setting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Machine and software of a run."""

    platform: DeviceKind
    devices: list[dict[str, Any]]
    world_size: int
    backend: str | None
    versions: dict[str, str | None]
    environment: dict[str, str]
    """Variables that the runtimes and libraries act on, as they were in the process."""
    queues: str
    """The effective limit on hardware queues, and whether it was set."""
    warnings: list[str] = []


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int = SCHEMA_VERSION
    kind: Literal["queues"]
    created_unix_ns: int
    setting: Setting
    points: list[Point]
    scaling: list[Scaling] = []


class _Header(msgspec.Struct):
    schema: int
    kind: str


def read_document(path: Path) -> Document:
    """RecordError, in one line, for a file that is none, or of another version."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        header = msgspec.json.decode(data, type=_Header)
    except NOT_JSON as error:
        raise RecordError(f"{path}: not a result of a run or sweep: {error}") from None
    if header.schema != SCHEMA_VERSION:
        raise RecordError(
            f"{path}: schema {header.schema}, this version reads {SCHEMA_VERSION}; measure again or use the "
            "aorta that wrote it"
        )
    try:
        return msgspec.json.decode(data, type=Document)
    except NOT_JSON as error:
        raise RecordError(f"{path}: {error}") from None


def write_document(path: Path, document: Document, overwrite: bool = False) -> None:
    """Whole or not at all. RecordError where a file is there and is to stay."""
    check_output(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, to_json(document) + b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror}") from None


def check_output(path: Path, overwrite: bool = False) -> None:
    """RecordError where `path` is taken: asked before anything is measured."""
    if path.is_dir():
        raise RecordError(f"{path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise RecordError(f"{path} already exists; give another name or --overwrite")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RecordError(f"{path} cannot be written: {folder} is no folder that can be written to")


def streams_of(configuration: dict[str, Value]) -> int:
    """The number of streams of a point."""
    count = configuration["streams"]
    assert isinstance(count, int)
    return count


def without_streams(configuration: dict[str, Value]) -> dict[str, Value]:
    """Configuration that the points of one scaling share."""
    return {name: value for name, value in configuration.items() if name != "streams"}


def to_json(document: Any) -> bytes:
    """Indented, so that people can read it."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
