"""Tables of runs and comparisons as HTML of a notebook's cell."""

from html import escape

from aorta.report.model import Comparison, Dataset
from aorta.report.output.table import comparison_table, dataset_table


def run_html(dataset: Dataset) -> str:
    """The report's table of one run."""
    return _preformatted(dataset_table(dataset))


def comparison_html(comparison: Comparison) -> str:
    """The headline and the table of a comparison."""
    return f"<p><b>{escape(comparison.headline)}</b></p>" + _preformatted(comparison_table(comparison))


def _preformatted(text: str) -> str:
    return f'<pre style="line-height: 1.25; overflow-x: auto">{escape(text)}</pre>'
