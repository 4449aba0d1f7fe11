"""Reads and judges runs, writes the files of their report, and returns the text to print.

`aorta report`, `aorta compare` and `aorta run` call write_report; notebooks call make_report, which writes
nothing.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aorta.account.judge.compare import MATTERS, compare
from aorta.account.judge.gate import Gate, check_budget, junit_xml, load_budget, markdown
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.ranks import Shown, traced
from aorta.account.judge.summary import summary
from aorta.account.load.open import load_run
from aorta.account.model import Causes, Dataset, Progress, Report
from aorta.account.numbers import counted
from aorta.errors import FINE, ReportError, printable
from aorta.files import write_whole
from aorta.page.table import comparison_lines, comparison_table, dataset_table, differences_list
from aorta.processes import forked
from aorta.records.files import kernels_name
from aorta.records.reader import read_kernel_names
from aorta.records.writer import write_json
from aorta.timeline.ratio import Spread

if TYPE_CHECKING:
    from aorta.traces.steps import Reading

OWN_FILES = (
    "*_timeline.png",
    "comparison.png",
    "report.html",
    "*.perfetto.json.gz",
    "steps.parquet",
)
"""Files that a report writes beside summary.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Outputs that are written beside summary.json."""

    page: bool = True
    perfetto: bool = True
    parquet: bool = True
    ranks: Collection[int] | None = None
    """Ranks in the Perfetto trace and the page's timeline. None: all of a small run, the telling ones of a
    large one."""
    steps: tuple[int, int] | None = None
    """The first and the last global step, of the same."""
    budget: Path | str | None = None
    junit: Path | str | None = None
    markdown: Path | str | None = None
    long: bool = False
    """Print the long form of a comparison: both reports, every metric."""
    jobs: int = 1
    """Processes that write them at the same time: copies of this one (aorta.processes), which holds no
    thread that works and no GPU then."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of write_report."""

    text: str
    """Text for the terminal: the answer first, the paths last."""
    report: Report
    gate: Gate | None

    @property
    def exit_status(self) -> int:
        return FINE if self.gate is None else self.gate.exit_status


# ---- from runs to a report -----------------------------------------------------------------------


def make_report(
    log_dirs: Sequence[Path | str],
    labels: Sequence[str],
    reference: str | None = None,
    candidate: str | None = None,
    *,
    warmup: int | None = None,
    matters: float = MATTERS,
    run_spread: float | None = None,
    jobs: int | None = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    reading: "Reading | None" = None,
    explain: Callable[[Dataset], Causes] | None = None,
) -> Report:
    """Read and judge the runs; nothing is written.

    Runs that share a label are judged together. reference and candidate default to the first and the second
    of two labels; with one label, or more than two, there is no comparison unless they are given. explain:
    finds the causes of a dataset's losses (aorta.why.causes.rank).
    """
    _check_labels(log_dirs, labels)
    names = list(dict.fromkeys(labels))
    reference, candidate = _sides(names, reference, candidate)
    runs = [
        judge(load_run(path, label, jobs=jobs, dask=dask, progress=progress, reading=reading), warmup)
        for path, label in zip(log_dirs, labels, strict=True)
    ]
    datasets = {name: dataset(name, [run for run in runs if run.label == name]) for name in names}
    comparison = None
    if reference is not None and candidate is not None:
        comparison = compare(
            datasets[reference],
            datasets[candidate],
            matters,
            None if run_spread is None else Spread(run_spread, origin="given"),
        )
    causes = {} if explain is None else {label: explain(single) for label, single in datasets.items()}
    return Report(datasets, comparison, summary([*datasets.values()], comparison, causes), causes)


