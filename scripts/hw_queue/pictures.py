"""docs/pictures/queues.png from a trimmed result of benchmarks/queues.py.

    python scripts/hw_queue/pictures.py RESULT [--output docs/pictures/queues.png]

Needs matplotlib.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREY, GREEN = "#2166ac", "#d6604d", "#888888", "#4d9221"
COLOURS = {"large_gemm_only": BLUE, "hetero_kernels": ORANGE, "tiny_kernel_stress": GREEN}
NUM_QUEUES = 8
"""Of an H200 by default: docs/queues.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/queues.png"))
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    points = sorted(result["points"], key=lambda point: int(point["configuration"]["streams"]))
    figure = Figure(figsize=(12, 3.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    throughput, at_once, delay = figure.subplots(1, 3)
    for name in COLOURS:
        own = [p for p in points if p["configuration"]["workload"] == name and not graphs(p)]
        draw_throughput(throughput, name, own)
        draw_at_once(at_once, name, own)
    draw_delay(delay, [p for p in points if p["configuration"]["workload"] == "hetero_kernels"])
    at_once.axhline(
        NUM_QUEUES, color=GREY, linestyle="--", linewidth=1, label=f"{NUM_QUEUES} hardware queues"
    )
    for axis in (throughput, at_once, delay):
        finish(
            axis,
            sorted(
                {p["configuration"]["streams"] for p in points if p["configuration"]["workload"] in COLOURS}
            ),
        )
    devices, version = result["devices"], result["versions"]["torch"]
    title = f"{len(devices)} x {devices[0]}   torch {version}   {result['date']}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    figure.savefig(given.output)
    print(f"wrote {given.output} ({given.output.stat().st_size / 1024:.0f} KiB)")


def graphs(point: dict[str, Any]) -> bool:
    return bool(point["configuration"]["options"].get("graphs"))


def streams(points: list[dict[str, Any]]) -> list[int]:
    return [int(point["configuration"]["streams"]) for point in points]


def label(name: str, points: list[dict[str, Any]]) -> str:
    bound = any(run["launch_bound"] for point in points for run in point["ranks"])
    return f"{name} (launch-bound)" if bound else name


def draw_throughput(axis: Axes, name: str, points: list[dict[str, Any]]) -> None:
    rates = [point["metrics"]["units_per_s"][0] for point in points]
    if not rates:
        return
    axis.plot(streams(points), [one / rates[0] for one in rates], "o-", color=COLOURS[name],
              label=label(name, points), markersize=4)  # fmt: skip
    axis.set_title("throughput over that of the fewest streams", loc="left", fontsize=10)
    axis.set_ylabel("x")


def draw_at_once(axis: Axes, name: str, points: list[dict[str, Any]]) -> None:
    kept = [point for point in points if "achieved_concurrency" in point["metrics"]]
    values = [point["metrics"]["achieved_concurrency"][0] for point in kept]
    axis.plot(streams(kept), values, "o-", color=COLOURS[name], label=label(name, kept), markersize=4)
    axis.set_title("pieces at a time, from events", loc="left", fontsize=10)


def draw_delay(axis: Axes, points: list[dict[str, Any]]) -> None:
    """From submission until the stream reaches the kernel."""
    for leg, colour, text in (
        ("beside_large", ORANGE, "beside 10 ms GEMMs"),
        ("alone", BLUE, "tiny kernels alone"),
    ):
        for quantile, style in (("p50", "o-"), ("p99", "s--")):
            name = f"queue_delay_{leg}_{quantile}_us"
            kept = [point for point in points if name in point["metrics"]]
            values = [point["metrics"][name][0] / 1e3 for point in kept]
            axis.plot(streams(kept), values, style, color=colour, label=f"{text}, {quantile}", markersize=4)
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.set_title("hetero_kernels: from submission until its turn", loc="left", fontsize=10)


def finish(axis: Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel("streams")
    if axis.get_yscale() == "linear":
        axis.set_ylim(0, 1.4 * axis.get_ylim()[1])
    axis.grid(axis="y", color="#000000", alpha=0.12, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(
        frameon=False, fontsize=7.5, loc="upper left" if axis.get_yscale() == "linear" else "center left"
    )


if __name__ == "__main__":
    main()
