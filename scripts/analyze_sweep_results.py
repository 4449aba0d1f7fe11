"""Two sweeps against each other, matched by configuration: a table, and a picture.

    python scripts/analyze_sweep_results.py --baseline sweep_v1.json --test sweep_v2.json \
        [--threshold 5%] [--plot comparison.png]

Exit status: 0 no regression, 1 a regression, 2 bad input, 3 when it cannot be told.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import click  # noqa: E402

from aorta.account.results.compare import Compared, ResultComparison  # noqa: E402
from aorta.account.results.schema import Value, check_output, streams_of  # noqa: E402
from aorta.errors import BAD_INPUT, AortaError  # noqa: E402
from aorta.queues.cli.compare import compare_files, show_comparison  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = click.Path(path_type=Path)
COLOURS = {"regression": "#d6604d", "no regression": "#4d9221", "cannot tell": "#c7a008"}
MAX_ROWS = 60


@click.command()
@click.option("--baseline", "-b", required=True, multiple=True, type=FILES, help="Several: several runs.")
@click.option("--test", "-t", required=True, multiple=True, type=FILES)
@click.option("--threshold", default="5%", show_default=True)
@click.option("--any-device", is_flag=True, help="Judge results of different devices too.")
@click.option("--plot", type=FILES, default=Path("sweep_comparison.png"), show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace the picture.")
def main(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool, plot: Path,
    overwrite: bool,
) -> None:  # fmt: skip
    """Judge TEST against BASELINE."""
    found = compare_files(baseline, test, threshold, any_device)
    picture = draw_comparison(found, plot, overwrite)
    show_comparison(found)
    click.echo(f"wrote {picture}")
    sys.exit(found.exit_status)


def draw_comparison(comparison: ResultComparison, path: Path, overwrite: bool = False) -> Path:
    """The picture's path. RecordError where it is taken."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_output(path, overwrite)
    rows = [row for row in comparison.rows if row.ratio is not None and row.verdict in COLOURS][:MAX_ROWS]
    sweeps = _sweeps(comparison.rows)
    height = max(3.0, 0.24 * len(rows) + 1.4)
    figure = Figure(figsize=(13 if sweeps else 8, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if sweeps else 1, squeeze=False)[0]
    _ratios(axes[0], rows, comparison.threshold)
    if sweeps:
        _both_throughputs(axes[1], sweeps)
    figure.suptitle(f"test against baseline: {comparison.verdict}", x=0.01, ha="left", fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _ratios(axis: "Axes", rows: list[Compared], threshold: float) -> None:
    labels = [f"{_row_label(row.configuration)}  {row.metric}" for row in rows]
    axis.axvspan(1 - threshold, 1 + threshold, color="#000000", alpha=0.07, linewidth=0)
    axis.axvline(1, color="#000000", alpha=0.4, linewidth=0.8)
    for place, row in enumerate(rows):
        assert row.ratio is not None
        low, high = (row.interval.low, row.interval.high) if row.interval else (None, None)
        if low is not None and high is not None and low <= row.ratio <= high:
            axis.plot([low, high], [place, place], color=COLOURS[row.verdict], linewidth=2)
        axis.plot([row.ratio], [place], "o", color=COLOURS[row.verdict], markersize=5)
    for verdict, colour in COLOURS.items():
        if any(row.verdict == verdict for row in rows):
            axis.plot([], [], "o-", color=colour, label=verdict)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("test / baseline, 95 %")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        axis.legend(frameon=False, fontsize=8)


def _sweeps(rows: list[Compared]) -> dict[str, list[Compared]]:
    """Throughput rows of workloads that were compared at two stream counts or more."""
    rows_of: dict[str, list[Compared]] = {}
    for row in rows:
        if row.metric == "units_per_s" and isinstance(row.configuration.get("streams"), int):
            rows_of.setdefault(str(row.configuration["workload"]), []).append(row)
    return {
        name: sorted(workload_rows, key=lambda row: streams_of(row.configuration))
        for name, workload_rows in rows_of.items()
        if len(workload_rows) > 1
    }


def _both_throughputs(axis: "Axes", sweeps: dict[str, list[Compared]]) -> None:
    """Draws each workload over its own best baseline, so that units do not matter."""
    counts: set[int] = set()
    for number, (name, rows) in enumerate(sweeps.items()):
        best = max(row.baseline or 0.0 for row in rows) or 1.0
        streams = [streams_of(row.configuration) for row in rows]
        counts.update(streams)
        colour = f"C{number}"
        axis.plot(streams, [(row.baseline or 0.0) / best for row in rows], "o--", color=colour, alpha=0.6,
                  label=f"{name}: baseline")  # fmt: skip
        axis.plot(streams, [(row.test or 0.0) / best for row in rows], "s-", color=colour, label="test")
    axis.set_ylabel("throughput, best baseline = 1")
    _over_streams(axis, sorted(counts))


def _row_label(configuration: dict[str, Value]) -> str:
    if "workload" in configuration:
        return f"{configuration['workload']} {configuration.get('streams', '')}".rstrip()
    return " ".join(f"{name}={value}" for name, value in configuration.items())[:60]


def _over_streams(axis: "Axes", streams: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(streams), [str(count) for count in streams])
    axis.minorticks_off()
    axis.set_xlabel("streams")
    axis.set_ylim(0, axis.get_ylim()[1])
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="best")


def refuse(message: str) -> None:
    """Ends with one line for a mistake that a user can fix."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(BAD_INPUT)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        refuse(error.format_message())
    except AortaError as error:
        refuse(str(error))
