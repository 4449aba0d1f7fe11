"""Thousands of steps through what writes them; benchmarks/reliability/long_run.py writes a million."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from reliability.long_run import faults, long_run


def test_files_stay_bounded_and_totals_right(tmp_path: Path) -> None:
    written = long_run(tmp_path, 6000, 1 << 20)
    rows = [row | {"resident_mb": 1.0} for row in written.rows]  # of this process, which other tests share
    assert faults(written._replace(rows=rows), 6000, 1 << 20) == []
    assert len(rows) == 10


def test_what_does_not_hold_is_named(tmp_path: Path) -> None:
    written = long_run(tmp_path, 2000, 1 << 20)
    grown = [row | {"resident_mb": 100.0 + 10 * place} for place, row in enumerate(written.rows)]
    assert faults(written._replace(rows=grown, num_read=1999), 2000, 1 << 20) == [
        "memory grows",
        "1999 steps are read",
    ]
