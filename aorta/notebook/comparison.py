"""aorta.compare: the candidate against the reference, with verdicts."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from aorta.errors import ReportError
from aorta.notebook.run import LoadedRun, load
from aorta.report.judge.compare import compare as compare_datasets
from aorta.report.judge.judged import dataset
from aorta.report.judge.leading import settled
from aorta.report.model import Comparison
from aorta.report.output.table import comparison_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "unit",
    "reference",
    "candidate",
    "ratio",
    "difference",
    "detectable",
    "p_adjusted",
    "verdict",
    "reason",
)


def compare(reference: LoadedRun | Path | str, candidate: LoadedRun | Path | str) -> "RunComparison":
    """Compare two runs: loaded ones, or paths. ReportError where both are the same run."""
    runs = [run if isinstance(run, LoadedRun) else load(run) for run in (reference, candidate)]
    if runs[0].path.resolve() == runs[1].path.resolve():
        raise ReportError(f"{runs[0].path} is both the reference and the candidate")
    labels = [run.label for run in runs]
    if labels[0] == labels[1]:
        labels = ["reference", "candidate"]
    datasets = settled(
        {label: dataset(label, [run.judged]) for label, run in zip(labels, runs, strict=True)}, *labels
    )
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
        """A row per metric: both values, ratio, difference, the smallest detectable difference, verdict."""
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

    def plot(self) -> "Figure":
        """Parts of the step time's change, as a matplotlib figure."""
        from aorta.report.output.figure import comparison_figure

        return comparison_figure(self.comparison)

    def __repr__(self) -> str:
        return f"{self.headline}\n\n{comparison_table(self.comparison)}"

    def _repr_html_(self) -> str:
        from aorta.notebook.html import comparison_html

        return comparison_html(self.comparison)
