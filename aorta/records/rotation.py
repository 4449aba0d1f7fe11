"""Keeps a file of step records below a size: the oldest lines lose their details, then the oldest lines go.

Lines keep their numbers and get new checksums. What the dropped steps took in all is kept, in
rank_<n>_dropped.json beside the file; the first line that is left says how many steps went before it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import read_regular
from aorta.records.schema import StepRecord
from aorta.records.seal import seal_of, sealed

DROPPED = "earlier lines were dropped"
"""Beginning of the first line's `gap` where earlier lines were dropped."""
LEFT_OUT = "left out of an old line to keep the file small"
"""Reason in `not_measured` of a line that lost its lists."""
DETAILS = ("collectives", "active_segments")
"""The lists that a line can do without."""
SHARE_KEPT = 0.5
"""Share of the largest size that a rotation keeps, so that the next one is far away."""
SHARE_WITH_DETAILS = 0.25
"""Share of the largest size up to which the newest lines keep their details."""


class DroppedSteps(msgspec.Struct, kw_only=True):
    """rank_<n>_dropped.json: the steps of a rank that were dropped to keep its file small, summed."""

    num_steps: int = 0
    first_global_step: int | None = None
    last_global_step: int | None = None
    sums: dict[str, float] = {}
    """Sums by metric: step_ms, tokens and the parts of `overlap` that are numbers."""
    counts: dict[str, int] = {}
    """Number of steps that had a metric, by metric."""

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        if self.first_global_step is None:
            self.first_global_step = record.global_step
        self.last_global_step = record.global_step
        overlap = msgspec.structs.asdict(record.overlap)
        for name, value in {"step_ms": record.step_ms, "tokens": record.tokens, **overlap}.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.sums[name] = self.sums.get(name, 0) + value
                self.counts[name] = self.counts.get(name, 0) + 1


def rotate(source: BinaryIO, target: BinaryIO, max_bytes: int, dropped: DroppedSteps) -> None:
    """Write the lines that fit SHARE_KEPT of `max_bytes` to `target`; add the others to `dropped`.

    Two passes over the file: the sizes decide first, since the newest lines are at its end.
    """
    sizes = [(len(line), len(_without_details(line))) for line in _lines(source)]
    first_whole = _first_that_fits([whole for whole, _ in sizes], int(max_bytes * SHARE_WITH_DETAILS))
    bare = [short if index < first_whole else whole for index, (whole, short) in enumerate(sizes)]
    first_kept = _first_that_fits(bare, int(max_bytes * SHARE_KEPT))
    for index, line in enumerate(_lines(source)):
        if index < first_kept:
            _add(dropped, line)
        elif index == first_kept > 0:
            target.write(_with_gap(line if index >= first_whole else _without_details(line), dropped))
        else:
            target.write(line if index >= first_whole else _without_details(line))


def dropped_path(path: Path) -> Path:
    """rank_0_metrics.jsonl -> rank_0_dropped.json."""
    return path.with_name(path.name.removesuffix("_metrics.jsonl") + "_dropped.json")


def read_dropped(path: Path) -> DroppedSteps:
    """Sums of earlier rotations; empty where there are none or they cannot be read."""
    try:
        return msgspec.json.decode(read_regular(dropped_path(path)), type=DroppedSteps)
    except (OSError, *NOT_JSON):
        return DroppedSteps()


def _lines(source: BinaryIO) -> Iterator[bytes]:
    source.seek(0, os.SEEK_SET)
    yield from source


def _first_that_fits(sizes: list[int], max_bytes: int) -> int:
    """Index from which on the sizes add up to at most `max_bytes`; the last line is always kept."""
    total = 0
    for index in range(len(sizes) - 1, -1, -1):
        total += sizes[index]
        if total > max_bytes and index < len(sizes) - 1:
            return index + 1
    return 0


def _decoded(line: bytes) -> StepRecord | None:
    try:
        return msgspec.json.decode(line, type=StepRecord)
    except NOT_JSON:
        return None


def _resealed(record: StepRecord, line: bytes) -> bytes:
    seal = seal_of(line)
    body = msgspec.json.encode(record)
    return body + b"\n" if seal is None else sealed(body, seal.number)


def _without_details(line: bytes) -> bytes:
    """The line without collectives and segments; a damaged line stays, for the reader to name."""
    record = _decoded(line)
    seal = seal_of(line)
    if record is None or (seal is not None and not seal.is_whole):
        return line
    kernels = record.kernels and msgspec.structs.replace(record.kernels, spans=None)
    reasons = {name: LEFT_OUT for name in DETAILS if getattr(record, name) is not None}
    bare = msgspec.structs.replace(
        record,
        **dict.fromkeys(DETAILS),
        kernels=kernels,
        not_measured=record.not_measured | reasons,
    )
    return line if bare == record else _resealed(bare, line)


def _with_gap(line: bytes, dropped: DroppedSteps) -> bytes:
    record = _decoded(line)
    if record is None:
        return line
    steps = f"global steps {dropped.first_global_step} to {dropped.last_global_step}"
    gap = f"{DROPPED} to keep the file small: {dropped.num_steps} of {steps}; their sums are kept"
    return _resealed(msgspec.structs.replace(record, gap=gap), line)


def _add(dropped: DroppedSteps, line: bytes) -> None:
    record = _decoded(line)
    if record is not None:
        dropped.add(record)
