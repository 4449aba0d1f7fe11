"""The page's first screen: the answer in a sentence, a few numbers, at most five causes with their fixes."""

import re

from aorta.account.judge.answer import dataset_answer, losses, mfu_text
from aorta.account.judge.leading import BESIDE_WORDS, WORDS, leading, partly_timed, source_text, timed_step_ms
from aorta.account.judge.ranks import alerts
from aorta.account.judge.timed_steps import host_bound_text
from aorta.account.metrics import RATES
from aorta.account.model import (
    CauseLine,
    Causes,
    Comparison,
    ConfidenceInterval,
    Dataset,
    JudgedRun,
    MetricComparison,
    Report,
    Statistic,
    WhatIfs,
)
from aorta.page.parts import (
    DASH,
    MAX_LABEL,
    MINUS,
    TIMES,
    Markup,
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
    title,
    unit,
)
from aorta.page.table import device_names, elided, precision
from aorta.timeline.statistics import LEVEL

COMPARED = ("step_ms", "exposed_ms", "comm_ms", "compute_ms", "overlap_ratio")
COMPARED_SHARES = ("exposed_per_step", "comm_per_step", "compute_per_step", "idle_per_step", "overlap_ratio")
"""Metrics of the tiles where the two sides' times cannot be compared."""
VERDICT_SIGNS = {"better": "\u2713", "worse": "\u2717", "different": "\u25c6", "cannot tell": "?"}
"""Signs beside the verdict's word, so that colour alone never tells it. No arrows: a better value may be
higher or lower."""


# ---- the answer ----------------------------------------------------------------------------------


def answer(report: Report) -> Markup:
    comparison = report.comparison
    datasets = list(report.datasets.values())
    if comparison is not None:
        head: list[Markup] = [tag("h1", typeset(comparison.headline))]
        if comparison.scope:
            head.append(tag("p", sentence(comparison.scope), class_="scope"))
        names = _compared_names(comparison)
        tiles = [tag("div", [_compared_tile(comparison, name) for name in names], class_="tiles")]
        tiles.append(tag("p", _tiles_note(comparison), class_="note"))
    elif len(datasets) == 1:
        head = [tag("h1", dataset_answer(datasets[0], report.causes.get(datasets[0].label)))]
        tiles = [tag("div", _tiles(datasets[0]), class_="tiles")]
    else:
        head = [tag("h1", f"{len(datasets)} runs, not compared")]
        answers = [dataset_answer(dataset, report.causes.get(dataset.label)) for dataset in datasets]
        head += [tag("p", text, class_="scope") for text in answers]
        tiles = []
        for dataset in datasets:
            tiles += [tag("h2", dataset.label, class_="label"), tag("div", _tiles(dataset), class_="tiles")]
    named = len(datasets) > 1
    head += [_story(dataset, named=named) for dataset in datasets]
    for dataset in datasets:
        head += _caveats(dataset, named=named)
    ran = tag("ul", [tag("li", run_line(dataset)) for dataset in datasets], class_="ran")
    return tag("section", head, ran, tiles, id="answer")


def _story(dataset: Dataset, *, named: bool) -> Markup:
    """Lines on how the runs ended, where they did not simply finish."""
    lines = [line for judged in dataset.runs for line in judged.run.story]
    if not lines:
        return Markup()
    text = sentence("; ".join(dict.fromkeys(lines)))
    return tag("p", [tag("b", dataset.label), " "] if named else None, text, class_="caveat")


def _caveats(dataset: Dataset, *, named: bool) -> list[Markup]:
    """Lines on what takes the most from the answer, or may be the cause of it: what telemetry shows, and a
    late host, beside which numbers are bounds."""
    peak = mfu_text(dataset)
    texts = [*alerts(dataset), host_bound_text(dataset.runs, dataset.lead)]
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
        f"{counted(judged.num_steps, 'step')} judged",
        f"source: {source_text(dataset)}",
    ]
    return [tag("b", dataset.label), " ", ", ".join(part for part in parts if part)]


def ranks_on_devices(judged: JudgedRun) -> str:
    """'2 ranks on NVIDIA H200', or '2 ranks' if the device is not known."""
    names, ranks = device_names(judged), counted(len(judged.run.ranks), "rank")
    return f"{ranks} on {names}" if names else ranks


