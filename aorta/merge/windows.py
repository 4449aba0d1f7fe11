"""At the end of a run, on every rank: compares the traces of profiled steps with the records.

`check_run` reads each trace and adds lines of the trace's source. Rank 0 adds coverage to run.json.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aorta.config.structs import ProfilingConfig
from aorta.errors import AortaError
from aorta.merge.lines import (
    Coverage,
    RankLines,
    append_lines,
    coverage_of,
    kernel_lines,
    read_lines,
    whole_steps,
)
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord, StepRecord
from aorta.records.writer import write_json
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

log = logging.getLogger(__name__)

_WINDOWS = "coverage.kernel_windows"
_NO_TRACE = "no trace of a step was written"
_SHOWN = 5
"""Leftovers listed per side and window; all of them are counted."""


class WindowCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How one trace fits to the records, for run.json."""

    trace: str
    steps: list[int]
    """Steps that the trace has whole; their records were compared."""
    num_matched: int
    num_records_without_kernel: int
    num_kernels_without_record: int
    leftovers: list[str]
    num_unknown_collectives: int
    """Communication kernels whose operation neither metadata nor names tell."""


def check_run(
    output_dir: str | Path,
    rank: int,
    traces: Iterable[Path],
    profiled_steps: Sequence[int] = (),
    settings: ProfilingConfig | None = None,
) -> list[WindowCheck]:
    """Read the windows of one rank back into its records; rank 0 adds the result to run.json.

    settings: of the profiler; by default those in run.json. A trace without GPU activity, or one that
    cannot be read, is one line in the log.
    """
    folder = Path(output_dir)
    checks: list[WindowCheck] = []
    faults: list[str] = []
    lines: RankLines | None = None
    for path in traces:
        try:
            trace = read_kineto(path)
            if lines is None:
                lines = read_lines(folder, rank)
            rows = whole_steps(trace, lines.steps)
            coverage = coverage_of(trace, rows)
            append_lines(lines, kernel_lines(trace, rows, coverage))
        except AortaError as error:
            log.info("rank %d: no check of %s against the records: %s", rank, path.name, error)
            faults.append(str(error))
            continue
        check = window_check(path.name, trace, rows, coverage)
        checks.append(check)
        _say(rank, check)
    if rank == 0:
        try:
            add_to_run(folder, checks, profiled_steps, faults, settings)
        except AortaError as error:  # a disk that was full, for instance: the training itself is done
            if checks or profiled_steps:
                log.warning("%s; nothing of the traces was added", error)
    return checks


def window_check(name: str, trace: RankTrace, rows: Sequence[StepRecord], coverage: Coverage) -> WindowCheck:
    lone_records, lone_kernels = coverage.records_without_kernel, coverage.kernels_without_record
    return WindowCheck(
        trace=name,
        steps=[row.global_step for row in rows],
        num_matched=len(coverage.matched),
        num_records_without_kernel=len(lone_records),
        num_kernels_without_record=len(lone_kernels),
        leftovers=lone_records[:_SHOWN] + lone_kernels[:_SHOWN],
        num_unknown_collectives=trace.quality.num_unknown_collectives,
    )


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


# -- what run.json says of it --------------------------------------------------------------------------


def add_to_run(
    folder: Path,
    checks: Sequence[WindowCheck],
    profiled_steps: Sequence[int] = (),
    faults: Sequence[str] = (),
    settings: ProfilingConfig | None = None,
) -> None:
    """Add coverage to run.json, or the reason for none; a failing disk is one line in the log.

    faults: reasons why existing traces could not be checked.
    """
    run = read_run(folder / "run.json")
    settings = _settings_of(run) if settings is None else settings
    why_none = None if checks else _why_no_window(settings, faults)
    if not (checks or profiled_steps or why_none):
        return
    if profiled_steps:
        run.coverage["profiled_steps"] = list(profiled_steps)
    if checks:
        windows: list[Any] = [msgspec.to_builtins(check) for check in checks]
        run.coverage["kernel_windows"] = windows
        run.not_measured.pop(_WINDOWS, None)
    elif why_none is not None:
        run.not_measured[_WINDOWS] = why_none
    try:
        write_json(folder / "run.json", run)
    except OSError as error:
        log.warning("cannot write %s: %s", folder / "run.json", error.strerror)


def _settings_of(run: RunRecord) -> ProfilingConfig | None:
    """The profiler's settings in run.json; None where a script's own `config` has something else."""
    try:
        return msgspec.convert((run.config or {}).get("profiling"), ProfilingConfig | None)
    except (msgspec.ValidationError, AttributeError):
        return None


def _why_no_window(settings: ProfilingConfig | None, faults: Sequence[str]) -> str | None:
    """The reason why no trace was checked; None where none was asked for."""
    if settings is None or not settings.enabled:
        return None
    return faults[0] if faults else _NO_TRACE
