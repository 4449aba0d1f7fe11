"""Building blocks of the page: safe HTML, colours, names and units, tables, small charts."""

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from aorta.account import numbers
from aorta.account.metrics import meaning, metric_key
from aorta.account.model import ConfidenceInterval
from aorta.account.numbers import MINUS as MINUS
from aorta.account.numbers import byte_text as byte_text
from aorta.account.numbers import counted as counted

MAX_LABEL = 22
"""Letters of a run's label above a column and in a tile."""
VOID = frozenset(("br", "hr", "input", "link", "meta"))
THEMES = {
    "paper": ("#ffffff", "#14171c"),
    "panel": ("#f6f7f9", "#1c2128"),
    "line": ("#dfe3e8", "#313842"),
    "outline": ("#868e99", "#737c88"),
    "ink": ("#1b2129", "#e6e9ed"),
    "muted": ("#59626e", "#a3acb8"),
    "accent": ("#5645b0", "#a99cf5"),
    "compute": ("#2f6299", "#4583c4"),
    "hidden": ("#3fa096", "#6fc9be"),
    "exposed": ("#ad3706", "#ee6c33"),
    "wait": ("#cf7f2b", "#f6b877"),
    "idle": ("#e3e6ea", "#2a3038"),
    "worse": ("#b23c08", "#f58b5c"),
    "better": ("#1d716a", "#6fc9be"),
}
"""Colours by what they are for: on light paper, and on dark."""
LIGHT, DARK = ({name: theme[i] for name, theme in THEMES.items()} for i in (0, 1))
MARKS = ("compute", "hidden", "exposed", "wait", "idle")
"""States of a rank in a step; wait is the part of exposed in which some rank had not arrived."""
STATE_TITLES = {
    "compute": "compute only",
    "hidden": "communication hidden under compute",
    "exposed": "exposed communication",
    "transfer": "exposed, transfer",
    "wait": "exposed, waiting for a rank",
    "idle": "idle",
}
assert set(MARKS) == set(STATE_TITLES) - {"transfer"}
CELL_MARKS = {
    "compute": "compute",
    "hidden": "hidden",
    "transfer": "transfer",
    "wait": "wait",
    "communication": "exposed",
    "copy": "copy",
    "not_measured": "unknown",
}
"""Fill of a cell of the account; those of the host share one."""
TIMES = "\u00d7"


# ---- HTML that cannot be broken by what it shows -------------------------------------------------


class Markup(str):
    """HTML or SVG source; a plain str is text."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. class_='a' gives class="a", data_x=1 gives data-x="1"; None and False leave one out."""
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{attribute_text}>")
    return Markup(f"<{name}{attribute_text}>{join(children)}</{name}>")


def join(child: Child) -> Markup:
    """Children after one another, text escaped."""
    if child is None:
        return Markup()
    if isinstance(child, Markup):
        return child
    if isinstance(child, (str, int)):
        return Markup(html.escape(str(child)))
    return Markup("".join(map(join, child)))


def json_script(element_id: str, data: bytes) -> Markup:
    """JSON as a script element that is never run and cannot be left: <, > and & are escaped within it.

    U+2028 and U+2029 are legal in JSON and are escaped for readers that take it for JavaScript.
    """
    text = data.decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{element_id}">{text}</script>')


# ---- names, units and numbers --------------------------------------------------------------------


def title(metric: str) -> str:
    """'exposed communication, all_gather' for exposed_ms.all_gather."""
    name, op = metric_key(metric)
    return (meaning(name).title or name) + (f", {op}" if op else "")


def unit(metric: str) -> str:
    return meaning(metric_key(metric).name).unit


def number(value: float | None, *, sign: bool = False) -> str:
    """A number with a real minus sign."""
    return numbers.number(value, sign=sign, minus=MINUS)


def quantity(value: float | None, of_unit: str, *, sign: bool = False) -> str:
    return numbers.quantity(value, of_unit, sign=sign, minus=MINUS)


def percent(share: float | None, *, sign: bool = False, digits: int = 0) -> str:
    return numbers.percent(share, sign=sign, digits=digits, minus=MINUS)


