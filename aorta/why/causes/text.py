"""Causes in words, for the terminal."""

import textwrap
from collections.abc import Sequence

from aorta.account.cause import Cause, CodeLine
from aorta.account.judge.profiles import DOING_WORDS
from aorta.account.numbers import counted, percent

WIDTH = 100


def cause_lines(causes: Sequence[Cause]) -> list[str]:
    """Each cause under its number: headline, evidence, place, change and check."""
    lines: list[str] = []
    for place, cause in enumerate(causes, start=1):
        lines += ["", f"{place}. {cause.headline}"]
        for name, text in (
            *(("", sentence) for sentence in cause.evidence),
            ("look at", cause.place),
            ("change", cause.change),
            ("check", cause.check),
        ):
            if text:
                lines += wrapped(f"{name}: {text}" if name else text)
    return lines


def seen_text(line: CodeLine) -> str:
    """'31 of 33 samples of it are in augment(), train.py:5 (asleep in sleep of time), called from ...'."""
    calls = f" in {line.calls}" if line.calls else ""
    caller = f", called from {line.caller}" if line.caller else ""
    return (
        f"{percent(line.part)} of it was sampled in {line.text} ({counted(line.num_samples, 'sample')}; the"
        f" thread {DOING_WORDS[line.doing]}{calls}){caller}"
    )


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph below a cause, indented."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="   ", subsequent_indent="     ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
