"""What the sections are built of: tables, small charts, lists."""

import math
from collections.abc import Sequence
from typing import Any

from aorta.report.page.markup import Markup, tag
from aorta.report.page.words import STATE_TITLES, counted, number

Column = tuple[str, str, bool]
"""Title, unit, and whether it is a number."""


def section(name: str, heading: str, *children: Any, lead: str = "") -> Markup:
    return tag(
        "section",
        tag("h2", heading, id=f"{name}-title"),
        tag("p", lead, class_="lead") if lead else None,
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def empty(reason: str) -> Markup:
    return tag("p", reason, class_="empty")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Markup],
    *,
    sortable: bool = False,
    class_: str = "",
) -> Markup:
    heads = []
    for name, of_unit, is_number in columns:
        text = [name, f", {of_unit}" if of_unit and name else of_unit or None]
        content: Any = tag("button", text, type="button") if sortable and name else text
        heads.append(
            tag("th", content, scope="col", class_="num" if is_number else None,
                aria_sort="none" if sortable and name else None)
        )  # fmt: skip
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", heads)) if heads else None,
            tag("tbody", rows),
            class_=" ".join(filter(None, (class_, "sortable" if sortable else ""))) or None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def filterable(name: str, caption: str, columns: Sequence[Column], rows: Sequence[Markup]) -> Markup:
    """A table that sorts on click of its heads and shows the rows that contain what is typed."""
    return tag(
        "div",
        tag(
            "p",
            tag("label", "Filter ", tag("input", type="search", id=f"{name}-filter", autocomplete="off")),
            " ",
            tag("output", f"{len(rows)} of {counted(len(rows), 'row')}", for_=f"{name}-filter"),
            class_="filter needs-script",
        ),
        table(caption, columns, rows, sortable=True),
        class_="filterable",
    )


def cell(
    value: float | int | None, *, text: str | None = None, sign: bool = False, label: str | None = None
) -> Markup:
    """A number; data-value is what a table sorts by, label what stands beside it where columns do not fit."""
    is_known = value is not None and math.isfinite(value)
    cell_text = text if text is not None else number(value, sign=sign)
    return tag(
        "td",
        cell_text,
        class_="num missing" if cell_text == "n/a" else "num",
        data_value=repr(float(value or 0)) if is_known else "",
        data_label=label,
    )


def chart(children: Sequence[Markup | None], height: int, spoken: str) -> Markup:
    return tag("svg", children, height=height, role="img", aria_label=spoken, class_="chart")


def bar(low: float, high: float, kind: str, y: int, height: int, hover: str = "") -> Markup:
    return tag(
        "rect", tag("title", hover) if hover else None, x=at_percent(low),
        width=at_percent(max(0.0, high - low)), y=y, height=height, class_=kind,
    )  # fmt: skip


def at_percent(value: float) -> str:
    return f"{value:.3f}%"


def bullets(texts: Sequence[str]) -> Markup | None:
    return tag("ul", [tag("li", text) for text in texts], class_="notes") if texts else None


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".")


def hatches() -> Markup:
    """What print fills exposed and waiting time with: their colours are alike in grey."""
    ground = tag("rect", width=6, height=6, class_="ground")
    stripes = tag("path", d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", class_="exposed")
    dots = tag("circle", cx=3, cy=3, r=1.9, class_="wait")
    patterns = [
        tag("pattern", ground, mark, id=name, width=6, height=6, patternUnits="userSpaceOnUse")
        for name, mark in (("print-exposed", stripes), ("print-wait", dots))
    ]
    return tag("svg", tag("defs", patterns), class_="hatches", aria_hidden="true")


def legend(names: Sequence[str]) -> Markup:
    items = [
        tag("li", tag("svg", bar(0, 100, f"m-{name}", 0, 12), class_="swatch", aria_hidden="true"),
            STATE_TITLES[name])
        for name in names
    ]  # fmt: skip
    return tag("ul", items, class_="legend")
