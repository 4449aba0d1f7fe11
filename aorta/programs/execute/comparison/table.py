"""A comparison as a table: the answer first, then strategies, then where the time of each went."""

from collections.abc import Sequence

from aorta.programs.execute.comparison.compare import Figure, StrategyComparison, StrategyRow

PARTS = (
    ("bound", "bound"),
    ("fill", "fill"),
    ("decomposition", "slices"),
    ("dependency_waste", "waits"),
    ("interference", "interf."),
    ("scheduling_gap", "gaps"),
    ("host_gap", "host"),
)


def comparison_text(comparison: StrategyComparison) -> str:
    """Several lines, without colour; a dash where something was not measured (the JSON says why)."""
    lines = [
        f"{comparison.op}   M {comparison.m}  N {comparison.n}  K {comparison.k}   {comparison.dtype}"
        f"   {comparison.ranks} x {comparison.device}"
        f"   {comparison.rounds} rounds, slowest rank",
        comparison.verdict,
        f"serial {_ms(comparison.serial_ms)}   communication alone {_ms(comparison.comm_ms)}   multiply alone"
        f" {_ms(comparison.gemm_ms)}   bound {comparison.bound_ms:.3f} ms"
        + (
            ""
            if comparison.copy_engine_ms is None
            else f"   copy engine alone {_ms(comparison.copy_engine_ms)}"
        ),
        "efficiency: of the bound above; own: of the longer of the multiply and its own transport alone",
        "",
    ]
    lines += _aligned(
        [
            HEAD,
            *map(_row, comparison.rows),
        ]
    )
    rows_apart = [row for row in comparison.rows if row.waterfall_ms is not None]
    if rows_apart:
        lines += ["", "where the time with the host level goes, ms (a row sums to the last column)"]
        head = ("strategy", *(title for _, title in PARTS), "time")
        lines += _aligned([head, *(_parts(row) for row in rows_apart)])
    if comparison.unavailable:
        lines += ["", "not available"]
        lines += [f"  {name}: {reason}" for name, reason in comparison.unavailable.items()]
    notes = dict.fromkeys(f"{row.family}: {row.note}" for row in comparison.rows if row.note)
    return "\n".join([*lines, *([""] if notes else []), *notes])


HEAD = (
    "strategy",
    "settings",
    "ms",
    "95 %",
    "x multiply",
    "efficiency",
    "x own bound",
    "own",
    "of pipe bound",
    "host level",
)


def _row(row: StrategyRow) -> tuple[str, ...]:
    share = row.share_of_pipeline_bound
    return (
        row.family,
        " ".join(f"{key}={value}" for key, value in row.settings.items()),
        f"{row.time_ms.value:.3f}",
        f"{row.time_ms.low:.3f}..{row.time_ms.high:.3f}",
        f"{row.time_over_gemm:.2f}",
        _share(row.efficiency),
        "-" if row.time_over_own_bound is None else f"{row.time_over_own_bound:.2f}",
        _share(row.efficiency_of_own_bound),
        "-" if share is None else f"{100 * share:.0f} %",
        f"{row.time_host_level_ms.value:.3f}",
    )


def _parts(row: StrategyRow) -> tuple[str, ...]:
    assert row.waterfall_ms is not None
    values = [row.waterfall_ms[name] for name, _ in PARTS]
    return (row.family, *(f"{value:.3f}" for value in values), f"{sum(values):.3f}")


def _share(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:.2f}"


def _ms(figure: Figure) -> str:
    return f"{figure.value:.3f} ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first two columns of words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    words = 2 if rows[0][1] == "settings" else 1
    return [
        "   ".join(
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
