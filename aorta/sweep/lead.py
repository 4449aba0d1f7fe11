"""What a sweep keeps of the numbers that lead in a trial, and what it calls them.

aorta.results.leading has what leads where trials are set against each other.
"""

from collections.abc import Iterable

from aorta.report.judge.leading import BESIDE_WORDS, LED, WORDS, accuracy, is_raw_part, metric_of
from aorta.report.metrics import meaning
from aorta.report.model import Dataset, Lead
from aorta.results.leading import ACCURACY
from aorta.results.schema import Metric, Point

SOURCE = "events calibrated by kernels"


def is_of_two_kinds(name: str) -> bool:
    """Whether a metric may be calibrated."""
    return name in LED["calibrated"]


def accuracies(trial: Dataset, names: Iterable[str]) -> dict[str, Metric]:
    """accuracy.<name>: differences below it, in the unit of name, calibration does not tell."""
    found = {name: accuracy(name, [trial]) for name in names}
    return {
        f"{ACCURACY}{name}": Metric(value=value, unit=meaning(name).unit, source=SOURCE)
        for name, value in found.items()
        if value is not None
    }


def word(point: Point, name: str, lead: Lead) -> str:
    """What kind of number taken() is; '' where there is only one."""
    if metric_of(lead, name) != name:
        return WORDS[lead]
    has_kinds = is_of_two_kinds(name) or is_raw_part(name)
    return BESIDE_WORDS["calibrated"] if has_kinds and point.source == "events" else ""
