"""The page of a gate's history: each comparison with the baseline, and what its step was made of."""

import datetime
import math
from collections.abc import Sequence

from aorta.account.judge.cells import CELLS
from aorta.account.results.baseline import HistoryLine
from aorta.page.frame import framed
from aorta.page.parts import (
    Markup,
    at_percent,
    bar,
    cell,
    cell_mark,
    chart,
    empty,
    percent,
    quantity,
    row,
    section,
    table,
    tag,
)

WIDTH, HEIGHT = 100.0, 160
KINDS = {"better": "better", "worse": "worse"}


def history_page(name: str, lines: Sequence[HistoryLine]) -> str:
    """The source of the page."""
    newest = lines[-1].headline if lines else "nothing was compared yet"
    return framed(
        f"history of {name}",
        [
            section("answer", newest, _curve(lines)),
            section("parts", "Parts of the step", _parts(lines)),
            section("runs", "Comparisons", _rows(lines)),
        ],
        {"answer": "Answer", "parts": "Parts", "runs": "Comparisons"},
    )


def _curve(lines: Sequence[HistoryLine]) -> Markup:
    """Ratio to the baseline, one mark a comparison, with its interval."""
    drawn = [line for line in lines if line.ratio is not None and line.ratio > 0]
    if not drawn:
        return empty("No ratio was measured.")
    ends = [
        abs(math.log(end)) for line in drawn for end in (*(line.interval or ()), line.ratio or 1.0) if end > 0
    ]
    reach = min(max([0.02, *ends]), math.log(4))

    def height(ratio: float) -> float:
        return HEIGHT / 2 - (HEIGHT / 2 - 8) * max(-1.0, min(1.0, math.log(ratio) / reach))

    marks = [tag("line", x1="0%", x2="100%", y1=HEIGHT / 2, y2=HEIGHT / 2, class_="axis")]
    for number, line in enumerate(drawn):
        x = at_percent(WIDTH * (number + 0.5) / len(drawn))
        kind = f"v-{KINDS.get(line.verdict, 'none')}"
        if line.interval is not None and line.interval[0] > 0:
            low, high = (f"{height(end):.1f}" for end in line.interval)
            marks.append(tag("line", x1=x, x2=x, y1=low, y2=high, class_=f"interval {kind}"))
        assert line.ratio is not None
        hover = tag("title", f"{_when(line.unix_ns)}: {line.headline}")
        marks.append(tag("circle", hover, cx=x, cy=f"{height(line.ratio):.1f}", r="4", class_=kind))
        if number and line.blessed_unix_ns != drawn[number - 1].blessed_unix_ns:
            x = at_percent(WIDTH * number / len(drawn))
            marks.append(tag("line", x1=x, x2=x, y1="0", y2=str(HEIGHT), class_="axis"))
    text = (
        f"{drawn[-1].metric} over the baseline, {percent(math.exp(-reach) - 1, sign=True)} to"
        f" {percent(math.exp(reach) - 1, sign=True)}; a vertical line: another baseline"
    )
    return Markup(chart(marks, HEIGHT, text) + tag("p", text, class_="note"))


def _parts(lines: Sequence[HistoryLine]) -> Markup:
    """A bar for each comparison, by the cells of the candidate's step."""
    sums = [sum(line.cells.values()) for line in lines]
    longest = max(sums, default=0.0)
    if not longest:
        return empty("No parts of a step were measured.")
    rows = []
    for line, total in zip(lines, sums, strict=True):
        left, marks = 0.0, []
        for name, ms in line.cells.items():
            right = left + 100 * max(0.0, ms) / longest
            title = CELLS[name].title if name in CELLS else name
            marks.append(bar(left, right, cell_mark(name), 3, 12, f"{title} {quantity(ms, 'ms')}"))
            left = right
        rows.append(
            row(
                _when(line.unix_ns),
                cell(total),
                tag("td", chart(marks, 18, f"{total:.4g} ms"), class_="wide"),
            )
        )
    return table(
        "Means of the candidates' steps, ms",
        [("when", "", False), ("step", "ms", True), ("", "", False)],
        rows,
    )


def _rows(lines: Sequence[HistoryLine]) -> Markup:
    rows = [
        row(_when(line.unix_ns), (line.commit or "")[:12], cell(line.reference), cell(line.candidate),
            line.verdict, tag("td", line.headline, class_="why"))
        for line in reversed(lines)
    ]  # fmt: skip
    columns = [
        ("when", "", False), ("commit", "", False), ("baseline", "", True), ("candidate", "", True),
        ("verdict", "", False), ("", "", False),
    ]  # fmt: skip
    return table("Newest first", columns, rows)


def _when(unix_ns: int) -> str:
    return datetime.datetime.fromtimestamp(unix_ns / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M")
