"""aorta report and aorta compare: read runs or traces, write the report, print its table."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.cli.options import (
    PATH,
    file_options,
    label_option,
    long_option,
    matters_option,
    output_option,
    report_options,
    run_spread_option,
)
from aorta.command_line import OneScreenCommand, output_of_verdict, rare
from aorta.errors import CANNOT_TELL, FINE, VIOLATED, ReportError

if TYPE_CHECKING:
    from aorta.account.model import Comparison, Progress
    from aorta.traces.steps import Reading


@click.command("report", cls=OneScreenCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@output_option(help="Folder of the report; default: RUN/report.")
@label_option()
@long_option
@report_options
@file_options(by_default=True)
def report_command(
    runs: tuple[Path, ...], label: tuple[str, ...], output: Path | None, **options: Any
) -> int:
    """Show where the time of each RUN goes.

    RUN is the folder of a run (artifacts, for instance) or traces: Kineto, rocprofv3, Nsight Systems.
    Writes a page, a Perfetto trace and summary.json. `aorta why RUN` is the long form: causes and
    what to change.
    """
    return write_and_print(runs, _labels(runs, label), output or report_folder(runs[0]), **options)


@click.command("compare", cls=OneScreenCommand)
@click.argument("reference", metavar="REFERENCE", type=PATH)
@click.argument("candidate", metavar="CANDIDATE", type=PATH)
@output_option(help="Folder of the report; default: CANDIDATE/comparison.")
@click.option(
    "--fail-on-difference",
    is_flag=True,
    help="Exit 1 if slower, 3 if one cannot tell.",
)
@rare(
    "--allow-cannot-tell",
    is_flag=True,
    section="Continuous integration",
    help="With --fail-on-difference: exit 0 where one cannot tell.",
)
@matters_option
@run_spread_option
@label_option()
@long_option
@report_options
@file_options(by_default=False)
def compare_command(
    reference: Path, candidate: Path, label: tuple[str, ...], output: Path | None, **options: Any
) -> int:
    """Compare CANDIDATE with REFERENCE: a verdict per metric, and where the step time went.

    Both are folders of runs, or traces. Of two traces, kernels, operators and collectives are matched and
    listed by what changed most, on the terminal and in changes.csv. Writes a page and summary.json.
    """
    runs = (reference, candidate)
    labels = _labels(runs, label)
    folder = output or report_folder(candidate, "comparison")
    status = write_and_print(runs, labels, folder, sides=labels, **options)
    reading = trace_reading(*(options[name] for name in ("comm_rules", "step_kernel", "step_period")))
    text = _changes(runs, labels, folder, reading, options["jobs"], options["long"])
    if text and not options["as_json"]:
        with output_of_verdict():
            click.echo(f"\n{text}")
    return status


def write_and_print(
    runs: Sequence[Path],
    labels: Sequence[str],
    output: Path,
    *,
    sides: Sequence[str | None] = (),
    fail_on_difference: bool = False,
    allow_cannot_tell: bool = False,
    as_json: bool = False,
    open_page: bool = False,
    jobs: int | None = None,
    comm_rules: Path | None = None,
    step_kernel: str | None = None,
    step_period: int | None = None,
    strict: bool = False,
    **options: Any,
) -> int:
    """Write the report of runs into output, print it, and return the exit code.

    sides: labels of the reference and the candidate, where two of the runs are compared. comm_rules,
    step_kernel, step_period: for runs that are traces (trace_reading). strict: refuse a damaged run,
    as every gate does. options: other fields of aorta.page.write.Outputs, and arguments of make_report.
    """
    from aorta.page.write import Outputs, write_report
    from aorta.processes import usable_cores
    from aorta.why.causes.rank import causes_of

    outputs = {field.name: options.pop(field.name) for field in fields(Outputs) if field.name in options}
    strict = strict or fail_on_difference or outputs.get("budget") is not None
    is_long = outputs.get("long", False) and not sides
    with progress_bar() as progress:
        written = write_report(
            runs,
            labels,
            output,
            *(sides or (None, None)),
            jobs=jobs,
            progress=progress,
            reading=trace_reading(comm_rules, step_kernel, step_period, strict, is_long),
            outputs=Outputs(jobs=jobs or usable_cores(), **outputs),
            explain=causes_of,
            **options,
        )
    with output_of_verdict():
        if as_json:
            click.echo((output / "summary.json").read_text(), nl=False)
        else:
            click.echo(written.text)
    if open_page:
        open_in_browser(output)
    if written.exit_status == FINE and fail_on_difference:
        status = status_of_difference(written.report.comparison)
        return FINE if allow_cannot_tell and status == CANNOT_TELL else status
    return written.exit_status


def status_of_difference(comparison: "Comparison | None") -> int:
    """Of the metric that answers the question: 0 only where it says that the candidate is no slower."""
    if comparison is None:
        return FINE
    verdict = comparison.metrics[comparison.main].verdict
    if verdict == "worse":
        return VIOLATED
    return FINE if verdict in ("same", "better") else CANNOT_TELL


def _changes(
    runs: Sequence[Path],
    labels: Sequence[str],
    output: Path,
    reading: "Reading",
    jobs: int | None,
    is_long: bool,
) -> str:
    """Write and return what changed between two traces; '' if one of the two is not a trace."""
    from aorta.account.judge.trace_changes import trace_changes
    from aorta.page.trace_changes import changes_text, write_csv
    from aorta.traces.inventory import rank_inventory
    from aorta.traces.sources import map_ranks, open_source, recognise

    if "records" in map(recognise, runs):
        return ""
    inventory = partial(rank_inventory, reading=reading)
    sides = [list(map_ranks(inventory, open_source(run), jobs=jobs)) for run in runs]
    changed = trace_changes(*sides)
    write_csv(changed, output / "changes.csv")
    return changes_text(changed, labels, is_long)


def trace_reading(
    comm_rules: Path | None = None,
    step_kernel: str | None = None,
    step_period: int | None = None,
    strict: bool = True,
    operators: bool = False,
) -> "Reading":
    """How runs and traces are read. comm_rules: a file for aorta.traces.classify.load_rules."""
    from aorta.traces.classify import load_rules
    from aorta.traces.steps import Reading, StepRule

    return Reading(load_rules(comm_rules), StepRule(step_kernel, step_period), operators, strict)


def report_folder(run: Path, name: str = "report") -> Path:
    """The folder for the report of a run: in the run's folder, or beside a trace file. One of that name
    whose page is not aorta's, as in a project's own folder, is left alone."""
    if run.is_dir():
        is_foreign = (run / name / "report.html").exists() and not (run / name / "summary.json").exists()
        return run / (f"aorta-{name}" if is_foreign else name)
    return run.parent / f"{_stem(run)}_{name}"


def _stem(run: Path) -> str:
    """Name of a folder, or of a file without its suffixes."""
    return run.name if run.is_dir() else run.name.split(".")[0] or run.name


def label_of(name: str) -> str:
    """The name as a label: printable, at most 100 signs long."""
    return "".join(sign if sign.isprintable() else "?" for sign in name)[-100:].strip() or "run"


def _labels(runs: Sequence[Path], explicit: Sequence[str]) -> list[str]:
    """The given labels, else the folders' names, with as many parents as tell them apart."""
    if explicit:
        if len(explicit) != len(runs):
            raise ReportError(f"--label must name each run: got {len(explicit)} for {len(runs)}")
        return list(explicit)
    paths = [Path(os.path.abspath(run)) for run in runs]  # resolve() raises where links go in circles
    parts = [(*path.parts[:-1], _stem(path)) for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = [label_of("-".join(part.strip("/") for part in path[-depth:])) for path in parts]
        if len(set(labels)) == len(set(parts)):
            break
    return labels


def open_in_browser(output: Path) -> None:
    """Open the report's page, where there is one."""
    import webbrowser

    page = output / "report.html"
    if page.exists():
        webbrowser.open(page.resolve().as_uri())


@contextmanager
def progress_bar() -> "Iterator[Progress | None]":
    """A progress bar on stderr if that is a terminal; it disappears when reading is done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(label: str, num_done: int, total: int) -> None:
            if label not in tasks or num_done == 1:
                tasks[label] = bar.add_task(escape(label), total=total)
            bar.update(tasks[label], completed=num_done)

        yield progress
