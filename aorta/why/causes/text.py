"""Causes in words, for the terminal."""

import textwrap
from collections.abc import Sequence

from aorta.account.judge.profiles import DOING_WORDS
from aorta.account.judge.stacks import CodeLine
from aorta.account.numbers import counted, number, percent, quantity
from aorta.why.causes.cause import Cause

WIDTH = 100


def cause_lines(causes: Sequence[Cause]) -> list[str]:
    """Each cause under its number: headline, evidence, place, change and check."""
    lines: list[str] = []
    for place, cause in enumerate(causes, start=1):
        lines += ["", f"{place}. {headline(cause)}"]
        for name, text in (
            *(("", sentence) for sentence in cause.evidence),
            ("look at", place_text(cause)),
            ("change", cause.change),
            ("check", cause.check),
        ):
            if text:
                lines += wrapped(f"{name}: {text}" if name else text)
    return lines


def headline(cause: Cause) -> str:
    """'data loading on rank 1: 20.1 ms a step, 38 % [19, 21]; without it {what} takes at least 32.8 ms'."""
    if cause.ms <= 0:
        return f"{cause.subject}: {cause.why_no_interval or 'no time is lost yet'}"
    of_what = "of the trace" if cause.is_of_trace else "a step" if cause.is_in_step else "for each step"
    what = "the trace" if cause.is_of_trace else "a step"
    of_run = "" if cause.is_in_step else " of the run"
    text = f"{cause.subject}: {number(cause.ms)} ms {of_what}, {percent(cause.share)}{of_run}"
    if cause.interval_ms is not None:
        text += f" [{number(cause.interval_ms[0])}, {number(cause.interval_ms[1])}]"
    if cause.bound_ms is not None:
        text += f"; without it {what} takes at least {quantity(cause.bound_ms, 'ms')}"
    return text


def place_text(cause: Cause) -> str:
    """'rank 1, step 12'; '' where no place stands for it."""
    parts = [f"rank {cause.rank}"] if cause.rank is not None else []
    parts += [f"step {cause.global_step}"] if cause.global_step is not None else []
    if cause.at_ms is not None:
        parts.append(f"{number(cause.at_ms[0])} to {number(cause.at_ms[1])} ms")
    return ", ".join(parts)


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
