"""Keeps what runs of a series differ by, for later comparisons of single runs."""

from pathlib import Path

from aorta.account.judge import spreads
from aorta.errors import AortaError
from aorta.records.reader import read_run
from aorta.sweep.series import STEP, Series


def note_spread(series: Series, folder: Path) -> None:
    """The spread of the step time, where the series has it, of the program that its runs recorded."""
    found = series.run_spread(STEP)
    if found is None:
        return
    for place in sorted(folder.glob("round-*")):
        try:
            run = read_run(place)
        except AortaError:
            continue
        spreads.note_spread(run, *found)
        return
