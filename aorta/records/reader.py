"""Reads what a run wrote. Every error names the file and the line."""

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aorta.errors import RecordError
from aorta.records.schema import SCHEMA_VERSION, RunRecord, StepRecord
from aorta.timeline.overlap import unions
from aorta.timeline.types import COPY, KERNEL_SOURCES, Kind, Span, Timeline

logger = logging.getLogger(__name__)

LIMIT = 2**53
"""Above every count and every ms of a run, and exact as a float."""
OP_OF_STREAM = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "aux": "other",
}


class _Version(msgspec.Struct):
    schema: int


def read_steps(path: Path | str, notes: list[str] | None = None) -> Iterator[StepRecord]:
    """The step records of a file, one at a time.

    A last line that was cut off, as a killed process leaves it, is left out; that is appended to
    notes, or logged where no notes are given.
    """
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if _cut_off(line, error):
                _note(notes, f"{path}:{number}: the last line is cut off and left out")
                return
            raise _line_error(path, number, line, error) from error
        if record.schema != SCHEMA_VERSION:
            raise _version_error(path, number, record.schema)
        fault = _impossible(record)
        if fault:
            raise RecordError(f"{path}:{number}: impossible record: {fault}")
        yield record


def read_run(path: Path | str) -> RunRecord:
    """run.json, given itself or the folder it is in."""
    path = Path(path)
    if path.is_dir():
        path = path / "run.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error
    try:
        run = msgspec.json.decode(data, type=RunRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        version = _version(data)
        if version not in (None, SCHEMA_VERSION):
            raise _version_error(path, None, version) from error
        raise RecordError(f"{path} is not a run record: {error}") from error
    if run.schema != SCHEMA_VERSION:
        raise _version_error(path, None, run.schema)
    return run


def timeline_of(record: StepRecord) -> Timeline:
    """The Timeline whose unions the record's active_segments keep.

    Spans of one kind of work that touched or overlapped are one span here; operations that count
    under aux are named 'other'.
    """
    if record.active_segments is None:
        raise RecordError(
            f"rank {record.rank} step {record.global_step} was recorded without its details"
            " (recording.detail_every)"
        )
    spans = []
    for stream, rows in unions(record.active_segments).items():
        kind = Kind.COMPUTE if stream == "compute" else Kind.COPY if stream == COPY else Kind.COMM
        op = OP_OF_STREAM.get(stream, "")
        spans += [Span(start, end, kind, op, stream) for start, end in rows.tolist()]
    window_ms = record.step_ms
    if window_ms is None:
        window_ms = max((span.end_ms for span in spans), default=0.0)
    return Timeline.from_spans(
        spans,
        (0.0, window_ms),
        rank=record.rank,
        step=record.global_step,
        source=record.source,
        origin_unix_ns=record.start_unix_ns,
        sees_copies=record.overlap.exposed_copy_ms is not None or record.source in KERNEL_SOURCES,
    )


def _impossible(record: StepRecord) -> str | None:
    """What no run writes and arrays could not hold."""
    if not 0 <= record.rank < record.world_size < LIMIT:
        return f"rank {record.rank} of {record.world_size}"
    if not 0 <= record.global_step < LIMIT:
        return f"global_step {record.global_step}"
    if not 0 <= record.num_collectives < LIMIT:
        return f"num_collectives {record.num_collectives}"
    if record.step_ms is not None and not 0 <= record.step_ms < LIMIT:
        return f"step_ms {record.step_ms}"
    return None


def _lines(path: Path | str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _cut_off(line: bytes, error: Exception) -> bool:
    """Only a last line has no newline; a ValidationError is valid JSON, hence not cut off."""
    return (
        not line.endswith(b"\n")
        and line.lstrip().startswith(b"{")
        and not isinstance(error, msgspec.ValidationError)
    )


def _version(data: bytes) -> int | None:
    try:
        return msgspec.json.decode(data, type=_Version).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _line_error(path: Path | str, number: int, line: bytes, error: Exception) -> RecordError:
    version = _version(line)
    if version not in (None, SCHEMA_VERSION):
        return _version_error(path, number, version)
    return RecordError(f"{path}:{number}: not a step record: {error}")


def _version_error(path: Path | str, number: int | None, version: int | None) -> RecordError:
    where = path if number is None else f"{path}:{number}"
    return RecordError(
        f"{where}: written with record schema {version}, this version of aorta reads {SCHEMA_VERSION}"
    )


def _note(notes: list[str] | None, text: str) -> None:
    if notes is None:
        logger.warning(text)
    else:
        notes.append(text)
