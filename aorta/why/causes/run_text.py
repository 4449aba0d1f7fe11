"""A run's causes in words, for the terminal; what it reaches where there are none."""

import textwrap
from collections.abc import Sequence

import numpy as np

from aorta.account.judge.leading import source_text
from aorta.account.load.measures import peak_text
from aorta.account.load.rank.host import READY
from aorta.account.model import Dataset, JudgedRun
from aorta.account.numbers import counted, number, percent, quantity
from aorta.why.causes.cause import Cause
from aorta.why.causes.text import WIDTH, cause_lines

BUSY = 0.2
"""Part of the step without a core, from which on it is said."""


def causes_text(causes: Sequence[Cause], dataset: Dataset) -> str:
    """The step, then its causes with evidence, change and check."""
    judged = dataset.first
    step = dataset.statistics["step_ms"].median
    title = (
        f"{dataset.label}: a step takes {quantity(step, 'ms')}"
        f" ({judged.num_steps} judged steps, {counted(len(judged.run.ranks), 'rank')},"
        f" source: {source_text(dataset)})"
    )
    if not causes:
        return f"{title}\n\n{nothing_text(dataset)}"
    return "\n".join([title, *cause_lines(causes)])


def nothing_text(dataset: Dataset) -> str:
    """That nothing is worth changing, with what the step does reach, as far as it is known."""
    statistics = dataset.statistics
    text = "Nothing worth changing: no single loss is large enough to name."
    shares = []
    for words, metric in (
        ("hidden", "overlap_ratio"),
        ("exposed communication", "exposed_per_step"),
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
            f" {peak_text(dataset.first.run.run)}; the rest is in the kernels."
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
        f" The host is overloaded: for {percent(part)} of the step the training threads were ready to run,"
        " but other threads or programs had the cores."
    )