def _tiles(dataset: Dataset) -> list[Markup]:
    """Step and work per time, then what is lost, the largest loss first, then the rest."""
    lost = [loss.name for loss in losses(dataset)]
    rates = [name for name in ("tokens_per_s_per_gpu", "mfu") if _median(dataset.statistics.get(name))]
    unknown = [name for name in ("exposed_ms", "idle_ms") if name not in lost]
    names = ["step_ms", *rates, *lost, *unknown, "compute_ms", "comm_ms", "overlap_ratio"]
    return [_tile(dataset, name) for name in names]


def _tile(dataset: Dataset, name: str) -> Markup:
    statistic = dataset.statistics.get(leading(dataset, name))
    value = _median(statistic)
    heading = tag("h3", _tile_title(name))
    if statistic is None or value is None:
        comm = _median(dataset.statistics.get(leading(dataset, "comm_ms")))
        reason = dataset.first.run.not_measured.get(name) or (
            "no communication" if comm == 0 else f"not given by source {dataset.source}"
        )
        lines = [tag("p", "n/a", class_="big"), tag("p", f"not measured: {reason}", class_="beside")]
        return tag("div", heading, lines, class_="tile")
    is_led = leading(dataset, name) != name
    spread = ""
    if len(dataset.first.run.ranks) > 1 and statistic.min is not None and statistic.max is not None:
        spread = f"ranks {_quantity(statistic.min, name, short=True)} {DASH} {_quantity(statistic.max, name)}"
    lines = [
        _big(_quantity(value, name), WORDS[dataset.lead] if is_led else ""),
        tag("p", _share_text(dataset, name, value), class_="beside"),
        tag("p", "" if name in RATES else spread, class_="beside"),
    ]
    if is_led:
        lines.append(tag("p", _beside_text(dataset, name), class_="beside"))
    return tag("div", heading, lines, class_="tile")


def _share_text(dataset: Dataset, name: str, value: float) -> str:
    """Text of the whole that the number is a part of."""
    step = timed_step_ms(dataset)
    the_step = "a timed step" if partly_timed(dataset) else "the step"
    statistics = dataset.statistics
    if name == "step_ms":
        return f"median, p95 {quantity(statistics[name].p95, 'ms')}"
    if name == "exposed_ms":
        ratio, comm = (
            _median(statistics.get(leading(dataset, metric))) for metric in ("overlap_ratio", "comm_ms")
        )
        comm_share = (
            f"{percent(1 - ratio if ratio is not None else value / comm)} of communication" if comm else ""
        )
        step_share = f"{percent(value / step)} of {the_step}" if step else ""
        return ", ".join(part for part in (step_share, comm_share) if part)
    if name == "mfu":
        peak = dataset.first.run.run.peak_flops if dataset.first.run.run is not None else None
        return "" if peak is None else f"of {number(peak.flops_per_s / 1e12)} TFLOP/s {peak.precision}"
    if name == "tokens_per_s_per_gpu":
        return f"{number(_median(statistics.get('tokens_per_s')))} in all"
    if name == "overlap_ratio":
        return "hidden / communication"
    return f"{percent(value / step)} of {the_step}" if step else ""


def _beside_text(dataset: Dataset, name: str) -> str:
    value = _median(dataset.statistics.get(name))
    return f"{BESIDE_WORDS[dataset.lead]}: {quantity(value, unit(name))}"


def _quantity(value: float | None, name: str, *, short: bool = False) -> str:
    if name == "mfu":
        return percent(value, digits=1)
    return number(value) if short or name == "tokens_per_s_per_gpu" else quantity(value, unit(name))


def _big(text: str, word: str) -> Markup:
    """The number, and in small what kind of number it is."""
    return tag("p", text, [" ", tag("small", word)] if word else None, class_="big")


def _tile_title(name: str) -> str:
    return {"overlap_ratio": "overlap ratio", "mfu": "MFU"}.get(name) or title(name)