def _check_labels(log_dirs: Sequence[Path | str], labels: Sequence[str]) -> None:
    if not log_dirs:
        raise ReportError("no run was given")
    if len(log_dirs) != len(labels):
        raise ReportError(f"every run needs its --label: got {len(log_dirs)} runs and {len(labels)} --label")
    for label in labels:
        if not label.strip() or not label.isprintable() or set(label) & set("/\\") or len(label) > 100:
            raise ReportError(f"--label {label!r} cannot be part of a file name")
    pairs_given: set[tuple[str, str]] = set()
    for path, label in zip(log_dirs, labels, strict=True):
        pair = (label, os.path.realpath(path))  # Path.resolve raises where links go in circles
        if pair in pairs_given:
            raise ReportError(f"{path} is given twice with label {label}: give two different runs")
        pairs_given.add(pair)


def _sides(
    labels: Sequence[str], reference: str | None, candidate: str | None
) -> tuple[str | None, str | None]:
    for option, value in (("--reference", reference), ("--candidate", candidate)):
        if value is not None and value not in labels:
            raise ReportError(f"{option} {value} is not one of the labels: {', '.join(labels)}")
    if reference is not None and reference == candidate:
        raise ReportError(f"--reference and --candidate are both {reference}")
    if len(labels) == 2:
        opposite = {labels[0]: labels[1], labels[1]: labels[0]}
        if candidate is not None:
            reference = reference or opposite[candidate]
        reference = reference or labels[0]
        return reference, candidate or opposite[reference]
    if (reference is None) != (candidate is None):
        raise ReportError("a comparison needs both --reference and --candidate")
    return reference, candidate


# ---- from a report to files ----------------------------------------------------------------------


def write_report(
    log_dirs: Sequence[Path | str],
    labels: Sequence[str],
    output: Path | str,
    reference: str | None = None,
    candidate: str | None = None,
    *,
    outputs: Outputs | None = None,
    progress: Progress | None = None,
    **judging: Any,
) -> Written:
    """Make the report and write it into the folder output. judging: other arguments of make_report.

    Every input is read and judged before the first file is written, and no file is ever there in part. What
    an earlier report left there under other names stays, and the text names it.
    """
    outputs = outputs or Outputs()
    output = Path(output)
    _check_output(output)
    limits = None if outputs.budget is None else load_budget(outputs.budget)
    if outputs.junit is not None and limits is None:
        raise ReportError("--junit reports on a budget: give --budget too")
    if outputs.markdown is not None and limits is None and len(log_dirs) == 1:
        raise ReportError("--markdown reports on a budget or a comparison: give --budget too")
    report = make_report(log_dirs, labels, reference, candidate, progress=progress, **judging)
    shown = Shown(outputs.ranks, outputs.steps)
    for single in report.datasets.values():
        shown.check(single.first)
    gate = None if limits is None else check_budget(limits, report)
    small: dict[Path, Callable[[Path], object]] = {}
    if outputs.junit is not None and gate is not None:
        small[Path(outputs.junit)] = _saved(junit_xml(gate))
    if outputs.markdown is not None:
        small[Path(outputs.markdown)] = _saved(markdown(report, gate).encode())
    large = [
        {output / name: write for name, write in group.items()}
        for group in _large_outputs(report, outputs, shown)
    ]
    files = {path: write for group in [*large, small] for path, write in group.items()}
    written_names = [path.name for path in files if path.parent == output]
    summary_path = output / "summary.json"
    small[summary_path] = lambda path: write_json(path, report.summary | {"files": written_names})
    files[summary_path] = small[summary_path]
    for path in files:
        if os.path.isdir(path):  # unlike Path.is_dir, where rights are missing it is for writing to say so
            raise ReportError(f"cannot write {path}: it is a folder")
    # The large files are made in parallel, in copies of this process that share what was read. summary.json
    # is written after them: a folder that has it has everything that it lists.
    calls = [partial(_write, group) for group in large]
    for number, _ in enumerate(forked(calls, outputs.jobs), start=1):
        if progress is not None:
            progress("writing", number, len(calls))
    _write(small)
    left_out = _left_out(report, shown) if outputs.perfetto else ()
    if report.comparison is None or outputs.long:
        wrote = [f"wrote {path}" for path in files]
    else:
        first = next((path for path in files if path.suffix == ".html"), summary_path)
        beside = f" and {counted(len(files) - 1, 'other file')}" if len(files) > 1 else ""
        wrote = [f"wrote {first}{beside}"]
    ends = "\n".join([*left_out, *wrote, *_older_files(output, files)])
    texts = [*_texts(report, gate, outputs.long), ends]
    return Written(printable("\n\n".join(texts)), report, gate)


