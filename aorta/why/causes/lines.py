"""Causes as plain data for reports, which know nothing of how they are found."""

import msgspec

from aorta.account.model import CauseLine, Causes, Dataset
from aorta.why.causes.rank import explanation_of
from aorta.why.causes.run_text import notes, nothing_text, title
from aorta.why.causes.text import headline, place_text
from aorta.why.causes.whatifs import whatifs_of


def causes_lines(dataset: Dataset) -> Causes:
    """Of the dataset's first run."""
    explained = explanation_of(dataset.first, str(dataset.first.run.path))
    lines = [
        CauseLine(
            headline=headline(cause),
            evidence=cause.evidence,
            place=place_text(cause),
            change=cause.change,
            check=cause.check,
            rank=cause.rank,
            global_step=cause.global_step,
            at_ms=cause.at_ms,
            data=msgspec.to_builtins(cause),
        )
        for cause in explained.causes
    ]
    return Causes(
        lines,
        nothing_text(dataset, explained),
        whatifs_of(dataset),
        title(dataset),
        notes(explained, dataset.first),
        explained.unexplained_ms,
    )
