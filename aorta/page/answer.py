"""The page's first screen: the answer in a sentence, a few numbers, at most five causes with their fixes."""

import re

from aorta.account.cause import Cause
from aorta.account.judge.answer import dataset_answer, mfu_text
from aorta.account.judge.cells import account_of
from aorta.account.judge.timed_steps import host_bound_text
from aorta.account.model import (
    Causes,
    ConfidenceInterval,
    Dataset,
    MetricComparison,
    Report,
    Run,
    Statistic,
    WhatIfs,
)
from aorta.page.parts import (
    MINUS,
    TIMES,
    Markup,
    at_percent,
    bar,
    chart,
    counted,
    empty,
    interval_text,
    number,
    percent,
    quantity,
    section,
    sentence,
    table,
    tag,
)
from aorta.page.table import device_names, precision, statistic_beside_step
from aorta.timeline.statistics import LEVEL

RATE_TILES = {"tokens_per_s_per_gpu": "tokens/s per GPU", "mfu": "MFU"}
VERDICT_SIGNS = {
    "better": "\u2713",
    "worse": "\u2717",
    "different": "\u25c6",
    "same": "=",
    "cannot tell": "?",
}
"""Signs beside the verdict's word, so that colour alone never tells it. No arrows: a better value may be
higher or lower."""


# ---- the answer ----------------------------------------------------------------------------------


def answer(report: Report) -> Markup:
    comparison = report.comparison
    datasets = list(report.datasets.values())
    tiles: list[Markup] = []
    if comparison is not None:
        head: list[Markup] = [tag("h1", typeset(comparison.headline))]
        if comparison.scope:
            head.append(tag("p", sentence(comparison.scope), class_="scope"))
    elif len(datasets) == 1:
        head = _first_sentences(datasets[0], report.causes.get(datasets[0].label))
        tiles = _tiles(datasets[0])
    else:
        head = [tag("h1", f"{len(datasets)} runs, not compared")]
        answers = [dataset_answer(dataset, report.causes.get(dataset.label)) for dataset in datasets]
        head += [tag("p", typeset(text), class_="scope") for text in answers]
    named = len(datasets) > 1
    head += [_story(dataset, named=named) for dataset in datasets]
    for dataset in datasets:
        head += _caveats(dataset, named=named)
    ran = tag("ul", [tag("li", run_line(dataset)) for dataset in datasets], class_="ran")
    return tag("section", head, ran, tiles, id="answer")


def _first_sentences(dataset: Dataset, causes: Causes | None) -> list[Markup]:
    """The largest cause, or that there is none; then what a step takes."""
    if causes is None:
        return [tag("h1", typeset(dataset_answer(dataset)))]
    if causes.listed:
        head, rest = sentence(causes.listed[0].headline), []
    else:
        head, _, text = causes.empty_text.partition(". ")
        rest = [text, *causes.notes]
    return [
        tag("h1", typeset(head.removesuffix("."))),
        tag("p", causes.title),
        *(tag("p", typeset(text), class_="scope") for text in rest if text),
    ]


def _story(dataset: Dataset, *, named: bool) -> Markup:
    """Lines on how the runs ended, where they did not simply finish."""
    lines = [line for judged in dataset.runs for line in judged.story]
    if not lines:
        return Markup()
    text = sentence("; ".join(dict.fromkeys(lines)))
    return tag("p", [tag("b", dataset.label), " "] if named else None, text, class_="caveat")


def _caveats(dataset: Dataset, *, named: bool) -> list[Markup]:
    """Lines on what takes the most from the answer: a late host, beside which numbers are bounds."""
    peak = mfu_text(dataset)
    texts = [host_bound_text(dataset.runs)]
    texts += [peak.removeprefix("warning: ")] if peak.startswith("warning: ") else []
    name = [tag("b", dataset.label), " "] if named else None
    return [tag("p", name, sentence(text), class_="caveat") for text in texts if text]


