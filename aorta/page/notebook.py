"""Runs and traces as pandas frames, for notebooks: aorta.load(path), aorta.compare(a, b)."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from aorta.account.judge.compare import compare as compare_datasets
from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.summary import summary
from aorta.account.load.open import load_run
from aorta.account.model import Comparison, Dataset, Report, Run
from aorta.errors import ReportError, TraceError
from aorta.page.table import comparison_table, dataset_table
from aorta.page.write import make_report
from aorta.records.files import TRACE_FOLDER
from aorta.records.schema import StepRecord
from aorta.traces.classify import COMM_RULES, CommRule, load_rules
from aorta.traces.steps import Reading

NESTED = ("streams", "active_segments", "collectives", "not_measured")
"""Fields of a record that `steps` leaves out."""
KERNEL_COLUMNS = ("rank", "kind", "op", "name", "stream", "start_ms", "end_ms", "duration_ms")
COLUMNS = (
    "unit",
    "reference",
    "candidate",
    "ratio",
    "difference",
    "p_adjusted",
    "verdict",
    "reason",
)


def load(
    path: Path | str,
    label: str | None = None,
    *,
    warmup: int | None = None,
    comm_rules: Path | str | None = None,
) -> "LoadedRun":
    """The run or the traces at path. ReportError, RecordError or TraceError where there is nothing to read.

    warmup: steps to leave out of statistics, instead of the report's rule.
    comm_rules: YAML file of kernels of traces that are communication, by name.
    """
    path = Path(path)
    name = label if label is not None else path.resolve().name or "run"
    rules = load_rules(comm_rules)
    return LoadedRun(path, judge(load_run(path, name, reading=Reading(rules)), warmup), warmup, rules)


class LoadedRun:
    """A loaded run. Its frames are made when they are first used."""

    def __init__(
        self,
        path: Path,
        judged: Run,
        warmup: int | None = None,
        rules: Sequence[CommRule] = COMM_RULES,
    ) -> None:
        self._rules = rules
        self.path = path
        self.judged = judged
        self.warmup = warmup

    @property
    def label(self) -> str:
        return self.judged.label

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row per rank and step: rank, global_step, step_ms, loss, overlap's numbers (comm_ms, exposed_ms,
        ...), memory.* and device.*; is_warmup marks the steps that statistics leave out."""
        frame = pd.DataFrame([_row(record) for _, record in self._records()])
        if not frame.empty:
            first = self.judged.global_step[: self.judged.num_warmup].tolist()
            frame.insert(3, "is_warmup", frame["global_step"].isin(first))
        return frame

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """A row per collective of a rank: rank, global_step, op, group, bytes, start_ms, end_ms, duration_ms,
        busbw_gb_s, ... Times are relative to the step's start. Steps without details have no rows."""
        rows: list[dict[str, Any]] = []
        for rank, record in self._records():
            for call in record.collectives or ():
                row = msgspec.structs.asdict(call)
                row["num_ranks"] = len(row.pop("ranks"))
                row["num_members"] = len(row.pop("members") or ())
                timed = call.start_ms is not None and call.end_ms is not None
                duration = call.end_ms - call.start_ms if timed else None  # type: ignore[operator]
                rows.append({"rank": rank, "global_step": record.global_step, **row, "duration_ms": duration})
        return pd.DataFrame(rows)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """A row per kernel or copy of the traces: those at the path, or those beside the run's records.
        Times are relative to the rank's first activity. Empty where there is no trace of a device."""
        frames = [_kernels(trace) for trace in self._traces()]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(KERNEL_COLUMNS))

    @cached_property
    def dataset(self) -> Dataset:
        """Dataset that reports print of the run."""
        return dataset(self.label, [self.judged])

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of summary.json for the run."""
        document: dict[str, Any] = summary([self.dataset], None)["datasets"][self.label]
        return document

    def report(self) -> Report:
        """The report of the run alone: what the page and the table are made from."""
        return make_report([self.path], [self.label], warmup=self.warmup)

    def __repr__(self) -> str:
        return dataset_table(self.dataset)

    def _repr_html_(self) -> str:
        return _preformatted(dataset_table(self.dataset))

    def _records(self) -> Iterator[tuple[int, StepRecord]]:
        run = self.judged
        for rank in run.ranks:
            for record in run.records(rank):
                yield rank, record

    def _traces(self) -> Iterator[Any]:
        from aorta.traces.sources import is_records, open_source

        folder = self.path / TRACE_FOLDER if is_records(self.path) else self.path
        if not folder.exists():
            return
        try:
            source = open_source(folder)
            for rank in source.ranks:
                yield source.read(rank, rules=self._rules)
        except TraceError as error:
            if "was the GPU traced" not in str(error) and "no trace" not in str(error):
                raise ReportError(str(error)) from None


def _row(record: StepRecord) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in NESTED:
            continue
        if name == "overlap":
            row |= _flat(value, "")
        elif isinstance(value, msgspec.Struct):
            row |= _flat(value, f"{name}.")
        else:
            row[name] = value
    order = ("rank", "global_step", "source")
    return {name: row[name] for name in order} | {n: v for n, v in row.items() if n not in order}


def _flat(struct: msgspec.Struct, prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            flat |= {f"{prefix}{name.removesuffix('_by_op')}.{key}": number for key, number in value.items()}
        else:
            flat[prefix + name] = value
    return flat


def _kernels(trace: Any) -> pd.DataFrame:
    from aorta.timeline.types import Kind

    timeline = trace.timeline
    kinds = [Kind(value).name.lower() for value in timeline.kind.tolist()]
    return pd.DataFrame(
        {
            "rank": trace.rank,
            "kind": kinds,
            "op": [timeline.ops[index] for index in timeline.op],
            "name": [timeline.names[index] for index in timeline.name],
            "stream": [timeline.streams[index] for index in timeline.stream],
            "start_ms": timeline.start_ms,
            "end_ms": timeline.end_ms,
            "duration_ms": timeline.end_ms - timeline.start_ms,
        }
    )


def compare(reference: LoadedRun | Path | str, candidate: LoadedRun | Path | str) -> "RunComparison":
    """Compare two runs: loaded ones, or paths. ReportError where both are the same run."""
    runs = [run if isinstance(run, LoadedRun) else load(run) for run in (reference, candidate)]
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise ReportError(f"{runs[0].path} is both the reference and the candidate")
    labels = [run.label for run in runs]
    if labels[0] == labels[1]:
        labels = ["reference", "candidate"]
    datasets = {label: dataset(label, [run.judged]) for label, run in zip(labels, runs, strict=True)}
    return RunComparison(compare_datasets(datasets[labels[0]], datasets[labels[1]]))


class RunComparison:
    """Two runs against each other."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    @property
    def headline(self) -> str:
        """The answer in one line."""
        return self.comparison.headline

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per metric: both values, ratio, difference, p-value, verdict."""
        rows = {
            name: {column: getattr(metric, column) for column in COLUMNS}
            for name, metric in self.comparison.metrics.items()
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=list(COLUMNS))

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of each metric that was judged."""
        return {
            name: metric.verdict
            for name, metric in self.comparison.metrics.items()
            if metric.verdict != "not judged"
        }

    def __repr__(self) -> str:
        return f"{self.headline}\n\n{comparison_table(self.comparison)}"

    def _repr_html_(self) -> str:
        table = _preformatted(comparison_table(self.comparison))
        return f"<p><b>{escape(self.headline)}</b></p>{table}"


def _preformatted(text: str) -> str:
    return f'<pre style="line-height: 1.25; overflow-x: auto">{escape(text)}</pre>'
