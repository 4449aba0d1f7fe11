"""A run's account and causes in words; what it reaches where there are none."""

import textwrap

import numpy as np

from aorta.account.judge.alike import is_window
from aorta.account.judge.answer import losses, losses_text
from aorta.account.judge.cells import CELLS, LARGE_SHARE, Account, account_of
from aorta.account.judge.kernels import kernels_by_class
from aorta.account.judge.outside import OUTSIDE_WORDS
from aorta.account.judge.phases import evaluation_text, largest_beside_the_model, largest_text, phases_of
from aorta.account.judge.profiles import line_text, told_differences
from aorta.account.judge.sites import sites_of
from aorta.account.load.measures import peak_text
from aorta.account.model import Causes, Dataset, Run
from aorta.account.numbers import counted, number, percent, quantity
from aorta.timeline.statistics import MIN_STEPS
from aorta.why.causes.rank import Explanation, explanation_of
from aorta.why.causes.text import WIDTH, cause_lines, wrapped
from aorta.why.causes.whatifs import whatifs_of

LARGE_LOSS = 0.15
"""Part of the step, from which on a cell is no small loss, though no cause takes it."""
WORTH_NOTING = 0.02
"""Part of the step, from which on what no cause explains is said."""
LEAST_NAMED = 0.005
NOTHING = "Nothing worth changing: no single loss is large enough to name."
MOST_NAMED = 3
MOST_SITES = 6
MOST_LINES = 4
"""Of a difference of stacks."""


def causes_of(dataset: Dataset) -> Causes:
    """Of the dataset's first run."""
    explained = explanation_of(dataset.first, str(dataset.first.path))
    return Causes(
        explained.causes,
        nothing_text(dataset, explained),
        whatifs_of(dataset),
        title(dataset),
        notes(explained, dataset.first),
        explained.unexplained_ms,
    )


def title(dataset: Dataset) -> str:
    """'RUN: a step takes 138 ms (mean of 60 judged steps, 2 ranks, source: host)'; of the first run, where
    there are several."""
    account = account_of(dataset.first)
    num_steps = account.step_ms.shape[1]
    steps = counted(num_steps, "judged step")
    if num_steps < account.num_judged:
        steps = f"{num_steps:,} of {counted(account.num_judged, 'judged step')}{_all_steps(dataset, account)}"
    ranks = counted(len(account.ranks), "rank")
    if not account.mean_step_ms > 0:
        source = dataset.source
        return f"{dataset.label}: the length of a step was not measured ({ranks}, source: {source})"
    if is_window(dataset):
        return (
            f"{dataset.label}: the whole trace takes {quantity(account.mean_step_ms, 'ms')}; it marks no"
            f" steps ({ranks}, source: {dataset.source})"
        )
    own = ""
    if account.share("instrument") >= LARGE_SHARE:
        own = f", {quantity(account.mean_ms('instrument'), 'ms')} of it aorta itself"
    elif account.share("first_steps") >= LARGE_SHARE:
        more = quantity(account.mean_ms("first_steps"), "ms")
        own = f", {more} of it longer first steps"
    return (
        f"{dataset.label}: a step takes {quantity(account.mean_step_ms, 'ms')}{own}"
        f" (mean of {steps}, {ranks}, source: {dataset.source})"
    )


def _all_steps(dataset: Dataset, account: Account) -> str:
    """The mean of all judged steps, where those of the account took clearly longer or shorter."""
    mean_ms = float(np.mean(dataset.first.values("step_ms")))
    if not abs(mean_ms - account.mean_step_ms) > LARGE_SHARE * account.mean_step_ms > 0:
        return ""
    return f", all {account.num_judged:,}: {quantity(mean_ms, 'ms')}"


def causes_text(explained: Explanation, dataset: Dataset) -> str:
    """The step, then its causes with evidence, change and check."""
    lines = [title(dataset)]
    for text in dataset.first.story:
        lines += wrapped(text)
    if explained.causes:
        lines += cause_lines(explained.causes)
    else:
        lines += ["", *textwrap.wrap(nothing_text(dataset, explained), WIDTH)]
    for note in notes(explained, dataset.first):
        lines += ["", *textwrap.wrap(note, WIDTH)]
    for difference in told_differences(dataset.first, late_rank(explained)):
        lines += ["", f"Sampled, ms of a step: {difference.title}."]
        for line in difference.lines[:MOST_LINES]:
            lines += wrapped(line_text(line))
    if sites := sites_of(dataset.first):
        lines += ["", "Collectives of a rank by the line that issues them, those that move most first."]
        for row in sites[:MOST_SITES]:
            lines += wrapped(row.text)
    return "\n".join(lines)