def run_line(dataset: Dataset) -> list[Markup | str]:
    """'fsdp 2 ranks on NVIDIA H200, bf16, 50 steps judged, source: events'."""
    judged = dataset.first
    parts = [
        ranks_on_devices(judged),
        precision(judged),
        counted(len(dataset.runs), "run") if len(dataset.runs) > 1 else "",
        f"{counted(judged.num_judged, 'step')} judged",
        f"source: {dataset.source}",
    ]
    return [tag("b", dataset.label), " ", ", ".join(part for part in parts if part)]


def ranks_on_devices(judged: Run) -> str:
    """'2 ranks on NVIDIA H200', or '2 ranks' if the device is not known."""
    names, ranks = device_names(judged), counted(len(judged.ranks), "rank")
    return f"{ranks} on {names}" if names else ranks


def _tiles(dataset: Dataset) -> list[Markup]:
    """Work per time beside the step, where it is known: numbers that are no part of a sum."""
    rates = [name for name in RATE_TILES if _median(dataset.statistics.get(name)) is not None]
    if not rates:
        return []
    account = account_of(dataset.first)
    spread = f"median {number(account.spread.median)}, p95 {number(account.spread.p95)}"
    tiles = [_tile("step", quantity(account.mean_step_ms or None, "ms"), "mean", spread)]
    for name in rates:
        value = _median(statistic_beside_step(dataset, name))
        text = percent(value, digits=1) if name == "mfu" else number(value)
        tiles.append(_tile(RATE_TILES[name], text, "median", _beside(dataset, name)))
    return [tag("div", tiles, class_="tiles")]


def _tile(heading: str, text: str, word: str, beside: str) -> Markup:
    """A number, in small what kind of number it is, and below what to read beside it."""
    big = tag("p", text, " ", tag("small", word), class_="big")
    return tag("div", tag("h3", heading), big, tag("p", beside, class_="beside"), class_="tile")


def _beside(dataset: Dataset, name: str) -> str:
    if name == "mfu":
        peak = dataset.first.record.peak_flops if dataset.first.record is not None else None
        return "" if peak is None else f"of {number(peak.flops_per_s / 1e12)} TFLOP/s {peak.precision}"
    return f"{number(_median(statistic_beside_step(dataset, 'tokens_per_s')))} in all"


# ---- causes --------------------------------------------------------------------------------------


def causes(report: Report) -> Markup | None:
    """Section of the causes, or None if the report was made without looking for them."""
    if not report.causes:
        return None
    children: list[Markup] = []
    for label, run_causes in report.causes.items():
        if len(report.causes) > 1:
            children.append(tag("h3", label))
        if run_causes.listed:
            dataset = report.datasets[label]
            step_ms = account_of(dataset.first).mean_step_ms
            rows = [
                _cause(label, place, cause, step_ms) for place, cause in enumerate(run_causes.listed, start=1)
            ]
            children.append(tag("ol", rows, class_="causes"))
        elif len(report.causes) > 1:
            children.append(tag("p", typeset(run_causes.empty_text)))
        if run_causes.listed or len(report.causes) > 1:  # else the page begins with it
            children += [tag("p", typeset(note), class_="note") for note in run_causes.notes]
        if run_causes.whatifs is not None:
            children += _whatifs(run_causes.whatifs)
    if not children:
        return None
    return section(
        "causes",
        "Causes and what to change",
        *children,
        lead=f"Milliseconds of a step by cause, with a {LEVEL} interval over steps; no millisecond counts"
        " twice. A step without one cause takes at least the time given.",
    )


def _cause(label: str, place: int, cause: Cause, step_ms: float) -> Markup:
    start, end = cause.at_ms or (None, None)
    link = tag(
        "a",
        cause.place,
        href="#timeline",
        data_step_choice=f"cause {place}",
        data_run=label,
        data_step=cause.global_step,
        data_rank=cause.rank,
        data_from=start,
        data_to=end,
    )
    return tag(
        "li",
        tag("h3", typeset(cause.headline)),
        _picture(cause, step_ms),
        [tag("p", typeset(text), class_="evidence") for text in cause.evidence],
        tag("p", tag("b", "Look at "), link) if cause.place else None,
        tag("p", tag("b", "Change "), cause.change),
        tag("p", tag("b", "Check "), cause.check),
    )