def _compared_names(comparison: Comparison) -> list[str]:
    """The metric that answers first; losses by what the candidate loses."""
    if not _has_times(comparison):
        return list(COMPARED_SHARES)
    parts = {name: comparison.metrics.get(name) for name in ("exposed_ms", "idle_ms")}
    lost = sorted(
        parts, key=lambda name: -((part.candidate or 0.0) if (part := parts[name]) is not None else 0.0)
    )
    remaining = [name for name in COMPARED if name not in (comparison.main, *lost)]
    rate = comparison.metrics.get(RATES[0])
    rates = [RATES[0]] if rate is not None and rate.candidate is not None else []
    return list(dict.fromkeys([comparison.main, "step_ms", *rates, *lost, *remaining]))


def _has_times(comparison: Comparison) -> bool:
    step, share = (comparison.metrics.get(name) for name in ("step_ms", "exposed_per_step"))
    return (step is not None and step.difference is not None) or share is None or share.difference is None


def _tiles_note(comparison: Comparison) -> str:
    subject = (
        "Medians" if _has_times(comparison) else "Shares of the time of a step, or of all that was read,"
    )
    return (
        f"{subject} of {comparison.candidate}; below each its change against {comparison.reference}"
        f" (candidate / reference \u2212 1) with its {LEVEL} interval where there is one, and"
        f" {comparison.reference} itself."
    )


def _compared_tile(comparison: Comparison, name: str) -> Markup | None:
    metric = comparison.metrics.get(name)
    if metric is None:
        return None
    return tag(
        "div",
        tag("h3", _tile_title(name)),
        _big(_value(metric.candidate, metric), metric.numbers),
        tag("p", change_text(metric), class_="change"),
        tag(
            "p",
            f"{elided(comparison.reference, MAX_LABEL)}: {_value(metric.reference, metric)}",
            class_="beside",
        ),
        tag("p", verdict_mark(metric.verdict), title=metric.reason or None),
        class_="tile",
    )


def _value(value: float | None, metric: MetricComparison) -> str:
    if metric.name.endswith("_per_step"):
        return percent(value, digits=1)
    return _quantity(value, metric.name)


# ---- causes --------------------------------------------------------------------------------------


def causes(report: Report) -> Markup | None:
    """Section of the causes, or None if the report was made without looking for them."""
    if not report.causes:
        return None
    is_labelled = len(report.causes) > 1
    children: list[Markup] = []
    for label, run_causes in report.causes.items():
        if is_labelled:
            children.append(tag("h3", label))
        children.append(_list(label, run_causes))
        if run_causes.whatifs is not None:
            children += _whatifs(run_causes.whatifs)
    return section(
        "causes",
        "Causes and what to change",
        *children,
        lead=f"Milliseconds of a step by cause, with a {LEVEL} interval over steps; no millisecond counts"
        " twice. A step without one cause takes at least the time given.",
    )


def _list(label: str, causes: Causes) -> Markup:
    if not causes.lines:
        return tag("p", causes.empty_text)
    return tag(
        "ol",
        [_cause(label, place, line) for place, line in enumerate(causes.lines, start=1)],
        class_="causes",
    )


def _cause(label: str, place: int, line: CauseLine) -> Markup:
    start, end = line.at_ms or (None, None)
    link = tag(
        "a",
        line.place,
        href="#timeline",
        data_step_choice=f"cause {place}",
        data_run=label,
        data_rank=line.rank,
        data_from=start,
        data_to=end,
    )
    return tag(
        "li",
        tag("h3", typeset(line.headline)),
        [tag("p", typeset(text), class_="evidence") for text in line.evidence],
        tag("p", tag("b", "Look at "), link) if line.place else None,
        tag("p", tag("b", "Change "), line.change),
        tag("p", tag("b", "Check "), line.check),
    )


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
            tag("td", f"{100 * (line.predicted_ms / line.step_ms - 1):+.1f} %", class_="num"),
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
    """Real minus signs before numbers, and no line break in an interval."""
    text_typeset = re.sub(r"( %)? \[[^][]{1,30}\]", lambda match: match[0].replace(" ", "\u00a0"), text)
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, text_typeset)


def _median(statistic: Statistic | None) -> float | None:
    return None if statistic is None else statistic.median
