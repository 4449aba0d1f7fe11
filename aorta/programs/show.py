"""Text that the commands print: lint_text, prediction_text."""

import io
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aorta.programs.bounds import Prediction
from aorta.programs.lint.one_rank import Instruction, OrderEdge, Verdict
from aorta.programs.simulator import Ran, duration_us

WIDTH = 110
NUM_SHOWN = 1
"""Number of edges listed of each kind, unless all are asked for."""
BAR = 72
"""Width of the timeline's axis in characters."""


def lint_text(verdict: Verdict, show_all: bool = False) -> str:
    """Verdict, then edges with the chains of instructions that cause them."""
    missing, false = verdict.missing_edges, verdict.false_edges
    agree = "ranks agree" if not verdict.rank_mismatches else "ranks do not agree"
    lines = [
        f"{verdict.program}   {_count(verdict.num_ranks, 'rank')}   {_count(len(missing), 'missing edge')}   "
        f"{_count(len(false), 'false edge')}   {agree}"
    ]
    lines += [f"  {text}" for text in verdict.rank_mismatches]
    lines += _edges("missing edge", missing, show_all) + _edges("false edge", false, show_all)
    lines += [f"warning: {text}" for text in verdict.warnings]
    return "\n".join(lines)


def _edges(kind: str, edges: Sequence[OrderEdge], show_all: bool) -> list[str]:
    lines: list[str] = []
    for number, edge in enumerate(edges if show_all else edges[:NUM_SHOWN], start=1):
        lines += ["", f"{kind} {number} of {len(edges)}: {_call(edge.before)} -> {_call(edge.after)}"]
        lines += [f"  {edge.reason}", *_chain(edge.chain)]
    if len(edges) > NUM_SHOWN and not show_all:
        lines.append(f"  ... and {len(edges) - NUM_SHOWN} more like this (--all)")
    return lines


def _chain(chain: Iterable[Instruction]) -> list[str]:
    rows = [
        (
            f"line {link.line}" if link.line else "",
            " ".join(f"{name}={value}" for name, value in link.iteration.items()),
            link.stream,
            link.text,
        )
        for link in chain
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["    " + "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]


def _call(label: str) -> str:
    """Operation without the name of its work."""
    return label.partition(" = ")[2] or label


def prediction_text(prediction: Prediction, ran: list[Ran]) -> str:
    """Time and efficiency, then bounds, waterfall and timeline."""
    efficiency = "-" if prediction.efficiency is None else f"{prediction.efficiency:.2f}"
    head = f"{prediction.program}   {prediction.duration_us:,.1f} us predicted   efficiency {efficiency}"
    bounds = [
        ("serial", prediction.serial_us, "communication + compute"),
        ("pipeline bound", prediction.pipeline_bound_us, f"max + min / {prediction.num_tiles} tiles"),
        ("ideal", prediction.ideal_us, "the longer of the two"),
        ("communication", prediction.comm_us, "all slices alone"),
        ("compute", prediction.compute_us, "all slices alone"),
        ("exposed communication", prediction.exposed_comm_us, "not under compute"),
    ]
    water = prediction.waterfall
    parts = [
        ("pipeline bound", water.pipeline_bound_us, ""),
        ("dependency waste", water.dependency_waste_us, "order of the program"),
        ("interference", water.interference_us, "communication and compute share the device"),
        ("queue waste", water.queue_waste_us, "streams share queues"),
        ("host gap", water.host_gap_us, "the host is late"),
        ("predicted", prediction.duration_us, "sum of the above"),
    ]
    tables = "\n".join((_table("bounds", bounds), _table("where the time goes", parts)))
    if prediction.fault is not None:
        head += f"\nwarning: {prediction.fault}; aorta program lint lists them"
    return f"{head}\n\n{tables}\n{timeline_text(ran)}"


def _table(title: str, rows: Iterable[tuple[str, float, str]]) -> str:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="")
    table.add_column(title, min_width=22)
    table.add_column("us", justify="right", min_width=10)
    table.add_column("")
    for name, value, note in rows:
        table.add_row(Text(name), f"{value:,.1f}", Text(note))
    return _printed(lambda console: console.print(table))


def timeline_text(ran: list[Ran]) -> str:
    """Timeline with one row per stream: a digit is the tile that the stream runs, a dot is idle."""
    total_us = duration_us(ran)
    if total_us <= 0:
        return ""
    rows: dict[str, list[str]] = {}
    for kernel in ran:
        row = rows.setdefault(kernel.stream, ["."] * BAR)
        first = round(kernel.start_us / total_us * BAR)
        for column in range(first, max(first + 1, round(kernel.end_us / total_us * BAR))):
            row[min(column, BAR - 1)] = _mark(kernel)
    width = max(map(len, rows))
    lines = [f"  {name.ljust(width)}  {''.join(row)}" for name, row in sorted(rows.items())]
    return "\n".join([*lines, f"  {''.ljust(width)}  0{f'{total_us:,.1f} us'.rjust(BAR - 1)}"])


def _mark(kernel: Ran) -> str:
    """Character of a kernel: last digit of its tile's last index, or # where it has none."""
    parts = kernel.op.writes or kernel.op.reads
    index = parts[0].index if parts else ()
    return str(index[-1])[-1] if index else "#"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _printed(draw: Callable[[Console], None]) -> str:
    buffer = io.StringIO()
    draw(Console(file=buffer, width=WIDTH, color_system=None, highlight=False))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