def _check_output(output: Path) -> None:
    """Refuse an impossible output folder before anything is read, which may take long."""
    try:
        if output.exists() and not output.is_dir():
            raise ReportError(f"--output {output} is a file, not a folder")
        nearest = next(parent for parent in (output, *output.absolute().parents) if parent.exists())
    except OSError as error:
        raise ReportError(f"--output {output} cannot be made: {error.strerror}") from error
    if not nearest.is_dir():
        raise ReportError(f"--output {output} cannot be made: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ReportError(f"--output {output} cannot be written: {nearest} is not writable")


def _large_outputs(
    report: Report, outputs: Outputs, shown: Shown
) -> Iterator[dict[str, Callable[[Path], object]]]:
    """Files that take long to write. The files of one item are written in turn, the items in parallel."""
    if outputs.parquet:
        from aorta.page.parquet import write_parquet

        yield {"steps.parquet": partial(write_parquet, report=report)}
    if outputs.perfetto:
        for label, single in report.datasets.items():
            yield {f"{label}.perfetto.json.gz": partial(_write_perfetto, label, single, shown)}
    if outputs.page:
        from aorta.page.html import write_page

        yield {"report.html": partial(write_page, report=report, shown=shown)}


def _write_perfetto(label: str, single: Dataset, shown: Shown, path: Path) -> None:
    from aorta.records.perfetto import write_perfetto

    run = single.first
    ranks, steps, _ = traced(single.first, shown)
    names = {rank: read_kernel_names(run.path / kernels_name(rank)) for rank in ranks}
    records = (
        record
        for rank in ranks
        for record in run.records(rank)
        if steps is None or record.global_step in steps
    )
    write_perfetto(path, label, records, offset_ns=run.clock_offset_ns, kernel_names=names)


def _saved(data: bytes) -> Callable[[Path], None]:
    return lambda path: write_whole(path, data)


def _write(files: dict[Path, Callable[[Path], object]]) -> None:
    for path, write in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            raise ReportError(f"cannot write {path}: {error.strerror}") from error


# ---- what is printed -----------------------------------------------------------------------------


def _texts(report: Report, gate: Gate | None, is_long: bool) -> Iterator[str]:
    """The verdict, what differs, the tables."""
    if gate is not None:
        yield gate.text
    comparison = report.comparison
    if comparison is not None:
        damaged = [
            f"{label}: {judged.damage}"
            for label, single in report.datasets.items()
            for judged in single.runs
            if judged.damage is not None
        ]
        yield "\n".join([*damaged, comparison.headline])
        differences = differences_list(comparison)
        if differences:
            yield differences
        if not is_long:
            yield "\n".join(comparison_lines(comparison)).strip("\n")
            return
    for single in report.datasets.values():
        yield dataset_table(single, report.causes.get(single.label), with_changes=len(report.datasets) == 1)
    if comparison is not None:
        yield comparison_table(comparison)


def _left_out(report: Report, shown: Shown) -> Iterator[str]:
    """A line per trace that does not hold the whole run."""
    for label, single in report.datasets.items():
        part = traced(single.first, shown)[2]
        if part:
            yield f"{label}.perfetto.json.gz holds {part}; --draw-ranks and --draw-steps choose others"


def _older_files(output: Path, files: dict[Path, Callable[[Path], object]]) -> list[str]:
    """A line for what an earlier report left in the folder under names that this one does not use."""
    left = sorted(
        path.name
        for pattern in OWN_FILES
        for path in output.glob(pattern)
        if path not in files and not path.name.startswith(".")
    )
    return [f"left in place, not part of this report: {', '.join(left)}"] if left else []
