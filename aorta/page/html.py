"""report.html: one file that needs no network and no server.

Tables, bars and texts are in the HTML and need no script. Scripts draw the timeline and the distributions,
sort and filter. The browser runs only the two scripts whose hashes are in the page's own policy (page.js
and the plotting library), and it may not load anything.
"""

from pathlib import Path

import msgspec

from aorta.account.judge.answer import dataset_answer, is_of_mean_step, mfu_text, statistic_beside_step
from aorta.account.judge.cells import account_of
from aorta.account.judge.kernels import kernels_by_class, kernels_by_name, operators
from aorta.account.judge.ranks import Shown
from aorta.account.judge.timed_steps import host_bound_text
from aorta.account.load.rank.kernels import KernelTimeRow
from aorta.account.model import Causes, Dataset, Report, Statistic
from aorta.errors import ReportError
from aorta.files import write_whole
from aorta.page.causes import causes
from aorta.page.changes import changes
from aorta.page.distributions import distribution_data, plotly_packed, plotly_source
from aorta.page.frame import FOOTER, asset, document, hash_of, style_text
from aorta.page.heat import heat_data, ranks_by_steps
from aorta.page.parts import (
    Markup,
    canvas,
    controls,
    counted,
    empty,
    hatches,
    json_script,
    legend,
    number,
    percent,
    quantity,
    section,
    sentence,
    tag,
    typeset,
)
from aorta.page.sections import (
    collectives,
    definitions,
    hazards,
    kernels,
    longest_exposed,
    notes,
    ranks_on_devices,
    what_ran,
)
from aorta.page.stacks import stack_data, stacks
from aorta.page.table import precision
from aorta.page.timeline import Steps, packed, steps_to_show, timeline_data
from aorta.page.where_time_goes import account_data, where_time_goes

SCRIPTS = ("page.js", "timeline.js", "account.js", "heat.js", "stacks.js", "distributions.js")
KEYS_HELP = (
    "Drag to move, Shift and drag to select a range, Ctrl and wheel to zoom, double-click for the whole step;"
    " a click tells of a call. With the chart focused: arrow keys move, + and \u2212 zoom, 0 shows all,"
    " N and P go through the spans, up and down change row. Enter in Find goes to the next span that"
    " has the text."
)
RATE_TILES = {"tokens_per_s_per_gpu": "tokens/s per GPU", "mfu": "MFU"}
LINKS = {
    "changes": "Changes",
    "time": "Time",
    "causes": "Causes",
    "stacks": "Program",
    "hazards": "Hazards",
    "ranks": "Ranks",
    "timeline": "Timeline",
    "collectives": "Collectives",
    "kernels": "Kernels",
    "distributions": "Distributions",
    "ran": "What ran",
    "notes": "Notes",
    "definitions": "Definitions",
}
"""Names of the sections in the navigation."""


def write_page(path: Path | str, report: Report, shown: Shown | None = None) -> None:
    """Write report.html, whole or not at all."""
    try:
        write_whole(path, page(report, shown).encode(errors="replace"))
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error


def page(report: Report, shown: Shown | None = None) -> str:
    """The source of report.html. shown: ranks and steps of its timeline."""
    steps_shown = steps_to_show(report, shown)
    distributions = distribution_data(report)
    style = style_text()
    script = Markup("\n".join(map(asset, SCRIPTS)))
    labels = list(report.datasets)
    comparison = report.comparison
    heading = f"{comparison.candidate} against {comparison.reference}" if comparison else ", ".join(labels)
    sections = [
        ("answer", answer(report)),
        ("changes", changes(comparison) if comparison else None),
        ("time", where_time_goes(report)),
        ("causes", causes(report)),
        ("stacks", stacks(report)),
        ("hazards", hazards(report)),
        ("ranks", ranks_by_steps(report)),
        ("timeline", _timeline(steps_shown)),
        ("collectives", collectives(report)),
        ("kernels", kernels(_kernels_by_class_and_name(report))),
        ("distributions", _distributions()),
        ("ran", what_ran(report)),
        ("notes", notes(report)),
        ("definitions", definitions()),
    ]
    return document(
        heading,
        style,
        _policy(style, script),
        tag("a", "Skip to the answer", href="#answer", class_="skip"),
        _header(heading, [name for name, body in sections if body is not None]),
        tag("main", [body for _, body in sections]),
        FOOTER,
        tag("div", id="tip", role="tooltip", hidden=True),
        hatches(),
        json_script("timeline-data", msgspec.json.encode(packed(timeline_data(steps_shown)))),
        json_script("account-data", msgspec.json.encode(account_data(report))),
        json_script("stack-data", msgspec.json.encode(stack_data(report))),
        json_script("heat-data", msgspec.json.encode(heat_data(report))),
        json_script("distribution-data", msgspec.json.encode(distributions)),
        tag("script", Markup(plotly_packed()), type="application/octet-stream", id="plotly-packed"),
        tag("script", script),
    )


def _kernels_by_class_and_name(report: Report) -> dict[str, tuple[list[KernelTimeRow], float]]:
    tables: dict[str, tuple[list[KernelTimeRow], float]] = {}
    for label, dataset in report.datasets.items():
        step_ms = account_of(dataset.first).recorded_ms
        tables[label] = (kernels_by_class(dataset), step_ms)
        tables[f"{label}, the names with most time"] = (kernels_by_name(dataset), step_ms)
        tables[f"{label}, by operator"] = (operators(dataset), step_ms)
    return tables