def late_rank(explained: Explanation) -> int | None:
    """The rank that the others wait for most."""
    return next((cause.rank for cause in explained.causes if cause.is_waited_for), None)


def notes(explained: Explanation, judged: Run) -> list[str]:
    """What cannot be told, the largest phase, evaluations, what no cause explains, what is in no step."""
    unexplained = _unexplained_text(explained) if explained.causes else ""
    texts = (largest_text(judged), evaluation_text(judged), unexplained, _outside_text(explained.account))
    return [*explained.cannot_tell, *(text for text in texts if text)]


def _unexplained_text(explained: Explanation) -> str:
    step = explained.account.mean_step_ms
    total = sum(explained.unexplained_ms.values())
    if total < WORTH_NOTING * step:
        return ""
    largest = list(explained.unexplained_ms.items())[:MOST_NAMED]
    parts = [f"{CELLS[name].title} {number(ms)}" for name, ms in largest if ms >= LEAST_NAMED * step]
    a_step = "" if explained.causes[0].is_of_trace else " a step"
    return f"Not explained by these: {quantity(total, 'ms')}{a_step} without compute ({', '.join(parts)})."


def _outside_text(account: Account) -> str:
    wall = account.wall_ms
    outside = {name: ms for name, ms in account.outside.items() if name in OUTSIDE_WORDS}
    if not wall > 0 or sum(outside.values()) < LARGE_SHARE * wall:
        return ""
    unit, size = ("ms", 1.0) if wall < 1e3 else ("s", 1e3)
    parts = [
        f"{quantity(ms / size, unit)} {OUTSIDE_WORDS[name]}"
        for name, ms in outside.items()
        if ms >= WORTH_NOTING * wall
    ]
    whole = "the trace covers" if "unmarked" in account.outside else "the run took"
    return (
        f"Outside of the judged steps: {quantity(sum(outside.values()) / size, unit)} of the"
        f" {quantity(wall / size, unit)} that {whole}: {', '.join(parts)}."
    )


def _reason_text(cell: str, dataset: Dataset, account: Account) -> str:
    num = sum(row.count for row in kernels_by_class(dataset))
    if cell != "launch" or not num or account.step_ms.shape[1] < MIN_STEPS:
        return f"Its reason is not certain{_too_few(account)}."
    return (
        f"The host bounds the step: {num:,.0f} kernels and copies, whose launches alone explain little of it."
        " More work in a launch (larger batches) hides it."
    )


def _too_few(account: Account) -> str:
    num = account.step_ms.shape[1]
    return f": {counted(num, 'judged step')} are too few to tell it from chance" if num < MIN_STEPS else ""


def nothing_text(dataset: Dataset, explained: Explanation) -> str:
    """That nothing is worth changing, or none can be told, with what the step does reach, as far as known."""
    account = explained.account
    largest = max(explained.unexplained_ms, key=lambda name: explained.unexplained_ms[name], default="")
    is_large = bool(largest) and account.share(largest) >= LARGE_LOSS
    is_lossy = any((loss.share or 0.0) >= LARGE_LOSS for loss in losses(dataset))
    phase = largest_beside_the_model(dataset.first)
    is_large_phase = phase is not None and phase.share >= LARGE_LOSS
    is_nothing = account.is_measured and not (explained.cannot_tell or is_large or is_lossy or is_large_phase)
    text = NOTHING if is_nothing else "No cause is named."
    lost = losses_text(dataset)
    text += f" {lost[0].upper()}{lost[1:].removesuffix('.')}."
    if is_large:
        text += (
            f" The largest part without compute is {CELLS[largest].title},"
            f" {quantity(account.mean_ms(largest), 'ms')} of the step, {percent(account.share(largest))}:"
            f" {CELLS[largest].meaning}. {_reason_text(largest, dataset, account)}"
        )
    # The largest one of all has a sentence of its own (notes).
    if phase is not None and is_large_phase and phase.ms < max(row.ms for row in phases_of(dataset.first)):
        share = percent(phase.share)
        text += f" Beside forward and backward, {phase.title} takes {share} of the step{phase.place}."
    mfu, rate = (dataset.statistics.get(name) for name in ("mfu", "model_tflops_per_gpu"))
    if mfu is not None and mfu.median is not None and rate is not None:
        text += (
            f" Roofline: {number(rate.median)} TFLOP/s per GPU, {percent(mfu.median)} of"
            f" {peak_text(dataset.first.record)}; the rest is in the kernels."
        )
    elif account.on_device:
        reasons = dataset.first.not_measured
        text += f" Roofline: not known ({reasons.get('mfu', 'FLOPs or the peak are not in run.json')})."
    return text
