"""aorta report and aorta compare."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aorta.cli.choice import rank_set, step_span
from aorta.command_line import output_of_verdict
from aorta.errors import ReportError
from aorta.exit_codes import CANNOT_TELL, FINE, VIOLATED

if TYPE_CHECKING:
    from aorta.report.model import Progress
    from aorta.traces.reading import Reading

PATH = click.Path(path_type=Path)
OUTPUTS = {
    "pictures": "{label}_timeline.png and comparison.png",
    "page": "report.html",
    "perfetto": "{label}.perfetto.json.gz",
    "parquet": "steps.parquet",
}


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that report and compare share."""
    for name, text in reversed(OUTPUTS.items()):
        command = click.option(
            f"--no-{name}", name, flag_value=False, default=True, type=bool, help=f"Leave out {text}."
        )(command)
    for option in (
        click.option(
            "--comm-rules", type=PATH, help="YAML file: kernels of traces that are communication, by name."
        ),
        click.option(
            "--dask",
            help="Dask reads the ranks: tcp://host:8786, or local[:N] for N workers here.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(1),
            help="Processes that read ranks. Default: one per core; 1 below 16 MiB to read.",
        ),
        click.option(
            "--step-kernel", metavar="NAME", help="Of traces: a step begins where a kernel of this name does."
        ),
        click.option(
            "--step-period",
            type=click.IntRange(1),
            metavar="N",
            help="Of traces: kernels of the compute stream in a step; of --step-kernel, every how many.",
        ),
        click.option(
            "--no-cache",
            "cache",
            flag_value=False,
            default=True,
            type=bool,
            help="Neither use nor fill the cache of read traces.",
        ),
        click.option(
            "--steps",
            metavar="FIRST:LAST",
            help="Global steps of the Perfetto trace and of the page's timeline; statistics are of all.",
        ),
        click.option(
            "--ranks",
            metavar="0,1,4-7",
            help="Ranks of the same; of a large run those that tell most, unless given.",
        ),
        click.option("--markdown", type=PATH, help="Summary of the comparison and the budget, for CI."),
        click.option("--junit", type=PATH, help="JUnit XML of the budget, for CI."),
        click.option("--budget", type=PATH, help="YAML file of limits, such as 'exposed_ms: {max: 12.0}'."),
        click.option(
            "--warmup", type=click.IntRange(0), help="Steps to leave out of each run, instead of the rule."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of the table."),
        click.option("--open", "open_page", is_flag=True, help="Open the page in a browser."),
        click.option("--output", "-o", type=PATH, help="Folder for everything that is written."),
    ):
        command = option(command)
    return command


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--label", multiple=True, help="Name of the run, in the same order; default: its folder's name."
)
@report_options
def report_command(
    runs: tuple[Path, ...], label: tuple[str, ...], output: Path | None, **options: Any
) -> int:
    """Where the time of each RUN goes.

    RUN is the folder of a run (artifacts, for instance), or traces: Kineto, rocprofv3, Nsight Systems.
    The report is written to RUN/report, or beside a trace file, unless --output says where.
    """
    labels = _labels(runs, label)
    return _report(runs, labels, output or report_folder(runs[0]), options)


@click.command("compare")
@click.argument("reference", metavar="REFERENCE", type=PATH)
@click.argument("candidate", metavar="CANDIDATE", type=PATH)
@click.option("--label", multiple=True, help="Names of the two, in the same order; default: their folders'.")
@click.option(
    "--fail-on-difference",
    is_flag=True,
    help="Exit code 1 where the step time differs, 3 where a drift may explain it.",
)
@click.option(
    "--no-changes",
    "changes",
    flag_value=False,
    default=True,
    type=bool,
    help="Do not write changes.csv when two traces are compared.",
)
@click.option("--xlsx", is_flag=True, help="Also write changes.xlsx when two traces are compared.")
@report_options
def compare_command(
    reference: Path,
    candidate: Path,
    label: tuple[str, ...],
    fail_on_difference: bool,
    changes: bool,
    xlsx: bool,
    output: Path | None,
    **options: Any,
) -> int:
    """CANDIDATE against REFERENCE: a verdict per metric, and where the step time went.

    Both are folders of runs, or traces. Of two traces, kernels, operators and collectives are matched and
    listed by what changed most, on the terminal and in changes.csv. The report is written to
    CANDIDATE/comparison, or beside a trace file, unless --output says where.
    """
    runs = (reference, candidate)
    labels = _labels(runs, label)
    folder = output or report_folder(candidate, "comparison")
    if xlsx:
        from aorta.report.output.changes import load_openpyxl

        load_openpyxl()  # before anything is read
    status = _report(runs, labels, folder, dict(options), tuple(labels), fail_on_difference)
    if changes:
        names = ("comm_rules", "step_kernel", "step_period", "cache")
        reading = trace_reading(*(options[name] for name in names))
        text = _changes(runs, labels, folder, reading, options["jobs"], xlsx)
        if text and not options["as_json"]:
            with output_of_verdict():
                click.echo(f"\n{text}")
    return status


