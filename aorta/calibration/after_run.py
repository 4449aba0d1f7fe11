"""After a run: what its profiled steps' kernels say, beside what its records say.

Each rank adds the kernels' numbers of those steps to its file, as lines of source kineto, and calibrates its
own lines of all other steps by them. Into run.json go the steps that the profiler disturbed
(coverage.profiled_steps), whether every communication kernel of the windows has exactly one record
(coverage.kernel_windows), and by how much event numbers differ from the kernels' (calibration); these three
are of rank 0. A run that asked for traces and has no such window says why in not_measured.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aorta.calibration.apply import calibrate_lines
from aorta.calibration.coverage import Coverage, traced_steps
from aorta.calibration.kernel_lines import (
    RankLines,
    append_lines,
    coverage_of,
    kernel_lines,
    read_lines,
    whole_steps,
)
from aorta.config import ProfilingConfig
from aorta.errors import AortaError
from aorta.profiling.window import step_of_kernels, why_no_kernels
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord, StepRecord
from aorta.records.writer import write_json
from aorta.steps.calibration import Calibration, TracedStep, calibrate
from aorta.timeline.types import OWN_SOURCES
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

log = logging.getLogger(__name__)

_WINDOWS = "coverage.kernel_windows"
_NO_TRACE = "no trace of a step was written"
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


def check_run(
    output_dir: str | Path,
    rank: int,
    traces: Iterable[Path],
    profiled_steps: Sequence[int] = (),
    exchange: Callable[[list[TracedStep]], list[TracedStep]] | None = None,
    settings: ProfilingConfig | None = None,
) -> list[WindowCheck]:
    """Read the windows of one rank back into its records; rank 0 adds the result to run.json.

    exchange: gives a rank's traced steps and returns those of the ranks that calibrate together; it is
    called once, whatever became of the traces. settings: what was asked of the profiler, by default what the
    run's own config says. A trace without GPU activity, or one that cannot be read, is one line in the log.
    """
    folder = Path(output_dir)
    checks: list[WindowCheck] = []
    faults: list[str] = []
    traced: list[TracedStep] = []
    lines: RankLines | None = None
    for path in traces:
        try:
            trace = read_kineto(path)
            if lines is None:
                lines = read_lines(folder, rank)
            rows = _rows(path, trace, lines)
            coverage = coverage_of(trace, rows)
            append_lines(lines, kernel_lines(trace, rows, coverage))
        except AortaError as error:
            log.info("rank %d: no check of %s against the records: %s", rank, path.name, error)
            faults.append(str(error))
            continue
        check = window_check(path.name, trace, rows, coverage)
        checks.append(check)
        traced += traced_steps([row for row in rows if row.source == "events"], trace, coverage)
        _say(rank, check)
    calibration = calibrate(traced if exchange is None else exchange(traced), rank)
    if calibration is not None:
        apply_calibration(folder, rank, calibration, lines, profiled_steps)
    if rank == 0:
        try:
            add_to_run(folder, checks, calibration, profiled_steps, faults, settings)
        except AortaError as error:  # a disk that was full, for instance: the training itself is done
            if checks or profiled_steps:
                log.warning("%s; nothing of the traces was added", error)
    return checks


def apply_calibration(
    folder: Path,
    rank: int,
    calibration: Calibration,
    lines: RankLines | None,
    profiled_steps: Iterable[int],
) -> None:
    """Calibrate the rank's lines of steps that no profiler touched."""
    traced = set(profiled_steps)
    if lines is not None:
        traced |= {step for step, source in lines.present if source not in OWN_SOURCES}
    num_lines = calibrate_lines(folder, rank, calibration, traced)
    shift_ms = calibration.start_shift_ms()
    if rank == 0 and num_lines and shift_ms is not None:
        log.info(
            "calibration: in the traced steps kernels of collectives began %.3f ms after their records, on "
            "average; %d other steps have calibrated numbers",
            shift_ms,
            num_lines,
        )


def _rows(path: Path, trace: RankTrace, lines: RankLines) -> list[StepRecord]:
    step = step_of_kernels(path)
    if step is None:
        return whole_steps(trace, lines.steps)
    return [lines.steps[step]] if step in lines.steps else []


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


def add_to_run(
    folder: Path,
    checks: Sequence[WindowCheck],
    calibration: Calibration | None,
    profiled_steps: Sequence[int] = (),
    faults: Sequence[str] = (),
    settings: ProfilingConfig | None = None,
) -> None:
    """Add what the kernels say to run.json, or why they say nothing; a failing disk is one line in the log.

    faults: why traces that there are could not be checked.
    """
    run = read_run(folder / "run.json")
    settings = _settings_of(run) if settings is None else settings
    why_none = None if checks else _why_no_window(settings, faults)
    if not (checks or profiled_steps or why_none or calibration):
        return
    if profiled_steps:
        run.coverage["profiled_steps"] = list(profiled_steps)
    if checks:
        windows: list[Any] = [msgspec.to_builtins(check) for check in checks]
        run.coverage["kernel_windows"] = windows
        run.not_measured.pop(_WINDOWS, None)
    elif why_none is not None:
        run.not_measured[_WINDOWS] = why_none
    if calibration is not None:
        run.calibration = msgspec.to_builtins(calibration)
    try:
        write_json(folder / "run.json", run)
    except OSError as error:
        log.warning("cannot write %s: %s", folder / "run.json", error.strerror)


def _settings_of(run: RunRecord) -> ProfilingConfig | None:
    """Those of train.py; a script's own `config` may have anything under this name."""
    try:
        return msgspec.convert((run.config or {}).get("profiling"), ProfilingConfig | None)
    except (msgspec.ValidationError, AttributeError):
        return None


def _why_no_window(settings: ProfilingConfig | None, faults: Sequence[str]) -> str | None:
    """None where none was asked for."""
    if settings is None or not (settings.enabled or settings.kernels_every):
        return None
    return why_no_kernels(settings) or (faults[0] if faults else _NO_TRACE)