def _picture(cause: Cause, step_ms: float) -> Markup | None:
    """A step, and at its end the cause's part of it with its interval; of a loss that is in no step of the
    account, the run's time for each step."""
    ms, interval = cause.ms, cause.interval_ms
    what = "a step"
    if not cause.is_in_step and cause.share > 0:
        what, step_ms = "the run for each step", ms / cause.share
    if not 0 < ms <= step_ms:
        return None
    without = 100 * (1 - ms / step_ms)
    marks = [bar(0, without, "m-rest", 4, 10), bar(without, 100, "m-cause", 4, 10)]
    spoken = f"of {what}, {quantity(step_ms, 'ms')}: {quantity(ms, 'ms')}"
    if interval is not None:
        low, high = (at_percent(min(100.0, max(0.0, 100 * (1 - end / step_ms)))) for end in interval)
        ends = {"x1": high, "x2": low, "y1": "9", "y2": "9"}
        marks += [tag("line", **ends, class_="halo"), tag("line", **ends, class_="whisker")]
        spoken += f", between {number(interval[0])} and {quantity(interval[1], 'ms')}"
    return chart([tag("title", spoken), *marks], 18, spoken)


def _whatifs(whatifs: WhatIfs) -> list[Markup]:
    """Table of predicted steps, one row per change."""
    if not whatifs.lines:
        return [tag("h3", "What-ifs"), empty(whatifs.empty_text)]
    rows = [
        tag(
            "tr",
            tag("th", tag("code", line.change), scope="row"),
            tag("td", quantity(line.predicted_ms, "ms"), class_="num"),
            tag(
                "td",
                f"{quantity(line.interval_ms[0], 'ms')} to {quantity(line.interval_ms[1], 'ms')}",
                class_="num",
            ),
            tag("td", percent(line.predicted_ms / line.step_ms - 1, sign=True, digits=1), class_="num"),
            tag("td", line.next_text),
        )
        for line in whatifs.lines
    ]
    step_ms = quantity(whatifs.lines[0].step_ms, "ms")
    columns = [
        ("Change", "", False), ("Step", "", True), ("Interval", "", True), ("Against now", "", True),
        ("Then the longest part", "", False),
    ]  # fmt: skip
    return [
        tag("h3", f"What-ifs: the traced step of {step_ms}, replayed with a change"),
        table("What-ifs", columns, rows),
        tag("p", "More: ", tag("code", whatifs.command), class_="note"),
    ]


# ---- texts that other sections use too -----------------------------------------------------------


def verdict_mark(verdict: str) -> Markup:
    sign = VERDICT_SIGNS.get(verdict, "")
    kind = verdict.replace(" ", "-") if verdict in VERDICT_SIGNS else "none"
    return tag("span", tag("span", sign, aria_hidden="true"), " " if sign else None, verdict,
               class_=f"verdict {kind}")  # fmt: skip


def change_text(metric: MetricComparison) -> str:
    """Relative where there is a ratio: '+3.2 % [+2.9, +3.5]'; of what is not alike at all a multiple."""
    if metric.ratio is not None and metric.ratio > 10:
        return f"{TIMES} {number(metric.ratio)}"
    if metric.ratio is not None:
        interval = _shares(metric.interval)
        return f"{percent(metric.ratio - 1, sign=True, digits=1)}{interval}"
    if metric.difference is not None:
        change = quantity(metric.difference, metric.unit, sign=True)
        return f"{change} {interval_text(metric.difference_interval)}".rstrip()
    return "n/a"


def _shares(interval: ConfidenceInterval | None) -> str:
    if interval is None:
        return ""
    low, high = (
        percent(x - 1, sign=True, digits=1).removesuffix(" %") for x in (interval.low, interval.high)
    )
    return f" [{low}, {high}]"


def typeset(text: str) -> str:
    """Real minus signs before numbers, and no line break in an interval or before a unit."""
    text_typeset = re.sub(r"( %)? \[[^][]{1,30}\]", lambda match: match[0].replace(" ", "\u00a0"), text)
    text_typeset = re.sub(r"(?<=\d) (?=%|ms\b)", "\u00a0", text_typeset)
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, text_typeset)


def _median(statistic: Statistic | None) -> float | None:
    return None if statistic is None else statistic.median
