"""sweep.html: the cells of a matrix as one page that loads nothing."""

import math
from collections.abc import Sequence
from pathlib import Path

from aorta.errors import RecordError
from aorta.files import write_whole
from aorta.page.frame import framed
from aorta.page.parts import Markup, at_percent, bar, bullets, cell, chart, section, table, tag
from aorta.sweep.effects import CellResult, Effect
from aorta.sweep.series import Series
from aorta.sweep.table import effect_text, failed_text, headline, notes_of, titled


def write_page(series: Series, results: Sequence[CellResult], path: Path) -> None:
    """Whole or not at all. RecordError where it cannot be written."""
    try:
        write_whole(path, page(series, results).encode())
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error


def page(series: Series, results: Sequence[CellResult]) -> str:
    heading = f"sweep of {len(results)} cells"
    answer = section("answer", headline(series, results), bullets(notes_of(series, results)))
    body = [answer, section("failures", "Failures", _failures(results))]
    for number, metric in enumerate(series.metrics):
        body.append(section(f"metric-{number}", titled(metric), _metric(series, results, number)))
    body.append(section("runs", "Runs", _runs(series)))
    links = {"answer": "Answer", "failures": "Failures", "metric-0": "Metrics", "runs": "Runs"}
    return framed(heading, body, links)


def _failures(results: Sequence[CellResult]) -> Markup:
    rows = []
    for result in results:
        low, high = (100 * end for end in result.failures.interval)
        share = 100 * result.failures.num_failed / max(1, result.failures.num_runs)
        marks = [
            bar(0, share, "v-worse", 4, 10),
            tag("line", x1=at_percent(low), x2=at_percent(high), y1="9", y2="9", class_="interval v-none"),
        ]
        rows.append(
            tag(
                "tr",
                tag("th", result.name, scope="row"),
                tag("td", failed_text(result), class_="num"),
                tag("td", chart(marks, 18, failed_text(result)), class_="wide"),
                tag("td", result.failures.first_line, class_="why"),
            )
        )
    columns = [
        ("cell", "", False),
        ("failed", "", False),
        ("0 to 100 %", "", False),
        ("first line", "", False),
    ]
    return table("How often runs fail, with the 95 % interval of the share", columns, rows)


def _metric(series: Series, results: Sequence[CellResult], number: int) -> Markup:
    effects = [result.effects[number] for result in results]
    reach = _reach(effects)
    rows = []
    for result, effect in zip(results, effects, strict=True):
        drawn = None
        if effect.ratio is not None and effect.ratio > 0:
            drawn = chart(_marks(effect, reach), 18, f"ratio {effect.ratio:.3f}")
        rows.append(
            tag(
                "tr",
                tag("th", result.name, scope="row"),
                cell(effect.value),
                tag("td", drawn, class_="wide"),
                tag("td", effect_text(effect, series.matters)),
            )
        )
    columns = [("cell", "", False), ("median", "", True), ("over the baseline", "", False), ("", "", False)]
    caption = f"Ratio to the baseline, from 1/{math.exp(reach):.2f} to {math.exp(reach):.2f} on a log axis"
    return table(caption, columns, rows)


def _reach(effects: Sequence[Effect]) -> float:
    ends = [
        abs(math.log(end))
        for effect in effects
        for end in (effect.interval or ((effect.ratio,) * 2 if effect.ratio else ()))
        if end > 0
    ]
    return min(max([0.02, *ends]), math.log(4))


def _marks(effect: Effect, reach: float) -> list[Markup]:
    def place(value: float) -> str:
        return at_percent(50 + 46 * max(-1.0, min(1.0, math.log(value) / reach)))

    kinds = {"faster": "better", "better": "better", "slower": "worse", "worse": "worse"}
    kind = kinds.get(effect.verdict, "none")
    marks = [tag("line", x1="50%", x2="50%", y1="0", y2="18", class_="axis")]
    if effect.interval is not None:
        low, high = effect.interval
        marks.append(tag("line", x1=place(low), x2=place(high), y1="9", y2="9", class_=f"interval v-{kind}"))
    assert effect.ratio is not None
    return [*marks, tag("circle", cx=place(effect.ratio), cy="9", r="3.5", class_=f"v-{kind}")]


def _runs(series: Series) -> Markup:
    rows = [
        tag(
            "tr",
            tag("td", str(run.round + 1), class_="num"),
            tag("th", run.variant, scope="row"),
            *(cell(run.values.get(metric.name)) for metric in series.metrics),
            tag("td", "failed" if run.is_failed else ""),
            tag("td", run.failure, class_="why"),
        )
        for run in series.runs
    ]
    columns = [
        ("trial", "", True),
        ("cell", "", False),
        *((titled(metric), "", True) for metric in series.metrics),
        ("", "", False),
        ("", "", False),
    ]
    return table("Every run, in the order in which they ran", columns, rows)
