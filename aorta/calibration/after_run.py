"""At the end of a run, on every rank: compares the traces of profiled steps with the records.

`check_run` reads each trace, adds lines of the trace's source, learns a calibration from the traced steps of
this rank and its peers (aorta.calibration.peers), and writes calibrated numbers into the lines of all other
steps. Rank 0 adds coverage and calibration to run.json.
"""

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aorta.calibration.kernel_lines import (
    Coverage,
    RankLines,
    append_lines,
    coverage_of,
    kernel_lines,
    read_lines,
    traced_steps,
    whole_steps,
)
from aorta.config import ProfilingConfig
from aorta.errors import NOT_JSON, AortaError
from aorta.files import open_regular, replacing
from aorta.record.profiler import step_of_kernels, why_no_kernels
from aorta.records.files import columns_name, steps_name
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord, StepRecord
from aorta.records.seal import seal_of, sealed
from aorta.records.writer import write_json
from aorta.steps.calibration import Calibration, Calibrator, TracedStep, calibrate
from aorta.timeline.types import OWN_SOURCES
from aorta.traces.kineto import read_kineto
from aorta.traces.model import RankTrace

log = logging.getLogger(__name__)

UNKNOWN_STATE = "the traced steps show too little of the state that this step was in"
"""Reason in the lines that the calibration cannot correct."""
_NAME = "overlap.calibrated"

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
    exchange: Callable[[list[TracedStep]], list[TracedStep]] | None = None,
    settings: ProfilingConfig | None = None,
) -> list[WindowCheck]:
    """Read the windows of one rank back into its records; rank 0 adds the result to run.json.

    exchange: takes this rank's traced steps and returns those of all ranks that calibrate together. It is
    called once even without traces, since the peers wait. settings: of the profiler; by default those in
    run.json. A trace without GPU activity, or one that cannot be read, is one line in the log.
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


# -- calibrated numbers in the lines of other steps ----------------------------------------------------


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


def calibrate_lines(
    output_dir: Path | str, rank: int, calibration: Calibration, traced: Container[int]
) -> int:
    """Write calibrated numbers into the rank's lines of source events; the number of lines that have them.

    traced: steps that the calibration learned from or that a profiler slowed: they get none. The file is
    replaced whole or not at all, and every other line stays as it is, byte by byte. A failing disk is one
    line in the log.
    """
    path = Path(output_dir) / steps_name(rank)
    num_calibrated = 0
    try:
        with open_regular(path) as old, replacing(path) as new:
            for line, has_numbers in _lines(old, Calibrator(calibration), traced):
                new.write(line)
                num_calibrated += has_numbers
        path.with_name(columns_name(rank)).unlink(missing_ok=True)  # columns of the old lines
    except OSError as error:
        log.warning("rank %d: no calibrated numbers in %s: %s", rank, path, error.strerror)
        return 0
    return num_calibrated


def _lines(
    lines: Iterator[bytes], calibrator: Calibrator, traced: Container[int]
) -> Iterator[tuple[bytes, bool]]:
    """(line, has calibrated numbers) for each line; changed lines keep their number and get a new seal."""
    decoder, encoder = msgspec.json.Decoder(StepRecord), msgspec.json.Encoder()
    reaching: list[tuple[float, float]] = []
    """Communication of earlier steps that goes on, in ns of Unix time."""
    for line in lines:
        try:
            record = decoder.decode(line)
        except NOT_JSON:  # cut short, or of another version: not ours to judge
            yield line, False
            continue
        seal = seal_of(line)
        if record.source != "events" or (seal is not None and not seal.is_whole):
            yield line, False
            continue
        new, reaching = _calibrated(record, calibrator, reaching, record.global_step in traced)
        body = encoder.encode(new)
        yield body + b"\n" if seal is None else sealed(body, seal.number), new.overlap.calibrated is not None


def _calibrated(
    record: StepRecord, calibrator: Calibrator, reaching: list[tuple[float, float]], is_traced: bool
) -> tuple[StepRecord, list[tuple[float, float]]]:
    """The record with calibrated numbers, and the communication that reaches beyond its window."""
    reaching = [span for span in reaching if span[1] > record.start_unix_ns]
    not_measured = {name: reason for name, reason in record.not_measured.items() if name != _NAME}
    calibrated = None
    if not is_traced:
        carried = (np.array(reaching, dtype=np.float64).reshape(-1, 2) - record.start_unix_ns) / 1e6
        calibrated = calibrator.apply(record, carried)
        if calibrated is None and record.collectives is not None and record.overlap.comm_ms is not None:
            not_measured[_NAME] = UNKNOWN_STATE
    reaching += _beyond(record)
    overlap = msgspec.structs.replace(record.overlap, calibrated=calibrated)
    return msgspec.structs.replace(record, overlap=overlap, not_measured=not_measured), reaching


def _beyond(record: StepRecord) -> list[tuple[float, float]]:
    """Communication of the step that ended after its window, in ns of Unix time."""
    return [
        (record.start_unix_ns + call.start_ms * 1e6, record.start_unix_ns + call.end_ms * 1e6)
        for call in record.collectives or ()
        if len(call.ranks) > 1 and call.start_ms is not None and call.end_ms is not None
        if record.step_ms is not None and call.end_ms > record.step_ms
    ]


# -- what run.json says of it --------------------------------------------------------------------------


def add_to_run(
    folder: Path,
    checks: Sequence[WindowCheck],
    calibration: Calibration | None,
    profiled_steps: Sequence[int] = (),
    faults: Sequence[str] = (),
    settings: ProfilingConfig | None = None,
) -> None:
    """Add coverage and calibration to run.json, or the reason for none; a failing disk is one line in the
    log.

    faults: reasons why existing traces could not be checked.
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
    """The profiler's settings in run.json; None where a script's own `config` has something else."""
    try:
        return msgspec.convert((run.config or {}).get("profiling"), ProfilingConfig | None)
    except (msgspec.ValidationError, AttributeError):
        return None


def _why_no_window(settings: ProfilingConfig | None, faults: Sequence[str]) -> str | None:
    """The reason why no trace was checked; None where none was asked for."""
    if settings is None or not (settings.enabled or settings.kernels_every):
        return None
    return why_no_kernels(settings) or (faults[0] if faults else _NO_TRACE)
