"""Causes in words, for the terminal."""

import textwrap
from collections.abc import Sequence

import numpy as np

from aorta.causes.cause import Cause
from aorta.report.judge.leading import source_text
from aorta.report.load.measures import peak_text
from aorta.report.load.rank.host import READY
from aorta.report.model import Dataset, JudgedRun
from aorta.report.numbers import counted, number, percent, quantity

WIDTH = 100
BUSY = 0.2
"""Part of the step without a core, from which on it is said."""


def causes_text(causes: Sequence[Cause], dataset: Dataset) -> str:
    """The step, then its causes with evidence, change and check."""
    judged = dataset.first
    step = dataset.statistics["step_ms"].median
    title = (
        f"{dataset.label}: a step takes {quantity(step, 'ms')}"
        f" ({judged.num_steps} judged, {counted(len(judged.run.ranks), 'rank')},"
        f" source: {source_text(dataset)})"
    )
    if not causes:
        return f"{title}\n\n{nothing_text(dataset)}"
    return "\n".join([title, *cause_lines(causes)])


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
    """'data loading on rank 1: 20.1 ms of the step, 38 % [19.0, 21.2]; 32.8 ms without it'."""
    if cause.ms <= 0:
        return f"{cause.subject}: {cause.why_no_interval or 'no time is lost yet'}"
    text = f"{cause.subject}: {number(cause.ms)} ms a step, {percent(cause.share)}"
    if cause.interval_ms is not None:
        text += f" [{number(cause.interval_ms[0])}, {number(cause.interval_ms[1])}]"
    if cause.bound_ms is not None:
        text += f"; at best {quantity(cause.bound_ms, 'ms')} without it"
    return text


def place_text(cause: Cause) -> str:
    """'rank 1, step 12'; '' where no place stands for it."""
    parts = [f"rank {cause.rank}"] if cause.rank is not None else []
    parts += [f"step {cause.global_step}"] if cause.global_step is not None else []
    if cause.at_ms is not None:
        parts.append(f"{number(cause.at_ms[0])} to {number(cause.at_ms[1])} ms")
    return ", ".join(parts)


def nothing_text(dataset: Dataset) -> str:
    """That nothing is worth changing, with what the step does reach, as far as it is known."""
    statistics = dataset.statistics
    text = "Nothing worth changing in these records: no loss is large enough to name."
    shares = []
    for words, metric in (
        ("hidden", "overlap_ratio"),
        ("exposed", "exposed_per_step"),
        ("idle", "idle_per_step"),
    ):
        statistic = statistics.get(metric)
        if statistic is not None and statistic.median is not None and np.isfinite(statistic.median):
            base = "of communication" if words == "hidden" else "of the step"
            shares.append(f"{percent(statistic.median)} {base} is {words}")
    text += f" {'; '.join(shares)}." if shares else ""
    text += _busy_text(dataset.first)
    mfu, rate = (statistics.get(name) for name in ("mfu", "model_tflops_per_gpu"))
    if mfu is not None and mfu.median is not None and rate is not None:
        text += (
            f" Roofline: {number(rate.median)} TFLOP/s per GPU, {percent(mfu.median)} of"
            f" {peak_text(dataset.first.run.run)}; what is left is in the kernels."
        )
    else:
        text += " Roofline: not known (flops_per_token or the device's peak is not in run.json)."
    return "\n".join(textwrap.wrap(text, WIDTH))


def _busy_text(judged: JudgedRun) -> str:
    """' Other programs had the cores ...', where that is much of the step; else ''."""
    ready = judged.run.host_parts.get(READY)
    if ready is None or not judged.num_steps:
        return ""
    part = float(
        np.nan_to_num(np.nanmean(ready[:, judged.num_warmup :]) / np.nanmean(judged.values("step_ms")))
    )
    if part < BUSY:
        return ""
    return (
        f" The host is busy: for {percent(part)} of the step the threads that train were ready to run, and"
        " other threads or programs had the cores."
    )


def wrapped(text: str) -> list[str]:
    """Lines of a paragraph below a cause, indented."""
    return textwrap.wrap(
        text, WIDTH, initial_indent="   ", subsequent_indent="     ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
