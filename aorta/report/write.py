"""Reads runs, writes their report, and returns what to print."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from aorta.errors import ReportError
from aorta.records.writer import write_json
from aorta.report.figure import timeline_png
from aorta.report.load import load_run
from aorta.report.summary import judge, summary
from aorta.report.table import comparison_table, dataset_table


def write_report(
    log_dirs: Sequence[Path | str],
    labels: Sequence[str],
    output: Path | str,
    reference: str | None = None,
    candidate: str | None = None,
    *,
    warmup: int | None = None,
) -> str:
    """Write summary.json and a {label}_timeline.png per run to output; the text for the terminal.

    Every input is read before the first file is written. reference and candidate default to the
    first and the second of two runs; with one run, or more than two, there is no comparison unless
    they are given.
    """
    output = Path(output)
    _check_labels(log_dirs, labels)
    reference, candidate = _sides(labels, reference, candidate)
    if output.exists() and not output.is_dir():
        raise ReportError(f"--output {output} is a file, not a folder")

    judged = [judge(load_run(folder, label), warmup) for folder, label in zip(log_dirs, labels, strict=True)]
    content = summary(judged, reference, candidate)
    texts = [dataset_table(one) for one in judged]
    if reference is not None and candidate is not None:
        texts.append(comparison_table(content["comparison"], reference, candidate))
    pictures = {f"{one.dataset.label}_timeline.png": timeline_png(one) for one in judged}

    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, data in pictures.items():
            _write_bytes(output / name, data)
        write_json(output / "summary.json", content)
    except OSError as error:
        raise ReportError(f"cannot write the report to {output}: {error.strerror}") from error
    written = "\n".join(f"wrote {output / name}" for name in (*pictures, "summary.json"))
    return "\n\n".join([*texts, written])


def _check_labels(log_dirs: Sequence[Path | str], labels: Sequence[str]) -> None:
    if not log_dirs:
        raise ReportError("no --log-dir was given")
    if len(log_dirs) != len(labels):
        raise ReportError(
            f"every --log-dir needs its --label: got {len(log_dirs)} --log-dir and {len(labels)} --label"
        )
    for label in labels:
        if not label.strip() or not label.isprintable() or set(label) & set("/\\") or len(label) > 100:
            raise ReportError(f"--label {label!r} cannot be part of a file name")
        if labels.count(label) > 1:
            raise ReportError(f"--label {label} is given twice")


def _sides(
    labels: Sequence[str], reference: str | None, candidate: str | None
) -> tuple[str | None, str | None]:
    for option, value in (("--reference", reference), ("--candidate", candidate)):
        if value is not None and value not in labels:
            raise ReportError(f"{option} {value} is none of the labels: {', '.join(labels)}")
    if reference is not None and reference == candidate:
        raise ReportError(f"--reference and --candidate are both {reference}")
    if len(labels) == 2:
        others = {labels[0]: labels[1], labels[1]: labels[0]}
        if candidate is not None:
            reference = reference or others[candidate]
        reference = reference or labels[0]
        return reference, candidate or others[reference]
    if (reference is None) != (candidate is None):
        raise ReportError("a comparison needs both --reference and --candidate")
    return reference, candidate


def _write_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
