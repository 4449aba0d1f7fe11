"""aorta gate: a run against the baseline that was blessed, with an exit code and a history."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.cli.options import PATH, json_option, matters_option, output_option
from aorta.command_line import OneScreenCommand, output_of_verdict
from aorta.errors import CANNOT_TELL, FINE, ReportError

if TYPE_CHECKING:
    from aorta.account.model import Comparison


@click.command("gate", cls=OneScreenCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--baseline", required=True, type=PATH, metavar="REF", help="A blessed file, or a run's folder."
)
@click.option("--bless", "is_blessed", is_flag=True, help="Make the runs the baseline, and compare nothing.")
@click.option("--history", type=PATH, metavar="FILE", help="Add a line to FILE.jsonl; its page is FILE.html.")
@matters_option
@click.option("--allow-cannot-tell", is_flag=True, help="Exit 0 where one cannot tell.")
@output_option(help="Folder of the report; default: RUN/gate.")
@json_option
def gate_command(
    runs: tuple[Path, ...],
    baseline: Path,
    is_blessed: bool,
    history: Path | None,
    matters: float,
    allow_cannot_tell: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Judge one RUN, or several of one program, against a baseline.

    aorta gate run1 run2 run3 --baseline perf/baseline.zip --bless

    aorta gate run1 run2 run3 --baseline perf/baseline.zip --history perf/history

    Exit code 0: the same within --matters, or faster; 1: slower; 3: cannot tell, also where the program, its
    model or the devices are others than the baseline's. Three runs a side tell what single ones cannot.
    """
    from aorta.account.judge.alike import others_than
    from aorta.account.results.baseline import (
        baseline_runs,
        bless,
        history_line,
        read_history,
        write_history,
    )
    from aorta.cli.report import report_folder, status_of_difference
    from aorta.files import write_whole
    from aorta.page.history import history_page
    from aorta.page.write import Outputs, write_report

    if is_blessed:
        bless(runs, baseline)
        click.echo(f"blessed {len(runs)} run{'s' * (len(runs) > 1)}: {baseline}")
        return FINE
    lines_file = None if history is None else history.with_name(f"{_stem(history)}.jsonl")
    lines = [] if lines_file is None else read_history(lines_file)
    folder = output or report_folder(runs[0], "gate")
    with baseline_runs(baseline) as (references, manifest):
        sides = ("baseline", "candidate")
        labels = [sides[0]] * len(references) + [sides[1]] * len(runs)
        written = write_report(
            [*references, *runs],
            labels,
            folder,
            *sides,
            matters=matters,
            outputs=Outputs(perfetto=False, parquet=False),
        )
    comparison = written.report.comparison
    if comparison is None:
        raise ReportError("nothing was compared")
    datasets = written.report.datasets
    other = others_than(datasets[sides[0]], datasets[sides[1]])
    status = CANNOT_TELL if other else status_of_difference(comparison)
    if lines_file is not None:
        lines.append(history_line(comparison, datasets[sides[1]], manifest, status))
        write_history(lines_file, lines)
        page = history_page(_stem(lines_file), lines)
        write_whole(lines_file.with_suffix(".html"), page.encode())
    with output_of_verdict():
        if as_json:
            click.echo((folder / "summary.json").read_text(), nl=False)
        else:
            click.echo("\n".join(_lines(comparison, other, status)))
            click.echo(f"wrote {folder / 'report.html'}")
            if lines_file is not None:
                click.echo(f"wrote {lines_file}, {lines_file.with_suffix('.html')}")
    return FINE if allow_cannot_tell and status == CANNOT_TELL else status


def _stem(history: Path) -> str:
    return history.name.removesuffix(".jsonl").removesuffix(".html")


def _lines(comparison: "Comparison", other: str, status: int) -> list[str]:
    states = {FINE: "passed", CANNOT_TELL: "cannot tell"}
    lines = [f"gate {states.get(status, 'failed')}: {other or comparison.headline}"]
    if other:
        lines[0] += "; bless a baseline for it"
        lines.append(f"measured all the same: {comparison.headline}")
    differ = [
        f"{one.group}: {one.name} {one.reference or 'not set'} -> {one.candidate or 'not set'}"
        for one in comparison.differences
    ]
    return [*lines, *differ, comparison.scope]