def _changes(
    runs: Sequence[Path],
    labels: Sequence[str],
    output: Path,
    reading: "Reading",
    jobs: int | None,
    xlsx: bool,
) -> str:
    """What changed between two traces, written into output; '' where one of the two is no trace."""
    from aorta.report.judge.trace_changes import trace_changes
    from aorta.report.load.open import usual_jobs
    from aorta.report.output.changes import changes_text, write_csv, write_xlsx
    from aorta.traces.inventory import rank_inventory
    from aorta.traces.sources import map_ranks, open_source, recognise

    if "records" in map(recognise, runs):
        return ""
    inventory = partial(rank_inventory, reading=reading)
    sides = [
        list(map_ranks(inventory, open_source(run, partial=True), jobs=jobs or usual_jobs([run])))
        for run in runs
    ]
    changed = trace_changes(*sides)
    write_csv(changed, output / "changes.csv")
    if xlsx:
        write_xlsx(changed, output / "changes.xlsx")
    return changes_text(changed, labels)


def trace_reading(
    comm_rules: Path | None = None,
    step_kernel: str | None = None,
    step_period: int | None = None,
    cache: bool = True,
) -> "Reading":
    """How traces are read. comm_rules: file of aorta.traces.classify.load_rules."""
    from aorta.traces.classify import COMM_RULES, load_rules
    from aorta.traces.reading import Reading
    from aorta.traces.steps import StepRule

    rules = COMM_RULES if comm_rules is None else load_rules(comm_rules)
    return Reading(rules=rules, cache=cache, steps=StepRule(step_kernel, step_period))


def _report(
    runs: Sequence[Path],
    labels: list[str],
    output: Path,
    options: dict[str, Any],
    sides: tuple[str, ...] = (),
    fail_on_difference: bool = False,
) -> int:
    open_page = options.pop("open_page")
    status = write_and_print(
        runs, labels, output, sides=sides, fail_on_difference=fail_on_difference, **options
    )
    if open_page:
        open_in_browser(output)
    return status


def write_and_print(
    runs: Sequence[Path],
    labels: Sequence[str],
    output: Path,
    *,
    sides: Sequence[str] = (),
    fail_on_difference: bool = False,
    as_json: bool = False,
    warmup: int | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    comm_rules: Path | None = None,
    step_kernel: str | None = None,
    step_period: int | None = None,
    cache: bool = True,
    steps: str | None = None,
    ranks: str | None = None,
    **outputs: Any,
) -> int:
    """Write the report of runs into output, print it, and return the exit code.

    sides: labels of the reference and the candidate, where two of the runs are compared. comm_rules,
    step_kernel, step_period, cache: for runs that are traces (trace_reading). steps, ranks: as on the command
    line. outputs: other fields of aorta.report.write.Outputs.
    """
    from aorta.causes.lines import causes_lines
    from aorta.parallel_map import usable_cores
    from aorta.report.write import Outputs, write_report

    reference, candidate = sides or (None, None)
    with progress_bar() as progress:
        written = write_report(
            runs,
            labels,
            output,
            reference,
            candidate,
            warmup=warmup,
            jobs=jobs,
            dask=dask,
            progress=progress,
            reading=trace_reading(comm_rules, step_kernel, step_period, cache),
            outputs=Outputs(
                steps=step_span(steps), ranks=rank_set(ranks), jobs=jobs or usable_cores(), **outputs
            ),
            explain=causes_lines,
        )
    with output_of_verdict():
        if as_json:
            click.echo((output / "summary.json").read_text(), nl=False)
        else:
            click.echo(written.text)
    if written.exit_status == FINE and fail_on_difference:
        return _status_of_difference(written.report.comparison)
    return written.exit_status


def _status_of_difference(comparison: Any) -> int:
    verdict = None if comparison is None else comparison.metrics["step_ms"].verdict
    if verdict in (None, "no difference seen", "not judged"):
        return FINE
    return CANNOT_TELL if verdict == "cannot tell" else VIOLATED


def report_folder(run: Path, name: str = "report") -> Path:
    """Where the report of a run goes: into its folder; of a trace file: beside it."""
    if run.is_dir():
        return run / name
    stem = run.name.split(".")[0] or run.name
    return run.parent / f"{stem}_{name}"


def _labels(runs: Sequence[Path], explicit: Sequence[str]) -> list[str]:
    """Given labels, else the folders' names; with as many of their parents as tell them apart."""
    if explicit:
        if len(explicit) != len(runs):
            raise ReportError(f"{len(runs)} runs need as many --label, got {len(explicit)}")
        return list(explicit)
    parts = [Path(os.path.abspath(run)).parts for run in runs]  # resolve() raises where links go in circles
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["-".join(part.strip("/") for part in path[-depth:]) for path in parts]
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
    """Progress on stderr where a person watches; gone when it is done."""
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
