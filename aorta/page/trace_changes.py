"""Changes between two traces as text and CSV (`aorta compare` of two traces)."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from aorta.account.judge.trace_changes import Table, TraceChanges, WorkChange
from aorta.account.numbers import number
from aorta.files import replacing
from aorta.page.table import aligned

TITLES: dict[Table, str] = {
    "class": "kernels by class",
    "kernel": "kernels",
    "operator": "operators",
    "collective": "collectives",
}
SHOWN: dict[Table, int] = {"class": 8, "kernel": 10, "operator": 6, "collective": 6}
MOST_ROWS = 6
"""Of a table in the short form."""
COLUMNS = (
    "table", "class", "reference", "candidate", "operator", "shapes", "module", "matched_by", "reference_ms",
    "candidate_ms", "difference_ms", "reference_count", "candidate_count", "reference_min_ms",
    "reference_max_ms", "candidate_min_ms", "candidate_max_ms", "certainty",
)  # fmt: skip
LONGEST = 44
LAYER = re.compile(r"[_.]\d+(?=$|\.)")
"""Number of a layer in the name of a module."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def changes_text(changes: TraceChanges, labels: Sequence[str], is_long: bool) -> str:
    """The longest changes of each table, for a terminal. Without is_long the operators take the place of the
    kernels that they launch."""
    if changes.withheld:
        return f"what changed: not compared, {changes.withheld}"
    lines = [
        f"what changed, ms a step (medians of {changes.num_steps[0]} and {changes.num_steps[1]} steps,"
        f" {labels[0]} -> {labels[1]})"
    ]
    tables = [table for table in TITLES if changes.of_table(table)]
    if not is_long and "operator" in tables:
        tables.remove("kernel")
    # What is the same of every row is in the notes.
    is_told = len({row.certainty for row in changes.rows if row.reference_ms and row.candidate_ms}) > 1
    for table in tables:
        rows = changes.of_table(table)
        rows = over_modules(rows) if table == "kernel" else rows
        shown = rows[: SHOWN[table] if is_long else MOST_ROWS]
        cells = [(TITLES[table], "before", "after", "change", "launches", "")]
        for row in shown:
            told = row.certainty if is_told or not row.reference_ms or not row.candidate_ms else ""
            sides = (_ms(row.reference_ms), _ms(row.candidate_ms), number(row.difference_ms, sign=True))
            cells.append((_what(row), *sides, _launches(row), told))
        lines += ["", *aligned(cells)]
        if len(rows) > len(shown):
            lines.append(f"... and {len(rows) - len(shown)} more in changes.csv")
    return "\n".join([*lines, "", *(f"note: {note}" for note in changes.notes)])


def _ms(value: float | None) -> str:
    return "-" if value is None else number(value)


def over_modules(rows: Sequence[WorkChange]) -> list[WorkChange]:
    """Rows of kernels that are alike but for the layer that they are in, Qwen2Attention_4 and _7, as one:
    the sums of both sides' medians. What changed most first; changes.csv has every module."""
    groups: dict[tuple[str, ...], list[WorkChange]] = {}
    for row in rows:
        sides = (row.reference_ms is None, row.candidate_ms is None)
        module = LAYER.sub("", row.module)
        key = (row.reference, row.candidate, row.operator, row.shapes, module, str(sides))
        groups.setdefault(key, []).append(row)
    found = []
    for same in groups.values():
        first = same[0]
        if len(same) > 1:
            certainties = {row.certainty for row in same}
            first = first._replace(
                module=f"{LAYER.sub('', first.module)} x {len(same)}",
                reference_ms=_sum(row.reference_ms for row in same),
                candidate_ms=_sum(row.candidate_ms for row in same),
                difference_ms=sum(row.difference_ms for row in same),
                reference_count=sum(row.reference_count for row in same),
                candidate_count=sum(row.candidate_count for row in same),
                reference_range=None,
                candidate_range=None,
                certainty=first.certainty if len(certainties) == 1 else "differs by module: changes.csv",
            )
        found.append(first)
    return sorted(found, key=lambda row: -abs(row.difference_ms))


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _what(row: WorkChange) -> str:
    name = row.reference or row.candidate
    if row.reference and row.candidate and row.reference != row.candidate:
        name = f"{_short(row.reference, LONGEST // 2)} -> {_short(row.candidate, LONGEST // 2)}"
    shapes = row.shapes if row.table in ("operator", "collective") else row.operator
    text = _short(name, LONGEST) + (f" ({_short(shapes, LONGEST // 2)})" if shapes else "")
    if row.table == "kernel" and row.module:
        text += f" in {_short(row.module, LONGEST // 2)}"
    return "".join(c if c.isprintable() else "?" for c in text)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _launches(row: WorkChange) -> str:
    if row.reference_count == row.candidate_count:
        return f"{row.reference_count:g}"
    return f"{row.reference_count:g} -> {row.candidate_count:g}"


def cells_of(row: WorkChange) -> list[str | float | None]:
    """Cells of a row, in the order of COLUMNS."""
    texts = (row.table, row.work_class, row.reference, row.candidate, row.operator, row.shapes, row.module)
    return [
        *(_text(text) for text in texts),
        row.matched_by,
        row.reference_ms,
        row.candidate_ms,
        row.difference_ms,
        row.reference_count,
        row.candidate_count,
        *(row.reference_range or (None, None)),
        *(row.candidate_range or (None, None)),
        row.certainty,
    ]


def _text(text: str) -> str:
    """No control characters, and nothing that a spreadsheet takes for a formula."""
    plain = "".join(c if c.isprintable() else "?" for c in text)
    return f"'{plain}" if plain.startswith(FORMULA) else plain


def write_csv(changes: TraceChanges, path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(cells_of(row) for row in changes.rows)
    with replacing(path) as file:
        file.write(text.getvalue().encode("utf-8", "replace"))
