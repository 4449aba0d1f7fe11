"""Pictures of docs/pipelining.md from what benchmarks/pipelining.py wrote. Needs matplotlib.

PYTHONPATH=. python benchmarks/pipelining_pictures.py FOLDER_OR_FILE docs/pictures
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pipelining_numbers import FACTORIZED, HOISTED
from pipelining_results import runs_of

from aorta.page.parts import LIGHT

COLOURS = {
    "gemm": LIGHT["compute"],
    "comm": LIGHT["exposed"],
    "copy": LIGHT["hidden"],
    "other": LIGHT["wait"],
}
KIND_NAMES = {"gemm": "multiply", "comm": "NCCL kernel", "copy": "copy engine", "other": "other kernel"}
SHOWN_TIMELINES = ("serial", FACTORIZED, "join_hoisted", "breadth", "torch fused", "copy engine")
SHOWN_STRATEGIES = (
    "copy engine pairwise",
    "copy engine ring",
    "copy engine, signals by kernels",
    "torch fused",
    "breadth",
    "high priority",
    "join_hoisted",
    "developed",
    "serial",
    FACTORIZED,
)
DOTS_PER_INCH = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    sections = [
        section | {"queues": run["queues"]}
        for path in options.results
        for run in runs_of(path)
        for section in run["sections"]
    ]
    orders = {section["queues"]: section for section in sections if section["name"] == "orders"}
    if orders:
        saved(orders_figure(orders), options.folder / "pipelining-orders.png")
    compared = [section["comparison"] for section in sections if section["name"] == "strategies"]
    if compared:
        saved(strategies_figure(compared[:4]), options.folder / "pipelining-strategies.png")
    for section in sections:
        spans = section["of_rank"][0] if section["name"] == "timelines" else None
        if spans is not None:
            saved(
                timeline_figure(section, spans), options.folder / f"pipelining-timeline-{section['op']}.png"
            )


def saved(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=DOTS_PER_INCH, facecolor=LIGHT["paper"])
    print(path)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axis: Axes) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(colors=LIGHT["muted"], labelsize=8)


def orders_figure(orders: Mapping[int, Mapping[str, Any]], tiles: int = 4, streams: int = 4) -> Figure:
    """Every round of every order, with the times of no race won, one won, …, all won."""
    figure = new_figure(9.0, 3.6)
    axes = figure.subplots(1, len(orders), sharey=True, squeeze=False)[0]
    names = (FACTORIZED, *HOISTED)
    jitter = np.random.default_rng(0)
    for axis, (queues, section) in zip(axes, sorted(orders.items()), strict=True):
        ms = section["ms"]
        comm, gemm = (float(np.median(ms[f"{kind}/S{tiles}"])) for kind in ("comm", "gemm"))
        for won in range(tiles):
            level = comm + gemm - won * min(comm, gemm) / tiles
            axis.axhline(level, color=LIGHT["line"], linewidth=1, zorder=0)
            if axis is axes[-1]:
                axis.text(
                    len(names) - 0.45, level, f"{won} hidden", va="center", fontsize=7, color=LIGHT["muted"]
                )
        for place, name in enumerate(names):
            values = np.array(ms[f"{name}/S{tiles}/n{streams}"])
            x = place + jitter.uniform(-0.18, 0.18, len(values))
            colour = LIGHT["exposed"] if name == FACTORIZED else LIGHT["compute"]
            axis.plot(x, values, "o", markersize=3.2, color=colour, alpha=0.75, markeredgewidth=0)
        axis.set_title(f"{queues} queue{'s' if queues > 1 else ''}", fontsize=9, color=LIGHT["ink"])
        axis.set_xticks(
            range(len(names)), [name.replace("_", " ") for name in names], rotation=25, ha="right"
        )
        axis.tick_params("x", labelsize=7)
        axis.set_xlim(-0.5, len(names) - 0.5)
        axis.set_ylim(1.3, 2.0)
        plain(axis)
    axes[0].set_ylabel(f"ms, each round; S {tiles}, n {streams}", fontsize=8, color=LIGHT["muted"])
    return figure


def strategies_figure(compared: Sequence[Mapping[str, Any]]) -> Figure:
    """Times, with the multiply alone and each strategy's own bound."""
    figure = new_figure(9.0, 6.2)
    for axis, found in zip(figure.subplots(2, 2).flat, compared, strict=False):
        rows = {row["family"]: row for row in found["rows"]}
        names = [name for name in SHOWN_STRATEGIES if name in rows]
        places = np.arange(len(names))[::-1]
        gemm = found["gemm_ms"]["value"]
        for place, name in zip(places, names, strict=True):
            time = rows[name]["time_ms"]["value"]
            colour = (
                LIGHT["hidden"] if "copy" in name else LIGHT["wait"] if "torch" in name else LIGHT["compute"]
            )
            axis.barh(place, time, 0.7, color=LIGHT["outline"] if name == "serial" else colour)
            axis.text(time, place, f" {time:.3f}", va="center", fontsize=7, color=LIGHT["ink"])
            own = rows[name].get("own_bound_ms")
            if own is not None:
                axis.plot([own, own], [place - 0.35, place + 0.35], color=LIGHT["ink"], linewidth=1.2)
        axis.axvline(gemm, color=LIGHT["muted"], linewidth=1, linestyle=":")
        axis.set_yticks(places, names, fontsize=7)
        axis.set_xlim(0, 1.18 * max(rows[name]["time_ms"]["value"] for name in names))
        shape = f"{found['op']}  {found['m']},{found['k']},{found['n']}  {found['ranks']} ranks"
        axis.set_title(shape, fontsize=9, color=LIGHT["ink"])
        plain(axis)
    figure.supxlabel(
        "ms; dotted: the multiply alone; stroke: bound of its own transport", fontsize=8, color=LIGHT["muted"]
    )
    return figure


def timeline_figure(section: Mapping[str, Any], spans_of: Mapping[str, Sequence[Sequence[Any]]]) -> Figure:
    """One call of each, rows are streams of rank 0, all on one time axis."""
    names = [name for name in SHOWN_TIMELINES if spans_of.get(name)]
    streams = {name: max(span[0] for span in spans_of[name]) + 1 for name in names}
    figure = new_figure(9.0, 0.5 + sum(0.28 * num + 0.28 for num in streams.values()))
    heights = list(streams.values())
    axes = figure.subplots(len(names), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axis, name in zip(axes, names, strict=True):
        for stream, start_us, end_us, kind in spans_of[name]:
            width_ms = (end_us - start_us) / 1e3
            axis.barh(streams[name] - 1 - stream, width_ms, 0.8, start_us / 1e3, color=COLOURS[kind])
        total_ms = max(span[2] for span in spans_of[name]) / 1e3
        axis.set_title(f"{name}   {total_ms:.2f} ms", fontsize=8, loc="left", color=LIGHT["ink"], pad=2)
        axis.set_yticks([])
        axis.set_ylim(-0.6, streams[name] - 0.4)
        plain(axis)
        axis.spines["left"].set_visible(False)
    used = {span[3] for name in names for span in spans_of[name]}
    handles = [
        axes[0].barh(0, 0, color=COLOURS[kind], label=KIND_NAMES[kind]) for kind in COLOURS if kind in used
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=7, frameon=False)
    shape = f"{section['op']} {section['m']},{section['k']},{section['n']}, rank 0; rows are streams"
    axes[-1].set_xlabel(f"ms; {shape}", fontsize=8, color=LIGHT["muted"])
    return figure


if __name__ == "__main__":
    main()
