"""Steps that a process had closed and not handed over when it was killed: from raw numbers to records."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from aorta.records.columns.number_block import LineKey
from aorta.records.files import files_beside, steps_name
from aorta.records.schema import StepRecord
from aorta.records.state import read_states
from aorta.steps.raw import RawStep, ResolverSettings

_HEAD_BYTES = 8
_MOST_BYTES = 1 << 28

Written = tuple[int, int]
"""rollbacks and global step of a line: they rise within an attempt."""


class _Packed(msgspec.Struct, array_like=True):
    number: int
    settings: dict[str, Any]
    step: RawStep


def packed(number: int, settings: ResolverSettings, step: RawStep) -> bytes:
    """Length, checksum, content. number: of the step among those that were kept."""
    body = msgspec.msgpack.encode((number, settings, step))
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def unwritten_steps(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> list[StepRecord]:
    """The steps kept at path that follow the last line; none where nothing usable is there.

    of: run id and attempt that they must be of, None where there is no line to tell.
    """
    try:
        return list(_records(path, attempt, last))
    except (OSError, msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, AssertionError):
        return []


def unwritten_after(path: Path, last: LineKey | StepRecord | None) -> list[StepRecord]:
    """The steps kept beside the rank's lines at path that follow `last`, the last one read.

    Empty while another process makes lines of the rank's steps: it has some that are neither kept nor lines.
    """
    beside = files_beside(path)
    if beside is None or not beside.unwritten.exists() or _has_writer(path):
        return []
    if last is None:
        return unwritten_steps(beside.unwritten, None, None)
    return unwritten_steps(beside.unwritten, (last.run_id, last.attempt), (last.rollbacks, last.global_step))


def _has_writer(path: Path) -> bool:
    """Whether another process writes the lines at path."""
    return any(
        state.has_writer and path.name == steps_name(rank) for rank, state in read_states(path.parent).items()
    )


def _records(
    path: Path, attempt: tuple[str | None, int] | None, last: Written | None
) -> Iterator[StepRecord]:
    # Here: nobody else who reads a run needs them, and hardly any run was killed.
    from aorta.steps.kernel_steps import without_kernels
    from aorta.steps.resolver import Resolver

    resolver: Resolver | None = None
    for packed_step in _frames(path):
        settings = msgspec.convert(packed_step.settings, ResolverSettings)
        if attempt is not None and (settings.run_id, settings.attempt) != attempt:
            return
        if last is None or (packed_step.step.rollbacks, packed_step.step.global_step) > last:
            if packed_step.step.kernels_lost is not None:
                yield without_kernels(packed_step.step, settings, packed_step.step.kernels_lost)
                continue
            resolver = resolver or Resolver(settings)
            yield resolver.resolve(packed_step.step)


def _frames(path: Path) -> Iterator[_Packed]:
    """Those that follow each other: behind them lies what is left of earlier ones."""
    with open(path, "rb") as file:
        data = file.read(_MOST_BYTES)
    position, number = 0, None
    while len(data) >= position + _HEAD_BYTES:
        size, checksum = (int.from_bytes(data[position + i : position + i + 4], "little") for i in (0, 4))
        body = data[position + _HEAD_BYTES : position + _HEAD_BYTES + size]
        if len(body) < size or zlib.crc32(body) != checksum:
            return
        packed_step = msgspec.msgpack.decode(body, type=_Packed)
        if number is not None and packed_step.number != number + 1:
            return
        number = packed_step.number
        yield packed_step
        position += _HEAD_BYTES + size
