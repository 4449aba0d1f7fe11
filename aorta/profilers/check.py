"""After a run: do its records say what the kernels of its profiled steps say?

Two things go into run.json: whether every communication kernel of the windows has exactly one
record (coverage.kernel_windows), and by how much event numbers differ from the kernels'
(calibration). Both are of this rank.
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError
from aorta.recording.coverage import match_kernels
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.records.writer import steps_name, write_json
from aorta.resolve.calibration import calibrate
from aorta.timeline.overlap import overlap
from aorta.timeline.types import OverlapRecord
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

log = logging.getLogger(__name__)

_SHOWN = 5
"""Leftovers listed per side and window; all of them are counted."""


class WindowCheck(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    steps: list[int]
    """Steps that the trace has whole and whose records were compared."""
    num_matched: int
    num_records_without_kernel: int
    num_kernels_without_record: int
    leftovers: list[str]
    num_unknown_collectives: int
    """Communication kernels whose operation neither metadata nor names tell."""


def check_run(output_dir: str | Path, rank: int, traces: Iterable[Path]) -> list[WindowCheck]:
    """Compare the windows of one rank with its records; rank 0 adds the result to run.json.

    A trace without GPU activity, or one that cannot be read, is one line in the log.
    """
    folder = Path(output_dir)
    checks: list[WindowCheck] = []
    pairs: list[tuple[int, OverlapRecord, OverlapRecord]] = []
    records: dict[int, StepRecord] | None = None
    for path in traces:
        try:
            trace = read_kineto(path)
            if records is None:
                records = {r.global_step: r for r in read_steps(folder / steps_name(rank))}
        except AortaError as error:
            log.info("rank %d: no check of %s against the records: %s", rank, path.name, error)
            continue
        check, compared = _check(path, trace, records)
        checks.append(check)
        pairs += compared
        _say(rank, check)
    if rank == 0 and checks:
        _add_to_run(folder, checks, pairs)
    return checks


def _check(
    path: Path, trace: RankTrace, records: dict[int, StepRecord]
) -> tuple[WindowCheck, list[tuple[int, OverlapRecord, OverlapRecord]]]:
    # The last step's kernels may not all have run when the trace ended.
    whole = [t.step for t in trace.steps[:-1] if t.step not in trace.quality.truncated_steps]
    rows = [records[step] for step in whole if step is not None and step in records]
    coverage = match_kernels(rows, trace)
    lone_records, lone_kernels = coverage.records_without_kernel, coverage.kernels_without_record
    check = WindowCheck(
        trace=path.name,
        steps=[row.global_step for row in rows],
        num_matched=len(coverage.matched),
        num_records_without_kernel=len(lone_records),
        num_kernels_without_record=len(lone_kernels),
        leftovers=lone_records[:_SHOWN] + lone_kernels[:_SHOWN],
        num_unknown_collectives=trace.quality.num_unknown_collectives,
    )
    pairs = [
        (row.global_step, row.overlap, overlap(trace.window(row.start_unix_ns, _end_unix_ns(row))))
        for row in rows
        if row.source == "events"
    ]
    return check, pairs


def _end_unix_ns(row: StepRecord) -> int:
    return row.start_unix_ns + int((row.step_ms or 0.0) * 1e6)


def _say(rank: int, check: WindowCheck) -> None:
    if check.num_records_without_kernel or check.num_kernels_without_record:
        log.warning(
            "rank %d: in %s %d communication kernels have no record and %d records no kernel: %s",
            rank,
            check.trace,
            check.num_kernels_without_record,
            check.num_records_without_kernel,
            "; ".join(check.leftovers),
        )


def _add_to_run(
    folder: Path, checks: list[WindowCheck], pairs: list[tuple[int, OverlapRecord, OverlapRecord]]
) -> None:
    run = read_run(folder / "run.json")
    windows: list[Any] = [msgspec.to_builtins(check) for check in checks]
    run.coverage["kernel_windows"] = windows
    calibration = calibrate(pairs)
    if calibration is not None:
        run.calibration = msgspec.to_builtins(calibration)
    try:
        write_json(folder / "run.json", run)
    except OSError as error:
        log.warning("cannot write %s: %s", folder / "run.json", error.strerror)
