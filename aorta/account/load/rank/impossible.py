"""Records that no run writes: refused with the place of the line."""

from pathlib import Path

import msgspec

from aorta.errors import NOT_JSON, RecordError
from aorta.files import open_regular
from aorta.records.files import STEPS_FILE
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
    if key is None:
        return RecordError(f"{path}: impossible record: {problem}")
    line = _line_of(path, key)
    position = path if line is None else f"{path}:{line}"
    return RecordError(f"{position}: impossible record of global step {key[1]}: {problem}")


class _Key(msgspec.Struct):
    source: str
    global_step: int


def _line_of(path: Path, key: tuple[Source, int]) -> int | None:
    """Looked for only where it is to be named; None where records are not lines of a file, but of a trace."""
    if STEPS_FILE.fullmatch(path.name) is None:
        return None
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    line_key = msgspec.json.decode(line, type=_Key)
                    if (line_key.source, line_key.global_step) == key:
                        return number
    except (OSError, *NOT_JSON):
        pass
    return None
