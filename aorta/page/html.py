"""report.html: one file that needs no network and no server.

Tables, bars and texts are in the HTML and need no script. Scripts draw the timeline and the distributions,
sort and filter. The browser runs only the two scripts whose hashes are in the page's own policy (page.js
and the plotting library), and it may not load anything.
"""

from pathlib import Path

import msgspec

from aorta._version import __version__
from aorta.account.judge.cells import account_of
from aorta.account.judge.kernels import kernels_by_class, kernels_by_name, operators
from aorta.account.judge.shown import Shown
from aorta.account.load.rank.kernels import KernelTimeRow
from aorta.account.model import Report
from aorta.errors import ReportError
from aorta.files import write_whole
from aorta.page.answer import answer, causes
from aorta.page.changes import changes
from aorta.page.distributions import distribution_data, plotly_packed, plotly_source
from aorta.page.frame import asset, hash_of, style_text
from aorta.page.heat import heat_data, ranks_by_steps
from aorta.page.parts import Markup, empty, hatches, json_script, legend, section, tag
from aorta.page.sections import (
    collectives,
    definitions,
    hazards,
    kernels,
    longest_exposed,
    notes,
    what_ran,
)
from aorta.page.stacks import stack_data, stacks
from aorta.page.timeline import Steps, steps_to_show, timeline_data
from aorta.page.where_time_goes import account_data, where_time_goes

SCRIPTS = ("page.js", "timeline.js", "account.js", "heat.js", "stacks.js", "distributions.js")
KEYS_HELP = (
    "Drag to move, Shift and drag to select a range, Ctrl and wheel to zoom, double-click for the whole step;"
    " a click tells of a call. With the chart focused: arrow keys move, + and \u2212 zoom, 0 shows all,"
    " N and P go through the spans, up and down change row. Enter in Find goes to the next span that"
    " has the text."
)
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
        write_whole(path, page(report, shown).encode())
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
        ("timeline", _timeline(report, steps_shown)),
        ("collectives", collectives(report)),
        ("kernels", kernels(_kernels_by_class_and_name(report))),
        ("distributions", _distributions()),
        ("ran", what_ran(report)),
        ("notes", notes(report)),
        ("definitions", definitions()),
    ]
    return "<!doctype html>\n" + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{heading} \u2013 aorta"),
            tag("style", style),
        ),
        tag(
            "body",
            tag("a", "Skip to the answer", href="#answer", class_="skip"),
            _header(heading, [name for name, body in sections if body is not None]),
            tag("main", [body for _, body in sections]),
            tag("footer", f"aorta {__version__}. This page loads nothing from anywhere."),
            tag("div", id="tip", role="tooltip", hidden=True),
            hatches(),
            json_script("timeline-data", msgspec.json.encode(timeline_data(steps_shown))),
            json_script("account-data", msgspec.json.encode(account_data(report))),
            json_script("stack-data", msgspec.json.encode(stack_data(report))),
            json_script("heat-data", msgspec.json.encode(heat_data(report))),
            json_script("distribution-data", msgspec.json.encode(distributions)),
            tag("script", Markup(plotly_packed()), type="application/octet-stream", id="plotly-packed"),
            tag("script", script),
        ),
        lang="en",
    )  # fmt: skip


def _kernels_by_class_and_name(report: Report) -> dict[str, tuple[list[KernelTimeRow], float]]:
    tables: dict[str, tuple[list[KernelTimeRow], float]] = {}
    for label, dataset in report.datasets.items():
        step_ms = account_of(dataset.first).mean_step_ms
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


def _timeline(report: Report, steps_shown: list[Steps]) -> Markup:
    if not any(steps.records for steps in steps_shown):
        reason = next((steps.why_empty for steps in steps_shown if steps.why_empty), "there is no step")
        return section("timeline", "Timeline of a step", empty(f"Not measured: {reason}."))
    notes_ = [
        tag("p", f"{steps.label}: not measured: {steps.why_empty}.", class_="empty")
        for steps in steps_shown
        if steps.why_empty
    ]
    controls = tag(
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
    canvas = tag(
        "canvas",
        "The timeline needs a browser that draws on a canvas.",
        id="timeline-canvas",
        tabindex="0",
        role="application",
        aria_label="Timeline of a step",
        aria_describedby="timeline-help",
    )
    return section(
        "timeline",
        "Timeline of a step",
        legend(["compute", "hidden", "exposed", "wait", "idle"]),
        controls,
        tag("div", canvas, class_="canvas needs-script"),
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
        tag(
            "div",
            tag("label", "Metric ", tag("select", id="distribution-metric")),
            class_="controls needs-script",
        ),
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