def _header(heading: str, names: list[str]) -> Markup:
    links = [tag("a", LINKS[name], href=f"#{name}") for name in names if name in LINKS]
    return tag(
        "header",
        tag("div", tag("b", "aorta"), " ", tag("span", heading), class_="brand"),
        tag("nav", links, aria_label="Sections"),
        tag("button", "Dark", type="button", id="theme", class_="needs-script"),
    )


def _timeline(steps_shown: list[Steps]) -> Markup:
    if not any(steps.records for steps in steps_shown):
        reason = next((steps.why_empty for steps in steps_shown if steps.why_empty), "there is no step")
        return section("timeline", "Timeline of a step", empty(f"Not measured: {reason}."))
    notes_ = [
        tag("p", f"{steps.label}: not measured: {steps.why_empty}.", class_="empty")
        for steps in steps_shown
        if steps.why_empty
    ]
    steering = tag(
        "div",
        tag("label", "Step ", tag("select", id="timeline-step")),
        tag("fieldset", tag("legend", "Ranks"), tag("span", id="timeline-ranks")),
        tag("label", "Find ", tag("input", type="search", id="timeline-find", autocomplete="off")),
        tag(
            "span",
            tag("button", "\u2212", type="button", id="zoom-out", aria_label="Zoom out"),
            tag("button", "+", type="button", id="zoom-in", aria_label="Zoom in"),
            tag("button", "Whole step", type="button", id="zoom-all"),
            class_="buttons",
        ),
        class_="controls needs-script",
    )
    drawn = canvas("timeline-canvas", "timeline needs", "Timeline of a step", "timeline-help")
    return section(
        "timeline",
        "Timeline of a step",
        legend(["compute", "hidden", "exposed", "wait", "idle"]),
        steering,
        tag("div", drawn, class_="canvas needs-script"),
        tag("p", id="timeline-said", aria_live="polite", class_="said needs-script"),
        tag(
            "details",
            tag("summary", "Sums of what is seen"),
            tag("div"),
            id="timeline-sums",
            class_="needs-script",
        ),
        tag("p", KEYS_HELP, id="timeline-help", class_="note needs-script"),
        tag("p", id="timeline-note", class_="note"),
        notes_,
        [longest_exposed(steps) for steps in steps_shown],
        lead="Ranks of one step on one clock. The thick row sums up each rank; its streams are below it."
        " Hollow parts lie outside the step.",
    )


def _distributions() -> Markup:
    return section(
        "distributions",
        "Distributions",
        controls(("Metric", "distribution-metric")),
        tag(
            "div",
            "The chart needs a browser that runs scripts.",
            id="distribution-chart",
            role="img",
            aria_label="Distribution of a metric over steps",
        ),
        tag("p", id="distribution-said", class_="note", aria_live="polite"),
        lead="Left: the median over ranks, step by step, shaded from the least to the greatest rank. Right:"
        " the judged steps as a box of their quartiles, with a dot per step.",
    )


def _policy(style: str, script: str) -> str:
    """Content security policy: the page loads nothing and runs only its own styles and scripts."""
    empty_style = hash_of("")  # the plotting library makes an empty style element and fills it by its rules
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:;"
        f" style-src {hash_of(style)} {empty_style}; script-src {hash_of(script)} {hash_of(plotly_source())}"
    )


# ---- the first screen: the answer in a sentence, and a few numbers --------------------------------------


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


def _tiles(dataset: Dataset) -> list[Markup]:
    """Work per time beside the step, where it is known: numbers that are no part of a sum."""
    rates = [name for name in RATE_TILES if _median(dataset.statistics.get(name)) is not None]
    if not rates:
        return []
    account = account_of(dataset.first)
    word: str = account.statistic
    spread = f"p95 {number(account.spread.p95)}"
    if word == "mean":
        spread = f"median {number(account.spread.median)}, {spread}"
    tiles = [_tile("step", quantity(account.mean_step_ms or None, "ms"), word, spread)]
    for name in rates:
        value = _median(statistic_beside_step(dataset, name))
        text = percent(value, digits=1) if name == "mfu" else number(value)
        word = "mean" if is_of_mean_step(dataset, name) else "median"
        tiles.append(_tile(RATE_TILES[name], text, word, _beside(dataset, name)))
    return [tag("div", tiles, class_="tiles")]


def _tile(heading: str, text: str, word: str, beside: str) -> Markup:
    """A number, in small what kind of number it is, and below what to read beside it."""
    big = tag("p", text, " ", tag("small", word), class_="big")
    return tag("div", tag("h3", heading), big, tag("p", beside, class_="beside"), class_="tile")


def _beside(dataset: Dataset, name: str) -> str:
    if name == "mfu":
        peak = dataset.first.noted.peak_flops
        return "" if peak is None else f"of {number(peak.flops_per_s / 1e12)} TFLOP/s {peak.precision}"
    return f"{number(_median(statistic_beside_step(dataset, 'tokens_per_s')))} in all"


def _median(statistic: Statistic | None) -> float | None:
    return None if statistic is None else statistic.median