def interval_text(interval: ConfidenceInterval | None, *, minus: str = MINUS) -> str:
    """'[-6.85, +4.71]', the interval of a difference; the terminal's minus is a hyphen."""
    if interval is None:
        return ""
    low, high = (numbers.number(end, sign=True, minus=minus) for end in (interval.low, interval.high))
    return f"[{low}, {high}]"


def sentence(text: str) -> str:
    """The text with a capital letter."""
    return text[:1].upper() + text[1:]


# ---- sections, tables and small charts -----------------------------------------------------------


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


def setting_cell(value: str | None) -> Markup:
    return tag("td", tag("i", "not set") if value is None else tag("code", value))


def folded(summary: str, children: Any, *, is_open: bool = False) -> Markup:
    return tag("details", tag("summary", summary), children, open=is_open)


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


def row(head: Child, *cells: Child, **attributes: Attribute) -> Markup:
    """A row of a table: its head, then cells; one that is plain text is put into an element."""
    rest = (tag("td", child) if type(child) is str else child for child in cells)
    return tag("tr", tag("th", head, scope="row"), *rest, **attributes)


def numeric(text: str) -> Markup:
    """A number's words, where nothing sorts by it."""
    return tag("td", text, class_="num")


def controls(*choices: tuple[str, str], class_: str = "controls needs-script") -> Markup:
    """Lists to choose from, each by its words and its id; the page's scripts fill them."""
    return tag(
        "div", (tag("label", f"{words} ", tag("select", id=name)) for words, name in choices), class_=class_
    )


def canvas(name: str, what: str, label: str, described_by: str, role: str = "application") -> Markup:
    """What a script draws on; read out as `label` and by the element that describes it."""
    return tag(
        "canvas",
        f"The {what} a browser that draws on a canvas.",
        id=name,
        tabindex="0",
        role=role,
        aria_label=label,
        aria_describedby=described_by,
    )


def bullets(texts: Sequence[str]) -> Markup | None:
    return tag("ul", [tag("li", text) for text in texts], class_="notes") if texts else None


def chart(children: Sequence[Markup | None], height: int, spoken: str) -> Markup:
    return tag("svg", children, height=height, role="img", aria_label=spoken, class_="chart")


def bar(low: float, high: float, kind: str, y: int, height: int, hover: str = "") -> Markup:
    return tag(
        "rect", tag("title", hover) if hover else None, x=at_percent(low),
        width=at_percent(max(0.0, high - low)), y=y, height=height, class_=kind,
    )  # fmt: skip


def at_percent(value: float) -> str:
    return f"{value:.3f}%"


def cell_mark(name: str) -> str:
    return f"m-{CELL_MARKS.get(name, 'idle')}"


def swatch(mark: str) -> Markup:
    """A fill beside its name."""
    return tag("svg", bar(0, 100, mark, 0, 12), class_="swatch", aria_hidden="true")


def legend(names: Sequence[str]) -> Markup:
    items = [tag("li", swatch(f"m-{name}"), STATE_TITLES[name]) for name in names]
    return tag("ul", items, class_="legend")


def hatches() -> Markup:
    """Fills with a pattern: their colours alone are alike in grey."""
    marks = {
        "exposed": tag("path", d="M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2"),
        "wait": tag("circle", cx=3, cy=3, r=1.1),
        "copy": tag("path", d="M0,6 l6,-6 M0,0 l6,6"),
        "unknown": tag("path", d="M0,3 h6"),
    }
    patterns = [
        tag(
            "pattern",
            tag("rect", width=6, height=6, class_=f"ground-{name}"),
            mark,
            id=f"fill-{name}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for name, mark in marks.items()
    ]
    return tag("svg", tag("defs", patterns), class_="hatches", aria_hidden="true")


def typeset(text: str) -> str:
    """Real minus signs before numbers, and no line break in an interval or before a unit."""
    text_typeset = re.sub(r"( %)? \[[^][]{1,30}\]", lambda match: match[0].replace(" ", "\u00a0"), text)
    text_typeset = re.sub(r"(?<=\d) (?=%|ms\b)", "\u00a0", text_typeset)
    return re.sub(r"(?<![\w.])-(?=\d)", MINUS, text_typeset)
