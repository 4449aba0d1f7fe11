"""What a line leaves out because an earlier one of its file has told it, or because its sums give it.

A line with details is whole. The others, which are most of a long run, have the sums of their step, and of
what seldom changes (reasons, memory, the sample of the device) what differs from the lines before them.
Readers hold the last value: aorta.account.load.rank.telemetry.
"""

from typing import Any

import msgspec

from aorta.records.packed import packed
from aorta.records.schema import HostSpan, StepRecord

_FOLLOWS = dict.fromkeys(
    ("overlap_ratio", "hidden_per_compute", "compute_allreduce_ms", "compute_reducescatter_ms")
)
"""Fields of overlap that other sums of the line give."""

REPEATED = ("optimizer", "synchronisation")
"""Kinds of host spans that step after step has, at the same places of the program."""


class Told:
    """What the lines of one file have told, as they are written."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._parts: dict[str, Any] = {"memory": None, "device": None}

    def rest_of(self, record: StepRecord) -> StepRecord:
        """Return the record as its line has it."""
        parts = {name: getattr(record, name) for name in self._parts}
        if record.collectives is not None or record.active_segments is not None:
            self._reasons, self._parts = record.not_measured, parts
            return record
        told, known = self._reasons, self._parts
        self._reasons = told | record.not_measured
        self._parts = {name: known[name] if part is None else part for name, part in parts.items()}
        spans = record.host_spans
        rest = msgspec.structs.replace(
            record,
            not_measured={name: why for name, why in record.not_measured.items() if told.get(name) != why},
            streams={},
            modules=[],
            overlap=msgspec.structs.replace(record.overlap, **_FOLLOWS),
            host_spans=spans and [*map(_without_place, spans)],
            **{name: None if part == known[name] else part for name, part in parts.items()},
        )
        return packed(rest) if record.is_recorded else rest


def _without_place(span: HostSpan) -> HostSpan:
    return msgspec.structs.replace(span, where="") if span.kind in REPEATED and span.where else span
