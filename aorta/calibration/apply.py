"""Calibrated numbers in a run's own lines, once the kernels of some of its steps are known."""

import logging
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec
import numpy as np

from aorta.files import replacing
from aorta.records.files import columns_name, steps_name
from aorta.records.schema import StepRecord
from aorta.records.seal import seal_of, sealed
from aorta.steps.calibration import Calibration, Calibrator

log = logging.getLogger(__name__)

UNKNOWN_STATE = "the traced steps show too little of the state that this step was in"
_NAME = "overlap.calibrated"


def calibrate_lines(
    output_dir: Path | str, rank: int, calibration: Calibration, traced: Container[int]
) -> int:
    """Give the rank's lines of source events their calibrated numbers; how many lines have them now.

    traced: global steps that the calibration knows or that a profiler slowed; they get none. The file is
    replaced whole or not at all, and every other line stays as it is, byte by byte. A failing disk is one
    line in the log.
    """
    path = Path(output_dir) / steps_name(rank)
    num_calibrated = 0
    try:
        with open(path, "rb") as old, replacing(path) as new:
            for line, has_numbers in _lines(old, Calibrator(calibration), traced):
                new.write(line)
                num_calibrated += has_numbers
        path.with_name(columns_name(rank)).unlink(missing_ok=True)  # of the lines as they were
    except OSError as error:
        log.warning("rank %d: no calibrated numbers in %s: %s", rank, path, error.strerror)
        return 0
    return num_calibrated


def _lines(
    lines: Iterator[bytes], calibrator: Calibrator, traced: Container[int]
) -> Iterator[tuple[bytes, bool]]:
    """Each line, new where it changes, and whether it has calibrated numbers of these."""
    decoder, encoder = msgspec.json.Decoder(StepRecord), msgspec.json.Encoder()
    reaching: list[tuple[float, float]] = []
    """Communication of earlier steps that goes on, in ns of Unix time."""
    for line in lines:
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError:  # cut short, or of another version: not ours to judge
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
    """The record with its numbers, and what reaches beyond its window."""
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
