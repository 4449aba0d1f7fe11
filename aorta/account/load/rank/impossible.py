"""Records that no run writes: refused with their step."""

from pathlib import Path

from aorta.errors import RecordError
from aorta.records.schema import Source
from aorta.records.table import LineTable, do_integers_fit

MOST_MS = 2.0**53
TOO_LARGE = "a time or a size that 64 bits cannot hold"


def check_block(path: Path, block: LineTable) -> None:
    """Raises RecordError for sizes that do not fit, and for errors of a clock that are none."""
    clock_error_us = block.numbers("clock_error_us")
    is_clock_plain = clock_error_us is None or ((clock_error_us >= 0) & (clock_error_us < MOST_MS)).all()
    if is_clock_plain and do_integers_fit(block):
        return
    for record in block.records:
        key = (record.source, record.global_step)
        if not do_integers_fit(LineTable([record])):
            raise impossible_record(path, key)
        if not 0 <= (record.clock_error_us or 0.0) < MOST_MS:
            raise impossible_record(path, key, f"clock_error_us of {record.clock_error_us:g}")


def impossible_record(path: Path, key: tuple[Source, int] | None, problem: str = TOO_LARGE) -> RecordError:
    """key: source and global step."""
    of_step = "" if key is None else f" of global step {key[1]}"
    return RecordError(f"{path}: impossible record{of_step}: {problem}")
